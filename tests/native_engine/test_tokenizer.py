"""The tokenizer built from the GGUF file, against byte-pair encoding written out the slow way, and round trips."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import time
from pathlib import Path
from typing import Any

import gguf
import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from native_engine.gguf import BadModelFile, GGUFFile
from native_engine.models.config import UnsupportedModel
from native_engine.tokenizer import LONG_TEXT_CHARS, TextTokenizer, from_gguf, open_tokenizer
from tests.native_engine.tiny_llama import EOS, write_tiny_llama

GPT2_WORDS = regex.compile(r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
TEXTS = (
    "Hello world",
    "I have 1234 apples, 5 pears and it's 3.14% of 10^6.",
    "naïve café — “quoted” 😀👩‍👩‍👧 日本語 Ωμέγα",
    "  two spaces\n\n\ttab and trailing   ",
    "def f(x):\n    return x**2  # comment\n",
    "We'll they've I'd IT'S",
    "",
)


class SlowBPE:
    """SmolLM2's scheme as it is described: digits alone, GPT-2's words, then merges by rank until none is left."""

    def __init__(self, file: GGUFFile) -> None:
        self._ids = {token: number for number, token in enumerate(file.metadata["tokenizer.ggml.tokens"])}
        merges = [tuple(line.split(" ")) for line in file.metadata["tokenizer.ggml.merges"]]
        self._ranks = {pair: rank for rank, pair in enumerate(merges)}
        printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
        others = iter(range(256, 512))
        self._letters = [chr(byte if byte in printable else next(others)) for byte in range(256)]

    def encode(self, text: str) -> list[int]:
        pieces = [piece for piece in regex.split(r"(\p{Nd})", text) if piece]
        words = [word for piece in pieces for word in GPT2_WORDS.findall(piece)]
        return [token for word in words for token in self._encode_word(word)]

    def _encode_word(self, word: str) -> list[int]:
        parts = [self._letters[byte] for byte in word.encode()]
        while len(parts) > 1:
            pairs = list(itertools.pairwise(parts))
            best = min(pairs, key=lambda pair: self._ranks.get(pair, 10**9))
            if best not in self._ranks:
                break
            at = pairs.index(best)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return [self._ids[part] for part in parts]


@pytest.fixture(scope="module")
def file(model_path: Path) -> GGUFFile:
    return GGUFFile(model_path)


@pytest.fixture(scope="module")
def tokenizer(file: GGUFFile) -> TextTokenizer:
    return from_gguf(file)


@pytest.mark.model
@pytest.mark.parametrize("text", TEXTS)
def test_text_is_cut_into_the_tokens_that_slow_bpe_finds(file: GGUFFile, tokenizer: TextTokenizer, text: str) -> None:
    assert tokenizer.encode(text) == SlowBPE(file).encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.model
def test_each_digit_is_a_token_of_its_own(tokenizer: TextTokenizer) -> None:
    assert [tokenizer.token_text(token) for token in tokenizer.encode("2026")] == ["2", "0", "2", "6"]


@pytest.mark.model
def test_special_tokens_in_a_prompt_are_one_id_and_have_no_text(tokenizer: TextTokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>user\nHi<|im_end|>")
    assert ids[0] == 1
    assert ids[-1] == 2
    assert tokenizer.decode(ids) == "user\nHi"
    assert tokenizer.decode(ids, with_special_tokens=True) == "<|im_start|>user\nHi<|im_end|>"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.token_text(2) == "<|im_end|>"
    assert tokenizer.chat_template is not None
    assert "<|im_start|>assistant" in tokenizer.chat_template
    assert tokenizer.encode("Hi", add_special_tokens=True) == tokenizer.encode("Hi"), (
        "the model was trained without BOS"
    )


@pytest.mark.model
@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs", "Cn", "Co"]), max_size=40))
def test_any_text_survives_encoding_and_decoding(model_path: Path, text: str) -> None:
    """Any text whose bytes the vocabulary has: SmolLM2's lacks the first bytes of planes that are hardly used."""
    tokenizer = _cached(model_path)
    known = {raw[0] for raw in tokenizer.token_bytes if len(raw) == 1}
    text = "".join(character for character in text if known.issuperset(character.encode()))
    if not any(tokenizer.token_text(special) in text for special in tokenizer.special_ids):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def _cached(path: Path, _cache: dict[Path, TextTokenizer] = {}) -> TextTokenizer:  # noqa: B006 - the default is the cache
    return _cache.setdefault(path, _cache.get(path) or open_tokenizer(path))


