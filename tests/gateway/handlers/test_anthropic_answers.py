"""Chunks as Anthropic's events and as one message: the two say the same, whatever order the engine chose."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Raw

from adapters.errors import EngineProtocolError, StreamInterrupted
from adapters.types import Chunk, FinishReason, Usage
from gateway.handlers.anthropic_answers import MESSAGE_STOP, MessageEvents, MessageFold, MessageHead

HEAD = MessageHead(id="msg_1", model="m")
END = (Chunk(finish_reason="stop"), Chunk(usage=Usage(9, 2, 4)))


def begun(number: int, arguments: str = "", name: str = "weather") -> Chunk:
    head = {"index": number, "id": f"c{number}", "type": "function"}
    return _deltas({**head, "function": {"name": name, "arguments": arguments}})


def more(number: int, arguments: str) -> Chunk:
    return _deltas({"index": number, "function": {"arguments": arguments}})


def _deltas(*deltas: dict[str, Any]) -> Chunk:
    return Chunk(tool_calls=Raw(json.dumps(deltas).encode()))


def events_of(*chunks: Chunk, stops: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    events = MessageEvents(HEAD, stops)
    data = events.opening() + b"".join(map(events.event, chunks)) + events.closing() + MESSAGE_STOP
    told = []
    for block in data.decode().split("\n\n")[:-1]:
        name, payload = block.split("\n")
        told.append(json.loads(payload.removeprefix("data: ")))
        assert name == f"event: {told[-1]['type']}"
    return told


def message_of(*chunks: Chunk, stops: tuple[str, ...] = ()) -> dict[str, Any]:
    fold = MessageFold(HEAD, stops)
    for chunk in chunks:
        fold.add(chunk)
    message: dict[str, Any] = json.loads(fold.body())
    return message


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client makes of a stream, and that at no time two blocks of it are open."""
    message: dict[str, Any] = events[0]["message"]
    assert (events[0]["type"], events[-1]["type"]) == ("message_start", "message_stop")
    is_open = None
    pieces: list[str] = []
    for event in events[1:-1]:
        match event["type"]:
            case "content_block_start":
                assert is_open is None
                assert event["index"] == len(message["content"])
                is_open, pieces = event["index"], []
                message["content"].append(event["content_block"])
            case "content_block_delta":
                assert event["index"] == is_open
                pieces.append(next(value for name, value in event["delta"].items() if name != "type"))
            case "content_block_stop":
                assert event["index"] == is_open
                block, whole, is_open = message["content"][-1], "".join(pieces), None
                key = {"text": "text", "thinking": "thinking", "tool_use": "input"}[block["type"]]
                block[key] = json.loads(whole or "{}") if key == "input" else whole
            case "message_delta":
                message |= event["delta"]
                message["usage"] |= event["usage"]
    assert is_open is None
    return message


def test_a_text_is_one_block() -> None:
    chunks = (Chunk(text="Hel"), Chunk(text="lo"), *END)
    assert [event["type"] for event in events_of(*chunks)] == [
        "message_start", "content_block_start", "content_block_delta", "content_block_delta", "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    assert message_of(*chunks) == {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [{"type": "text", "text": "Hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 5,
            "output_tokens": 2,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 4,
        },
    }


def test_what_the_engine_does_not_tell_of_its_cache_is_not_made_up() -> None:
    message = message_of(Chunk(text="a"), Chunk(finish_reason="stop"), Chunk(usage=Usage(9, 2)))
    assert message["usage"] == {"input_tokens": 9, "output_tokens": 2}


def test_thoughts_text_and_calls_are_blocks_in_their_order() -> None:
    message = message_of(
        Chunk(reasoning="Hm"),
        Chunk(reasoning="m"),
        Chunk(text="Look:"),
        begun(0, '{"city": '),
        more(0, '"Paris"}'),
        *END,
    )
    assert message["content"] == [
        {"type": "thinking", "thinking": "Hmm", "signature": ""},
        {"type": "text", "text": "Look:"},
        {"type": "tool_use", "id": "c0", "name": "weather", "input": {"city": "Paris"}},
    ]
    assert message["stop_reason"] == "tool_use"


