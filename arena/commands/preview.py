"""goodgate arena preview: what a scenario would send, and when, without sending it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from arena.commands.common import Misuse, errors, finite

if TYPE_CHECKING:
    from arena.load.preview import Preview, Spread
    from arena.race.config import LoadedScenario

app = typer.Typer()

BARS = "▁▂▃▄▅▆▇█"
MOST_BARS = 60


@app.command()
def preview(
    scenario: Annotated[str, typer.Argument(help="A scenario's name, or a path to its YAML file.")],
    rate: Annotated[
        float | None,
        typer.Option(
            min=0.001, max=100_000, callback=finite, help="Requests a second; without it, the search's first rate."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="The race's seed.")] = 0,
    replicate: Annotated[int, typer.Option(min=0, max=1_000_000, help="Which repeat of the rate.")] = 0,
    request: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Print the body of the N-th request, from 0, and nothing else."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="The scenario's short form.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON on stdout.")] = False,
) -> None:
    """Show what one cell of a scenario would send, and when: arrivals, lengths, what prompts share. Nothing is sent.

    Example: goodgate arena preview conversations --rate 4

    Example: goodgate arena preview tools --request 0
    """
    import msgspec

    from arena.load.preview import preview as preview_of
    from arena.load.spec import ScenarioError
    from arena.load.workload import CellKey
    from arena.race.config import load_scenario
    from arena.race.planned import plan_cell

    with errors():
        try:
            loaded = load_scenario(scenario, quick=quick)
        except ScenarioError as error:
            raise Misuse(str(error)) from error
        if loaded.scenario.load.closed and request is None:
            raise Misuse(f"{scenario} is a closed loop, whose requests have no times; --request N shows what they say.")
        rate_rps = loaded.scenario.search.start_rps if rate is None else rate
        rung = loaded.scenario.settings.nearest_rung(rate_rps)
        key = CellKey(seed, rung, replicate)
        plan = plan_cell(loaded.scenario, loaded.material, key, cell_id="preview", rate_rps=rate_rps)
        if request is not None:
            if request >= len(plan.requests):
                raise Misuse(f"--request {request}: this cell has {len(plan.requests)} requests.")
            typer.echo(msgspec.json.format(plan.requests[request].body, indent=2))
        elif as_json:
            typer.echo(json.dumps(msgspec.to_builtins(preview_of(plan)), indent=2))
        else:
            _print(loaded, preview_of(plan))


def _print(loaded: LoadedScenario, seen: Preview) -> None:
    from arena.load.describe import answer_words, arrival_words, prompt_words

    scenario, console = loaded.scenario, Console()
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, words in (
        ("arrivals", arrival_words(scenario.arrivals)),
        ("", bars(seen.per_second)),
        ("requests", f"{seen.warmup} to warm up, {seen.measured} measured, {seen.cooldown} to keep the load up"),
        ("rate", f"{seen.asked_rps:g} a second asked for, {seen.window_rps:.2f} drawn in the window"),
        ("trace", _trace_words(seen)),
        ("conversations", "" if seen.conversations is None else f"{seen.conversations} take part"),
        ("prompts", prompt_words(scenario.workload)),
        ("", _spread_words(seen.prompt_tokens)),
        ("answers", answer_words(scenario.workload)),
        ("", _spread_words(seen.output_tokens)),
        (
            "shared",
            f"{seen.shared:.0%} of the prompts' words began an earlier one of the cell; caches {scenario.cache}",
        ),
        ("plan", seen.sha256),
    ):
        if words:
            table.add_row(name, escape(words))
    console.print(f"[bold]{escape(scenario.title or scenario.name)}[/]", highlight=False)
    console.print(table, highlight=False)
    for sentence in loaded.material.told:
        console.print(escape(sentence), highlight=False, soft_wrap=True)


def bars(per_second: tuple[int, ...]) -> str:
    """Arrivals over time; where a cell is long, several seconds are one bar."""
    width = -(-len(per_second) // MOST_BARS)
    sums = [sum(per_second[place : place + width]) for place in range(0, len(per_second), max(1, width))]
    most = max(sums, default=0) or 1
    drawn = "".join(BARS[(len(BARS) - 1) * count // most] for count in sums)
    return f"{drawn}  (a bar is {width} s, the highest {most})"


def _trace_words(seen: Preview) -> str:
    if seen.trace_speed is None:
        return ""
    return f"from row {seen.trace_row} on, {seen.trace_speed:.3g} times as fast as it was recorded"


def _spread_words(spread: Spread | None) -> str:
    if spread is None:
        return ""
    return f"mean {spread.mean:.0f} tokens, median {spread.p50}, p95 {spread.p95}, at most {spread.most}"
