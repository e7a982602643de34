"""Models that are loaded when they are asked for: who waits for one, who is let in, and when it goes again.

    with await loader.hold(model, trace, on_late):     # waits until it is loaded; inside the block it stays so
        ...

What to load and what to unload is decided in residency.py, which is pure; the engines are started and stopped by the
fleet. Here are the requests that wait, and one task for each life of a model. Every change of what is decided upon ends
in `_act`, on the one event loop, so there is nothing to lock.

A client that leaves while it waits is forgotten at once. The load goes on, because whoever asked once asks again; it is
given up only for another model that is waited for. A load that fails fails everyone who waits for it; after a pause,
longer each time, the next request tries again. When a reload has changed a model's engines, who is in it goes on to the
end, who comes waits, and then it is loaded anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias

from adapters.errors import EngineUnavailable, GoodgateError, InvalidRequest, Overloaded, RequestError
from gateway.config import Config, Live, ModelConfig
from gateway.records import logs
from gateway.records.metrics import Metrics
from gateway.records.trace import Trace
from gateway.replicas.fleet import Fleet
from gateway.replicas.replica import ServedModel
from gateway.replicas.residency import Decision, Phase, Resident, Rules, decide

FIRST_PAUSE_S = 1.0
LAST_PAUSE_S = 60.0
WAITED_TOO_LONG_RETRY_AFTER_S = 10.0

_log = logs.logger("loader")
_ALWAYS_THERE = nullcontext()

Why: TypeAlias = Literal["idle", "evicted", "asked", "failed", "changed"]
OnLate: TypeAlias = Callable[[], Awaitable[None]]
Ticket: TypeAlias = "asyncio.Future[GoodgateError | None]"  # why a wait came to nothing; None: let in


class ModelBusy(RequestError):
    """It would have to be cut off to be unloaded."""

    status = 409
    code = "model_busy"


@dataclass(slots=True, eq=False)
class _Slot:
    """What is known here of one model. The times are those of the event loop."""

    model: ServedModel
    alive: ServedModel | None = None  # whose engines its life has started; a reload may have changed the model since
    is_removed: bool = False  # from the configuration
    phase: Phase = Phase.UNLOADED
    num_open: int = 0
    waiting: dict[Ticket, float] = field(default_factory=dict)  # since when, in order of arrival
    last_let_in: float = 0.0
    idle_since: float = 0.0
    is_closing: bool = False
    life: asyncio.Task[None] | None = None
    num_failures: int = 0  # in a row
    failure: str = ""  # the latest
    retry_at: float = 0.0

    @property
    def is_stale(self) -> bool:
        """It is loaded as it was configured once, or is not to be loaded any more."""
        return self.alive is not None and (self.is_removed or self.alive is not self.model)

    @property
    def is_open(self) -> bool:
        return self.phase is Phase.LOADED and not self.is_closing and not self.is_stale

    @property
    def unload_after_s(self) -> float | None:
        assert isinstance(self.model.config, ModelConfig)  # a group is not loaded
        return self.model.config.unload_after_s

    def view(self) -> Resident:
        return Resident(
            name=self.model.name,
            phase=Phase.UNLOADING if self.is_stale else self.phase,
            num_open=self.num_open,
            waiting_since=next(iter(self.waiting.values()), None),
            last_let_in=self.last_let_in,
            idle_since=self.idle_since,
            unload_after_s=self.unload_after_s,
        )

    def let_in(self, now: float) -> None:
        self.num_open += 1
        self.last_let_in = now

    def let_in_all(self, now: float) -> None:
        for ticket in self.waiting:
            if not ticket.done():  # its client may have left a moment ago
                ticket.set_result(None)
                self.let_in(now)
        self.waiting.clear()


class Loader:
    def __init__(self, fleet: Fleet, live: Live, metrics: Metrics) -> None:
        self._fleet = fleet
        self._live = live
        self._slots: dict[str, _Slot] = {}
        self._metrics = metrics
        metrics.watch("goodgate_model_waiting", lambda: self._each(lambda slot: len(slot.waiting)))
        metrics.watch("goodgate_model_loaded", lambda: self._each(lambda slot: slot.phase is Phase.LOADED))
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._take_models()

    def adopt(self) -> None:
        """The fleet serves by another configuration from now on."""
        self._take_models()
        for slot in list(self._slots.values()):
            if slot.is_removed:
                self._turn_away(slot)
            self._end_if_stale(slot)
        self._act()

    def _take_models(self) -> None:
        self._rules = rules_of(self._live.config)
        on_demand = {name: model for name, model in self._fleet.models.items() if model.is_on_demand}
        for name, model in on_demand.items():
            slot = self._slots.setdefault(name, _Slot(model))
            slot.model, slot.is_removed = model, False
        for name in self._slots.keys() - on_demand.keys():
            self._slots[name].is_removed = True

    def _turn_away(self, slot: _Slot) -> None:
        gone = EngineUnavailable(f"Model {slot.model.name!r} is not configured any more; /v1/models lists what is.")
        for ticket in slot.waiting:
            if not ticket.done():
                ticket.set_result(gone)
        slot.waiting.clear()
        if slot.life is None:
            del self._slots[slot.model.name]

    def _end_if_stale(self, slot: _Slot) -> None:
        if slot.is_stale and slot.num_open == 0 and slot.phase in (Phase.LOADING, Phase.LOADED):
            self._end(slot, "changed")

    def has_to_hold(self, model: ServedModel) -> bool:
        """It is loaded on demand; any other is always there."""
        return model.name in self._slots

    async def hold(
        self, model: ServedModel, trace: Trace, on_late: OnLate | None = None
    ) -> AbstractContextManager[None]:
        """Waits until the model is loaded, and keeps it so for as long as the block lasts. `on_late` is called once if
        that takes longer than a heartbeat. Raises `EngineUnavailable` with the reason when it cannot be loaded, and
        `Overloaded` when that would take too long."""
        slot = self._slots.get(model.name)
        if slot is None:
            return _ALWAYS_THERE
        if slot.is_open:
            slot.let_in(_now())
        else:
            await self._wait(slot, trace, on_late)
        return self._held(slot)

    def as_loaded(self, model: ServedModel) -> ServedModel:
        """The model as it is loaded while it is held: a reload may have made it another one."""
        slot = self._slots.get(model.name)
        return model if slot is None or slot.alive is None else slot.alive

    async def load(self, model: ServedModel, trace: Trace) -> None:
        """Load it as for a request, without one. Raises as `hold` does."""
        self._slot(model)
        with await self.hold(model, trace):
            pass

    async def unload(self, model: ServedModel) -> None:
        """Unload a model that nobody uses; it is gone afterwards. Raises `ModelBusy`."""
        slot = self._slot(model)
        if slot.num_open or slot.waiting:
            raise ModelBusy(
                f"Model {model.name!r} is in use ({slot.num_open} requests are open and {len(slot.waiting)} wait for "
                "it); unload it when they have ended."
            )
        if slot.phase in (Phase.LOADING, Phase.LOADED):
            self._end(slot, "asked")
        if slot.life is not None:
            await asyncio.wait({slot.life})

    def status(self, model: ServedModel) -> dict[str, Any] | None:
        """For people; None for a model that is always there."""
        slot = self._slots.get(model.name)
        if slot is None:
            return None
        return {
            "state": slot.phase.value,
            "open": slot.num_open,
            "waiting": len(slot.waiting),
            "makes_room": slot.is_closing,
            "failure": slot.failure,
        }

    async def close(self) -> None:
        """Nothing is loaded from now on, and what is loaded goes."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        lives = [slot.life for slot in self._slots.values() if slot.life is not None]
        for slot in self._slots.values():
            if slot.life is not None and slot.phase is not Phase.UNLOADING:
                slot.life.cancel()
        await asyncio.gather(*lives, return_exceptions=True)

    def _slot(self, model: ServedModel) -> _Slot:
        if model.name not in self._slots:
            raise InvalidRequest(
                f"Model {model.name!r} is there for as long as the gateway is; `load: on_demand` in its configuration "
                "would let it be loaded and unloaded."
            )
        return self._slots[model.name]

    @contextmanager
    def _held(self, slot: _Slot) -> Iterator[None]:
        try:
            yield
        finally:
            self._leave(slot)

    def _leave(self, slot: _Slot) -> None:
        slot.num_open -= 1
        if slot.num_open == 0:
            slot.idle_since = _now()
            self._end_if_stale(slot)
            self._act()

    async def _wait(self, slot: _Slot, trace: Trace, on_late: OnLate | None) -> None:
        self._check_pause(slot)
        ticket: Ticket = asyncio.get_running_loop().create_future()
        began = slot.waiting[ticket] = _now()
        self._act()
        try:
            async with asyncio.timeout(self._live.config.residency.wait_timeout_s):
                failure = await self._result(ticket, on_late)
        except BaseException as error:
            if ticket.done() and not ticket.cancelled() and ticket.result() is None:
                self._leave(slot)  # it was let in, and had no time to notice
            elif slot.waiting.pop(ticket, None) is not None:
                self._act()
            if isinstance(error, TimeoutError):
                raise self._waited_too_long(slot) from None
            raise
        finally:
            trace.note_wait(began, _now())
        if failure is not None:
            raise failure

    async def _result(self, ticket: Ticket, on_late: OnLate | None) -> GoodgateError | None:
        await asyncio.wait({ticket}, timeout=self._live.server.heartbeat_s)
        if on_late is not None and not ticket.done():
            await on_late()
        return await ticket

    def _check_pause(self, slot: _Slot) -> None:
        pause_s = slot.retry_at - _now()
        if pause_s > 0:
            raise EngineUnavailable(
                f"{slot.failure} The next try may be made in {pause_s:.0f} s.", retry_after_s=pause_s
            )

    def _waited_too_long(self, slot: _Slot) -> Overloaded:
        return Overloaded(
            f"Model {slot.model.name!r} could not be loaded within {self._live.config.residency.wait_timeout_s:g} s "
            "(`residency.wait_timeout_s`); /admin/status tells what is in its way.",
            retry_after_s=WAITED_TOO_LONG_RETRY_AFTER_S,
        )

    def _act(self) -> None:
        """Do what there is to be done now, and look again when time alone will have changed something."""
        if self._is_closed:
            return
        now = _now()
        decision = decide([slot.view() for slot in self._slots.values()], self._rules, now)
        for slot in self._slots.values():
            slot.is_closing = slot.model.name in decision.closing
        for name in decision.let_in:
            self._slots[name].let_in_all(now)
        for name in decision.load:
            self._begin(self._slots[name])
        for name in decision.evict:
            self._end(self._slots[name], "evicted")
        for name in decision.expire:
            self._end(self._slots[name], "idle")
        self._look_again(decision, now)

    def _look_again(self, decision: Decision, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if decision.look_again_at is not None:
            self._timer = asyncio.get_running_loop().call_later(decision.look_again_at - now, self._act)

    def _begin(self, slot: _Slot) -> None:
        slot.phase, slot.alive = Phase.LOADING, slot.model
        slot.life = asyncio.create_task(self._live_once(slot), name=f"the life of {slot.model.name}")
        slot.life.add_done_callback(partial(self._note_end, slot))

    def _end(self, slot: _Slot, why: Why) -> None:
        assert slot.life is not None  # it has begun, and is ended once
        slot.phase = Phase.UNLOADING
        slot.life.cancel()
        self._note_unload(slot, why)

    async def _live_once(self, slot: _Slot) -> None:
        """One life of a model. It may be cancelled at any time, even before its first step."""
        began, model = _now(), slot.alive or slot.model
        try:
            await self._fleet.load(model, timeout_s=self._live.config.residency.load_timeout_s)
            self._note_loaded(slot, _now() - began)
            await self._fleet.outlive(model)
            self._note_failure(slot, "Its engines go on crashing.")
        except EngineUnavailable as error:
            self._note_failure(slot, error.message)
        except Exception as fault:
            logs.error(_log, "a model could not be loaded", model=slot.model.name, error=fault)
            self._note_failure(slot, f"The gateway failed at it ({type(fault).__name__}); see its log.")
        finally:
            await self._fleet.unload(model)

    def _note_loaded(self, slot: _Slot, after_s: float) -> None:
        now = _now()
        slot.phase = Phase.LOADED
        slot.num_failures, slot.failure = 0, ""
        slot.idle_since = slot.last_let_in = now
        logs.info(_log, "model loaded", model=slot.model.name, after_s=round(after_s, 3), waiting=len(slot.waiting))
        self._metrics.observe("goodgate_model_load_seconds", after_s, slot.model.name)
        slot.let_in_all(now)  # before anyone is asked whether it has to make room: each load serves somebody
        self._act()

    def _note_failure(self, slot: _Slot, reason: str) -> None:
        slot.phase = Phase.UNLOADING
        pause_s = min(FIRST_PAUSE_S * 2.0 ** min(slot.num_failures, 16), LAST_PAUSE_S)
        slot.num_failures += 1
        slot.failure = f"Model {slot.model.name!r} could not be loaded: {reason}"
        slot.retry_at = _now() + pause_s
        logs.warning(_log, "model could not be loaded", model=slot.model.name, reason=reason, pause_s=pause_s)
        self._metrics.add("goodgate_model_load_failures", slot.model.name)
        self._note_unload(slot, "failed")
        for ticket in slot.waiting:
            if not ticket.done():
                ticket.set_result(EngineUnavailable(slot.failure, retry_after_s=pause_s))
        slot.waiting.clear()

    def _note_unload(self, slot: _Slot, why: Why) -> None:
        logs.info(_log, "model unloads", model=slot.model.name, why=why)
        self._metrics.add("goodgate_model_unloads", slot.model.name, why)

    def _note_end(self, slot: _Slot, _: asyncio.Task[None]) -> None:
        slot.phase, slot.life, slot.alive = Phase.UNLOADED, None, None
        if slot.is_removed:
            self._slots.pop(slot.model.name, None)
        self._act()

    def _each(self, read: Callable[[_Slot], float]) -> Iterator[tuple[tuple[str], float]]:
        return (((name,), read(slot)) for name, slot in self._slots.items())


def rules_of(config: Config) -> Rules:
    """What may be loaded together, as the configuration says."""
    residency = config.residency
    return Rules(
        max_loaded=residency.max_loaded,
        groups=tuple(map(frozenset, residency.groups)),
        memory_gib=residency.memory_gib,
        sizes_gib={model.name: model.memory_gib for model in config.models if model.memory_gib is not None},
    )


def _now() -> float:
    return asyncio.get_running_loop().time()
