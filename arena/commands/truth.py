"""goodgate arena truth: what the load generator's own figures are worth on this machine."""

from __future__ import annotations

import asyncio
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from arena.commands.common import Failure, Misuse, errors, finite

if TYPE_CHECKING:
    from arena.judging.load_truth import TruthRow
    from arena.load.truth import Truth

app = typer.Typer()

DENSE_RPS = 100.0  # requests a second of the row that is asked for by its chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorRow:
    """Medians over the rounds, in milliseconds."""

    rate_rps: float
    chunks_per_s: float
    requests: int
    ttft_p50_ms: float
    ttft_p99_ms: float
    gap_p50_ms: float
    gap_p99_ms: float
    lag_p99_ms: float
    cpu: float
    foreign_cpu: float | None


@app.command()
def truth(
    rates: Annotated[str, typer.Option(help="Requests a second, several with commas between.")] = "10,30,100",
    chunks: Annotated[
        float,
        typer.Option(
            min=0,
            max=1_000_000,
            callback=finite,
            help="And one row of so many tokens a second in all; 0 leaves it out.",
        ),
    ] = 10_000.0,
    duration: Annotated[
        float, typer.Option(min=1, max=3600, callback=finite, help="Seconds of measuring, each cell.")
    ] = 10.0,
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="Cells of each rate, in alternating order.")] = 3,
    tokens: Annotated[int, typer.Option(min=2, max=10_000, help="Tokens of each answer.")] = 20,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Load processes that share each cell.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print the tables as JSON on stdout.")] = False,
) -> None:
    """Measure the load generator's own errors against an engine that remembers when each token left it.

    The first table is the floor under every latency that a race claims here. The second has cases that load generators
    get wrong; the command fails if one of them comes out wrong.

    Example: goodgate arena truth --rates 10,100 --rounds 3
    """
    with errors():
        wanted = [_rate(rate) for rate in rates.split(",")]
        console = Console(stderr=as_json)
        with console.status("starting") as status:
            figures = _error_rows(wanted, chunks, duration, rounds, tokens, workers, status.update)
            cases = asyncio.run(_trial(status.update))
        if as_json:
            typer.echo(json.dumps({"errors": list(map(asdict, figures)), "cases": list(map(asdict, cases))}, indent=2))
        else:
            console.print(error_table(figures))
            console.print(case_table(cases))
        if wrong := [row.case for row in cases if not row.is_right]:
            raise Failure(f"It came out wrong: {'; '.join(wrong)}.")


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0.1 <= rate <= 2_000:
        raise Misuse(f"--rates {text!r} is not a rate between 0.1 and 2000 requests a second.")
    return rate


async def _trial(say: Callable[[str], None]) -> list[TruthRow]:
    from arena.judging.load_truth import trial

    return await trial(say)


def _error_rows(
    rates: Sequence[float],
    chunks: float,
    duration_s: float,
    rounds: int,
    tokens: int,
    workers: int,
    say: Callable[[str], None],
) -> list[ErrorRow]:
    shapes = [(rate, tokens) for rate in rates]
    if chunks:
        shapes.append((DENSE_RPS, max(2, round(chunks / DENSE_RPS))))
    found: dict[int, list[Truth]] = {index: [] for index in range(len(shapes))}
    for number in range(1, rounds + 1):
        order = range(len(shapes)) if number % 2 else reversed(range(len(shapes)))
        for index in order:
            rate, count = shapes[index]
            say(f"round {number} of {rounds}: {rate:g} requests/s of {count} tokens")
            found[index].append(_measure(rate, count, duration_s, workers))
    return [_medians(rate, rate * count, found[index]) for index, (rate, count) in enumerate(shapes)]


def _measure(rate_rps: float, tokens: int, duration_s: float, workers: int) -> Truth:
    from arena.load.loadgen import Crew
    from arena.load.truth import measure_cell

    crew = Crew(workers=workers) if workers > 1 else None
    itl_ms = 20.0 if tokens <= 40 else 10.0
    truth = asyncio.run(
        measure_cell(rate_rps=rate_rps, duration_s=duration_s, ttft_ms=200, itl_ms=itl_ms, tokens=tokens, crew=crew)
    )
    if truth.aborted or not truth.requests:
        raise Failure(truth.aborted or "No request was answered; give --duration more seconds.")
    return truth


def _medians(rate_rps: float, chunks_per_s: float, truths: Sequence[Truth]) -> ErrorRow:
    from arena.load.truth import percentile

    def middle(values: Callable[[Truth], list[float]], percent: float) -> float:
        return statistics.median(percentile(values(truth), percent) for truth in truths)

    foreign = [truth.foreign_cpu for truth in truths if truth.foreign_cpu is not None]
    return ErrorRow(
        rate_rps=rate_rps,
        chunks_per_s=chunks_per_s,
        requests=sum(truth.requests for truth in truths),
        ttft_p50_ms=middle(lambda truth: truth.ttft_errors_ms, 50),
        ttft_p99_ms=middle(lambda truth: truth.ttft_errors_ms, 99),
        gap_p50_ms=middle(lambda truth: truth.gap_errors_ms, 50),
        gap_p99_ms=middle(lambda truth: truth.gap_errors_ms, 99),
        lag_p99_ms=middle(lambda truth: truth.send_lags_ms, 99),
        cpu=statistics.median(truth.cpu for truth in truths),
        foreign_cpu=statistics.median(foreign) if foreign else None,
    )


def error_table(rows: Sequence[ErrorRow]) -> Table:
    table = Table(title="The client's own errors, ms: medians of the rounds", title_justify="left")
    headings = ("requests/s", "tokens/s", "n", "TTFT p50", "TTFT p99", "gap p50", "gap p99", "lag p99", "client CPU")
    for heading in (*headings, "others' CPU"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            f"{row.rate_rps:g}",
            f"{row.chunks_per_s:g}",
            str(row.requests),
            *(f"{value:.3f}" for value in (row.ttft_p50_ms, row.ttft_p99_ms, row.gap_p50_ms, row.gap_p99_ms)),
            f"{row.lag_p99_ms:.3f}",
            f"{row.cpu:.0%}",
            "-" if row.foreign_cpu is None else f"{row.foreign_cpu:.0%}",
        )
    return table


def case_table(rows: Sequence[TruthRow]) -> Table:
    table = Table(title="What load generators get wrong", title_justify="left")
    for heading in ("case", "claimed", "true", ""):
        table.add_column(heading)
    for row in rows:
        table.add_row(row.case, row.claimed, row.truth, "right" if row.is_right else "[red]wrong[/]")
    return table
