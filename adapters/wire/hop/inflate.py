"""Bodies that come compressed although nobody asked for it, a bounded piece at a time.

inflater = inflater_for(b"gzip")
data = inflater.feed(packed)
while more := inflater.more(): ...      # what `feed` left for later: a few bytes may stand for gigabytes
"""

from __future__ import annotations

import zlib

from adapters.wire.hop.errors import BadHTTP, CutOff

MAX_PIECE = 1 << 20
_EITHER_FORM = zlib.MAX_WBITS | 32  # gzip's or zlib's, as its first bytes say


class Inflater:
    def __init__(self) -> None:
        self._inflate = zlib.decompressobj(_EITHER_FORM)

    @property
    def is_whole(self) -> bool:
        return self._inflate.eof

    def feed(self, packed: bytes) -> bytes:
        try:
            return self._inflate.decompress(self._inflate.unconsumed_tail + packed, MAX_PIECE)
        except zlib.error as error:
            raise CutOff("the compressed answer does not unpack") from error

    def more(self) -> bytes:
        return self.feed(b"") if self._inflate.unconsumed_tail else b""


def inflater_for(encoding: bytes) -> Inflater | None:
    name = encoding.strip().lower()
    if name in (b"", b"identity"):
        return None
    if name in (b"gzip", b"x-gzip", b"deflate"):
        return Inflater()
    raise BadHTTP("the answer is compressed in a way that nobody asked for")
