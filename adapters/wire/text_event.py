"""Events of a stream that differ in their text alone, which nearly all do: the rest of them is read only once. Pure.

    shape = shape_of(data, read_text)       # from one that was read whole; None where its text cannot be told apart
    shape.text_of(other)                    # None: another kind of event, which has to be read whole too

An event is JSON, so when everything around one of its strings is the same byte by byte, everything but that string
means the same. That the string is the text, and nothing else depends on it, is tried out before it is believed:
`read_text` reads the event once more with another string in its place.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec
from msgspec import Struct

MAX_BYTES = 4096  # of an event whose shape is worth keeping

_TEXT = re.compile(rb'"(?:content|text)" ?: ?("[^"\\]*(?:\\.[^"\\]*)*")')
_OTHER = "\u2047 another text \u2047"
_OTHER_JSON = msgspec.json.encode(_OTHER)
_strings = msgspec.json.Decoder(str)


class TextEvent(Struct, frozen=True):
    """What stands before and after the text."""

    before: bytes
    after: bytes

    def text_of(self, data: bytes) -> str | None:
        if not (data.startswith(self.before) and data.endswith(self.after)):
            return None
        try:
            return _strings.decode(data[len(self.before) : len(data) - len(self.after)])
        except (msgspec.DecodeError, UnicodeDecodeError):  # more than one string: the sameness was chance
            return None


def shape_of(data: bytes, read_text: Callable[[bytes], str | None]) -> TextEvent | None:
    if len(data) > MAX_BYTES or read_text(data) in (None, _OTHER):
        return None
    for place in _TEXT.finditer(data):
        shape = TextEvent(data[: place.start(1)], data[place.end(1) :])
        if read_text(shape.before + _OTHER_JSON + shape.after) == _OTHER:
            return shape
    return None
