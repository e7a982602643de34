"""Thoughts out of a model's text: however it is cut, with calls beside and inside them, and of which templates."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from adapters.errors import EngineUnavailable
from adapters.models.chat_template import ChatTemplate
from adapters.tools.think_text import ReasoningParser, ThinkChunks, ThinkText, reads_thoughts, thoughts_of
from adapters.tools.tool_calls import CallChunks, offered
from adapters.types import Chunk, Usage
from tests.contract.conftest import chat, completion
from tests.contract.tool_formats import NOW, ROME, TOOLS, told, written


def read(pieces: Sequence[str], *, begins_inside: bool = False) -> tuple[str, str]:
    parser = ThinkText(begins_inside=begins_inside)
    parts = [*(parser.feed(piece) for piece in pieces), parser.finish()]
    return "".join(thought for thought, _ in parts), "".join(said for _, said in parts)


@pytest.mark.parametrize(
    ("text", "inside", "thought", "said"),
    [
        ("<think>\nhm\n</think>\n\nFour.", False, "hm", "Four."),
        ("\n<think>a b</think>c", False, "a b", "c"),
        ("hm\n</think>\n\nFour.", True, "hm", "Four."),
        ("<think>hm</think>Four.", True, "hm", "Four."),
        ("<think>\n\n</think>\n\nFour.\n", False, "", "Four.\n"),
        ("</think>Four.", True, "", "Four."),
        ("Four.", False, "", "Four."),
        (" Four <think>5</think>", False, "", " Four <think>5</think>"),
        ("<thinking>hm", False, "", "<thinking>hm"),
        ("<thi", False, "", "<thi"),
        ("<think>cut o</thin", False, "cut o</thin", ""),
        ("never ends \n", True, "never ends \n", ""),
        ("<think>a</think><think>b</think>", False, "a", "<think>b</think>"),
        ("<think>a < b </ c </think>d", False, "a < b </ c", "d"),
        ("</think>", False, "", "</think>"),
        ("", True, "", ""),
    ],
)
def test_thought_and_answer_are_parted(text: str, inside: bool, thought: str, said: str) -> None:
    assert read([text], begins_inside=inside) == (thought, said)
    assert read(list(text), begins_inside=inside) == (thought, said)


PIECES = st.lists(st.sampled_from(["<think>", "</think>", "<", "</", "think>", "k>", " ", "\n", "a", "é"]), max_size=14)


@given(pieces=PIECES, inside=st.booleans(), cuts=st.lists(st.integers(1, 9), max_size=30))
@example(pieces=["<think>", "a", "\n", "</", "think>", "b"], inside=False, cuts=[1] * 30)
def test_it_makes_no_difference_how_the_text_is_cut(pieces: list[str], inside: bool, cuts: list[int]) -> None:
    text, cut, at = "".join(pieces), [], 0
    for length in cuts:
        cut.append(text[at : at + length])
        at += length
    assert read([*cut, text[at:]], begins_inside=inside) == read([text], begins_inside=inside)


@given(pieces=PIECES, inside=st.booleans())
def test_nothing_is_lost_but_the_marks_and_the_space_beside_them(pieces: list[str], inside: bool) -> None:
    text = "".join(pieces)
    thought, said = read([text], begins_inside=inside)
    whole = rf"\s*(<think>)?\s*{re.escape(thought)}\s*(</think>)?\s*{re.escape(said)}"
    assert re.fullmatch(whole, text)


@given(text=st.text(alphabet="ab <>/think\n", max_size=40))
def test_a_text_that_does_not_begin_with_a_thought_is_left_as_it_is(text: str) -> None:
    if not text.lstrip().startswith("<think>"):
        assert read(list(text)) == ("", text)


# ------------------------------ chunks


def through(text: str, cut: int, *, prompt: str = "", index: int = 0) -> list[Chunk]:
    """The chunks of one choice that calls tools in hermes' words, after thoughts and calls have been read."""
    request = chat(tools=TOOLS, n=2)
    offer = offered(request, "engine")
    thoughts = thoughts_of(request, prompt)
    assert offer is not None
    assert thoughts is not None
    calls = CallChunks(offer, "hermes", num_choices=2)
    pieces = [Chunk(index=index, text=text[at : at + cut]) for at in range(0, len(text), cut)]
    given_chunks = [*pieces, Chunk(index=index, finish_reason="stop"), Chunk(usage=Usage(1, 1))]
    parted = [passed for chunk in given_chunks if (passed := thoughts.feed(chunk)) is not None]
    return [passed for chunk in parted for passed in calls.feed(chunk)]


@pytest.mark.parametrize("cut", [1, 3, 7, 1000])
@pytest.mark.parametrize("is_opened_by_prompt", [False, True])
def test_a_call_inside_a_thought_is_no_call_and_one_after_it_is(cut: int, is_opened_by_prompt: bool) -> None:
    inside, after = written("hermes", [ROME]), written("hermes", [NOW])
    text = f"I could {inside} or not.\n</think>\n\nLet me see.\n{after}"
    prompt = "[assistant]<think>\n" if is_opened_by_prompt else "[assistant]"
    chunks = through(text if is_opened_by_prompt else f"<think>\n{text}", cut, prompt=prompt, index=1)
    assert "".join(chunk.reasoning for chunk in chunks) == f"I could {inside} or not."
    assert "".join(chunk.text for chunk in chunks) == "Let me see."
    assert told(chunks, 1).calls == [NOW]
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["tool_calls"]
    assert chunks[-1].usage == Usage(1, 1)


def test_nothing_goes_out_while_nothing_is_certain() -> None:
    thoughts = ThinkChunks("", num_choices=1)
    assert thoughts.feed(Chunk(text="<thi")) is None
    last = thoughts.feed(Chunk(text="s>", finish_reason="length"))
    assert (last.text, last.reasoning, last.finish_reason) == ("<this>", "", "length") if last else False


def test_answers_with_no_place_for_a_thought_are_not_searched() -> None:
    assert thoughts_of(completion(), "<think>") is None
    assert thoughts_of(chat(), "<think>", must_call=True) is None
    assert thoughts_of(chat(response_format={"type": "json_object"}), "<think>") is None
    assert thoughts_of(chat(response_format={"type": "text"}), "<think>") is not None


# ------------------------------ templates


@pytest.mark.parametrize(
    ("wanted", "source", "hidden", "reads"),
    [
        ("auto", "{{ content.split('</think>')[-1] }}", (), True),
        ("auto", "{{ messages }}", (), False),
        ("auto", "{{ '<think></think>' }}", ("<think>", "</think>"), False),
        ("think", "{{ messages }}", ("<eos>",), True),
        ("none", "{{ '<think></think>' }}", (), False),
    ],
)
def test_the_template_says_whether_the_model_thinks_aloud(
    wanted: ReasoningParser, source: str, hidden: tuple[str, ...], reads: bool
) -> None:
    assert reads_thoughts(wanted, ChatTemplate(source), hidden) is reads


def test_a_wanted_parser_that_would_see_no_marks_is_refused() -> None:
    with pytest.raises(EngineUnavailable, match="hides the special tokens"):
        reads_thoughts("think", ChatTemplate("{{ messages }}"), ("</think>",))
