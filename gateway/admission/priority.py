"""Whose request goes first, and how soon it wants its first token. Pure.

    priority = Priority.named("high")                  # None for what is no class
    wish = wish_of(headers, ceiling=Priority.DEFAULT)   # Wish(priority, ttft_s); InvalidRequest, PriorityNotAllowed

    X-Goodgate-Priority: high | default | low          # never above the class of the caller's key
    X-Goodgate-TTFT-Ms: 400                            # tighter than the model's `slo.ttft_ms`, or it changes nothing

A request that names no class has its key's. One that names a higher one is refused rather than capped: who believes to
be first and is not would look for the reason in the engine.
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import NamedTuple

from multidict import MultiMapping

from adapters.errors import InvalidRequest, RequestError

PRIORITY_HEADER = "X-Goodgate-Priority"
TTFT_HEADER = "X-Goodgate-TTFT-Ms"
MAX_TTFT_MS = 3_600_000


class Priority(IntEnum):
    """The smaller, the sooner."""

    HIGH = 1
    DEFAULT = 2
    LOW = 3

    @property
    def label(self) -> str:
        return self.name.lower()

    @classmethod
    def named(cls, label: str) -> Priority | None:
        return _BY_LABEL.get(label)


_BY_LABEL = {each.label: each for each in Priority}
PRIORITIES = tuple(_BY_LABEL)


class PriorityNotAllowed(RequestError):
    status = 403
    code = "priority_not_allowed"


class Wish(NamedTuple):
    """`ttft_s` is None for a caller who names no time."""

    priority: Priority
    ttft_s: float | None = None


def wish_of(headers: MultiMapping[str], ceiling: Priority | None) -> Wish:
    """What a request's headers ask for. `ceiling` is the class of the caller's key; None where no key is asked for."""
    return Wish(_priority(_one(headers, PRIORITY_HEADER), ceiling), _ttft_s(_one(headers, TTFT_HEADER)))


def _one(headers: MultiMapping[str], name: str) -> str | None:
    values = headers.getall(name, [])
    if len(values) > 1:
        raise InvalidRequest(f"The header {name} is there twice; send it once.", param=name)
    return values[0] if values else None


def _priority(label: str | None, ceiling: Priority | None) -> Priority:
    if label is None:
        return Priority.DEFAULT if ceiling is None else ceiling
    priority = Priority.named(label)
    if priority is None:
        raise InvalidRequest(
            f"The header {PRIORITY_HEADER} holds one of {', '.join(PRIORITIES)}.", param=PRIORITY_HEADER
        )
    if ceiling is not None and priority < ceiling:
        raise PriorityNotAllowed(
            f"This key's requests have the priority {ceiling.label!r} at most; "
            "`goodgate keys create --priority` makes keys of another.",
            param=PRIORITY_HEADER,
        )
    return priority


def _ttft_s(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        seconds = float(text) / 1e3
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_TTFT_MS / 1e3:  # NaN is in no range
        raise InvalidRequest(
            f"The header {TTFT_HEADER} holds milliseconds, more than 0 and at most {MAX_TTFT_MS}.", param=TTFT_HEADER
        )
    return seconds
