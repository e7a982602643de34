"""What the policies are for, shown in virtual time with fixed seeds."""

from __future__ import annotations

from statistics import mean

import pytest

from gateway.routing.policies import POLICIES
from gateway.routing.simulation import GREY, MIXED, Machine, Result, Scenario, simulate

EVEN = (Machine(),) * 4
SEEDS = (11, 12)


def results(policy: str, rate_rps: float, fleet: tuple[Machine, ...] = MIXED) -> list[Result]:
    return [simulate(policy, Scenario(rate_rps=rate_rps, fleet=fleet, duration_s=45, seed=seed)) for seed in SEEDS]


def met(policy: str, rate_rps: float, fleet: tuple[Machine, ...] = MIXED) -> float:
    return mean(each.attainment for each in results(policy, rate_rps, fleet))


@pytest.mark.parametrize("policy", ["least_load", "power_of_two"])
def test_near_saturation_who_sees_load_serves_more_in_time_than_round_robin(policy: str) -> None:
    assert met(policy, 16) > met("round_robin", 16) + 0.05


@pytest.mark.parametrize("policy", sorted({*POLICIES} - {"cost", "order"}))
def test_far_below_saturation_all_policies_serve_everything_in_time(policy: str) -> None:
    assert met(policy, 4, EVEN) > 0.99


def test_weights_help_where_round_robin_drowns_the_slow_replica() -> None:
    assert met("weighted", 16) > met("round_robin", 16) + 0.05


@pytest.mark.parametrize("policy", ["prefix_affinity", "session_affinity"])
def test_affinity_finds_more_in_caches_and_no_replica_drowns(policy: str) -> None:
    with_affinity, without = results(policy, 24), results("least_load", 24)
    assert min(each.hit_rate for each in with_affinity) > max(each.hit_rate for each in without) + 0.1
    assert max(max(each.shares) for each in with_affinity) < 0.45
    assert mean(each.attainment for each in with_affinity) > mean(each.attainment for each in without) + 0.1


@pytest.mark.parametrize("policy", sorted({*POLICIES} - {"cost", "order"}))
def test_a_replica_that_becomes_ten_times_slower_loses_its_traffic(policy: str) -> None:
    """It fares as the others for 20 of 45 seconds, so an even share would be more than a fifth."""
    for sick, well in zip(results(policy, 12, GREY), results(policy, 12, MIXED), strict=True):
        assert sick.shares[0] < 0.75 * well.shares[0]
        assert sick.attainment > 0.6


def test_the_same_seed_gives_the_same_result() -> None:
    scenario = Scenario(rate_rps=12, duration_s=20, seed=5)
    assert simulate("prefix_affinity", scenario) == simulate("prefix_affinity", scenario)
    assert simulate("prefix_affinity", scenario) != simulate("prefix_affinity", Scenario(rate_rps=12, duration_s=20))
