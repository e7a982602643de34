"""Evidence of several races as one: of entries that answer the same question the best one stays. Pure.

merged = merge([first, second], now=datetime.now(UTC))
merged.evidence, merged.told          # `told`: a sentence for all that was left out, expired or beaten
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from msgspec import Struct

from arena.evidence.document import Entry, Evidence, Key


class Merged(Struct, frozen=True):
    evidence: Evidence
    told: tuple[str, ...]


def merge(parts: Sequence[Evidence], *, now: datetime) -> Merged:
    """`now` is aware of its time zone."""
    kept: dict[Key, Entry] = {}
    told: list[str] = []
    hosts: dict[str, dict[str, Any]] = {}
    for part in parts:
        hosts |= part.hosts
        for entry in part.entries:
            if entry.expires_utc <= now:
                told.append(f"{_name(entry)} has expired on {entry.expires_utc.date()}; race it again.")
                continue
            rival = kept.get(entry.key)
            if rival == entry:  # one race, given twice
                continue
            if rival is None or entry.standing > rival.standing:
                kept[entry.key], entry = entry, rival or entry
            if rival is not None:
                told.append(f"{_name(entry)} gives way to {_what(kept[entry.key])}.")
    return Merged(Evidence(hosts=hosts, entries=tuple(kept.values())), tuple(told))


def _name(entry: Entry) -> str:
    return f"{entry.engine} on {entry.model}, raced in {entry.run_id},"


def _what(entry: Entry) -> str:
    kind = "the quick race" if entry.quick else "the race"
    return f"{kind} {entry.run_id} of {entry.measured_utc.date()}{'' if entry.complete else ' (broken off)'}"
