"""OpenAI's newer face: a request becomes a chat, its answer the events and the object that agents expect.

POST /v1/responses    GET, DELETE /v1/responses/{id}    GET /v1/responses/{id}/input_items

An answer is kept before the client is told that it is whole, so that the next request may build on it at once; and its
place in the gateway is free by then.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

import msgspec
from aiohttp import web

from adapters.errors import GoodgateError, InvalidRequest, RequestError
from adapters.types import ChatRequest
from gateway.attempts.answer import Answer
from gateway.config import Live
from gateway.dispatch import Dispatcher
from gateway.handlers.response_store import ResponseStore, Stored, StoreFailed
from gateway.handlers.responses_body import (
    Item,
    ResponseBody,
    chat_request,
    check_include,
    decode_body,
    input_items,
    new_id,
    use_callers_words,
)
from gateway.handlers.responses_wire import Reply, error_event
from gateway.handlers.streaming import tell_how_it_ends
from gateway.records import logs
from gateway.records.trace import TRACE, Trace
from gateway.tenants.auth import keyed
from gateway.web import envelope
from gateway.web.body import read_json
from gateway.web.stream import HEARTBEAT, EventStream, Framing

MAX_PAGE = 100
PAGE_SIZES = {str(size) for size in range(1, MAX_PAGE + 1)}
KEEPS_NOTHING = "this gateway keeps no responses (`responses.keep` in its configuration; memory is for one worker only)"

_log = logs.logger("responses")


class ResponseNotFound(RequestError):
    status = 404
    code = "response_not_found"


class ResponsesHandlers:
    def __init__(self, dispatcher: Dispatcher, live: Live, store: ResponseStore | None) -> None:
        self._dispatcher = dispatcher
        self._live = live
        self._store = store

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/responses", keyed(self.create)),
            web.get("/v1/responses/{id}", keyed(self.retrieve)),
            web.delete("/v1/responses/{id}", keyed(self.delete)),
            web.get("/v1/responses/{id}/input_items", keyed(self.list_input_items)),
        ]

    async def create(self, request: web.Request) -> web.StreamResponse:
        body = decode_body(await read_json(request, self._live.server))
        if body.store and self._store is None:
            raise InvalidRequest(f"`store: true` is not possible: {KEEPS_NOTHING}.", param="store")
        turn = Turn(body, [*await self._earlier_items(body, request[TRACE]), *input_items(body)])
        try:
            if body.stream:
                return await self._stream(request, turn)
            reply = await self._whole(turn, request[TRACE])
            return _json_response(reply.response())
        except RequestError as error:
            use_callers_words(error)
            raise

    async def retrieve(self, request: web.Request) -> web.Response:
        if request.query.get("stream", "false").lower() not in ("", "false", "0"):
            raise InvalidRequest("A response that is whole is not streamed again; leave out `stream`.", param="stream")
        stored = await self._find(request.match_info["id"], request[TRACE])
        return web.Response(body=stored.response, content_type=envelope.JSON)

    async def delete(self, request: web.Request) -> web.Response:
        id = request.match_info["id"]
        if self._store is None or not await self._store.delete(_kept_as(id, request[TRACE])):
            self._not_found(id)
        return _json_response({"id": id, "object": "response", "deleted": True})

    async def list_input_items(self, request: web.Request) -> web.Response:
        """The items that led to a response, earlier turns included; the latest first unless asked otherwise."""
        query = request.query
        check_include(query.getall("include", []) + query.getall("include[]", []))
        stored = await self._find(request.match_info["id"], request[TRACE])
        items: list[Item] = msgspec.json.decode(stored.items)
        return _json_response(_page(items, query.get("order", "desc"), query.get("after"), query.get("limit", "20")))

    async def _earlier_items(self, body: ResponseBody, trace: Trace) -> list[Item]:
        if body.previous_response_id is None:
            return []
        stored = await self._find(body.previous_response_id, trace, param="previous_response_id")
        return [*msgspec.json.decode(stored.items), *msgspec.json.decode(stored.response)["output"]]

    async def _find(self, id: str, trace: Trace, param: str | None = None) -> Stored:
        stored = None if self._store is None else await self._store.get(_kept_as(id, trace))
        return stored or self._not_found(id, param)

    def _not_found(self, id: str, param: str | None = None) -> NoReturn:
        reason = KEEPS_NOTHING if self._store is None else "it was deleted, has expired, made room, or never was"
        raise ResponseNotFound(f"There is no response {id[:64]!r}: {reason}.", param=param)

    def _begin(self, turn: Turn, answer: Answer) -> Reply:
        is_kept = self._store is not None and turn.body.store is not False
        return Reply(turn.body, id=new_id("resp"), model=answer.model, is_kept=is_kept)

    async def _whole(self, turn: Turn, trace: Trace) -> Reply:
        async with self._dispatcher.open([turn.chat], trace) as answer:
            reply = self._begin(turn, answer)
            async for chunk in answer:
                if chunk.usage is not None:
                    answer.account(chunk.usage)
                reply.read(chunk)
            reply.check_whole()
        await self._keep(turn, reply, trace)
        return reply

    async def _stream(self, request: web.Request, turn: Turn) -> web.StreamResponse:
        framing = Framing(heartbeat=HEARTBEAT, end=b"", error=turn.failure)  # the last event says that it is the last
        stream, trace = EventStream(request, self._live.server, framing=framing), request[TRACE]
        send = partial(self._send_events, stream, turn, trace)
        return await tell_how_it_ends(stream, send, self._dispatcher.open_requests, trace)

    async def _send_events(self, stream: EventStream, turn: Turn, trace: Trace) -> None:
        async with self._dispatcher.open([turn.chat], trace, on_late=stream.open) as answer:
            reply = turn.reply = self._begin(turn, answer)
            await stream.open()
            opening = reply.opening()  # leaves with the first event, in one write
            async for chunk in answer:
                if chunk.usage is not None:
                    answer.account(chunk.usage)
                events = reply.read(chunk)
                if opening:
                    events, opening = opening + events, b""
                if events:
                    await stream.send(events)
            reply.check_whole()
        await self._keep(turn, reply, trace)
        await stream.send(reply.ending())
        await stream.finish()

    async def _keep(self, turn: Turn, reply: Reply, trace: Trace) -> None:
        """A store that fails takes nothing away from the answer, which says then that it was not kept."""
        if not reply.is_kept or self._store is None:
            return
        stored = Stored(response=msgspec.json.encode(reply.response()), items=msgspec.json.encode(turn.items))
        try:
            reply.is_kept = await self._store.put(_kept_as(reply.id, trace), stored)
        except StoreFailed as error:
            reply.is_kept = False
            logs.warning(_log, "a response was not kept", request_id=trace.request_id, reason=error.message)


def _kept_as(id: str, trace: Trace) -> str:
    """Responses belong to the key that asked for them: to any other they are not there."""
    return id if trace.caller is None else f"{trace.caller.id}:{id}"


class Turn:
    """What one request asks for: the items of the whole conversation, and the chat that they make."""

    def __init__(self, body: ResponseBody, items: list[Item]) -> None:
        self.body = body
        self.items = items
        self.chat: ChatRequest = chat_request(body, items)
        self.reply: Reply | None = None

    def failure(self, error: GoodgateError) -> bytes:
        """Before the response has begun there is none that could have failed, and only the event is told."""
        use_callers_words(error)
        return error_event(error) if self.reply is None else self.reply.failure(error)


def _page(items: list[Item], order: str, after: str | None, limit: str) -> dict[str, Any]:
    if order not in ("asc", "desc"):
        raise InvalidRequest("`order` must be asc or desc.", param="order")
    if limit not in PAGE_SIZES:
        raise InvalidRequest(f"`limit` must be a number from 1 to {MAX_PAGE}.", param="limit")
    ordered = items if order == "asc" else items[::-1]
    if after is not None:
        ids = [item["id"] for item in ordered]
        if after not in ids:
            raise InvalidRequest(f"There is no item {after[:64]!r} to go on after.", param="after")
        ordered = ordered[ids.index(after) + 1 :]
    page = ordered[: int(limit)]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return {"object": "list", "data": page, "has_more": len(ordered) > len(page), **ends}


def _json_response(data: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(data), content_type=envelope.JSON)
