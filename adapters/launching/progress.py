"""Long work as it is told to a person: a spinner with a clock for each step on a terminal, plain lines elsewhere.

with steps_on(console) as say:
    say("fetching the wheel")
    say("installing it")                   # the step before is done
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

Say = Callable[[str], None]


@contextmanager
def steps_on(console: Console) -> Iterator[Say]:
    """Hands out what announces a step. The last one is done when the block is left, and has failed if it raises."""
    if not console.is_terminal:
        began = time.monotonic()
        yield lambda step: console.print(f"{time.monotonic() - began:5.0f} s  {step}", soft_wrap=True)
        return
    columns = SpinnerColumn(finished_text="✓"), TimeElapsedColumn(), TextColumn("{task.description}", markup=False)
    with Progress(*columns, console=console) as progress:
        open_steps: list[TaskID] = []

        def close() -> None:
            while open_steps:
                progress.update(open_steps.pop(), total=1, completed=1)

        def say(step: str) -> None:
            close()
            open_steps.append(progress.add_task(step, total=None))

        try:
            yield say
        except BaseException:
            for step in open_steps:
                progress.update(step, description=f"{progress.tasks[step].description}: failed")
                progress.stop_task(step)
            raise
        close()
