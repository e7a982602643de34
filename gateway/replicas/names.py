"""What a client's name for a model leads to. Pure.

>>> names = Names({"small": "the small one", "gpt-4*": "the large one", "*": "any other"})
>>> names.find("gpt-4o")
Match(target='the large one', part='o')
>>> names.find("small")
Match(target='the small one', part=None)

A pattern is a name with one `*`, which stands for any text, also for none. A name that is written out beats every
pattern, and the pattern with the most other characters beats the rest; of two that have as many, the first one.

What a `*` stands for may become a part of a request to somebody else's server, sent with a key of ours. So a pattern
matches names of plain characters only, and none that could climb out of a path.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Generic, NamedTuple, TypeVar

MAX_LENGTH = 256

_PLAIN = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._:/@+-]{{0,{MAX_LENGTH - 1}}}")
_CLIMBS = re.compile(r"\.\.|//|/\.|/$")

T = TypeVar("T")


class Match(NamedTuple, Generic[T]):
    target: T
    part: str | None  # what the `*` stands for; None where the name was written out


class Names(Generic[T]):
    def __init__(self, targets: Mapping[str, T]) -> None:
        self.written_out = {name: target for name, target in targets.items() if not is_pattern(name)}
        patterns = sorted(filter(is_pattern, targets), key=len, reverse=True)  # stable: equals as they were given
        self._patterns = [(*_ends(pattern), targets[pattern]) for pattern in patterns]

    def find(self, name: str) -> Match[T] | None:
        target = self.written_out.get(name)
        if target is not None:
            return Match(target, None)
        if not self._patterns or not _is_plain(name):
            return None
        for head, tail, target in self._patterns:
            if len(name) >= len(head) + len(tail) and name.startswith(head) and name.endswith(tail):
                return Match(target, name[len(head) : len(name) - len(tail)])
        return None


def is_pattern(name: str) -> bool:
    return "*" in name


def _ends(pattern: str) -> tuple[str, str]:
    head, _, tail = pattern.partition("*")
    return head, tail


def _is_plain(name: str) -> bool:
    return _PLAIN.fullmatch(name) is not None and _CLIMBS.search(name) is None
