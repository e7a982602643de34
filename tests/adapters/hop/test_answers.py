"""What comes back on one connection: every form of a body, what precedes one, and nonsense in its place."""

from __future__ import annotations

import asyncio
import gzip
import time
import zlib
from collections.abc import Callable

import pytest

from adapters.wire.hop.connection import MAX_HEAD_BYTES
from adapters.wire.hop.errors import BadHTTP, CutOff, Dropped, HopError
from adapters.wire.hop.inflate import MAX_PIECE
from adapters.wire.hop.response import MAX_HELD_BYTES
from tests.adapters.hop.engine import CLOSE, HOLD, OK, Engine, request, soon, whole

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
UNTIL_CLOSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n"


def chunked(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)


BODIES = {
    "with a length": (b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nabcdef", b"abcdef"),
    "empty": (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b""),
    "without one": (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
    "in chunks": (CHUNKED + chunked(b"abc", b"def") + b"0\r\n\r\n", b"abcdef"),
    "in chunks with extensions": (CHUNKED + b"3;a=b\r\nabc\r\n0;c\r\n\r\n", b"abc"),
    "in chunks with trailers": (CHUNKED + chunked(b"abc") + b"0\r\nX-Sum: 17\r\n\r\n", b"abc"),
    "in chunks with spaces after their sizes": (CHUNKED + b"3  \r\nabc\r\n0\r\n\r\n", b"abc"),
    "after 100 Continue": (b"HTTP/1.1 100 Continue\r\n\r\n" + OK, b"ok"),
    "after early hints": (b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" * 3 + OK, b"ok"),
}


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("cut", ["whole", "byte by byte"])
async def test_a_body_is_read_whole_and_its_connection_used_again(name: str, cut: str) -> None:
    said, body = BODIES[name]
    steps = [said] if cut == "whole" else [step for at in range(len(said)) for step in (said[at : at + 1], 0.0)]
    async with Engine(steps, OK) as engine:
        pool = engine.pool()
        assert await engine.get(pool) == body
        assert await engine.get(pool) == b"ok"
        assert engine.num_connections == 1


async def test_a_body_without_length_ends_with_its_connection() -> None:
    async with Engine([UNTIL_CLOSE, b"abc", 0.01, b"def", CLOSE]) as engine:
        pool = engine.pool()
        assert await engine.get(pool) == b"abcdef"
        assert pool.num_open == 0


@pytest.mark.parametrize("pack", [gzip.compress, zlib.compress], ids=["gzip", "deflate"])
async def test_a_body_that_is_compressed_unasked_is_unpacked(
    pack: Callable[[bytes], bytes], request: pytest.FixtureRequest
) -> None:
    encoding = "gzip" if pack is gzip.compress else "deflate"
    packed = pack(b"x" * 5 * MAX_PIECE)
    headed = f"HTTP/1.1 200 OK\r\nContent-Encoding: {encoding}\r\nContent-Length: {len(packed)}\r\n\r\n".encode()
    async with Engine(headed + packed) as engine:
        response = await engine.pool().send(*request_to(engine), soon())
        sizes = []
        while data := await response.read(soon()):
            sizes.append(len(data))
        assert sum(sizes) == 5 * MAX_PIECE
        assert max(sizes) <= MAX_PIECE  # a few bytes may stand for gigabytes


def request_to(engine: Engine, body: bytes = b"{}") -> tuple[bytes, bytes]:
    return request(engine.url, body)


BROKEN: dict[str, tuple[list[bytes | str], type[HopError]]] = {
    "nothing": ([CLOSE], Dropped),
    "half a head": ([b"HTTP/1.1 200 OK\r\nContent-", CLOSE], Dropped),
    "another protocol": ([b"SSH-2.0-OpenSSH_9.2\r\n"], BadHTTP),
    "another protocol after an upgrade": ([b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n"], BadHTTP),
    "what precedes answers, without end": ([b"HTTP/1.1 100 Continue\r\n\r\n" * 20], BadHTTP),
    "a header without end": ([b"HTTP/1.1 200 OK\r\nX: ", *[b"y" * 65536] * 8], BadHTTP),
    "headers without end": ([b"HTTP/1.1 200 OK\r\n", *[b"X: y\r\n" * 10_000] * 8], BadHTTP),
    "two lengths": ([b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nok"], BadHTTP),
    "a length and chunks": ([b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n" + CHUNKED[17:] + b"0\r\n\r\n"], BadHTTP),
    "a body that is cut": ([b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc", CLOSE], CutOff),
    "a chunk that is cut": ([CHUNKED + b"9\r\nabc", CLOSE], CutOff),
    "chunks without end": ([CHUNKED + chunked(b"abc"), CLOSE], CutOff),
    "a chunk size that is no number": ([CHUNKED + b"3\r\nabc\r\nxyzzy\r\n"], CutOff),
    "trailers without end": ([CHUNKED + b"0\r\n", *[b"X: y\r\n" * 10_000] * 8], BadHTTP),
    "an extension without end": ([CHUNKED + b"3;", *[b"y" * 65536] * 8], BadHTTP),
}


@pytest.mark.parametrize("name", BROKEN)
async def test_nonsense_is_one_error_and_ends_the_connection(name: str) -> None:
    steps, kind = BROKEN[name]
    async with Engine([*steps, HOLD]) as engine:
        pool = engine.pool()
        with pytest.raises(HopError) as caught:
            await engine.get(pool)
        assert type(caught.value) is kind
        assert pool.num_open == 0
        assert engine.num_requests == 1


async def test_what_came_before_the_end_is_not_lost() -> None:
    async with Engine([CHUNKED + chunked(b"abc"), 0.01, chunked(b"def"), CLOSE]) as engine:
        response = await engine.pool().send(*request_to(engine), soon())
        async with asyncio.timeout(5):
            while response._error is None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert await response.read(soon()) == b"abcdef"
        with pytest.raises(CutOff):
            await response.read(soon())


async def test_an_engine_is_held_back_while_its_reader_is_behind() -> None:
    pieces = [chunked(b"x" * 65536)] * 640  # 40 MiB
    async with Engine([CHUNKED, *pieces, b"0\r\n\r\n"], OK) as engine:
        pool = engine.pool()
        response = await engine.pool().send(*request_to(engine), soon())
        await asyncio.sleep(0.2)
        assert engine.num_sent < 16 << 20  # the sockets' own buffers, and no more of ours than this:
        assert sum(map(len, response._pieces)) <= 2 * MAX_HELD_BYTES
        assert len(await whole(response)) == 40 << 20
        assert await engine.get(pool) == b"ok"


async def test_a_body_in_tiny_pieces_costs_linear_time() -> None:
    async def seconds(num_bytes: int) -> float:
        said = CHUNKED + chunked(b"x") * num_bytes + b"0\r\n\r\n"
        async with Engine(said) as engine:
            begun = time.process_time()
            assert len(await engine.get(engine.pool())) == num_bytes
            return time.process_time() - begun

    await seconds(10_000)
    small, large = await seconds(50_000), await seconds(400_000)
    assert large < 3 * 8 * small


async def test_a_large_body_leaves_whole() -> None:
    async with Engine(OK, OK) as engine:
        pool = engine.pool()
        assert await whole(await pool.send(*request_to(engine, b"x" * (8 << 20)), soon())) == b"ok"
        assert await engine.get(pool) == b"ok"
        assert engine.num_connections == 1


async def test_an_engine_that_answers_before_it_has_read_all_is_heard_and_its_connection_not_used_again() -> None:
    refusal = b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nbig"
    async with Engine([refusal, HOLD], reads_bodies=False) as engine:
        pool = engine.pool()
        response = await pool.send(*request_to(engine, b"x" * (32 << 20)), soon())
        assert (response.status, await whole(response)) == (413, b"big")
        assert pool.num_open == 0


async def test_silence_ends_at_the_deadline() -> None:
    async with Engine([HOLD], [CHUNKED + chunked(b"a"), HOLD]) as engine:
        pool = engine.pool()
        begun = asyncio.get_running_loop().time()
        with pytest.raises(TimeoutError):
            await pool.send(*request_to(engine), soon(0.1))
        response = await pool.send(*request_to(engine), soon())
        assert await response.read(soon()) == b"a"
        with pytest.raises(TimeoutError):
            await response.read(soon(0.1))
        assert 0.19 < asyncio.get_running_loop().time() - begun < 2
        response.close()
        await asyncio.wait_for(engine.left.wait(), 1)
        assert pool.num_open == 0


def test_a_head_has_a_bound() -> None:
    assert MAX_HEAD_BYTES == 64 << 10
