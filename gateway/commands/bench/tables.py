"""What was measured, as Markdown, and into which place of a page it goes.

show(of_soak(report), "soak", Path("docs/performance.md"))      # between <!-- soak: begin --> and <!-- soak: end -->
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import typer

from adapters.errors import GoodgateError
from gateway.commands.bench.soak import Report


class NoPlace(GoodgateError):
    code = "no_place"


def show(text: str, name: str, page: Path | None) -> None:
    """Print it, and put it into the page, where one is named."""
    typer.echo(text)
    if page is not None:
        page.write_text(placed(page.read_text(), name, text))


def placed(page: str, name: str, text: str) -> str:
    """The page with the text between the marks of that name. Pure."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    head, found, rest = page.partition(begin)
    _, closed, tail = rest.partition(end)
    if not (found and closed):
        raise NoPlace(f"The page has no place for {name}; put the lines {begin} and {end} where it shall stand.")
    return f"{head}{begin}\n{text}\n{end}{tail}"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    return "\n".join(_line(cells) for cells in (head, ["---"] * len(head), *rows))


def _line(cells: Sequence[object]) -> str:
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def of_soak(report: Report) -> str:
    outcomes = sorted({outcome for counts in report.outcomes.values() for outcome in counts})
    kinds = table(
        ["clients", *outcomes],
        ([kind, *(counts.get(outcome, 0) for outcome in outcomes)] for kind, counts in report.outcomes.items()),
    )
    held = table(
        ["what must hold", "found", ""],
        ([claim.name, claim.found, "yes" if claim.holds else "**no**"] for claim in report.claims),
    )
    refusals = ", ".join(f"{name} {number}" for name, number in sorted(report.refusals.items()))
    share = report.samples[-1].cpu_s / report.minutes / 60
    return (
        f"{report.date}, {report.machine}: {report.minutes:g} minutes at {report.rate:g} requests a second, "
        f"{len(report.faults)} faults. The gateway used {share:.0%} of a core "
        f"and at most {max(each.rss_mb for each in report.samples):.0f} MB.\n\n{held}\n\n{kinds}\n\n"
        f"Refusals by status and code: {refusals or 'none'}."
    )
