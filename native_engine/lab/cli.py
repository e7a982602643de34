"""`goodgate lab`: classic experiments on the native engine, each with a figure, tables and a paragraph.

Beside picture.py the only module of `native_engine` that reaches beyond it: for the model store, and for the words that
tell a machine. Nothing of the engine imports the lab.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from adapters.config import goodgate_home
from adapters.models.model_store import DEFAULT_MODEL, ModelStore, is_store_name
from native_engine.lab.catalogue import QUESTIONS, load

if TYPE_CHECKING:
    from native_engine.lab.workbench import Workbench

FAILED = 1
# Holds what experiments need, and what the model's rope tables are made for.
KV_CACHE_MIB = 128

app = typer.Typer(
    no_args_is_help=True,
    help="Classic experiments on the native engine: each leaves a figure, tables and what to see in them.",
    epilog="Example: goodgate lab kv-cache --quick",
)

Model = Annotated[str, typer.Option(help="A name in the model store, or the path of a GGUF file or folder.")]
Out = Annotated[Path, typer.Option(metavar="DIR", help="Where the figure, the tables and the JSON go.")]
Threads = Annotated[
    int | None, typer.Option(min=1, help="Cores to compute with; one is steadier where others work. Default: all.")
]
Quick = Annotated[bool, typer.Option("--quick", help="A smaller form: less than half a minute each.")]


@app.command("list")
def list_experiments() -> None:
    """List the experiments and their questions.

    Example: goodgate lab list
    """
    for name, question in QUESTIONS.items():
        typer.echo(f"{name:16}{question}")


@app.command("all")
def run_all(
    model: Model = DEFAULT_MODEL, out: Out = Path("lab"), quick: Quick = False, threads: Threads = None
) -> None:
    """Run every experiment, and write a page of them all.

    Example: goodgate lab all --out docs/labs
    """
    _run(list(QUESTIONS), model, out, is_quick=quick, threads=threads)


@app.command()
def draw(out: Out = Path("lab")) -> None:
    """Draw and write down again what a folder's experiments have measured, without running them.

    Example: goodgate lab draw --out docs/labs
    """
    with _errors():
        from native_engine.lab import files

        every = list(files.left_in(out))
        if not every:
            raise ValueError(f"{out} holds no experiment; run one with --out {out} first.")
        for ran in every:
            files.write(out, ran)
        files.write_index(out)


def _command(name: str, question: str) -> Callable[..., None]:
    def run(
        model: Model = DEFAULT_MODEL, out: Out = Path("lab"), quick: Quick = False, threads: Threads = None
    ) -> None:
        _run([name], model, out, is_quick=quick, threads=threads)

    run.__doc__ = f"{question}\n\nExample: goodgate lab {name} --out lab"
    return run


for _name, _question in QUESTIONS.items():
    app.command(_name)(_command(_name, _question))


def _run(names: Sequence[str], model: str, out: Path, *, is_quick: bool, threads: int | None) -> None:
    """Load the model once, and run, draw and write each experiment in turn: what has ended is there, whatever fails."""
    console = Console(stderr=True, markup=False, highlight=False)
    with _errors(), console.status("loading the model") as status:
        out.mkdir(parents=True, exist_ok=True)
        bench = _bench(model, is_quick=is_quick, threads=threads, say=status.update)
        for name in names:
            from native_engine.lab import files

            started = time.monotonic()
            command = _command_line(name, model, is_quick=is_quick, threads=threads)
            ran = files.Ran(name, _facts(model, command, bench), load(name).measure(bench))
            files.write(out, ran)
            files.write_index(out)
            console.print(f"{out / name}.svg, .md and .json are written, after {time.monotonic() - started:.0f} s")
            typer.echo(f"{ran.title}\n\n{ran.shown.says}\n")


def _bench(model: str, *, is_quick: bool, threads: int | None, say: Callable[[str], None]) -> Workbench:
    """The model, loaded and warm."""
    home = goodgate_home()
    path = ModelStore(home).get(model).path if is_store_name(model) else Path(model).expanduser()
    from native_engine.config import EngineConfig
    from native_engine.lab.workbench import Workbench
    from native_engine.loading import make_model
    from native_engine.weights import open_checkpoint

    config = EngineConfig(kv_cache_mib=KV_CACHE_MIB, num_threads=threads)
    kernels = home / "cache" / "native" if os.access(home, os.W_OK) else None
    bench = Workbench(
        make_model(open_checkpoint(path), config, kernel_cache=kernels), config, is_quick=is_quick, say=say
    )
    say("warming up")
    bench.warm_up()
    return bench


def _command_line(name: str, model: str, *, is_quick: bool, threads: int | None) -> str:
    chosen = "" if model == DEFAULT_MODEL else f" --model {model}"
    chosen += "" if threads is None else f" --threads {threads}"
    return f"goodgate lab {name}{chosen}{' --quick' if is_quick else ''}"


def _facts(model: str, command: str, bench: Workbench) -> dict[str, str]:
    """What a reader must know to judge the figures. Names no user and no host."""
    from arena.race.config import host_facts

    host = host_facts()
    return {
        "machine": f"{host['cpu']}, {host['cores']} cores, {host['memory_gib']:g} GiB",
        "threads": str(bench.config.num_threads or host["cores"]),
        "model": f"{model if is_store_name(model) else Path(model).name}, {bench.config.dtype}",
        "version": f"goodgate {version('goodgate')}, torch {version('torch')}",
        "command": command,
        "load before": f"{host['load_1m']:g}",
        "date": datetime.now(UTC).date().isoformat(),
    }


@contextmanager
def _errors() -> Iterator[None]:
    """Known errors as one sentence on stderr. Those of the store are told by `goodgate` itself."""
    try:
        yield
    except ImportError as error:
        from adapters.models.model_files import not_installed

        raise not_installed(error) from error
    except OSError as error:
        _fail(f"{error.strerror or error}: {error.filename or 'the output folder'}; choose another --out or --model.")
    except KeyboardInterrupt:
        _fail("stopped; what had ended is written.")
    except Exception as error:
        from native_engine.errors import EngineError

        if not isinstance(error, EngineError | ValueError):
            raise
        _fail(str(error))


def _fail(sentence: str) -> None:
    typer.echo(f"goodgate lab: {sentence}", err=True)
    raise typer.Exit(FAILED)
