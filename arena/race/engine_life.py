"""One life of an engine in a race: it comes up, is probed and warmed up; it is asked whether it lives; it is stopped.

What fails here is the engine's fault: a `GoodgateError` whose message is the reason why it is out.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from adapters.errors import GoodgateError
from arena.judging.notes import EngineNotes
from arena.load.plan import PromptSource, Target
from arena.load.workload import CellKey
from arena.race.card import RaceCard
from arena.race.entries import Entry
from arena.race.planned import prompts_of
from arena.race.probe import WISHES, WISHES_OF_NATURAL_ENDS, Found, is_alive, probe, warm_up
from arena.race.raced_with import settings_of, weights_of
from arena.race.scenario import Search


@dataclass(frozen=True, slots=True, kw_only=True)
class BroughtUp:
    """An engine that is up and warm."""

    found: Found
    start_s: float  # until it had answered the probe
    burst_rps: float  # an upper bound of its goodput, and a first guess at it
    prompt_ids: tuple[str, ...]  # what it has been sent


async def bring_up(entry: Entry, card: RaceCard) -> BroughtUp:
    """Start it where it is ours to start, find out what it speaks, and warm it up. The entry gets its process, target
    and notes.
    """
    started = time.monotonic()
    contender, scenario = entry.contender, card.scenario
    if contender.process is not None:
        entry.process = contender.process()
        await entry.process.start()
    url = entry.process.url if entry.process else contender.url
    assert url is not None
    # The prompts differ each time that the engine is warmed up.
    prompts = prompts_of(scenario, card.material, CellKey(card.seed, None, len(entry.outcomes)))
    wishes = WISHES if scenario.exact_output else WISHES_OF_NATURAL_ENDS
    found = await probe(url, model=contender.model, prompt=prompts(0), headers=contender.headers, wishes=wishes)
    start_s = time.monotonic() - started
    entry.target = found.target(entry.name)
    burst_rps = await _warm_up(entry.target, prompts, scenario.search)
    entry.notes = EngineNotes(
        probe=found.to_dict(),
        launched=contender.process is not None,
        start_s=start_s,
        burst_rps=burst_rps,
        weights=await weights_of(entry.process),
        settings=settings_of(entry.process, contender.flags, found.settings),
        tuning=dict(contender.tuning),
    )
    num_sent = 1 + sum(_bursts(scenario.search))
    prompt_ids = tuple(prompts(seq).prompt_id for seq in range(num_sent))
    return BroughtUp(found=found, start_s=start_s, burst_rps=burst_rps, prompt_ids=prompt_ids)


async def check_alive(entry: Entry) -> None:
    """Raises where the engine has ended or answers no more."""
    assert entry.target is not None
    if entry.process is not None and not entry.process.is_running:
        raise entry.process.failure()
    if not await is_alive(entry.target):
        raise GoodgateError(f"It stopped answering at {entry.target.url}.")


async def stop(entry: Entry) -> None:
    """Stop what we have started; an endpoint is left as it is."""
    if entry.process is not None:
        await entry.process.stop()
        entry.process = None


async def _warm_up(target: Target, prompts: PromptSource, search: Search) -> float:
    """Two bursts, a small one for whatever is still cold, and the one that is counted; requests a second."""
    small, whole = _bursts(search)
    await warm_up(target, lambda seq: prompts(1 + seq), small, timeout_s=search.burst_timeout_s)
    return await warm_up(target, lambda seq: prompts(1 + small + seq), whole, timeout_s=search.burst_timeout_s)


def _bursts(search: Search) -> tuple[int, int]:
    return math.ceil(search.burst / 4), search.burst
