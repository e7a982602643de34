"""What the arena's commands have in common: exit codes, errors as one sentence, and the folders of races."""

from __future__ import annotations

import asyncio
import math
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
    except BrokenPipeError:
        raise  # nobody reads what is said, which typer ends quietly
    except OSError as error:
        typer.echo(f"{command}: {os_words(error)}.", err=True)
        raise typer.Exit(FAILED) from error
    except (KeyboardInterrupt, asyncio.CancelledError) as error:
        typer.echo(f"{command}: stopped.", err=True)
        raise typer.Exit(FAILED) from error


def os_words(error: OSError) -> str:
    place = f": {error.filename}" if error.filename else ""
    return f"{error.strerror or error}{place}"


def finite(value: float | None) -> float | None:
    """The callback of every option that is a float: NaN may pass a range, and infinity one without an upper end."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is no number to count with.")
    return value


def reported(folder: Path) -> str:
    return f"what had ended is kept, and `goodgate arena report {folder}` shows it"


@contextmanager
def racing_in(kept: str) -> Iterator[None]:
    """Around a race: what breaks it off from outside ends it in a sentence that says what is kept and how to see it."""
    import duckdb

    from arena.load.spool import SpoolError
    from arena.records.schema import StoreError

    try:
        yield
    except BrokenPipeError:
        raise
    except StoreError as error:
        raise Failure(str(error)) from error
    except (duckdb.Error, SpoolError) as error:
        raise Failure(f"The race broke off: {str(error).splitlines()[0].rstrip('.')}; {kept}.") from error
    except OSError as error:
        raise Failure(f"The race broke off: {os_words(error)}; {kept}.") from error
    except (KeyboardInterrupt, asyncio.CancelledError) as error:
        raise Failure(f"Stopped; {kept}.") from error


def end_by_signals() -> None:
    """Have SIGTERM, and the end of the terminal unless that is ignored (nohup), cancel this task as Ctrl-C does."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)


@contextmanager
def open_store(folder: Path, *, settle: bool = False) -> Iterator[Store]:
    """The store of a race that is over, for reading. Judging writes nothing into it.

    `settle`: first bring in order what a killed race has left, and say on stderr what was done.
    """
    import duckdb

    from arena.load.spool import UNREADABLE, SpoolError
    from arena.records.schema import StoreError
    from arena.records.sense import refuse_nonsense
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
            refuse_nonsense(store, path)
            yield store
    except (StoreError, SpoolError) as error:
        raise Failure(str(error)) from error
    except (duckdb.Error, *UNREADABLE) as error:  # not a store of ours, or one that was tampered with
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
