"""Token ids to text as they come: whole characters only, and nothing of a stop string.

    output = OutputText(tokenizer.token_bytes, params)
    piece = output.feed(token_ids)        # piece.text, piece.stop
    rest = output.finish()                # what was held back as the possible start of a stop string

The joined pieces are the final text. A character whose bytes lie in several tokens appears with the last of them;
bytes that can never become a character turn into U+FFFD; a character cut off by the end of the output is left out.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from operator import itemgetter
from typing import NamedTuple

from native_engine.sampling_params import SamplingParams


class Piece(NamedTuple):
    text: str
    stop: str | None = None  # the stop string that was met; the text ends right before it
    num_tokens: int = 0  # that it took


class StopMatcher:
    """Finds the first stop string in a text that arrives in pieces, and holds back what may be the start of one."""

    def __init__(self, stops: SequenceOf[str]) -> None:
        self._stops = stops
        self._held = ""

    def feed(self, text: str) -> Piece:
        text = self._held + text
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._held = ""
            at, stop = min(found, key=itemgetter(0))
            return Piece(text[:at], stop)
        safe = len(text) - self._possible_start(text)
        self._held = text[safe:]
        return Piece(text[:safe])

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = max(map(len, self._stops), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0


class OutputText:
    """The text of one request."""

    def __init__(self, token_bytes: SequenceOf[bytes], params: SamplingParams) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._matcher = StopMatcher(params.stop)
        self._unchecked = params.min_tokens  # tokens that no stop string may end

    def feed(self, token_ids: Iterable[int]) -> Piece:
        """The text that these tokens complete. After a `stop`, the request is over: tokens behind it count no more."""
        text, count = "", 0
        for token in token_ids:
            piece = self._feed_one(token)
            text, count = text + piece.text, count + 1
            if piece.stop is not None:
                return Piece(text, piece.stop, count)
        return Piece(text, None, count)

    def finish(self) -> str:
        return self._matcher.flush()

    def _feed_one(self, token: int) -> Piece:
        # a model's vocabulary may be padded beyond the tokenizer's: such ids have no text
        raw = self._token_bytes[token] if token < len(self._token_bytes) else b""
        text = self._decoder.decode(raw)
        if self._unchecked > 0:
            self._unchecked -= 1
            return Piece(text)
        return self._matcher.feed(text)
