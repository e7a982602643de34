"""Usage against text: rules on counts, and whole races in which an engine claims what its text does not hold."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from arena.judging.claims import INFLATED, TOLERANCE, UNCLAIMED, Claim, claim_findings, claims_disparity, excess
from arena.judging.judge import judge_race
from arena.judging.results import EngineResult, RaceResult
from arena.load.spool import REASONING, TEXT, TOOL_CALL
from arena.race.bakeoff import race
from arena.race.card import Contender
from arena.race.recount import from_store, recount
from arena.records.store import Store
from arena.reports.report import render
from tests.arena.race.test_bakeoff import PACE, SCENARIO, Log, card
from tests.arena.records.test_store import answer, load, prepare

# A server like the fake one, but for what its events hold. A token of the fake's is a word.
TWIN = """
import asyncio, sys, msgspec
from adapters.servers import fake_server
told = fake_server.Wire.event
def hollow(self, chunk):
    self.number = getattr(self, "number", 0) + 1
    return told(self, chunk if self.number % 2 else msgspec.structs.replace(chunk, text=""))
def modest(self, chunk):
    return told(self, msgspec.structs.replace(chunk, text=f" {chunk.text.strip()} {chunk.text.strip()}"))
def honest(self, chunk):
    return told(self, chunk)
fake_server.Wire.event = locals()[sys.argv[1]]
asyncio.run(fake_server.serve(*fake_server.parse_arguments(sys.argv[2:])))
"""


@contextmanager
def twin(kind: str) -> Iterator[Contender]:
    command = [sys.executable, "-c", TWIN, kind, "--port", "0", *PACE, "--max-concurrent", "8"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield Contender(name=kind, url=f"http://127.0.0.1:{int(process.stdout.readline())}")
        finally:
            process.terminate()


def words(text: str) -> int:
    return len(text.split())


@pytest.fixture(scope="module")
def raced(tmp_path_factory: pytest.TempPathFactory) -> tuple[RaceResult, Path]:
    """An honest engine, one that counts tokens which bring no text, and one that sends two words a token."""
    out = tmp_path_factory.mktemp("claims")
    with ExitStack() as stack:
        contenders = [stack.enter_context(twin(kind)) for kind in ("honest", "hollow", "modest")]
        told = card(out, contenders, text=SCENARIO.replace("max_cells: 3", "max_cells: 1"))
        told = replace(told, open_counter={"fake": words}.__getitem__)
        return asyncio.run(race(told, Log())), out


def of(result: RaceResult, name: str) -> EngineResult:
    return next(engine for engine in result.engines if engine.name == name)


def test_an_engine_that_counts_empty_tokens_keeps_every_length_and_is_found_out(
    raced: tuple[RaceResult, Path],
) -> None:
    hollow = of(raced[0], "hollow")
    assert hollow.rank is None
    assert hollow.unranked == ("It claims tokens that its text does not hold: 38% of those it counted in a cell.",)
    assert all(cell.value_of("short_answer_share") == 0 for cell in hollow.cells)


def test_an_engine_that_sends_text_without_claiming_it_is_found_out(raced: tuple[RaceResult, Path]) -> None:
    modest = of(raced[0], "modest")
    assert modest.rank is None
    assert modest.unranked == ("Its text holds tokens that it does not claim: 50% of those of a cell.",)


def test_an_honest_engine_is_not_accused(raced: tuple[RaceResult, Path]) -> None:
    honest = of(raced[0], "honest")
    assert honest.rank is not None
    assert honest.unranked == ()
    assert {cell.value_of(INFLATED) for cell in honest.cells} == {0.0}


def test_the_report_names_the_audit_and_the_store_gives_it_again(raced: tuple[RaceResult, Path]) -> None:
    result, out = raced
    page = render(result)
    assert "tokens claimed beyond the text" in page
    assert "tokens of the text beyond those claimed" in page
    assert "own word" not in page
    with Store(out / "arena.duckdb", read_only=True) as store:
        assert render(judge_race(store)) == page


def test_without_a_tokenizer_the_report_says_whose_counts_are_their_own_word(tmp_path: Path) -> None:
    with twin("hollow") as contender:
        told = card(tmp_path / "race", [contender], text=SCENARIO.replace("max_cells: 3", "max_cells: 1"))
        result = asyncio.run(race(replace(told, open_counter=from_store(tmp_path)), Log()))
    assert of(result, "hollow").unranked == ()
    page = render(result)
    assert "the engine&#x27;s own word: hollow." in page
    assert "Model &#x27;fake&#x27; is not in" in page


@pytest.mark.parametrize(
    ("claims", "share"),
    [
        ([Claim(64, 64)], 0.0),
        ([Claim(128, 64)], 63 / 128),
        ([Claim(65, 64)], 0.0),
        ([Claim(64, 128)], -0.5),
        ([Claim(0, 10)], -1.0),
        ([Claim(10, 0), Claim(10, 20)], 0.0),
        ([Claim(0, 0)], None),
        ([], None),
    ],
)
def test_the_excess_is_of_the_larger_count_over_all_answers_of_a_cell(claims: list[Claim], share: float | None) -> None:
    assert excess(claims) == share
    assert [finding.value for finding in claim_findings(claims)] == ([] if share is None else [share, -share])


def test_the_tolerance_is_met_on_its_edge_and_one_cell_beyond_it_is_enough() -> None:
    assert claims_disparity("a", [0.0, TOLERANCE, -TOLERANCE]) == []
    assert [each.check for each in claims_disparity("a", [0.0, 0.0, TOLERANCE + 0.01])] == [INFLATED]
    assert [each.check for each in claims_disparity("a", [0.0, 0.0, -TOLERANCE - 0.01])] == [UNCLAIMED]
    assert all(each.blocks for each in claims_disparity("a", [0.9]))


def test_only_texts_that_a_tokenizer_can_count_are_counted(tmp_path: Path) -> None:
    three = {"token_kind": [TEXT] * 3, "out_tok_usage": 3}
    rows = [
        answer(0, **three, text="a b c"),
        answer(1, **{**three, "token_kind": [REASONING, TEXT, TEXT]}, text="a b c"),
        answer(2, **{**three, "token_kind": [TEXT, TOOL_CALL, TOOL_CALL]}, text='a {"b": 1}'),  # its head is no text
        answer(3, **three, text=None),  # not sampled
        answer(4, **{**three, "out_tok_usage": None}, text="a b c"),
        answer(5, **three, text="a b c", status="truncated"),
    ]
    with Store(tmp_path / "arena.duckdb") as store:
        prepare(store)
        load(store, tmp_path, rows)
        counted: list[str] = []

        def count(text: str) -> int:
            counted.append(text)
            return words(text)

        (why,) = recount(store, {"e1": "not-here"}, from_store(tmp_path))
        assert "not-here" in why
        assert store.query("SELECT * FROM audits") == []
        assert recount(store, {"e1": "m"}, {"m": count}.__getitem__) == ()
        assert counted == ["a b c", "a b c"]
        assert {row["check_name"]: row["value"] for row in store.query("SELECT * FROM audits")} == {
            INFLATED: 0.0,
            UNCLAIMED: 0.0,
        }
