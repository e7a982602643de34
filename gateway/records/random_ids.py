"""Random ids, as unguessable as the system's randomness, of which they take a page at a time.

random_hex(12)                  # "9f2c51e07a8b3d64c0ee12f7": 12 bytes; 16 are the most

A look into the system for each id costs ten times as much, and a request has several.
"""

from __future__ import annotations

import os

MAX_BYTES = 16
PAGE = 256 * MAX_BYTES

_pieces: list[str] = []  # each is given once; to pop one is a single step, so threads get different ones
os.register_at_fork(after_in_child=_pieces.clear)


def random_hex(num_bytes: int) -> str:
    assert num_bytes <= MAX_BYTES
    try:
        return _pieces.pop()[: 2 * num_bytes]
    except IndexError:
        page = os.urandom(PAGE).hex()
        _pieces.extend(page[at : at + 2 * MAX_BYTES] for at in range(0, 2 * PAGE, 2 * MAX_BYTES))
        return random_hex(num_bytes)
