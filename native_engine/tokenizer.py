"""Text to token ids and back, for the two kinds of BPE vocabularies: byte-level (GPT-2's scheme, which SmolLM2, Llama 3
and Qwen share) and SentencePiece's (Llama 2, Mistral, Gemma: pieces of text, single bytes where there is no piece).

    tokenizer = open_tokenizer(path)           # a GGUF file or a Hugging Face folder
    tokenizer.encode("Hello")                  # [19556]
    tokenizer.token_bytes[19556]               # b"Hello" - what the incremental detokeniser feeds on
    tokenizer.chat_template                    # Jinja source, or None

Special tokens written out in the text become their ids, as in every serving engine. Decoding leaves them out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from native_engine.errors import EngineError
from native_engine.gguf import BadModelFile, GGUFFile
from native_engine.models.config import UnsupportedModel
from native_engine.weights import read_json

# Encoding one text keeps all other threads of Python waiting; a batch of one does not, but takes a thread of its own.
LONG_TEXT_CHARS = 20_000
_CONTROL, _USER_DEFINED = 3, 4  # GGUF's token types that are matched in the text before BPE runs
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # how SentencePiece writes a space
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")

# How the pre-tokenizers that GGUF files name split a text into words, each with its own BPE.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORDS_OF: dict[str, str] = {"qwen2": _WORDS.format(digits=""), "llama-bpe": _WORDS.format(digits="{1,3}")}


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet, a printable character for each byte: itself where it prints, else one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


@dataclass
class TextTokenizer:
    """A tokenizer of the `tokenizers` library with what generation needs beside it. Safe to share between threads."""

    backend: Tokenizer
    bos_token_id: int | None
    eos_token_id: int | None
    chat_template: str | None
    special_ids: frozenset[int]
    adds_bos: bool = False
    is_sentencepiece: bool = False
    adds_space: bool = False  # in front of a text, as SentencePiece does for most vocabularies

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of `text`. `add_special_tokens` puts BOS in front where the model was trained with it."""
        if len(text) > LONG_TEXT_CHARS:
            encoding = self.backend.encode_batch_fast([text], add_special_tokens=False)[0]
        else:
            encoding = self.backend.encode(text, add_special_tokens=False)
        ids: list[int] = encoding.ids
        if add_special_tokens and self.adds_bos and self.bos_token_id is not None:
            return [self.bos_token_id, *ids]
        return ids

    def decode(self, ids: Sequence[int], *, with_special_tokens: bool = False) -> str:
        """The text of `ids`, special tokens left out unless wanted; bytes that are not UTF-8 become U+FFFD."""
        pieces = (
            self.spell(token) if with_special_tokens else self.token_bytes[token]
            for token in ids
            if token < len(self.token_bytes)
        )
        text = b"".join(pieces).decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self.adds_space else text

    @property
    def vocab_size(self) -> int:
        return len(self.token_bytes)

    def spell(self, token: int) -> bytes:
        """The bytes that a token stands for; of a special one, its name. Ids beyond the vocabulary have none."""
        if token in self.special_ids:
            return self.token_text(token).encode()
        return self.token_bytes[token] if token < len(self.token_bytes) else b""

    def token_text(self, token: int | None) -> str:
        """How a token is written in a prompt, e.g. `<|im_end|>`; empty for None."""
        return "" if token is None else (self.backend.id_to_token(token) or "")

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """The bytes that each token stands for; empty for special tokens and for gaps in the numbering."""
        vocabulary: dict[str, int] = self.backend.get_vocab(with_added_tokens=True)
        added = self.backend.get_added_tokens_decoder()
        table = [b""] * (max(vocabulary.values(), default=-1) + 1)
        for text, token in vocabulary.items():
            if token in self.special_ids:
                continue
            # Added tokens are written as themselves, entries of the BPE vocabulary in the vocabulary's own alphabet.
            table[token] = text.encode() if token in added else self._bytes_of_piece(text)
        return table

    def _bytes_of_piece(self, text: str) -> bytes:
        if self.is_sentencepiece:
            byte = _BYTE_PIECE.fullmatch(text)
            return bytes.fromhex(byte[1]) if byte else text.replace(_SPACE, " ").encode()
        try:
            return bytes(_BYTE_OF[character] for character in text)
        except KeyError as error:
            raise BadModelFile(f"The token {text!r} holds {error}, which stands for no byte.") from error


