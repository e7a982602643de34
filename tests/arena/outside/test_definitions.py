"""What other tools mean: each definition against figures that were worked out by hand."""

from __future__ import annotations

import pytest

from arena.load.scripted_engine import Log, Record
from arena.outside.answers import from_log
from arena.outside.comparison import CASES, OURS, Run, table
from arena.outside.definitions import DEFINITIONS, Answer, Event, throughput
from arena.outside.tools import Claims


def answer(*events: tuple[float, str, int], sent_ms: float = 0) -> Answer:
    told = tuple(Event(at_ms, kind, tokens) for at_ms, kind, tokens in events)  # type: ignore[arg-type]
    return Answer(sent_ms, told, sum(event.tokens for event in told))


ROLE_FIRST = answer((0, "role", 0), *((200 + 20 * i, "text", 1) for i in range(5)), (280, "finish", 0))
FOUR_AN_EVENT = answer(*((200 + 40 * i, "text", 4) for i in range(3)), (280, "finish", 0))


@pytest.mark.parametrize(
    ("tool", "ttft_ms", "tpot_ms", "mean_itl_ms"),
    [("Goodgate", 200, 20, 20), ("vLLM bench", 0, 70, 280 / 6), ("GuideLLM", 200, 56, 20), ("AIPerf", 200, 20, 20)],
)
def test_an_answer_that_begins_with_a_role(tool: str, ttft_ms: float, tpot_ms: float, mean_itl_ms: float) -> None:
    found = DEFINITIONS[tool](ROLE_FIRST)
    assert (found.ttft_ms, found.tpot_ms) == (ttft_ms, pytest.approx(tpot_ms))
    assert sum(found.itl_ms) / len(found.itl_ms) == pytest.approx(mean_itl_ms)


@pytest.mark.parametrize(
    ("tool", "tpot_ms"), [("Goodgate", 10), ("vLLM bench", 80 / 11), ("GuideLLM", 280 / 12), ("AIPerf", 80 / 11)]
)
def test_four_tokens_an_event(tool: str, tpot_ms: float) -> None:
    assert DEFINITIONS[tool](FOUR_AN_EVENT).tpot_ms == pytest.approx(tpot_ms)


@pytest.mark.parametrize("tool", ["Goodgate", "vLLM bench", "AIPerf"])
def test_an_answer_of_one_token_has_no_time_per_token(tool: str) -> None:
    assert DEFINITIONS[tool](answer((50, "text", 1))).tpot_ms is None


def test_throughput_counts_from_the_first_send_to_the_last_event() -> None:
    assert throughput([answer((100, "text", 10)), answer((100, "text", 10), sent_ms=900)]) == pytest.approx(20)


@pytest.mark.parametrize("case", CASES, ids=["words", "role", "four"])
def test_the_truth_is_when_the_engine_let_go_of_each_event(case: object) -> None:
    script = case.script  # type: ignore[attr-defined]
    record = Record(5_000_000, [5_000_000 + round(step.at_ms * 1e6) for step in script.steps])
    trial = Record(1_000_000, [1_000_000] * len(script.steps))
    (true,) = from_log(Log({"b": record, "a": trial}, 1, 1, {}), script, last=1)
    assert (true.sent_ms, true.output_tokens) == (5.0, case.tokens)  # type: ignore[attr-defined]
    assert DEFINITIONS[OURS](true).ttft_ms == pytest.approx(200)
    assert [event.kind for event in true.events][-1] == "finish"


def test_a_figure_of_another_definition_stands_beside_its_own_truth_and_one_of_ours_stands_alone() -> None:
    said = Claims(
        requests=1,
        ttft_p50_ms=1.5,
        ttft_p99_ms=None,
        tpot_p50_ms=71.0,
        itl_p50_ms=20.0,
        itl_mean_ms=46.0,
        output_tokens_per_s=18.0,
    )
    shown = table(
        {OURS: [Run(said, [ROLE_FIRST])], "vLLM bench": [Run(said, [ROLE_FIRST])]}, {OURS: "", "vLLM bench": "1"}
    )
    rows = {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]] for line in shown.splitlines()}
    assert rows[""] == ["true, as we define it", OURS, "vLLM bench 1"]
    assert rows["TTFT p50, ms"] == ["200.0", "1.5", "1.5 (0.0)"]
    assert rows["TTFT p99, ms"] == ["200.0", "-", "- (0.0)"]
    assert rows["TPOT p50, ms"] == ["20.0", "71.0", "71.0 (70.0)"]
    assert rows["ITL p50, ms"] == ["20.0", "20.0", "20.0"]
