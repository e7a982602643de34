"""Reading nothing but the text of an event says the same as reading all of it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.errors import EngineProtocolError, StreamInterrupted
from adapters.types import ChatRequest, Chunk, CompletionRequest, Message, Usage
from adapters.wire import openai_wire
from adapters.wire.openai_wire import Dialect, StreamReader
from adapters.wire.text_event import MAX_BYTES, TextEvent, shape_of

CHAT = ChatRequest(model="m", messages=[Message(role="user", content="Hi")])
COMPLETION = CompletionRequest(model="m", prompt="Hi")
DIALECT = Dialect(parameters=frozenset())

Outcome = tuple[list[Chunk], type[Exception] | None]


def reader(request: ChatRequest | CompletionRequest = CHAT) -> StreamReader:
    return StreamReader("acme", request, DIALECT)


def event(delta: dict[str, Any], **more: object) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
    return json.dumps({"id": "c", "model": "m", "choices": [choice | more]}).encode()


def shape(data: bytes) -> TextEvent | None:
    return shape_of(data, openai_wire._read_text)


def read(events: Iterable[bytes], *, by_shape: bool) -> Outcome:
    """All chunks of a stream, and how it ended; each event in a read of its own."""
    stream = reader()
    if not by_shape:
        stream._shapes_left = 0
    chunks: list[Chunk] = []
    try:
        for data in events:
            chunks.extend(stream.feed(b"data: " + data + b"\n\n"))
        chunks.extend(stream.finish())
    except (EngineProtocolError, StreamInterrupted) as error:
        return chunks, type(error)
    return chunks, None


texts = st.text(max_size=8) | st.sampled_from(
    ['"', "\\", "\n", "\u2028", "\u2047 another text \u2047", '"content": "x"']
)
deltas = st.fixed_dictionaries(
    {}, optional={"content": texts | st.none(), "reasoning": texts, "role": st.just("assistant"), "name": texts}
)
extras = st.fixed_dictionaries(
    {},
    optional={
        "logprobs": st.just({"content": [{"token": "content", "content": "x"}]}),
        "finish_reason": st.sampled_from(["stop", "length", "", "odd"]),
        "text": texts,
        "index": st.integers(0, 1),
    },
)


@st.composite
def streams(draw: st.DrawFn) -> list[bytes]:
    """Events of a few shapes, with texts of all kinds, written in the ways that libraries write JSON; some damaged."""
    kinds = draw(st.lists(st.tuples(deltas, extras), min_size=1, max_size=3))
    told = []
    for kind in draw(st.lists(st.integers(0, len(kinds) - 1), min_size=1, max_size=10)):
        delta, more = kinds[kind]
        data = json.loads(event({**delta, **({"content": draw(texts)} if "content" in delta else {})}, **more))
        separators = draw(st.sampled_from([(",", ":"), (", ", ": ")]))
        written = json.dumps(data, separators=separators, ensure_ascii=draw(st.booleans())).encode("utf-8", "replace")
        cut = draw(st.integers(-40, 0))
        told.append(written if cut > -38 else written.replace(b'"}', b'"x}', 1))
    return told


@given(streams())
def test_a_stream_says_the_same_read_by_its_shape_or_whole(events: list[bytes]) -> None:
    assert read(events, by_shape=True) == read(events, by_shape=False)


@pytest.mark.parametrize("text", ["word", " ü", "\n", 'a "quote"', "back\\slash", "[DONE]", "\x7f\u2028"])
def test_the_text_is_told_whatever_it_holds(text: str) -> None:
    learnt = shape(event({"content": "first"}))
    assert learnt is not None
    assert learnt.text_of(event({"content": text})) == text
    assert learnt.text_of(json.dumps(json.loads(event({"content": text})), ensure_ascii=False).encode()) == text


@pytest.mark.parametrize(
    "other",
    [
        event({"content": "x"}, finish_reason="stop"),
        event({"content": "x", "tool_calls": []}),
        event({"content": "x"}, index=1),
        event({"content": None}),
        event({"content": "x"}) + event({"content": "y"}),
        event({"content": "x"}).replace(b'"x"', b'"x'),
        event({"content": "x"}).replace(b'"x"', b'"a\nb"'),
        event({"content": "x"}).replace(b'"x"', b'"\xff"'),
        event({"content": "x"}).replace(b'"x"', b'"x", "content": "y"'),
        b"",
    ],
)
def test_an_event_that_says_anything_else_is_read_whole(other: bytes) -> None:
    learnt = shape(event({"content": "first"}))
    assert learnt is not None
    assert learnt.text_of(other) is None


@pytest.mark.parametrize(
    "data",
    [
        event({"content": ""}),
        event({"content": "a", "reasoning": "b"}),
        event({"content": "a"}, finish_reason="stop"),
        event({"content": "a"}, logprobs={"content": []}),
        event({"content": "x" * MAX_BYTES}),
        event({"content": "x"}).replace(b'"x"', b'"x", "content": "y"').replace(b'"y"', b"null"),
    ],
)
def test_what_is_no_plain_text_has_no_shape(data: bytes) -> None:
    assert shape(data) is None


def test_what_follows_the_end_of_a_choice_is_dropped_whatever_its_shape() -> None:
    says = b"data: " + event({"content": "a"}) + b"\n\n"
    stops = b"data: " + event({}, finish_reason="stop") + b"\n\n"
    stream = reader()
    assert [chunk.text for data in (says, says, stops, says) for chunk in stream.feed(data)] == ["a", "a", ""]


def test_usage_that_grows_with_every_event_is_never_missed() -> None:
    stream = reader(COMPLETION)
    for number in range(1, 6):
        usage = b'"usage":{"prompt_tokens":3,"completion_tokens":%d}' % number
        data = b'{"choices":[{"index":0,"text":"a"}],' + usage + b"}"
        assert [chunk.text for chunk in stream.feed(b"data: " + data + b"\n\n")] == ["a"]
    assert stream.account() == Usage(3, 5)


def test_an_engine_that_stamps_its_events_is_learnt_anew_only_where_that_pays() -> None:
    stamped = reader()
    for number in range(20):  # another time in every event: never the same shape twice
        data = event({"content": "a"}).replace(b'"c"', b'"c%d"' % number)
        assert [chunk.text for chunk in stamped.feed(b"data: " + data + b"\n\n")] == ["a"]
    assert stamped._shapes_left == 0
    by_the_second = reader()
    for number in range(60):
        data = event({"content": "a"}).replace(b'"c"', b'"c%d"' % (number // 5))
        assert [chunk.text for chunk in by_the_second.feed(b"data: " + data + b"\n\n")] == ["a"]
    assert by_the_second._shapes_left > 0
