"""Asking an engine through its adapter, and what came back in one piece.

lab = Lab(adapter, model="smollm2-135m-instruct")
answer = await lab.say("Once upon a time", temperature=0, max_tokens=16)
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from typing import Any, TypeVar

import msgspec
from msgspec import Raw, Struct

from adapters.base import EngineAdapter, Load
from adapters.errors import UnsupportedOperation
from adapters.types import (
    ChatRequest,
    Chunk,
    CompletionRequest,
    FinishReason,
    GenerateRequest,
    TokenizeRequest,
    Usage,
)

T = TypeVar("T")

STEADYING = frozenset({"temperature", "max_tokens"})  # sent beside what is asked for


class Choice(Struct):
    """One choice as it was when its stream was over."""

    text: str = ""
    reasoning: str = ""
    finish_reason: FinishReason | None = None
    logprobs: list[dict[str, Any]] = msgspec.field(default_factory=list)  # one for each piece that had any
    calls: dict[int, dict[str, str]] = msgspec.field(default_factory=dict)  # name and arguments, by number


class Answer(Struct, frozen=True):
    choices: list[Choice]
    usage: Usage | None
    first_token_s: float | None  # None: no text came

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.choices[0].finish_reason

    @property
    def num_tokens(self) -> int:
        return self.usage.completion_tokens if self.usage else 0

    @property
    def num_prompt_tokens(self) -> int:
        return self.usage.prompt_tokens if self.usage else 0

    @property
    def num_cached_tokens(self) -> int:
        return (self.usage.cached_tokens or 0) if self.usage else 0


def fold(chunks: Iterable[Chunk], first_token_s: float | None = None) -> Answer:
    """A stream's chunks as one answer."""
    choices: dict[int, Choice] = {0: Choice()}
    usage = None
    for chunk in chunks:
        if chunk.usage is not None:
            usage = chunk.usage
            continue
        choice = choices.setdefault(chunk.index, Choice())
        choice.text += chunk.text
        choice.reasoning += chunk.reasoning
        choice.finish_reason = chunk.finish_reason or choice.finish_reason
        if isinstance(details := _decoded(chunk.logprobs), dict):
            choice.logprobs.append(details)
        for delta in _decoded(chunk.tool_calls) or ():
            _add_call(choice.calls, delta)
    return Answer([choices[index] for index in sorted(choices)], usage, first_token_s)


def _decoded(raw: Raw | None) -> Any:
    return None if raw is None else msgspec.json.decode(raw)


def _add_call(calls: dict[int, dict[str, str]], delta: dict[str, Any]) -> None:
    call = calls.setdefault(delta.get("index", 0), {"name": "", "arguments": ""})
    function = delta.get("function") or {}
    call["name"] = function.get("name") or call["name"]
    call["arguments"] += function.get("arguments") or ""


class Lab:
    """An adapter under the probe. Answers that several proofs compare with are asked for once (`once`)."""

    def __init__(self, adapter: EngineAdapter[Any], *, model: str, max_model_len: int | None = None) -> None:
        self.adapter = adapter
        self.model = model
        self.max_model_len = max_model_len
        self._known: dict[str, Any] = {}
        self._numbers = itertools.count()

    def offers(self, field: str) -> bool:
        return field in self.adapter.capabilities.parameters

    async def once(self, what: str, find_out: Callable[[], Awaitable[T]]) -> T:
        if what not in self._known:
            self._known[what] = await find_out()
        known: T = self._known[what]
        return known

    def forget(self) -> None:
        """Ask for everything anew."""
        self._known.clear()

    async def say(self, prompt: str, **fields: Any) -> Answer:
        """As a completion, which shows a continuation plainly; as a chat where the engine has no completions."""
        ask = self.complete if self.adapter.capabilities.completions else self.chat
        return await ask(prompt, **fields)

    async def complete(self, prompt: str | list[int], **fields: Any) -> Answer:
        return await self.ask(self.completion_request(prompt, **fields))

    async def chat(self, text: str, **fields: Any) -> Answer:
        return await self.ask(self.chat_request(text, **fields))

    def completion_request(self, prompt: str | list[int], **fields: Any) -> CompletionRequest:
        return msgspec.convert({"model": self.model, "prompt": prompt, **self._offered(fields)}, CompletionRequest)

    def chat_request(self, text: str, **fields: Any) -> ChatRequest:
        messages = [{"role": "user", "content": text}]
        return msgspec.convert({"model": self.model, "messages": messages, **self._offered(fields)}, ChatRequest)

    def _offered(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Without the fields that merely steady an answer, where the engine does not take them."""
        return {name: value for name, value in fields.items() if name not in STEADYING or self.offers(name)}

    async def ask(self, request: GenerateRequest) -> Answer:
        started, first_token_s, chunks = time.monotonic(), None, []
        async with self.stream(request) as stream:
            async for chunk in stream:
                if first_token_s is None and (chunk.text or chunk.reasoning or chunk.tool_calls is not None):
                    first_token_s = time.monotonic() - started
                chunks.append(chunk)
        return fold(chunks, first_token_s)

    def stream(self, request: GenerateRequest) -> contextlib.aclosing[AsyncGenerator[Chunk, None]]:
        """The chunks as they come; leaving the block leaves the engine."""
        return contextlib.aclosing(self.adapter.generate(request, request_id=f"probe-{next(self._numbers):06d}"))

    async def load(self) -> Load:
        return await self.adapter.load()

    async def token_ids(self, text: str, *, add_special_tokens: bool = True) -> list[int] | None:
        """None where the engine does not tokenise."""
        request = TokenizeRequest(model=self.model, prompt=text, add_special_tokens=add_special_tokens)
        try:
            return (await self.adapter.tokenize(request)).ids
        except UnsupportedOperation:
            return None
