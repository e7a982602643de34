"""The `goodgate` command: composes the sub-commands of the rooms, and imports only the room that was asked for.

An error of ours leaves here as its one sentence on stderr and exit status 1, and so does a file that cannot be used;
misuse of the command line is status 2.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import io
import signal
import sys
from typing import Annotated

import typer

from adapters.errors import GoodgateError

HELP = """One OpenAI-compatible endpoint in front of many inference engines, and an arena that ranks them on goodput.

Example: goodgate models pull && goodgate serve, and elsewhere: goodgate chat 'Why is the sky blue?'
"""

INTERRUPTED = 128 + signal.SIGINT

# The module whose `app` serves a word of the command line. A room with `None` puts its commands at the top level.
ROOMS: dict[str, str | None] = {
    "gateway.commands.cli": None,
    "gateway.records.ledger_cli": None,
    "gateway.tenants.keys_cli": "keys",
    "gateway.commands.bench.cli": "bench-gateway",
    "adapters.cli": "engines",
    "adapters.models.models_cli": "models",
    "arena.commands.cli": "arena",
    "arena.commands.plan": "plan",
    "native_engine.lab.cli": "lab",
}
TOP_LEVEL = dict.fromkeys(("serve", "reload", "chat", "doctor", "prefixes"), "gateway.commands.cli") | dict.fromkeys(
    ("usage", "why"), "gateway.records.ledger_cli"
)


def build(words: list[str]) -> typer.Typer:
    """The command for this command line: the one room that its first word names, or every room for help and typos."""
    root = typer.Typer(
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        add_completion=False,
        help=HELP,
    )
    groups = {name: module for module, name in ROOMS.items() if name}
    asked = {**groups, **TOP_LEVEL}.get(words[0] if words else "")
    root.callback()(common_options)
    for module in [asked] if asked else ROOMS:
        root.add_typer(importlib.import_module(module).app, name=ROOMS[module])
    return root


def say_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"goodgate {importlib.metadata.version('goodgate')}")
        raise typer.Exit


def common_options(
    _: Annotated[
        bool, typer.Option("--version", callback=say_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Options of `goodgate` itself, before any sub-command."""


def main() -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without our characters shows others, and ends nothing
    try:
        build(sys.argv[1:])()
    except GoodgateError as error:
        sys.exit(error.message)
    except KeyboardInterrupt:  # while the rooms are loaded: a running command has its own end
        sys.exit(INTERRUPTED)
    except OSError as error:
        if error.filename is None:
            raise  # not about a file, so not foreseen: the traceback is needed
        sys.exit(f"{error.filename}: {error.strerror}. GOODGATE_HOME names the folder where Goodgate keeps its files.")


if __name__ == "__main__":
    main()
