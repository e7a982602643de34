"""A race for programs that watch it: each step as a JSON object on a line of its own.

    {"event": "cell_judged", "t_s": 12.3, "engine": "a", "rate_rps": 4.0, "verdict": "pass", ...}

`t_s` is seconds since the race began. The events are those of `arena.race.show.Show`, with the same names; at the end
comes a `result` with the summary.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from typing import Any

from arena.judging.cells import CellResult
from arena.judging.so_far import SoFar
from arena.load.loadgen import Progress


class EventLines:
    """Each step of a race as one JSON object: `{"event": "cell_judged", "t_s": 12.3, "engine": "a", ...}`."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write
        self._started = time.monotonic()

    def client_calibrating(self, words: str) -> None:
        self.tell("client_calibrating", words=words)

    def engine_starting(self, name: str) -> None:
        self.tell("engine_starting", engine=name)

    def engine_ready(self, name: str, words: str) -> None:
        self.tell("engine_ready", engine=name, words=words)

    def engine_failed(self, name: str, words: str) -> None:
        self.tell("engine_failed", engine=name, words=words)

    def cell_starting(self, name: str, rate_rps: float, expected_s: float) -> None:
        self.tell("cell_starting", engine=name, rate_rps=rate_rps, expected_s=round(expected_s, 1))

    def cell_progress(self, name: str, progress: Progress, so_far: SoFar) -> None:
        counts = {"sent": progress.sent, "done": progress.done, "failed": progress.failed}
        elapsed_s = round(progress.elapsed_s, 2)
        self.tell(
            "cell_progress",
            engine=name,
            elapsed_s=elapsed_s,
            in_flight=progress.in_flight,
            **counts,
            measured=so_far.ended,
            in_time=so_far.in_time,
            ttft_p50_ms=_finite(so_far.ttft_p50_ms),
            ttft_p99_ms=_finite(so_far.ttft_p99_ms),
        )

    def cell_judged(self, name: str, cell: CellResult) -> None:
        self.tell(
            "cell_judged",
            engine=name,
            cell=cell.cell_id,
            rate_rps=cell.rate_rps,
            status=cell.status,
            reason=cell.reason,
            verdict=cell.verdict.value,
            requests=cell.requests,
            misses=cell.misses,
            failures=cell.failures,
            attainment=cell.attainment,
        )

    def tell(self, event: str, **fields: Any) -> None:
        self._write(json.dumps({"event": event, "t_s": round(time.monotonic() - self._started, 3), **fields}))


def _finite(milliseconds: float | None) -> float | None:
    """JSON has no infinity, which stands for failures."""
    return None if milliseconds is None or math.isinf(milliseconds) else round(milliseconds, 2)
