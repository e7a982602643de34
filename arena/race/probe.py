"""Before an engine is measured: what does it speak, does it answer as asked, and about how fast is it?

    found = await probe(url, model=None)                      # one short request, repeated without what it refuses
    burst = await warm_up(found.target("vllm"), prompts, 24)  # many at once: warms every batch size, gives a first rate

What an engine refuses (usage in streams, `ignore_eos`) is found out here, once, and remembered in the target's fields;
the measured path never retries. The burst is closed loop, so its rate is an upper bound of goodput and never a result.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from adapters.errors import EngineError, EngineFailed, EngineProtocolError, EngineUnavailable
from adapters.wire.sse import EventSplitter
from adapters.wire.unreachable import why_unreachable
from arena.load.plan import Prompt, PromptSource, Target

PROBE_TOKENS = 8
PROBE_TIMEOUT_S = 120.0  # the first request of a fresh engine may compile kernels

# What a race wants of every engine. Each is given up separately when the engine answers 4xx to it.
WISHES: Mapping[str, Any] = {"ignore_eos": True, "stream_options": {"include_usage": True}}
# Where the model ends its answers (tools, schemas), nothing may keep it from doing so.
WISHES_OF_NATURAL_ENDS: Mapping[str, Any] = {"stream_options": {"include_usage": True}}


@dataclass(frozen=True, slots=True)
class Found:
    """What one engine turned out to be. `refused` holds the wishes it answers with an error."""

    url: str
    model: str
    fields: Mapping[str, Any]
    refused: tuple[str, ...]
    exact_length: bool  # it gave as many tokens as were asked for
    counts_tokens: bool
    ttft_ms: float
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
            "served_by": self.served_by,
        }


@dataclass(frozen=True, slots=True)
class Answer:
    tokens: int | None
    pieces: int
    ttft_s: float | None
    served_by: str


class Refused(Exception):
    """The engine answered a 4xx status."""


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
    timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S, sock_connect=5)
    async with aiohttp.ClientSession(timeout=timeout, headers=sent_headers) as client:
        served = model or await only_model(client, url)
        granted = dict(wishes)
        while True:
            body = {"model": served, **prompt.fields, "max_tokens": PROBE_TOKENS, "stream": True, **granted}
            try:
                answer = await ask(client, url, body)
                break
            except Refused as refusal:
                if not granted:
                    raise EngineFailed(f"{url} refuses a plain chat request: {refusal}.") from refusal
                del granted[_blamed(str(refusal), granted)]
    if answer.ttft_s is None:
        raise EngineProtocolError(f"{url} answered without any text.")
    return Found(
        url=url,
        model=served,
        fields={"stream": True, **granted},
        refused=tuple(sorted(set(wishes) - set(granted))),
        exact_length=answer.tokens == PROBE_TOKENS,
        counts_tokens=answer.tokens is not None,
        ttft_ms=answer.ttft_s * 1000,
        served_by=answer.served_by,
        headers=sent_headers,
    )


async def only_model(client: aiohttp.ClientSession, url: str) -> str:
    """The one model that the engine serves; a choice must be made by name (`--targets name=url@model`)."""
    try:
        async with client.get(url + "/v1/models") as response:
            body = await response.read()
            if response.status >= 400:
                raise EngineUnavailable(f"{url}/v1/models answered HTTP {response.status}: {_start_of(body)}")
            names = [str(entry["id"]) for entry in msgspec.json.decode(body)["data"]]
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise EngineUnavailable(f"Nothing answers at {url}: {why_unreachable(error)}.") from error
    except (msgspec.DecodeError, KeyError, TypeError) as error:
        raise EngineProtocolError(
            f"{url}/v1/models is not an OpenAI list of models; name it with {url}@MODEL."
        ) from error
    if len(names) != 1:
        raise EngineUnavailable(f"{url} serves {', '.join(names) or 'no model'}; choose one with {url}@MODEL.")
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
            *(ask(client, target.url, _body(prompts(seq), target)) for seq in range(size)), return_exceptions=True
        )
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, (EngineError, Refused)):
            raise result
    completed = sum(isinstance(result, Answer) for result in results)
    if not completed:
        raise EngineFailed(f"None of {size} simultaneous requests was answered: {results[0]}")
    return completed / (time.monotonic() - started)


async def ask(client: aiohttp.ClientSession, url: str, body: Mapping[str, Any]) -> Answer:
    """One streamed chat request, read to its end."""
    splitter = EventSplitter()
    started = time.monotonic()
    first: float | None = None
    tokens: int | None = None
    pieces = 0
    has_ended = False
    try:
        async with client.post(url + "/v1/chat/completions", json=body) as response:
            if response.status >= 400:
                text = _start_of(await response.content.read(4096))
                if response.status < 500:
                    raise Refused(f"HTTP {response.status} {text}")
                raise EngineFailed(f"{url} answered HTTP {response.status}: {text}")
            served_by = response.headers.get("x-goodgate-engine", "")
            async for data in response.content.iter_any():
                for event in splitter.feed(data):
                    has_text, counted, ends = read_event(event.data)
                    has_ended = has_ended or ends
                    tokens = counted if counted is not None else tokens
                    if has_text:
                        pieces += 1
                        first = first if first is not None else time.monotonic() - started
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise EngineUnavailable(f"{url} broke off: {error or type(error).__name__}.") from error
    if not has_ended:
        raise EngineProtocolError(f"{url} ended an answer without a finish reason and without [DONE].")
    return Answer(tokens, pieces, first, served_by)


def read_event(data: bytes) -> tuple[bool, int | None, bool]:
    """Does this event carry generated text, how many output tokens does it account for, and does it end the answer?"""
    if data.strip() == b"[DONE]":
        return False, None, True
    try:
        event = msgspec.json.decode(data, type=_Event)
    except msgspec.DecodeError as error:
        raise EngineProtocolError(f"The stream holds an event that is not OpenAI's: {error}.") from error
    if event.error:
        raise EngineFailed(f"The engine reported an error in its stream: {str(event.error)[:300]}")
    deltas = [choice.delta for choice in event.choices or () if choice.delta is not None]
    has_text = any(delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls for delta in deltas)
    ends = any(choice.finish_reason for choice in event.choices or ())
    return has_text, event.usage.completion_tokens if event.usage is not None else None, ends


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


def _start_of(body: bytes) -> str:
    return " ".join(body[:300].decode("utf-8", "replace").split())


def _blamed(refusal: str, wishes: Mapping[str, Any]) -> str:
    """The wish that the error names, else the first one left."""
    return next((wish for wish in wishes if wish in refusal), next(iter(wishes)))


def _body(prompt: Prompt, target: Target) -> dict[str, Any]:
    return {"model": target.model, **prompt.fields, "max_tokens": prompt.max_tokens, **target.fields}