def open_tokenizer(path: Path) -> TextTokenizer:
    """The tokenizer that belongs to the model at `path`. Raises `BadModelFile` or `UnsupportedModel`."""
    return _from_folder(path) if path.is_dir() else from_gguf(GGUFFile(path))


def from_gguf(file: GGUFFile) -> TextTokenizer:
    """Build the tokenizer from the vocabulary, the merges and the name of the pre-tokenizer in a GGUF file."""
    fields = file.metadata
    kind = fields.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise UnsupportedModel(
            f"{file.path} has a {kind!r} tokenizer; 'gpt2' (byte-level BPE) and 'llama' (SentencePiece) are supported."
        )
    adds_space = kind == "llama" and bool(fields.get("tokenizer.ggml.add_space_prefix", True))
    try:
        backend = _sentencepiece(file, adds_space) if kind == "llama" else _byte_level(file)
    except EngineError:
        raise
    except Exception as error:  # the library raises bare Exception, e.g. for a merge of tokens that do not exist
        raise BadModelFile(f"{file.path}: the vocabulary and the merges do not fit together: {error}.") from error
    special = _add_special_tokens(backend, file)
    template = fields.get("tokenizer.chat_template")
    if not isinstance(template, str | None):
        raise BadModelFile(f"{file.path}: the chat template is no text.")
    return TextTokenizer(
        backend=backend,
        bos_token_id=fields.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=fields.get("tokenizer.ggml.eos_token_id"),
        chat_template=template,
        special_ids=special,
        adds_bos=bool(fields.get("tokenizer.ggml.add_bos_token", kind == "llama")),
        is_sentencepiece=kind == "llama",
        adds_space=adds_space,
    )


def _byte_level(file: GGUFFile) -> Tokenizer:
    pre = file.metadata.get("tokenizer.ggml.pre", "default")
    # Llama 3 takes a word that is in the vocabulary whole, even where no merges lead to it.
    backend = Tokenizer(models.BPE(vocab=_vocabulary(file), merges=_merges(file), ignore_merges=pre == "llama-bpe"))
    backend.pre_tokenizer = _pre_tokenizer(pre, file.path)
    backend.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    return backend


def _sentencepiece(file: GGUFFile, adds_space: bool) -> Tokenizer:
    """SentencePiece's BPE joins the two neighbours whose union has the highest score. As merges: for every piece all
    ways to cut it in two, those of higher scores first."""
    vocabulary = _vocabulary(file)
    scores = _list(file, "tokenizer.ggml.scores")
    if len(scores) != len(file.metadata["tokenizer.ggml.tokens"]):
        raise BadModelFile(f"{file.path} has {len(vocabulary)} tokens but {len(scores)} scores.")
    kinds = _list(file, "tokenizer.ggml.token_type")
    normal = [
        (text, number)
        for text, number in vocabulary.items()
        if len(text) > 1 and not (number < len(kinds) and kinds[number] in (_CONTROL, _USER_DEFINED))
    ]
    normal.sort(key=lambda piece: (-scores[piece[1]], piece[1]))
    merges = [
        (left, right)
        for text, _ in normal
        for cut in range(1, len(text))
        if (left := text[:cut]) in vocabulary and (right := text[cut:]) in vocabulary
    ]
    unknown = file.metadata.get("tokenizer.ggml.unknown_token_id")
    names = file.metadata["tokenizer.ggml.tokens"]
    backend = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=merges,
            byte_fallback=True,
            fuse_unk=True,
            unk_token=names[unknown] if isinstance(unknown, int) and 0 <= unknown < len(names) else None,
        )
    )
    spaces = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if adds_space else spaces
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if adds_space else steps)
    return backend


