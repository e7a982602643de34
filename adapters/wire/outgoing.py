"""Headers that whatever is asked of an engine next takes with it: where the caller's trace goes on.

    outgoing.HEADERS.set({"traceparent": "00-..."})     # by whoever makes the attempt, in its own task
    ... EngineClient sends them with generations and questions, but never with probes or farewells

A context variable, because they belong to the attempt and not to the request that adapters translate: no adapter has to
hand them on, and tasks that an attempt starts have them too.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from types import MappingProxyType

NONE: Mapping[str, str] = MappingProxyType({})
HEADERS: ContextVar[Mapping[str, str]] = ContextVar("headers of the attempt", default=NONE)
