"""The race, from scenario to report: `race` tells the story, everything it calls does one thing.

    card -> client calibrated -> [engine up, probed, warmed up -> cells (plan, load, ingest, audit, judge), the next
    rate by what they say -> engine down] -> ranking

`arena.race.course` says whose turn it is, `arena.race.engine_life` how an engine comes up, `arena.race.cell_runner`
what a cell is, `arena.race.race_record` what is written down. An engine that does not start, dies or stops answering is
reported with its own last words, and the race goes on without it. Ctrl-C ends the race: children are stopped, and what
has been measured is judged and reported as a partial result.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from arena.judging.judge import judge_race
from arena.judging.results import RaceResult
from arena.race.card import RaceCard
from arena.race.course import Course
from arena.race.show import Show
from arena.records.schema import StoreError
from arena.records.store import Store
from arena.records.verdicts import search_rows, verdict_rows


async def race(card: RaceCard, show: Show, course_of: Callable[[RaceCard, Store, Show], Course] = Course) -> RaceResult:
    """Run a race to its end, or to its interruption, and return what the store then says. `course_of` makes another
    course than the search for goodput. Raises `ClientUnfit` where the client cannot measure here, and `StoreError`
    where the folder holds a race.
    """
    (card.out / "spool").mkdir(parents=True, exist_ok=True)
    database = card.out / "arena.duckdb"
    if database.exists():
        raise StoreError(f"{database} holds a race already, and two in one store would be judged as one.")
    with Store(database) as store:
        course = course_of(card, store, show)
        course.write_down()
        is_complete = False
        try:
            if card.calibrates:
                await course.calibrate_client()
            await course.run()
            is_complete = True
        except (asyncio.CancelledError, BrokenPipeError):  # interrupted, or nobody looks on any more
            _stay_alive()
        finally:
            await course.stop_engines()
        await course.recount()
        course.write_down(is_complete=is_complete)
        result = judge_race(store)
        store.record_verdicts(verdict_rows(result), search_rows(result))
        return result


def _stay_alive() -> None:
    """The interruption has been taken; the task goes on to judge and to report."""
    task = asyncio.current_task()
    if task is not None:
        task.uncancel()
