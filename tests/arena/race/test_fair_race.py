"""What a race does to be fair: restarts where they are asked for, warm-up prompts apart, settings on record."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from adapters.launching.launch import EngineProcess, LaunchSpec, free_port
from adapters.launching.weights import Weights
from arena.commands.common import Misuse
from arena.commands.contenders import contenders_of
from arena.judging.results import RaceResult
from arena.race.bakeoff import race
from arena.race.card import Contender
from arena.race.raced_with import short
from arena.race.scenario import Scenario
from arena.race.scenario_file import parse
from arena.records.store import Store
from arena.reports.raced import engines_section
from tests.arena.race.test_bakeoff import PACE, SCENARIO, Log, card

FAKE = (sys.executable, "-m", "adapters.servers.fake_server", "--port", "PORT", *PACE)
SHORT = SCENARIO.replace("duration_s: 0.9", "duration_s: 0.4").replace("max_replicates: 1", "max_replicates: 3")


class Starts:
    """Makes contenders, and counts how often each was started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names: list[str] = []

    def contender(self, name: str) -> Contender:
        def process() -> EngineProcess:
            self.names.append(name)
            port = free_port()
            model = self.folder / "model.gguf"
            model.write_bytes(b"GGUF")
            spec = LaunchSpec(
                name=name, argv=tuple(part.replace("PORT", str(port)) for part in FAKE), port=port, ready_timeout_s=20,
                weights=Weights(source=model, served=model, precision="bfloat16", relation="dequantised"),
            )  # fmt: skip
            return EngineProcess(spec, self.folder / f"{name}.log")

        return Contender(name=name, version="1", process=process, flags={"max_num_seqs": 4})


@pytest.fixture(scope="module")
def restarted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RaceResult, Starts, Store]]:
    """One engine whose only rate is run three times, with a restart before each repetition."""
    folder = tmp_path_factory.mktemp("restarts")
    starts = Starts(folder)
    text = SHORT.replace("start_rps: 1,", "start_rps: 8, min_rps: 8,").replace("max_rps: 200", "max_rps: 8")
    result = asyncio.run(
        race(card(folder / "race", [starts.contender("solo")], text=text + "restart: replicate\n"), Log())
    )
    with Store(folder / "race" / "arena.duckdb", read_only=True) as store:
        yield result, starts, store


def test_a_repeated_rate_meets_a_fresh_engine_where_that_is_asked_for(
    restarted: tuple[RaceResult, Starts, Store],
) -> None:
    result, starts, _ = restarted
    assert [cell.replicate for cell in result.engines[0].cells] == [0, 1, 2]
    assert starts.names == ["solo"] * 3


@pytest.mark.replay("R14")
def test_no_prompt_of_a_warm_up_is_measured(restarted: tuple[RaceResult, Starts, Store]) -> None:
    store = restarted[2]
    counted = store.query("SELECT count(DISTINCT prompt_id) AS n FROM warmup_prompts")[0]["n"]
    assert counted >= 1 + 3 + 12  # the probe's, the small burst's and the burst's
    assert store.query("SELECT * FROM v_repeated") == []


@pytest.mark.replay("R12", "R14")
def test_a_prompt_that_was_sent_before_is_found_in_the_rows(tmp_path: Path) -> None:
    with Store(tmp_path / "arena.duckdb") as store:
        for cell, slot in (("first", 1), ("second", 2)):
            store.execute(
                "INSERT INTO cells (cell_id, run_id, engine_id, plan_sha256, replicate, slot, rate_rps, status) "
                "VALUES (?, 'run', 'e', 'p', 0, ?, 1, 'ok')",
                [cell, slot],
            )
        sent = [
            ("first", 0, False, "a"), ("first", 1, True, "a"), ("first", 2, True, "b"), ("second", 0, True, "b"),
            ("second", 1, True, "warm"), ("second", 2, True, "new"), ("second", 3, True, "new"),
        ]  # fmt: skip
        for cell, seq, measured, prompt in sent:
            store.execute(
                "INSERT INTO requests (cell_id, seq, measured, prompt_id, max_tokens, scheduled_ns, status, "
                "out_tok_counted, tokens_known, n_chunks, n_recvs) VALUES (?, ?, ?, ?, 8, 0, 'ok', 8, true, 8, 8)",
                [cell, seq, measured, prompt],
            )
        store.record_warmup("e", ["warm"])
        store.record_warmup("another", ["b"])
        found = store.query("SELECT cell_id, seq FROM v_repeated ORDER BY ALL")
    assert [(row["cell_id"], row["seq"]) for row in found] == [
        ("first", 1),
        ("second", 0),
        ("second", 1),
        ("second", 3),
    ]


def test_what_was_launched_and_which_weights_it_serves_is_part_of_the_result(
    restarted: tuple[RaceResult, Starts, Store],
) -> None:
    engine = restarted[0].engines[0]
    assert engine.notes.settings["launched"]["options"] == {"max_num_seqs": 4}
    assert "--ttft-ms" in engine.notes.settings["launched"]["argv"]
    assert "/version" in engine.notes.settings["reported"]  # the fake engine has the route
    assert engine.notes.weights["relation"] == "dequantised"
    assert len(engine.notes.weights["source_sha256"]) == 64
    assert engine.remarks == ("It serves the same weights, dequantised (bfloat16).",)
    assert engine.rank is not None
    shown = repr(engines_section(restarted[0]))
    assert "dequantised: bfloat16" in shown
    assert "yes. It serves the same weights, dequantised" in shown
    assert '"max_num_seqs": 4' in shown


def test_paths_on_record_name_no_user() -> None:
    assert short("/home/someone/.goodgate/models/small/model.gguf") == ".../model.gguf"
    assert short("--model=/home/someone/m.gguf") == "--model=.../m.gguf"
    assert short("/v1/chat") == "/v1/chat"


@pytest.mark.slow
def test_with_all_engines_up_each_round_begins_with_fresh_ones_where_that_is_asked_for(tmp_path: Path) -> None:
    starts = Starts(tmp_path)
    text = SHORT.replace("max_cells: 3", "max_cells: 2") + "residency: all\nrestart: round\n"
    log = Log()
    asyncio.run(race(card(tmp_path / "race", [starts.contender(name) for name in "ab"], text=text), log))
    assert not log.failed
    assert starts.names[:4] == ["a", "b", "b", "a"]


def test_an_endpoint_cannot_be_restarted_and_that_is_said_before_anything_runs() -> None:
    scenario = replace_restart("replicate")
    with pytest.raises(Misuse, match=r"asks for `restart: replicate`, and 'x' is an endpoint"):
        contenders_of(scenario, None, ["x=http://127.0.0.1:1"], [], None)
    assert contenders_of(replace_restart("never"), None, ["x=http://127.0.0.1:1"], [], None)


def replace_restart(restart: str) -> Scenario:
    return parse(SCENARIO + f"restart: {restart}\n", source="test")
