"""What the arena's commands have in common: exit codes, errors as one sentence, and the folders of races."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from adapters.errors import GoodgateError
from adapters.registry import UnknownEngine
from arena.load.spec import ScenarioError

if TYPE_CHECKING:
    from arena.records.store import Store

OK, FAILED, MISUSE = 0, 1, 2

RunFolder = Annotated[Path, typer.Argument(metavar="DIR", help="The output folder of a race.", show_default=False)]


class Misuse(Exception):
    """One sentence that says what to do differently. Exit code 2."""


class Failure(Exception):
    """One sentence that says what went wrong. Exit code 1."""


@contextmanager
def errors(command: str = "goodgate arena") -> Iterator[None]:
    """Known errors as one sentence on stderr, after the command's name, and an exit code."""
    try:
        yield
    except (Misuse, UnknownEngine, ScenarioError) as error:
        typer.echo(f"{command}: {error}", err=True)
        raise typer.Exit(MISUSE) from error
    except Failure as error:
        typer.echo(f"{command}: {error}", err=True)
        raise typer.Exit(FAILED) from error
    except GoodgateError as error:
        typer.echo(f"{command}: {error.message}", err=True)
        raise typer.Exit(FAILED) from error
    except OSError as error:
        typer.echo(f"{command}: {error.strerror or error}: {error.filename or 'the output folder'}.", err=True)
        raise typer.Exit(FAILED) from error
    except (KeyboardInterrupt, asyncio.CancelledError) as error:
        typer.echo(f"{command}: stopped.", err=True)
        raise typer.Exit(FAILED) from error


@contextmanager
def open_store(folder: Path, *, settle: bool = False) -> Iterator[Store]:
    """The store of a race that is over, for reading. Judging writes nothing into it.

    `settle`: first bring in order what a killed race has left, and say on stderr what was done.
    """
    import duckdb

    from arena.load.spool import SpoolError
    from arena.records.schema import StoreError
    from arena.records.store import Store

    path = folder / "arena.duckdb"
    if not path.is_file():
        raise Misuse(f"{folder} holds no race (there is no {path}); give the --out folder of `goodgate arena run`.")
    try:
        if settle:
            from arena.race.recovery import settle as settled

            for words in settled(folder):
                typer.echo(words, err=True)
        with Store(path, read_only=True) as store:
            if not store.query("SELECT run_id FROM runs"):
                raise Failure(f"{path} holds no run: the race ended before it began.")
            yield store
    except (StoreError, SpoolError) as error:
        raise Failure(str(error)) from error
    except (duckdb.Error, msgspec.DecodeError) as error:  # not a store of ours, or one that was tampered with
        raise Failure(f"{path} cannot be read: {str(error).splitlines()[0]}") from error


def new_folder(folder: Path) -> Path:
    """An empty folder: a race takes nobody's files away."""
    if (folder / "arena.duckdb").exists():
        raise Misuse(f"{folder} already holds a race; choose another --out.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_empty = not any(folder.iterdir())
    except OSError as error:
        raise Misuse(f"{folder} cannot be made: {error.strerror or error}.") from error
    if not is_empty:
        raise Misuse(f"{folder} is not empty; choose another --out.")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise Misuse(f"{folder} cannot be written to; choose another --out.")
    return folder
