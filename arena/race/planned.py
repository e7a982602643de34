"""From a scenario to the plan of one of its cells. Pure."""

from __future__ import annotations

from arena.load.plan import CellPlan, PromptSource, Sessions, build_plan
from arena.load.workload import CellKey, prompt_source
from arena.load.workloads.material import Material
from arena.race.scenario import Scenario


def plan_cell(scenario: Scenario, material: Material, key: CellKey, *, cell_id: str, rate_rps: float) -> CellPlan:
    """The same for every engine at this key and rate. Load goes on until the last measured request must be done."""
    return build_plan(
        cell_id,
        rate_rps=rate_rps,
        duration_s=scenario.cell.window_s(rate_rps),
        warmup_s=scenario.cell.warmup_s,
        cooldown_s=scenario.slo.deadline_s(scenario.longest_output) + 1,
        prompts=prompts_of(scenario, material, key),
        seed=key.schedule_seed(),
        arrivals=scenario.arrivals,
        trace=material.arrivals,
    )


def prompts_of(scenario: Scenario, material: Material, key: CellKey) -> PromptSource | Sessions:
    return prompt_source(scenario.workload, key, material, cache=scenario.cache)
