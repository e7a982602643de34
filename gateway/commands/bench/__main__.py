"""`python -m gateway.commands.bench`: the same as `goodgate bench-gateway`."""

import sys

from adapters.errors import GoodgateError
from gateway.commands.bench.cli import app

if __name__ == "__main__":
    try:
        app()
    except GoodgateError as error:
        sys.exit(error.message)
