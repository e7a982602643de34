"""An engine directly and through our gateway: pairs of cells in the order direct, gateway, gateway, direct, ...

    async with behind_gateway(url, model, adapter="vllm", home=home) as gateway_url:
        result = await race(card, show, partial(PairedCourse, rate_rps=None, pairs=6))

Both arms are one engine process, which would find the prompts of the first arm in its prefix cache when the second one
sends them again. So each arm puts a word of its own before every prompt: the same schedule, the same lengths, and
nothing in common that a cache could use beyond the chat template.
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from adapters.errors import EngineFailed
from adapters.launching.launch import HOST, EngineProcess, LaunchSpec, free_port
from arena.judging.search import Probe
from arena.load.plan import CellPlan, PlannedRequest
from arena.race.card import RaceCard
from arena.race.course import Course
from arena.race.entries import Entry
from arena.race.show import Show
from arena.records.store import Store

MARKS = ("apple", "river")  # before each prompt; one token in the vocabularies that `arena/load/workloads` names
SHARE_OF_BURST = 0.5  # well below goodput: what is looked for is what a request costs and not where a queue begins


class PairedCourse(Course):
    """Two contenders, the direct one first, at one rate. A pair with an invalid cell is run again, as often as there
    are pairs.
    """

    is_search = False

    def __init__(self, card: RaceCard, store: Store, show: Show, *, rate_rps: float | None, pairs: int) -> None:
        super().__init__(card, store, show)
        self._rate_rps = rate_rps
        self._pairs = pairs

    async def run(self) -> None:
        for entry in self.entries:
            await self._bring_up(entry)
        rung, rate_rps = self._rate()
        whole = 0
        for number in range(2 * self._pairs):
            if whole == self._pairs or any(entry.is_out for entry in self.entries):
                break
            before = [len(entry.outcomes) for entry in self.entries]
            for entry in self.entries if number % 2 == 0 else reversed(self.entries):
                await self._run_cell(entry, Probe(rung, rate_rps, number))
            whole += all(len(entry.outcomes) > known for entry, known in zip(self.entries, before, strict=True))

    @property
    def stays_resident(self) -> bool:
        return True

    def _rate(self) -> tuple[int, float]:
        """The one that is asked for, or a share of what the engine's warm-up burst ran at."""
        if self._rate_rps is not None:
            return self.settings.nearest_rung(self._rate_rps), self._rate_rps
        burst_rps = self.entries[0].notes.burst_rps
        assert burst_rps is not None  # it has been brought up
        rung = self.settings.rung_below(burst_rps * SHARE_OF_BURST)
        return rung, self.settings.rate(rung)

    def _plan(self, entry: Entry, step: Probe, replicate: int) -> CellPlan:
        return marked(super()._plan(entry, step, replicate), MARKS[self.entries.index(entry)])


def marked(plan: CellPlan, word: str) -> CellPlan:
    """The same plan with a word before the first message of each request."""
    return replace(plan, requests=tuple(_marked(request, word) for request in plan.requests))


def _marked(request: PlannedRequest, word: str) -> PlannedRequest:
    body = msgspec.json.decode(request.body)
    first = body["messages"][0]
    if not isinstance(first["content"], str):
        raise EngineFailed("A prompt begins with an image or a sound, so its arms cannot be told apart for a cache.")
    first["content"] = f"{word} {first['content']}"
    return replace(request, body=msgspec.json.encode(body))


@asynccontextmanager
async def behind_gateway(url: str, model: str, *, adapter: str, home: Path) -> AsyncIterator[str]:
    """A gateway as a process of its own, with one replica: the engine at `url`. Gives the gateway's url."""
    port = free_port()
    config = home / "state" / f"gateway-cost-{port}.yaml"
    spec = LaunchSpec(
        name="the gateway",
        argv=(sys.executable, "-m", "goodgate", "serve", "--config", str(config)),
        env={"GOODGATE_HOME": str(home), "PYTHONPATH": str(Path(__file__).parents[2])},
        port=port,
        ready_path="/ready",
        prepare=partial(_write, config, gateway_config(url, model, adapter=adapter, port=port)),
        temporary=(config,),
    )
    async with EngineProcess(spec, home / "logs" / "gateway-cost.log") as gateway:
        yield gateway.url


def gateway_config(url: str, model: str, *, adapter: str, port: int) -> dict[str, Any]:
    return {
        "server": {"host": HOST, "port": port},
        "auth": {"required": False},
        "models": [{"name": model, "replicas": [{"engine": adapter, "options": {"url": url}}]}],
    }


def _write(path: Path, config: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(config, indent=2) + "\n")
