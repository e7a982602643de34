"""The replicas and their live state. Everyone may read it for advice; only this module and lives.py change it.

fleet = Fleet(live, find_adapter=registry.adapter_class, home=home)
fleet.start()                                  # replicas come up in the background
model = fleet.resolve("default")               # ModelNotFound with the nearest name
await fleet.load(model, timeout_s=600)         # one that is loaded on demand; `unload` stops its engines again
mark = fleet.opened(replica, tokens, now)      # one more open generation, until it is `closed`
fleet.adopt(other, fleet.plan(other))          # serve by another configuration from now on
await fleet.close()

STARTING --> READY <--> UNHEALTHY --> FAILED      from FAILED there is no way back: to wait longer would not help

UNLOADED --> STARTING ... --> UNLOADED         a model that is loaded on demand (see loader.py, which says when)

A launched engine that ends by itself is UNHEALTHY until it has been started again, and FAILED when it goes on crashing
(see lives.py, and adapters/launching/kept_alive.py).

A replica that a new configuration does not have any more leaves: it gets no new requests, what is open on it ends, and
then its connections are closed, or its engine stopped (see turnover.py, which says who leaves and who stands in).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from adapters.base import Load
from adapters.errors import EngineUnavailable, GoodgateError
from adapters.launching.kept_alive import Restarting
from gateway.config import Config, FindAdapter, GroupConfig, Live, ModelConfig, ReplicaConfig, adapter_options
from gateway.records import logs
from gateway.records.trace import Attempt
from gateway.replicas.attainment import Promise, missed
from gateway.replicas.departures import Departures
from gateway.replicas.directory import Directory
from gateway.replicas.lives import Lives
from gateway.replicas.replica import Replica, ServedModel, State
from gateway.replicas.standing import Peers
from gateway.replicas.turnover import turnover
from gateway.shaping import shape_of

NOT_LOADED = "It is loaded when a request comes."

Plan: TypeAlias = Mapping[str, list[Replica]]  # by the model's name

_log = logs.logger("fleet")


class Fleet(Directory):
    def __init__(self, live: Live, *, find_adapter: FindAdapter, home: Path) -> None:
        super().__init__()
        self._find_adapter = find_adapter
        self._lives = Lives(
            self,
            find_adapter=find_adapter,
            home=home,
            wants_versions=live.config.evidence is not None,
            isolates=live.config.tenants.isolate_prefix_cache == "require",
        )
        self.fatal: asyncio.Future[GoodgateError] | None = None
        self._has_served = False  # some replica was ready once
        self._live = live
        self.departures = Departures(live, drop=self._drop, stop=self._stop_gone)
        self.adopt(live.config, self.plan(live.config))

    def plan(self, config: Config) -> Plan:
        """The replicas that a configuration asks for, as if there were none yet. It reads their secrets, so it takes a
        thread, and may raise `ConfigError`."""
        return {model.name: [self._replica(model, each) for each in model.replicas] for model in config.models}

    def adopt(self, config: Config, plan: Plan) -> list[Replica]:
        """Serve what the configuration says, from now on. What of it is as before stays; what is not there any more is
        seen off, and what is new comes up in the background. Returns the new ones of which only the secret is new."""
        former = self.models
        rotated: list[Replica] = []
        self.models = {
            model.name: self._adopted(model, plan[model.name], former.get(model.name), rotated)
            for model in config.models
        }
        for name, model in former.items():
            if self.models.get(name) is not model and not model.is_on_demand:  # who loads on demand, unloads as well
                for replica in model.replicas:
                    if replica.is_leaving:
                        self._drop(replica, model)  # there is nobody left to stand in for
                    else:
                        self.departures.see_off(replica, None)
        self.groups = {group.name: self._adopted_group(group) for group in config.groups}
        self._list_names()
        for each in (*former.values(), *self.models.values()):
            self._regroup(each)
            each.tell_change()
        return rotated

    def opened(self, replica: Replica, tokens: int, now: float) -> float:
        """One more generation of at most so many tokens is open on the replica. `closed` wants what is returned."""
        replica.in_flight += 1
        replica.open_tokens += tokens
        replica.offered.note(now)
        replica.demand.note(now)
        if replica.promise is not None:
            replica.attainment.asked(replica.offered.at(now), replica.promise, now)
        return replica.engine_time.opened(now)

    def closed(self, replica: Replica, tokens: int, mark: float, now: float) -> float:
        """It has ended. Returns its share of the replica's time."""
        share_s = replica.engine_time.share(mark, now)
        replica.engine_time.closed(now)
        replica.in_flight -= 1
        replica.open_tokens -= tokens
        if replica.emptied is not None:
            replica.emptied.set()
        return share_s

    def mark(self, replica: Replica, state: State, reason: str = "", details: str = "") -> None:
        """Set a replica's state; a change is logged once."""
        if replica.state is not state:
            logs.info(
                _log,
                f"replica {state.value}",
                model=replica.model,
                replica=replica.name,
                reason=details or reason,
            )
        replica.state, replica.reason, replica.details = state, reason, details
        replica.standing.is_down = state is not State.READY
        self._tell_change(replica)
        self._has_served = self._has_served or state is State.READY

    def note_start(self, replica: Replica, attempt: Attempt, prompt_tokens: int) -> None:
        """An attempt has been sent, and waits for its first token."""
        replica.standing.began(attempt, prompt_tokens)

    def note_first_token(self, replica: Replica, attempt: Attempt, now: float) -> None:
        before = replica.standing.verdict
        replica.standing.answered(attempt, now)
        _tell(replica, before)

    def _tell_change(self, replica: Replica) -> None:
        """To those who wait for it. Who stood in for one that is ready now is relieved."""
        model = self.models.get(replica.model)
        if model is None or replica not in model.replicas:
            return
        if replica.is_ready and not replica.is_leaving:
            for stand_in in [each for each in model.replicas if each.is_leaving]:
                self._drop(stand_in, model)
        model.tell_change()

    def note_attempt(self, replica: Replica, attempt: Attempt, failure: GoodgateError | None) -> None:
        """An attempt has ended. One that could not reach the replica takes it out at once, until a probe finds it well;
        what is known of a launched engine that is down says more."""
        before = replica.standing.verdict
        replica.standing.ended(attempt, failure, time.perf_counter())
        _tell(replica, before)
        if isinstance(failure, EngineUnavailable) and replica.has_started:
            self.mark(replica, State.UNHEALTHY, failure.for_records)  # everybody reads it on /ready
        if replica.promise is not None and attempt.ended is not None:
            is_missed = missed(attempt, replica.promise.slo, has_failed=failure is not None and failure.status >= 500)
            replica.attainment.note(is_missed, attempt.started, attempt.ended)

    def note_turned_away(self, model: ServedModel, num: int) -> None:
        """So many generations were refused or given up before any replica was tried, for lack of one that could."""
        model.turned_away.note(time.perf_counter(), num)

    def promise(self, replica: Replica, promise: Promise | None) -> None:
        """What is proven of the replica, and what it is held to from now on."""
        replica.promise = promise

    def note_recovery(self, replica: Replica) -> None:
        """It was down, for its health probes or because its engine had ended, and is well again."""
        replica.standing.recovered(time.perf_counter())

    def next_turn(self, model: ServedModel) -> int:
        """The number of this request among the model's requests."""
        model.turn += 1
        return model.turn - 1

    def note_load(self, replica: Replica, load: Load) -> None:
        replica.load = load

    def start(self) -> None:
        """Bring every replica up in the background, but for those of models that are loaded on demand, and keep up
        those that are launched. `fatal` is set to the error when none of them can ever serve."""
        self.fatal = asyncio.get_running_loop().create_future()
        for model in self.models.values():
            if not model.is_on_demand:
                self._lives.begin(model.replicas)

    async def load(self, model: ServedModel, *, timeout_s: float) -> None:
        """Start the engines of a model that is loaded on demand; it can serve afterwards. Raises `EngineUnavailable`
        with the reasons when none of them comes up, or not in time. What was started is there until `unload`."""
        for replica in model.replicas:
            replica.end = ""
            self.mark(replica, State.STARTING, "It is being loaded.")
        self._lives.begin(model.replicas)
        try:
            async with asyncio.timeout(timeout_s):
                while not model.is_ready and any(replica.state is State.STARTING for replica in model.replicas):
                    await model.change()
        except TimeoutError:
            raise EngineUnavailable(f"It was not ready within {timeout_s:g} s (`residency.load_timeout_s`).") from None
        if not model.is_ready:
            ends = {replica.end or replica.reason for replica in model.replicas}
            raise EngineUnavailable(" ".join(sorted(ends)))

    async def outlive(self, model: ServedModel) -> None:
        """Wait until every engine of the model has been given up."""
        while any(replica.state is not State.FAILED for replica in model.replicas):
            await model.change()

    async def unload(self, model: ServedModel) -> None:
        """Stop the model's engines, whatever they are doing, and wait until they are gone and their memory is free."""
        for replica in model.replicas:
            replica.has_started = False  # a probe that is under way brings no news any more
        await self._lives.stop(model.replicas)
        for replica in model.replicas:
            replica.adapter = replica.process = None
            replica.load = Load()
            has_failed = replica.state in (State.UNHEALTHY, State.FAILED)
            known = (replica.reason, replica.details) if has_failed else (NOT_LOADED, "")
            self.mark(replica, State.UNLOADED, *known)

    async def close(self) -> None:
        """Stop starting, stop every launched engine, close every adapter."""
        await self.departures.close()
        await self._lives.stop(self.replicas)

    # ------------------------------------------------------------------------------------- what a configuration changes

    def _adopted(
        self, config: ModelConfig, planned: list[Replica], former: ServedModel | None, rotated: list[Replica]
    ) -> ServedModel:
        """The model as it is configured now: the former one, unless it is of another kind. One that is loaded on demand
        is another one if its replicas are: the loader ends the former."""
        shape = shape_of(config.name, config)
        if former is None or former.is_on_demand != (config.load == "on_demand"):
            return self._begun(ServedModel(config, planned, shape), planned)
        change = turnover(former.replicas, planned)
        rotated.extend(change.rotated)
        if former.is_on_demand and (change.new or change.gone):
            return ServedModel(config, planned, shape, changed=former.changed)
        former.config, former.shape = config, shape
        former.replicas = [*change.stand_ins, *change.replicas]
        for replica in change.replicas:
            self.departures.take_back(replica)
        for replica in change.gone:
            self.departures.see_off(replica, former)
        return self._begun(former, change.new)

    def _begun(self, model: ServedModel, replicas: Sequence[Replica]) -> ServedModel:
        if self.fatal is not None and not model.is_on_demand:  # the fleet has started
            self._lives.begin(replicas)
        return model

    def _adopted_group(self, config: GroupConfig) -> ServedModel:
        group = self.groups.get(config.name) or ServedModel(config, [])
        group.config, group.shape = config, shape_of(config.name, config)
        group.replicas = [replica for name in config.models for replica in self.models[name].replicas]
        return group

    def _drop(self, replica: Replica, model: ServedModel) -> None:
        """It stands in no longer."""
        for named in (model, *self.groups.values()):
            named.replicas = [each for each in named.replicas if each is not replica]
        self._regroup(model)
        model.tell_change()

    def _regroup(self, model: ServedModel) -> None:
        """Its replicas are measured by one another."""
        config = self._live.config
        Peers(config.breaker, config.outliers, [replica.standing for replica in model.replicas])

    async def _stop_gone(self, replica: Replica) -> None:
        """Stop one that has left. What it was in the way of, by its memory or its port, is tried once more."""
        await self._lives.stop([replica])
        model = self.models.get(replica.model)
        if model is not None and not model.is_on_demand:
            self._lives.begin([each for each in model.replicas if each.state is State.FAILED])

    def note_end(self, replica: Replica, end: Restarting) -> None:
        """Its engine has ended, and is started again."""
        replica.has_started = False
        replica.num_restarts += 1
        replica.load = Load()
        replica.state, replica.standing.is_down = State.UNHEALTHY, True
        replica.end = end.failure.for_records
        replica.reason = f"It is started again in {end.delay_s:g} s: {end.failure.for_records}"
        replica.details = f"It is started again in {end.delay_s:g} s: {end.failure.message}"
        self._tell_change(replica)
        logs.warning(
            _log,
            "an engine has ended",
            model=replica.model,
            replica=replica.name,
            restart_in_s=end.delay_s,
            reason=end.failure.message,
        )

    def give_up(self, replica: Replica, reason: str, details: str = "") -> None:
        """The replica will not serve. When none will, and none ever has, a start of the gateway makes no sense; what is
        loaded on demand may come up the next time."""
        replica.has_started = False
        self.mark(replica, State.FAILED, reason, details)
        if self._has_served or self.fatal is None or self.fatal.done():
            return
        is_hopeless = all(each.state is State.FAILED for each in self.replicas)
        if is_hopeless and not any(model.is_on_demand for model in self.models.values()):
            self.fatal.set_result(EngineUnavailable(_why_none_serves(self.replicas)))

    def _replica(self, model: ModelConfig, config: ReplicaConfig) -> Replica:
        options = None if config.launch else adapter_options(config, self._find_adapter(config.engine))
        replica = Replica(
            name=config.name or config.engine, model=model.name, engine=config.engine, config=config, options=options
        )
        if model.load == "on_demand":
            replica.state, replica.reason = State.UNLOADED, NOT_LOADED
        return replica


def _why_none_serves(replicas: list[Replica]) -> str:
    if len(replicas) == 1:
        return replicas[0].details or replicas[0].reason
    reasons = "".join(f"\n  {each.name} of {each.model}: {each.details or each.reason}" for each in replicas)
    return f"None of the {len(replicas)} replicas can serve:{reasons}"


def _tell(replica: Replica, before: str) -> None:
    """A line in the log where the replica's standing is another than before."""
    if (after := replica.standing.verdict) != before:
        why = replica.standing.why_left_out(time.perf_counter())
        logs.warning(_log, f"replica {after}", model=replica.model, replica=replica.name, was=before, reason=why)
