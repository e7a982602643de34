"""Text as it comes: whole characters, no stop string, and the same text however the tokens fall."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from native_engine.detokenizer import OutputText, PlacedLogprobs, StopMatcher
from native_engine.logprobs import Logprobs
from native_engine.sampling_params import SamplingParams

BYTES = [bytes([byte]) for byte in range(256)]


def feed(raw: bytes, **params: Any) -> tuple[list[str], bool]:
    """One token per byte; returns the pieces and whether a stop string was met."""
    text = OutputText(BYTES, SamplingParams(**params))
    pieces: list[str] = []
    for byte in raw:
        piece = text.feed([byte])
        pieces.append(piece.text)
        if piece.stop is not None:
            return pieces, True
    return [*pieces, text.finish().text], False


def test_a_character_appears_with_its_last_byte_and_never_broken() -> None:
    pieces, _ = feed("é😀".encode())
    assert pieces == ["", "é", "", "", "", "😀", ""]


def test_a_character_cut_off_by_the_end_is_left_out() -> None:
    assert "".join(feed("ok 😀".encode()[:-1])[0]) == "ok "


def test_bytes_that_never_become_a_character_show_as_replacement() -> None:
    assert "".join(feed(b"a\xffb\xe2\x28c")[0]) == "a\ufffdb\ufffd(c"


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])), st.data())
def test_any_text_comes_back_however_it_is_cut(text: str, data: st.DataObject) -> None:
    raw = text.encode()
    output = OutputText(BYTES, SamplingParams())
    joined, start = "", 0
    while start < len(raw):
        length = data.draw(st.integers(1, len(raw) - start))
        joined += output.feed(raw[start : start + length]).text
        start += length
    assert joined + output.finish().text == text


@pytest.mark.replay("E37")
def test_a_stop_string_across_tokens_is_cut_exactly_and_no_part_of_it_was_shown() -> None:
    pieces, stopped = feed(b"one two END three", stop=("END",))
    assert stopped
    assert "".join(pieces) == "one two "
    assert not any("E" in piece for piece in pieces)


def test_the_possible_start_of_a_stop_string_is_held_and_then_shown() -> None:
    pieces, stopped = feed(b"EN route", stop=("END",))
    assert not stopped
    assert pieces[:3] == ["", "", "EN "]
    assert "".join(feed(b"the EN", stop=("END",))[0]) == "the EN"


def test_the_stop_string_that_ends_the_text_first_wins() -> None:
    pieces, stopped = feed(b"abcabd", stop=("bd", "ca"))
    assert stopped
    assert "".join(pieces) == "ab"


def test_a_stop_string_before_min_tokens_is_text_like_any_other() -> None:
    pieces, stopped = feed(b"xx.yy.zz", stop=(".",), min_tokens=4)
    assert stopped
    assert "".join(pieces) == "xx.yy"


def test_ids_beyond_the_vocabulary_have_no_text() -> None:
    assert OutputText([b"a"], SamplingParams()).feed([0, 999, 0]).text == "aa"


@given(
    st.text(alphabet="ab", max_size=30),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.data(),
)
def test_the_matcher_cuts_where_a_look_at_the_whole_text_would(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    """Fed one character at a time, the first stop to be complete ends the text."""
    matcher, shown = StopMatcher(stops), ""
    for end, character in enumerate(text, start=1):
        piece = matcher.feed(character)
        shown += piece.text
        complete = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        assert (piece.stop is not None) == bool(complete)
        if piece.stop is not None:
            assert shown == text[: min(complete)]
            return
    assert shown + matcher.flush() == text


def told(raw: bytes, **params: Any) -> tuple[str, list[PlacedLogprobs], bool]:
    """The text, the log-probabilities that came with it (each its byte's own), and whether a stop string was met."""
    text = OutputText(BYTES, SamplingParams(**params))
    shown, placed = "", []
    for byte in raw:
        piece = text.feed([byte], [Logprobs(byte, -float(byte))])
        shown += piece.text
        placed += piece.logprobs
        assert not piece.logprobs or piece.logprobs[-1].offset < len(shown), "before its text"
        if piece.stop is not None:
            return shown, placed, True
    rest = text.finish()
    return shown + rest.text, [*placed, *rest.logprobs], False


@pytest.mark.replay("E37")
@given(st.binary(max_size=24), st.lists(st.sampled_from(["a", "é", "ab", "\ufffd", "b\n"]), max_size=2))
def test_log_probabilities_come_with_their_text_and_are_cut_with_it(raw: bytes, stops: list[str]) -> None:
    shown, placed, stopped = told(raw, stop=tuple(stops))
    assert [each.of.token_id for each in placed] == list(raw[: len(placed)])
    offsets = [each.offset for each in placed]
    assert offsets == sorted(offsets)
    if not stopped:
        assert len(placed) == len(raw)
    elif placed:
        assert offsets[-1] < len(shown)
    for byte, offset in zip(raw, offsets, strict=False):
        assert byte >= 128 or shown[offset] == chr(byte)


def test_a_token_across_the_cut_is_told_and_those_behind_it_are_not() -> None:
    text = OutputText([b"one ", b"two<", b"end", b">"], SamplingParams(stop=("<end>",)))
    pieces = [text.feed([token], [Logprobs(token, -1.0)]) for token in range(4)]
    assert [(piece.text, [each.of.token_id for each in piece.logprobs]) for piece in pieces] == [
        ("one ", [0]), ("two", [1]), ("", []), ("", []),
    ]  # fmt: skip
    assert pieces[-1].stop == "<end>"


def test_bytes_that_never_became_a_character_do_not_move_what_follows() -> None:
    shown, placed, _ = told(b"x\xe2\x80y")
    assert (shown, [each.offset for each in placed]) == ("x\ufffdy", [0, 1, 1, 2])


@pytest.mark.parametrize("stops", [(), ("x",)])
def test_without_a_possible_stop_nothing_is_held_back(stops: tuple[str, ...]) -> None:
    assert StopMatcher(stops).feed("abc").text == "abc"
