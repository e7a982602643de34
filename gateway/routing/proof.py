"""May routing believe what a race has proven of a replica? Pure: a race's entry and what is known here go in.

    proof = judged(entry, evidence, slo=model.slo, version=replica.version, now=time.time(), max_age_s=90 * DAY_S)
    proof.trusted_rps        # 0 where there is a doubt, which `proof.doubt` says in words

Trusted is a rate that was proven for limits at least as strict as those that are promised here, not long ago, of the
version that runs. That live requests keep the limits too is watched elsewhere (gateway/replicas/attainment.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from gateway.config import SloConfig
from gateway.routing.evidence import Entry, Evidence, Limits

DAY_S = 86_400.0
BROKEN = "Live requests miss the limits though it has less to do than was proven."


class Proof(Struct, frozen=True):
    """Requests a second that a race has proven, and why they are not to be trusted, if they are not."""

    rps: float
    doubt: str = ""

    @property
    def trusted_rps(self) -> float:
        return 0.0 if self.doubt else self.rps


NO_FILE = Proof(0.0, "There is no evidence of a race (`evidence` in the configuration).")
UNRACED = Proof(0.0, "The race does not speak of it; race it, or name it alike.")


def judged(
    entry: Entry | None, evidence: Evidence, *, slo: SloConfig, version: str, now: float, max_age_s: float
) -> Proof:
    """`now` is the wall's time, in seconds since 1970; an empty `version` is one that nobody knows."""
    if entry is None:
        return UNRACED
    if not entry.proven_rps:
        return Proof(0.0, "The race has proven no rate of it.")
    return Proof(entry.proven_rps, next(_doubts(entry, evidence, slo, version, now - max_age_s), ""))


def promised(slo: SloConfig, raced: Limits) -> SloConfig:
    """What live requests are held to: what the configuration promises, or else what was raced for."""
    if slo.ttft_ms is None and slo.tpot_ms is None:
        return SloConfig(ttft_ms=raced.ttft_ms, tpot_ms=raced.tpot_ms)
    return slo


def _doubts(entry: Entry, evidence: Evidence, slo: SloConfig, version: str, oldest: float) -> Iterator[str]:
    if evidence.measured_utc.timestamp() < oldest:
        day = evidence.measured_utc.date().isoformat()
        yield f"The race of {day} is older than `goodput.max_age_days` allows; race again."
    for key in ("ttft_ms", "tpot_ms"):
        raced, wanted = getattr(evidence.slo, key), getattr(slo, key)
        if wanted is not None and (raced is None or raced > wanted):
            was = "no limit" if raced is None else f"{raced:g}"
            yield f"It was raced for a looser `{key}`: {was}, and `slo` promises {wanted:g}."
    if entry.version and version and not _is_same(entry.version, version):
        yield f"The race was of version {entry.version}, and {version[:64]} runs."


def _is_same(one: str, other: str) -> bool:
    """Some engines add a build to their version, and some a `v` before it: b11434 and b11434-a1b2c3d are the same."""
    one, other = one.removeprefix("v"), other.removeprefix("v")
    shorter, longer = sorted((one, other), key=len)
    return longer == shorter or (longer.startswith(shorter) and not longer[len(shorter)].isalnum())
