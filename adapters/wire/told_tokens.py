"""Tokens with their log-probabilities, in the words of OpenAI's two routes; echoed prompts, and the best of several
answers. For engines that tell raw bytes and numbers. Pure.

A token is written as text; where its bytes are no whole characters, as OpenAI writes it: `\\xf0\\x9f` in chats, and
`bytes:\\xf0\\x9f` in completions, which have no field for bytes.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw

from adapters.types import Chunk

MAX_ECHOED = 1024  # tokens in one piece, so that no event of a stream is of the size of a long prompt


class Likely(NamedTuple):
    raw: bytes
    logprob: float


class ToldToken(NamedTuple):
    raw: bytes
    offset: int  # in characters of the answer's text
    logprob: float | None  # None: nothing stands before it
    top: Sequence[Likely] = ()


def as_chat(told: Iterable[ToldToken]) -> Raw:
    """The chats' form: a list of tokens, each with its bytes."""
    content = [
        {**_with_bytes(token.raw, token.logprob), "top_logprobs": [_with_bytes(*each) for each in token.top]}
        for token in told
    ]
    return Raw(msgspec.json.encode({"content": content, "refusal": None}))


def as_completion(told: Iterable[ToldToken]) -> Raw:
    """The completions' form: four lists. The token itself is among its alternatives, as OpenAI has it, so there may be
    one more than were asked for."""
    told = list(told)
    shape = {
        "tokens": [_in_completion(token.raw) for token in told],
        "token_logprobs": [token.logprob for token in told],
        "top_logprobs": [_alternatives(token) for token in told],
        "text_offset": [token.offset for token in told],
    }
    return Raw(msgspec.json.encode(shape))


def _alternatives(token: ToldToken) -> dict[str, float] | None:
    if token.logprob is None:
        return None
    alternatives: dict[str, float] = {}
    for raw, logprob in (*token.top, Likely(token.raw, token.logprob)):
        alternatives.setdefault(_in_completion(raw), logprob)  # tokens may be written alike; the likelier comes first
    return alternatives


def _with_bytes(raw: bytes, logprob: float | None) -> dict[str, Any]:
    return {"token": raw.decode(errors="backslashreplace"), "logprob": logprob, "bytes": list(raw)}


def _in_completion(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + raw.decode(errors="backslashreplace")


class Echo:
    """A prompt, as the beginning of each answer to it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._told: list[ToldToken] = []

    def tell(self, tokens: Sequence[tuple[bytes, float | None, Sequence[Likely]]]) -> None:
        """The prompt's tokens: bytes, log-probability and alternatives."""
        offsets = _offsets([raw for raw, _, _ in tokens], self.text)
        self._told = [ToldToken(raw, at, logprob, top) for (raw, logprob, top), at in zip(tokens, offsets, strict=True)]

    def chunks(self, index: int) -> Iterator[Chunk]:
        """What choice `index` begins with."""
        pieces = [self._told[at : at + MAX_ECHOED] for at in range(0, len(self._told), MAX_ECHOED)] or [[]]
        for place, piece in enumerate(pieces):
            text = "" if place else self.text
            yield Chunk(index=index, text=text, logprobs=as_completion(piece) if piece else None)


def _offsets(raws: Sequence[bytes], text: str) -> list[int]:
    """Where each token begins in `text`. A token in front that the text does not have, as models want one, is at 0.

    >>> _offsets([b"<s>", b"caf", b"\\xc3", b"\\xa9", b"!"], "café!")
    [0, 0, 3, 3, 4]
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    ends = [0]
    for raw in raws:
        ends.append(ends[-1] + len(decoder.decode(raw)))
    extra = ends[-1] + len(decoder.decode(b"", final=True)) - len(text)
    return [min(max(end - extra, 0), len(text)) for end in ends[:-1]]


class Candidates:
    """Answers to one prompt, of which the likeliest are given: by the mean log-probability of their tokens, as OpenAI
    has it, so that the shorter is not the better."""

    def __init__(self, num_candidates: int) -> None:
        self._chunks: list[list[Chunk]] = [[] for _ in range(num_candidates)]
        self._means = [0.0] * num_candidates

    def add(self, chunk: Chunk) -> None:
        self._chunks[chunk.index].append(chunk)

    def rate(self, index: int, cumulative_logprob: float, num_tokens: int) -> None:
        self._means[index] = cumulative_logprob / num_tokens

    def best(self, count: int) -> Iterator[Chunk]:
        """The chunks of so many, the best first; of equals the one that was asked for first."""
        ranked = sorted(range(len(self._chunks)), key=lambda index: -self._means[index])
        for place, index in enumerate(ranked[:count]):
            for chunk in self._chunks[index]:
                yield msgspec.structs.replace(chunk, index=place)
