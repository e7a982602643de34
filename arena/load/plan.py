"""What one cell sends, and when: decided completely before the first byte leaves.

    arrivals (when) + prompts (what)  ->  CellPlan  ->  the load generator, once per engine

A plan holds everything that is random, so that the process that fires it draws nothing, and the same plan replays for
every engine: its `sha256` covers the schedule and the bodies, not the name of the cell that replays it. What differs
between targets (model name, streaming options, an `ignore_eos` that only some engines know) is in `Target.fields` and
is joined to each body before the run starts, outside the hot path.

The schedule has three parts: warm-up [0, warmup_ns), measured [warmup_ns, horizon_ns), cool-down from horizon_ns on.
Cool-down requests keep the load up until the last measured request is done, since the tail must not enjoy an emptying
engine.

What arrives is a request, or where the workload has conversations, a conversation, whose turns follow after times that
are part of the plan (`Sessions`). Conversations that began before the cell are in it with the turns that are left, so
that the rate of requests is the same from its first second on.

>>> plan = build_plan("chat-7-native", rate_rps=10, duration_s=30, warmup_s=5, prompts=source, seed=seed_sequence(...))
>>> same_plan_for_another_engine = plan.for_cell("chat-7-vllm")
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np

from arena.load.arrivals import SECOND_NS, ArrivalKind, Drawn, Span, draw
from arena.load.spec import Arrivals, Poisson
from arena.load.traces import Trace

CHAT = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a workload. `fields` is an OpenAI chat body without `model`, `stream` and `stream_options`.

    `prompt_tokens` is how long it was meant to be, where the workload says so.
    """

    prompt_id: str
    fields: Mapping[str, Any]
    max_tokens: int
    prompt_tokens: int | None = None


PromptSource: TypeAlias = Callable[[int], Prompt]
"""seq -> its prompt. Called once per request, in order, while the plan is built."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a conversation, due so long after the conversation's beginning."""

    after_ns: int
    prompt: Prompt


@dataclass(frozen=True, slots=True)
class Sessions:
    """Conversations. `turns` gives those of one conversation, in order; called alone, it is a source of single
    prompts.
    """

    turns: Callable[[int], Sequence[Turn]]
    mean_turns: float
    longest_ns: int

    def __call__(self, seq: int) -> Prompt:
        """The last turn of a conversation of its own: as long as they come."""
        return self.turns(seq)[-1].prompt


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    seq: int
    scheduled_ns: int  # from the start of the cell
    prompt_id: str
    body: bytes  # a JSON object; the target's own fields are added by `request_body`
    max_tokens: int
    prompt_tokens: int | None = None


_POISSON = Poisson()

STREAM_WITH_USAGE: Mapping[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}


@dataclass(frozen=True, slots=True)
class Target:
    """Where a cell goes. `url` is the base, e.g. http://127.0.0.1:8080 ; requests go to `url + path`.

    `fields` are joined to every body. A probe decides them once per engine (an engine that refuses `stream_options`
    gets none, one that offers usage per chunk gets `{"stream_options": {"include_usage": True,
    "continuous_usage_stats": True}}`).
    """

    url: str
    model: str
    name: str
    path: str = CHAT
    fields: Mapping[str, Any] = field(default_factory=lambda: dict(STREAM_WITH_USAGE))
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class CellPlan:
    cell_id: str
    kind: ArrivalKind | Literal["closed"]  # closed: the requests have no times of their own
    rate_rps: float
    warmup_ns: int
    horizon_ns: int
    requests: tuple[PlannedRequest, ...]
    drawn: Drawn | None = None  # how the arrivals came about; None: somebody wrote them down

    @cached_property
    def sha256(self) -> str:
        """Over the whole content but the cell's name: equal plans are equal for every engine."""
        digest = hashlib.sha256()
        head = f"{self.kind} {float(self.rate_rps)!r} {self.warmup_ns} {self.horizon_ns}\n"
        digest.update(head.encode())
        if self.drawn is not None:
            digest.update(msgspec.json.encode(self.drawn))
        for request in self.requests:
            row = (
                f"{request.seq} {request.scheduled_ns} {request.prompt_id!r} {request.max_tokens} {len(request.body)}\n"
            )
            digest.update(row.encode())
            digest.update(request.body)
        return digest.hexdigest()

    def is_measured(self, request: PlannedRequest) -> bool:
        """The steady window is a matter of scheduled time alone, whatever became of the request."""
        return self.warmup_ns <= request.scheduled_ns < self.horizon_ns

    @cached_property
    def measured(self) -> tuple[PlannedRequest, ...]:
        return tuple(request for request in self.requests if self.is_measured(request))

    def for_cell(self, cell_id: str) -> CellPlan:
        """The same plan under another cell's name."""
        return replace(self, cell_id=cell_id)

    def write(self, path: Path) -> None:
        path.write_bytes(msgspec.msgpack.encode(self))

    @classmethod
    def read(cls, path: Path) -> CellPlan:
        return msgspec.msgpack.decode(path.read_bytes(), type=cls)


