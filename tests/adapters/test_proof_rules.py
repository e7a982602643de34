"""The rules by which a probe reads answers: each says honoured, ignored or unclear for the reason that it should."""

from __future__ import annotations

from typing import Any

import pytest

from adapters.base import Load
from adapters.probing import life, proofs
from adapters.probing.answers import Answer, Choice
from adapters.probing.verdicts import Observation, Seen
from adapters.types import Usage

HONOURED, IGNORED, UNCLEAR = Seen.HONOURED, Seen.IGNORED, Seen.UNCLEAR


def said(text: str, reason: Any = "stop", *, tokens: int = 3, prompt: int = 9) -> Answer:
    return Answer([Choice(text, finish_reason=reason)], Usage(prompt, tokens), first_token_s=0.1)


def unaccounted(text: str) -> Answer:
    return Answer([Choice(text, finish_reason="stop")], None, first_token_s=0.1)


def choices(*reasons: Any) -> Answer:
    return Answer([Choice(f"text {number}", finish_reason=each) for number, each in enumerate(reasons)], None, 0.1)


def calling(name: str, arguments: str) -> Answer:
    return Answer([Choice(finish_reason="tool_calls", calls={0: {"name": name, "arguments": arguments}})], None, 0.1)


def cached(tokens: int | None) -> Answer:
    return Answer([Choice("one", finish_reason="stop")], Usage(90, 3, cached_tokens=tokens), first_token_s=0.1)


ONE, OTHER = said("one two three"), said("other")
WATCHED = life.Watched(Load(running=1), was_busy=True, idle_after_s=0.1)

