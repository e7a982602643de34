"""What a scenario sends, and when, in words for a report."""

from __future__ import annotations

from typing import assert_never

from arena.load.spec import (
    Arrivals,
    Constant,
    ConversationWorkload,
    DocumentWorkload,
    FileWorkload,
    Fixed,
    Gamma,
    Lengths,
    LogNormal,
    Poisson,
    Ramp,
    SharedPrefix,
    Steps,
    StructuredWorkload,
    SyntheticWorkload,
    TraceArrivals,
    TraceWorkload,
    Uniform,
    Workload,
    ends_naturally,
)


def arrival_words(arrivals: Arrivals) -> str:
    return f"{process_words(arrivals)}, open loop, one seeded schedule for all engines"


def process_words(arrivals: Arrivals) -> str:
    if isinstance(arrivals, Poisson):
        return "Poisson"
    if isinstance(arrivals, Gamma):
        return f"gamma gaps with a coefficient of variation of {arrivals.cv:g}"
    if isinstance(arrivals, Constant):
        return "equal gaps"
    if isinstance(arrivals, Ramp):
        return f"Poisson, the rate going from {arrivals.from_:g} to {arrivals.to:g} (relative) over the window"
    if isinstance(arrivals, Steps):
        levels = ", ".join(f"{level:g}" for level in arrivals.levels)
        return f"Poisson, the rate in steps of {levels} (relative) over the window"
    if isinstance(arrivals, TraceArrivals):
        return f"as recorded in {arrivals.path or 'the trace'}, stretched to each rate"
    assert_never(arrivals)


def prompt_words(workload: Workload) -> str:
    if isinstance(workload, SyntheticWorkload):
        return _of_words(workload.prompt, workload.prefix)
    if isinstance(workload, FileWorkload):
        return f"lines of {workload.path}, each made unique by a line of random words"
    if isinstance(workload, DocumentWorkload):
        return f"excerpts of {workload.path}, {length_words(workload.prompt)} by an estimate, and a question"
    if isinstance(workload, StructuredWorkload):
        return f"{length_words(workload.prompt)} of random words, answers held to a JSON schema"
    if isinstance(workload, ConversationWorkload):
        turns = f"{workload.min_turns} to {workload.max_turns} turns"
        think = f"{workload.min_think_s:g} to {workload.max_think_s:g} s apart"
        each = f"each message {length_words(workload.prompt)} of random words{_behind(workload.prefix)}"
        return f"conversations of {turns}, {think}, the whole history sent again; {each}"
    if isinstance(workload, TraceWorkload):
        return f"of the lengths recorded in {workload.path}, at most {workload.max_prompt_tokens} tokens"
    assert_never(workload)


def answer_words(workload: Workload) -> str:
    if isinstance(workload, TraceWorkload):
        return (
            f"of the recorded lengths, at most {workload.max_output_tokens} tokens, temperature 0, end of text ignored"
        )
    lengths = length_words(workload.output)
    if ends_naturally(workload):
        return f"at most {lengths}, temperature 0, ended by the model"
    return f"{lengths}, temperature 0, end of text ignored"


def length_words(lengths: Lengths) -> str:
    if isinstance(lengths, Fixed):
        return f"{lengths.tokens} tokens"
    if isinstance(lengths, Uniform):
        return f"{lengths.low} to {lengths.high} tokens, uniform"
    if isinstance(lengths, LogNormal):
        shape = f"median {lengths.median} tokens, sigma {lengths.sigma:g}"
        return f"log-normal, {shape}, within {lengths.low} to {lengths.high}"
    return f"tokens as in {lengths.path} ({lengths.column}), within {lengths.low} to {lengths.high}"


def _of_words(lengths: Lengths, prefix: SharedPrefix | None) -> str:
    own = f"{length_words(lengths)} of random words, about one token each"
    return f"{own}{_behind(prefix)}" if prefix else f"{own}; no two share a beginning"


def _behind(prefix: SharedPrefix | None) -> str:
    if prefix is None:
        return ""
    groups = "one system message" if prefix.groups == 1 else f"one of {prefix.groups} system messages"
    who = "" if prefix.share == 1 else f" in {prefix.share:.0%} of them"
    return f", behind {groups} of {prefix.tokens}{who}"
