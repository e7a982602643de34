"""Tokens and their log-probabilities in the words of OpenAI's two routes."""

from __future__ import annotations

from typing import Any

import msgspec

from adapters.types import Chunk
from adapters.wire.told_tokens import MAX_ECHOED, Candidates, Echo, Likely, ToldToken, as_chat, as_completion

HALF, REST = b"\xf0\x9f", b"\x98\x80"  # of 😀


def decoded(raw: Any) -> Any:
    return msgspec.json.decode(raw)


def test_a_chats_token_that_is_part_of_a_character_is_told_by_its_bytes() -> None:
    told = decoded(as_chat([ToldToken(HALF, 0, -0.5, [Likely(b"<end>", -0.1)]), ToldToken(REST, 0, -0.25)]))
    first, second = told["content"]
    assert first == {
        "token": "\\xf0\\x9f", "logprob": -0.5, "bytes": [0xF0, 0x9F],
        "top_logprobs": [{"token": "<end>", "logprob": -0.1, "bytes": list(b"<end>")}],
    }  # fmt: skip
    assert second["top_logprobs"] == []
    assert bytes(first["bytes"] + second["bytes"]).decode() == "😀"
    assert told["refusal"] is None


def test_a_completions_alternatives_have_the_token_itself_and_keep_pieces_of_characters_apart() -> None:
    told = decoded(as_completion([ToldToken(HALF, 3, -2.0, [Likely(REST, -0.1), Likely(b"a", -1.0)])]))
    assert told == {
        "tokens": ["bytes:\\xf0\\x9f"],
        "token_logprobs": [-2.0],
        "top_logprobs": [{"bytes:\\x98\\x80": -0.1, "a": -1.0, "bytes:\\xf0\\x9f": -2.0}],
        "text_offset": [3],
    }


def test_of_two_tokens_that_are_written_alike_the_likelier_is_told() -> None:
    told = decoded(as_completion([ToldToken(b"a", 0, -3.0, [Likely(b"a", -0.5), Likely(b"b", -1.0)])]))
    assert told["top_logprobs"] == [{"a": -0.5, "b": -1.0}]


def told_of(echo: Echo) -> dict[str, list[Any]]:
    lists: dict[str, list[Any]] = {}
    for chunk in echo.chunks(1):
        assert chunk.index == 1
        for name, values in decoded(chunk.logprobs).items():
            lists.setdefault(name, []).extend(values)
    return lists


def test_an_echo_places_each_token_where_it_begins_in_the_prompt() -> None:
    echo = Echo("a😀b")
    echo.tell([(b"<s>", None, ()), (b"a", -0.1, ()), (HALF, -0.2, ()), (REST, -0.3, ()), (b"b", -0.4, ())])
    told = told_of(echo)
    assert told["text_offset"] == [0, 0, 1, 1, 2], "the text does not have the token in front"
    assert told["token_logprobs"] == [None, -0.1, -0.2, -0.3, -0.4]
    assert told["top_logprobs"][0] is None
    assert [chunk.text for chunk in echo.chunks(1)] == ["a😀b"]


def test_a_long_echo_comes_in_pieces_that_join_to_the_whole() -> None:
    echo = Echo("ab" * MAX_ECHOED)
    echo.tell([(b"a", None, ()), *[(b"ba"[at % 2 : at % 2 + 1], -1.0, ()) for at in range(2 * MAX_ECHOED - 1)]])
    assert [chunk.text for chunk in echo.chunks(0)] == [echo.text, ""]
    assert told_of(echo)["text_offset"] == list(range(2 * MAX_ECHOED))
    assert [chunk.logprobs for chunk in Echo("x").chunks(0)] == [None]


def test_the_best_of_several_answers_is_the_one_with_the_likeliest_tokens_and_not_the_shortest() -> None:
    candidates = Candidates(3)
    for index, (cumulative, num_tokens) in enumerate([(-2.0, 1), (-3.0, 6), (-3.0, 3)]):
        candidates.rate(index, cumulative, num_tokens)
        for text in "xy":
            candidates.add(Chunk(index=index, text=f"{text}{index}"))
    best = list(candidates.best(2))
    assert [(chunk.index, chunk.text) for chunk in best] == [(0, "x1"), (0, "y1"), (1, "x2"), (1, "y2")]