def write_vocabulary(
    path: Path, model: str = "gpt2", pre: str = "gpt-2", *, adds_space: bool = True, **arrays: list[Any]
) -> GGUFFile:
    writer = gguf.GGUFWriter(path, "llama")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    writer.add_string("tokenizer.ggml.model", model)
    writer.add_string("tokenizer.ggml.pre", pre)
    tokens = ["<s>", "<tool>", *alphabet, "he"]
    fields: dict[str, list[Any]] = {"tokens": tokens, "merges": ["h e"], "token_type": [3, 4, *[1] * (len(tokens) - 2)]}
    for name, values in (fields | arrays).items():
        if values:
            writer.add_array(f"tokenizer.ggml.{name}", values)
    writer.add_uint32("tokenizer.ggml.bos_token_id", 0)
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_bool("tokenizer.ggml.add_space_prefix", adds_space)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return GGUFFile(path)


def test_gpt2_vocabularies_keep_digits_together_until_merges_say_otherwise(tmp_path: Path) -> None:
    tokenizer = from_gguf(write_vocabulary(tmp_path / "v.gguf"))
    assert [tokenizer.token_text(token) for token in tokenizer.encode("<s>hey<tool>1")] == [
        "<s>", "he", "y", "<tool>", "1",
    ]  # fmt: skip
    assert tokenizer.decode(tokenizer.encode("<s>hey<tool>1")) == "hey<tool>1"
    assert tokenizer.encode("h", add_special_tokens=True)[0] == 0


