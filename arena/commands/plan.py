"""goodgate plan: from what races have proven to how many replicas of which engine; what a device holds of a model."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console

from adapters.config import goodgate_home
from adapters.models.model_store import DEFAULT_MODEL
from arena.commands.common import Failure, Misuse, errors, finite

if TYPE_CHECKING:
    from arena.evidence.document import Evidence
    from arena.load.traces import Trace
    from arena.planning.load import Load
    from arena.planning.needs import Needs
    from arena.planning.traffic import FactsOf

COMMAND = "goodgate plan"


class Dtype(Enum):
    bfloat16 = "bfloat16"
    float32 = "float32"


app = typer.Typer(
    help="Plan from what races have proven, and from what a device can hold and read.",
    epilog="Example: goodgate plan traffic --evidence evidence.json --rate 12",
    no_args_is_help=True,
)

Ttft = Annotated[
    float, typer.Option("--ttft-ms", min=1, max=1e9, callback=finite, help="The limit on the first token.")
]
Tpot = Annotated[
    float, typer.Option("--tpot-ms", min=0.1, max=1e9, callback=finite, help="The limit on each token after it.")
]
Percentile = Annotated[
    float, typer.Option(min=50, max=99.99, callback=finite, help="So many percent of the requests must meet both.")
]
Headroom = Annotated[
    float, typer.Option(min=0, max=10, callback=finite, help="Plan for arrivals so much faster; 0.2 is 20 %.")
]


@app.command()
def traffic(
    evidence: Annotated[list[Path], typer.Option(help="A race's folder or an evidence.json; can be repeated.")],
    ttft_ms: Ttft = 1000,
    tpot_ms: Tpot = 60,
    percentile: Percentile = 99,
    rate: Annotated[
        float | None,
        typer.Option(min=0.001, max=1e6, callback=finite, help="Requests a second; a trace is replayed at it."),
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="A trace of the Azure, BurstGPT or Mooncake format.")] = None,
    cv: Annotated[
        float,
        typer.Option(
            min=0.05, max=20, callback=finite, help="Without a trace: how uneven gaps are; 1 is Poisson, 3 is bursty."
        ),
    ] = 1.0,
    model: Annotated[
        str | None, typer.Option(help="The model. Default: the only one that there is evidence of.")
    ] = None,
    prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Mean length; a trace tells its own.")] = None,
    output_tokens: Annotated[int | None, typer.Option(min=1, help="Mean length; a trace tells its own.")] = None,
    shared: Annotated[
        float | None,
        typer.Option(min=0, max=1, callback=finite, help="The share of prompt tokens that earlier prompts began with."),
    ] = None,
    needs: Annotated[
        str | None, typer.Option(help="Capabilities, with commas between: structured_output, tools, logprobs, ...")
    ] = None,
    air_gapped: Annotated[bool, typer.Option("--air-gapped", help="Nothing may leave the site.")] = False,
    hardware: Annotated[str, typer.Option(help="What it has to run on: cpu, cuda, rocm, ...")] = "",
    licence: Annotated[str, typer.Option(help="SPDX ids of licences that will do, with commas between.")] = "",
    called: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=ENGINE", help="Which engine a contender with a name of its own is."),
    ] = None,
    headroom: Headroom = 0.2,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON on stdout.")] = False,
) -> None:
    """Say which engine carries a load within its limits and with how many replicas, how sure that is, and why not the
    others.

    Example: goodgate plan traffic --evidence evidence.json --rate 12 --ttft-ms 1000 --tpot-ms 60

    Example: goodgate plan traffic --evidence runs/monday --trace conv.csv --needs structured_output --air-gapped
    """
    from arena.evidence.document import Limits
    from arena.planning import tables
    from arena.planning.traffic import plan
    from arena.race.config import fingerprint, host_facts

    with errors(COMMAND):
        known = _evidence(evidence)
        load = _load(rate, trace, cv, prompt_tokens, output_tokens, shared)
        chosen = _model(known, model)
        answer = plan(
            load,
            Limits(ttft_ms=ttft_ms, tpot_ms=tpot_ms, percentile=percentile),
            [entry for entry in known.entries if entry.model == chosen],
            _facts(called or []),
            needs=_needs(needs, air_gapped=air_gapped, hardware=hardware, licence=licence),
            hosts=known.hosts,
            now=datetime.now(UTC),
            here=fingerprint(host_facts()),
            headroom=headroom,
        )
        if as_json:
            typer.echo(json.dumps(msgspec.to_builtins(answer), indent=2))
        else:
            console = Console()
            console.print(tables.table(answer))
            for line in [*tables.why(answer), *tables.refusals(answer)]:
                console.print(line, highlight=False, markup=False, soft_wrap=True)
        if not answer.choices:
            raise Failure("No engine that there is evidence of can carry this; the reasons are with each of them.")


@app.command()
def backtest(
    traces: Annotated[list[Path], typer.Argument(metavar="TRACE...", help="Traces.", show_default=False)],
    goodput: Annotated[
        float, typer.Option(min=0.001, max=1e6, callback=finite, help="What one replica carries, requests a second.")
    ] = 4.0,
    rates: Annotated[str, typer.Option(help="Mean rates to replay them at, with commas between.")] = "4,16,64",
    parts: Annotated[
        int, typer.Option(min=2, max=1000, help="Parts of each trace; each meets the plan of those before it.")
    ] = 10,
    ttft_ms: Ttft = 1000,
    percentile: Percentile = 99,
    headroom: Headroom = 0.2,
) -> None:
    """How often a plan made on the beginning of a trace holds on what comes next, beside mean rate / goodput. Prints a
    table in Markdown.

    Example: goodgate plan backtest AzureLLMInferenceTrace_conv.csv --goodput 4 --rates 4,16,64
    """
    from arena.evidence.document import Limits
    from arena.planning import tables
    from arena.planning.backtest import backtest as run
    from arena.planning.load import recorded

    with errors(COMMAND):
        limits = Limits(ttft_ms=ttft_ms, tpot_ms=1.0, percentile=percentile)  # a queue knows no TPOT
        rows = []
        for path in traces:
            trace = _trace(path)
            for rate in _rates(rates):
                load = recorded(trace, rate_rps=rate)
                folds = run(load, goodput_rps=goodput, limits=limits, parts=parts, headroom=headroom)
                if not folds:
                    raise Misuse(f"{path}: its parts have too few requests to judge by; give it fewer --parts.")
                rows.append((path.stem, rate, folds))
                typer.echo(f"{path.stem} at {rate:g}/s: {sum(f.held for f in folds)} of {len(folds)}", err=True)
    typer.echo(tables.backtest_markdown(rows))


@app.command()
def capacity(
    model: Annotated[
        str, typer.Option(help="A name in the model store, or the path of a GGUF file or folder.")
    ] = DEFAULT_MODEL,
    context: Annotated[int, typer.Option(min=1, help="Tokens of each text, prompt and answer together.")] = 2048,
    device: Annotated[
        list[str] | None,
        typer.Option(help="here, h200, h100, a100, l40s, rtx4090 or l4; can be repeated. Default: here."),
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Of the weights, and of a cache that is not in int8.")] = Dtype.bfloat16,
    memory_share: Annotated[
        float, typer.Option(min=0.01, max=1, callback=finite, help="Of the device's memory, for weights and cache.")
    ] = 0.9,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON on stdout.")] = False,
) -> None:
    """Say how many texts fit beside a model's weights and how fast a device can decode at best, and what other forms
    of the KV cache would change.

    Example: goodgate plan capacity --context 4096 --device here --device h200
    """
    from adapters.models.model_files import HERE, capacities
    from adapters.models.model_store import ModelStore, is_store_name
    from arena.planning import tables

    with errors(COMMAND):
        path = ModelStore(goodgate_home()).get(model).path if is_store_name(model) else Path(model).expanduser()
        found = capacities(path, device or [HERE], num_tokens=context, memory_share=memory_share, dtype=dtype.value)
        if as_json:
            rows = [{"cache": form, **asdict(on), **asdict(fits)} for on, form, fits in found]
            typer.echo(json.dumps(rows, indent=2))
        else:
            Console().print(tables.capacity(found, model=model, context=context))


def _evidence(paths: list[Path]) -> Evidence:
    """Expired entries stay: the plan says of each why it does not count."""
    from arena.evidence.document import Evidence, EvidenceError
    from arena.evidence.files import read
    from arena.evidence.merge import merge

    try:
        parts = [read(path) for path in paths]
    except EvidenceError as error:
        raise Misuse(str(error)) from error
    merged = merge(parts, now=datetime.min.replace(tzinfo=UTC))
    for sentence in merged.told:
        typer.echo(sentence, err=True)
    return Evidence(hosts=merged.evidence.hosts, entries=merged.evidence.entries)


def _model(known: Evidence, wanted: str | None) -> str:
    names = sorted({entry.model for entry in known.entries})
    if wanted is None and len(names) == 1:
        return names[0]
    if wanted not in names:
        raise Misuse(f"There is evidence of {', '.join(names) or 'no model'}; choose one with --model.")
    return wanted


def _load(
    rate: float | None,
    trace: Path | None,
    cv: float,
    prompt_tokens: int | None,
    output_tokens: int | None,
    shared: float | None,
) -> Load:
    from arena.judging.shape import UNTOLD, Shape
    from arena.planning.load import recorded, steady

    if (prompt_tokens is None) != (output_tokens is None):
        raise Misuse("Give --prompt-tokens and --output-tokens, or neither.")
    if shared is not None and prompt_tokens is None:
        raise Misuse("--shared says something of lengths that are not told; give --prompt-tokens and --output-tokens.")
    shape = None
    if prompt_tokens is not None and output_tokens is not None:
        shape = Shape(prompt_tokens=prompt_tokens, output_tokens=output_tokens, cached_share=shared or 0.0)
    if trace is not None:
        if cv != 1.0:
            raise Misuse("--cv is for arrivals that are drawn; a --trace has its own.")
        return recorded(_trace(trace), rate_rps=rate, shape=shape)
    if rate is None:
        raise Misuse("Say what the load is: --rate in requests a second, or a --trace.")
    return steady(rate_rps=rate, cv=cv, shape=shape or UNTOLD)


def _trace(path: Path) -> Trace:
    from arena.load.spec import ScenarioError
    from arena.load.traces import parse_trace
    from arena.planning.queue import LEAST_ARRIVALS
    from arena.race.config import text_of

    try:
        trace = parse_trace(text_of(path), path.name)
    except ScenarioError as error:
        raise Misuse(str(error)) from error
    if len(trace) < LEAST_ARRIVALS:
        raise Misuse(f"{path} has {len(trace)} requests, and a plan needs at least {LEAST_ARRIVALS}; give it more.")
    for sentence in trace.words():
        typer.echo(sentence, err=True)
    return trace


def _rates(text: str) -> list[float]:
    try:
        rates = [float(word) for word in text.split(",")]
    except ValueError as error:
        raise Misuse(f"--rates {text!r} is not a list of numbers with commas between.") from error
    if not all(0 < rate < 1e6 for rate in rates):
        raise Misuse(f"--rates {text!r}: every rate must be above 0.")
    return rates


def _needs(needs: str | None, *, air_gapped: bool, hardware: str, licence: str) -> Needs:
    from arena.planning.catalogue import capability
    from arena.planning.needs import Needs

    try:
        wanted = tuple(capability(name.strip()) for name in (needs or "").split(",") if name.strip())
    except ValueError as error:
        raise Misuse(str(error)) from error
    licences = tuple(name.strip() for name in licence.split(",") if name.strip())
    return Needs(capabilities=wanted, air_gapped=air_gapped, hardware=hardware, licences=licences)


def _facts(called: list[str]) -> FactsOf:
    """Facts by a contender's name: its own where it is called as an engine is."""
    from arena.planning.catalogue import facts_of

    names = {}
    for value in called:
        name, _, engine = value.partition("=")
        if facts_of(engine) is None:
            raise Misuse(f"--called {value!r}: there is no engine {engine!r}; `goodgate engines` lists them.")
        names[name] = engine
    return lambda engine: facts_of(names.get(engine, engine))
