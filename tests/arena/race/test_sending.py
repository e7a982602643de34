"""How a race sends: by several processes, as closed loops, and not at all where the client cannot keep time."""

from __future__ import annotations

import asyncio
from dataclasses import replace as dataclass_replace
from pathlib import Path

import pytest

from adapters.errors import GoodgateError
from arena.judging.results import RaceResult
from arena.load.calibration import Budget, Calibration, Demand
from arena.load.spec import ScenarioError
from arena.race import sending
from arena.race.bakeoff import race
from arena.race.card import Contender
from arena.race.scenario import SLO
from arena.race.scenario_file import parse
from arena.race.sending import budget_of, crew_of, demand_of
from arena.records.check import check_run
from arena.records.store import Store
from arena.reports.report import publish
from arena.reports.summary import summary
from tests.arena.load.test_calibration import floor
from tests.arena.race.test_bakeoff import PACE, SCENARIO, Log, card, scripted

CLOSED = SCENARIO + "load: {kind: closed, concurrency: 3, think_s: 0.02}\n"


class Told(Log):
    def __init__(self) -> None:
        super().__init__()
        self.client: list[str] = []

    def client_calibrating(self, words: str) -> None:
        self.client.append(words)


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> tuple[RaceResult, Path]:
    out = tmp_path_factory.mktemp("closed")
    with scripted(*PACE, "--max-concurrent", "8") as url:
        result = asyncio.run(race(card(out, [Contender(name="solo", url=url)], text=CLOSED), Told()))
    publish(result, out)
    return result, out


def test_a_closed_loop_gives_neither_goodput_nor_a_rank_and_says_why(closed: tuple[RaceResult, Path]) -> None:
    result, out = closed
    engine = result.engines[0]
    assert (engine.goodput, engine.rank) == (None, None)
    assert any("Closed loop, 3 requests in flight" in words for words in engine.unranked)
    told = summary(result)["engines"][0]
    assert told["goodput_rps"] is None
    assert "Closed loop, 3 requests in flight" in (out / "report.html").read_text()


def test_a_closed_loops_rate_is_what_it_came_to(closed: tuple[RaceResult, Path]) -> None:
    """A round takes 110 ms of answer and 20 ms of thought at least: three users come to 23 a second at most."""
    cells = closed[0].engines[0].cells
    assert len(cells) == 1
    assert 5 < cells[0].rate_rps <= 3 / 0.13 + 3 / 0.9
    assert cells[0].requests > 0


def test_a_closed_loops_files_agree_with_each_other(closed: tuple[RaceResult, Path]) -> None:
    with Store(closed[1] / "arena.duckdb", read_only=True) as store:
        kinds = {row["kind"] for row in store.query("SELECT kind FROM plans")}
        assert kinds == {"closed"}
        assert [words for words in check_run(store, closed[1]) if "closed3" in words] == []


@pytest.mark.parametrize(
    ("load", "words"),
    [
        ("{kind: closed}", "needs `load.concurrency`"),
        ("{kind: closed, concurrency: 4, workers: 2}", "runs in one load process"),
        ("{concurrency: 4}", "belong to a closed loop"),
        ("{workers: 0}", "load.workers"),
        ("{worker: 2}", "did you mean `workers`"),
    ],
)
def test_a_load_that_contradicts_itself_is_refused(load: str, words: str) -> None:
    with pytest.raises(ScenarioError, match=words):
        parse(SCENARIO + f"load: {load}\n", source="mine.yaml")


def test_workers_make_a_crew_and_a_master_waits_for_those_of_others() -> None:
    alone = parse(SCENARIO, source="test")
    assert crew_of(alone, None) is None
    several = alone.with_workers(4)
    crew = crew_of(several, None)
    assert crew is not None
    assert (crew.workers, crew.starts_workers, crew.host) == (4, True, "127.0.0.1")
    abroad = crew_of(several, ("0.0.0.0", 5557))
    assert abroad is not None
    assert (abroad.workers, abroad.starts_workers, abroad.port) == (4, False, 5557)


def test_a_budget_is_a_share_of_the_limit_and_at_least_a_millisecond() -> None:
    assert budget_of(SLO(ttft_ms=500, tpot_ms=50)) == Budget(ttft_ms=5.0, gap_ms=5.0, lag_ms=5.0)
    assert budget_of(SLO(ttft_ms=20, tpot_ms=2)) == Budget(ttft_ms=1.0, gap_ms=1.0, lag_ms=1.0)


def test_a_calibration_asks_for_as_many_tokens_a_second_as_the_race_may() -> None:
    scenario = parse(SCENARIO, source="test")  # at most 200 requests/s of 8 tokens
    demand = demand_of(scenario)
    assert demand.rate_rps * demand.tokens == pytest.approx(200 * 8)


def test_a_race_whose_client_cannot_keep_time_is_refused_before_an_engine_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen on machines that do other work: every latency would have been the client's."""

    async def late(demand: Demand, budget: Budget, **options: object) -> Calibration:
        return Calibration(asked_rps=demand.rate_rps, budget=budget, floors=(floor(4, ttft=90.0),))

    monkeypatch.setattr(sending, "calibrate", late)
    nobody = Contender(name="nobody", url="http://127.0.0.1:9")
    asked = card(tmp_path, [nobody])
    log = Told()
    with pytest.raises(GoodgateError, match=r"cannot keep time .* --no-calibration"):
        asyncio.run(race(dataclass_replace(asked, calibrates=True), log))
    assert log.failed == {}


def test_a_race_of_two_load_processes_keeps_its_calibration_and_its_rows(tmp_path: Path) -> None:
    """Through and through, with limits that any machine keeps."""
    text = SCENARIO.replace("ttft_ms: 1000", "ttft_ms: 8000").replace("max_cells: 3", "max_cells: 1")
    text = text.replace("tpot_ms: 30", "tpot_ms: 8000") + "load: {workers: 2}\n"
    log = Told()
    with scripted(*PACE, "--max-concurrent", "8") as url:
        asked = card(tmp_path, [Contender(name="solo", url=url)], text=text)
        result = asyncio.run(race(dataclass_replace(asked, calibrates=True), log))
    assert result.notes.calibration is not None
    assert result.notes.calibration.floor.requests > 0
    assert "smaller differences are not claimed" in log.client[-1]
    with Store(tmp_path / "arena.duckdb", read_only=True) as store:
        assert [row["worker"] for row in store.query("SELECT DISTINCT worker FROM requests ORDER BY worker")] == [0, 1]
        assert [row["workers"] for row in store.query("SELECT DISTINCT workers FROM cells")] == [2]
        checks = {row["check_name"] for row in store.query("SELECT check_name FROM audits")}
        assert {"foreign_cpu_share", "loop_lag_p99_ms", "tokens_counted_percent", "events_per_read"} <= checks
        assert "beyond_calibration" in checks
