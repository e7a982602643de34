"""Anthropic's Messages API, for the clients and tools that speak it: the same life of a request, other words.

POST /v1/messages    POST /v1/messages/count_tokens

`anthropic-version` and `anthropic-beta` are taken as they come; what a beta adds to the body is refused by
name where it has no meaning here. Errors are in Anthropic's shape (gateway/web/envelope.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import msgspec
from aiohttp import web

from adapters.errors import GoodgateError, RequestError
from gateway.attempts.answer import Question
from gateway.config import Live
from gateway.dispatch import Dispatcher
from gateway.handlers.anthropic_answers import MESSAGE_STOP, PING, MessageEvents, MessageFold, MessageHead
from gateway.handlers.anthropic_requests import MessagesBody, decode_count, decode_messages
from gateway.handlers.streaming import tell_how_it_ends
from gateway.records.trace import TRACE, Trace
from gateway.replicas.directory import Directory
from gateway.tenants.auth import keyed
from gateway.web import envelope
from gateway.web.body import read_json
from gateway.web.stream import EventStream, Framing
from gateway.web.whole import WholeAnswer


class AnthropicHandlers:
    def __init__(self, dispatcher: Dispatcher, fleet: Directory, live: Live) -> None:
        self._dispatcher = dispatcher
        self._fleet = fleet
        self._live = live

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post(envelope.MESSAGES, keyed(self.messages)),
            web.post(f"{envelope.MESSAGES}/count_tokens", keyed(self.count_tokens)),
        ]

    async def messages(self, request: web.Request) -> web.StreamResponse:
        body = decode_messages(await read_json(request, self._live.server))
        with _in_words_of(body):
            return await (self._stream(request, body) if body.stream else self._whole(request[TRACE], body))

    async def count_tokens(self, request: web.Request) -> web.Response:
        """Counted by the engine that would answer, with its own tokenizer and template."""
        wanted = decode_count(await read_json(request, self._live.server)).question()
        name, wanted.model = wanted.model, self._fleet.passed_on(wanted.model)
        question = Question(
            check=lambda adapter: adapter.check_tokenize(wanted), ask=lambda adapter: adapter.tokenize(wanted)
        )
        tokens = await self._dispatcher.ask(question, name, request[TRACE])
        counted = msgspec.json.encode({"input_tokens": len(tokens.ids)})
        return web.Response(body=counted, content_type=envelope.JSON)

    async def _whole(self, trace: Trace, body: MessagesBody) -> WholeAnswer:
        async with self._dispatcher.open([body.chat()], trace) as answer:
            fold = MessageFold(MessageHead.new(answer.model), body.stop_sequences or ())
            async for chunk in answer:
                if chunk.usage is not None:
                    answer.account(chunk.usage)
                fold.add(chunk)
            return WholeAnswer(fold.body())

    async def _stream(self, request: web.Request, body: MessagesBody) -> web.StreamResponse:
        trace = request[TRACE]
        tell = partial(_error_event, body=body, request_id=trace.request_id)
        framing = Framing(heartbeat=PING, end=MESSAGE_STOP, error=tell)
        stream = EventStream(request, self._live.server, framing=framing)
        send = partial(self._send_events, stream, body, trace)
        return await tell_how_it_ends(stream, send, self._dispatcher.open_requests, trace)

    async def _send_events(self, stream: EventStream, body: MessagesBody, trace: Trace) -> None:
        async with self._dispatcher.open([body.chat()], trace, on_late=stream.open) as answer:
            events = MessageEvents(MessageHead.new(answer.model), body.stop_sequences or ())
            await stream.open()
            opening = events.opening()  # leaves with the first event, in one write
            async for chunk in answer:
                if chunk.usage is not None:
                    answer.account(chunk.usage)
                event = opening + events.event(chunk)
                opening = b""
                if event:
                    await stream.send(event)
            await stream.send(events.closing())
            await stream.finish()


@contextmanager
def _in_words_of(body: MessagesBody) -> Iterator[None]:
    """A field that an engine or the configuration refuses is named as the client wrote it."""
    try:
        yield
    except RequestError as error:
        _use_words_of(body, error)
        raise


def _use_words_of(body: MessagesBody, error: GoodgateError) -> None:
    if error.param is not None:
        error.rename(body.name_of(error.param))


def _error_event(error: GoodgateError, body: MessagesBody, request_id: str) -> bytes:
    _use_words_of(body, error)
    return b"event: error\ndata: " + envelope.anthropic_body(error, request_id) + b"\n\n"
