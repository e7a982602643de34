"""What was raced: engines with their settings, workload, limits, arrivals, machine; and how to do it again. Pure."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

import msgspec

from arena.judging.results import EngineResult, RaceResult
from arena.load.describe import answer_words, arrival_words, prompt_words
from arena.race.scenario import Scenario
from arena.reports.document import Cell, Code, Facts, Fold, Paragraph, Section, Table, Text
from arena.reports.evidence import evidence
from arena.reports.tuned import tuning_charts
from arena.reports.wording import seconds


def engines_section(result: RaceResult) -> Section:
    head = (
        "engine",
        "version",
        "model",
        "settings",
        "weights",
        "up in",
        "burst",
        "keeps length",
        "counts tokens",
        "refused",
        "same work",
    )
    rows = tuple(_engine_row(place, engine) for place, engine in enumerate(result.engines))
    return Section(
        "engines",
        "What was raced",
        (Table(head, rows, numeric=(5, 6)), *_settings(result), *_tunings(result), *tuning_charts(result)),
        "Same plans, same prompts, same output lengths, or no rank: an engine that answers shorter or cannot be "
        "checked is shown and not compared. The burst, all at once, is a warm-up and bounds goodput from above.",
    )


def _engine_row(place: int, engine: EngineResult) -> tuple[Cell, ...]:
    notes, found = engine.notes, engine.notes.probe
    flags = ", ".join(f"{name}={value}" for name, value in engine.settings.items())
    return (
        Text(engine.name, engine=place),
        engine.version or "-",
        engine.model,
        Text(flags or "as it comes", is_code=bool(flags)),
        _weights_words(notes.weights),
        seconds(notes.start_s) if notes.launched else "was up",
        f"{notes.burst_rps:.1f}/s" if notes.burst_rps else "-",
        _yes(found.get("exact_length")),
        _yes(found.get("counts_tokens")),
        ", ".join(map(str, found.get("refused", []))) or "nothing",
        _same_work(engine),
    )


def _same_work(engine: EngineResult) -> Cell:
    if engine.unranked:
        return Text(" ".join((*engine.unranked, *engine.remarks)), "bad")
    return Text(" ".join(("yes.", *engine.remarks)) if engine.remarks else "yes", "good")


def _weights_words(weights: Mapping[str, Any]) -> Cell:
    if not weights:
        return "not told"
    words = f"{weights['relation']}: {weights['precision']}" if weights["relation"] != "same" else weights["precision"]
    return Text(words, hint=f"SHA-256 of what it reads: {weights['served_sha256']}")


def _settings(result: RaceResult) -> list[Fold]:
    """How each engine was started, and what it says of its settings itself."""
    known = {engine.name: engine.notes.settings for engine in result.engines if engine.notes.settings}
    if not known:
        return []
    lines = msgspec.json.format(msgspec.json.encode(known), indent=2).decode().splitlines()
    return [Fold("How each engine was started, and its own report of its settings", (Code(tuple(lines)),))]


def _tunings(result: RaceResult) -> list[Paragraph]:
    """What a tuning before the race found. All engines had the same budget."""
    told = [(engine.name, engine.notes.tuning) for engine in result.engines if engine.notes.tuning]
    return [Paragraph(f"{name}: {tuning_words(tuning)}") for name, tuning in told]


def tuning_words(tuning: Mapping[str, Any]) -> str:
    if not tuning.get("trials"):
        return str(tuning.get("words") or "not tuned: it has no knobs to turn.")
    found = ", ".join(f"{option}={value}" for option, value in tuning["found"].items()) or "nothing that runs"
    spent = f"{len(tuning['trials'])} settings, {tuning['cells']} cells, {tuning['minutes']:.1f} minutes"
    ended = "" if tuning["is_finished"] else "; its budget ended before the search did"
    return f"tuned over {spent}, found {found} ({'; '.join(tuning['peaks'].values())}){ended}."


def _yes(value: object) -> Cell:
    return "-" if value is None else Text("yes", "good") if value else Text("no", "bad")


def workload_section(result: RaceResult) -> Section:
    scenario, slo = result.scenario, result.scenario.slo
    q = f"p{slo.percentile:g}"
    rows: list[tuple[str, Cell]] = [
        ("scenario", scenario.title or scenario.name),
        ("limits", f"{q} TTFT {slo.ttft_ms:g} ms and {q} TPOT {slo.tpot_ms:g} ms, both met by the same request"),
        ("prompts", prompt_words(scenario.workload)),
        ("as counted", _counted_words(result)),
        ("answers", answer_words(scenario.workload)),
        *(("of its files", sentence) for sentence in result.notes.told),
        ("arrivals", _load_words(scenario)),
        ("caches", "warm: shared beginnings may be reused" if scenario.cache == "warm" else "cold"),
        ("cells", _cell_words(scenario)),
        ("order", _order_words(result)),
        ("seed", str(result.seed)),
    ]  # fmt: skip
    return Section("workload", "What was asked", (Facts(tuple(rows)),), is_half=True)


def host_section(result: RaceResult) -> Section:
    rows: list[tuple[str, Cell]] = [(key.replace("_", " "), _value(value)) for key, value in result.host.items()]
    rows += [("run", result.run_id), ("started", result.started_utc), ("commit", result.git_sha or "unknown")]
    return Section("host", "Where and with what", (Facts(tuple(rows)),), is_half=True)


def _value(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str).strip('"')


def reproduce_section(result: RaceResult) -> Section:
    """The same plans again: command, seed, and the digests that tell whether it was the same."""
    folder = f"DIR/{result.run_id}"
    command = result.notes.command or f"goodgate arena run {result.scenario.name}"
    commands = (
        with_seed(command, result.seed),
        f"goodgate arena check {folder}      # every figure here, computed again from the raw rows",
        f"goodgate arena report {folder}     # this page, written again",
    )  # fmt: skip
    plans = {cell.plan_sha256: cell for engine in result.engines for cell in engine.cells if cell.plan_sha256}
    digests = tuple(
        (f"{cell.rate_rps:g}", str(cell.replicate), Text(sha, is_code=True))
        for sha, cell in sorted(plans.items(), key=lambda entry: (entry[1].rate_rps, entry[1].replicate))
    )
    facts: tuple[tuple[str, Cell], ...] = (
        ("seed", str(result.seed)),
        ("commit", result.git_sha or "unknown"),
        ("evidence", Text(str(evidence(result)["digest"]), is_code=True)),
    )
    scenario = msgspec.json.format(result.scenario.to_json().encode(), indent=2).decode()
    return Section(
        "reproduce",
        "How to reproduce",
        (
            Code(commands),
            Facts(facts),
            Paragraph("The same seed draws the same arrivals and prompts: the digests below come out equal.", "soft"),
            Fold("Digests of the plans (SHA-256)", (Table(("requests/s", "replicate", "plan"), digests, (0, 1)),)),
            Fold("The scenario as it ran", (Code(tuple(scenario.splitlines())),)),
        ),
    )  # fmt: skip


def with_seed(command: str, seed: int) -> str:
    """The command as it was typed, with the seed that was drawn for it and without its own output folder."""
    words, kept = shlex.split(command), []
    skip = False
    for word in words:
        if skip:
            skip = False
        elif word in ("--out", "--seed"):
            skip = True
        elif not word.startswith(("--out=", "--seed=")):
            kept.append(word)
    return f"{shlex.join(kept)} --seed {seed}"


def _load_words(scenario: Scenario) -> str:
    """When requests were sent, and by how many processes."""
    load = scenario.load
    crew = f", sent by {load.workers} load processes" if load.workers > 1 else ""
    if load.closed is None:
        return arrival_words(scenario.arrivals) + crew
    think = f", {load.think_s:g} s of thinking after each answer" if load.think_s else ""
    return f"closed loop: {load.closed.concurrency} requests in flight{think}; what is offered depends on the engine"


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
