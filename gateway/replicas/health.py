"""Asks every replica for its health, for as long as the gateway runs.

A probe generates nothing: it costs no tokens and cannot fail because of a model's habits. One that hangs delays no
other. A failed attempt marks its replica at once (fleet.py) and has it probed soon; while a replica is down, fails or
is slow it is asked more often, so that it is seen within a second or so when it is well again.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from math import inf

from msgspec import Struct

from adapters.base import Health
from adapters.errors import HostExhausted
from adapters.wire.hop.alarm import patiently
from gateway.config import HealthConfig, Live
from gateway.records import logs
from gateway.replicas.fleet import Fleet
from gateway.replicas.replica import Replica, State

TICK_S = 0.05  # between two looks at whose turn it is

_log = logs.logger("health")


class Probing(Struct, eq=False):
    """How a replica's probing goes: when it was last asked, and how often it has not been well since it was."""

    asked_at: float = -inf
    num_unwell: int = 0
    task: asyncio.Task[None] | None = None


def is_due(probing: Probing, replica: Replica, config: HealthConfig, now: float) -> bool:
    """Every `interval_s`; where there is a doubt every `recheck_s`, and at first sooner."""
    is_in_doubt = (
        not replica.is_ready or replica.standing.trust(now) < 1 or replica.standing.failed_at > probing.asked_at
    )
    wait_s = config.interval_s
    if is_in_doubt:
        wait_s = min(wait_s, config.recheck_s, config.recheck_s * 2.0 ** (probing.num_unwell - 2))
    return now - probing.asked_at >= wait_s


async def watch(fleet: Fleet, live: Live) -> None:
    """Probe each replica when it is due, until cancelled. It is the one watch, whatever is configured meanwhile."""
    began = time.perf_counter()
    probings: defaultdict[Replica, Probing] = defaultdict(lambda: Probing(began))
    async with asyncio.TaskGroup() as group:
        while True:
            config = live.config.health
            await asyncio.sleep(min(TICK_S, config.interval_s))
            now = time.perf_counter()
            replicas = fleet.serving
            for gone in probings.keys() - set(replicas) if len(probings) > len(replicas) else ():
                del probings[gone]
            for replica in replicas:
                probing = probings[replica]
                if (probing.task is None or probing.task.done()) and is_due(probing, replica, config, now):
                    probing.asked_at = now
                    probing.task = group.create_task(_ask(fleet, replica, probing, config.timeout_s))


async def _ask(fleet: Fleet, replica: Replica, probing: Probing, timeout_s: float) -> None:
    is_well = await probe(fleet, replica, timeout_s)
    if is_well is None:
        return
    if is_well and probing.num_unwell:
        fleet.note_recovery(replica)
    probing.num_unwell = 0 if is_well else probing.num_unwell + 1


async def probe(fleet: Fleet, replica: Replica, timeout_s: float) -> bool | None:
    """Ask one replica, write down what it said, and tell whether it is well. One that has not started yet, or has to be
    started again, is left to its start: to connect to a local port where nobody listens can even keep the engine from
    getting it back."""
    if replica.adapter is None or not replica.has_started or replica.state in (State.STARTING, State.FAILED):
        return None
    load = replica.load
    try:
        async with patiently(asyncio.get_running_loop().time() + timeout_s):
            health = await replica.adapter.health()
            load = await replica.adapter.load()
    except HostExhausted:
        return None  # it was not asked
    except TimeoutError:
        health = Health(False, f"It did not answer a health probe within {timeout_s:g} s.")
    except Exception as error:  # the adapter breaks its contract; the other replicas must still be probed
        logs.error(_log, "a health probe failed", error=error, replica=replica.name)
        health = Health(False, f"Its health probe failed ({type(error).__name__}); see the log.")
    if not replica.has_started:
        return None  # its engine has ended or was unloaded meanwhile, and what it said before is no news
    fleet.note_load(replica, load)
    fleet.mark(replica, State.READY if health.ready else State.UNHEALTHY, health.reason)
    return health.ready
