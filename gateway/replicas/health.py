"""Asks every replica for its health, for as long as the gateway runs.

A probe generates nothing: it costs no tokens and cannot fail because of a model's habits. One slow replica delays no
other. Between probes a failed attempt marks its replica at once (see dispatch.py), and the next good probe takes it
back.
"""

from __future__ import annotations

import asyncio

from adapters.base import Health
from gateway.config import HealthConfig
from gateway.records import logs
from gateway.replicas.fleet import Fleet
from gateway.replicas.replica import Replica, State

_log = logs.logger("health")


async def watch(fleet: Fleet, config: HealthConfig) -> None:
    """Probe all replicas every `interval_s`, until cancelled."""
    while True:
        await asyncio.sleep(config.interval_s)
        await asyncio.gather(*(probe(fleet, replica, config.timeout_s) for replica in fleet.replicas))


async def probe(fleet: Fleet, replica: Replica, timeout_s: float) -> None:
    """Ask one replica and write down what it said. One that has not started yet, or has to be started again, is left to
    its start: to connect to a local port where nobody listens can even keep the engine from getting it back."""
    if replica.adapter is None or not replica.has_started or replica.state in (State.STARTING, State.FAILED):
        return
    load = replica.load
    try:
        async with asyncio.timeout(timeout_s):
            health = await replica.adapter.health()
            load = await replica.adapter.load()
    except TimeoutError:
        health = Health(False, f"It did not answer a health probe within {timeout_s:g} s.")
    except Exception as error:  # the adapter breaks its contract; the other replicas must still be probed
        logs.error(_log, "a health probe failed", error=error, replica=replica.name)
        health = Health(False, f"Its health probe failed ({type(error).__name__}); see the log.")
    if not replica.has_started:
        return  # its engine has ended or was unloaded meanwhile, and what it said before is no news
    fleet.note_load(replica, load)
    fleet.mark(replica, State.READY if health.ready else State.UNHEALTHY, health.reason)
