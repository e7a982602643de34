"""The probe: every capability of one live engine, asked for through its adapter, and judged.

    report = await probe(adapter, on_step=print)

What is declared is asked of the adapter as it is. What is not declared is asked of a copy that lets everything through,
where the adapter speaks OpenAI: what works and is not declared is refused to callers for no reason.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from msgspec import Struct

from adapters.base import Capabilities, EngineAdapter, ModelInfo
from adapters.errors import EngineUnavailable, GoodgateError
from adapters.probing.answers import Answer, Lab, fold
from adapters.probing.life import PROMISES  # which registers its proofs
from adapters.probing.matrix import groups, request_fields
from adapters.probing.proofs import BRIEF, PROOFS, QUESTION, STORY
from adapters.probing.verdicts import Observation, Seen, Verdict, from_error, judge, unclear
from adapters.wire.openai_http import OpenAIHTTPAdapter

RELAYS = frozenset({"goodgate_peer"})  # they declare what they pass on, whatever stands behind makes of it
DEFAULT_TIMEOUT_S = 300.0
QUESTION_TIMEOUT_S = 60.0
NUM_TIMINGS = 5


class Result(Struct, frozen=True):
    """One capability: what was declared, what was seen, and what follows."""

    group: str
    capability: str
    declared: bool
    seen: Seen
    evidence: str
    verdict: Verdict


class Report(Struct, frozen=True, kw_only=True):
    engine: str
    version: str = ""
    recognised_by: str = ""  # how the engine behind a url was told; empty where it was named
    model: str
    max_model_len: int | None
    ready_s: float | None = None  # from the start to ready; None where it ran already
    first_token_s: float | None  # of the very first request
    ttft_s: float | None  # the median of the requests after it
    results: list[Result]

    @property
    def contradicted(self) -> list[Result]:
        return [each for each in self.results if each.verdict is Verdict.CONTRADICTED]


class Task(Struct, frozen=True):
    """A capability to prove: `proof` names it, `capability` is what people call it."""

    group: str
    capability: str
    proof: str
    declared: bool


def tasks(capabilities: Capabilities) -> list[Task]:
    """Everything the matrix has a row for, and what every adapter promises."""
    rows = [
        Task(group, row.name, row.key, row.is_in(capabilities))
        for group, in_group in groups()
        for row in in_group
        if row.key in PROOFS or row.is_in(capabilities)
    ]
    generates = capabilities.chat or capabilities.completions
    return rows + [Task("promises", name, name, True) for name in PROMISES if generates]


async def probe(
    adapter: EngineAdapter[Any],
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    on_step: Callable[[Task, int, int], None] = lambda task, number, total: None,
) -> Report:
    """Probe an adapter that was started. Raises `GoodgateError` when the engine answers nothing at all."""
    deadline = time.monotonic() + timeout_s
    model = await served_model(adapter)
    lab = Lab(adapter, model=model.id, max_model_len=model.max_model_len)
    first = await fresh_answer(lab, 0)
    timings = [await fresh_answer(lab, number) for number in range(1, NUM_TIMINGS + 1)]
    results = []
    todo = tasks(adapter.capabilities)
    wide = await widened(lab)
    try:
        for number, task in enumerate(todo, start=1):
            on_step(task, number, len(todo))
            observation = await observe(task, lab if task.declared else wide, deadline)
            verdict = judge(declared=task.declared, seen=observation.seen, is_relay=adapter.engine in RELAYS)
            evidence = " ".join(observation.evidence.split())
            results.append(Result(task.group, task.capability, task.declared, observation.seen, evidence, verdict))
    finally:
        if wide is not lab:
            await wide.adapter.close()
    return Report(
        engine=adapter.engine,
        version=await told_version(adapter),
        model=model.id,
        max_model_len=model.max_model_len,
        first_token_s=first.first_token_s,
        ttft_s=median([answer.first_token_s for answer in timings]),
        results=results,
    )


async def told_version(adapter: EngineAdapter[Any]) -> str:
    """Empty where the engine does not tell: older releases lack the route."""
    try:
        return await adapter.version()
    except GoodgateError:
        return ""


async def served_model(adapter: EngineAdapter[Any]) -> ModelInfo:
    """The model to probe: the one that the options name, or the only one."""
    models = await adapter.models()
    wanted = getattr(adapter.options, "model", "")
    for model in models:
        if model.id == wanted:
            return model
    if wanted:  # an engine may list it under a longer name, or not at all
        return ModelInfo(wanted, models[0].max_model_len if models else None)
    if len(models) == 1:
        return models[0]
    if not models:
        raise EngineUnavailable("The engine lists no models; let it load one, or name it with --model.")
    raise EngineUnavailable(
        f"The engine serves {len(models)} models; choose one with --model: {', '.join(each.id for each in models)}."
    )


async def fresh_answer(lab: Lab, number: int) -> Answer:
    """A short answer, for its time to first token. The number comes first, so that no prefix of the text is cached."""
    capabilities = lab.adapter.capabilities
    if not (capabilities.chat or capabilities.completions):
        return fold([])  # it embeds, and that has no first token
    if capabilities.chat:
        return await lab.chat(f"{number}. {QUESTION}", **BRIEF)
    return await lab.complete(f"{number}. {STORY}", **BRIEF)


def median(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


async def observe(task: Task, lab: Lab, deadline: float) -> Observation:
    """What the proof of a task shows. A declaration is contradicted only by two proofs: near ties between tokens may
    fall either way in one engine, and make one answer look as if it had ignored something."""
    observation = await observe_once(task, lab, deadline)
    if not task.declared or observation.seen is not Seen.IGNORED:
        return observation
    lab.forget()
    again = await observe_once(task, lab, deadline)
    if again.seen is Seen.IGNORED and not lab.offers("temperature"):
        return unclear(f"{again.evidence}; but without temperature no answer can be repeated")
    return again


async def observe_once(task: Task, lab: Lab, deadline: float) -> Observation:
    """One proof within its time. Whatever goes wrong is an observation, and never the end of the probe."""
    proof = PROOFS.get(task.proof)
    if proof is None:
        return unclear("there is no proof of it")
    if time.monotonic() >= deadline:
        return unclear("the probe ran out of time; raise --timeout")
    try:
        async with asyncio.timeout(QUESTION_TIMEOUT_S):
            return await proof(lab)
    except TimeoutError:
        return unclear(f"no answer within {QUESTION_TIMEOUT_S:g} s")
    except GoodgateError as error:
        return from_error(error)
    except (AttributeError, LookupError, TypeError, ValueError) as error:  # a proof read what it took for OpenAI's
        return Observation(Seen.FAILED, f"the answer has another shape than OpenAI's: {error!r}")


async def widened(lab: Lab) -> Lab:
    """The same engine through an adapter that lets every field pass, where an adapter has words for more at all."""
    capabilities = lab.adapter.capabilities
    if not isinstance(lab.adapter, OpenAIHTTPAdapter) or not (capabilities.chat or capabilities.completions):
        return lab
    adapter = type(lab.adapter)(lab.adapter.options)
    everything = request_fields()
    adapter.dialect = msgspec.structs.replace(adapter.dialect, parameters=everything, usage_so_far=True)
    adapter.capabilities = msgspec.structs.replace(
        adapter.capabilities,
        chat=True,
        completions=True,
        token_prompts=True,
        usage_so_far=True,
        parameters=everything,
    )
    await adapter.start()
    return Lab(adapter, model=lab.model, max_model_len=lab.max_model_len)


def by_group(results: list[Result]) -> Iterator[tuple[str, list[Result]]]:
    for group, members in itertools.groupby(results, key=lambda result: result.group):
        yield group, list(members)
