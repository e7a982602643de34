"""What all load processes have in common: locust's one user, and the manners of a process that is watched."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable

import gevent
import locust
from locust.exception import StopUser


class PacedUser(locust.User):
    """Locust's one user a process. It does not simulate anybody: it hosts the pacer."""

    pace: Callable[[], None]

    @locust.task
    def fire_the_plan(self) -> None:
        type(self).pace()
        raise StopUser


def become_a_load_process() -> None:
    """A fault in any callback or greenlet ends the process: no silent cell. As many sockets as the system allows."""
    hub = gevent.get_hub()
    hub.SYSTEM_ERROR = (*hub.SYSTEM_ERROR, Exception)
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def end_with_parent() -> None:
    """The parent holds our stdin open for as long as it lives."""
    hub = gevent.get_hub()
    hub.wait(hub.loop.io(sys.stdin.fileno(), 1))
    os._exit(3)
