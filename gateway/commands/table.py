"""Columns of text for a terminal.

>>> list(table([("name", "role"), ("alice", "user")]))
['name   role', 'alice  user']
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def table(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Columns as wide as they need: a name that was cut could not be typed again."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
