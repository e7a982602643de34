"""A report as a table, and several of them as the Markdown of the documentation. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from adapters.probing.probe import Report, by_group
from adapters.probing.verdicts import MEANINGS, Verdict

STYLES = {
    Verdict.VERIFIED: "green",
    Verdict.NOT_SHOWN: "yellow",
    Verdict.CONTRADICTED: "bold red",
    Verdict.UNDECLARED: "cyan",
    Verdict.NOT_OFFERED: "dim",
}


def headline(report: Report) -> str:
    """Which engine it is, and how it was known to be that one."""
    told = f" ({report.recognised_by})" if report.recognised_by else ""
    context = f"context {report.max_model_len} tokens" if report.max_model_len else "context not told"
    return f"{report.engine} {report.version or '(version not told)'}{told}: {report.model}, {context}"


def timings(report: Report) -> str:
    ready = f"ready after {report.ready_s:.1f} s, " if report.ready_s is not None else ""
    return f"{ready}first token of the first request {_ms(report.first_token_s)}, then {_ms(report.ttft_s)} (median)"


def _ms(seconds: float | None) -> str:
    return "not seen" if seconds is None else f"{seconds * 1000:.0f} ms"


def tally(report: Report) -> str:
    counts = [(verdict, sum(each.verdict is verdict for each in report.results)) for verdict in Verdict]
    return ", ".join(f"{number} {verdict}" for verdict, number in counts if number)


def as_table(report: Report) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for heading in ("capability", "declared", "seen", "verdict"):
        table.add_column(heading, no_wrap=True)
    table.add_column("evidence", overflow="fold")
    for group, results in by_group(report.results):
        table.add_row(Text(group, style="bold"))
        for each in results:
            verdict = Text(each.verdict, style=STYLES[each.verdict])
            table.add_row(f"  {each.capability}", "yes" if each.declared else "-", each.seen, verdict, each.evidence)
    return table


# ------------------------------------------------------------------------------------------------------- documentation


def times_markdown(reports: Sequence[Report]) -> str:
    lines = [
        "| engine | version | ready after | first token of the first request | of later ones |",
        "|---|---|---|---|---|",
    ]
    for report in reports:
        ready = "-" if report.ready_s is None else f"{report.ready_s:.1f} s"
        first, later = _ms(report.first_token_s), _ms(report.ttft_s)
        lines.append(f"| `{report.engine}` | {report.version or '-'} | {ready} | {first} | {later} |")
    return "\n".join(lines)


def verdicts_markdown(reports: Sequence[Report]) -> str:
    """What the probe found, capability by engine. A report that lacks a row did not ask."""
    rows = dict.fromkeys((each.group, each.capability) for report in reports for each in report.results)
    found = [{(each.group, each.capability): each.verdict for each in report.results} for report in reports]
    lines = [
        f"| | {' | '.join(report.engine.replace('_', ' ') for report in reports)} |",
        "|---" * (len(reports) + 1) + "|",
    ]
    group = ""
    for row in rows:
        if row[0] != group:
            group = row[0]
            lines.append(f"| **{group}** |{' |' * len(reports)}")
        lines.append(f"| {row[1]} | {' | '.join(str(each.get(row, '-')) for each in found)} |")
    meanings = "; ".join(f"`{verdict}` {meaning}" for verdict, meaning in MEANINGS.items())
    return "\n".join([*lines, "", f"{meanings}."])
