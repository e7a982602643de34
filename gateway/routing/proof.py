"""May routing believe what a race has proven of a replica? Pure: a race's entry and what is known here go in.

    here = Here(slo=model.slo, version=replica.version, settings=None, now=time.time(), max_age_s=90 * DAY_S)
    proof = judged(entries, here)
    proof.trusted_rps        # 0 where there is a doubt, which `proof.doubt` says in words

Trusted is a rate that was proven for limits at least as strict as those that are promised here, not long ago, of the
version that runs and with its settings. Of several such rates (other kinds of work, other machines) the lowest counts:
nobody knows here which of them live requests are like. That these keep the limits too is watched elsewhere
(gateway/replicas/attainment.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct

from gateway.config import SloConfig
from gateway.routing.evidence import Entry, Limits

DAY_S = 86_400.0
BROKEN = "Live requests miss the limits though it has less to do than was proven."


class Here(Struct, frozen=True, kw_only=True):
    """What is known here of the replica. An empty `version` is one that nobody knows; so are `settings` of None, those
    of an engine that somebody else has started. `now` is the wall's time, in seconds since 1970.
    """

    slo: SloConfig
    version: str
    settings: dict[str, Any] | None
    now: float
    max_age_s: float


class Proof(Struct, frozen=True):
    """Requests a second that a race has proven within the limits `raced`, and why they are not to be trusted, if they
    are not."""

    rps: float
    doubt: str = ""
    raced: Limits = Limits()

    @property
    def trusted_rps(self) -> float:
        return 0.0 if self.doubt else self.rps


NO_FILE = Proof(0.0, "There is no evidence of a race (`evidence` in the configuration).")
UNRACED = Proof(0.0, "The race does not speak of it; race it, or name it alike.")


def judged(entries: Sequence[Entry], here: Here) -> Proof:
    """The lowest of the rates that can be trusted; where none can, the newest race with the first doubt of it."""
    if not entries:
        return UNRACED
    proofs = [_judged(entry, here) for entry in sorted(entries, key=lambda entry: entry.measured_utc, reverse=True)]
    trusted = [proof for proof in proofs if proof.trusted_rps]
    return min(trusted, key=lambda proof: proof.rps) if trusted else proofs[0]


def _judged(entry: Entry, here: Here) -> Proof:
    if not entry.proven_rps:
        return Proof(0.0, "The race has proven no rate of it.")
    return Proof(entry.proven_rps, next(_doubts(entry, here), ""), entry.slo)


def promised(slo: SloConfig, raced: Limits) -> SloConfig:
    """What live requests are held to: what the configuration promises, or else what was raced for."""
    if slo.ttft_ms is None and slo.tpot_ms is None:
        return SloConfig(ttft_ms=raced.ttft_ms, tpot_ms=raced.tpot_ms)
    return slo


def _doubts(entry: Entry, here: Here) -> Iterator[str]:
    day = entry.measured_utc.date().isoformat()
    if entry.expires_utc is not None and entry.expires_utc.timestamp() <= here.now:
        yield f"The evidence of the race of {day} expired on {entry.expires_utc.date().isoformat()}; race again."
    if entry.measured_utc.timestamp() < here.now - here.max_age_s:
        yield f"The race of {day} is older than `goodput.max_age_days` allows; race again."
    for key in ("ttft_ms", "tpot_ms"):
        raced, wanted = getattr(entry.slo, key), getattr(here.slo, key)
        if wanted is not None and (raced is None or raced > wanted):
            was = "no limit" if raced is None else f"{raced:g}"
            yield f"It was raced for a looser `{key}`: {was}, and `slo` promises {wanted:g}."
    if entry.version and here.version and not _is_same(entry.version, here.version):
        yield f"The race was of version {entry.version}, and {here.version[:64]} runs."
    if entry.settings is not None and here.settings is not None and entry.settings != here.settings:
        yield f"It was raced with {_words(entry.settings)}, and is launched with {_words(here.settings)}."


def _words(settings: dict[str, Any]) -> str:
    return ", ".join(f"`{key}: {value}`" for key, value in sorted(settings.items())) or "no options"


def _is_same(one: str, other: str) -> bool:
    """Some engines add a build to their version, and some a `v` before it: b11434 and b11434-a1b2c3d are the same."""
    one, other = one.removeprefix("v"), other.removeprefix("v")
    shorter, longer = sorted((one, other), key=len)
    return longer == shorter or (longer.startswith(shorter) and not longer[len(shorter)].isalnum())
