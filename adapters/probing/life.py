"""Proofs about an engine at work rather than about an answer: its load, leaving it, and how it refuses.

They keep one long request running, so they run when nothing else does. Like those of `proofs`, by name.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec

from adapters.base import EngineAdapter, Load
from adapters.errors import ContextLengthExceeded, ModelNotFound, RequestError
from adapters.probing.answers import Answer, Lab
from adapters.probing.proofs import BRIEF, QUESTION, STORY, proves
from adapters.probing.verdicts import Observation, honoured, honoured_if, ignored, unclear
from adapters.types import GenerateRequest

T = TypeVar("T")

LONG_TOKENS = 512
LONG_STORIES = 24
STORY_TOKENS = 20  # a little more than it has
LOAD_WITHIN_S = 5.0  # engines that log their metrics once a step tell with the next one
IDLE_WITHIN_S = 5.0
POLL_S = 0.05
NO_SUCH_MODEL = "no-such-model"

# What every adapter promises (adapters/base.py), whatever its engine can do.
PROMISES = ("usage", "cancellation", "context overflow", "unknown model")


@proves("usage")
async def usage(lab: Lab) -> Observation:
    answers = [await lab.say(STORY, temperature=0, max_tokens=number) for number in (4, 9)]
    return counts_its_tokens(answers, (4, 9))


def counts_its_tokens(answers: list[Answer], wanted: tuple[int, ...]) -> Observation:
    """An answer that its limit ended has exactly that many tokens, and the same prompt always as many."""
    told = ", ".join(f"{answer.num_prompt_tokens} + {answer.num_tokens}" for answer in answers)
    if any(answer.usage is None or not answer.num_prompt_tokens for answer in answers):
        return ignored(f"prompt and answer: {told}")
    if len({answer.num_prompt_tokens for answer in answers}) > 1:
        return ignored(f"the same prompt was counted differently: {told}")
    ended_by_limit = [
        (each, limit) for each, limit in zip(answers, wanted, strict=True) if each.finish_reason == "length"
    ]
    if not ended_by_limit:
        return unclear(f"no answer reached its limit: {told}")
    is_exact = all(answer.num_tokens == limit for answer, limit in ended_by_limit)
    return honoured_if(is_exact, f"prompt and answer: {told}, for limits {', '.join(map(str, wanted))}")


# ---------------------------------------------------------------------------------------------------------------- load


class Watched(msgspec.Struct, frozen=True):
    """The load while a long request ran, and after it was left."""

    during: Load
    was_busy: bool
    idle_after_s: float | None  # None: it was still running when the wait was over


async def watch(lab: Lab) -> Watched:
    """Ask for much, look at the load, leave, and look again until the engine is idle.

    The prompt was sent before, and is longer than a block of any engine's cache, so there is a prefix to hit.
    """
    await lab.ask(long_request(lab, limit=1))
    async with lab.stream(long_request(lab, limit=LONG_TOKENS)) as stream:
        await anext(stream)
        during = await _until(lab.load, lambda load: bool(load.running), LOAD_WITHIN_S)
    left = time.monotonic()
    after = await _until(lab.load, lambda load: not load.running and not load.waiting, IDLE_WITHIN_S)
    is_idle = after.running == 0 and not after.waiting
    return Watched(during, bool(during.running), time.monotonic() - left if is_idle else None)


def long_request(lab: Lab, limit: int) -> GenerateRequest:
    """A quarter of the context for the prompt at most, and half for the answer."""
    context = lab.max_model_len or 4 * LONG_TOKENS
    prompt = " ".join([STORY] * max(1, min(LONG_STORIES, context // 4 // STORY_TOKENS)))
    fields: dict[str, Any] = {"max_tokens": min(limit, context // 2), "temperature": 0}
    if lab.offers("ignore_eos"):
        fields["ignore_eos"] = True
    is_plain = lab.adapter.capabilities.completions
    return lab.completion_request(prompt, **fields) if is_plain else lab.chat_request(prompt, **fields)


async def _until(look: Callable[[], Awaitable[T]], is_it: Callable[[T], bool], within_s: float) -> T:
    """Look until it is so or time is up, and say what was seen last."""
    deadline = time.monotonic() + within_s
    seen = await look()
    while not is_it(seen) and time.monotonic() < deadline:
        await asyncio.sleep(POLL_S)
        seen = await look()
    return seen


@proves("running")
async def running(lab: Lab) -> Observation:
    watched = await lab.once("watched", lambda: watch(lab))
    value = watched.during.running
    return ignored("not told") if value is None else honoured_if(value > 0, f"{value} while one ran")


@proves("waiting")
async def waiting(lab: Lab) -> Observation:
    value = (await lab.once("watched", lambda: watch(lab))).during.waiting
    return ignored("not told") if value is None else honoured(f"{value} while one ran")


@proves("kv_usage")
async def kv_usage(lab: Lab) -> Observation:
    return a_share((await lab.once("watched", lambda: watch(lab))).during.kv_usage)


@proves("prefix_hit_rate")
async def prefix_hit_rate(lab: Lab) -> Observation:
    return a_share((await lab.once("watched", lambda: watch(lab))).during.prefix_hit_rate)


@proves("draft_tokens")
async def draft_tokens(lab: Lab) -> Observation:
    return a_count((await lab.once("watched", lambda: watch(lab))).during.draft_tokens)


@proves("accepted_draft_tokens")
async def accepted_draft_tokens(lab: Lab) -> Observation:
    return a_count((await lab.once("watched", lambda: watch(lab))).during.accepted_draft_tokens)


def a_count(value: int | None) -> Observation:
    """Of drafts, which are made only where the text invites them: none at all shows nothing."""
    if value is None:
        return ignored("not told")
    return honoured(f"{value} while one ran") if value > 0 else unclear(f"{value} while one ran")


def a_share(value: float | None) -> Observation:
    if value is None:
        return ignored("not told")
    if value == 0:
        return unclear("0 while one ran")
    return honoured_if(0 < value <= 1, f"{value:.3g} while one ran")


@proves("cancellation")
async def cancellation(lab: Lab) -> Observation:
    return left_behind(await lab.once("watched", lambda: watch(lab)))


def left_behind(watched: Watched) -> Observation:
    if not watched.was_busy:
        return unclear("the engine does not tell whether it is busy")
    if watched.idle_after_s is None:
        return ignored(f"still busy {IDLE_WITHIN_S:g} s after its client had left")
    return honoured(f"idle {watched.idle_after_s:.1f} s after its client had left")


# ------------------------------------------------------------------------------------------------------------ refusals


@proves("context overflow")
async def context_overflow(lab: Lab) -> Observation:
    if lab.max_model_len is None:
        return unclear("the engine does not tell how much its context holds")
    prompt = "word " * (lab.max_model_len + 64)
    try:
        answer = await lab.say(prompt, **BRIEF)
    except ContextLengthExceeded as error:
        return honoured(error.message[:80])
    except RequestError as error:
        return ignored(f"refused, but as {error.code}: {error.message[:80]}")
    return ignored(f"answered a prompt that does not fit, and counted {answer.num_prompt_tokens} tokens")


@proves("unknown model")
async def unknown_model(lab: Lab) -> Observation:
    if "url" not in lab.adapter.Options.__struct_fields__:
        return unclear("the model is part of the adapter, so there is no other to ask for")
    stranger: EngineAdapter[Any] = type(lab.adapter)(msgspec.structs.replace(lab.adapter.options, model=NO_SUCH_MODEL))
    await stranger.start()
    try:
        await Lab(stranger, model=NO_SUCH_MODEL).chat(QUESTION, **BRIEF)
    except ModelNotFound as error:
        return honoured(error.message[:80])
    except RequestError as error:
        return honoured(f"refused as {error.code}: {error.message[:80]}")
    finally:
        await stranger.close()
    return unclear("answers under any name: it serves one model")
