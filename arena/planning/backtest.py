"""Does a plan hold on arrivals that it has not seen? Pure.

    folds = backtest(load, goodput_rps=4.0, limits=limits, parts=10, headroom=0.2)
    sum(fold.held for fold in folds), len(folds)

A trace is cut into parts of equal length in time. A plan is made on all parts up to one, each of which it has to hold,
and the next part is simulated with it. Beside it stands the usual rule: the mean rate by the goodput, rounded up. Both
meet replicas that really have the goodput: this tests what is made of the arrivals, and not the figure of a race.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from msgspec import Struct

from arena.evidence.document import Limits
from arena.planning.load import Load
from arena.planning.queue import (
    LEAST_ARRIVALS,
    attainment,
    is_judged,
    mean_rate,
    parts_of,
    replicas_needed,
    service_rate,
)


class Fold(Struct, frozen=True, kw_only=True):
    """Planned on all parts before this one, which then meets the plan. Attainments are means of several simulations."""

    part: int
    planned_rps: float
    met_rps: float
    replicas: int
    attainment: float
    held: bool
    rule_replicas: int
    rule_attainment: float
    rule_held: bool


def backtest(load: Load, *, goodput_rps: float, limits: Limits, parts: int, headroom: float) -> list[Fold]:
    """Parts with too few arrivals to judge by are passed over."""
    return list(_folds(load, goodput_rps, limits, parts, headroom))


def _folds(load: Load, goodput_rps: float, limits: Limits, parts: int, headroom: float) -> Iterator[Fold]:
    patience_s, allowed = limits.ttft_ms / 1000, 1 - limits.percentile / 100
    service_rps = service_rate(goodput_rps=goodput_rps, patience_s=patience_s, allowed=allowed)
    for number, part in enumerate(parts_of(load.arrivals_s, parts)):
        seen, unseen = load.arrivals_s[: part.start], load.arrivals_s[part]
        if len(seen) < LEAST_ARRIVALS or not is_judged(part):
            continue
        planned = seen / (1 + headroom)
        replicas = replicas_needed(
            planned, goodput_rps=goodput_rps, patience_s=patience_s, allowed=allowed, periods=number
        )
        if replicas is None:
            continue
        rule = math.ceil(mean_rate(seen) / goodput_rps)
        by_plan, by_rule = (
            attainment(unseen, replicas=number_of, service_rps=service_rps, patience_s=patience_s)
            for number_of in (replicas, rule)
        )
        yield Fold(
            part=number,
            planned_rps=round(mean_rate(seen), 3),
            met_rps=round(mean_rate(unseen), 3),
            replicas=replicas,
            attainment=round(by_plan, 5),
            held=by_plan >= 1 - allowed,
            rule_replicas=rule,
            rule_attainment=round(by_rule, 5),
            rule_held=by_rule >= 1 - allowed,
        )
