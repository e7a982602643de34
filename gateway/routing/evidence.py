"""What a race has proven that each replica carries, from the arena's evidence.json, for Prometheus.

    proven = ProvenGoodput(Path("evidence.json"), fleet)
    metrics.watch("goodgate_goodput_proven_rps", proven.rates)
    proven.entry(replica, proven.current())       # what proofs.py judges before routing trusts it

Who asks decides when the file is looked at; it is read again when it has changed. Serving never depends on it: a file
that is missing, broken or edited by hand proves nothing, and one line in the log says why. An entry belongs
to a replica if its model is the replica's (or an alias of it), and its engine is the replica's name or else its engine.
"""

from __future__ import annotations

import hashlib
import stat
import threading
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from gateway.records import logs
from gateway.records.metrics import Values
from gateway.replicas.directory import Directory
from gateway.replicas.replica import Replica

FORMAT = "goodgate-evidence/1"
MAX_BYTES = 1 << 20  # a race of ten engines writes 10 KiB

_log = logs.logger("evidence")


class EvidenceError(Exception):
    """The file proves nothing. The message is a sentence that says why."""


class Entry(Struct, frozen=True):
    """One engine of a race."""

    engine: str
    model: str
    goodput_rps: float
    ci: tuple[float | None, float | None]
    proven: bool
    served_model: str | None = None
    version: str | None = None  # of the engine

    @property
    def proven_rps(self) -> float | None:
        """The rate that held where the race proved that it does; otherwise the low end of the goodput's interval."""
        return self.goodput_rps if self.proven else self.ci[0]


class Limits(Struct, frozen=True):
    """What an answer had to keep to count, in milliseconds."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None


class Evidence(Struct, frozen=True):
    format: str
    digest: str
    measured_utc: Annotated[datetime, Meta(tz=True)]
    engines: tuple[Entry, ...]
    slo: Limits = Limits()


def parse_evidence(text: bytes) -> Evidence:
    """The document, if it is as the arena wrote it. Raises `EvidenceError`."""
    try:
        document: dict[str, Any] = msgspec.json.decode(text, type=dict[str, Any])
        found = msgspec.convert(document, Evidence)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise EvidenceError(f"It is no evidence.json of a race: {error}.") from error
    if found.format != FORMAT:
        raise EvidenceError(f"Its format is {found.format!r}, and this gateway reads {FORMAT!r}; run the race again.")
    if found.digest != _digest(document):
        raise EvidenceError("It was edited after the race, so it proves nothing; copy the race's own file here again.")
    return found


def entry_of(replica: Replica, names: frozenset[str], entries: tuple[Entry, ...]) -> Entry | None:
    """The entry that speaks of this replica, whose model clients know by `names`."""
    of_model = [entry for entry in entries if {entry.model, entry.served_model} & names]
    for name in (replica.name, replica.engine):
        for entry in of_model:
            if entry.engine == name:
                return entry
    return None


class ProvenGoodput:
    """What the file proves, as of now, in the form in which metrics are read."""

    def __init__(self, path: Path, fleet: Directory) -> None:
        self._path = path
        self._fleet = fleet
        self._stamp: tuple[int, int] | None = None
        self._evidence: Evidence | None = None
        self.complaint = ""  # why it proves nothing
        self._lock = threading.Lock()  # scrapes ask on the event loop, the ledger in its thread

    def rates(self) -> Iterator[tuple[Values, float]]:
        """Requests a second of each replica that the race speaks of."""
        evidence = self.current()
        if evidence is not None:
            for replica, rate_rps in self._rates(evidence):
                yield (replica.model, replica.engine, replica.name), rate_rps

    def measured(self) -> Iterator[tuple[Values, float]]:
        """When the race began, in seconds since 1970."""
        evidence = self.current()
        if evidence is not None:
            yield (), evidence.measured_utc.timestamp()

    def current(self) -> Evidence | None:
        """What the file says now."""
        with self._lock:
            self._refresh()
            return self._evidence

    def _rates(self, evidence: Evidence) -> Iterator[tuple[Replica, float]]:
        for replica in self._fleet.replicas:
            entry = self.entry(replica, evidence)
            if entry is not None and entry.proven_rps:  # none at all is no capacity that load could be set against
                yield replica, entry.proven_rps

    def entry(self, replica: Replica, evidence: Evidence) -> Entry | None:
        model = self._fleet.models[replica.model]
        return entry_of(replica, frozenset({model.name, *model.config.aliases}), evidence.engines)

    def _refresh(self) -> None:
        """Read the file if it is another one than last time. A small file, so the event loop waits for it."""
        try:
            status = self._path.stat()
            stamp = (status.st_mtime_ns, status.st_size)
            if stamp == self._stamp:
                return
            self._stamp = stamp
            if stat.S_ISFIFO(status.st_mode):  # it would be waited for
                raise EvidenceError("It is a pipe; copy the race's own file here.")
            if status.st_size > MAX_BYTES:
                raise EvidenceError(f"It is larger than {MAX_BYTES} bytes.")
            self._evidence = parse_evidence(self._path.read_bytes())
            if not list(self._rates(self._evidence)):
                self._complain("It names none of this gateway's models and replicas; race them, or name them alike.")
            else:
                self.complaint = ""
        except OSError as error:
            self._evidence = self._stamp = None
            self._complain(f"It cannot be read: {error.strerror}.")
        except EvidenceError as error:
            self._evidence = None
            self._complain(str(error))

    def _complain(self, complaint: str) -> None:
        if complaint != self.complaint:
            logs.warning(_log, "no proven goodput", file=str(self._path), reason=complaint)
        self.complaint = complaint


def _digest(document: dict[str, Any]) -> str:
    """As the arena computes it: SHA-256 over the canonical JSON of everything but the digest itself."""
    body = {key: value for key, value in document.items() if key != "digest"}
    return hashlib.sha256(msgspec.json.encode(body, order="sorted")).hexdigest()
