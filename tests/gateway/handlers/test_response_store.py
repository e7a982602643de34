"""What is kept of /v1/responses stays within its bounds, goes in the right order, and is there for every worker."""

from __future__ import annotations

import asyncio
import multiprocessing
import sqlite3
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.config import ConfigError, ResponsesConfig, parse_config
from gateway.handlers.response_store import FILE, ResponseStore, Stored, store_of
from gateway.web.workers import share_of
from tests.gateway.rig import fake_model

KEEPS = ("memory", "file")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def opened(config: ResponsesConfig, home: Path, clock: Clock | None = None) -> AsyncIterator[ResponseStore]:
    path = None if config.keep == "memory" else home / FILE
    store = ResponseStore(config, path, clock=clock or Clock())
    store.open()
    try:
        yield store
    finally:
        await store.close()


def stored(text: str, size: int = 0) -> Stored:
    return Stored(response=text.encode(), items=b"x" * size)


@pytest.mark.parametrize("keep", KEEPS)
async def test_what_is_put_is_there_until_it_is_deleted(tmp_path: Path, keep: Any) -> None:
    async with opened(ResponsesConfig(keep=keep), tmp_path) as store:
        assert await store.get("a") is None
        assert await store.put("a", stored("one", 5))
        assert await store.get("a") == stored("one", 5)
        assert await store.delete("a")
        assert await store.get("a") is None
        assert not await store.delete("a")


@pytest.mark.parametrize("keep", KEEPS)
async def test_beyond_the_count_the_one_used_longest_ago_goes(tmp_path: Path, keep: Any) -> None:
    async with opened(ResponsesConfig(keep=keep, max_responses=3), tmp_path) as store:
        for id in "abc":
            await store.put(id, stored(id))
        await store.get("a")
        await store.put("d", stored("d"))
        assert [id for id in "abcd" if await store.get(id)] == ["a", "c", "d"]


@pytest.mark.parametrize("keep", KEEPS)
async def test_beyond_the_bytes_the_oldest_go_and_what_alone_is_too_large_is_not_taken(
    tmp_path: Path, keep: Any
) -> None:
    async with opened(ResponsesConfig(keep=keep, max_mib=1), tmp_path) as store:
        for id in "abc":
            await store.put(id, stored(id, 400 << 10))
        assert [id for id in "abc" if await store.get(id)] == ["b", "c"]
        assert not await store.put("d", stored("d", 1 << 20))
        assert [id for id in "bcd" if await store.get(id)] == ["b", "c"]


@pytest.mark.parametrize("keep", KEEPS)
async def test_each_goes_after_its_time(tmp_path: Path, keep: Any) -> None:
    clock = Clock()
    async with opened(ResponsesConfig(keep=keep, ttl_s=10), tmp_path, clock) as store:
        await store.put("a", stored("a"))
        clock.now += 6
        await store.put("b", stored("b"))
        assert await store.get("a") is not None  # being used does not give it more time
        clock.now += 5
        assert await store.get("a") is None
        assert not await store.delete("a")
        assert await store.get("b") is not None


async def test_2000_responses_stay_within_the_bounds(tmp_path: Path) -> None:
    async with opened(ResponsesConfig(max_responses=50), tmp_path) as store:
        for number in range(2000):
            await store.put(str(number), stored("x"))
        count = await store._do(lambda: store._db.execute("SELECT COUNT(*), MIN(used) FROM responses").fetchone())
        assert count == (50, 1951)


async def test_a_file_outlives_its_gateway_and_is_nobody_elses_to_read(tmp_path: Path) -> None:
    config = ResponsesConfig(keep="file")
    async with opened(config, tmp_path) as store:
        await store.put("a", stored("kept"))
    for path in (tmp_path / FILE).parent.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    async with opened(config, tmp_path) as store:
        assert await store.get("a") == stored("kept")


async def test_what_was_deleted_is_not_in_the_file_any_more(tmp_path: Path) -> None:
    async with opened(ResponsesConfig(keep="file"), tmp_path) as store:
        await store.put("a", stored("a very private sentence"))
        await store.delete("a")
    assert b"private" not in b"".join(path.read_bytes() for path in (tmp_path / FILE).parent.iterdir())


async def test_a_file_of_another_layout_begins_anew(tmp_path: Path) -> None:
    config = ResponsesConfig(keep="file")
    async with opened(config, tmp_path) as store:
        await store.put("a", stored("a"))
        await store._do(lambda: store._db.execute("ALTER TABLE responses DROP COLUMN items"))
        await store._do(lambda: store._db.execute("PRAGMA user_version = 99"))
    async with opened(config, tmp_path) as store:
        assert await store.get("a") is None
        assert await store.put("b", stored("b"))


def test_a_file_that_is_no_database_is_said_to_be_none(tmp_path: Path) -> None:
    (tmp_path / FILE).parent.mkdir()
    (tmp_path / FILE).write_bytes(b"something else entirely" * 100)
    store = store_of(ResponsesConfig(keep="file"), tmp_path)
    assert store is not None
    with pytest.raises(ConfigError, match=r"responses\.sqlite.*not a database.*responses\.keep"):
        store.open()


def put_many(home: Path, name: str, num: int) -> None:
    """One worker: puts its own, and finds each of them again."""

    async def work() -> None:
        async with opened(ResponsesConfig(keep="file"), home) as store:
            for number in range(num):
                await store.put(f"{name}{number}", stored(name))
                assert await store.get(f"{name}{number}") == stored(name)

    asyncio.run(work())


async def test_several_workers_share_the_file(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=put_many, args=(tmp_path, name, 100)) for name in "abcd"]
    for worker in workers:
        worker.start()
    for worker in workers:
        await asyncio.to_thread(worker.join)
        assert worker.exitcode == 0
    async with opened(ResponsesConfig(keep="file"), tmp_path) as store:
        assert [await store.get(f"{name}99") for name in "abcd"] == [stored(name) for name in "abcd"]
    with sqlite3.connect(tmp_path / FILE) as db:
        assert db.execute("SELECT COUNT(*), COUNT(DISTINCT used) FROM responses").fetchone() == (400, 400)
    db.close()


def test_several_workers_keep_nothing_in_memory() -> None:
    config = parse_config({"models": [fake_model()]})
    assert share_of(config, 2).responses.keep == "none"
    assert share_of(config, 1).responses.keep == "memory"
    filed = parse_config({"models": [fake_model()], "responses": {"keep": "file"}})
    assert share_of(filed, 2).responses.keep == "file"