def _pre_tokenizer(name: str, path: Path) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True)
    if name == "gpt-2":
        return byte_level
    if name == "smollm":  # each digit stands alone, so that numbers are read digit by digit
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    if name in _WORDS_OF:
        words = pre_tokenizers.Split(Regex(_WORDS_OF[name]), behavior="isolated")
        return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    known = ", ".join(("gpt-2", "smollm", *_WORDS_OF))
    raise UnsupportedModel(f"{path} splits text with the pre-tokenizer {name!r}; {known} are supported.")


def _vocabulary(file: GGUFFile) -> dict[str, int]:
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise BadModelFile(f"{file.path} has no vocabulary (tokenizer.ggml.tokens).")
    return {token: number for number, token in enumerate(tokens)}


def _merges(file: GGUFFile) -> list[tuple[str, str]]:
    merges: list[tuple[str, str]] = []
    for line in _list(file, "tokenizer.ggml.merges"):
        left, _, right = str(line).partition(" ")
        if not left or not right:
            raise BadModelFile(f"{file.path}: {line!r} is not a BPE merge.")
        merges.append((left, right))
    return merges


def _list(file: GGUFFile, key: str) -> list[Any]:
    value = file.metadata.get(key, [])
    if not isinstance(value, list):
        raise BadModelFile(f"{file.path}: {key} is no list.")
    return value


def _add_special_tokens(backend: Tokenizer, file: GGUFFile) -> frozenset[int]:
    tokens, types = file.metadata["tokenizer.ggml.tokens"], _list(file, "tokenizer.ggml.token_type")
    if types and len(types) != len(tokens):
        raise BadModelFile(f"{file.path} has {len(tokens)} tokens but {len(types)} token types.")
    control = [number for number, kind in enumerate(types) if kind == _CONTROL]
    backend.add_special_tokens([AddedToken(tokens[number], special=True, normalized=False) for number in control])
    user_defined = [number for number, kind in enumerate(types) if kind == _USER_DEFINED]
    backend.add_tokens([AddedToken(tokens[number], normalized=False) for number in user_defined])
    return frozenset(control)


def _from_folder(folder: Path) -> TextTokenizer:
    path = folder / "tokenizer.json"
    try:
        description = read_json(path)
        backend = Tokenizer.from_str(json.dumps(description))
    except BadModelFile:
        raise
    except Exception as error:  # the library raises bare Exception for whatever it dislikes in the file
        raise BadModelFile(f"Cannot read {path}: {error}.") from error
    decoder = description.get("decoder")
    is_sentencepiece = _has(decoder, "ByteFallback")
    if not (is_sentencepiece or _has(decoder, "ByteLevel")):
        raise UnsupportedModel(f"{path} is neither a byte-level tokenizer nor SentencePiece's with byte pieces.")
    settings = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").exists() else {}
    special = {number for number, token in backend.get_added_tokens_decoder().items() if token.special}
    bos = backend.token_to_id(_token_name(settings.get("bos_token")))
    return TextTokenizer(
        backend=backend,
        bos_token_id=bos,
        eos_token_id=backend.token_to_id(_token_name(settings.get("eos_token"))),
        chat_template=_folder_chat_template(folder, settings),
        special_ids=frozenset(special),
        adds_bos=bos is not None and backend.encode("", add_special_tokens=True).ids[:1] == [bos],
        is_sentencepiece=is_sentencepiece,
        adds_space=is_sentencepiece and _has(decoder, "Strip"),
    )


def _has(decoder: Any, step: str) -> bool:
    if not isinstance(decoder, dict):
        return False
    return decoder.get("type") == step or any(_has(each, step) for each in decoder.get("decoders", []))


def _token_name(entry: Any) -> str:
    """`bos_token` and its kin are written as a text or as an object with `content`."""
    return str(entry.get("content", "")) if isinstance(entry, dict) else str(entry or "")


def _folder_chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    return template if isinstance(template, str) else None
