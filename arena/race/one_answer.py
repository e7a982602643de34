"""One streamed chat request outside the measured path: asked, read to its end, and told as an `Answer`.

Probes and warm-ups use it. It stamps after it has read, which is exact enough to see how an answer comes, and no more.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from adapters.errors import EngineFailed, EngineProtocolError, EngineUnavailable
from adapters.wire.sse import EventSplitter


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Times in seconds after the request was sent."""

    tokens: int | None  # as the engine counts them
    prompt_tokens: int | None
    cached_tokens: int | None
    pieces: int  # events that generated something
    counted_pieces: int  # of these, with usage of their own
    first_s: float | None
    last_s: float | None
    has_reasoning: bool
    has_tool_calls: bool
    finish_reason: str | None
    served_by: str  # our gateway's header, where one is in between


class Refused(Exception):
    """The engine answered a 4xx status."""


async def ask(client: aiohttp.ClientSession, url: str, body: Mapping[str, Any]) -> Answer:
    """Raises `Refused`, or an `EngineError` with a sentence, where no whole answer comes."""
    splitter, reading = EventSplitter(), _Reading()
    started = time.monotonic()
    try:
        async with client.post(url + "/v1/chat/completions", json=body) as response:
            if response.status >= 400:
                text = start_of(await response.content.read(4096))
                if response.status < 500:
                    raise Refused(f"HTTP {response.status} {text}")
                raise EngineFailed(f"{url} answered HTTP {response.status}: {text}")
            reading.served_by = response.headers.get("x-goodgate-engine", "")
            async for data in response.content.iter_any():
                at_s = time.monotonic() - started
                for event in splitter.feed(data):
                    reading.take(event.data, at_s)
    except TimeoutError as error:
        raise EngineUnavailable(f"{url} did not answer within {time.monotonic() - started:.1f} s.") from error
    except (aiohttp.ClientError, OSError) as error:
        raise EngineUnavailable(f"{url} broke off: {str(error) or type(error).__name__}.") from error
    if not reading.has_ended:
        raise EngineProtocolError(f"{url} ended an answer without a finish reason and without [DONE].")
    return reading.answer()


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(msgspec.Struct):
    function: _Function | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


class _Reading:
    """What has come of one answer so far."""

    def __init__(self) -> None:
        self.usage = _Usage()
        self.pieces = self.counted_pieces = 0
        self.first_s: float | None = None
        self.last_s: float | None = None
        self.has_reasoning = self.has_tool_calls = self.has_ended = False
        self.finish_reason: str | None = None
        self.served_by = ""

    def take(self, data: bytes, at_s: float) -> None:
        if data.strip() == b"[DONE]":
            self.has_ended = True
            return
        try:
            event = msgspec.json.decode(data, type=_Event)
        except msgspec.DecodeError as error:
            raise EngineProtocolError(f"The stream holds an event that is not OpenAI's: {error}.") from error
        if event.error:
            raise EngineFailed(f"The engine reported an error in its stream: {str(event.error)[:300]}")
        generated = [self._take_choice(choice) for choice in event.choices or ()]
        if event.usage is not None:
            self.usage = event.usage
        if any(generated):
            self.pieces += 1
            self.counted_pieces += event.usage is not None and event.usage.completion_tokens is not None
            self.first_s = at_s if self.first_s is None else self.first_s
            self.last_s = at_s

    def _take_choice(self, choice: _Choice) -> bool:
        if choice.finish_reason:
            self.has_ended, self.finish_reason = True, choice.finish_reason
        delta = choice.delta
        if delta is None:
            return False
        thinks = bool(delta.reasoning_content or delta.reasoning)
        called = [call.function for call in delta.tool_calls or () if call.function is not None]
        calls = any(function.name or function.arguments for function in called)
        self.has_reasoning |= thinks
        self.has_tool_calls |= calls
        return bool(delta.content) or thinks or calls

    def answer(self) -> Answer:
        details = self.usage.prompt_tokens_details
        return Answer(
            tokens=self.usage.completion_tokens,
            prompt_tokens=self.usage.prompt_tokens,
            cached_tokens=details.cached_tokens if details is not None else None,
            pieces=self.pieces,
            counted_pieces=self.counted_pieces,
            first_s=self.first_s,
            last_s=self.last_s,
            has_reasoning=self.has_reasoning,
            has_tool_calls=self.has_tool_calls,
            finish_reason=self.finish_reason,
            served_by=self.served_by,
        )


def start_of(body: bytes) -> str:
    return " ".join(body[:300].decode("utf-8", "replace").split())
