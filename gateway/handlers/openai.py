"""OpenAI's routes: decode and check the body, let the dispatcher generate, encode what comes.

POST /v1/chat/completions    POST /v1/completions
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated

import msgspec
from aiohttp import web
from msgspec import Meta, Struct

from adapters.errors import InvalidRequest
from adapters.types import (
    Chunk,
    CompletionRequest,
    Count,
    GenerateRequest,
    GenerationFields,
    StreamOptions,
    Text,
    decode_as,
    decode_chat,
    one_or_several,
)
from gateway.attempts.answer import Answer
from gateway.config import Live
from gateway.dispatch import Dispatcher
from gateway.handlers.openai_wire import (
    REASONING_FIELDS,
    AnswerHead,
    ChatEvents,
    ChatFold,
    CompletionEvents,
    CompletionFold,
    Events,
    Fold,
)
from gateway.handlers.streaming import tell_how_it_ends
from gateway.records.trace import TRACE, Trace
from gateway.tenants.auth import keyed
from gateway.web.body import read_json
from gateway.web.stream import EventStream
from gateway.web.whole import WholeAnswer

MAX_PROMPTS = 256


class Dialect(Struct, frozen=True):
    """What differs between chat and completions once the body is decoded."""

    id_prefix: str
    events: type[Events]
    fold: type[Fold]


CHAT = Dialect("chatcmpl", ChatEvents, ChatFold)
COMPLETION = Dialect("cmpl", CompletionEvents, CompletionFold)


class CompletionBody(GenerationFields, kw_only=True):
    """A completion as clients send it: `prompt` may also be a list of prompts, which become requests of their own."""

    prompt: Text | Annotated[list[Count | Text | list[Count]], Meta(min_length=1)]
    echo: bool | msgspec.UnsetType | None = msgspec.UNSET
    suffix: str | msgspec.UnsetType | None = msgspec.UNSET
    best_of: Annotated[int, Meta(ge=1, le=8)] | msgspec.UnsetType | None = msgspec.UNSET
    logprobs: Annotated[int, Meta(ge=0, le=5)] | msgspec.UnsetType | None = msgspec.UNSET


_completion_decoder = msgspec.json.Decoder(CompletionBody)


class OpenAIHandlers:
    def __init__(self, dispatcher: Dispatcher, live: Live) -> None:
        self._dispatcher = dispatcher
        self._live = live

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/chat/completions", keyed(self.chat_completions)),
            web.post("/v1/completions", keyed(self.completions)),
        ]

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        chat = decode_chat(await read_json(request, self._live.server))
        return await self._respond(request, [chat], CHAT)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = decode_as(_completion_decoder, await read_json(request, self._live.server))
        return await self._respond(request, split_prompts(body), COMPLETION)

    async def _respond(
        self, request: web.Request, requests: Sequence[GenerateRequest], dialect: Dialect
    ) -> web.StreamResponse:
        trace = request[TRACE]
        if requests[0].is_stream:
            if requests[0].wants_usage_so_far and _num_choices(requests) > 1:
                raise InvalidRequest(
                    "`continuous_usage_stats` counts one choice; ask for one prompt and `n: 1`.", param="stream_options"
                )
            return await self._stream(request, requests, dialect, trace)
        if isinstance(requests[0].stream_options, StreamOptions):
            raise InvalidRequest("`stream_options` needs `stream: true`.", param="stream_options")
        async with self._dispatcher.open(requests, trace) as answer:
            fold = dialect.fold(
                _head(answer, dialect),
                num_choices=_num_choices(requests),
                reasoning_fields=REASONING_FIELDS[self._live.server.reasoning_field],
            )
            for chunk in answer.in_hand():
                _fold(fold, answer, chunk)
            async for chunk in answer:
                _fold(fold, answer, chunk)
            return WholeAnswer(fold.body())

    async def _stream(
        self, request: web.Request, requests: Sequence[GenerateRequest], dialect: Dialect, trace: Trace
    ) -> web.StreamResponse:
        stream = EventStream(request, self._live.server)
        send = partial(self._send_events, stream, requests, dialect, trace)
        return await tell_how_it_ends(stream, send, self._dispatcher.open_requests, trace)

    async def _send_events(
        self, stream: EventStream, requests: Sequence[GenerateRequest], dialect: Dialect, trace: Trace
    ) -> None:
        async with self._dispatcher.open(requests, trace, on_late=stream.open) as answer:
            events = dialect.events(
                _head(answer, dialect),
                num_choices=_num_choices(requests),
                with_usage=requests[0].wants_usage,
                reasoning_fields=REASONING_FIELDS[self._live.server.reasoning_field],
            )
            await stream.open()
            opening = events.opening()  # leaves with the first event, in one write
            async for chunk in answer:
                if chunk.usage is not None:
                    answer.account(chunk.usage)
                event = events.event(chunk)
                if (so_far := chunk.usage_so_far) is not None:
                    event = events.counted(event, so_far)
                    opening = events.counted(opening, msgspec.structs.replace(so_far, completion_tokens=0))
                if opening:
                    event, opening = opening + event, b""
                if event:
                    await stream.send(event)
            events.check_whole()
            await stream.finish()


def split_prompts(body: CompletionBody) -> list[CompletionRequest]:
    """One request for each prompt of a completion body."""
    fields = {name: getattr(body, name) for name in body.__struct_fields__ if name != "prompt"}
    prompts = one_or_several(body.prompt, "prompt", at_most=MAX_PROMPTS)
    return [CompletionRequest(prompt=prompt, **fields) for prompt in prompts]


def _head(answer: Answer, dialect: Dialect) -> AnswerHead:
    return AnswerHead.new(dialect.id_prefix, answer.model)


def _fold(fold: Fold, answer: Answer, chunk: Chunk) -> None:
    if chunk.usage is not None:
        answer.account(chunk.usage)
    fold.add(chunk)


def _num_choices(requests: Sequence[GenerateRequest]) -> int:
    return len(requests) * requests[0].num_choices
