"""One streamed answer, read right whatever the engine does and wherever the network cuts it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arena.load import scripted_engine as scripted
from arena.load.answer_reader import Answer, AnswerReader
from arena.load.response_reader import ResponseReader
from arena.load.scripted_engine import DONE, finish_event, role_event, text_event, usage_event
from arena.load.spool import REASONING, TEXT, TOOL_CALL

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
LAST = b"0\r\n\r\n"
MS = 1_000_000


def chunk(body: str | bytes) -> bytes:
    data = body.encode() if isinstance(body, str) else body
    return b"%x\r\n%b\r\n" % (len(data), data)


def read(pieces: Sequence[tuple[float, bytes]], *, closes: bool = False) -> tuple[ResponseReader, Answer]:
    """What is made of reads at the given milliseconds."""
    response = ResponseReader()
    for at_ms, data in pieces:
        if data:
            response.feed(round(at_ms * MS), data)
    if closes:
        response.end()
    reader = AnswerReader()
    for t_ns, body in response.reads:
        reader.feed(t_ns, body)
    answer = reader.answer(http=response.http, fault=response.fault, is_event_stream=response.is_event_stream)
    return response, answer


def stream(*events: tuple[float, str], end: bytes = LAST, closes: bool = False) -> Answer:
    """The answer of a chunked stream, one read an event."""
    last_ms = events[-1][0]
    return read([(0, HEAD), *((at, chunk(event)) for at, event in events), (last_ms, end)], closes=closes)[1]


@pytest.mark.replay("R01")
def test_the_role_chunk_is_not_the_first_token() -> None:
    answer = stream((0, role_event()), (200, text_event("Hi")), (201, finish_event() + DONE))
    assert (answer.role_ns, answer.first_gen_ns) == (0, 200 * MS)
    assert answer.first_text_ns == 200 * MS


@pytest.mark.replay("R02", "R03")
def test_three_tokens_make_two_gaps_and_the_ttft_is_not_one_of_them() -> None:
    answer = stream((100, role_event()), *((1400 + 20 * i, text_event("a")) for i in range(3)), (1500, DONE))
    assert answer.token_ns == [1400 * MS, 1420 * MS, 1440 * MS]


@pytest.mark.replay("R25", "R26")
def test_reasoning_counts_for_ttft_and_once_for_tokens() -> None:
    """Some engines send it under both names; it is one token all the same."""
    thought = text_event("", reasoning="hm", reasoning_content="hm")
    usage = usage_event(2, reasoning_tokens=1)
    answer = stream((1000, thought), (1500, text_event("Hi")), (1501, finish_event() + usage + DONE))
    assert (answer.first_gen_ns, answer.first_reason_ns, answer.first_text_ns) == (1000 * MS, 1000 * MS, 1500 * MS)
    assert answer.token_kind == [REASONING, TEXT]
    assert (answer.out_tok_counted, answer.out_tok_usage, answer.reason_tok_usage) == (2, 2, 1)


def test_tool_call_arguments_are_generated_text_and_their_name_alone_is_not() -> None:
    def call(**function: str) -> str:
        return scripted.event({"choices": [{"delta": {"tool_calls": [{"index": 0, "function": function}]}}]})

    answer = stream((10, call(name="f", arguments="")), (30, call(arguments='{"a"')), (31, finish_event("tool_calls")))
    assert (answer.first_gen_ns, answer.first_text_ns, answer.token_kind) == (30 * MS, None, [TOOL_CALL])
    assert (answer.status, answer.finish_reason) == ("ok", "tool_calls")


@pytest.mark.replay("R26", "R27")
def test_a_late_usage_event_or_done_does_not_extend_the_answer() -> None:
    answer = stream((10, text_event("a")), (20, text_event("b") + finish_event()), (320, usage_event(2)), (620, DONE))
    assert (answer.last_gen_ns, answer.usage_ns) == (20 * MS, 320 * MS)


@pytest.mark.replay("R18")
def test_tokens_per_chunk_come_from_usage_per_chunk_where_offered() -> None:
    events = [(40 * i, text_event("a b c d", usage=4 * i)) for i in range(1, 4)]
    answer = stream(*events, (130, finish_event() + usage_event(12) + DONE))
    assert (answer.token_n, answer.tokens_known, answer.out_tok_counted) == ([4, 4, 4], True, 12)


@pytest.mark.replay("R18")
def test_usage_in_the_last_chunk_only_does_not_make_it_a_giant_chunk() -> None:
    answer = stream((10, text_event("a")), (20, text_event("b")), (30, text_event("c", usage=40)), (31, DONE))
    assert (answer.token_n, answer.tokens_known, answer.out_tok_usage) == ([1, 1, 1], False, 40)


@pytest.mark.replay("R26")
def test_an_answer_that_ends_in_an_error_event_is_a_failure() -> None:
    error = scripted.event({"error": {"message": "out of memory", "type": "server_error"}})
    answer = stream((10, text_event("a")), (20, error), (21, finish_event() + DONE))
    assert (answer.status, answer.err_class) == ("error", "error_event")
    assert "out of memory" in (answer.err_message or "")
    named = stream((10, text_event("a")), (20, "event: error\ndata: overloaded\n\n"))
    assert (named.status, named.err_class) == ("error", "error_event")


def test_an_answer_cut_off_without_a_word_is_a_failure() -> None:
    clean = stream((10, text_event("a")))
    assert (clean.status, clean.err_class, clean.first_gen_ns) == ("truncated", "no_end", 10 * MS)
    torn = stream((10, text_event("a") + finish_event()), end=b"", closes=True)
    assert (torn.status, torn.err_class) == ("truncated", "cut_off")


def test_done_without_the_last_http_chunk_is_a_whole_answer() -> None:
    answer = stream((10, text_event("a") + finish_event() + DONE), end=b"", closes=True)
    assert answer.status == "ok"


def test_an_answer_of_nothing_is_ok_and_has_no_first_token() -> None:
    answer = stream((10, role_event()), (20, finish_event("stop") + usage_event(0) + DONE))
    assert (answer.status, answer.first_gen_ns, answer.out_tok_usage, answer.token_ns) == ("ok", None, 0, [])


@pytest.mark.parametrize(
    ("head", "body", "closes", "err_class"),
    [
        (b"HTTP/1.1 500 Oops\r\nContent-Length: 4\r\n\r\n", b"oops", False, "http_500"),
        (b"HTTP/1.1 302 Found\r\nLocation: /\r\nContent-Length: 0\r\n\r\n", b"", False, "http_302"),
        (
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n",
            b"{}",
            False,
            "not_a_stream",
        ),
        (b"HTTP/1.1 200 OK\r\n", b"", True, "connection_closed"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", b"", False, "bad_http"),
        (HEAD, b"zz\r\n", False, "bad_http"),
        (HEAD, b"-5\r\n", False, "bad_http"),
        (HEAD, chunk("data: {broken\n\n") + LAST, False, "bad_event"),
        (HEAD, chunk("data: [1, 2]\n\n") + LAST, False, "bad_event"),
    ],
)
def test_every_kind_of_refusal_has_its_name(head: bytes, body: bytes, closes: bool, err_class: str) -> None:
    _response, answer = read([(1, head), (2, body)], closes=closes)
    assert (answer.status, answer.err_class) == ("error", err_class)
    assert answer.first_gen_ns is None


def test_a_refusal_keeps_what_the_engine_said() -> None:
    response, answer = read([(1, b"HTTP/1.1 429 Slow\r\nContent-Length: 12\r\n\r\n"), (2, b"quota is out")])
    assert (response.http, answer.err_message) == (429, "quota is out")


def test_an_interim_response_is_passed_over() -> None:
    response, answer = read([(1, b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD), (2, chunk(text_event("a") + DONE) + LAST)])
    assert (response.http, answer.status) == (200, "ok")


@pytest.mark.parametrize(
    ("headers", "body", "closes", "keeps_alive"),
    [
        (b"Transfer-Encoding: chunked\r\n", chunk(DONE) + LAST, False, True),
        (b"Transfer-Encoding: chunked\r\n", chunk(DONE) + b"0\r\nX-Sum: 1\r\n\r\n", False, True),
        (b"Transfer-Encoding: chunked\r\n", chunk(DONE) + LAST + b"HTTP/1.1 408", False, False),
        (b"Transfer-Encoding: chunked\r\nConnection: close\r\n", chunk(DONE) + LAST, False, False),
        (b"Content-Length: 14\r\n", DONE.encode(), False, True),
        (b"", DONE.encode(), True, False),
    ],
)
def test_every_framing_ends_where_it_should(headers: bytes, body: bytes, closes: bool, keeps_alive: bool) -> None:
    response, answer = read([(1, b"HTTP/1.1 200 OK\r\n" + headers + b"\r\n"), (2, body)], closes=closes)
    assert (response.is_complete, response.keeps_alive, response.fault) == (True, keeps_alive, None)
    assert answer.status == "ok"


def test_text_that_looks_like_the_last_chunk_does_not_end_the_response() -> None:
    response = ResponseReader()
    response.feed(1, HEAD)
    assert not response.feed(2, chunk(b"data: 0\r\n\r\n")[:-2])
    assert not response.feed(3, b"\r\n")
    assert response.feed(4, LAST)


def test_an_endless_head_is_given_up() -> None:
    response = ResponseReader()
    ended = [response.feed(index, b"x" * 8192) for index in range(9)]
    assert ended[-1]
    assert response.fault == "bad_http"


LINE_ENDS = st.sampled_from(["\n", "\r\n", "\r"])


@given(
    data=st.data(),
    line_end=LINE_ENDS,
    texts=st.lists(st.text("aé€😀 \\", min_size=1, max_size=5), min_size=1, max_size=6),
)
@pytest.mark.replay("R29")
def test_a_stream_reads_the_same_wherever_it_is_cut(data: st.DataObject, line_end: str, texts: list[str]) -> None:
    """Cuts inside UTF-8, CRLF, chunk sizes and heads; comments and multi-line data between the events."""
    events = [": keep-alive\n\n", role_event(), *map(text_event, texts), "data: {\ndata: }\n\n"]
    events += [finish_event() + usage_event(len(texts)), DONE]
    body = b"".join(chunk(event.replace("\n", line_end)) for event in events)
    wire = HEAD + body + LAST
    cuts = sorted(data.draw(st.lists(st.integers(1, len(wire) - 1), max_size=12)))
    pieces = [(0.0, wire[a:b]) for a, b in zip([0, *cuts], [*cuts, len(wire)], strict=True)]
    response, answer = read(pieces)
    assert (response.is_complete, response.fault) == (True, None)
    whole = read([(0.0, wire)])[1]
    assert dataclasses.replace(answer, n_recvs=0) == dataclasses.replace(whole, n_recvs=0)
    assert (answer.status, answer.n_chunks, answer.out_tok_usage) == ("ok", len(texts), len(texts))


def test_a_stream_without_the_blank_line_after_done_is_whole() -> None:
    assert stream((10, text_event("a")), (20, "data: [DONE]\n")).status == "ok"


def test_a_done_with_a_space_behind_it_ends_the_answer_and_does_not_spoil_it() -> None:
    """Server-sent events keep trailing spaces; the probe took it for an end while every cell counted a failure."""
    assert stream((10, text_event("a")), (20, "data: [DONE] \n\n")).status == "ok"
