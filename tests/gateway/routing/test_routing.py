"""Routing over real sockets: what requests have in common brings them to one replica, as far as that serves them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.records.trace import Candidate
from gateway.routing.ask import SESSION_HEADER
from tests.gateway.rig import Gateway, Start, fake, model, until

LONG = "You are a patient assistant. " * 60


async def replica_of(gateway: Gateway, text: str = "Hello", *, session: str = "", **fields: Any) -> str:
    headers = {SESSION_HEADER: session} if session else {}
    body = {"model": "m", "messages": [{"role": "user", "content": text}], **fields}
    status, _, answered = await gateway.post("/v1/chat/completions", body, **headers)
    assert status == 200
    return str(answered["x-goodgate-replica"])


async def test_prompts_that_begin_alike_go_to_one_replica(start: Start) -> None:
    gateway = await start(model(*(fake(f"r{n}") for n in range(3)), routing="prefix_affinity"))
    first = await replica_of(gateway, f"{LONG} One?")
    assert {await replica_of(gateway, f"{LONG} {number}?") for number in range(8)} == {first}
    others = {await replica_of(gateway, f"{number} {LONG}") for number in range(8)}
    assert len(others) > 1
    metrics = await (await gateway.client.get(f"{gateway.url}/metrics")).text()
    assert "goodgate_prefix_index_evictions_total 0.0" in metrics
    assert "goodgate_prefix_index_bytes 0.0" not in metrics


async def test_a_hot_replica_is_left_though_it_has_read_the_prompt(start: Start) -> None:
    gateway = await start(model(*(fake(f"r{n}", ttft_ms=300) for n in range(3)), routing="prefix_affinity"))
    warm = await replica_of(gateway, LONG)
    burst = await asyncio.gather(*(replica_of(gateway, f"{LONG} {number}") for number in range(20)))
    assert len(set(burst)) > 1
    assert 5 <= burst.count(warm) <= 15


async def test_a_session_stays_where_it_is(start: Start) -> None:
    gateway = await start(model(*(fake(f"r{n}") for n in range(4)), routing="session_affinity"))
    names = [f"chat-{number}" for number in range(12)]
    where = {name: await replica_of(gateway, session=name) for name in names}
    assert {name: await replica_of(gateway, session=name) for name in names} == where
    assert len(set(where.values())) > 1
    by_key = [await replica_of(gateway, prompt_cache_key=name, user="u") for name in names]
    by_user = [await replica_of(gateway, user=name) for name in names]
    assert by_key == by_user == list(where.values())


async def test_a_session_moves_while_its_replica_is_away_and_comes_back_to_it(start: Start) -> None:
    gateway = await start(model(*(fake(f"r{n}") for n in range(3)), routing="session_affinity"))
    home = await replica_of(gateway, session="s")
    replica = next(each for each in gateway.fleet.replicas if each.name == home)
    state, replica.state = replica.state, type(replica.state).UNHEALTHY
    away = {await replica_of(gateway, session="s") for _ in range(4)}
    replica.state = state
    assert len(away) == 1
    assert home not in away
    assert await replica_of(gateway, session="s") == home


@pytest.mark.parametrize("session", ["two words", "x" * 257, "naïve"])
async def test_a_session_that_is_no_word_is_refused_by_name(start: Start, session: str) -> None:
    gateway = await start(model(fake(), routing="session_affinity"))
    status, body, _ = await gateway.post(
        "/v1/chat/completions",
        {"model": "m", "messages": [{"role": "user", "content": "Hi"}]},
        **{SESSION_HEADER: session},
    )
    assert status == 400
    assert SESSION_HEADER in body["error"]["message"]


async def test_the_dearer_replica_serves_only_what_the_cheap_one_has_no_room_for(start: Start) -> None:
    cheap = {**fake("cheap", ttft_ms=600), "cost": 1, "max_in_flight": 2}
    gateway = await start(model({**fake("dear", ttft_ms=600), "cost": 5}, cheap, routing="cost"))
    waiting = [asyncio.create_task(replica_of(gateway)) for _ in range(2)]
    await until(lambda: gateway.fleet.replicas[1].in_flight == 2)
    assert await replica_of(gateway) == "dear"
    assert await asyncio.gather(*waiting) == ["cheap", "cheap"]
    assert await replica_of(gateway) == "cheap"


async def test_weights_and_lots_share_the_load(start: Start) -> None:
    big = {**fake("big"), "weight": 3}
    gateway = await start(model(big, fake("small"), routing="weighted"))
    assert [await replica_of(gateway) for _ in range(20)].count("big") in (14, 15, 16)
    gateway = await start(model(*(fake(f"r{n}") for n in range(3)), routing="power_of_two"))
    assert {await replica_of(gateway) for _ in range(40)} == {"r0", "r1", "r2"}


async def test_a_full_replica_overflows_under_every_policy(start: Start) -> None:
    first = {"name": "m", "replicas": [{**fake("first", ttft_ms=600), "max_in_flight": 1}]}
    second = {"name": "n", "replicas": [fake("second")]}
    gateway = await start(first, second, groups=[{"name": "g", "models": ["m", "n"]}])
    waiting = asyncio.create_task(replica_of(gateway, model="g"))
    await until(lambda: gateway.fleet.replicas[0].in_flight == 1)
    assert await replica_of(gateway, model="g") == "second"
    assert await waiting == "first"


def test_a_candidate_holds_numbers_and_names_only() -> None:
    assert set(Candidate.__annotations__.values()) <= {"str", "int", "float", "int | None"}
