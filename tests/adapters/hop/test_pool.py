"""Which connection carries a request: one that was kept, a fresh one, or both where the first had gone stale."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

import pytest

from adapters.wire.hop.connection import Connection
from adapters.wire.hop.errors import BadHTTP, ConnectTimeout, Dropped, NotAccepting, Unreachable
from adapters.wire.hop.pool import Origin, Pool
from adapters.wire.hop.request import head, opening
from tests.adapters.hop.engine import CLOSE, HOLD, OK, Engine, request, soon, whole


async def test_the_connection_used_last_is_used_first_and_the_others_grow_old() -> None:
    async with Engine(*[OK] * 40) as engine:
        pool = engine.pool(keepalive_s=0.15)
        await asyncio.gather(*(engine.get(pool) for _ in range(5)))
        assert pool.num_idle == 5
        for _ in range(20):
            await engine.get(pool)
            await asyncio.sleep(0.01)
        assert engine.num_connections == 5
        assert pool.num_idle == pool.num_open == 1
        await asyncio.sleep(0.4)
        assert pool.num_idle == pool.num_open == 0


async def test_where_none_is_kept_each_request_has_its_own() -> None:
    async with Engine(OK, OK) as engine:
        pool = engine.pool(keepalive_s=0)
        assert [await engine.get(pool), await engine.get(pool)] == [b"ok", b"ok"]
        assert (engine.num_connections, pool.num_open) == (2, 0)


@pytest.mark.parametrize("version", [b"HTTP/1.0", b"HTTP/1.1"])
async def test_an_engine_that_says_close_is_believed(version: bytes) -> None:
    said = version + b" 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok"
    async with Engine([said, HOLD], OK) as engine:
        pool = engine.pool()
        assert await engine.get(pool) == b"ok"
        assert pool.num_open == 0
        assert await engine.get(pool) == b"ok"


async def test_a_kept_connection_that_the_engine_closed_is_not_used() -> None:
    async with Engine([OK, CLOSE], OK) as engine:
        pool = engine.pool()
        await engine.get(pool)
        await asyncio.sleep(0.05)
        assert await engine.get(pool) == b"ok"
        assert engine.num_requests == 2


async def test_a_kept_connection_that_closes_as_it_is_asked_is_replaced_once() -> None:
    async with Engine(OK, [CLOSE], OK, [CLOSE], [CLOSE]) as engine:
        pool = engine.pool()
        await engine.get(pool)
        assert await engine.get(pool) == b"ok"
        assert engine.num_requests == 3
        with pytest.raises(Dropped):
            await engine.get(pool)
        assert engine.num_requests == 5


async def test_a_request_that_had_the_beginning_of_an_answer_is_not_sent_again() -> None:
    async with Engine(OK, [b"HTTP/1.1 2", CLOSE], OK) as engine:
        pool = engine.pool()
        await engine.get(pool)
        with pytest.raises(Dropped):
            await engine.get(pool)
        assert engine.num_requests == 2


@pytest.mark.parametrize("pause_s", [0.0, 0.05])
async def test_what_nobody_asked_for_is_not_the_answer_to_the_next_request(pause_s: float) -> None:
    """Behind an answer in one piece with it, or while the connection is idle."""
    async with Engine(
        [OK, pause_s, OK.replace(b"ok", b"no")] if pause_s else OK + OK.replace(b"ok", b"no"), OK
    ) as engine:
        pool = engine.pool()
        assert await engine.get(pool) == b"ok"
        await asyncio.sleep(2 * pause_s)
        assert await engine.get(pool) == b"ok"
        assert engine.num_connections == 2


async def test_what_arrives_in_the_moment_of_asking_is_noticed_too() -> None:
    """The loop has not come to it yet, but the system knows."""
    ready, noticed = asyncio.Event(), asyncio.Event()
    async with Engine([OK, ready, OK.replace(b"ok", b"no")], OK) as engine:
        pool = engine.pool()
        assert await engine.get(pool) == b"ok"
        (kept,) = pool._idle
        transport = kept._transport
        assert transport is not None
        transport.pause_reading()  # a loop that is busy elsewhere
        ready.set()
        await asyncio.sleep(0.05)
        assert not kept.is_quiet()
        assert await engine.get(pool) == b"ok"
        noticed.set()


async def test_leaving_closes_the_socket_at_once() -> None:
    async with Engine([b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", HOLD]) as engine:
        pool = engine.pool()
        (await pool.send(*request(engine.url), soon())).close()
        await asyncio.wait_for(engine.left.wait(), 0.5)
        assert pool.num_open == 0


async def test_a_task_that_is_cancelled_leaves_nothing_open() -> None:
    async with Engine(*[[HOLD]] * 20) as engine:
        pool = engine.pool()
        tasks = [asyncio.create_task(engine.get(pool)) for _ in range(20)]
        for number, task in enumerate(tasks):
            await asyncio.sleep(0.002 * (number % 5))
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)
        assert pool.num_open == 0


async def test_closing_the_pool_tells_whoever_waits() -> None:
    async with Engine([HOLD]) as engine:
        pool = engine.pool()
        waiting = asyncio.create_task(engine.get(pool))
        await asyncio.sleep(0.05)
        pool.close()
        with pytest.raises(Dropped):
            await waiting


@pytest.mark.parametrize("greeting", [b"SSH-2.0-OpenSSH_9.2\r\n", b""])
async def test_what_speaks_or_leaves_before_it_is_asked_is_no_engine(greeting: bytes) -> None:
    writers = []

    def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        writer.write(greeting)
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        pool = _pool(url)
        for _ in range(20):  # before, while or after the request is written
            with pytest.raises((Dropped, BadHTTP)):
                await pool.send(*request(url), soon())
        assert pool.num_open == 0
        pool.close()


async def test_a_connection_that_is_gone_as_soon_as_it_stands_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop may tell of the end before whoever waited for the connection has run."""
    stands = Connection.connection_made

    def gone_at_once(self: Connection, transport: asyncio.BaseTransport) -> None:
        stands(self, transport)
        self.close()

    async with Engine(OK) as engine:
        pool = engine.pool()
        monkeypatch.setattr(Connection, "connection_made", gone_at_once)
        with pytest.raises(Dropped):
            await engine.get(pool)
        assert pool.num_open == 0