@pytest.mark.replay("G20")
def test_g20_parallel_calls_whose_pieces_interleave_stay_apart() -> None:
    chunks = (
        begun(0), begun(1, '{"a"'), more(0, '{"b":'), more(1, ":1}"), begun(2), more(0, "2}"), Chunk(text="so"),
        Chunk(finish_reason="tool_calls"), END[1],
    )  # fmt: skip
    message = joined(events_of(*chunks))
    assert [block.get("input", block.get("text")) for block in message["content"]] == [{"b": 2}, {"a": 1}, {}, "so"]
    assert message == message_of(*chunks)


def test_the_next_call_is_told_as_soon_as_the_one_before_it_is_whole() -> None:
    events = MessageEvents(HEAD, ())
    events.event(begun(0, '{"a":1}'))
    told = events.event(begun(1, '{"b'))
    assert told.count(b"content_block_stop") == 2  # its name and its type
    assert b'"partial_json":"{\\"b"' in told


@pytest.mark.parametrize(
    ("reason", "told"),
    [("stop", "end_turn"), ("tool_calls", "end_turn"), ("length", "max_tokens"), ("content_filter", "refusal")],
)
def test_stop_reasons_are_anthropics(reason: FinishReason, told: str) -> None:
    assert message_of(Chunk(text="a", finish_reason=reason), END[1])["stop_reason"] == told


def test_a_stop_sequence_is_named_where_the_engine_tells_it() -> None:
    end = (Chunk(text="a", finish_reason="stop", stop_string="END"), END[1])
    for told in (message_of(*end, stops=("END",)), events_of(*end, stops=("END",))[-2]["delta"]):
        assert (told["stop_reason"], told["stop_sequence"]) == ("stop_sequence", "END")
    assert message_of(*end)["stop_reason"] == "end_turn"  # the engine's own: the client knows nothing of it


def test_a_call_that_the_limit_has_cut_is_told_as_far_as_it_came() -> None:
    chunks = (begun(0, '{"city": "Pa'), Chunk(finish_reason="length"), END[1])
    assert message_of(*chunks)["stop_reason"] == "max_tokens"
    assert message_of(*chunks)["content"] == [{"type": "tool_use", "id": "c0", "name": "weather", "input": {}}]
    assert events_of(*chunks)[2]["delta"] == {"type": "input_json_delta", "partial_json": '{"city": "Pa'}


@pytest.mark.parametrize(
    "chunks",
    [
        (begun(0, '{"city": "Pa'), *END),
        (begun(0, "[1]"), *END),
        (begun(0, "{}"), begun(1), more(0, "{}"), *END),
        (more(0, "{}"), *END),
        (*END[:1], *END),
        (*END[:1], Chunk(text="a")),
        (Chunk(text="a", index=1), *END),
    ],
    ids=["cut", "no object", "goes on after its end", "never begun", "finished twice", "goes on", "a second choice"],
)
def test_calls_that_make_no_sense_are_the_engines_fault_in_both_modes(chunks: tuple[Chunk, ...]) -> None:
    for tell in (events_of, message_of):
        with pytest.raises(EngineProtocolError):
            tell(*chunks)


def test_an_answer_without_an_end_is_not_whole_in_either_mode() -> None:
    for tell in (events_of, message_of):
        with pytest.raises(StreamInterrupted):
            tell(Chunk(text="a"), Chunk(usage=Usage(1, 1)))


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["text", "thought", "a", "b", "c"]), st.text(max_size=5)), max_size=30))
def test_a_stream_and_a_message_say_the_same_in_any_order(pieces: list[tuple[str, str]]) -> None:
    chunks: list[Chunk] = []
    calls: dict[str, list[str]] = {}
    for what, said in pieces:
        if what == "text":
            chunks.append(Chunk(text=said))
        elif what == "thought":
            chunks.append(Chunk(reasoning=said))
        else:
            number = list(calls).index(what) if what in calls else len(calls)
            inner = json.dumps(said)[1:-1]
            chunks.append(more(number, inner) if what in calls else begun(number, '{"said": "' + inner))
            calls.setdefault(what, []).append(said)
    chunks += [more(number, '"}') for number in range(len(calls))]
    message = message_of(*chunks, *END)
    assert joined(events_of(*chunks, *END)) == message
    blocks = message["content"]
    assert [each["input"]["said"] for each in blocks if each["type"] == "tool_use"] == [
        "".join(c) for c in calls.values()
    ]
    assert "".join(b["text"] for b in blocks if b["type"] == "text") == "".join(s for w, s in pieces if w == "text")
