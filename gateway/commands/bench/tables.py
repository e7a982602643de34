"""What was measured, as Markdown, and into which place of a page it goes.

show(of_soak(report), "soak", Path("docs/performance.md"))      # between <!-- soak: begin --> and <!-- soak: end -->
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import typer

from adapters.marked_page import placed
from gateway.commands.bench import cost, linear, memory, soak, streams
from gateway.commands.bench.verdict import Claim


class Measured(Protocol):
    """When and where something was measured."""

    @property
    def date(self) -> str: ...

    @property
    def machine(self) -> str: ...


def show(text: str, name: str, page: Path | None) -> None:
    """Print it, and put it into the page, where one is named."""
    typer.echo(text)
    if page is not None:
        page.write_text(placed(page.read_text(), name, text))


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    return "\n".join(_line(cells) for cells in (head, ["---"] * len(head), *rows))


def _line(cells: Sequence[object]) -> str:
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def of_claims(claims: Iterable[Claim]) -> str:
    return table(
        ["what shall hold", "found", ""],
        ([claim.name, claim.found, "yes" if claim.holds else "**missed**"] for claim in claims),
    )


def of_cost(report: cost.Report) -> str:
    rows = [
        [
            row.name,
            *(
                cell
                for each in row.timings
                for cell in (f"{each.p50_ms:.2f} ms", f"{each.rps:,.0f}", f"{each.cpu_us:,.0f} us")
            ),
            f"{row.rss_mb:.0f} MB",
        ]
        for row in report.rows
    ]
    head = [
        "gateway",
        "1 connection: p50",
        "req/s",
        "CPU a request",
        "16 connections: p50",
        "req/s",
        "CPU a request",
        "resident",
    ]
    missing = "".join(
        f"\n\n{name} was not here: `goodgate bench-gateway cost --install-peers` installs `{package}`."
        for name, package in report.missing.items()
    )
    return _measured(report, table(head, rows), cost.claims(report)) + missing


def of_streams(report: streams.Report) -> str:
    rows = [
        [
            row.way,
            f"over {row.spread_s:g} s" if row.spread_s else "all at once",
            f"{row.first_p50_ms:.1f} ms",
            f"{row.first_p99_ms:.1f} ms",
            f"{row.tokens_per_s:,.0f}",
            f"{row.cpu_us:.0f} us",
            f"{row.client_share:.0%}",
        ]
        for row in report.rows
    ]
    head = [
        "way",
        f"{report.number} arrivals",
        "first token p50",
        "p99",
        "tokens/s",
        "its CPU a token",
        "clients, of a core",
    ]
    return _measured(report, table(head, rows), streams.claims(report))


def of_memory(found: memory.Memory) -> str:
    row = [f"{found.before_mb:.1f} MB", f"{found.after_mb:.1f} MB", found.files_before, found.files_after]
    head = ["before", f"after {found.requests:,} requests", "open files before", "after"]
    return _measured(found, table(head, [row]), memory.claims_of_memory(found))


def of_start(found: memory.Start) -> str:
    row = [f"{found.seconds:.2f} s", f"{found.cpu_s:.2f} s"]
    return _measured(found, table(["to the first answer", "CPU time"], [row]), memory.claims_of_start(found))


def of_linear(report: linear.Report) -> str:
    rows = [
        [row.name, *(f"{size >> 10:,} KiB: {ms:.0f} ms" for size, ms in zip(row.sizes, row.cpu_ms, strict=True))]
        for row in report.rows
    ]
    return _measured(report, table(["CPU time for", *["size and time"] * 3], rows), linear.claims(report))


def _measured(report: Measured, rows: str, claims: Iterable[Claim]) -> str:
    return f"{report.date}, {report.machine}.\n\n{rows}\n\n{of_claims(claims)}"


def of_soak(report: soak.Report) -> str:
    outcomes = sorted({outcome for counts in report.outcomes.values() for outcome in counts})
    kinds = table(
        ["clients", *outcomes],
        ([kind, *(counts.get(outcome, 0) for outcome in outcomes)] for kind, counts in report.outcomes.items()),
    )
    refusals = ", ".join(f"{name} {number}" for name, number in sorted(report.refusals.items()))
    most_mb = max(each.rss_mb for each in report.samples)
    share = report.samples[-1].cpu_s / report.minutes / 60
    return (
        f"{report.date}, {report.machine}: {report.minutes:g} minutes at {report.rate:g} requests a second, "
        f"{len(report.faults)} faults. The gateway used {share:.0%} of a core "
        f"and at most {most_mb:.0f} MB.\n\n{of_claims(report.claims)}\n\n{kinds}\n\n"
        f"Refusals by status and code: {refusals or 'none'}."
    )
