"""What load generators get wrong besides the clock: cells of known answers, and what is true of them.

Each case is one of a table of measured tools: an early role taken for the first token, several tokens in one event,
failures that look like answers, answers of one token, arrivals that are not what was asked for, and a queue in the
client that hides. `arena.judging.load_truth` judges the rows by the same views that judge engines.
"""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Sequence

import msgspec
import numpy as np

from arena.load import scripted_engine as scripted
from arena.load.arrivals import SECOND_NS, poisson, seed_sequence
from arena.load.plan import CellPlan, PlannedRequest
from arena.load.scripted_engine import DONE, Log, Script, Step, finish_event, text_event, usage_event

MS = 1_000_000
ENDING = finish_event() + DONE

ROLE_FIRST = Script(steps=[Step(0, scripted.role_event()), Step(200, text_event("Hi")), Step(201, ENDING)])
ROLES = range(20)  # requests of `answers_plan` that are answered so

FOUR_TOKENS_MS = 10.0  # a token; four of them every 40 ms
FOUR_A_CHUNK = Script(
    steps=[
        *(Step(40.0 * index, text_event("a b c d", usage=4 * index)) for index in range(1, 13)),
        Step(480.5, finish_event() + usage_event(48) + DONE),
    ]
)
ONE_TOKEN = Script(steps=[Step(20, text_event("a") + finish_event() + usage_event(1) + DONE)])

FAILURES = {
    "HTTP 500": Script(
        steps=[Step(5, '{"error": "no"}')], status=500, content_type="application/json", framing="length"
    ),
    "error event": Script(
        steps=[Step(5, text_event("a")), Step(10, scripted.event({"error": {"message": "out of memory"}}) + DONE)]
    ),
    "cut off cleanly": Script(steps=[Step(5, text_event("a"))]),
    "reset": Script(steps=[Step(5, text_event("a"))], end="reset", end_at_ms=30),
    "never ends": Script(steps=[Step(5, text_event("a"))], end="hang"),
}
NUM_FAILURES = 54
NUM_ONE_TOKEN = 20

CAP = 20
FREEZE_MS = 5_000.0
FREEZE_AT = 30  # the request that freezes the engine
CAP_RATE_RPS = 10.0
CAP_TTFT_MS, CAP_ITL_MS, CAP_TOKENS = 200.0, 20.0, 20


def plan_of(cell_id: str, scripts: Sequence[Script], times_ns: Sequence[int]) -> CellPlan:
    """Every request of it is measured."""
    planned = tuple(
        PlannedRequest(seq, int(at_ns), f"{cell_id}-{seq}", msgspec.json.encode({"script": script}), 8)
        for seq, (script, at_ns) in enumerate(zip(scripts, times_ns, strict=True))
    )
    return CellPlan(cell_id, "constant", 1.0, 0, int(max(times_ns)) + 1, planned)


def answers_plan() -> CellPlan:
    """Answers that are easily misread, one every 20 ms."""
    scripts = [ROLE_FIRST] * len(ROLES) + [FOUR_A_CHUNK] * 20 + [ONE_TOKEN] * NUM_ONE_TOKEN
    return plan_of("answers", scripts, [20 * MS * index for index in range(len(scripts))])


def true_role_ttft_ms(log: Log) -> float:
    """By the engine's own stamps, since a busy machine delays it, too: from a request's last byte to its first text."""
    records = [log.requests[f"answers-{seq}"] for seq in ROLES]
    return statistics.median((record.left_ns[1] - record.received_ns) / MS for record in records)


def failures_plan() -> CellPlan:
    """54 failures of five kinds between as many good answers."""
    kinds = list(FAILURES.values())
    good = scripted.stream_script(ttft_ms=20, itl_ms=5, tokens=3)
    scripts = [script for index in range(NUM_FAILURES) for script in (kinds[index % len(kinds)], good)]
    return plan_of("failures", scripts, [10 * MS * index for index in range(len(scripts))])


def freeze_plan(seed: int = 3) -> CellPlan:
    """Poisson arrivals; the engine stops for five seconds when one of them comes."""
    times = poisson(rate_rps=CAP_RATE_RPS, horizon_ns=20 * SECOND_NS, seed=seed_sequence(run=seed, cell=0, replicate=0))
    plain = scripted.stream_script(ttft_ms=CAP_TTFT_MS, itl_ms=CAP_ITL_MS, tokens=CAP_TOKENS)
    scripts = [plain] * len(times)
    scripts[FREEZE_AT] = msgspec.structs.replace(plain, freeze_ms=FREEZE_MS)
    return plan_of("freeze", scripts, [int(at) for at in times])


def true_ttft_ms(times_ms: Sequence[float], *, cap: int = CAP) -> list[float]:
    """What users of `freeze_plan` see, counted from when each was due: at most `cap` are with the engine at a time,
    the others wait their turn, and what reaches a frozen engine is looked at when it thaws.
    """
    frozen_ms = times_ms[FREEZE_AT]
    thaw_ms = frozen_ms + FREEZE_MS

    def settled(at_ms: float) -> float:
        """Nothing happens in a frozen engine; what was due in it happens when it thaws."""
        return thaw_ms if frozen_ms <= at_ms < thaw_ms else at_ms

    ends_ms: list[float] = []
    seen_ms = []
    for due_ms in times_ms:
        sent_ms = max(due_ms, heapq.heappop(ends_ms)) if len(ends_ms) >= cap else due_ms
        begun_ms = settled(sent_ms)
        seen_ms.append(settled(begun_ms + CAP_TTFT_MS) - due_ms)
        heapq.heappush(ends_ms, settled(begun_ms + CAP_TTFT_MS + CAP_ITL_MS * (CAP_TOKENS - 1)))
    return seen_ms


def dispersion_and_lag_one(times_ns: Sequence[int]) -> tuple[float, float | None]:
    """Variance over mean of the counts in whole seconds, and the correlation of neighbouring gaps: for Poisson 1 and 0.
    Equal gaps have no correlation: None.
    """
    times = np.sort(np.asarray(times_ns, dtype=np.int64))
    seconds = (times - times[0]) // SECOND_NS
    counts = np.bincount(seconds)[:-1]  # the last second is not a whole one
    gaps = np.diff(times)
    dispersion = float(counts.var(ddof=1) / counts.mean())
    return dispersion, float(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) if gaps.std() else None
