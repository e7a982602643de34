"""What routing may trust of each replica's proven goodput, as of now.

    proofs = Proofs(proven, fleet, live)
    proofs.of(replica, now).trusted_rps          # `now` is the monotonic clock's; 0 where nothing can be trusted

The evidence is looked at anew once a second at most, whoever asks; between that an answer costs one look in a
dictionary, and the question whether live requests contradict it. A model that is routed by goodput and has none that
can be trusted is told once in the log, and once more when it has.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from gateway.config.live import Live
from gateway.records import logs
from gateway.records.metrics import Values
from gateway.replicas.attainment import Promise
from gateway.replicas.fleet import Fleet
from gateway.replicas.replica import Replica, ServedModel
from gateway.routing.evidence import Evidence, ProvenGoodput
from gateway.routing.proof import BROKEN, DAY_S, NO_FILE, UNRACED, Here, Proof, judged, promised

LOOK_EVERY_S = 1.0

_log = logs.logger("evidence")


class Proofs:
    def __init__(self, proven: ProvenGoodput | None, fleet: Fleet, live: Live) -> None:
        self._proven = proven
        self._fleet = fleet
        self._live = live
        self._looked_at = float("-inf")
        self._proofs: dict[Replica, Proof] = {}
        self._doubts: dict[str, str] = {}  # by model routed by goodput: why nothing of it is trusted

    def of(self, replica: Replica, now: float) -> Proof:
        if self._proven is None:
            return NO_FILE
        if now - self._looked_at >= LOOK_EVERY_S:
            self._look(self._proven, now)
        proof = self._proofs.get(replica, UNRACED)
        if proof.trusted_rps and replica.attainment.is_broken(now):
            return Proof(proof.rps, BROKEN, proof.raced)
        return proof

    def share_rps(self, replica: Replica, now: float) -> float:
        """What routing may give the replica: what is trusted, less a margin."""
        return self.of(replica, now).trusted_rps * self._live.config.goodput.margin

    def look_at_once(self) -> None:
        """Whoever asks next is told what the evidence says then."""
        self._looked_at = float("-inf")

    def trusted(self) -> Iterator[tuple[Values, float]]:
        """Of each replica that a race speaks of: 1 if its proven goodput is trusted, 0 if there is a doubt."""
        now = time.perf_counter()
        for replica in self._fleet.replicas:
            if (proof := self.of(replica, now)).rps:
                yield (replica.model, replica.engine, replica.name), 0.0 if proof.doubt else 1.0

    def _look(self, proven: ProvenGoodput, now: float) -> None:
        """A small file on a local disk, and most often only its time: the event loop waits for it."""
        self._looked_at = now
        evidence = proven.current()
        self._proofs = dict(self._judged(proven, evidence))
        for model in (*self._fleet.models.values(), *self._fleet.groups.values()):
            if model.config.routing == "goodput":
                self._tell(model, now)

    def _judged(self, proven: ProvenGoodput, evidence: Evidence | None) -> Iterator[tuple[Replica, Proof]]:
        wall, nothing = time.time(), Proof(0.0, proven.complaint)
        max_age_s = self._live.config.goodput.max_age_days * DAY_S
        for replica in self._fleet.serving:
            proof, promise = nothing, None
            if evidence is not None:
                slo = self._fleet.models[replica.model].config.slo
                settings = replica.config.options if replica.config.launch else None
                here = Here(slo=slo, version=replica.version, settings=settings, now=wall, max_age_s=max_age_s)
                proof = judged(proven.entries(replica, evidence), here)
                promise = Promise(proof.trusted_rps, promised(slo, proof.raced)) if proof.trusted_rps else None
            self._fleet.promise(replica, promise)
            yield replica, proof

    def _tell(self, model: ServedModel, now: float) -> None:
        proofs = [self.of(replica, now) for replica in model.replicas]
        doubt = "" if any(proof.trusted_rps for proof in proofs) else proofs[0].doubt
        if doubt and doubt != self._doubts.get(model.name):
            logs.warning(_log, "routing by least load until evidence can be trusted", model=model.name, reason=doubt)
        elif not doubt and self._doubts.get(model.name):
            logs.info(_log, "routing by proven goodput", model=model.name)
        self._doubts[model.name] = doubt
