"""Several serving processes on one port (SO_REUSEPORT): the parent starts them, passes signals on and waits.

Each worker has its own fleet, so its own counts: /metrics and /admin/status speak for the worker that answers, and
each gets its share of `max_in_flight`. Each reads the configuration for itself when it changes; on SIGHUP the parent
has all of them do so. An engine inside the gateway's process cannot be shared, and an engine that
each worker would launch for itself is not what anybody wants, so both are refused.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import wait
from types import FrameType
from typing import Any

import msgspec

from gateway.config import Config, ConfigError, FindAdapter
from gateway.web import process

STOP_TIMEOUT_S = 10.0  # beyond the drain time, for a worker that does not end


def check_shareable(config: Config, find_adapter: FindAdapter) -> None:
    """Refuse a configuration that several processes cannot serve together."""
    for model in config.models:
        for replica in model.replicas:
            if replica.launch:
                raise ConfigError(
                    f"Replica {replica.name!r} is launched by the gateway, so only one worker can serve it; "
                    "start the engine yourself and give its url, or use --workers 1."
                )
            if find_adapter(replica.engine).in_process:
                raise ConfigError(
                    f"The engine {replica.engine!r} runs inside the gateway's process, so only one worker can serve "
                    "it; serve it from a gateway of its own and give that one's url, or use --workers 1."
                )


def share_of(config: Config, num_workers: int) -> Config:
    """One worker's configuration: its share of the limits that count for the whole gateway.

    A response in one worker's memory would be there for every other request only, so nothing is kept there.
    """
    limit = -(-config.server.max_in_flight // num_workers)
    memory_mib = config.overload.memory_mib
    if memory_mib == "auto" and (found := process.memory_limit()) is not None:
        memory_mib = found >> 20
    if isinstance(memory_mib, int):
        memory_mib = max(1, memory_mib // num_workers)
    server = msgspec.structs.replace(config.server, max_in_flight=limit)
    keep = "none" if config.responses.keep == "memory" and num_workers > 1 else config.responses.keep
    return msgspec.structs.replace(
        config,
        server=server,
        overload=msgspec.structs.replace(config.overload, memory_mib=memory_mib),
        responses=msgspec.structs.replace(config.responses, keep=keep),
    )


def run_workers(
    num_workers: int, work: Callable[..., None], arguments: tuple[Any, ...], patience_s: Callable[[], float]
) -> bool:
    """Run `work` in so many processes until a signal, or until one ends by itself. True if all went well."""
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=work, args=arguments, name=f"worker-{n}") for n in range(num_workers)]
    asked_to_stop = False

    def on_signal(number: int, _: FrameType | None) -> None:
        nonlocal asked_to_stop
        asked_to_stop = True
        for worker in workers:
            if worker.is_alive():
                worker.terminate()

    def on_hangup(number: int, _: FrameType | None) -> None:
        for worker in workers:
            if worker.is_alive() and worker.pid is not None and not asked_to_stop:
                os.kill(worker.pid, number)

    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    # What is ignored here is ignored by a worker too until it has a handler: without one, a SIGHUP would end it.
    previous[signal.SIGHUP] = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        for worker in workers:
            worker.start()
        signal.signal(signal.SIGHUP, on_hangup)
        wait([worker.sentinel for worker in workers])  # a first end: on request, or one that takes the others with it
        for worker in workers:
            if worker.is_alive() and not asked_to_stop:
                worker.terminate()
        for worker in workers:
            worker.join(patience_s() + STOP_TIMEOUT_S)
            if worker.is_alive():
                worker.kill()
                worker.join()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    # One that was still starting has no handler yet, and ends by the signal itself.
    return asked_to_stop and all(worker.exitcode in (0, -signal.SIGTERM) for worker in workers)


def stop_with_parent() -> None:
    """Called in a worker: it stops as on SIGTERM when the parent is gone, however that one ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="watches the parent", daemon=True).start()
