"""The gateway's measurements: a short soak that must hold, and the pure parts that judge and draw."""

from __future__ import annotations

import asyncio
import xml.dom.minidom
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.commands.bench import tables
from gateway.commands.bench.clients import Outcome, judged, judged_whole
from gateway.commands.bench.engine import answer_text, last_events, token_event
from gateway.commands.bench.faults import CYCLE
from gateway.commands.bench.picture import drawn
from gateway.commands.bench.soak import soak
from gateway.commands.bench.tables import NoPlace, placed
from gateway.commands.bench.verdict import slope


@pytest.mark.slow
def test_soak_with_every_fault_in_turn_loses_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    report = asyncio.run(soak(minutes=0.2, rate=30, folder=tmp_path, say=lambda line: None))
    assert [fault.name for fault in report.faults] == CYCLE
    broken = [claim for claim in report.claims if not claim.holds]
    assert not broken, broken
    whole = sum(counts.get(Outcome.WHOLE, 0) for counts in report.outcomes.values())
    sent = sum(sum(counts.values()) for counts in report.outcomes.values())
    assert sent > 200
    assert whole > sent / 3, report.outcomes
    assert max(sample.rss_mb for sample in report.samples) < 200
    xml.dom.minidom.parseString(drawn(report))
    assert "no request hung" in tables.of_soak(report)


def stream_of(num_tokens: int, sent: int, *, end: bytes = b"") -> bytes:
    """Events without the chunked transfer around them."""
    lines = (b"".join(token_event(number, num_tokens) for number in range(sent)) + end).split(b"\r\n")
    return b"".join(line.strip() + b"\n\n" for line in lines if line.startswith(b"data: "))


ANSWER = '{"choices":[{"message":{"content":"TEXT"}}]}'
END = b"data: [DONE]\r\n"
FINISH = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\r\n'
ERROR = b'data: {"error":{"message":"The engine has gone."}}\r\n'


@pytest.mark.parametrize(
    ("stream", "outcome"),
    [
        (stream_of(5, 5, end=FINISH + END), Outcome.WHOLE),
        (stream_of(5, 5, end=last_events(5)), Outcome.WHOLE),
        (stream_of(5, 4, end=FINISH + END), Outcome.TRUNCATED),
        (stream_of(5, 5, end=END), Outcome.TRUNCATED),  # nothing has said that it is finished
        (stream_of(5, 3, end=ERROR), Outcome.TOLD),
        (stream_of(5, 3, end=ERROR + END), Outcome.WRONG),
        (stream_of(5, 3), Outcome.BROKEN),
        (stream_of(5, 5, end=FINISH), Outcome.BROKEN),
        (stream_of(5, 5, end=FINISH + END)[:-2], Outcome.BROKEN),
        (stream_of(5, 1) + stream_of(5, 1), Outcome.WRONG),
        (b"", Outcome.BROKEN),
    ],
)
def test_a_part_of_a_stream_is_never_taken_for_the_whole(stream: bytes, outcome: Outcome) -> None:
    assert judged(stream, 5) is outcome


@pytest.mark.parametrize(
    ("status", "body", "outcome"),
    [
        (200, ANSWER.replace("TEXT", answer_text(5)), Outcome.WHOLE),
        (200, ANSWER.replace("TEXT", answer_text(4)), Outcome.TRUNCATED),
        (503, '{"error":{"message":"No replica can serve."}}', Outcome.REFUSED),
        (400, '{"error":{"message":"Something is wrong with it."}}', Outcome.WRONG),
        (503, '{"error":{}}', Outcome.WRONG),
        (502, "<html>", Outcome.WRONG),
    ],
)
def test_an_answer_in_one_piece_is_judged_by_its_words(status: int, body: str, outcome: Outcome) -> None:
    assert judged_whole(status, body.encode(), 5) is outcome


@given(st.floats(-10, 10), st.floats(-1000, 1000), st.lists(st.integers(0, 2000), min_size=3, max_size=40, unique=True))
def test_the_slope_of_a_line_is_found_exactly_and_with_certainty(per_min: float, at_0: float, times: list[int]) -> None:
    found = slope([(at, at_0 + per_min * at / 60) for at in times])
    assert found.per_min == pytest.approx(per_min, abs=1e-6)
    assert found.error == pytest.approx(0, abs=1e-6)


def test_a_leak_is_told_from_noise() -> None:
    noise = [3.0 * (-1) ** number for number in range(300)]
    still = slope([(5.0 * number, 90 + each) for number, each in enumerate(noise)])
    leaking = slope([(5.0 * number, 90 + each + 0.5 * number / 12) for number, each in enumerate(noise)])
    assert still.is_flat(0.1)
    assert leaking.per_min == pytest.approx(0.5, abs=0.05)
    assert not leaking.is_flat(0.1)


def test_a_table_goes_between_its_marks_and_nowhere_else() -> None:
    page = "a\n<!-- soak: begin -->\nold\n<!-- soak: end -->\nb\n"
    assert placed(page, "soak", "new") == "a\n<!-- soak: begin -->\nnew\n<!-- soak: end -->\nb\n"
    with pytest.raises(NoPlace, match="cost: begin"):
        placed(page, "cost", "new")
