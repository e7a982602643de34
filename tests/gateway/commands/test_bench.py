"""The gateway's measurements: a short soak that must hold, and the pure parts that judge and draw."""

from __future__ import annotations

import asyncio
import xml.dom.minidom
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.marked_page import NoPlace, placed
from gateway.commands.bench import tables
from gateway.commands.bench.clients import Outcome, judged, judged_whole
from gateway.commands.bench.cost import FULL, Report, Row, claims, not_installed
from gateway.commands.bench.engine import answer_text, last_events, token_event
from gateway.commands.bench.faults import CYCLE
from gateway.commands.bench.linear import linear
from gateway.commands.bench.memory import memory, start
from gateway.commands.bench.peers import chat_body
from gateway.commands.bench.picture import drawn
from gateway.commands.bench.processes import BenchError
from gateway.commands.bench.soak import soak
from gateway.commands.bench.streams import streams
from gateway.commands.bench.verdict import slope
from gateway.commands.bench.wrk import Timing, timing_of


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
    assert found.rate == pytest.approx(per_min, abs=1e-6)
    assert found.error == pytest.approx(0, abs=1e-6)


def test_a_leak_is_told_from_noise() -> None:
    noise = [3.0 * (-1) ** number for number in range(300)]
    still = slope([(5.0 * number, 90 + each) for number, each in enumerate(noise)])
    leaking = slope([(5.0 * number, 90 + each + 0.5 * number / 12) for number, each in enumerate(noise)])
    assert still.is_flat(0.1)
    assert leaking.rate == pytest.approx(0.5, abs=0.05)
    assert not leaking.is_flat(0.1)


@pytest.mark.slow
def test_streams_memory_start_and_linear_measure_a_gateway_and_make_tables(tmp_path: Path) -> None:
    """Small runs of each: what they found is not judged here, that they measure is."""
    folders = [tmp_path / name for name in ("streams", "memory", "start", "linear")]
    for folder in folders:
        folder.mkdir()
    many = streams(number=20, rounds=1, tokens=10, folder=folders[0], say=lambda line: None)
    assert all(row.tokens_per_s > 0 and 0 < row.first_p50_ms <= row.first_p99_ms for row in many.rows)
    assert "20 arrivals" in tables.of_streams(many)
    held = memory(requests=200, folder=folders[1], say=lambda line: None)
    assert 10 < held.after_mb < 200
    assert "after 200 requests" in tables.of_memory(held)
    begun = start(rounds=1, folder=folders[2])
    assert begun.seconds > 0
    assert not begun.has_torch
    grown = linear(rounds=1, folder=folders[3])
    assert [row.sizes[-1] for row in grown.rows] == [8 << 20, 1 << 20]
    assert "8 MiB" in tables.of_linear(grown)


WRK = """
  Thread Stats   Avg      Stdev     Max   +/- Stdev
  Latency Distribution
     50%  812.00us
     75%    1.10ms
  4500 requests in 5.00s, 3.10MB read
Requests/sec:    900.00
"""


def test_what_wrk_has_said_is_read_in_ms_and_failures_are_no_figures() -> None:
    timing = timing_of(WRK, "it", cpu=0.9)
    assert (timing.p50_ms, timing.rps) == (pytest.approx(0.812), 900)
    assert timing.cpu_us == pytest.approx(200)
    with pytest.raises(BenchError, match="Non-2xx"):
        timing_of(WRK + "  Non-2xx or 3xx responses: 17", "it", cpu=0.9)
    with pytest.raises(BenchError, match="answered nothing"):
        timing_of("unable to connect", "it", cpu=0)


def test_a_peer_that_is_not_here_is_named_with_what_installs_it(tmp_path: Path) -> None:
    timing = Timing(p50_ms=0.5, rps=5000, cpu_us=200)
    rows = [Row(FULL, [timing, timing], 70.0), Row("SMG 1.13.0", [timing, timing], 20.0)]
    report = Report("2026-11-30", "2 cores", rows, not_installed(tmp_path))
    told = tables.of_cost(report)
    assert "litellm[proxy]" in told
    assert [claim.holds for claim in claims(report)] == [True, True, True]
    slower = Report("2026-11-30", "2 cores", [rows[0], Row("SMG 1.13.0", [timing, Timing(0.1, 10_000, 90)], 20.0)], {})
    assert [claim.holds for claim in claims(slower)] == [True, True, False]


def test_the_chat_that_is_posted_is_of_400_bytes() -> None:
    assert len(chat_body()) == 400


def test_a_table_goes_between_its_marks_and_nowhere_else() -> None:
    page = "a\n<!-- soak: begin -->\nold\n<!-- soak: end -->\nb\n"
    assert placed(page, "soak", "new") == "a\n<!-- soak: begin -->\nnew\n<!-- soak: end -->\nb\n"
    with pytest.raises(NoPlace, match="cost: begin"):
        placed(page, "cost", "new")
