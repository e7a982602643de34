"""Bad words: the text never holds one, however tokens fall into it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from native_engine.bad_words import BadWords, Vocabulary
from native_engine.config import EngineConfig
from native_engine.engine import Engine
from native_engine.errors import StepFailed
from native_engine.loading import load, make_engine
from native_engine.sampling_params import SamplingParams
from tests.native_engine.tiny_llama import ENGINE_CONFIG, write_tiny_llama

TOKENS = [
    b"", b"c", b"a", b"t", b"ca", b"at", b"cat", b" cat", b"concatenate", b"catcat", b"ta", b"\xc3", b"\xa9", b"\xff",
    "é".encode(), b"caf", b"atc", b"aa", b"aaa",
]  # fmt: skip
WORDS = ("cat", "at", "aa", "café", "é", "tata", "c")


def naive(words: list[str], text: bytes, token: bytes) -> bool:
    """Whether `token` brings a word into a text that has none: looked up in the whole."""
    return any(word.encode() in text + token for word in words)


@given(st.lists(st.sampled_from(WORDS), min_size=1, max_size=3, unique=True), st.randoms(use_true_random=False))
def test_the_tokens_that_complete_a_word_are_those_that_a_look_at_the_whole_text_finds(
    words: list[str], source: random.Random
) -> None:
    bad = BadWords(words, Vocabulary(TOKENS))
    output: list[int] = []
    for _ in range(12):
        text = b"".join(TOKENS[token] for token in output)
        found = set(bad.completed_by(output).tolist())
        assert found == {token for token in range(len(TOKENS)) if naive(words, text, TOKENS[token])}
        left = sorted(set(range(len(TOKENS))) - found)
        output.append(source.choice(left))  # token 0 has no text, and is always left


def test_ids_beyond_the_tokenizers_vocabulary_have_no_text() -> None:
    assert BadWords(["cat"], Vocabulary(TOKENS)).completed_by([4, 999]).tolist().count(3) == 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


def texts(engine: Engine, requests: dict[str, SamplingParams]) -> dict[str, list[int]]:
    for name, params in requests.items():
        engine.add(name, list(range(10, 40)), params)
    answers: dict[str, list[int]] = {name: [] for name in requests}
    while engine.has_work:
        for output in engine.step():
            answers[output.request_id] += output.token_ids
        engine.check()
    return answers


def test_no_answer_holds_a_word_and_neighbours_are_not_kept_from_it(folder: Path, kernel_cache: Path) -> None:
    """Each token is a byte. The words are what the request says by itself: whole, in its middle, and one character."""
    loaded = load(folder, ENGINE_CONFIG, kernel_cache=kernel_cache)
    for seed in range(6):
        plain = SamplingParams(temperature=0.8, seed=seed, max_tokens=60, ignore_eos=True)
        (alone,) = texts(loaded.engine, {"alone": plain}).values()
        said = loaded.tokenizer.decode(alone)
        words = tuple({word for at in (0, 7, 20) for word in (said[at], said[at : at + 2]) if "\ufffd" not in word})
        held = SamplingParams(temperature=0.8, seed=seed, max_tokens=60, ignore_eos=True, bad_words=words)
        together = texts(loaded.engine, {"plain": plain, "held": held, "again": plain})
        assert together["plain"] == together["again"] == alone
        assert words
        assert not any(word in loaded.tokenizer.decode(together["held"]) for word in words)
        assert texts(loaded.engine, {"held": held})["held"] == together["held"]


def test_words_that_nobody_can_look_up_are_no_words_that_are_let_through(folder: Path, kernel_cache: Path) -> None:
    loaded = load(folder, EngineConfig(block_size=16, kv_cache_mib=4), kernel_cache=kernel_cache)
    engine = make_engine(loaded.engine._runner._model, EngineConfig(block_size=16, kv_cache_mib=4))  # type: ignore[attr-defined]
    engine.add("a", [5], SamplingParams(bad_words=("x",)))
    with pytest.raises(StepFailed):
        engine.step()
