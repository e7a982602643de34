"""What the gateway knows of a replica, and of its model or group. Only fleet.py and lives.py change it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from adapters.base import EngineAdapter, EngineOptions, Load
from adapters.launching.launch import EngineProcess
from gateway.config import GroupConfig, ModelConfig, ReplicaConfig
from gateway.replicas.attainment import Attainment, Promise
from gateway.replicas.engine_time import EngineTime
from gateway.replicas.rate import Rate
from gateway.replicas.standing import Standing
from gateway.shaping import Shape
from gateway.tenants.keys import Key

OFFERED_S = 2.0  # how soon routing sees what it gives a replica: before a burst has become a queue
DEMAND_S = 30.0  # and how soon autoscaling does: chance must not look like growth


class State(Enum):
    UNLOADED = "unloaded"
    STARTING = "starting"
    READY = "ready"
    UNHEALTHY = "unhealthy"
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class Replica:
    """One running instance of an engine, as the gateway sees it."""

    name: str
    model: str
    engine: str
    config: ReplicaConfig
    options: EngineOptions | None = None  # its adapter's, secrets included; None where it is launched
    life: asyncio.Task[None] | None = None  # brings it up, and keeps it up if it is launched
    is_leaving: bool = False  # the configuration does not have it any more
    adapter: EngineAdapter[Any] | None = None
    process: EngineProcess | None = None
    state: State = State.STARTING
    reason: str = "It has not answered yet."  # for everybody: no line of an engine's log
    details: str = ""  # for operators: the reason with the last lines of the log, where there are any
    end: str = ""  # the reason of its engine's end
    has_started: bool = False  # it can be asked; while it is False only its start may say how it fares
    num_restarts: int = 0
    in_flight: int = 0  # generations that this gateway has open on it
    open_tokens: int = 0  # and the most tokens that they may come to, prompts included
    engine_time: EngineTime = field(default_factory=EngineTime)
    load: Load = field(default_factory=Load)
    standing: Standing = field(default_factory=Standing)
    version: str = ""  # the engine's own, where a race's figures have to be compared with it and it tells
    offered: Rate = field(default_factory=lambda: Rate(OFFERED_S))  # attempts a second
    demand: Rate = field(default_factory=lambda: Rate(DEMAND_S))
    promise: Promise | None = None  # what it is held to by `attainment`; None where nothing is proven of it
    attainment: Attainment = field(default_factory=Attainment)
    emptied: asyncio.Event | None = None  # where somebody waits until nothing is open on it

    @property
    def is_ready(self) -> bool:
        return self.state is State.READY

    @property
    def has_room(self) -> bool:
        """It is ready, and has no more open than its operator allows."""
        return self.is_ready and (self.config.max_in_flight is None or self.in_flight < self.config.max_in_flight)

    @property
    def started_adapter(self) -> EngineAdapter[Any]:
        assert self.adapter is not None  # routing offers only replicas that have started
        return self.adapter

    def is_same(self, other: Replica) -> bool:
        """It would be asked in the same way, so that there is no reason to begin anew."""
        return self.config == other.config and self.options == other.options

    async def until_empty(self) -> None:
        self.emptied = asyncio.Event()
        while self.in_flight:
            self.emptied.clear()
            await self.emptied.wait()


@dataclass(slots=True, eq=False)
class ServedModel:
    """A configured model with its replicas, or a group with those of its models. `turn` counts its requests, for round
    robin; `shape` is what holds for them. It is the same one for as long as it is configured: a reload changes what it
    holds, so that whoever waits for it is served by what there is then."""

    config: ModelConfig | GroupConfig
    replicas: list[Replica]
    shape: Shape | None = None
    turn: int = 0
    turned_away: Rate = field(default_factory=lambda: Rate(DEMAND_S))  # generations for which no replica was tried
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def is_ready(self) -> bool:
        return any(replica.is_ready for replica in self.replicas)

    def rank(self, replica: Replica) -> int:
        """The place of the replica's model in the group."""
        return self.config.models.index(replica.model) if isinstance(self.config, GroupConfig) else 0

    @property
    def is_on_demand(self) -> bool:
        return isinstance(self.config, ModelConfig) and self.config.load == "on_demand"

    @property
    def can_serve(self) -> bool:
        """It is ready, or a request would have it loaded."""
        is_to_come = any(replica.state in (State.UNLOADED, State.STARTING) for replica in self.replicas)
        return self.is_ready or (self.is_on_demand and is_to_come)

    def tell_change(self) -> None:
        self.changed.set()

    async def change(self) -> None:
        """Waits until the state of one of its replicas changes."""
        self.changed.clear()
        await self.changed.wait()

    def is_for(self, caller: Key | None) -> bool:
        return caller is None or caller.may_use((self.name, *self.config.aliases))