async def test_nobody_listens() -> None:
    async with Engine() as engine:
        url = engine.url
    with pytest.raises(NotAccepting):
        await _pool(url).send(*request(url), soon())


async def test_a_full_backlog_ends_at_the_deadline_to_connect() -> None:
    with socket.socket() as listener, contextlib.ExitStack() as stack:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ConnectTimeout):
            await _pool(url, connect_timeout_s=0.1).send(*request(url), soon())


async def test_a_name_that_nobody_knows() -> None:
    with pytest.raises(Unreachable, match=r"there is no host 'engine\.invalid'"):
        await _pool("http://engine.invalid").send(*request("http://engine.invalid"), soon())


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999", "http://[::1"])
def test_no_address_at_all(url: str) -> None:
    with pytest.raises(Unreachable, match="that is no address"):
        Origin.of(url)


async def test_an_outage_of_names_is_not_one_of_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    async with Engine(OK, OK) as engine:
        pool = _pool(f"http://localhost:{engine.port}", keepalive_s=0)
        assert await whole(await pool.send(*request(engine.url), soon())) == b"ok"
        pool._addresses.doubt()

        async def nobody_knows(*_: Any, **__: Any) -> None:
            raise socket.gaierror(socket.EAI_AGAIN, "try again")

        monkeypatch.setattr(loop, "getaddrinfo", nobody_knows)
        assert await whole(await pool.send(*request(engine.url), soon())) == b"ok"
        pool.close()


async def test_a_name_server_that_says_nothing_is_asked_once_and_holds_up_no_old_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = asyncio.get_running_loop()
    asked: list[str] = []

    async def says_nothing(host: str, *_: Any, **__: Any) -> None:
        asked.append(host)
        await asyncio.Event().wait()

    async with Engine(OK, OK) as engine:
        known = _pool(f"http://localhost:{engine.port}", keepalive_s=0)
        assert await whole(await known.send(*request(engine.url), soon())) == b"ok"
        monkeypatch.setattr(loop, "getaddrinfo", says_nothing)
        known._addresses.doubt()
        assert await whole(await known.send(*request(engine.url), soon())) == b"ok"
        lost = _pool("http://engine.invalid", connect_timeout_s=0.2)
        sent = (lost.send(*request("http://engine.invalid"), soon()) for _ in range(20))
        told = await asyncio.gather(*sent, return_exceptions=True)
        assert {type(each) for each in told} == {ConnectTimeout}
        assert asked == ["localhost", "engine.invalid"]
        for pool in (known, lost):
            pool.close()
        async with asyncio.timeout(5):
            while any("_look_up" in repr(task) for task in asyncio.all_tasks()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_of_several_addresses_one_that_answers_is_enough() -> None:
    async with Engine(OK) as engine:
        pool = _pool(f"http://localhost:{engine.port}")
        deaf = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", engine.port, 0, 0))
        ours = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", engine.port))
        pool._addresses._found, pool._addresses._until = [deaf, ours], soon(60)
        assert await whole(await pool.send(*request(engine.url), soon())) == b"ok"
        pool.close()


def test_a_header_that_would_be_read_as_two_is_refused() -> None:
    start = opening("POST", "http://h/x", {})
    for value in ("a\r\nX-Key: b", "a\nb", "a\rb", "a\0b"):
        with pytest.raises(ValueError, match="line end"):
            head(start, {"X-A": value}, 0)


@pytest.mark.parametrize(
    ("url", "first", "host"),
    [
        ("http://h/v1/x", b"POST /v1/x HTTP/1.1", b"Host: h"),
        ("http://h:8000/a b?c=ü", b"POST /a%20b?c=%C3%BC HTTP/1.1", b"Host: h:8000"),
        ("https://[::1]:8443/x", b"POST /x HTTP/1.1", b"Host: [::1]:8443"),
    ],
)
def test_the_first_lines_of_a_request(url: str, first: bytes, host: bytes) -> None:
    assert head(opening("POST", url, {"A": "b"}), {"C": "d"}, 3).split(b"\r\n") == [
        *(first, host, b"A: b", b"C: d", b"Content-Length: 3"), b"", b"",
    ]  # fmt: skip


def _pool(url: str, **options: Any) -> Pool:
    return Pool(Origin.of(url), **{"connect_timeout_s": 2.0, "keepalive_s": 4.0, **options})
