"""The report of a race: report.html, readable offline, and the ranking for a terminal. Pure, but for `publish`.

The order is that of a reader in a hurry: who carries how much, how sure is that, how did it look on the way there,
what was asked and on what machine, and last every cell with its audits, the invalid ones included. All scripts and
styles are inside the file. Whatever comes from an engine or a scenario is escaped, in HTML and in the plots.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import msgspec
from rich import box
from rich.markup import escape as escape_markup
from rich.table import Table

from arena.judging.results import CellResult, EngineResult, RaceResult, summary
from arena.judging.stats import Verdict, holds
from arena.load.describe import answer_words, arrival_words, prompt_words
from arena.race.scenario import Scenario
from arena.reports.evidence import evidence
from arena.reports.plots import all_plots, comparable_rate, nice_ticks, script
from arena.reports.wording import esc, headline, interval_words, milliseconds, rate_words

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#7f7f7f")  # Okabe-Ito first
CHECK_NAMES = {
    "measured_requests": "requests in the window",
    "client_lag_p99_ms": "client on time (p99 lag, ms)",
    "unsent_requests": "requests that never left",
    "cached_prompt_share": "prompt tokens from prefix cache",
    "unserved_share": "backlog growth / offered load",
    "prompt_length_excess": "prompt tokens counted beyond those asked",
    "arrival_error_ns": "arrivals off their places (ns)",
    "arrival_gaps_p": "arrival gaps as drawn (p)",
    "arrival_count_p": "arrival count fits rate (p)",
    "arrival_dispersion_p": "arrivals disperse as Poisson (p)",
    "arrivals": "arrivals, too few to audit",
}


def publish(result: RaceResult, folder: Path) -> None:
    """Write report.html, summary.json and evidence.json."""
    (folder / "report.html").write_text(render(result), "utf-8")
    (folder / "summary.json").write_text(json.dumps(summary(result), indent=2) + "\n", "utf-8")
    (folder / "evidence.json").write_text(json.dumps(evidence(result), indent=2) + "\n", "utf-8")


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


def render(result: RaceResult) -> str:
    """The whole report as one HTML document."""
    from plotly.offline import get_plotlyjs

    slo = result.scenario.slo
    colours = {engine.engine_id: COLOURS[i % len(COLOURS)] for i, engine in enumerate(result.engines)}
    curves = _section(
        f"p{slo.percentile:g} latency, by offered rate",
        "A triangle at the upper edge: more requests failed than the percentile forgives, so it is infinite.",
        _two_plots("ttft-rate", "tpot-rate"),
    )
    distributions = _section(
        "Latency distribution at comparable rates", comparable_words(result), _two_plots("ttft-dist", "tpot-dist")
    )
    body = "".join(
        [
            _kicker(result),
            f"<h1>{esc(headline(result))}</h1>",
            f'<p class="lead">Goodput: the highest offered Poisson rate at which {slo.percentile:g} % of requests get '
            f"their first token within {slo.ttft_ms:g} ms and wait at most {slo.tpot_ms:g} ms a token after it.</p>",
            _notices(result),
            _standing(result, colours),
            *([_attainment(slo.percentile), curves, distributions] if _has_samples(result) else []),
            f'<div class="two">{_workload(result)}{_machine(result)}</div>',
            _engines(result, colours),
            _invalid(result),
            _cells(result, colours),
            _method(result),
        ]
    )
    style = files("arena.reports").joinpath("report.css").read_text("utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{esc(headline(result))}</title><style>{style}</style></head><body><main>{body}</main>"
        f"<script>{get_plotlyjs()}</script><script>{script(all_plots(result, colours))}</script></body></html>\n"
    )


def _kicker(result: RaceResult) -> str:
    parts = ["Goodgate arena", result.scenario.name + (" (quick)" if result.notes.quick else ""), result.scenario.model]
    return f'<div class="kicker">{" &middot; ".join(map(esc, parts))}</div>'


def _attainment(percentile: float) -> str:
    why = (
        f"Each dot is a rate; the dashed line is the target, {percentile:g} % of all scheduled requests within both "
        "limits. Whiskers are 95 % intervals of the share, as if requests were independent. A ring is a rate that did "
        "not hold; a dotted vertical marks goodput."
    )
    return _section("Requests in time, by offered rate", why, '<div id="attainment" class="plot tall"></div>')


def _two_plots(left: str, right: str) -> str:
    return f'<div class="plots"><div id="{left}" class="plot"></div><div id="{right}" class="plot"></div></div>'


def _has_samples(result: RaceResult) -> bool:
    return any(cell.samples for engine in result.engines for cell in engine.cells if cell.is_valid)


def comparable_words(result: RaceResult) -> str:
    rates = [(engine.name, comparable_rate(result, engine)) for engine in result.engines]
    shown = [f"{esc(name)} at {rate_words(rate)}/s" for name, rate in rates if rate is not None]
    return f"At the rate nearest to what the slowest engine carries: {', '.join(shown)}. Failures are infinitely late."


def _section(title: str, why: str, body: str) -> str:
    explained = f'<p class="why">{why}</p>' if why else ""
    return f"<section><h2>{esc(title)}</h2>{explained}{body}</section>"


def _notices(result: RaceResult) -> str:
    notices = [esc(reason) for reason in result.invalid_reasons]
    if result.notes.quick:
        sizes = [cell.requests for engine in result.engines for cell in engine.cells if cell.is_valid]
        largest = max(sizes, default=0)
        allowed = 1 - result.scenario.slo.percentile / 100
        needed = math.ceil(math.log(1 - result.scenario.confidence) / math.log(1 - allowed))
        if largest < needed:
            notices.append(
                f"A quick race: no cell has more than {largest} requests, and p{result.scenario.slo.percentile:g} "
                f"needs {needed} without a miss to be proven. What held was observed, not proven; the intervals say "
                "how far off it may be."
            )
    return f'<section class="note">{"".join(f"<p>{notice}</p>" for notice in notices)}</section>' if notices else ""


def _standing(result: RaceResult, colours: dict[str, str]) -> str:
    slo = result.scenario.slo
    span = _span(result)
    ticks = "".join(f'<span style="left:{_at(tick, span):.2f}%">{tick:g}</span>' for tick in nice_ticks(*span))
    confidence = f"{result.scenario.confidence:.0%}"
    rows = [
        '<div class="row head"><div>Rank</div><div>Engine</div><div>Goodput</div>'
        f'<div>Where it may lie ({confidence} interval), requests/s<div class="axis">{ticks}</div></div>'
        f"<div>p50 / p{slo.percentile:g} at that rate</div></div>"
    ]
    rows += [_standing_row(engine, result, colours[engine.engine_id], span) for engine in result.engines]
    return f'<section><div class="standing">{"".join(rows)}</div></section>'


def _standing_row(engine: EngineResult, result: RaceResult, colour: str, span: tuple[float, float]) -> str:
    slo, goodput = result.scenario.slo, engine.goodput
    name = (
        f'<div><span class="engine"><span class="dot" style="background:{colour}"></span>{esc(engine.name)}</span>'
        f'<span class="small">{esc(engine.version or "version not told")}</span></div>'
    )
    rank = f'<div class="rank">{esc(engine.rank) if engine.rank else "&ndash;"}</div>'
    if goodput is None:
        return (
            f'<div class="row">{rank}{name}<div class="rate">&ndash;</div><div class="interval out">'
            f"{esc(' '.join(engine.unranked))}</div><div></div></div>"
        )
    rate = (
        f'<div><span class="rate">{rate_words(goodput.rate_rps)}</span>'
        f'<span class="small">requests/s, {"proven" if goodput.proven else "observed"}</span></div>'
    )
    high = goodput.hi if goodput.hi is not None else span[1]
    left, right = _at(goodput.lo, span), _at(high, span)
    out = f'<div class="out">{esc(" ".join(engine.unranked))}</div>' if engine.unranked else ""
    bar = (
        f'<div class="interval"><div class="track" title="{esc(interval_words(engine))}">'
        f'<div class="span{" open" if goodput.hi is None else ""}" style="left:{left:.2f}%;width:{right - left:.2f}%;'
        f'background:{colour}"></div><div class="point" style="left:{_at(goodput.rate_rps, span):.2f}%;'
        f'background:{colour}"></div></div><span class="small">{esc(interval_words(engine))}</span>{out}</div>'
    )
    latency = "".join(
        f"<div>{metric.upper()} {milliseconds(engine.headline_quantile(metric, 50))} / "
        f"{milliseconds(engine.headline_quantile(metric, slo.percentile))}</div>"
        for metric in ("ttft", "tpot")
    )
    good = sum(sample.severity(slo) <= 1 for sample in engine.headline)
    latency += f'<span class="small">{good} of {len(engine.headline)} requests in time</span>'
    return f'<div class="row">{rank}{name}{rate}{bar}<div class="latency">{latency}</div></div>'


def _span(result: RaceResult) -> tuple[float, float]:
    """Ends of the axis that all intervals share."""
    values = [
        value
        for engine in result.engines
        if engine.goodput
        for value in (engine.goodput.lo, engine.goodput.rate_rps, engine.goodput.hi)
        if value
    ] or [1.0]
    return min(values) / 1.4, max(values) * 1.4


def _at(value: float, span: tuple[float, float]) -> float:
    """Place on the log axis in percent; zero sits at its left end."""
    if value <= span[0]:
        return 0.0
    return min(100.0, 100 * math.log(value / span[0]) / math.log(span[1] / span[0]))


def _workload(result: RaceResult) -> str:
    scenario, slo = result.scenario, result.scenario.slo
    rows = [
        ("scenario", f"{scenario.title or scenario.name}"),
        ("limits", f"p{slo.percentile:g} TTFT {slo.ttft_ms:g} ms, p{slo.percentile:g} TPOT {slo.tpot_ms:g} ms, joint"),
        ("prompts", prompt_words(scenario.workload)),
        ("as counted", _counted_words(result)),
        ("answers", answer_words(scenario.workload)),
        ("arrivals", arrival_words(scenario.arrivals)),
        ("caches", "warm: shared beginnings may be reused" if scenario.cache == "warm" else "cold"),
        ("cells", _cell_words(scenario)),
        ("order", f"{_order_words(result)}"),
        ("seed", f"{result.seed}"),
    ]
    return _facts("What was asked", rows)


def _cell_words(scenario: Scenario) -> str:
    cell = scenario.cell
    longer = f"longer until {cell.min_requests} requests are expected"
    return f"{cell.warmup_s:g} s warm-up, {cell.duration_s:g} s measured ({longer}), load kept up until the last answer"


def _counted_words(result: RaceResult) -> str:
    """The engines' own word on the lengths; chat template and system prompt are inside the prompt's."""
    prompt, answer = result.prompt_tokens, result.answer_tokens
    if prompt is None or answer is None:
        return "the engines report no token counts"
    return f"median prompt {prompt:g} tokens with the chat template, median answer {answer:g}"


def _order_words(result: RaceResult) -> str:
    names = ", ".join(result.notes.order)
    if result.notes.residency == "all":
        return f"all engines up; cells interleaved, in alternating order of {names}"
    back = ", then back" if result.scenario.rounds > 1 else ""
    return f"one engine at a time: {names}{back}"


def _machine(result: RaceResult) -> str:
    rows = [(key.replace("_", " "), str(value)) for key, value in result.host.items()]
    rows += [("run", result.run_id), ("started", result.started_utc), ("commit", result.git_sha or "unknown")]
    if result.notes.command:
        rows.append(("command", result.notes.command))
    return _facts("Where and with what", rows)


def _facts(title: str, rows: Sequence[tuple[str, str]]) -> str:
    items = "".join(f"<dt>{esc(name)}</dt><dd>{esc(value)}</dd>" for name, value in rows)
    return f"<section><h2>{esc(title)}</h2><p></p><dl>{items}</dl></section>"


def _engines(result: RaceResult, colours: dict[str, str]) -> str:
    head = ("engine", "version", "model", "up in", "burst", "length kept", "counts tokens", "refused", "parity")
    rows = []
    for engine in result.engines:
        notes, found = engine.notes, engine.notes.probe
        rows.append(
            [
                _dotted(engine.name, colours[engine.engine_id]),
                esc(engine.version or "-"),
                esc(engine.model),
                f"{notes.start_s:.1f} s" if notes.start_s is not None and notes.launched else "-",
                f"{notes.burst_rps:.1f}/s" if notes.burst_rps else "-",
                _yes(found.get("exact_length")),
                _yes(found.get("counts_tokens")),
                esc(", ".join(found.get("refused", [])) or "nothing"),
                '<span class="good">same work</span>'
                if not engine.unranked
                else f'<span class="bad">{esc(" ".join(engine.unranked))}</span>',
            ]
        )
    why = (
        "Same plans, same prompts, same output lengths, or no rank: an engine that answers shorter or cannot be "
        "checked is shown and not compared. The burst, all at once, is a warm-up and bounds goodput from above."
    )
    return _section("Do they do the same work?", why, _table(head, rows))


def _yes(value: object) -> str:
    return "-" if value is None else '<span class="good">yes</span>' if value else '<span class="bad">no</span>'


def _invalid(result: RaceResult) -> str:
    cells = [(engine, cell) for engine in result.engines for cell in engine.cells if cell.status != "ok"]
    if not cells:
        return _section("Invalid cells", "", '<p class="why">None: every cell passed its audits.</p>')
    rows = [
        [esc(engine.name), rate_words(cell.rate_rps), _status(cell), esc(cell.reason or "It did not finish.")]
        for engine, cell in cells
    ]
    why = (
        "An invalid cell says more of the client than of the engine; it enters no figure and was run again where time "
        "allowed. An unstable cell is valid and counts as a fail."
    )
    return _section("Cells that an audit stopped", why, _table(("engine", "requests/s", "status", "why"), rows))


def _cells(result: RaceResult, colours: dict[str, str]) -> str:
    slo = result.scenario.slo
    q = f"p{slo.percentile:g}"
    head = (
        "#", "engine", "requests/s", "plan", "status", "verdict", "in time", "failed", "TTFT p50", f"TTFT {q}",
        "TPOT p50", f"TPOT {q}", "n eff.", "audits",
    )  # fmt: skip
    pairs = [(engine, cell) for engine in result.engines for cell in engine.cells]
    rows = [
        [
            str(cell.slot), _dotted(engine.name, colours[engine.engine_id]), rate_words(cell.rate_rps),
            f'<code title="{esc(cell.plan_sha256)}">{esc(cell.plan_sha256[:8])}</code>', _status(cell),
            _verdict(cell, slo.percentile), f"{cell.requests - cell.misses}/{cell.requests}", str(cell.failures),
            milliseconds(cell.ttft(50)), milliseconds(cell.ttft(slo.percentile)), milliseconds(cell.tpot(50)),
            milliseconds(cell.tpot(slo.percentile)), f"{cell.requests / cell.design_effect:.0f}", _audits(cell),
        ]
        for engine, cell in sorted(pairs, key=lambda pair: pair[1].slot)
    ]  # fmt: skip
    why = (
        "In the order they ran. Equal plan digests mean equal arrivals and prompts. Percentiles count failures as "
        "infinitely late. n eff.: how many independent requests would tell as much."
    )
    return _section("Every cell", why, _table(head, rows, numeric=(2, 6, 7, 8, 9, 10, 11, 12)))


def _audits(cell: CellResult) -> str:
    lines = [
        f"{CHECK_NAMES.get(finding.check, finding.check)}: {'-' if finding.value is None else f'{finding.value:.3g}'}"
        f" (limit {'-' if finding.threshold is None else f'{finding.threshold:g}'}) {'ok' if finding.ok else 'FAILED'}"
        for finding in cell.findings
    ]
    failed = sum(not finding.ok for finding in cell.findings)
    word = f'<span class="bad">{failed} failed</span>' if failed else f'<span class="good">{len(lines)} ok</span>'
    return f'<span title="{esc(chr(10).join(lines))}">{word}</span>' if lines else "-"


def _status(cell: CellResult) -> str:
    colour = {"ok": "good", "unstable": "bad"}.get(cell.status, "warn")
    return f'<span class="{colour}">{esc(cell.status)}</span>'


def _verdict(cell: CellResult, percentile: float) -> str:
    if not cell.is_valid:
        return '<span class="soft">none</span>'
    if cell.verdict is Verdict.PASS:
        return '<span class="good">pass, proven</span>'
    if cell.verdict is Verdict.FAIL:
        return '<span class="bad">fail, proven</span>'
    held = cell.status == "ok" and holds(cell.requests, cell.misses, percentile=percentile)
    return f'<span class="{"good" if held else "bad"}">{"held" if held else "did not hold"}</span>'


def _dotted(name: str, colour: str) -> str:
    return f'<span style="white-space:nowrap"><span class="dot" style="background:{colour}"></span>{esc(name)}</span>'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], *, numeric: Sequence[int] = ()) -> str:
    """Cells are HTML already."""
    kinds = ["num" if index in numeric else "" for index in range(len(head))]
    top = "".join(f'<th class="{kind}">{esc(name)}</th>' for kind, name in zip(kinds, head, strict=True))
    body = "".join(
        "<tr>" + "".join(f'<td class="{kind}">{cell}</td>' for kind, cell in zip(kinds, row, strict=True)) + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _method(result: RaceResult) -> str:
    scenario = msgspec.json.format(result.scenario.to_json().encode(), indent=2).decode()
    words = (
        "TTFT runs from the moment a request was due, whatever kept it. TPOT is the time between output tokens after "
        "the first chunk. A failed, refused, cut or unsent request misses both limits and stays in the denominator. "
        "The interval is a fit of the miss rate over all cells (exponential tail of a queue, binomial likelihood "
        "weighted by the effective number of requests); ranks follow from pairwise probabilities of these fits, "
        "corrected for the number of pairs, and equal plans for all engines. Everything here is computed from "
        "arena.duckdb: <code>goodgate arena report</code> writes it again, <code>goodgate arena check</code> verifies "
        "it."
    )
    details = f"<details><summary class='soft'>The scenario as it ran</summary><pre>{esc(scenario)}</pre></details>"
    return f"<section><h2>How to read this</h2><p class='why'>{words}</p>{details}</section>"
