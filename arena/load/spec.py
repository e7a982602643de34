"""The words of a scenario that say what is sent and when: arrivals, lengths, workloads. Frozen structs, no behaviour
beyond what follows from their own fields; docs/scenarios.md explains each key to its user.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct


class ScenarioError(ValueError):
    """One sentence that says what to change in the scenario, or in a file that it names."""


# Upper bounds catch typing errors and infinities: far above what anyone wants, far below what breaks arithmetic.
Tokens: TypeAlias = Annotated[int, Meta(ge=1, le=1_000_000)]
Seed: TypeAlias = Annotated[int, Meta(ge=0)]
Count: TypeAlias = Annotated[int, Meta(ge=1, le=1_000_000)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=86_400)]
Weight: TypeAlias = Annotated[float, Meta(ge=0, le=1_000_000)]
FilePath: TypeAlias = Annotated[str, Meta(min_length=1)]  # relative to the scenario's file

Cache: TypeAlias = Literal["cold", "warm"]


class Strict(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A mapping of the file in which every key must be known."""


# When requests arrive. The rate itself is what a goodput search varies: everywhere it is the mean over the window.


class Poisson(Strict, tag_field="kind", tag="poisson", frozen=True, kw_only=True):
    """Independent users, many of them: exponential gaps."""


class Gamma(Strict, tag_field="kind", tag="gamma", frozen=True, kw_only=True):
    """Gamma-distributed gaps whose standard deviation is `cv` times their mean; 1 is Poisson, above it come bursts."""

    cv: Annotated[float, Meta(ge=0.05, le=20)]


class Constant(Strict, tag_field="kind", tag="constant", frozen=True, kw_only=True):
    """Equal gaps. The first arrival falls anywhere within one gap, as the seed has it."""


class Ramp(Strict, tag_field="kind", tag="ramp", frozen=True, kw_only=True):
    """A Poisson process whose rate goes in a straight line over the measured window; only the ratio of the two
    counts.
    """

    from_: Weight = msgspec.field(name="from")
    to: Weight


class Steps(Strict, tag_field="kind", tag="steps", frozen=True, kw_only=True):
    """A Poisson process whose rate changes by steps over the measured window. Only ratios count, of the levels and of
    the lengths; without `lengths` all steps are equally long.
    """

    levels: Annotated[tuple[Weight, ...], Meta(min_length=1, max_length=1000)]
    lengths: tuple[Weight, ...] = ()


class TraceArrivals(Strict, tag_field="kind", tag="trace", frozen=True, kw_only=True):
    """The arrival times of a recorded trace. Without `path`, those of the workload's trace, row by row."""

    path: str = ""
    max_rows: Count = 200_000


Arrivals: TypeAlias = Poisson | Gamma | Constant | Ramp | Steps | TraceArrivals


# How long prompts and answers are.


class Fixed(Strict, tag_field="kind", tag="fixed", frozen=True, kw_only=True):
    tokens: Tokens


class Uniform(Strict, tag_field="kind", tag="uniform", frozen=True, kw_only=True):
    low: Tokens
    high: Tokens


class LogNormal(Strict, tag_field="kind", tag="lognormal", frozen=True, kw_only=True):
    """Clipped to [low, high]; `median` and `sigma` describe it before clipping."""

    median: Tokens
    sigma: Annotated[float, Meta(gt=0, le=10)]
    low: Tokens = 1
    high: Tokens = 100_000


class Empirical(Strict, tag_field="kind", tag="empirical", frozen=True, kw_only=True):
    """Lengths that occurred: a column of a CSV file, drawn with replacement and clipped to [low, high]."""

    path: FilePath
    column: str
    low: Tokens = 1
    high: Tokens


Lengths: TypeAlias = Fixed | Uniform | LogNormal | Empirical


# What requests say.


class SharedPrefix(Strict, frozen=True, kw_only=True):
    """A system message that requests have in common: `groups` different ones of `tokens` words each.

    `share` of the requests (of the conversations) get one, the rest none. `zipf` is the exponent of the groups'
    popularity; at 0 all are equally popular.
    """

    groups: Annotated[int, Meta(ge=1, le=100_000)] = 1
    tokens: Tokens
    share: Annotated[float, Meta(gt=0, le=1)] = 1.0
    zipf: Annotated[float, Meta(ge=0, le=10)] = 0.0


class SyntheticWorkload(Strict, tag_field="kind", tag="synthetic", frozen=True, kw_only=True):
    """Prompts of random words. `prompt` is the length of the user's message, `output` the exact number of tokens
    asked for.
    """

    seed: Seed = 1
    prompt: Lengths
    output: Lengths
    prefix: SharedPrefix | None = None


class FileWorkload(Strict, tag_field="kind", tag="jsonl", frozen=True, kw_only=True):
    """Prompts from a JSONL file; rows may bring tools and a response format of their own.

    With `natural_end` the model ends its answer itself and `output` is only the most that it may write.
    """

    seed: Seed = 1
    path: FilePath
    output: Lengths
    tool_choice: Literal["auto", "required", "none"] | None = None  # for rows that bring tools and no choice
    natural_end: bool = False


