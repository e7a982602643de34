"""How the events of a stream leave: at once, together where they come together, and all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest
import uvloop
from aiohttp import web

from gateway.config import ServerConfig
from gateway.web.stream import ClientLeft, EventStream

Fill = Callable[[EventStream], Awaitable[None]]

EVENTS = [b"data: %d\n\n" % number for number in range(200)]
DONE = b"data: [DONE]\n\n"


async def answered(fill: Fill, version: bytes) -> bytes:
    """All bytes of the answer to a client that asks a server with one handler."""

    async def handle(request: web.Request) -> web.StreamResponse:
        stream = EventStream(request, ServerConfig())
        await stream.open()
        try:
            await fill(stream)
            await stream.finish()
        finally:
            stream.close()
        return stream.response

    runner = web.ServerRunner(web.Server(handle))  # type: ignore[arg-type]
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        reader, writer = await asyncio.open_connection(*runner.addresses[0])
        writer.write(b"GET / HTTP/%b\r\nHost: x\r\nConnection: close\r\n\r\n" % version)
        answer = await reader.read()
        writer.close()
        return answer
    finally:
        await runner.cleanup()


def chunks_of(answer: bytes) -> list[bytes]:
    """The chunks of a whole chunked body, the last and empty one left out."""
    _, _, rest = answer.partition(b"\r\n\r\n")
    chunks = []
    while True:
        length, _, rest = rest.partition(b"\r\n")
        chunk, end, rest = rest[: int(length, 16)], rest[int(length, 16) :][:2], rest[int(length, 16) + 2 :]
        assert end == b"\r\n"
        if not chunk:
            assert rest == b""
            return chunks
        chunks.append(chunk)


def sending(events: Sequence[bytes], pause_s: float | None = None) -> Fill:
    async def fill(stream: EventStream) -> None:
        for event in events:
            await stream.send(event)
            if pause_s is not None:
                await asyncio.sleep(pause_s)

    return fill


def test_events_that_come_together_leave_in_few_writes_and_in_order() -> None:
    chunks = chunks_of(uvloop.run(answered(sending(EVENTS), b"1.1")))
    assert b"".join(chunks) == b"".join(EVENTS) + DONE
    assert len(chunks) <= 10


def test_an_event_that_comes_alone_leaves_at_once() -> None:
    chunks = chunks_of(uvloop.run(answered(sending(EVENTS[:5], 0.01), b"1.1")))
    assert chunks == [*EVENTS[:5], DONE]


def test_large_events_are_not_held() -> None:
    events = [b"data: " + b"x" * 20_000 + b"\n\n"] * 20
    assert chunks_of(uvloop.run(answered(sending(events), b"1.1"))) == [*events, DONE]


def test_a_client_that_leaves_just_before_its_first_event_is_no_internal_error() -> None:
    async def open_too_late() -> BaseException | None:
        ends: list[BaseException | None] = []

        async def handle(request: web.Request) -> web.StreamResponse:
            assert request.transport is not None
            request.transport.abort()
            try:
                await EventStream(request, ServerConfig()).open()
            except BaseException as error:
                ends.append(error)
                raise
            raise AssertionError("its head was sent to nobody")

        runner = web.ServerRunner(web.Server(handle))  # type: ignore[arg-type]
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        reader, writer = await asyncio.open_connection(*runner.addresses[0])
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
        writer.close()
        await runner.cleanup()
        return ends[0]

    assert isinstance(uvloop.run(open_too_late()), ClientLeft)


@pytest.mark.parametrize("pause_s", [None, 0.0])
def test_a_client_of_http_1_0_gets_the_events_without_chunks(pause_s: float | None) -> None:
    answer = uvloop.run(answered(sending(EVENTS, pause_s), b"1.0"))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"chunked" not in head.lower()
    assert body == b"".join(EVENTS) + DONE


def test_an_event_that_is_held_leaves_though_nothing_follows_it() -> None:
    async def fill(stream: EventStream) -> None:
        for event in EVENTS[:3]:
            await stream.send(event)
        await asyncio.sleep(0.05)
        assert not stream._held
        await stream.send(EVENTS[3])

    assert b"".join(chunks_of(uvloop.run(answered(fill, b"1.1")))) == b"".join(EVENTS[:4]) + DONE
