"""What a race has proven that each replica carries, from the arena's evidence.json, for Prometheus.

    proven = ProvenGoodput(Path("evidence.json"), fleet)
    metrics.watch("goodgate_goodput_proven_rps", proven.rates)
    proven.entries(replica, proven.current())     # what proofs.py judges before routing trusts it

Who asks decides when the file is looked at; it is read again when it has changed. Serving never depends on it: a file
that is missing, broken or edited by hand proves nothing, and one line in the log says why. An entry belongs
to a replica if its model is the replica's (or an alias of it), and its engine is the replica's name or else its engine.
There may be several: other settings, other kinds of work, other limits. docs/evidence.md has the format.
"""

from __future__ import annotations

import hashlib
import stat
import threading
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta, Struct

from gateway.records import logs
from gateway.records.metrics import Values
from gateway.replicas.directory import Directory
from gateway.replicas.replica import Replica

FORMAT = "goodgate-evidence/2"
OLD_FORMAT = "goodgate-evidence/1"  # one race a file: its day and limits stand at the top, and nothing expires
MAX_BYTES = 1 << 20  # a race of ten engines writes 10 KiB

Moment: TypeAlias = Annotated[datetime, Meta(tz=True)]

_log = logs.logger("evidence")


class EvidenceError(Exception):
    """The file proves nothing. The message is a sentence that says why."""


class Limits(Struct, frozen=True):
    """What an answer had to keep to count, in milliseconds."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None


class Entry(Struct, frozen=True):
    """One engine of a race."""

    engine: str
    model: str
    goodput_rps: float
    ci: tuple[float | None, float | None]
    proven: bool
    measured_utc: Moment
    served_model: str | None = None
    version: str | None = None  # of the engine
    slo: Limits = Limits()
    settings: dict[str, Any] | None = None  # launch options; None: not told
    expires_utc: Moment | None = None

    @property
    def proven_rps(self) -> float | None:
        """The rate that held where the race proved that it does; otherwise the low end of the goodput's interval."""
        return self.goodput_rps if self.proven else self.ci[0]


class Evidence(Struct, frozen=True):
    entries: tuple[Entry, ...]


class _Old(Struct):
    """A file of `OLD_FORMAT`."""

    measured_utc: Moment
    engines: list[dict[str, Any]]
    slo: Limits = Limits()


def parse_evidence(text: bytes) -> Evidence:
    """The document, if it is as the arena wrote it. Raises `EvidenceError`."""
    try:
        document: dict[str, Any] = msgspec.json.decode(text, type=dict[str, Any])
        kind, is_whole = str(document["format"]), document["digest"] == _digest(document)
        found = Evidence(_entries(document, kind))
    except KeyError as error:
        raise EvidenceError(f"It is no evidence.json of a race: it has no {error}.") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise EvidenceError(f"It is no evidence.json of a race: {error}.") from error
    if not is_whole:
        raise EvidenceError("It was edited after the race, so it proves nothing; copy the race's own file here again.")
    return found


def _entries(document: dict[str, Any], kind: str) -> tuple[Entry, ...]:
    if kind == FORMAT:
        return msgspec.convert(document["entries"], tuple[Entry, ...])
    if kind != OLD_FORMAT:
        raise EvidenceError(
            f"Its format is {kind!r}, and this gateway reads {FORMAT!r} and {OLD_FORMAT!r}; run the race again."
        )
    old = msgspec.convert(document, _Old)
    shared = {"measured_utc": old.measured_utc, "slo": old.slo}
    return msgspec.convert([{**engine, **shared} for engine in old.engines], tuple[Entry, ...])


def entries_of(replica: Replica, names: frozenset[str], entries: tuple[Entry, ...]) -> list[Entry]:
    """The entries that speak of this replica, whose model clients know by `names`. One that is called as the replica
    goes before all those that are called as its engine.
    """
    of_model = [entry for entry in entries if {entry.model, entry.served_model} & names]
    by_name = [entry for entry in of_model if entry.engine == replica.name]
    return by_name or [entry for entry in of_model if entry.engine == replica.engine]


class ProvenGoodput:
    """What the file proves, as of now, in the form in which metrics are read."""

    def __init__(self, path: Path, fleet: Directory) -> None:
        self._path = path
        self._fleet = fleet
        self._stamp: tuple[int, int] | None = None
        self._evidence: Evidence | None = None
        self.complaint = ""  # why it proves nothing
        self._lock = threading.Lock()  # whoever asks, in whatever thread

    def rates(self) -> Iterator[tuple[Values, float]]:
        """Requests a second of each replica that the race speaks of."""
        evidence = self.current()
        if evidence is not None:
            for replica, rate_rps in self._rates(evidence):
                yield (replica.model, replica.engine, replica.name), rate_rps

    def measured(self) -> Iterator[tuple[Values, float]]:
        """When the oldest of the races began, in seconds since 1970."""
        evidence = self.current()
        if evidence is not None and evidence.entries:
            yield (), min(entry.measured_utc for entry in evidence.entries).timestamp()

    def current(self) -> Evidence | None:
        """What the file says now."""
        with self._lock:
            self._refresh()
            return self._evidence

    def _rates(self, evidence: Evidence) -> Iterator[tuple[Replica, float]]:
        for replica in self._fleet.replicas:
            proven = [entry.proven_rps for entry in self.entries(replica, evidence) if entry.proven_rps]
            if proven:  # none at all is no capacity that load could be set against
                yield replica, min(proven)

    def entries(self, replica: Replica, evidence: Evidence) -> list[Entry]:
        model = self._fleet.models[replica.model]
        return entries_of(replica, frozenset({model.name, *model.config.aliases}), evidence.entries)

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
