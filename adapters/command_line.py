"""What the commands about engines share: how options are written, and how expected failures leave.

with reported_errors():
    launch(name, options=parse_options(["threads=2"]), ...)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NoReturn

import typer
from rich.console import Console

from adapters.errors import GoodgateError
from adapters.launching.launch import describe_os_error
from adapters.registry import UnknownEngine
from adapters.yaml_text import YamlError, read_yaml

errors = Console(stderr=True, markup=False, highlight=False)  # `goodgate[native]` is no style


def parse_options(pairs: list[str]) -> dict[str, Any]:
    """`["threads=2", "enforce_eager=true"]` -> `{"threads": 2, "enforce_eager": True}`, values read as YAML scalars."""
    options = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise typer.BadParameter(f"{pair!r} is not of the form key=value.", param_hint="--option")
        try:
            options[key] = read_yaml(value)
        except YamlError:
            raise typer.BadParameter(f"{value!r} is not a value; quote it.", param_hint="--option") from None
    return options


@contextlib.contextmanager
def reported_errors() -> Iterator[None]:
    """Expected failures as one message on stderr: exit code 2 for a wrong name, 1 for what went wrong."""
    try:
        yield
    except UnknownEngine as error:
        fail(str(error), code=2)
    except GoodgateError as error:
        fail(error.message)
    except OSError as error:
        fail(f"{describe_os_error(error)}. Goodgate keeps its files in GOODGATE_HOME: name a folder that it can use.")


def fail(message: str, code: int = 1) -> NoReturn:
    errors.print(message, style="red", soft_wrap=True)
    raise typer.Exit(code)
