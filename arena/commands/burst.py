"""goodgate arena burst: a quick look at raw speed."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console

from adapters.models.model_store import DEFAULT_MODEL
from arena.commands.common import Misuse, errors
from arena.commands.contenders import (
    EngineOption,
    engine_options,
    launched,
    names_in,
    refuse_duplicates,
    refuse_idle_options,
)

app = typer.Typer()


@app.command()
def burst(
    engines: Annotated[
        str | None, typer.Option(help="Engines to start, with commas between. Default: all that are installed.")
    ] = None,
    model: Annotated[str, typer.Option(help="A model of `goodgate models list`.")] = DEFAULT_MODEL,
    concurrency: Annotated[str, typer.Option(help="Requests at once, several depths with commas between.")] = "1,8,32",
    words: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Words of each prompt; 120 are about 130 tokens.")
    ] = 120,
    tokens: Annotated[int, typer.Option(min=2, max=1_000_000, help="Output tokens of each request.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="Bursts of each depth, each time an engine is up.")] = 3,
    passes: Annotated[
        int, typer.Option(min=1, max=1000, help="How often each engine is started, in alternating order.")
    ] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON on stdout.")] = False,
    option: EngineOption = None,
) -> None:
    """A quick look at raw speed: bursts of requests at engines that take turns. No verdict: it knows no latency target.

    Example: goodgate arena burst --engines native,openvino,vllm --concurrency 1,8,32
    """
    from arena.load.burst import BurstShape, burst_table, render

    with errors():
        depths = tuple(_count(depth) for depth in concurrency.split(","))
        names = names_in(engines) if engines is not None else []
        chosen = engine_options(option or [])
        refuse_duplicates(names)
        contenders = launched(names, model, chosen)
        refuse_idle_options(chosen, contenders)
        shape = BurstShape(concurrency=depths, prompt_words=words, output_tokens=tokens, rounds=rounds, passes=passes)
        starters = {contender.name: contender.process for contender in contenders if contender.process}
        console = Console(stderr=True)
        with console.status("starting") as status:
            rows = asyncio.run(burst_table(starters, shape, say=status.update))
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        Console().print(render(rows))


def _count(text: str) -> int:
    if not re.fullmatch(r"\s*0*[1-9][0-9]{0,3}\s*", text):
        raise Misuse(f"--concurrency {text!r} is not a whole number from 1 to 9999.")
    return int(text)
