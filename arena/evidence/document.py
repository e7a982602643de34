"""evidence.json: what may be believed about engines, of which machine and work, and until when. Pure.

    {"format": "goodgate-evidence/2", "hosts": {fingerprint: facts}, "entries": [...], "digest": sha256}

An entry stands on its own: model, engine and its settings, host, kind of work, arrivals and limits are its key
(`Entry.key`), and it has the goodput with its interval, the race that measured it, and a day on which it expires. So
entries of many races can lie in one file. `digest` covers the rest of the document: an edited file is noticed. The
gateway reads the same format (`gateway/routing/evidence.py`), and meets it as a file only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta, Struct

from arena.judging.economy import Economy
from arena.judging.shape import Bucket, Shape

FORMAT = "goodgate-evidence/2"
OLD_FORMAT = "goodgate-evidence/1"

Moment: TypeAlias = Annotated[datetime, Meta(tz=True)]
Rate: TypeAlias = Annotated[float, Meta(ge=0)]
Key: TypeAlias = tuple[str, ...]


class EvidenceError(Exception):
    """One sentence that says why a document is no evidence, and what to do."""


class Limits(Struct, frozen=True, kw_only=True):
    """The SLO of the race: `percentile` percent of the requests had to meet both, in milliseconds."""

    ttft_ms: float
    tpot_ms: float
    percentile: float

    def are_as_strict_as(self, other: Limits) -> bool:
        return self.ttft_ms <= other.ttft_ms and self.tpot_ms <= other.tpot_ms and self.percentile >= other.percentile


class Entry(Struct, frozen=True, kw_only=True):
    """One engine of one race. `ci` is the interval of the goodput at `confidence`, open above where nothing failed."""

    engine: str
    version: str | None
    settings: dict[str, Any]
    model: str
    served_model: str
    host: str
    workload: Shape
    bucket: Bucket | None
    slo: Limits
    goodput_rps: Rate
    ci: tuple[Rate | None, Rate | None]
    confidence: float
    proven: bool
    rank: tuple[int, int] | None
    run_id: str
    measured_utc: Moment
    expires_utc: Moment
    scenario: str
    quick: bool
    complete: bool  # the race ran to its end
    plans: list[str]
    arrivals: str = "Poisson"  # the process, in words: bursts of the same mean rate ask for more
    economy: Economy | None = None

    @property
    def key(self) -> Key:
        """What a figure is a figure of. Two entries with one key answer the same question."""
        settings = msgspec.json.encode(self.settings, order="sorted").decode()
        limits = f"{self.slo.ttft_ms:g}/{self.slo.tpot_ms:g}/{self.slo.percentile:g}"
        return (self.model, self.engine, settings, self.host, str(self.bucket), limits, self.arrivals)

    @property
    def standing(self) -> tuple[bool, bool, datetime]:
        """Of two entries with one key, the one that stands higher is believed: a whole race before a broken-off one,
        a full one before a quick one, then the newest.
        """
        return self.complete, not self.quick, self.measured_utc

    @property
    def lowest_rps(self) -> float:
        """What it surely carries: the rate that held where that was proven, otherwise the low end of the interval."""
        return self.goodput_rps if self.proven else self.ci[0] or 0.0


class Evidence(Struct, frozen=True, kw_only=True):
    hosts: dict[str, dict[str, Any]]
    entries: tuple[Entry, ...]


def document(entries: Iterable[Entry], hosts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What is written. Entries are in the order of their keys, so the same evidence is the same file."""
    ordered = sorted(entries, key=lambda entry: entry.key)
    used = {entry.host for entry in ordered}
    body = {
        "format": FORMAT,
        "hosts": {name: dict(facts) for name, facts in sorted(hosts.items()) if name in used},
        "entries": [msgspec.to_builtins(entry) for entry in ordered],
    }
    return {**body, "digest": digest(body)}


def digest(document: Mapping[str, Any]) -> str:
    """SHA-256 over the canonical JSON of everything but the digest itself."""
    body = {key: value for key, value in document.items() if key != "digest"}
    return hashlib.sha256(msgspec.json.encode(body, order="sorted")).hexdigest()


def parse(text: bytes, source: str) -> Evidence:
    """Raises `EvidenceError`; `source` is what its sentence calls the document."""
    try:
        found: dict[str, Any] = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise EvidenceError(f"{source} is no evidence.json: {error}.") from error
    if found.get("format") == OLD_FORMAT:
        raise EvidenceError(
            f"{source} was written by an older version, before evidence had settings, buckets and an expiry; "
            "`goodgate arena report` on the race's folder writes it anew."
        )
    if found.get("format") != FORMAT:
        raise EvidenceError(f"{source} has the format {found.get('format')!r}, and {FORMAT!r} is read here.")
    if found.get("digest") != digest(found):
        raise EvidenceError(f"{source} was edited after it was written; take the race's own file again.")
    try:
        return msgspec.convert(found, Evidence)
    except msgspec.ValidationError as error:
        raise EvidenceError(f"{source} is no evidence.json: {error}.") from error
