"""Two unequal replicas, raced and then served: only who knows what each of them carries keeps the limits of all.

Everything is a process of its own: the replicas (whose service times are timers, so that a busy machine changes
little), the load generator of the races and of the load, and one gateway for each policy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from arena.evidence.document import Entry, document
from arena.evidence.files import read, write
from arena.evidence.merge import merge
from arena.load.loadgen import Limits, run_cell
from arena.load.plan import Target, build_plan
from arena.load.spool import RequestRow, read_rows
from arena.load.workload import CellKey, prompt_source
from arena.race.bakeoff import race
from arena.race.card import Contender, RaceCard
from arena.race.scenario_file import parse
from arena.reports.report import publish
from tests.arena.race.test_bakeoff import Log, scripted
from tests.gateway.commands.test_commands import running, write_config

# A request takes 100 + 7 * 30 = 310 ms: a slot serves 3.2 requests/s, the small replica 6.5 and the large one 39.
PACE = ("--ttft-ms", "100", "--itl-ms", "30")
SLOTS = {"small": 2, "large": 12}
LOAD_RPS, LOAD_S = 24.0, 3.5
SCENARIO = parse(
    """
name: unequal
model: fake
workload: {kind: synthetic, prompt: {kind: fixed, tokens: 20}, output: {kind: fixed, tokens: 8}}
slo: {ttft_ms: 400, tpot_ms: 150, percentile: 90}
search: {start_rps: 1, step: 1.5, stride: 1, max_rps: 60, max_cells: 2, max_replicates: 1, burst: 12}
cell: {warmup_s: 0.3, duration_s: 2, min_requests: 6, settle_s: 0}
""",
    source="test",
)
SLO = SCENARIO.slo


@pytest.mark.slow
def test_routing_by_goodput_keeps_the_limits_where_round_robin_and_least_load_do_not(tmp_path: Path) -> None:
    with ExitStack() as stack:
        urls = {
            name: stack.enter_context(scripted(*PACE, "--max-concurrent", str(slots))) for name, slots in SLOTS.items()
        }
        entries = raced(tmp_path, urls)
        assert entries["large"].lowest_rps > 2 * entries["small"].lowest_rps > 0
        kept = {
            policy: served(policy, stack.enter_context(gateway(policy, urls, tmp_path)), tmp_path)
            for policy in ("goodput", "round_robin", "least_load")
        }
    enough = SLO.percentile / 100
    proven = {name: entry.lowest_rps for name, entry in entries.items()}
    assert kept["goodput"] >= enough > max(kept["round_robin"], kept["least_load"]), (kept, proven)


def raced(folder: Path, urls: Mapping[str, str]) -> dict[str, Entry]:
    """Each replica in a race of its own, at the same time; what both have proven becomes the gateways' file."""

    async def both() -> None:
        cards = [card(folder / name, name, url) for name, url in urls.items()]
        for known, result in zip(cards, await asyncio.gather(*(race(each, Log()) for each in cards)), strict=True):
            publish(result, known.out)

    asyncio.run(both())
    found = merge([read(folder / name) for name in urls], now=datetime.now(UTC)).evidence
    write(document(found.entries, found.hosts), folder / "evidence.json")
    return {entry.engine: entry for entry in found.entries}


def card(out: Path, name: str, url: str) -> RaceCard:
    return RaceCard(
        run_id=f"race-of-{name}",
        started_utc=datetime.now(UTC).isoformat(timespec="seconds"),
        seed=5,
        scenario=SCENARIO,
        quick=True,
        contenders=[Contender(name=name, url=url)],
        out=out,
        host={"cpu": "test", "cores": 2},
    )


def gateway(policy: str, urls: Mapping[str, str], folder: Path) -> Any:
    """A serving process; both replicas under the names that they were raced by. What differs is the routing alone:
    without an `slo` nobody is turned away at the gate, and no replica is set aside for being slower than its peer.
    """
    home = folder / policy
    home.mkdir()
    replicas = [{"engine": "openai_compatible", "name": name, "options": {"url": url}} for name, url in urls.items()]
    model = {"name": "fake", "routing": policy, "replicas": replicas}
    return running(
        write_config(home, model, evidence=str(folder / "evidence.json"), outliers={"factor": 1000}), home=home
    )


def served(policy: str, serving: tuple[Any, str], folder: Path) -> float:
    """The share of requests in time, failures among the late ones. The same plan meets every policy."""
    key = CellKey(1, 1, 0)
    plan = build_plan(
        policy,
        rate_rps=LOAD_RPS,
        duration_s=LOAD_S,
        warmup_s=1,
        cooldown_s=1,
        prompts=prompt_source(SCENARIO.workload, key),
        seed=key.schedule_seed(),
    )
    spool = folder / f"{policy}.jsonl"
    limits = Limits(request_timeout_s=SLO.deadline_s(8) + 1)
    run = asyncio.run(run_cell(plan, Target(serving[1], "fake", policy), spool, limits=limits))
    assert run.aborted is None
    rows = [row for row in read_rows(spool) if isinstance(row, RequestRow) and row.measured]
    assert len(rows) == len(plan.measured)
    return sum(is_in_time(row) for row in rows) / len(rows)


def is_in_time(row: RequestRow) -> bool:
    first, last = row.first_gen_ns, row.last_gen_ns
    if row.status != "ok" or first is None or last is None:
        return False
    ttft_ms, tpot_ms = (first - row.scheduled_ns) / 1e6, (last - first) / 1e6 / max(1, sum(row.token_n) - 1)
    return ttft_ms <= SLO.ttft_ms and tpot_ms <= SLO.tpot_ms