RULES = [
    ("an answer is whole", proofs.whole_answer(ONE), HONOURED),
    ("it has no text", proofs.whole_answer(said("")), IGNORED),
    ("it does not end", proofs.whole_answer(said("one", None)), IGNORED),
    ("it has no account", proofs.whole_answer(unaccounted("one")), IGNORED),
    ("a prompt is found with its own salt only", proofs.kept_apart(cached(64), cached(0)), HONOURED),
    ("a prompt is found with any salt", proofs.kept_apart(cached(64), cached(32)), IGNORED),
    ("a prompt is found with no salt", proofs.kept_apart(cached(0), cached(0)), UNCLEAR),
    ("what is found is not told", proofs.kept_apart(cached(None), unaccounted("one")), UNCLEAR),
    ("ids are counted as they are", proofs.counted(said("x", prompt=8), 8), HONOURED),
    ("ids are counted otherwise", proofs.counted(said("x", prompt=9), 8), IGNORED),
    ("ids and their text go on alike", proofs.same_continuation(ONE, ONE, 3), HONOURED),
    ("ids and their text go on apart", proofs.same_continuation(ONE, OTHER, 3), IGNORED),
    ("as many ids as the account says", proofs.equal_counts(5, 5), HONOURED),
    ("no ids at all", proofs.equal_counts(0, 0), IGNORED),
    ("more ids than the account says", proofs.equal_counts(6, 5), IGNORED),
    ("the limit ends the answer", proofs.within_limit([said("one", "length")], 3), HONOURED),
    ("more tokens than the limit", proofs.within_limit([said("one", "length", tokens=4)], 3), IGNORED),
    ("more text than the limit can hold", proofs.within_limit([said("x" * 193, "length")], 3), IGNORED),
    ("the model ends first", proofs.within_limit([said("one")], 3), UNCLEAR),
    ("one of two answers too long", proofs.within_limit([said("one", "length"), said("two", tokens=9)], 3), IGNORED),
    ("cut at the word", proofs.cut_at(" three", ONE, said("one two")), HONOURED),
    ("the word is still there", proofs.cut_at(" two", ONE, said("one two")), IGNORED),
    ("cut, but not for the word", proofs.cut_at(" three", ONE, said("one two", "length")), IGNORED),
    ("another answer, not a shorter one", proofs.cut_at(" three", ONE, said("four five six")), IGNORED),
    ("cold answers agree, hot ones do not", proofs.cold_and_hot([ONE, ONE, OTHER], [ONE, OTHER]), HONOURED),
    ("hot answers agree", proofs.cold_and_hot([ONE, ONE, ONE], [ONE, ONE]), IGNORED),
    ("cold answers differ", proofs.cold_and_hot([ONE, OTHER], [ONE, OTHER]), IGNORED),
    ("filtered like the greedy one", proofs.tamed(ONE, [OTHER, said("third")], [ONE, OTHER]), HONOURED),
    ("filtered like each other", proofs.tamed(ONE, [OTHER, said("third")], [OTHER, OTHER]), HONOURED),
    ("filtered, and all different", proofs.tamed(ONE, [ONE, OTHER], [OTHER, said("third")]), IGNORED),
    ("hot answers are alike anyway", proofs.tamed(ONE, [OTHER, OTHER], [ONE, ONE]), UNCLEAR),
    ("a seed repeats, another does not", proofs.repeatable([ONE, ONE], [ONE, OTHER]), HONOURED),
    ("a seed does not repeat", proofs.repeatable([ONE, OTHER], [ONE, OTHER]), IGNORED),
    ("nothing is ever sampled", proofs.repeatable([ONE, ONE], [ONE, ONE]), IGNORED),
    ("forced ids lead apart", proofs.forced_apart(ONE, [OTHER, said("third")]), HONOURED),
    ("one forced id changes nothing", proofs.forced_apart(ONE, [OTHER, ONE]), IGNORED),
    ("the word is left out", proofs.left_out("two", said("one three")), HONOURED),
    ("the word comes all the same", proofs.left_out("two", ONE), IGNORED),
    ("a penalty changes the text", proofs.less_repetitive(ONE, OTHER), HONOURED),
    ("a penalty changes nothing", proofs.less_repetitive(ONE, ONE), IGNORED),
    ("two choices, both finished", proofs.separate_choices(choices("stop", "length"), 2), HONOURED),
    ("two choices, one unfinished", proofs.separate_choices(choices("stop", None), 2), IGNORED),
    ("one choice of two", proofs.separate_choices(choices("stop"), 2), IGNORED),
    ("a log-probability a token", proofs.one_for_each_token([([-0.1, -0.2], 2)]), HONOURED),
    ("all but that of the end", proofs.one_for_each_token([([-0.1, -0.2], 3)]), HONOURED),
    ("fewer than that", proofs.one_for_each_token([([-0.1, -0.2], 4)]), UNCLEAR),
    ("a probability above 1", proofs.one_for_each_token([([-0.1, 0.2], 2)]), IGNORED),
    ("none on one of two routes", proofs.one_for_each_token([([-0.1], 1), ([], 1)]), IGNORED),
    ("the tool is called", proofs.called(calling("get_weather", '{"city": "Rome"}'), is_forced=False), HONOURED),
    ("another tool is called", proofs.called(calling("get_time", "{}"), is_forced=True), IGNORED),
    ("arguments broken off", proofs.called(calling("get_weather", '{"city": '), is_forced=True), UNCLEAR),
    ("no call where none was forced", proofs.called(ONE, is_forced=False), UNCLEAR),
    ("no call where one was forced", proofs.called(ONE, is_forced=True), IGNORED),
    ("forced, and ended by its limit", proofs.called(said("Let me", "length"), is_forced=True), UNCLEAR),
    ("bound by the schema", proofs.bound_by_schema(said('{"sky": "blue", "warm": true}')), HONOURED),
    ("JSON of another kind", proofs.bound_by_schema(said('{"sky": "green", "warm": true}')), IGNORED),
    ("a key too many", proofs.bound_by_schema(said('{"sky": "blue", "warm": true, "x": 1}')), IGNORED),
    ("not JSON", proofs.bound_by_schema(said("The sky is blue.")), IGNORED),
    ("JSON broken off by the limit", proofs.bound_by_schema(said('{"sky": "bl', "length")), UNCLEAR),
    ("tokens counted", life.counts_its_tokens([said("x", "length", tokens=4)], (4,)), HONOURED),
    ("tokens miscounted", life.counts_its_tokens([said("x", "length", tokens=5)], (4,)), IGNORED),
    (
        "one of two miscounted",
        life.counts_its_tokens([said("x", "length", tokens=4), said("y", "length", tokens=8)], (4, 9)),
        IGNORED,
    ),
    ("a prompt of no tokens", life.counts_its_tokens([said("x", "length", tokens=4, prompt=0)], (4,)), IGNORED),
    ("no account", life.counts_its_tokens([unaccounted("x")], (4,)), IGNORED),
    ("one prompt, two counts", life.counts_its_tokens([said("x"), said("x", prompt=8)], (4, 9)), IGNORED),
    ("no answer at its limit", life.counts_its_tokens([said("x")], (4,)), UNCLEAR),
    ("a share", life.a_share(0.5), HONOURED),
    ("a whole", life.a_share(1.0), HONOURED),
    ("percent", life.a_share(12.0), IGNORED),
    ("less than nothing", life.a_share(-0.5), IGNORED),
    ("nothing while one ran", life.a_share(0.0), UNCLEAR),
    ("guesses", life.a_count(3), HONOURED),
    ("no guess while one ran", life.a_count(0), UNCLEAR),
    ("not told", life.a_share(None), IGNORED),
    ("idle soon after its client had left", life.left_behind(WATCHED), HONOURED),
    ("still busy", life.left_behind(life.Watched(Load(running=1), True, None)), IGNORED),
    ("never seen busy", life.left_behind(life.Watched(Load(), False, 0.1)), UNCLEAR),
]


@pytest.mark.parametrize(("observation", "seen"), [rule[1:] for rule in RULES], ids=[rule[0] for rule in RULES])
def test_a_rule_sees(observation: Observation, seen: Seen) -> None:
    assert observation.seen is seen, observation.evidence


@pytest.mark.parametrize(
    ("vectors", "num_tokens", "seen"),
    [
        ([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]], 3, Seen.HONOURED),
        ([[1.0, 0.0], [0.0, 1.0], [1.0, 0.1]], 3, Seen.IGNORED),  # equal texts differ
        ([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]], 3, Seen.IGNORED),  # different ones do not
        ([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]], 0, Seen.IGNORED),  # nothing was counted
        ([[1.0, 0.0], [0.0, 1.0, 0.0], [1.0, 0.0]], 3, Seen.IGNORED),
        ([[1.0, 0.0], [0.0, 1.0]], 3, Seen.IGNORED),
        ([[], [], []], 3, Seen.IGNORED),
    ],
)
def test_vectors_mean_something_if_equal_texts_are_alike_and_others_are_not(
    vectors: list[list[float]], num_tokens: int, seen: Seen
) -> None:
    assert proofs.meaningful_vectors(vectors, num_tokens).seen is seen


def test_a_word_to_stop_at_comes_from_the_middle() -> None:
    word = proofs.stop_word("Once there was a little village by the sea")
    assert word is not None
    assert word.startswith(" ")
    assert 0 < "Once there was a little village by the sea".find(word) < 30
    assert proofs.stop_word("Too short to") is None
