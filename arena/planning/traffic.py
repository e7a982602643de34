"""Which engine for this load, and how many replicas of it? Pure: evidence, load and facts go in, a plan comes out.

    answer = plan(load, limits, entries, facts_of, needs=Needs(), now=now)
    answer.choices[0].replicas          # the first choice; `answer.refused` says of everyone else why not

The number is planned for the low end of the goodput's interval and with the stated headroom. Its own interval is what
the same load would need at the goodput that was found, and at the interval's high end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any

import msgspec
from msgspec import Struct

from arena.evidence.document import Entry, Limits
from arena.planning.load import Burstiness, Load, burstiness
from arena.planning.needs import EngineFacts, Needs, remarks, unmet
from arena.planning.queue import MAX_REPLICAS, attainment, replicas_needed, service_rate

HEADROOM = 0.2

FactsOf = Callable[[str], EngineFacts | None]


class Choice(Struct, frozen=True, kw_only=True):
    """An engine that will do. `replicas` at the low end of the goodput's interval, `likely` at the goodput itself,
    `fewest` at the high end.
    """

    entry: Entry
    replicas: int
    likely: int
    fewest: int
    attainment: float  # in the worst period, with `replicas` at the low end of the goodput, without headroom
    cost_per_hour: float | None
    currency: str | None
    remarks: tuple[str, ...]


class Refused(Struct, frozen=True):
    entry: Entry
    reasons: tuple[str, ...]


class Plan(Struct, frozen=True, kw_only=True):
    load: str
    rate_rps: float
    burstiness: Burstiness
    limits: Limits
    headroom: float
    choices: tuple[Choice, ...]  # the best first
    refused: tuple[Refused, ...]


def plan(
    load: Load,
    limits: Limits,
    entries: Sequence[Entry],
    facts_of: FactsOf,
    *,
    needs: Needs,
    hosts: Mapping[str, Mapping[str, Any]],
    now: datetime,
    here: str = "",
    headroom: float = HEADROOM,
) -> Plan:
    """`here` is the fingerprint of this machine: figures of another kind are told to be so."""
    choices, refused = [], []
    why_not = partial(_why_not, load=load, limits=limits, facts_of=facts_of, needs=needs, hosts=hosts, now=now)
    for entry in entries:
        reasons = tuple(why_not(entry))
        choice = None if reasons else _choice(entry, load, limits, headroom)
        if choice is None:
            reasons = reasons or (f"Not even {MAX_REPLICAS} replicas hold the limits: its requests come too bunched.",)
            refused.append(Refused(entry, reasons))
            continue
        told = tuple(_remarks(entry, load, facts_of(entry.engine), needs, here))
        choices.append(msgspec.structs.replace(choice, remarks=told))
    is_priced = len({choice.currency for choice in choices}) == 1  # else prices cannot be set against each other
    return Plan(
        load=load.words,
        rate_rps=load.rate_rps,
        burstiness=burstiness(load, limits.ttft_ms / 1000),
        limits=limits,
        headroom=headroom,
        choices=tuple(sorted(choices, key=partial(_standing, is_priced=is_priced))),
        refused=tuple(refused),
    )


def _why_not(
    entry: Entry,
    *,
    load: Load,
    limits: Limits,
    facts_of: FactsOf,
    needs: Needs,
    hosts: Mapping[str, Mapping[str, Any]],
    now: datetime,
) -> Iterator[str]:
    if entry.expires_utc <= now:
        yield f"Its evidence expired on {entry.expires_utc.date()}; race it again."
    if not entry.slo.are_as_strict_as(limits):
        yield (
            f"It was raced for looser limits: p{entry.slo.percentile:g} of {entry.slo.ttft_ms:g} ms and "
            f"{entry.slo.tpot_ms:g} ms."
        )
    if entry.arrivals != "Poisson":
        yield f"It was raced under other arrivals ({entry.arrivals}), and a plan starts from those of Poisson."
    if load.bucket is not None and entry.bucket is None:
        yield "It is not known what kind of work it was raced with."
    elif load.bucket is not None and entry.bucket is not None and not entry.bucket.is_as_heavy_as(load.bucket):
        yield f"It was raced with lighter work ({entry.bucket}) than this load is ({load.bucket})."
    if not entry.lowest_rps:
        yield "The race has proven no rate of it; race it longer."
    facts = facts_of(entry.engine)
    if facts is not None:
        yield from unmet(needs, facts, host_gpu=str(hosts.get(entry.host, {}).get("gpu", "")))
    elif needs.are_any:
        yield f"It is not known which engine {entry.engine!r} is; say so with --called {entry.engine}=ENGINE."


def _remarks(entry: Entry, load: Load, facts: EngineFacts | None, needs: Needs, here: str) -> Iterator[str]:
    if load.bucket is None:
        yield f"The load's lengths are not told; this was raced with {entry.bucket or 'work that is not told'}."
    elif entry.bucket is not None and entry.bucket != load.bucket:
        yield f"It was raced with heavier work ({entry.bucket}), so fewer replicas may do."
    if here and entry.host != here:
        yield "It was raced on another kind of machine than this one."
    if entry.quick:
        yield "It rests on a quick race, which errs upward; race it in full before you rely on it."
    if not entry.complete:
        yield "Its race was broken off, so the interval is wide."
    if facts is not None:
        yield from remarks(needs, facts)


def _choice(entry: Entry, load: Load, limits: Limits, headroom: float) -> Choice | None:
    patience_s, allowed = limits.ttft_ms / 1000, 1 - limits.percentile / 100
    planned = load.faster(headroom).arrivals_s

    def needed(goodput_rps: float) -> int | None:
        return replicas_needed(
            planned, goodput_rps=goodput_rps, patience_s=patience_s, allowed=allowed, periods=load.periods
        )

    replicas = needed(entry.lowest_rps)
    if replicas is None:
        return None
    likely = needed(max(entry.goodput_rps, entry.lowest_rps)) or replicas
    fewest = needed(max(entry.ci[1] or entry.goodput_rps, entry.lowest_rps)) or replicas
    lowest = service_rate(goodput_rps=entry.lowest_rps, patience_s=patience_s, allowed=allowed)
    kept = attainment(
        load.arrivals_s, replicas=replicas, service_rps=lowest, patience_s=patience_s, periods=load.periods
    )
    price = entry.economy.price_per_hour if entry.economy else None
    return Choice(
        entry=entry,
        replicas=replicas,
        likely=likely,
        fewest=min(fewest, likely),
        attainment=round(kept, 5),
        cost_per_hour=None if price is None else round(price * replicas, 6),
        currency=entry.economy.currency if entry.economy else None,
        remarks=(),
    )


def _standing(choice: Choice, *, is_priced: bool) -> tuple[float, int, float]:
    """The cheapest where prices are known; then the fewest replicas, and of those the one with the most to spare."""
    cost = choice.cost_per_hour if is_priced else None
    return cost or 0.0, choice.replicas, -choice.entry.lowest_rps
