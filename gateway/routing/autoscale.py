"""What autoscalers are told of each model: headroom.py's figures, of the fleet as it is now.

    autoscale = Autoscale(fleet, proofs, live)
    autoscale.of(model)                          # a Signal, as /admin/autoscale gives it
    autoscale.note(trace)                        # a request has ended: was it turned away?

Figures are made when somebody asks; what nobody asks for costs nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from msgspec import Struct

from gateway.config.live import Live
from gateway.records.metrics import Metrics, Values
from gateway.records.trace import Trace
from gateway.replicas.fleet import Fleet
from gateway.replicas.replica import Replica, ServedModel
from gateway.routing.headroom import Carrier, Headroom, Wanted, headroom, shares
from gateway.routing.proofs import Proofs

TURNED_AWAY = (503, 499)  # for lack of capacity, or tired of waiting for it; a caller's own quota (429) is none of ours
BEGUN = 200  # a stream that waited with heartbeats, and ended in an error


class ReplicaSignal(Struct, frozen=True):
    """`instances_needed` is for a replica that stands for several instances: so many it needs at the target, its share
    of what was turned away included."""

    engine: str
    ready: bool
    offered_rps: float
    proven_rps: float | None
    instances_needed: float | None
    in_flight: int
    waiting: int | None
    reason: str


class Signal(Struct, frozen=True):
    """Rates are generations a second over about half a minute. None is what nobody can tell, for the reason given."""

    model: str
    offered_rps: float
    turned_away_rps: float
    capacity_rps: float | None
    headroom_rps: float | None
    utilisation: float | None
    target: float
    proven_per_replica_rps: float | None
    replicas_ready: int
    replicas_needed: float | None
    replicas_wanted: int | None
    in_flight: int
    reason: str
    replicas: dict[str, ReplicaSignal]


class Autoscale:
    def __init__(self, fleet: Fleet, proofs: Proofs, live: Live) -> None:
        self._fleet = fleet
        self._proofs = proofs
        self._live = live
        self._wanted: dict[str, Wanted] = {}

    def watched_by(self, metrics: Metrics) -> None:
        metrics.watch("goodgate_offered_rps", self._gauge(lambda signal: signal.offered_rps))
        metrics.watch("goodgate_goodput_capacity_rps", self._gauge(lambda signal: signal.capacity_rps))
        metrics.watch("goodgate_goodput_headroom_rps", self._gauge(lambda signal: signal.headroom_rps))
        metrics.watch("goodgate_goodput_utilisation_ratio", self._gauge(lambda signal: signal.utilisation))
        metrics.watch("goodgate_replicas_needed", self._gauge(lambda signal: signal.replicas_needed))
        metrics.watch("goodgate_replicas_wanted", self._gauge(lambda signal: signal.replicas_wanted))
        metrics.watch("goodgate_instances_needed", self._instances)

    def note(self, trace: Trace) -> None:
        """A request that ended before any replica was tried, for lack of one, is demand too."""
        if trace.attempts or not (trace.model and trace.asked_model):
            return
        if trace.status in TURNED_AWAY or (trace.status == BEGUN and trace.code):
            group = self._fleet.groups.get(trace.model)  # its first model would have been tried first
            name = trace.model if group is None else group.replicas[0].model
            if (model := self._fleet.models.get(name)) is not None:
                self._fleet.note_turned_away(model, trace.num_prompts)

    def all(self) -> list[Signal]:
        return [self.of(model) for model in self._fleet.models.values()]

    def of(self, model: ServedModel) -> Signal:
        now, target = time.perf_counter(), self._live.config.autoscale.target
        turned_away = model.turned_away.at(now)
        carriers = [self._carrier(replica, now) for replica in model.replicas]
        given = [replica.demand.at(now) for replica in model.replicas]
        found = headroom(carriers, offered_rps=turned_away + sum(given), target=target)
        own = [
            headroom([carrier], offered_rps=rps + share, target=target)
            for carrier, rps, share in zip(carriers, given, shares(carriers, turned_away), strict=True)
        ]
        return Signal(
            model=model.name,
            offered_rps=round(found.offered_rps, 3),
            turned_away_rps=round(turned_away, 3),
            capacity_rps=found.capacity_rps,
            headroom_rps=_rounded(found.headroom_rps),
            utilisation=_rounded(found.utilisation),
            target=target,
            proven_per_replica_rps=found.proven_per_replica_rps,
            replicas_ready=sum(replica.is_ready for replica in model.replicas),
            replicas_needed=_rounded(found.replicas_needed),
            replicas_wanted=self._whole(model, found, now),
            in_flight=sum(replica.in_flight for replica in model.replicas),
            reason=found.reason,
            replicas={
                replica.name: _of_replica(replica, carrier, each)
                for replica, carrier, each in zip(model.replicas, carriers, own, strict=True)
            },
        )

    def _carrier(self, replica: Replica, now: float) -> Carrier:
        proof = self._proofs.of(replica, now)
        return Carrier(replica.name, proof.trusted_rps, replica.is_ready, proof.doubt)

    def _whole(self, model: ServedModel, found: Headroom, now: float) -> int | None:
        if found.replicas_needed is None:
            return None
        wanted = self._wanted.setdefault(model.name, Wanted())
        return wanted.at(now, found.replicas_needed, hold_s=self._live.config.autoscale.hold_s)

    def _gauge(self, read: Callable[[Signal], float | None]) -> Callable[[], Iterator[tuple[Values, float]]]:
        def readings() -> Iterator[tuple[Values, float]]:
            for signal in self.all():
                if (value := read(signal)) is not None:
                    yield (signal.model,), value

        return readings

    def _instances(self) -> Iterator[tuple[Values, float]]:
        for signal in self.all():
            for name, replica in signal.replicas.items():
                if replica.instances_needed is not None:
                    yield (signal.model, replica.engine, name), replica.instances_needed


def _of_replica(replica: Replica, carrier: Carrier, own: Headroom) -> ReplicaSignal:
    return ReplicaSignal(
        engine=replica.engine,
        ready=replica.is_ready,
        offered_rps=round(own.offered_rps, 3),
        proven_rps=own.proven_per_replica_rps,
        instances_needed=_rounded(own.replicas_needed),
        in_flight=replica.in_flight,
        waiting=replica.load.waiting,
        reason=carrier.doubt,
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