class DocumentWorkload(Strict, tag_field="kind", tag="documents", frozen=True, kw_only=True):
    """Excerpts of long documents, with a question behind them. A text file is one document, a JSONL file has one a
    line, in `field`.
    """

    seed: Seed = 1
    path: FilePath
    field: str = "text"
    question: str = "Summarise the text above."
    prompt: Lengths
    output: Lengths


class ConversationWorkload(Strict, tag_field="kind", tag="conversation", frozen=True, kw_only=True):
    """Conversations of several turns. Each turn sends the whole history again; the answers in it are planned text, so
    that every engine meets the same requests.
    """

    seed: Seed = 1
    min_turns: Annotated[int, Meta(ge=1, le=1000)] = 2
    max_turns: Annotated[int, Meta(ge=1, le=1000)] = 4
    min_think_s: Seconds = 2.0  # from when a turn is due to when the next one is: reading the answer is part of it
    max_think_s: Seconds = 6.0
    prompt: Lengths  # of each of the user's messages
    output: Lengths
    prefix: SharedPrefix | None = None

    @property
    def mean_turns(self) -> float:
        return (self.min_turns + self.max_turns) / 2

    @property
    def longest_s(self) -> float:
        """From the first turn to the last one, at most."""
        return (self.max_turns - 1) * self.max_think_s


class StructuredWorkload(Strict, tag_field="kind", tag="structured", frozen=True, kw_only=True):
    """Answers that must follow a JSON schema. The model ends them itself; `output` is the most that it may write."""

    seed: Seed = 1
    schema: dict[str, Any]
    prompt: Lengths
    output: Lengths


class TraceWorkload(Strict, tag_field="kind", tag="trace", frozen=True, kw_only=True):
    """The lengths of a recorded trace, row by row, and where it has block hashes, its shared beginnings too. Longer
    prompts and answers are cut to the caps.
    """

    seed: Seed = 1
    path: FilePath
    max_prompt_tokens: Tokens = 4096
    max_output_tokens: Tokens = 1024
    max_rows: Count = 200_000


Workload: TypeAlias = (
    SyntheticWorkload | FileWorkload | DocumentWorkload | ConversationWorkload | StructuredWorkload | TraceWorkload
)


def longest_output(workload: Workload) -> int:
    """The most tokens that an answer may have."""
    if isinstance(workload, TraceWorkload):
        return workload.max_output_tokens
    return workload.output.tokens if isinstance(workload.output, Fixed) else workload.output.high


def ends_naturally(workload: Workload) -> bool:
    """Whether the model ends its answers; else each has exactly as many tokens as were asked for."""
    return isinstance(workload, StructuredWorkload) or (isinstance(workload, FileWorkload) and workload.natural_end)


def lengths_of(workload: Workload) -> dict[str, Lengths]:
    """The distributions of a workload by their keys."""
    named = {"prompt": getattr(workload, "prompt", None), "output": getattr(workload, "output", None)}
    return {key: lengths for key, lengths in named.items() if lengths is not None}


def contradiction(workload: Workload, arrivals: Arrivals, *, closed: bool = False) -> str | None:
    """What cannot be meant, as a sentence; types and ranges of single keys have been checked by then."""
    for key, lengths in lengths_of(workload).items():
        if not isinstance(lengths, Fixed) and lengths.low > lengths.high:
            return f"`workload.{key}.low` is above `high` ({lengths.low} > {lengths.high})."
    if isinstance(workload, ConversationWorkload):
        if workload.min_turns > workload.max_turns:
            return f"`workload.min_turns` is above `max_turns` ({workload.min_turns} > {workload.max_turns})."
        if workload.min_think_s > workload.max_think_s:
            return f"`workload.min_think_s` is above `max_think_s` ({workload.min_think_s} > {workload.max_think_s})."
    if isinstance(workload, StructuredWorkload) and not isinstance(workload.schema.get("type"), str):
        return "`workload.schema` is no JSON schema: it needs a `type`, as in {type: object, properties: {...}}."
    if closed and arrivals != Poisson():
        return "`arrivals` say nothing of a closed loop, whose users send when they have their answers; leave them out."
    if isinstance(arrivals, Ramp) and not arrivals.from_ + arrivals.to:
        return "`arrivals.from` and `arrivals.to` are both 0, so nothing would ever arrive."
    if isinstance(arrivals, Steps):
        return _contradiction_of_steps(arrivals)
    if isinstance(arrivals, TraceArrivals) and not arrivals.path and not isinstance(workload, TraceWorkload):
        return "`arrivals.path` is missing: only a workload of kind `trace` has a trace that the arrivals could share."
    return None


def _contradiction_of_steps(steps: Steps) -> str | None:
    lengths = steps.lengths or (1.0,) * len(steps.levels)
    if len(lengths) != len(steps.levels):
        return f"`arrivals.lengths` has {len(lengths)} entries and `levels` {len(steps.levels)}; give each level one."
    if not all(lengths):
        return "`arrivals.lengths` has a step of no length; leave it out."
    if not any(steps.levels):
        return "`arrivals.levels` are all 0, so nothing would ever arrive."
    return None
