"""Direct against through the gateway, over processes: the pairs, the report, and long streams at high fan-out."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.request
from pathlib import Path

import msgspec
import pytest

from arena.load.loadgen import Limits, run_cell
from arena.load.plan import CellPlan, Target
from arena.load.spool import RequestRow, read_rows
from arena.load.workload import NOTHING, CellKey
from arena.race.gateway_cost import MARKS, behind_gateway, marked
from arena.race.planned import plan_cell
from arena.race.scenario_file import parse
from arena.records.store import Store
from tests.arena.race.test_bakeoff import scripted
from tests.arena.test_arena_cli import arena

SCENARIO = """
name: paired
model: fake
workload: {kind: synthetic, prompt: {kind: fixed, tokens: 20}, output: {kind: fixed, tokens: 8}}
slo: {ttft_ms: 1500, tpot_ms: 100}
search: {start_rps: 2, step: 2, stride: 1, max_rps: 200, max_cells: 2, max_replicates: 1, burst: 4}
cell: {warmup_s: 0.2, duration_s: 2.5, settle_s: 0}
"""


def plan(text: str = SCENARIO, rate_rps: float = 20.0) -> CellPlan:
    return plan_cell(parse(text, source="test"), NOTHING, CellKey(1, 2, 0), cell_id="cell", rate_rps=rate_rps)


def test_arms_send_the_same_but_for_the_first_word_so_that_no_cache_knows_the_second_one() -> None:
    one, other = (marked(plan(), word) for word in MARKS)
    assert [request.scheduled_ns for request in one.requests] == [request.scheduled_ns for request in other.requests]
    for a, b in zip(one.requests, other.requests, strict=True):
        texts = [msgspec.json.decode(request.body)["messages"][0]["content"].split() for request in (a, b)]
        assert [text[0] for text in texts] == list(MARKS)
        assert texts[0][1:] == texts[1][1:]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("cost")
    (folder / "paired.yaml").write_text(SCENARIO)
    out = folder / "out"
    with scripted("--ttft-ms", "30", "--itl-ms", "5") as url:
        words = ["gateway-cost", f"one={url}", "--scenario", str(folder / "paired.yaml"), "--rate", "16"]
        done = arena(*words, "--pairs", "2", "--out", str(out), "--json", home=folder)
    assert done.returncode == 0, done.stderr
    return out, done.stdout


@pytest.mark.slow
def test_pairs_run_in_alternating_order_and_the_difference_is_told_with_its_report(measured: tuple[Path, str]) -> None:
    out, printed = measured
    (rows,) = json.loads(printed).values()
    found = {row["metric"]: row for row in rows}
    assert found["TTFT, median"]["requests"] >= 20
    assert found["TTFT, median"]["difference"] > 0  # a hop more, on whatever machine
    with Store(out / "arena.duckdb", read_only=True) as store:
        order = [row["engine_id"] for row in store.query("SELECT engine_id FROM cells ORDER BY slot")]
    assert order[:4] == ["one", "one-via-gateway", "one-via-gateway", "one"]
    report = (out / "report.md").read_text()
    assert "The gateway adds +" in report.splitlines()[0] + report.splitlines()[2]
    assert "What the gateway adds to one" in report
    assert "one carries" not in report  # nobody has looked for the rate that it carries
    assert arena("check", str(out)).returncode == 0


@pytest.mark.slow
def test_a_rate_that_was_given_is_no_evidence_of_goodput(measured: tuple[Path, str]) -> None:
    assert json.loads((measured[0] / "evidence.json").read_text())["entries"] == []


def test_misuse_is_one_sentence() -> None:
    refused = arena("gateway-cost", "no-such-engine")
    assert refused.returncode == 2
    assert len(refused.stderr.strip().splitlines()) == 1


FAN_OUT = SCENARIO.replace("tokens: 8}", "tokens: 80}").replace("duration_s: 2.5", "duration_s: 3")


@pytest.mark.slow
@pytest.mark.replay("R34")
async def test_long_streams_at_high_fan_out_keep_their_first_token_and_are_counted_once(tmp_path: Path) -> None:
    """A gateway that scans what it has sent again with each event gets slower as streams grow; one that counts tries
    counts requests twice. Here some dozens of streams of 80 tokens are open.
    """
    long, short = plan(FAN_OUT, 30.0), plan(SCENARIO, 30.0)
    with scripted("--ttft-ms", "40", "--itl-ms", "25") as url:
        async with behind_gateway(url, "fake", adapter="openai_compatible", home=tmp_path) as gateway:
            target = Target(gateway, "fake", "gateway")
            waits = {}
            for name, each in (("short", short), ("long", long)):
                spool = tmp_path / f"{name}.jsonl"
                run = await run_cell(each, target, spool, limits=Limits(request_timeout_s=20))
                rows = [row for row in read_rows(spool) if isinstance(row, RequestRow) and row.measured]
                assert {row.status for row in rows} == {"ok"}
                waits[name] = sorted((row.first_gen_ns or 0) - (row.sent_ns or 0) for row in rows)
            sent = sum(len(list(filter(is_sent, read_rows(tmp_path / f"{name}.jsonl")))) for name in waits)
            counted = await asyncio.to_thread(_counted, gateway)
    assert run.max_in_flight >= 20
    middles = {name: known[len(known) // 2] / 1e6 for name, known in waits.items()}
    assert middles["long"] < 3 * middles["short"], middles
    assert counted == sent


def is_sent(row: object) -> bool:
    return isinstance(row, RequestRow) and row.sent_ns is not None


def _counted(gateway: str) -> int:
    with urllib.request.urlopen(f"{gateway}/metrics", timeout=10) as response:
        text = response.read().decode()
    return sum(
        int(float(value))
        for value in re.findall(r"^goodgate_requests_total\{.*model=\"fake\".*\} (\S+)$", text, re.MULTILINE)
    )
