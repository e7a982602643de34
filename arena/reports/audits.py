"""Whether the figures can be believed: every cell, every audit of every cell, the failed ones first. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from arena.judging.audit import Finding
from arena.judging.cells import CellResult
from arena.judging.claims import INFLATED, UNCLAIMED
from arena.judging.results import EngineResult, RaceResult
from arena.judging.stats import Verdict, holds
from arena.reports.document import Block, Cell, Fold, Paragraph, Section, Table, Text
from arena.reports.wording import figure, milliseconds, rate_words, share_words

CHECK_NAMES = {
    "measured_requests": "requests in the window",
    "client_lag_p99_ms": "client on time (p99 lag, ms)",
    "unsent_requests": "requests that never left",
    "cached_prompt_share": "prompt tokens from prefix cache",
    "repeated_prompts": "measured prompts sent before",
    "first_wave_slowness": "first requests against later ones (times)",
    "refused_requests": "requests turned away (429, 503)",
    "short_answer_share": "answers shorter than asked",
    "one_token_answers": "answers of one token",
    "unserved_share": "backlog growth / offered load",
    "ttft_growth": "TTFT at the window's end / beginning",
    "completed_share": "completed / offered",
    "littles_law": "requests in flight against rate x time (Little)",
    "warmup_s": "warm-up that was needed (s)",
    "fixed_task_ms": "fixed task before the cell (ms)",
    "foreign_cpu_share": "processor taken by others",
    "loop_lag_p99_ms": "client's event loop on time (p99, ms)",
    "tokens_counted_percent": "tokens told beyond tokens counted (%)",
    INFLATED: "tokens claimed beyond the text, by the model's tokenizer (share)",
    UNCLAIMED: "tokens of the text beyond those claimed (share)",
    "events_per_read": "events in one read",
    "beyond_calibration": "tokens/s the client was calibrated for",
    "prompt_length_excess": "prompt tokens counted beyond those asked",
    "arrival_error_ns": "arrivals off their places (ns)",
    "arrival_gaps_p": "arrival gaps as drawn (p)",
    "arrival_count_p": "arrival count fits rate (p)",
    "arrival_dispersion_p": "arrivals disperse as Poisson (p)",
    "arrivals": "arrivals, too few to audit",
}


def audits_section(result: RaceResult) -> Section:
    cells = [cell for _, cell in _in_order(result)]
    findings = [finding for cell in cells for finding in cell.findings]
    blocks: list[Block] = [_tally(cells, len(findings)), *_uncounted(result), *_client(result), *_stopped(result)]
    if findings:
        blocks.append(_by_check(findings))
        blocks.append(Fold("Every audit of every cell, the failed ones first", (_every_audit(result),)))
    return Section(
        "audits",
        "Can it be believed?",
        tuple(blocks),
        "Each cell is audited from its raw rows: was the client on time, were the arrivals what they claim to be, "
        "did a cache help, did the backlog grow? An invalid cell says more of the client than of the engine; it "
        "enters no figure and was run again where time allowed. An unstable cell is valid and counts as a fail.",
    )


def _tally(cells: Sequence[CellResult], audits: int) -> Paragraph:
    lost = sum(not cell.is_valid for cell in cells)
    unstable = sum(cell.status == "unstable" for cell in cells)
    words = [f"{audits} audits of {len(cells)} cells."]
    words.append(f"Not believed, and in no figure: {lost}." if lost else "Every cell is believed.")
    if unstable:
        words.append(f"With a growing backlog, which counts against the engine: {unstable}.")
    return Paragraph(" ".join(words), "warn" if lost else "good")


def _uncounted(result: RaceResult) -> Iterator[Paragraph]:
    """Whose token counts nobody has checked."""
    names = [
        engine.name
        for engine in result.engines
        if any(cell.is_valid for cell in engine.cells) and all(cell.value_of(INFLATED) is None for cell in engine.cells)
    ]
    if names:
        words = f"Token counts that no tokenizer has checked, and that are the engine's own word: {', '.join(names)}."
        yield Paragraph(" ".join([words, *result.notes.uncounted]), "soft")


def _client(result: RaceResult) -> Iterator[Block]:
    """The floor under all latencies: the client's own errors, measured before the race."""
    calibration = result.notes.calibration
    if calibration is None:
        yield Paragraph("The client's own errors were not measured before this race.", "soft")
        return
    yield Paragraph(calibration.verdict.words, "" if calibration.verdict.ok else "bad")
    head = (
        "requests/s",
        "tokens/s",
        "requests",
        "TTFT error p50 / p99, ms",
        "gap error p50 / p99, ms",
        "late p99, ms",
        "core",
    )
    rows = tuple(
        (
            figure(floor.rate_rps), figure(floor.chunks_per_s), str(floor.requests),
            f"{figure(floor.ttft_p50_ms)} / {figure(floor.ttft_p99_ms)}",
            f"{figure(floor.gap_p50_ms)} / {figure(floor.gap_p99_ms)}", figure(floor.lag_p99_ms),
            share_words(floor.cpu),
        )
        for floor in calibration.floors
    )  # fmt: skip
    yield Fold("The client's calibration", (Table(head, rows, numeric=tuple(range(7))),))


