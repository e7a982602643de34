"""Token ids to text as they come: whole characters only, and nothing of a stop string.

    output = OutputText(tokenizer.token_bytes, params)
    piece = output.feed(token_ids)        # piece.text, piece.stop, piece.logprobs
    rest = output.finish()                # what was held back as the possible start of a stop string

The joined pieces are the final text. A character whose bytes lie in several tokens appears with the last of them;
bytes that can never become a character turn into U+FFFD; a character cut off by the end of the output is left out.
Log-probabilities come with the text: a token's not before any of its characters is shown, and never where a stop
string has cut all of it.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence as SequenceOf
from operator import itemgetter
from typing import NamedTuple

from native_engine.logprobs import Logprobs
from native_engine.sampling_params import SamplingParams

_INSIDE = frozenset([b"", *(bytes([byte]) for byte in range(0x80, 0xC0))])  # what does not begin a character


class PlacedLogprobs(NamedTuple):
    of: Logprobs
    offset: int  # where in the text its token begins, in characters; inside a character: where that begins


class Piece(NamedTuple):
    text: str
    stop: str | None = None  # the stop string that was met; the text ends right before it
    num_tokens: int = 0  # that it took
    logprobs: SequenceOf[PlacedLogprobs] = ()


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
        self._waiting: deque[PlacedLogprobs] = deque()  # for their text to be shown
        self._num_decoded = 0  # characters
        self._num_shown = 0

    def feed(self, token_ids: SequenceOf[int], logprobs: SequenceOf[Logprobs] = ()) -> Piece:
        """The text that these tokens complete, and `logprobs`, theirs, with it. After a `stop`, the request is over:
        tokens behind it count no more."""
        text, count = "", 0
        for place, token in enumerate(token_ids):
            if logprobs:
                self._waiting.append(PlacedLogprobs(logprobs[place], self._offset_of(token)))
            piece = self._feed_one(token)
            text, count = text + piece.text, count + 1
            if piece.stop is not None:
                return Piece(text, piece.stop, count, self._shown_with(text))
        return Piece(text, None, count, self._shown_with(text))

    def finish(self) -> Piece:
        """What was held back, and every token whose text is not whole: there will be no more of it."""
        return Piece(self._matcher.flush(), logprobs=list(self._waiting))

    def _shown_with(self, text: str) -> list[PlacedLogprobs]:
        self._num_shown += len(text)
        shown: list[PlacedLogprobs] = []
        while self._waiting and self._waiting[0].offset < self._num_shown:
            shown.append(self._waiting.popleft())
        return shown

    def _bytes_of(self, token: int) -> bytes:
        # a model's vocabulary may be padded beyond the tokenizer's: such ids have no text
        return self._token_bytes[token] if token < len(self._token_bytes) else b""

    def _offset_of(self, token: int) -> int:
        """Where the next token begins in the text. What is left of a character becomes one, if another begins."""
        begins_another = self._bytes_of(token)[:1] not in _INSIDE
        return self._num_decoded + (begins_another and self._decoder.getstate()[0] != b"")

    def _feed_one(self, token: int) -> Piece:
        text = self._decoder.decode(self._bytes_of(token))
        self._num_decoded += len(text)
        if self._unchecked > 0:
            self._unchecked -= 1
            return Piece(text)
        return self._matcher.feed(text)
