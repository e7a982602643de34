"""Workloads and arrivals beyond the plain ones, raced over real sockets: what was planned is what the engine gets."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from arena.judging.results import RaceResult
from arena.load.arrivals import Drawn
from arena.load.plan import CellPlan
from arena.load.spool import plan_file
from arena.load.workloads.material import gather
from arena.race.bakeoff import race
from arena.race.card import Contender, RaceCard
from arena.race.scenario_file import parse
from arena.records.check import check_run
from arena.records.store import Store
from arena.reports.report import publish
from tests.arena.race.test_bakeoff import PACE, Log, scripted

REST = """
name: raced
model: fake
slo: {ttft_ms: 1000, tpot_ms: 40}
search: {start_rps: 8, min_rps: 8, step: 1.5, stride: 2, max_rps: 40, max_cells: 1, max_replicates: 1, burst: 4}
cell: {warmup_s: 0.5, duration_s: 1.5, settle_s: 0.05}
"""
CONVERSATION = """
cache: warm
arrivals: {kind: gamma, cv: 2}
workload:
  kind: conversation
  min_turns: 2
  max_turns: 3
  min_think_s: 0.2
  max_think_s: 0.4
  prompt: {kind: fixed, tokens: 12}
  output: {kind: fixed, tokens: 6}
  prefix: {groups: 2, tokens: 30}
"""
REPLAY = """
arrivals: {kind: trace}
workload: {kind: trace, path: t.csv, max_prompt_tokens: 90, max_output_tokens: 7}
"""
TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(
    f"2024-05-10 00:00:{row % 60:02d}.{row % 7}00000+00:00,{20 + row},{1 + row % 9}" for row in range(60)
)


def raced(text: str, out: Path, *, rate_rps: float = 8) -> RaceResult:
    rest = REST.replace("start_rps: 8", f"start_rps: {rate_rps}").replace("min_rps: 8", f"min_rps: {rate_rps}")
    scenario = parse(rest + text, source="test")
    material = gather(scenario.workload, scenario.arrivals, {"t.csv": TRACE}.__getitem__)
    with scripted(*PACE, "--max-concurrent", "16") as url:
        card = RaceCard(
            run_id="run-1",
            started_utc="2026-01-01T00:00:00+00:00",
            seed=11,
            scenario=scenario,
            quick=True,
            contenders=[Contender(name="fake", url=url)],
            out=out,
            host={"cpu": "test", "cores": 2},
            material=material,
        )
        result = asyncio.run(race(card, Log()))
    publish(result, out)
    return result


@pytest.mark.parametrize(
    ("kind", "text", "told"),
    [
        ("gamma", CONVERSATION, ("conversations of 2 to 3 turns, 0.2 to 0.4 s apart", "coefficient of variation of 2")),
        (
            "trace",
            REPLAY,
            ("of the lengths recorded in t.csv, at most 90 tokens", "12 of 60 answers (20.0%) are cut to 7 tokens"),
        ),
    ],
)
def test_what_was_planned_is_sent_audited_and_told(kind: str, text: str, told: tuple[str, ...], tmp_path: Path) -> None:
    result = raced(text, tmp_path)
    cell = result.engines[0].cells[0]  # a client that was late has it run again
    findings = {finding.check: finding for finding in cell.findings}
    assert cell.requests > 3
    assert cell.failures == 0
    assert findings["prompt_length_excess"].value is not None
    with Store(tmp_path / "arena.duckdb", read_only=True) as store:
        (plan,) = store.query("SELECT * FROM plans WHERE plan_sha256 = ?", [cell.plan_sha256])
        drawn = msgspec.json.decode(plan["drawn_json"], type=Drawn)
        complaints = check_run(store, tmp_path)
    assert (plan["kind"], drawn.kind) == (kind, kind)
    assert not [complaint for complaint in complaints if "audit" in complaint or "plan" in complaint]
    sent = CellPlan.read(plan_file(tmp_path / "spool" / f"{cell.cell_id}.jsonl"))
    assert sent.drawn == drawn
    assert sent.sha256 == plan["plan_sha256"]
    page = (tmp_path / "report.html").read_text("utf-8")
    assert all(words in page for words in told)


@pytest.mark.replay("R35")
def test_prompts_of_one_token_are_raced_though_there_are_not_enough_of_them_to_differ(tmp_path: Path) -> None:
    workload = "workload: {kind: synthetic, prompt: {kind: fixed, tokens: 1}, output: {kind: fixed, tokens: 6}}"
    result = raced(workload + "\narrivals: {kind: constant}", tmp_path, rate_rps=36)
    cell = result.engines[0].cells[0]
    with Store(tmp_path / "arena.duckdb", read_only=True) as store:
        sent = [row["prompt_id"] for row in store.query("SELECT prompt_id FROM v_requests")]
    assert len(set(sent)) < len(sent), "no prompt came twice, so nothing was shown"
    findings = {finding.check: finding for finding in cell.findings}
    assert findings["repeated_prompts"].ok
    assert cell.failures == 0