@pytest.mark.parametrize(
    ("fields", "error", "reason"),
    [
        ({"model": "bert"}, UnsupportedModel, "'bert' tokenizer"),
        ({"model": "llama", "scores": [0.0]}, BadModelFile, "1 scores"),
        ({"pre": "deepseek-llm"}, UnsupportedModel, "'deepseek-llm'"),
        ({"tokens": []}, BadModelFile, "no vocabulary"),
        ({"merges": ["broken"]}, BadModelFile, "'broken' is not a BPE merge"),
        ({"token_type": [1, 2]}, BadModelFile, "2 token types"),
    ],
)
def test_a_vocabulary_that_we_cannot_read_is_refused_by_name(
    tmp_path: Path, fields: dict[str, Any], error: type[Exception], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        from_gguf(write_vocabulary(tmp_path / "v.gguf", **fields))


class SlowSentencePiece:
    """SentencePiece's BPE as it is described: the neighbours whose union scores highest are joined, the leftmost first;
    what is no piece in the end is written in bytes. User-defined tokens stand before all that, the longest first."""

    def __init__(self, file: GGUFFile) -> None:
        fields = file.metadata
        self._tokens, self._scores = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.scores"]
        self._ids = {token: number for number, token in enumerate(self._tokens)}
        whole = {t for t, kind in zip(self._tokens, fields["tokenizer.ggml.token_type"], strict=True) if kind in (3, 4)}
        self._whole = regex.compile("|".join(regex.escape(t) for t in sorted(whole, key=len, reverse=True)))
        self._adds_space = fields.get("tokenizer.ggml.add_space_prefix", True)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        at = 0
        for match in self._whole.finditer(text):
            ids += [*self._encode_piece(text[at : match.start()]), self._ids[match[0]]]
            at = match.end()
        return ids + self._encode_piece(text[at:])

    def _encode_piece(self, text: str) -> list[int]:
        parts = list((" " * (self._adds_space and bool(text)) + text).replace(" ", "\u2581"))
        while True:
            unions = [(left + right, at) for at, (left, right) in enumerate(itertools.pairwise(parts))]
            known = [(-self._scores[self._ids[union]], at) for union, at in unions if union in self._ids]
            if not known:
                break
            at = min(known)[1]
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return [
            token
            for part in parts
            for token in (
                [self._ids[part]] if part in self._ids else [self._ids[f"<0x{byte:02X}>"] for byte in part.encode()]
            )
        ]


AWKWARD = (
    *TEXTS,
    "   three spaces, then\ttab \n\n\n\n lines\r\n",
    "<b>bold</b><table><tr><td>1</td></tr></table>",
    "\u0000\u0001\x7f \ufeff\ufffd \U0010ffff",
    "\u2174\U0001d518\U0001d52b n\u0303 \u00f1 \u0130stanbul \ufb01",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!!!!!!!!!!!!!!",
    "\u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627 \u0928\u092e\u0938\u094d\u0924\u0947 \ud55c\uad6d\uc5b4",
    "https://example.com/a?b=c&d=%20#e",
    "x" + " " * 40 + "y" + "\n" * 40,
)


def write_pieces(path: Path, *, adds_space: bool) -> GGUFFile:
    words = [
        "he",
        "el",
        "ll",
        "lo",
        "hel",
        "llo",
        "hell",
        "\u2581h",
        "\u2581hel",
        "\u2581w",
        "or",
        "ld",
        "wor",
        "\u2581wor",
    ]
    letters = sorted(set("".join(words)))
    tokens = ["<unk>", "<s>", "</s>", "  ", *[f"<0x{byte:02X}>" for byte in range(256)], *words, *letters]
    kinds = [2, 3, 3, 4, *[6] * 256, *[1] * (len(words) + len(letters))]
    scores = [0.0] * 260 + [-float(number) for number in range(len(words) + len(letters))]
    return write_vocabulary(
        path, "llama", "default", adds_space=adds_space, tokens=tokens, token_type=kinds, scores=scores, merges=[]
    )


@pytest.mark.parametrize("adds_space", [False, True])
def test_sentencepiece_joins_what_scores_highest_and_spells_the_rest_in_bytes(tmp_path: Path, adds_space: bool) -> None:
    file = write_pieces(tmp_path / "v.gguf", adds_space=adds_space)
    tokenizer, slow = from_gguf(file), SlowSentencePiece(file)
    for text in (*AWKWARD, "hello world", "hellohello  llo", "h", "<s>hello</s>hello", "\u2581"):
        assert tokenizer.encode(text) == slow.encode(text), text
        # A space is put in front of each text between tokens that stand whole, as llama.cpp does; it cannot be undone.
        if "<s>" not in text and "\u2581" not in text and not (adds_space and "  " in text):
            assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.token_bytes[4 + 0xE9] == b"\xe9"
    assert tokenizer.token_bytes[tokenizer.encode("  wor")[-1]][-3:] == b"wor"


GEMMA = Path(os.environ.get("GOODGATE_HOME", ".goodgate")).resolve() / "models" / "gemma3-270m" / "model.gguf"


@pytest.mark.model
@pytest.mark.skipif(not GEMMA.exists(), reason="needs: goodgate models pull gemma3-270m")
def test_gemma_s_vocabulary_encodes_as_sentencepiece_does() -> None:
    file = GGUFFile(GEMMA)
    tokenizer, slow = from_gguf(file), SlowSentencePiece(file)
    for text in AWKWARD:
        assert tokenizer.encode(text) == slow.encode(text), text
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("Hello world", add_special_tokens=True) == [2, 9259, 1902]
    assert tokenizer.encode("<start_of_turn>user\n") == [105, 2364, 107]


def test_a_folder_brings_its_tokenizer_and_template(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "tiny")
    tokenizer = open_tokenizer(folder)
    assert tokenizer.token_text(tokenizer.eos_token_id) == EOS
    assert tokenizer.decode(tokenizer.encode(f"héllo{EOS}")) == "héllo"
    assert tokenizer.chat_template == "{{ messages }}"
    (folder / "chat_template.jinja").write_text("newer")
    assert open_tokenizer(folder).chat_template == "newer"


def test_a_folder_whose_tokenizer_is_not_byte_level_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "tiny")
    description = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(description | {"decoder": {"type": "Fuse"}}))
    with pytest.raises(UnsupportedModel, match="byte-level"):
        open_tokenizer(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(BadModelFile, match=r"tokenizer\.json"):
        open_tokenizer(folder)


async def test_a_long_text_keeps_no_other_thread_waiting(tmp_path: Path) -> None:
    """The library's `encode` holds the interpreter until it is done, in whatever thread it runs."""
    tokenizer = open_tokenizer(write_tiny_llama(tmp_path))
    text = "hello " * (LONG_TEXT_CHARS // 2)
    assert tokenizer.encode(text) == tokenizer.encode("hello ") * (LONG_TEXT_CHARS // 2)
    began = time.perf_counter()
    encoding = asyncio.create_task(asyncio.to_thread(tokenizer.encode, "hello " * 300_000))
    num_turns = 0
    while not encoding.done():
        await asyncio.sleep(0.001)
        num_turns += 1
    assert num_turns > 10 * (time.perf_counter() - began)
