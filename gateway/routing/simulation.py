"""What the policies come to under load, in virtual time. Pure: the same seed gives the same result.

    result = simulate("least_load", Scenario(rate_rps=12, fleet=MIXED))
    result.attainment                # the share of requests that met both limits, of all that came

The policies are the gateway's own, over the same views; only engines and callers are models of themselves. An engine
works in steps: each one reads the weights once, which takes the most of it, then costs a little for every sequence that
decodes and more for every token of a prompt that is read in it. So decoding slows slowly with the batch, and whoever
has a long prompt read makes the others wait. A cache holds the blocks of prompts that it has read last. Callers come
at random times (Poisson) and do not wait for each other; most go on with a conversation, whose prompt is all that was
said. How far a replica is trusted, and what is offered to it, is what the gateway makes of the times that it sees; what
is proven of a machine is what it has carried alone, as in a race.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from random import Random

from msgspec import Struct

from adapters.types import Usage
from gateway.config import BreakerConfig, OutlierConfig
from gateway.records.trace import Attempt
from gateway.replicas.rate import Rate
from gateway.replicas.replica import OFFERED_S
from gateway.replicas.standing import Peers, Standing
from gateway.routing.ask import Ask
from gateway.routing.policies import POLICIES, READS_PREFIX
from gateway.routing.prefix_index import PrefixIndex
from gateway.routing.views import LEAST_TRUST, ReplicaView

STEP_S = 0.012  # to read the weights once
SEQUENCE_S = 0.00012  # for each sequence that decodes in a step
PREFILL_TOKEN_S = 0.00006  # for each token of a prompt
CHUNK_TOKENS = 2048  # of prompts, in one step at most
MAX_BATCH = 64
CACHE_BLOCKS = 1500
BLOCK_TOKENS = 128
TTFT_S, TPOT_S = 1.0, 0.04  # the limits
WARM_UP = 0.2  # of the requests, which are not judged
NUM_SYSTEM_PROMPTS, SYSTEM_BLOCKS = 6, 8
GOES_ON = 0.8  # of the requests belong to a conversation that has begun
MAX_COMPLETION_TOKENS = 512
PROVEN = 0.99  # of the requests that a machine alone has to carry well
MARGIN = 0.9  # of what is proven, that `goodput` fills up


class Machine(Struct, frozen=True):
    """One replica: how fast it is, what its operator says it carries, and from when on it is ten times slower."""

    speed: float = 1.0
    weight: float = 1.0
    grey_from_s: float = float("inf")

    def speed_at(self, now: float) -> float:
        return self.speed / 10 if now >= self.grey_from_s else self.speed


MIXED = (Machine(), Machine(), Machine(), Machine(0.5, 0.5))
GREY = (Machine(grey_from_s=20), Machine(), Machine(), Machine(0.5, 0.5))


class Scenario(Struct, frozen=True, kw_only=True):
    rate_rps: float
    fleet: tuple[Machine, ...] = MIXED
    duration_s: float = 60.0
    seed: int = 1


class Result(Struct, frozen=True):
    attainment: float
    hit_rate: float  # of prompt tokens
    shares: tuple[float, ...]  # of the requests, by replica


@dataclass(slots=True, eq=False)
class _Request:
    at: float
    blocks: tuple[int, ...]
    conversation: int
    num_tokens: int  # of the answer
    is_judged: bool
    ask: Ask
    attempt: Attempt
    to_read: int = 0
    is_met: bool = False


@dataclass(slots=True, eq=False)
class _Engine:
    """A replica, and what the gateway counts of it."""

    name: str
    machine: Machine
    waiting: deque[_Request] = field(default_factory=deque)
    reading: deque[_Request] = field(default_factory=deque)
    writing: list[tuple[int, float, _Request]] = field(default_factory=list)  # by the step that ends it
    cache: OrderedDict[int, None] = field(default_factory=OrderedDict)
    num_steps: int = 0
    is_running: bool = False
    in_flight: int = 0
    open_tokens: int = 0
    num_served: int = 0
    read_tokens: int = 0
    hit_tokens: int = 0
    standing: Standing = field(default_factory=Standing)
    offered: Rate = field(default_factory=lambda: Rate(OFFERED_S))

    def accept(self, request: _Request) -> None:
        self.waiting.append(request)
        self.in_flight += 1
        self.open_tokens += request.ask.tokens
        self.num_served += 1
        self.offered.note(request.at)
        self.standing.began(request.attempt, request.ask.prompt_tokens)

    def begin_step(self, now: float) -> tuple[float, list[_Request]]:
        """When the step ends, and whose prompts it reads to their end."""
        while self.waiting and len(self.reading) + len(self.writing) < MAX_BATCH:
            self._admit(self.waiting.popleft())
        room, read = CHUNK_TOKENS, []
        while self.reading and room:
            request = self.reading[0]
            part = min(room, request.to_read)
            request.to_read -= part
            room -= part
            if request.to_read == 0:
                read.append(self.reading.popleft())
        work_s = STEP_S + SEQUENCE_S * len(self.writing) + PREFILL_TOKEN_S * (CHUNK_TOKENS - room)
        return now + work_s / self.machine.speed_at(now), read

    def end_step(self, now: float, read: Sequence[_Request]) -> None:
        self.num_steps += 1
        for request in read:
            request.attempt.first_token = now
            self.standing.answered(request.attempt, now)
            self._remember(request.blocks)
            heapq.heappush(self.writing, (self.num_steps + request.num_tokens - 1, request.at, request))
        while self.writing and self.writing[0][0] <= self.num_steps:
            self._finish(heapq.heappop(self.writing)[2], now)

    def _admit(self, request: _Request) -> None:
        num_hits = next((n for n, block in enumerate(request.blocks) if block not in self.cache), len(request.blocks))
        request.to_read = max((len(request.blocks) - num_hits) * BLOCK_TOKENS, 1)
        self.hit_tokens += num_hits * BLOCK_TOKENS
        self.read_tokens += len(request.blocks) * BLOCK_TOKENS
        self.reading.append(request)

    def _finish(self, request: _Request, now: float) -> None:
        self.in_flight -= 1
        self.open_tokens -= request.ask.tokens
        request.attempt.ended, request.attempt.outcome = now, "ok"
        request.attempt.usage = Usage(request.ask.prompt_tokens, request.num_tokens)
        self.standing.ended(request.attempt, None, now)
        ttft_s, tpot_s = (request.attempt.first_token or now) - request.at, request.attempt.token_time_s or 0.0
        request.is_met = ttft_s <= TTFT_S and tpot_s <= TPOT_S

    def _remember(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            self.cache[block] = None
            self.cache.move_to_end(block)
        while len(self.cache) > CACHE_BLOCKS:
            self.cache.popitem(last=False)


def simulate(routing: str, scenario: Scenario) -> Result:
    engines = [_Engine(f"r{number}", machine) for number, machine in enumerate(scenario.fleet)]
    by_name = {engine.name: engine for engine in engines}
    index = PrefixIndex(64 << 20)
    Peers(BreakerConfig(), OutlierConfig(), [engine.standing for engine in engines])
    for engine in engines:
        engine.standing.is_down = False
    proven = {each.name: proven_rps(each.machine.speed) * MARGIN if routing == "goodput" else 0.0 for each in engines}
    requests = list(_requests(scenario))
    steps: list[tuple[float, str, list[_Request]]] = []  # under way, by their end

    def run_until(now: float) -> None:
        while steps and steps[0][0] <= now:
            at, name, read = heapq.heappop(steps)
            engine = by_name[name]
            engine.end_step(at, read)
            engine.is_running = engine.in_flight > 0
            if engine.is_running:
                end, read = engine.begin_step(at)
                heapq.heappush(steps, (end, name, read))

    for turn, request in enumerate(requests):
        run_until(request.at)
        known = index.known(request.blocks) if routing in READS_PREFIX else {}
        views = [_view(each, known.get(each.name, 0), proven[each.name], request.at) for each in engines]
        engine = by_name[POLICIES[routing](views, request.ask, turn)[0].name]
        if routing in READS_PREFIX:
            index.note(request.blocks, engine.name)
        engine.accept(request)
        if not engine.is_running:
            engine.is_running = True
            end, read = engine.begin_step(request.at)
            heapq.heappush(steps, (end, engine.name, read))
    run_until(float("inf"))
    return _result(engines, [request for request in requests if request.is_judged])


@lru_cache
def proven_rps(speed: float) -> float:
    """The highest rate that one such machine carries, to 2 %."""
    low, high = 0.0, 64.0
    while high - low > 0.02 * high:
        middle = (low + high) / 2
        alone = Scenario(rate_rps=middle, fleet=(Machine(speed),), duration_s=240)
        low, high = (middle, high) if simulate("least_load", alone).attainment >= PROVEN else (low, middle)
    return low


def _view(engine: _Engine, num_known: int, proven_rps: float, now: float) -> ReplicaView:
    return ReplicaView(
        engine.name,
        in_flight=engine.in_flight,
        open_tokens=engine.open_tokens,
        weight=engine.machine.weight,
        trust=max(engine.standing.trust(now), LEAST_TRUST),
        latency_s=engine.standing.to_first.seconds,
        offered_rps=engine.offered.at(now),
        proven_rps=proven_rps,
        cached_tokens=num_known * BLOCK_TOKENS,
    )


def _result(engines: Sequence[_Engine], judged: Sequence[_Request]) -> Result:
    num_served = sum(engine.num_served for engine in engines)
    return Result(
        attainment=sum(request.is_met for request in judged) / len(judged),
        hit_rate=sum(engine.hit_tokens for engine in engines) / sum(engine.read_tokens for engine in engines),
        shares=tuple(engine.num_served / num_served for engine in engines),
    )


def _requests(scenario: Scenario) -> Iterator[_Request]:
    """Everything that will be asked, and when."""
    random = Random(scenario.seed)
    fresh = iter(range(1 << 62))
    systems = [_new_blocks(fresh, SYSTEM_BLOCKS) for _ in range(NUM_SYSTEM_PROMPTS)]
    talks: list[tuple[int, tuple[int, ...]]] = []
    num_begun = 0
    at = 0.0
    while (at := at + random.expovariate(scenario.rate_rps)) < scenario.duration_s:
        if len(talks) > 4 * scenario.rate_rps and random.random() < GOES_ON:
            conversation, said = talks.pop(random.randrange(len(talks)))
        else:
            num_begun += 1
            conversation, said = num_begun, random.choice(systems)
        blocks = (*said, *_new_blocks(fresh, random.choice((1, 1, 1, 2, 4, 12))))
        num_tokens = min(max(round(random.expovariate(1 / 130)), 8), MAX_COMPLETION_TOKENS)
        if len(blocks) < 64:
            talks.append((conversation, (*blocks, *_new_blocks(fresh, num_tokens // BLOCK_TOKENS))))
        yield _Request(
            at=at,
            blocks=blocks,
            conversation=conversation,
            num_tokens=num_tokens,
            attempt=Attempt(model="m", engine="simulated", replica="", started=at),
            is_judged=at >= WARM_UP * scenario.duration_s,
            ask=Ask(
                prompt_tokens=len(blocks) * BLOCK_TOKENS,
                completion_tokens=MAX_COMPLETION_TOKENS,
                session=conversation,
                prefix=blocks,
                lot=random.getrandbits(32),
            ),
        )


def _new_blocks(fresh: Iterator[int], num: int) -> tuple[int, ...]:
    return tuple(next(fresh) for _ in range(num))
