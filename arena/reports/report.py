"""The report of a race: report.html, report.md and report.json say the same; and the ranking for a terminal.

    document = document_of(result)      # what is said: arena/reports/document.py
    page(document), markdown(document)  # how it is written down

The order is that of a reader in a hurry: who carries how much, how sure is that, what happens as load rises, how single
requests fared, what was raced on what machine, whether it can be believed, and how to do it again. Pure, but for
`publish`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
from rich import box
from rich.markup import escape as escape_markup
from rich.table import Table

from arena.judging.results import EngineResult, RaceResult
from arena.judging.traces import comparable_rate
from arena.records.manifest import put, write_manifest
from arena.reports.audits import audits_section, cells_section
from arena.reports.controls import controls_section
from arena.reports.document import Charts, Document, Section
from arena.reports.economy import economy_section
from arena.reports.evidence import evidence
from arena.reports.gateway_cost import gateway_section
from arena.reports.glossary import glossary_section
from arena.reports.html_page import page
from arena.reports.markdown import markdown
from arena.reports.plots import distribution_charts, legend, rate_charts
from arena.reports.raced import engines_section, host_section, reproduce_section, workload_section
from arena.reports.standing import notices, plain_words, ranking_section
from arena.reports.summary import summary
from arena.reports.timelines import course_charts, scatter_charts
from arena.reports.wording import headline, interval_words, milliseconds, rate_words


def documents(result: RaceResult) -> dict[str, str]:
    """Every file that tells of the race, by its name. `goodgate arena check` makes them again and compares."""
    document = document_of(result)
    return {
        "summary.json": json.dumps(summary(result), indent=2) + "\n",
        "evidence.json": json.dumps(evidence(result), indent=2) + "\n",
        "report.html": page(document),
        "report.md": markdown(document),
        "report.json": msgspec.json.encode(document).decode() + "\n",
    }


def publish(result: RaceResult, folder: Path) -> None:
    """Write the documents, for people and for programs, and last the manifest that vouches for every file. A full disk
    leaves the older ones as they were.
    """
    put(folder, {name: text.encode("utf-8") for name, text in documents(result).items()})
    write_manifest(folder)


def render(result: RaceResult) -> str:
    """The whole report as one HTML document."""
    return page(document_of(result))


def document_of(result: RaceResult) -> Document:
    answer = (ranking_section(result),) if result.notes.searched else ()
    sections = (*answer, *gateway_section(result), *_measured(result), *_about(result))
    scenario = result.scenario
    return Document(
        title=headline(result),
        kicker=("Goodgate arena", scenario.name + (" (quick)" if result.notes.quick else ""), scenario.model),
        plain_words=plain_words(result),
        notices=tuple(notices(result)),
        sections=sections,
        footer=f"{result.run_id}, {result.started_utc}. This page needs no network and runs no script.",
        links=tuple((section.anchor, section.title) for section in sections),
    )


def _measured(result: RaceResult) -> Iterator[Section]:
    if not any(cell.samples for engine in result.engines for cell in engine.cells if cell.is_valid):
        return
    names = legend(result)
    yield Section(
        "rates",
        "As the load rises",
        (Charts(rate_charts(result), names),),
        "Each mark is a rate that was tried; a hollow one did not hold. The dashed line is the target or the limit, "
        "a coloured vertical marks goodput. Whiskers are 95 % intervals of the share, as if requests were "
        "independent. An arrow at the upper edge: more requests failed than the percentile forgives, so it is "
        "infinite.",
    )
    yield Section(
        "latency",
        "How slow are the slowest?",
        (Charts(tuple(distribution_charts(result)), names),),
        f"{_comparable_words(result)} Failures are infinitely late: a curve with an arrow has them.",
    )
    in_flight, lateness = course_charts(result)
    if in_flight:
        yield Section(
            "course",
            "The course of a cell",
            (Charts(in_flight), Charts(lateness)),
            "Each engine at its goodput: requests in flight, and below them the TTFT of each request at the time it "
            "was due. What is shaded is not measured: the warm-up, and the load that is kept up until the last "
            "measured answer.",
        )
    yield Section(
        "requests",
        "Request by request",
        (Charts(scatter_charts(result)),),
        "Each engine at its goodput: every dot is a request, at its two latencies. Inside the box both limits are "
        "met; hollow dots missed one, arrows in the corner failed.",
    )


def _about(result: RaceResult) -> tuple[Section, ...]:
    return (
        *economy_section(result),
        engines_section(result),
        workload_section(result),
        host_section(result),
        audits_section(result),
        *controls_section(result),
        cells_section(result),
        reproduce_section(result),
        glossary_section(),
    )


def _comparable_words(result: RaceResult) -> str:
    rates = [(engine.name, comparable_rate(result.engines, engine)) for engine in result.engines]
    shown = [f"{name} at {rate_words(rate)}/s" for name, rate in rates if rate is not None]
    return f"At the rate nearest to what the slowest engine carries: {', '.join(shown)}."


def ranking_table(result: RaceResult) -> Table:
    """The ranking for a terminal."""
    slo = result.scenario.slo
    table = Table(title=escape_markup(headline(result)), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.caption_justify = "left"
    table.caption = f"goodput: highest rate that held ({slo.percentile:g} % in time); latencies at that rate"
    table.add_column("rank", justify="right", no_wrap=True)
    table.add_column("engine", style="bold", no_wrap=True, overflow="ellipsis", min_width=9)
    headings = ["goodput", f"{result.scenario.confidence:.0%} interval", f"TTFT p{slo.percentile:g}"]
    for heading in [*headings, f"TPOT p{slo.percentile:g}", "in time"]:
        table.add_column(heading, justify="right", no_wrap=True)
    for engine in result.engines:
        table.add_row(str(engine.rank) if engine.rank else "-", escape_markup(engine.name), *_figures(engine, result))
    for reason in result.invalid_reasons:
        table.caption += f"\n{escape_markup(reason)}"
    return table


def _figures(engine: EngineResult, result: RaceResult) -> list[str]:
    slo = result.scenario.slo
    if engine.goodput is None:
        return ["-"] * 5
    good = sum(sample.severity(slo) <= 1 for sample in engine.headline)
    return [
        f"{rate_words(engine.goodput.rate_rps)}/s",
        interval_words(engine),
        milliseconds(engine.headline_quantile("ttft", slo.percentile)),
        milliseconds(engine.headline_quantile("tpot", slo.percentile)),
        f"{good}/{len(engine.headline)}",
    ]