def build_plan(
    cell_id: str,
    *,
    rate_rps: float,
    duration_s: float,
    warmup_s: float,
    prompts: PromptSource | Sessions,
    seed: np.random.SeedSequence,
    cooldown_s: float = 30.0,
    arrivals: Arrivals = _POISSON,
    trace: Trace | None = None,
) -> CellPlan:
    """Join a schedule and a prompt source. `duration_s` is the measured window; the warm-up comes before it.

    `rate_rps` counts requests, also where conversations arrive. `trace` is what arrivals of kind `trace` replay.
    """
    warmup_ns = round(warmup_s * SECOND_NS)
    horizon_ns = warmup_ns + round(duration_s * SECOND_NS)
    end_ns = horizon_ns + round(cooldown_s * SECOND_NS)
    lead_ns, turns = (prompts.longest_ns, prompts.mean_turns) if isinstance(prompts, Sessions) else (0, 1.0)
    span = Span(lead_ns + warmup_ns, horizon_ns - warmup_ns, end_ns - horizon_ns)
    drawn, offsets = draw(arrivals, rate_rps=rate_rps / turns, span=span, seed=seed, trace=trace)
    if isinstance(prompts, Sessions):
        starts = tuple(int(offset) for offset in offsets)
        drawn = msgspec.structs.replace(drawn, lead_ns=lead_ns, starts_ns=starts)
        timed = _turns(prompts, [start - lead_ns for start in starts], end_ns)
    else:
        timed = [(int(offset), prompts(seq)) for seq, offset in enumerate(offsets)]
    requests = tuple(_planned(seq, at, prompt) for seq, (at, prompt) in enumerate(timed))
    return CellPlan(cell_id, drawn.kind, rate_rps, warmup_ns, horizon_ns, requests, drawn)


def _turns(sessions: Sessions, starts_ns: Sequence[int], end_ns: int) -> list[tuple[int, Prompt]]:
    """The turns of all conversations that fall into [0, end_ns), in the order in which they are due."""
    timed = [
        (start + turn.after_ns, turn.prompt)
        for number, start in enumerate(starts_ns)
        for turn in sessions.turns(number)
        if 0 <= start + turn.after_ns < end_ns
    ]
    return sorted(timed, key=lambda each: each[0])


def request_body(request: PlannedRequest, target: Target) -> bytes:
    """The body as it goes to one target: the planned object with the target's model and fields in front."""
    head = msgspec.json.encode({"model": target.model, **target.fields})
    return head[:-1] + b"," + request.body[1:] if request.body != b"{}" else head


def _planned(seq: int, scheduled_ns: int, prompt: Prompt) -> PlannedRequest:
    body = msgspec.json.encode({"max_tokens": prompt.max_tokens, **prompt.fields})
    return PlannedRequest(seq, scheduled_ns, prompt.prompt_id, body, prompt.max_tokens, prompt.prompt_tokens)
