"""More load than an engine can carry, in virtual time: what is served in time, who is served, how soon others know.

python -m tests.gateway.admission.test_overload          # the table of docs/admission.md
"""

from __future__ import annotations

from functools import cache

import pytest

from gateway.admission.priority import Priority
from gateway.admission.turnstile import Rules, Turnstile
from tests.gateway.admission.simulation import Engine, Load, Report, simulate

TTFT_S, TPOT_S = 0.5, 0.04
CAPACITY_RPS = 20.0  # of the engine within these targets, at the best depth
SEEDS = (1, 2, 3)


def overload(times: float, seed: int, *, highest: int = 512, is_adaptive: bool = True) -> Report:
    """So many times the capacity; 30 % of it are of the high class, of the rest a third are low."""
    rest = CAPACITY_RPS * (times - 0.3)
    loads = [
        Load(Priority.HIGH, CAPACITY_RPS * 0.3, tenant="high"),
        Load(Priority.DEFAULT, rest * 2 / 3, tenant="default"),
        Load(Priority.LOW, rest / 3, tenant="low"),
    ]
    rules = Rules(ttft_s=TTFT_S, tpot_s=TPOT_S, highest=highest, is_adaptive=is_adaptive)
    return simulate(Turnstile(rules), Engine(), loads, duration_s=40, seed=seed)


@cache
def best_depth() -> tuple[int, float]:
    """The fixed limit with the highest goodput at twice the capacity, and that goodput."""
    found = {depth: overload(2, 1, highest=depth, is_adaptive=False).goodput_rps for depth in range(16, 65, 4)}
    depth = max(found, key=lambda each: found[each])
    return depth, found[depth]


def test_the_best_depth_is_neither_end() -> None:
    """Too few and the engine idles; too many and every token is late."""
    depth, goodput_rps = best_depth()
    assert 16 < depth < 64
    for end in (16, 64):
        assert overload(2, 1, highest=end, is_adaptive=False).goodput_rps < 0.8 * goodput_rps


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("times", [1, 2, 5, 10])
def test_overload_takes_no_goodput_and_no_high_request(times: float, seed: int) -> None:
    report = overload(times, seed)
    _, peak_rps = best_depth()
    if times > 1:  # at the capacity itself some of it stays unused between arrivals
        assert report.goodput_rps >= 0.9 * peak_rps
        assert report.shed_p99_s <= 0.05
    assert report.share_in_time(Priority.HIGH) >= 0.99
    assert report.late <= 0.01 * report.served  # what was let in is in time


@pytest.mark.parametrize("seed", SEEDS)
def test_the_limit_is_found_near_the_best_depth(seed: int) -> None:
    report = overload(5, seed)
    depth, _ = best_depth()
    median = sorted(report.limits)[len(report.limits) // 2]
    assert 0.7 * depth <= median <= 1.2 * depth


@pytest.mark.parametrize("seed", SEEDS)
def test_the_low_class_has_its_floor_under_a_flood_of_the_higher(seed: int) -> None:
    loads = [Load(Priority.DEFAULT, 200, tenant="flood"), Load(Priority.LOW, 10, tenant="low")]
    rules = Rules(ttft_s=TTFT_S, tpot_s=TPOT_S, is_adaptive=True, floor_share=0.1)
    report = simulate(Turnstile(rules), Engine(), loads, duration_s=40, seed=seed)
    assert report.in_time[Priority.LOW] >= 0.05 * sum(report.in_time.values())


@pytest.mark.parametrize("seed", SEEDS)
def test_two_tenants_share_by_tokens_however_much_one_of_them_sends(seed: int) -> None:
    loads = [
        Load(Priority.DEFAULT, 100, tenant="flood"),
        Load(Priority.DEFAULT, 15, tenant="other"),
    ]
    rules = Rules(ttft_s=TTFT_S, tpot_s=TPOT_S, is_adaptive=True)
    report = simulate(Turnstile(rules), Engine(), loads, duration_s=40, seed=seed)
    assert report.tokens_of["other"] >= 0.5 * report.tokens_of["flood"]  # it sends 13 % of all


def test_without_a_gate_the_engine_serves_everybody_too_late() -> None:
    """What the figures above are to be held against."""
    report = overload(2, 1, highest=10_000, is_adaptive=False)
    _, peak_rps = best_depth()
    assert report.goodput_rps < 0.2 * peak_rps


def table() -> str:
    """The figures over all seeds; of what may not be exceeded, the worst."""
    rows = [
        "| load | in time, req/s | high | default | low | refused | refusals p99 | served late | limit found |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for times in (1, 2, 5, 10):
        reports = [overload(times, seed) for seed in SEEDS]
        offered = sum(report.offered.total() for report in reports)
        shares = (
            sum(report.in_time[priority] for report in reports) / sum(report.offered[priority] for report in reports)
            for priority in Priority
        )
        limits = [limit for report in reports for limit in report.limits]
        cells = (
            f"{times}x",
            f"{sum(report.goodput_rps for report in reports) / len(reports):.1f}",
            *(f"{100 * share:.1f} %" for share in shares),
            f"{100 * sum(report.sheds.total() for report in reports) / offered:.0f} %",
            f"{1e3 * max(report.shed_p99_s for report in reports):.0f} ms",
            f"{sum(report.late for report in reports)} of {sum(report.served for report in reports)}",
            f"{min(limits)} to {max(limits)}",
        )
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