def _stopped(result: RaceResult) -> Iterator[Table]:
    rows = tuple(
        (
            Text(engine.name, engine=_place(result, engine)),
            rate_words(cell.rate_rps),
            _status(cell),
            cell.reason or "It did not finish.",
        )
        for engine, cell in _in_order(result)
        if cell.status != "ok"
    )  # fmt: skip
    if rows:
        yield Table(("engine", "requests/s", "status", "why"), rows, numeric=(1,))


def _by_check(findings: list[Finding]) -> Table:
    """One line a check: how often it passed, and the value that came closest to its limit or passed it."""
    rows: list[tuple[Cell, ...]] = []
    for check in sorted({finding.check for finding in findings}, key=lambda name: CHECK_NAMES.get(name, name)):
        known = [finding for finding in findings if finding.check == check]
        failed = sum(not finding.ok for finding in known)
        values = [finding.value for finding in known if finding.value is not None]
        span = f"{figure(min(values))} to {figure(max(values))}" if values else "-"
        result = Text(f"{failed} of {len(known)} failed", "bad") if failed else Text(f"{len(known)} ok", "good")
        rows.append((CHECK_NAMES.get(check, check), result, span, figure(known[0].threshold)))
    return Table(("audit", "result", "values", "limit"), tuple(rows), numeric=(2, 3))


def _every_audit(result: RaceResult) -> Table:
    """One line a cell, those with a failed audit first."""
    audited = [(engine, cell) for engine, cell in _in_order(result) if cell.findings]
    audited.sort(key=lambda pair: all(finding.ok for finding in pair[1].findings))  # stable: else in the order they ran
    rows = tuple(
        (
            str(cell.slot),
            Text(engine.name, engine=_place(result, engine)),
            rate_words(cell.rate_rps),
            Text(_told(finding for finding in cell.findings if not finding.ok), "bad"),
            _told(finding for finding in cell.findings if finding.ok),
        )
        for engine, cell in audited
    )
    return Table(("#", "engine", "requests/s", "failed", "passed"), rows, numeric=(0, 2))


def _told(findings: Iterable[Finding]) -> str:
    words = [
        f"{CHECK_NAMES.get(finding.check, finding.check)} {figure(finding.value)} (limit {figure(finding.threshold)})"
        for finding in findings
    ]
    return "; ".join(words) or "-"


def cells_section(result: RaceResult) -> Section:
    slo = result.scenario.slo
    q = f"p{slo.percentile:g}"
    head = (
        "#", "engine", "requests/s", "status", "verdict", "in time", "failed", f"TTFT p50 / {q}", f"TPOT p50 / {q}",
        "n eff.", "audits", "plan",
    )  # fmt: skip
    rows = tuple(_cell_row(result, engine, cell) for engine, cell in _in_order(result))
    table = Table(head, rows, numeric=(0, 2, 5, 6, 7, 8, 9))
    return Section(
        "cells",
        "Every cell",
        (Fold(f"All {len(rows)} cells", (table,)),) if rows else (Paragraph("No cell was run.", "soft"),),
        "In the order they ran. Equal plan digests mean equal arrivals and prompts. Percentiles count failures as "
        "infinitely late. n eff.: how many independent requests would tell as much.",
    )


def _cell_row(result: RaceResult, engine: EngineResult, cell: CellResult) -> tuple[Cell, ...]:
    percentile = result.scenario.slo.percentile
    return (
        str(cell.slot), Text(engine.name, engine=_place(result, engine)), rate_words(cell.rate_rps), _status(cell),
        _verdict(cell, percentile), f"{cell.requests - cell.misses}/{cell.requests}", str(cell.failures),
        f"{milliseconds(cell.ttft(50))} / {milliseconds(cell.ttft(percentile))}",
        f"{milliseconds(cell.tpot(50))} / {milliseconds(cell.tpot(percentile))}",
        f"{cell.requests / cell.design_effect:.0f}", _audits(cell),
        Text(cell.plan_sha256[:8], is_code=True, hint=cell.plan_sha256),
    )  # fmt: skip


def _in_order(result: RaceResult) -> list[tuple[EngineResult, CellResult]]:
    pairs = [(engine, cell) for engine in result.engines for cell in engine.cells]
    return sorted(pairs, key=lambda pair: pair[1].slot)


def _place(result: RaceResult, engine: EngineResult) -> int:
    return result.engines.index(engine)


def _audits(cell: CellResult) -> Cell:
    failed = [CHECK_NAMES.get(finding.check, finding.check) for finding in cell.findings if not finding.ok]
    if failed:
        return Text(f"{len(failed)} failed", "bad", hint=", ".join(failed))
    return Text(f"{len(cell.findings)} ok", "good") if cell.findings else "-"


def _status(cell: CellResult) -> Text:
    match cell.status:
        case "ok":
            return Text(cell.status, "good")
        case "unstable":
            return Text(cell.status, "bad")
        case _:
            return Text(cell.status, "warn")


def _verdict(cell: CellResult, percentile: float) -> Text:
    if not cell.is_valid:
        return Text("none", "soft")
    if cell.verdict is Verdict.PASS:
        return Text("pass, proven", "good")
    if cell.verdict is Verdict.FAIL:
        return Text("fail, proven", "bad")
    held = cell.status == "ok" and holds(cell.requests, cell.misses, percentile=percentile)
    return Text("held", "good") if held else Text("did not hold", "bad")
