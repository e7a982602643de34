"""What was declared, what was seen, and what follows from the two. Pure.

judge(declared=True, seen=Seen.IGNORED)   # Verdict.CONTRADICTED
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from adapters.errors import EngineTimeout, GoodgateError, Overloaded, RequestError


class Seen(StrEnum):
    """What became of a request that asked for a capability."""

    HONOURED = "honoured"
    UNCLEAR = "unclear"  # accepted, and the answer neither shows nor denies it
    IGNORED = "ignored"  # accepted, and the answer denies it
    REFUSED = "refused"
    FAILED = "failed"


class Observation(Struct, frozen=True):
    """What was seen, and the evidence in a few words."""

    seen: Seen
    evidence: str


class Verdict(StrEnum):
    """One word for each capability. Only a contradiction is a fault."""

    VERIFIED = "verified"
    NOT_SHOWN = "not shown"
    CONTRADICTED = "contradicted"
    UNDECLARED = "undeclared"
    NOT_OFFERED = "not offered"


MEANINGS = {
    Verdict.VERIFIED: "declared, and the answers show that it is honoured",
    Verdict.NOT_SHOWN: "declared and accepted, but this model's answers prove nothing either way",
    Verdict.CONTRADICTED: "declared, but refused, failed or ignored",
    Verdict.UNDECLARED: "not declared, and works all the same",
    Verdict.NOT_OFFERED: "not declared, and refused by name",
}


def judge(*, declared: bool, seen: Seen, is_relay: bool = False) -> Verdict:
    """`is_relay`: what was declared is only passed on, so that a refusal speaks for whatever stands behind."""
    if not declared:
        return Verdict.UNDECLARED if seen is Seen.HONOURED else Verdict.NOT_OFFERED
    if is_relay and seen is Seen.REFUSED:
        return Verdict.NOT_OFFERED
    if seen is Seen.HONOURED:
        return Verdict.VERIFIED
    return Verdict.NOT_SHOWN if seen is Seen.UNCLEAR else Verdict.CONTRADICTED


def honoured(evidence: str) -> Observation:
    return Observation(Seen.HONOURED, evidence)


def unclear(evidence: str) -> Observation:
    return Observation(Seen.UNCLEAR, evidence)


def ignored(evidence: str) -> Observation:
    return Observation(Seen.IGNORED, evidence)


def honoured_if(is_shown: bool, evidence: str) -> Observation:
    """For what the answer either shows or denies."""
    return honoured(evidence) if is_shown else ignored(evidence)


def from_error(error: GoodgateError) -> Observation:
    """An engine that is busy or slow has said nothing about the capability."""
    if isinstance(error, RequestError):
        return Observation(Seen.REFUSED, error.message)
    if isinstance(error, Overloaded | EngineTimeout):
        return unclear(error.message)
    return Observation(Seen.FAILED, error.message)
