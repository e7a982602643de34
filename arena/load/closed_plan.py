"""What a closed loop sends: prompts in order, and no times. Pure.

Nobody knows beforehand how many requests a closed loop will send, and a prompt is never sent twice, since the second
time it would come from a cache. So a plan has more prompts than the loop is expected to need; where they run out, the
cell is aborted and says so.
"""

from __future__ import annotations

import math

import msgspec

from arena.load.arrivals import SECOND_NS
from arena.load.loadgen import ClosedLoop
from arena.load.plan import CellPlan, PlannedRequest, PromptSource, Sessions

SPARE = 3.0  # times the prompts of a loop that is as fast as the engine has been
MOST_PROMPTS = 200_000  # of a cell: an engine that answered a burst with nothing at all seems to be endlessly fast


def closed_plan(
    cell_id: str,
    *,
    loop: ClosedLoop,
    likely_rps: float,
    warmup_s: float,
    duration_s: float,
    prompts: PromptSource | Sessions,
) -> CellPlan:
    """`likely_rps`: requests a second that the engine has been seen to answer. Every request is planned for the end of
    the window, so that only those which the loop makes due within it are measured. Of a conversation, which has times
    of its own, the last turn is sent.
    """
    warmup_ns = round(warmup_s * SECOND_NS)
    horizon_ns = warmup_ns + round(duration_s * SECOND_NS)
    count = min(math.ceil(SPARE * likely_rps * (warmup_s + duration_s)) + 2 * loop.concurrency, MOST_PROMPTS)
    requests = tuple(_planned(seq, horizon_ns, prompts) for seq in range(count))
    return CellPlan(cell_id, "closed", likely_rps, warmup_ns, horizon_ns, requests)


def _planned(seq: int, scheduled_ns: int, prompts: PromptSource | Sessions) -> PlannedRequest:
    prompt = prompts(seq)
    body = msgspec.json.encode({"max_tokens": prompt.max_tokens, **prompt.fields})
    return PlannedRequest(seq, scheduled_ns, prompt.prompt_id, body, prompt.max_tokens, prompt.prompt_tokens)
