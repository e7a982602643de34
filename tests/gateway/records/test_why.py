"""The verdict on a request: slow is answered as TTFT or TPOT, with the phase that is to blame."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from gateway.records import why
from gateway.records.ledger_reader import Usual
from gateway.records.record import AttemptRecord, CandidateRecord, Detail, Record, phases_of, record_of
from gateway.records.trace import Attempt
from gateway.records.why import BAR_WIDTH, printable, seconds, story, timeline, verdict
from gateway.routing.policies import POLICIES
from tests.gateway.records.test_ledger_files import ended_trace

USUAL = Usual(812, prefill_s=0.3, tpot_s=0.03)


def record(*, completion_tokens: int = 51, **fields: Any) -> Record:
    """One whose phases are given, and nothing else took time."""
    phases = {
        name: float(fields.pop(name, 0.0))
        for name in ("receive", "gateway", "queue", "failed", "prefill", "decode", "client")
    }
    duration_s = sum(phases.values())
    plain = record_of(ended_trace(completion_tokens=completion_tokens), {})
    return msgspec.structs.replace(
        plain,
        **{f"{name}_s": value for name, value in phases.items()},
        replica="vllm-a",
        duration_s=duration_s,
        ttft_s=duration_s - phases["decode"] - phases["client"],
        tpot_s=phases["decode"] / (completion_tokens - 1) if phases["decode"] else None,
        **fields,
    )


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"prefill": 4.1, "gateway": 0.001, "decode": 1.5},
            "Slow to its first token (TTFT): 4.10 s of 4.10 s were prefill on vllm-a, where 300 ms is usual.",
        ),
        (
            {"prefill": 0.3, "decode": 4.25},
            "Slow by decode (TPOT): 85 ms a token on vllm-a, where 30 ms is usual.",
        ),
        (
            {"queue": 12.0, "prefill": 0.3, "decode": 1.5},
            "Slow to its first token (TTFT): 12.0 s of 12.3 s it waited for a model to be loaded.",
        ),
        (
            {"failed": 5.0, "prefill": 0.3, "decode": 1.5},
            "Slow to its first token (TTFT): 5.00 s of 5.30 s went into attempts that failed.",
        ),
        (
            {"receive": 3.2, "prefill": 0.3, "decode": 1.5},
            "Slow to its first token (TTFT): 3.20 s of 3.50 s the client took to send its body.",
        ),
        (
            {"gateway": 2.0, "prefill": 0.3, "decode": 1.5},
            "Slow to its first token (TTFT): 2.00 s of 2.30 s the gateway itself took.",
        ),
        (
            {"prefill": 0.3, "decode": 1.5, "client": 9.0},
            "Slow because of its client, which took nothing for 9.00 s of 10.8 s.",
        ),
        ({"prefill": 0.31, "decode": 0.2}, "Not slow: 510 ms, as usual on vllm-a."),
        (
            {"prefill": 0.3, "decode": 30.0, "completion_tokens": 1001},
            "Not slow but long: 1,001 tokens at 30 ms each, as usual on vllm-a.",
        ),
        (
            {"status": 503, "code": "engine_unavailable", "failed": 2.0, "num_attempts": 3},
            "Failed with status 503 (`engine_unavailable`), after 3 attempts and 2.00 s.",
        ),
        (
            {"code": "stream_interrupted", "prefill": 0.3, "decode": 1.5},
            "Failed in the middle of its stream (`stream_interrupted`), after one attempt and 1.80 s.",
        ),
        (
            {"status": 499, "prefill": 0.3, "decode": 1.5, "completion_tokens": 20},
            "The client left after 1.80 s, when it had about 20 tokens.",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_verdict_names_what_is_to_blame(fields: dict[str, Any], sentence: str) -> None:
    assert verdict(record(**fields), USUAL) == sentence


def test_a_replica_that_was_busy_is_said_to_have_been() -> None:
    busy = CandidateRecord(
        model="m", engine="vllm", replica="vllm-a", policy="least_load", state="ready", in_flight=7, verdict="chosen"
    )
    slow = record(prefill=4.0, decode=1.5, detail=msgspec.json.encode(Detail(candidates=(busy,))).decode())
    assert "were prefill on vllm-a, behind 7 open generations, where 300 ms is usual." in verdict(slow, USUAL)


def test_without_anything_to_compare_it_says_where_most_of_the_time_went() -> None:
    said = verdict(record(prefill=4.0, decode=1.0), Usual())
    assert said == "Most of it was prefill (TTFT) on vllm-a: 4.00 s of 5.00 s. There is nothing to compare it with yet."
    assert verdict(record(prefill=1.0, decode=4.0), Usual()).startswith(
        "Most of it was decode (TPOT): 4.00 s of 5.00 s"
    )


def test_the_timelines_bars_follow_each_other_and_fill_its_width() -> None:
    slow = record(gateway=1.0, prefill=3.0, decode=4.0)
    lines = {line.split()[0]: line for line in timeline(slow, USUAL)}
    assert [lines[phase].count("█") for phase in ("gateway", "prefill", "decode")] == [5, 15, 20]
    assert sum(line.count("█") for line in lines.values()) == BAR_WIDTH
    assert lines["prefill"].index("█") == lines["gateway"].rindex("█") + 1
    assert "usual: 300 ms (median of 812 in the day before)" in lines["prefill"]
    assert "80 ms a token, usual: 30 ms" in lines["decode"]


def test_the_story_shows_attempts_candidates_scores_and_evidence() -> None:
    detail = Detail(
        attempts=(
            AttemptRecord(
                model="m",
                engine="vllm",
                replica="vllm-b",
                started_s=0.1,
                ended_s=5.1,
                outcome="engine_timeout",
                reason="It gave no first token within 5 s.",
            ),
            AttemptRecord(
                model="m", engine="vllm", replica="vllm-a", started_s=5.1, first_token_s=5.4, ended_s=6.9, outcome="ok"
            ),
        ),
        candidates=(
            CandidateRecord(
                model="m",
                engine="vllm",
                replica="vllm-b",
                policy="least_load",
                state="ready",
                in_flight=3,
                open_tokens=4_096,
                cached_tokens=512,
                trust=0.5,
                waiting=9,
                place=0,
                proven_rps=11.3,
                verdict="chosen 1st: engine_timeout",
            ),
            CandidateRecord(
                model="m",
                engine="fake",
                replica="c",
                policy="least_load",
                state="unhealthy",
                in_flight=0,
                verdict="not ready: It\x1b[2J is gone.",
            ),
        ),
        not_reached=("remote",),
    )
    slow = record(failed=5.0, prefill=0.3, decode=1.5, detail=msgspec.json.encode(detail).decode(), num_attempts=2)
    text = "\n".join(story(slow, USUAL))
    assert "+0.100 s  vllm-b  engine_timeout, ended after 5.00 s: It gave no first token within 5 s." in text
    assert "+5.100 s  vllm-a  ok, first token after 300 ms, ended after 1.80 s" in text
    assert "candidates (least_load: the fewest open tokens for its weight first)" in text
    cells = "vllm-b vllm ready 1 3 4,096 512 0.50 9 11.3/s"
    assert f"{cells} chosen 1st: engine_timeout" in re.sub(" +", " ", text)
    assert "remote: fallback, not reached" in text
    assert "\x1b" not in text


def attempt(started: float, ended: float, *, first: float | None = None, outcome: str = "ok") -> Attempt:
    return Attempt(model="m", engine="e", replica="r", started=started, first_token=first, ended=ended, outcome=outcome)


@pytest.mark.parametrize(
    ("fields", "phases"),
    [
        ({"attempts": []}, {"receive": 0.25, "gateway": 2.0}),
        ({"attempts": [], "body_read": None}, {"receive": 2.25}),
        ({"attempts": [], "waited_s": 1.5}, {"receive": 0.25, "queue": 1.5, "gateway": 0.5}),
        (
            {"attempts": [attempt(1.5, 2.0, outcome="x"), attempt(2.0, 3.0, first=2.25)]},
            {"receive": 0.25, "gateway": 0.5, "failed": 0.5, "prefill": 0.25, "decode": 0.75},
        ),
        (
            {"attempts": [attempt(1.5, 2.0, outcome="x"), attempt(2.0, 3.25, outcome="cancelled")]},
            {"receive": 0.25, "gateway": 0.25, "failed": 0.5, "prefill": 1.25},
        ),
        (
            {"attempts": [attempt(1.5, 3.25, outcome="x")]},
            {"receive": 0.25, "gateway": 0.25, "failed": 1.75},
        ),
        (  # a stream that broke: its client had what came before
            {"attempts": [attempt(1.5, 3.25, first=2.0, outcome="stream_interrupted")]},
            {"receive": 0.25, "gateway": 0.25, "prefill": 0.5, "decode": 1.25},
        ),
        (  # two prompts at once, the second one's first token came first
            {"attempts": [attempt(1.5, 3.25, first=2.5), attempt(1.5, 3.0, first=2.0)]},
            {"receive": 0.25, "gateway": 0.25, "prefill": 0.5, "decode": 1.25},
        ),
        (  # a question, answered in one piece
            {"attempts": [attempt(1.5, 3.0)]},
            {"receive": 0.25, "gateway": 0.5, "prefill": 1.5},
        ),
        (
            {"attempts": [attempt(1.5, 3.25, first=2.0)], "client_s": 1.0},
            {"receive": 0.25, "gateway": 0.25, "prefill": 0.5, "decode": 0.25, "client": 1.0},
        ),
    ],
)  # fmt: skip
def test_phases_sum_up_to_the_duration_however_a_request_ended(
    fields: dict[str, Any], phases: dict[str, float]
) -> None:
    trace = ended_trace(**fields)
    found = phases_of(trace)
    assert sum(found.values()) == trace.elapsed_s
    assert {name: duration for name, duration in found.items() if duration} == phases
    assert record_of(trace, {}).phases == found


def test_the_time_a_token_takes_is_that_of_one_choice() -> None:
    trace = ended_trace(num_choices=2, completion_tokens=10)  # a second for five tokens each
    assert record_of(trace, {}).tpot_s == pytest.approx(0.25)
    assert record_of(ended_trace(completion_tokens=1), {}).tpot_s is None


def test_every_way_to_route_is_explained() -> None:
    assert set(why.POLICIES) == set(POLICIES)


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [(0.0, "0.00 ms"), (0.00007, "0.07 ms"), (0.0123, "12.3 ms"), (4.1, "4.10 s"), (75, "75.0 s"), (3600, "3600 s")],
)
def test_durations_have_three_digits(duration_s: float, text: str) -> None:
    assert seconds(duration_s) == text


def test_text_from_outside_moves_no_cursor() -> None:
    assert printable("a\x1b[2J\u202eb") == "a\N{REPLACEMENT CHARACTER}[2J\N{REPLACEMENT CHARACTER}b"
