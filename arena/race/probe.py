"""Before an engine is measured: what does it speak, does it answer as asked, and about how fast is it?

    found = await probe(url, model=None, prompt=prompt)       # a few short requests, repeated without what it refuses
    burst = await warm_up(found.target("vllm"), prompts, 24)  # many at once: warms every batch size, gives a first rate

What an engine refuses (usage in streams, `ignore_eos`) is found out here, once, and remembered in the target's fields;
the measured path never retries. The burst is closed loop, so its rate is an upper bound of goodput and never a result.

The gate: usage and exact length are needed for a rank (judging/parity.py looks at them in every cell). Whether tokens
come one by one, whether single events tell their count, whether cached tokens are told, and what it does with tools is
told in the report.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from adapters.errors import EngineError, EngineFailed, EngineProtocolError, EngineUnavailable
from arena.load.answer_reader import shown
from arena.load.asking import Asked, Refused, ask, model_names
from arena.load.plan import CHAT, Prompt, PromptSource, Target
from arena.race.own_report import own_report

PROBE_TOKENS = 24
PROBE_TIMEOUT_S = 120.0  # the first request of a fresh engine may compile kernels
STREAM_SHARE = 0.05  # of an answer's time in which its events come, where it does not stream
SEVERAL_TOKENS = 1.5  # tokens an event, from which on an engine is asked to count them
MOST_NAMES = 10  # of models, in a sentence

# What a race wants of every engine. Each is given up separately when the engine answers 4xx to it.
WISHES: Mapping[str, Any] = {"ignore_eos": True, "stream_options": {"include_usage": True}}
# Where the model ends its answers (tools, schemas), nothing may keep it from doing so.
WISHES_OF_NATURAL_ENDS: Mapping[str, Any] = {"stream_options": {"include_usage": True}}
COUNTED = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
TOOL = {
    "type": "function",
    "function": {
        "name": "note",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What an engine turned out to do. None: it could not be told."""

    streams: bool | None  # its events come over time
    min_tokens: bool | None = None  # asked for where `ignore_eos` is refused or not kept
    counts_events: bool | None = None  # usage in every event (`continuous_usage_stats`)
    tells_cached: bool = False
    caches: bool | None = None  # the same prompt again came from its prefix cache, by its own count
    reasoning: bool = False  # its answer had reasoning deltas
    tools: bool | None = None  # a forced tool call came as deltas; False: refused, or answered with text


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What one engine turned out to be. `refused` holds the wishes it answers with an error."""

    url: str
    model: str
    fields: Mapping[str, Any]
    refused: tuple[str, ...]
    exact_length: bool  # it gave as many tokens as were asked for
    counts_tokens: bool
    ttft_ms: float
    prompt_tokens: int | None
    prompt_asked: int | None  # tokens that the workload meant it to have
    capabilities: Capabilities
    settings: Mapping[str, Any] = field(default_factory=dict)  # its own report of them
    served_by: str = ""  # our gateway's header, where one is in between
    headers: Mapping[str, str] = field(default_factory=dict)

    def target(self, name: str) -> Target:
        return Target(self.url, self.model, name, fields=self.fields, headers=self.headers)

    def to_dict(self) -> dict[str, Any]:
        return {
            "refused": list(self.refused),
            "exact_length": self.exact_length,
            "counts_tokens": self.counts_tokens,
            "probe_ttft_ms": round(self.ttft_ms, 1),
            "prompt_tokens": self.prompt_tokens,
            "prompt_asked": self.prompt_asked,
            "capabilities": {name: getattr(self.capabilities, name) for name in Capabilities.__slots__},
            "served_by": self.served_by,
        }


async def probe(
    url: str,
    *,
    model: str | None,
    prompt: Prompt,
    headers: Mapping[str, str] | None = None,
    wishes: Mapping[str, Any] = WISHES,
) -> Found:
    """Raises `EngineError` with a sentence when the engine does not answer as OpenAI's chat route does."""
    sent_headers = dict(headers or {})
    chat = url + CHAT
    timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S, sock_connect=5)
    async with aiohttp.ClientSession(timeout=timeout, headers=sent_headers) as client:
        served = model or await only_model(client, url)
        plain = {"model": served, **prompt.fields, "max_tokens": PROBE_TOKENS, "stream": True}
        first, granted = await _least_refused(client, chat, plain, wishes)
        if first.first_s is None:
            raise EngineProtocolError(f"{url} answered without any text.")
        length = first.answer.out_tok_usage
        is_exact = "ignore_eos" not in wishes or length in (None, PROBE_TOKENS)
        min_tokens = None if is_exact else await _keeps_min_tokens(client, chat, {**plain, **granted})
        again = await _ask_again(client, chat, {**plain, **granted})
        called = await _try(client, chat, {**plain, "tools": [TOOL], "tool_choice": "required"})
        capabilities = _capabilities(first, again, called, min_tokens)
        if capabilities.counts_events and _sends_several(first):
            granted = {**granted, **COUNTED}
        return Found(
            url=url,
            model=served,
            fields={"stream": True, **granted},
            refused=tuple(sorted(set(wishes) - set(granted))),
            exact_length=length == PROBE_TOKENS,
            counts_tokens=length is not None,
            ttft_ms=first.first_s * 1000,
            prompt_tokens=first.answer.in_tok_usage,
            prompt_asked=prompt.prompt_tokens,
            capabilities=capabilities,
            settings=await own_report(client, url),
            served_by=first.served_by,
            headers=sent_headers,
        )


