"""What load generators mean by TTFT, TPOT and ITL: one function each over an answer whose every event is known.

    DEFINITIONS["GuideLLM"](answer).tpot_ms      # what GuideLLM would call the TPOT of this answer

So a figure of theirs can be held against the truth in their own words, and against ours. Pure. Each definition was read
in the code of the version that `arena.outside.tools` installs; its docstring says where.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple, TypeAlias

Kind: TypeAlias = Literal["role", "text", "finish"]
"""Of an event with choices: it names the role, it brings text, or it says why the answer ended."""


class Event(NamedTuple):
    at_ms: float  # after the request was sent
    kind: Kind
    tokens: int  # that it brings


@dataclass(frozen=True, slots=True)
class Answer:
    """One whole answer. `sent_ms` is on a clock that all answers of a run share."""

    sent_ms: float
    events: tuple[Event, ...]
    output_tokens: int

    @property
    def texts(self) -> list[Event]:
        return [event for event in self.events if event.kind == "text"]

    @property
    def end_ms(self) -> float:
        """Its last event with choices, on the clock of the run."""
        return self.sent_ms + self.events[-1].at_ms


@dataclass(frozen=True, slots=True)
class Latencies:
    """Of one answer, in ms. `itl_ms` holds what goes into the percentiles of ITL; None is what does not exist."""

    ttft_ms: float
    tpot_ms: float | None
    itl_ms: tuple[float, ...]


Definition: TypeAlias = Callable[[Answer], Latencies]


def ours(answer: Answer) -> Latencies:
    """arena/records/views.sql, but from the send: TPOT over the tokens after the first event, ITL the gaps between."""
    texts = answer.texts
    first, last = texts[0], texts[-1]
    later = answer.output_tokens - first.tokens
    tpot_ms = (last.at_ms - first.at_ms) / later if later > 0 else None
    return Latencies(first.at_ms, tpot_ms, _gaps(texts))


def vllm(answer: Answer) -> Latencies:
    """vllm/benchmarks/lib/endpoint_request_func.py and serve.py: every event with choices counts, a role as the first
    token and a finish reason as another; the latency ends with the last of them."""
    first, last = answer.events[0], answer.events[-1]
    later = answer.output_tokens - 1
    tpot_ms = (last.at_ms - first.at_ms) / later if later > 0 else None
    return Latencies(first.at_ms, tpot_ms, _gaps(answer.events))


def guidellm(answer: Answer) -> Latencies:
    """guidellm/schemas/request_stats.py: TPOT is the time from the send over all tokens; ITL is one mean a request,
    over the tokens but one."""
    texts = answer.texts
    first, last = texts[0], texts[-1]
    later = answer.output_tokens - 1
    itl_ms = ((last.at_ms - first.at_ms) / later,) if later > 0 else ()
    return Latencies(first.at_ms, last.at_ms / answer.output_tokens, itl_ms)


def aiperf(answer: Answer) -> Latencies:
    """aiperf/metrics/types: what it calls inter-token latency is our TPOT, over the tokens but one; what it calls
    inter-chunk latency is our ITL."""
    texts = answer.texts
    first, last = texts[0], texts[-1]
    later = answer.output_tokens - 1
    tpot_ms = (last.at_ms - first.at_ms) / later if later > 0 else None
    return Latencies(first.at_ms, tpot_ms, _gaps(texts))


DEFINITIONS: Mapping[str, Definition] = {"Goodgate": ours, "vLLM bench": vllm, "GuideLLM": guidellm, "AIPerf": aiperf}


def throughput(answers: Sequence[Answer]) -> float:
    """Output tokens per second from the first send to the last event: what all of them call output throughput. The
    arena's own goodput counts requests over the measured window instead, and keeps the load up until its end."""
    begun_ms = min(answer.sent_ms for answer in answers)
    ended_ms = max(answer.end_ms for answer in answers)
    return sum(answer.output_tokens for answer in answers) / (ended_ms - begun_ms) * 1e3


def _gaps(events: Sequence[Event]) -> tuple[float, ...]:
    return tuple(later.at_ms - earlier.at_ms for earlier, later in pairwise(events))
