"""Latency targets, in virtual time: the real engine and scheduler, on a machine of which only the step times exist."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from native_engine.blocks import BlockPool
from native_engine.config import EngineConfig, SchedulerConfig
from native_engine.engine import Engine
from native_engine.errors import InvalidParams
from native_engine.pacing import LONGEST_PAUSE, Targets
from native_engine.sampling_params import SamplingParams
from native_engine.step import StepPlan

TTFT_S, TPOT_S = 1.0, 0.03


class Machine:
    """Takes time, computes nothing."""

    def __init__(self) -> None:
        self.now = 0.0

    def run(self, plan: StepPlan) -> list[list[int]]:
        work = plan.work
        self.now += 0.004 + 0.0005 * work.rows + 2e-7 * work.context + 0.0002 * work.sampled
        return [[7] * chunk.num_sampled for chunk in plan.chunks]


@dataclass
class Request:
    arrives_s: float
    prompt_tokens: int
    output_tokens: int
    priority: int = 0
    times: list[float] = field(default_factory=list)
    is_refused: bool = False
    refused_after_s: float = 0.0
    expected_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        return self.times[0] - self.arrives_s

    @property
    def tpot_s(self) -> float:
        return (self.times[-1] - self.times[0]) / max(len(self.times) - 1, 1)

    @property
    def is_in_time(self) -> bool:
        return not self.is_refused and self.ttft_s <= TTFT_S and self.tpot_s <= TPOT_S


def serve(requests: list[Request], targets: Targets, *, num_blocks: int = 4000, warm: bool = True) -> Engine:
    """Every request to its end."""
    machine = Machine()
    config = SchedulerConfig(
        max_model_len=4096, vocab_size=100, eos_token_ids=frozenset(), max_num_seqs=64, enable_prefix_caching=False
    )
    engine = Engine(config, BlockPool(num_blocks, 32), machine, targets=targets, clock=lambda: machine.now)
    if warm:
        _warm_up(engine, machine)
    started = machine.now
    due = sorted(requests, key=lambda request: request.arrives_s)
    by_id = {str(number): request for number, request in enumerate(due)}
    for request in due:
        request.arrives_s += started
    arriving = list(by_id.items())
    while arriving or engine.has_work:
        if not engine.has_work:
            machine.now = max(machine.now, arriving[0][1].arrives_s)
        while arriving and arriving[0][1].arrives_s <= machine.now:
            name, request = arriving.pop(0)
            params = SamplingParams(
                max_tokens=request.output_tokens, temperature=0, ignore_eos=True, priority=request.priority
            )
            engine.add(name, [1] * request.prompt_tokens, params)
        for output in engine.step():
            request = by_id[output.request_id]
            if output.finish_reason == "late":
                request.is_refused, request.expected_s = True, output.expected_ttft_s
                request.refused_after_s = machine.now - request.arrives_s
            else:
                request.times.append(machine.now)
        if engine.stats().num_steps % 20 == 0:
            engine.check()
    assert all(request.is_refused or len(request.times) == request.output_tokens for request in requests)
    return engine


def _warm_up(engine: Engine, machine: Machine) -> None:
    for number in range(12):
        engine.add(f"warm {number}", [1] * (40 + 37 * number), SamplingParams(max_tokens=12, ignore_eos=True))
    while engine.has_work:
        engine.step()


def chats(rate_rps: float, seconds: float, seed: int = 1) -> list[Request]:
    rng = np.random.default_rng(seed)
    times = np.sort(rng.uniform(0, seconds, rng.poisson(rate_rps * seconds)))
    return [Request(float(time), int(rng.integers(50, 600)), int(rng.integers(20, 100))) for time in times]


def share_in_time(requests: list[Request]) -> float:
    return sum(request.is_in_time for request in requests) / len(requests)


def served(rate_rps: float, targets: Targets, seconds: float = 60) -> list[Request]:
    requests = chats(rate_rps, seconds)
    serve(requests, targets)
    return requests


PLAIN = Targets()
PACED = Targets(ttft_s=TTFT_S, tpot_s=TPOT_S)
RELEGATING = Targets(ttft_s=TTFT_S, tpot_s=TPOT_S, when_late="relegate")
REFUSING = Targets(ttft_s=TTFT_S, tpot_s=TPOT_S, when_late="refuse")


def test_tokens_come_in_time_while_prompts_arrive() -> None:
    """Steps of 256 tokens take 0.13 s here, four times the target for a token."""
    plain, paced = (served(2.0, targets) for targets in (PLAIN, PACED))
    slow = [sum(request.tpot_s > TPOT_S for request in requests) / len(requests) for requests in (plain, paced)]
    assert slow[0] > 0.05
    assert slow[1] < 0.01


def test_a_long_prompt_stalls_nobody_for_longer_than_the_pause_that_is_allowed() -> None:
    readers = [Request(0.0, 30, 120) for _ in range(4)]
    serve([*readers, Request(0.5, 3000, 5)], PACED)
    gaps = np.diff([request.times for request in readers])
    assert gaps.max() <= 1.1 * LONGEST_PAUSE * TPOT_S
    assert all(request.tpot_s <= TPOT_S for request in readers)


def test_in_overload_more_requests_are_in_time_where_late_ones_make_way() -> None:
    plain, relegating, refusing = (share_in_time(served(5.0, targets, 40)) for targets in (PLAIN, RELEGATING, REFUSING))
    assert plain < 0.15
    assert relegating > plain + 0.20
    assert refusing > plain + 0.50


def test_who_is_refused_hears_it_at_once_and_for_how_long() -> None:
    requests = served(9.0, REFUSING, seconds=20)
    refused = [request for request in requests if request.is_refused]
    assert refused
    assert np.median([request.refused_after_s for request in refused]) < TTFT_S / 2
    assert all(TTFT_S < request.expected_s < 60 for request in refused)


def test_nobody_is_refused_where_all_can_be_in_time() -> None:
    requests = served(1.0, REFUSING)
    assert not any(request.is_refused for request in requests)
    assert share_in_time(requests) > 0.99


def test_those_that_were_put_back_are_served_in_the_end_while_the_flood_goes_on() -> None:
    requests = served(6.0, RELEGATING, seconds=90)
    early = [request for request in requests if request.arrives_s < requests[0].arrives_s + 20]
    assert max(request.ttft_s for request in early) < 45


def test_an_urgent_request_passes_those_that_wait() -> None:
    crowd = [Request(0.001 * number, 400, 20) for number in range(60)]
    urgent = Request(0.2, 400, 20, priority=-1)
    serve([*crowd, urgent], PLAIN)
    assert urgent.ttft_s < 1 < 4 < np.median([request.ttft_s for request in crowd])


def test_a_flood_of_urgent_requests_delays_others_but_starves_nobody() -> None:
    flood = [Request(0.1 * number, 300, 20, priority=-1) for number in range(600)]
    patient = Request(0.5, 300, 20)
    serve([*flood, patient], PLAIN)
    before = sum(request.arrives_s < patient.times[0] and request.times[0] > patient.times[0] for request in flood)
    assert patient.ttft_s < 45
    assert before > 0, "it never had to pass anybody: nothing was shown"


def test_before_the_model_is_warm_nobody_is_refused_or_held_back() -> None:
    requests = [Request(0.0, 600, 2) for _ in range(3)]
    serve(requests, REFUSING, warm=False)
    assert not any(request.is_refused for request in requests)


def test_a_tiny_pool_with_targets_deadlocks_nobody() -> None:
    requests = chats(3.0, 20)
    for request in requests:
        request.prompt_tokens = min(request.prompt_tokens, 500)
    serve(requests, RELEGATING, num_blocks=20)


def test_the_books_say_how_many_were_late() -> None:
    requests = chats(9.0, 20)
    stats = serve(requests, REFUSING).stats()
    assert stats.num_late == sum(request.is_refused for request in requests) > 0
    assert 0 <= stats.step_time_error < 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ttft_target_ms": 0}, "ttft_target_ms must be above 0 and finite, not 0"),
        ({"tpot_target_ms": -3}, "tpot_target_ms must be above 0 and finite, not -3"),
        ({"when_late": "refuse"}, "ttft_target_ms must be given where when_late is refuse"),
        ({"ttft_target_ms": 9, "when_late": "never"}, "when_late must be one of queue, relegate, refuse, not 'never'"),
    ],
)
def test_targets_that_cannot_be_are_refused_by_name(options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidParams, match=message):
        EngineConfig(**options)  # type: ignore[arg-type]
