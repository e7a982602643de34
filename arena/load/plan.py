"""What one cell sends, and when: decided completely before the first byte leaves.

    arrivals (when) + prompts (what)  ->  CellPlan  ->  the load generator, once per engine

A plan holds everything that is random, so that the process that fires it draws nothing, and the same plan replays for
every engine: its `sha256` covers the schedule and the bodies, not the name of the cell that replays it. What differs
between targets (model name, streaming options, an `ignore_eos` that only some engines know) is in `Target.fields` and
is joined to each body before the run starts, outside the hot path.

The schedule has three parts: warm-up [0, warmup_ns), measured [warmup_ns, horizon_ns), cool-down from horizon_ns on.
Cool-down requests keep the load up until the last measured request is done, since the tail must not enjoy an emptying
engine.

>>> plan = build_plan("chat-7-native", rate_rps=10, duration_s=30, warmup_s=5, prompts=source, seed=seed_sequence(...))
>>> same_plan_for_another_engine = plan.for_cell("chat-7-vllm")
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np

from arena.load.arrivals import SECOND_NS, ArrivalKind, arrivals


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a workload. `fields` is an OpenAI chat body without `model`, `stream` and `stream_options`."""

    prompt_id: str
    fields: Mapping[str, Any]
    max_tokens: int


PromptSource: TypeAlias = Callable[[int], Prompt]
"""seq -> its prompt. Called once per request, in order, while the plan is built."""


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    seq: int
    scheduled_ns: int  # from the start of the cell
    prompt_id: str
    body: bytes  # a JSON object; the target's own fields are added by `request_body`
    max_tokens: int


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
    path: str = "/v1/chat/completions"
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

    @cached_property
    def sha256(self) -> str:
        """Over the whole content but the cell's name: equal plans are equal for every engine."""
        digest = hashlib.sha256()
        head = f"{self.kind} {float(self.rate_rps)!r} {self.warmup_ns} {self.horizon_ns}\n"
        digest.update(head.encode())
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
    prompts: PromptSource,
    seed: np.random.SeedSequence,
    cooldown_s: float = 30.0,
    kind: ArrivalKind = "poisson",
) -> CellPlan:
    """Join a schedule and a prompt source. `duration_s` is the measured window; the warm-up comes before it."""
    warmup_ns = round(warmup_s * SECOND_NS)
    horizon_ns = warmup_ns + round(duration_s * SECOND_NS)
    end_ns = horizon_ns + round(cooldown_s * SECOND_NS)
    offsets = arrivals(kind, rate_rps=rate_rps, horizon_ns=end_ns, seed=seed)
    requests = tuple(_planned(seq, int(offset), prompts(seq)) for seq, offset in enumerate(offsets))
    return CellPlan(cell_id, kind, rate_rps, warmup_ns, horizon_ns, requests)


def request_body(request: PlannedRequest, target: Target) -> bytes:
    """The body as it goes to one target: the planned object with the target's model and fields in front."""
    head = msgspec.json.encode({"model": target.model, **target.fields})
    return head[:-1] + b"," + request.body[1:] if request.body != b"{}" else head


def _planned(seq: int, scheduled_ns: int, prompt: Prompt) -> PlannedRequest:
    body = msgspec.json.encode({"max_tokens": prompt.max_tokens, **prompt.fields})
    return PlannedRequest(seq, scheduled_ns, prompt.prompt_id, body, prompt.max_tokens)
