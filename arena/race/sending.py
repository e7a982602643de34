"""How a race sends its load: by how many processes, and what their client is worth here."""

from __future__ import annotations

from collections.abc import Callable

from adapters.errors import GoodgateError
from arena.load.calibration import Budget, Calibration, CalibrationFailed, Demand, calibrate
from arena.load.loadgen import Crew
from arena.race.scenario import SLO, Scenario

CALIBRATED_TOKENS = 32  # of each answer of a calibration: what counts is how many come in a second


class ClientUnfit(GoodgateError):
    """The load generator cannot keep time on this machine, so nothing that it measured could be believed."""


def crew_of(scenario: Scenario, master: tuple[str, int] | None) -> Crew | None:
    """None: one load process. `master` is where workers of other hosts are waited for."""
    if master is not None:
        return Crew(workers=scenario.load.workers, host=master[0], port=master[1], starts_workers=False)
    return Crew(workers=scenario.load.workers) if scenario.load.workers > 1 else None


def demand_of(scenario: Scenario) -> Demand:
    """The most tokens a second that the race may ask for, as requests of a length that is quickly measured."""
    tokens = min(scenario.longest_output, CALIBRATED_TOKENS)
    return Demand(rate_rps=scenario.search.max_rps * scenario.longest_output / tokens, tokens=tokens)


def budget_of(slo: SLO) -> Budget:
    """How wrong the client may be, for claims under these limits."""
    return Budget(ttft_ms=slo.lag_budget_ms, gap_ms=slo.gap_budget_ms, lag_ms=slo.lag_budget_ms)


async def fit_client(scenario: Scenario, *, on_try: Callable[[Demand], None] | None = None) -> Calibration:
    """Calibrate the client for this race; `ClientUnfit` where it cannot measure on this machine."""
    budget = budget_of(scenario.slo)
    try:
        found = await calibrate(demand_of(scenario), budget, workers=scenario.load.workers, on_try=on_try)
    except CalibrationFailed as error:
        raise ClientUnfit(str(error)) from error
    if not found.verdict.ok:
        raise ClientUnfit(
            f"{found.verdict.words} Stop what else runs here, or race with --no-calibration and claim no small "
            "difference."
        )
    return found