async def _least_refused(
    client: aiohttp.ClientSession, chat: str, plain: Mapping[str, Any], wishes: Mapping[str, Any]
) -> tuple[Asked, dict[str, Any]]:
    """The first answer, and the wishes that were left when it came."""
    granted = dict(wishes)
    while True:
        try:
            return await ask(client, chat, {**plain, **granted}), granted
        except Refused as refusal:
            if not granted:
                raise EngineFailed(f"{chat} refuses a plain chat request: {refusal}.") from refusal
            del granted[_blamed(str(refusal), granted)]


async def _keeps_min_tokens(client: aiohttp.ClientSession, chat: str, body: Mapping[str, Any]) -> bool:
    """Where the length was not kept, would `min_tokens` keep it? It is told and not used: bodies are the same for all
    engines, and its value differs from request to request.
    """
    longer = await _try(client, chat, {**body, "min_tokens": PROBE_TOKENS})
    return longer is not None and longer.answer.out_tok_usage == PROBE_TOKENS


async def _ask_again(client: aiohttp.ClientSession, chat: str, body: Mapping[str, Any]) -> Asked | None:
    """The same prompt a second time, which a prefix cache would know; with usage in every event where that is taken."""
    counted = await _try(client, chat, {**body, **COUNTED}) if "stream_options" in body else None
    return counted or await _try(client, chat, body)


async def _try(client: aiohttp.ClientSession, chat: str, body: Mapping[str, Any]) -> Asked | None:
    """The answer to something that an engine need not be able to do."""
    try:
        return await ask(client, chat, body)
    except (Refused, EngineError):
        return None


def _capabilities(first: Asked, again: Asked | None, called: Asked | None, min_tokens: bool | None) -> Capabilities:
    told_again = again.answer.cached_tok if again is not None else None
    return Capabilities(
        streams=_streams(first),
        min_tokens=min_tokens,
        counts_events=again is not None and again.answer.tokens_known,
        tells_cached=first.answer.cached_tok is not None or told_again is not None,
        caches=None if told_again is None else told_again > 0,
        reasoning=first.has_reasoning,
        tools=called is not None and called.has_tool_calls,
    )


def _streams(asked: Asked) -> bool | None:
    """Whether its events came over time; the detectors judge it by what comes in the cells."""
    tokens = asked.answer.out_tok_usage
    if asked.answer.n_chunks < 2 or asked.first_s is None or asked.last_s is None:
        return False if tokens is not None and tokens > 1 else None
    return asked.last_s - asked.first_s >= STREAM_SHARE * asked.last_s


def _sends_several(asked: Asked) -> bool:
    tokens = asked.answer.out_tok_usage
    return tokens is not None and tokens >= SEVERAL_TOKENS * asked.answer.n_chunks


async def served_model(url: str) -> str:
    """The one model of an endpoint, asked over a connection of its own."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S, sock_connect=5)) as client:
        return await only_model(client, url)


async def only_model(client: aiohttp.ClientSession, url: str) -> str:
    """The one model that the engine serves; a choice must be made by name (`--targets name=url@model`)."""
    names = await model_names(client, url)
    if len(names) != 1:
        listed = shown(", ".join(names[:MOST_NAMES])) + (" and others" if len(names) > MOST_NAMES else "")
        raise EngineUnavailable(f"{url} serves {listed or 'no model'}; choose one with {url}@MODEL.")
    return names[0]


async def is_alive(target: Target) -> bool:
    """Is anybody there? Asked when a cell went badly, to tell a slow engine from a dead one."""
    timeout = aiohttp.ClientTimeout(total=10, sock_connect=2)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=dict(target.headers)) as client,
            client.get(target.url + "/v1/models") as response,
        ):
            return response.status < 500
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False


async def warm_up(target: Target, prompts: PromptSource, size: int, *, timeout_s: float) -> float:
    """Send `size` requests at once; completed requests per second. What is not done in time counts as not completed."""
    started = time.monotonic()
    timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=5)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, headers=dict(target.headers)) as client:
        results = await asyncio.gather(
            *(ask(client, target.url + target.path, _body(prompts(seq), target)) for seq in range(size)),
            return_exceptions=True,
        )
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, (EngineError, Refused)):
            raise result
    completed = sum(isinstance(result, Asked) for result in results)
    if not completed:
        raise EngineFailed(f"None of {size} simultaneous requests was answered: {results[0]}")
    return completed / (time.monotonic() - started)


def _blamed(refusal: str, wishes: Mapping[str, Any]) -> str:
    """The wish that the error names, else the first one left."""
    return next((wish for wish in wishes if wish in refusal), next(iter(wishes)))


def _body(prompt: Prompt, target: Target) -> dict[str, Any]:
    return {"model": target.model, **prompt.fields, "max_tokens": prompt.max_tokens, **target.fields}
