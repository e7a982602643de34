"""Where a request stands in its distributed trace: W3C Trace Context, read from headers and written into headers.

    context = begin(request.headers, sampling)      # None: the caller has no trace, and spans are not recorded
    context.traceparent(span_id)                    # "00-<trace id>-<span id>-01", for an engine

A caller's trace goes on through us. What is no trace context by the letter of the recommendation (level 2) is replaced
by a new trace, and its `tracestate` is forgotten. Whether spans are recorded is for the caller's sampled flag to say;
of traces that begin here a share is, chosen by the trace id, so that every gateway chooses alike.
"""

from __future__ import annotations

import re

from msgspec import Struct
from multidict import CIMultiDictProxy

from gateway.records.random_ids import random_hex

SAMPLED = 1
RANDOM = 2  # the trace id's last seven bytes are random
MAX_STATE_CHARS = 512  # what the recommendation asks everybody to pass on
MAX_STATE_MEMBERS = 32

_PARENT = re.compile(r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})")
_KEY = r"(?:[a-z][a-z0-9_\-*/]{0,255}|[a-z0-9][a-z0-9_\-*/]{0,240}@[a-z][a-z0-9_\-*/]{0,13})"
_MEMBER = re.compile(rf"(?P<key>{_KEY})=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{{0,255}}[\x21-\x2b\x2d-\x3c\x3e-\x7e]")


class Sampling(Struct, frozen=True):
    """Are spans recorded at all, and of what share of the traces that begin here?"""

    is_on: bool = False
    share: float = 1.0

    def takes(self, trace_id: str) -> bool:
        return self.is_on and int(trace_id[16:], 16) < self.share * 2**64


class TraceContext(Struct, frozen=True):
    """`parent_id` is the caller's span, empty where the trace begins here. `is_recorded`: our spans are exported."""

    trace_id: str
    parent_id: str = ""
    flags: int = 0
    state: str = ""
    is_recorded: bool = False

    def traceparent(self, span_id: str) -> str:
        return f"00-{self.trace_id}-{span_id}-{self.flags:02x}"


def begin(headers: CIMultiDictProxy[str], sampling: Sampling) -> TraceContext | None:
    """The context of a request. None where there is nothing to go on with and nothing to record."""
    given = headers.getall("traceparent", [])
    if not given and not sampling.is_on:
        return None
    match = _parent(given)
    if match is None:
        trace_id = random_hex(16)
        is_recorded = sampling.takes(trace_id)
        return TraceContext(trace_id, flags=RANDOM | is_recorded, is_recorded=is_recorded)
    flags = int(match["flags"], 16) & (SAMPLED | RANDOM)
    return TraceContext(
        trace_id=match["trace"],
        parent_id=match["span"],
        flags=flags,
        state=_state(headers.getall("tracestate", [])),
        is_recorded=sampling.is_on and bool(flags & SAMPLED),
    )


def new_span_id() -> str:
    return random_hex(8)


def _parent(given: list[str]) -> re.Match[str] | None:
    """The one `traceparent`, if it is one. A later version may say more behind a dash; what we know comes first."""
    match = _PARENT.match(given[0]) if len(given) == 1 else None
    if match is None or match["version"] == "ff":
        return None
    rest = given[0][match.end() :]
    if rest and (match["version"] == "00" or not rest.startswith("-")):
        return None
    is_zero = match["trace"].strip("0") == "" or match["span"].strip("0") == ""
    return None if is_zero else match


def _state(given: list[str]) -> str:
    """The `tracestate` as it is to be passed on: as it came, or nothing where anything of it is wrong."""
    state = ",".join(given)
    members = [member.strip(" \t") for member in state.split(",")] if len(state) <= MAX_STATE_CHARS else [""]
    members = [member for member in members if member]
    matches = [_MEMBER.fullmatch(member) for member in members]
    keys = {match["key"] for match in matches if match is not None}
    is_right = len(keys) == len(members) <= MAX_STATE_MEMBERS
    return ",".join(members) if is_right else ""
