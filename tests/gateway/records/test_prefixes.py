"""What tenants get from prefix caches, and where the head of their prompts spoils it."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.fake import Adapter as FakeAdapter
from adapters.types import Chunk, CompletionRequest, Usage, decode_chat
from gateway.records import prefixes
from gateway.records.fingerprints import (
    MAX_CHARS,
    MIN_LOST_CHARS,
    MIN_PROMPTS,
    Fingerprint,
    compared,
    fingerprint,
    lost_reuse,
)
from gateway.records.prefixes import MAX_PAIRS, RING, PrefixWatch, Report, head_of
from gateway.records.trace import Trace
from gateway.tenants.keys import KeyStore, NewKey
from tests.gateway.rig import Gateway, Start, fake_model, model, until

ROOT = Path(__file__).parents[3]
SALT = "salt"
WORDS = (ROOT / "docs" / "api.md").read_text().split()


def prose(num_chars: int, seed: int = 1) -> str:
    chosen = random.Random(seed)
    return " ".join(chosen.choice(WORDS) for _ in range(num_chars))[:num_chars]


def marks(text: str) -> Fingerprint:
    return fingerprint(text, [(0, "prompt")], SALT)


RULES = prose(6000)


# ------------------------------------------------------------------------------------------------------ the pure core


@given(st.text(max_size=3000))
def test_a_fingerprint_is_of_the_whole_text_and_holds_none_of_it(text: str) -> None:
    mark = marks(text)
    assert mark.num_chars == len(text)
    assert mark == marks(text)
    assert all(length <= 160 for length in mark.lengths)
    assert msgspec.structs.astuple(mark)[2] == ((0, "prompt"),)


def test_a_fingerprint_is_bounded() -> None:
    mark = marks(prose(200_000))
    assert mark.num_chars <= MAX_CHARS
    assert len(mark.hashes) <= MAX_CHARS // 40 + 1


def test_another_salt_gives_another_fingerprint() -> None:
    assert not set(marks(RULES).hashes) & set(fingerprint(RULES, [], "pepper").hashes)


@given(st.text(max_size=2000), st.text(max_size=2000))
def test_what_is_compared_adds_up(one: str, other: str) -> None:
    found = compared(marks(one), marks(other))
    assert 0 <= found.same <= len(one)
    assert one[: found.same] == other[: found.same]
    assert 0 <= found.lost <= found.rest == len(one) - found.same
    assert found.same <= found.differs_by


@settings(max_examples=50)
@given(
    st.lists(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=60), min_size=4, max_size=8, unique=True
    )
)
def test_whatever_varies_at_the_head_is_found_however_long_it_is(heads: list[str]) -> None:
    finding = lost_reuse([marks(f"{head} {RULES}") for head in heads])
    assert finding is not None
    assert finding.same <= 160
    assert finding.lost > 0.9 * len(RULES)


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("the same text", [RULES] * 6),
        ("a varying end", [f"{RULES} {prose(500, seed)}" for seed in range(6)]),
        ("a conversation that grows", [f"{RULES} {prose(300 * turn, 7)}" for turn in range(1, 7)]),
        ("nothing in common", [prose(5000, seed) for seed in range(6)]),
        ("little in common", [f"{seed} {prose(200)} {prose(5000, seed)}" for seed in range(2, 8)]),
        ("short prompts", [f"{seed} {RULES[: MIN_LOST_CHARS - 100]}" for seed in range(6)]),
        ("two prompts", [f"{seed} {RULES}" for seed in range(2)]),
        ("some of many", [f"{seed} {RULES}" for seed in range(2)] + [prose(5000, seed) for seed in range(2, 8)]),
    ],
)
def test_prompts_that_lose_nothing_get_no_advice(name: str, texts: list[str]) -> None:
    assert lost_reuse([marks(text) for text in texts]) is None, name


def test_a_difference_in_the_middle_is_located() -> None:
    chats = [
        decode_chat(
            json.dumps(
                {
                    "model": "m",
                    "messages": [
                        {"role": "system", "content": RULES[:1000]},
                        {"role": "user", "content": f"I am user number {number}."},
                        {"role": "user", "content": RULES},
                    ],
                }
            ).encode()
        )
        for number in range(1, 6)
    ]
    finding = lost_reuse([fingerprint(*head_of(chat), SALT) for chat in chats])
    same = head_of(chats[0])[0].index("number 1.") + len("number ")
    assert finding is not None
    assert same - 100 <= finding.same <= same < finding.differs_by
    assert finding.lost > 5500
    assert finding.part in ("message 1, system", "message 2, user")


def test_tools_in_another_order_are_named() -> None:
    tools = [
        {"type": "function", "function": {"name": f"tool_{number}", "description": prose(400, number)}}
        for number in range(8)
    ]
    chats = []
    for number in range(6):
        random.Random(number).shuffle(tools)
        body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "tools": tools}
        chats.append(decode_chat(json.dumps(body).encode()))
    finding = lost_reuse([fingerprint(*head_of(chat), SALT) for chat in chats])
    assert finding is not None
    assert finding.part == "tools"


def test_prompts_of_token_ids_are_left_alone() -> None:
    text, parts = head_of(CompletionRequest(model="m", prompt=[1, 2, 3]))
    assert (text, parts) == ("", [(0, "prompt")])


# ------------------------------------------------------------------------------------------------------------ bounds


def test_tenants_and_models_without_end_are_forgotten_in_turn() -> None:
    watch = PrefixWatch(gives_advice=True)
    request = CompletionRequest(model="m", prompt=RULES)
    for number in range(2 * MAX_PAIRS):
        trace = Trace(request_id="r", route="/", model=f"m{number}", prompt_tokens=10, cached_tokens=5)
        for _ in range(3 * RING if number < 2 else 1):
            watch.note(trace, request)
        watch.answered(trace)
    assert len(watch.report().rows) == MAX_PAIRS
    assert watch.report().rows[0].model == f"m{2 * MAX_PAIRS - 1}"
    assert max(len(pair.ring) for pair in watch._pairs.values()) <= RING


def test_after_the_first_prompts_only_some_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = []
    monkeypatch.setattr(prefixes, "head_of", lambda request: looked_at.append(1) or ("", []))
    watch = PrefixWatch(gives_advice=True)
    for _ in range(1000):
        watch.note(Trace(request_id="r", route="/", model="m"), CompletionRequest(model="m", prompt="x"))
    assert len(looked_at) < 100
    looked_at.clear()
    off = PrefixWatch(gives_advice=False)
    off.note(Trace(request_id="r", route="/", model="m"), CompletionRequest(model="m", prompt="x"))
    assert not looked_at


# ------------------------------------------------------------------------------------------------- through a gateway


class CachingEngine(FakeAdapter):
    """A fake that has read half of every prompt before."""

    async def generate(self, request: Any, *, request_id: str) -> Any:
        async for chunk in super().generate(request, request_id=request_id):
            told = chunk.usage
            yield chunk if told is None else Chunk(usage=Usage(100, told.completion_tokens, cached_tokens=50))


async def ask(gateway: Gateway, head: str, tail: str = "", **headers: str) -> dict[str, Any]:
    messages = [{"role": "system", "content": f"{head}{RULES}{tail}"}, {"role": "user", "content": "Hi"}]
    status, body, _ = await gateway.post("/v1/chat/completions", {"model": "m", "messages": messages}, **headers)
    assert status == 200, body
    return dict(body)


async def test_an_admin_reads_rates_and_advice_by_tenant(start: Start, tmp_path: Path) -> None:
    keys = KeyStore(tmp_path)
    blue = {"x-api-key": keys.create(NewKey(name="blue-1", tenant="blue"))}
    green = {"x-api-key": keys.create(NewKey(name="green"))}
    admin = keys.create(NewKey(name="root", role="admin"))
    gateway = await start(model({"engine": "caching"}), engines={"caching": CachingEngine})
    for number in range(5):
        await ask(gateway, f"It is 2026-11-30 12:00:0{number}. ", **blue)
        await ask(gateway, "", f" It is 2026-11-30 12:00:0{number}.", **green)
    status, body = await _admin_reads(gateway, blue["x-api-key"])
    assert status == 403
    status, body = await _admin_reads(gateway, admin)
    assert status == 200
    report = msgspec.json.decode(body, type=Report)
    assert [(row.tenant, row.model, row.requests, row.hit_rate) for row in report.rows] == [
        ("green", "m", 5, 0.5), ("blue", "m", 5, 0.5),
    ]  # fmt: skip
    good, spoilt = report.rows
    assert good.advice is None
    assert spoilt.advice is not None
    assert spoilt.advice.same_chars < 60
    assert spoilt.advice.lost_share > 0.9
    assert "message 1, system" in spoilt.advice.sentence
    assert not any(word in body.decode() for word in ("2026-11-30", RULES[:40]))

    command = [sys.executable, "-m", "goodgate", "prefixes", "--url", gateway.url]
    shown = await _run(command, GOODGATE_API_KEY=admin)
    assert "50%" in shown
    assert "move what varies behind what stays" in shown


async def _admin_reads(gateway: Gateway, secret: str) -> tuple[int, bytes]:
    async with gateway.client.get(f"{gateway.url}/admin/prefixes", headers={"x-api-key": secret}) as response:
        return response.status, await response.read()


async def _run(command: list[str], **environment: str) -> str:
    done = await asyncio.to_thread(
        subprocess.run,
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


async def test_an_engine_that_tells_nothing_of_its_cache_has_no_rate(start: Start) -> None:
    class Silent(FakeAdapter):
        async def generate(self, request: Any, *, request_id: str) -> Any:
            async for chunk in super().generate(request, request_id=request_id):
                yield chunk if chunk.usage is None else Chunk(usage=Usage(100, 5))

    gateway = await start(model({"engine": "silent"}), engines={"silent": Silent})
    await ask(gateway, "")
    _, body = await gateway.get("/admin/prefixes")
    assert [row["hit_rate"] for row in body["rows"]] == [None]
    assert body["rows"][0]["tenant"] == "anonymous"


async def test_advice_can_be_turned_off(start: Start) -> None:
    gateway = await start(fake_model(), prefixes={"advice": False})
    for number in range(4):
        await ask(gateway, f"{number} ")
    _, body = await gateway.get("/admin/prefixes")
    assert body["rows"][0]["advice"] is None


@pytest.mark.model
@pytest.mark.slow
async def test_the_native_engine_reuses_nothing_behind_a_varying_head_and_most_of_it_before_one(start: Start) -> None:
    from adapters.config import goodgate_home
    from adapters.models.model_store import DEFAULT_MODEL, ModelStore

    store = ModelStore(goodgate_home())
    if DEFAULT_MODEL not in [each.name for each in store.list()]:
        store.pull(DEFAULT_MODEL)
    options = {"model": DEFAULT_MODEL, "kv_cache_mib": 64}
    rates, rules = [], RULES[: int(1.4 * MIN_LOST_CHARS)]  # hardly more than advice is given for: it is all computed
    for varies_first in (True, False):
        gateway = await start(model({"engine": "native", "options": options}), is_ready=False)
        await until(lambda gateway=gateway: gateway.fleet.replicas[0].is_ready, timeout_s=60)  # type: ignore[misc]
        for number in range(MIN_PROMPTS):
            stamp = f"It is 12:0{number}. "
            content = stamp + rules if varies_first else rules + stamp
            messages = [{"role": "system", "content": content}, {"role": "user", "content": "Hi"}]
            assert (await gateway.chat(messages=messages, max_tokens=1))[0] == 200
        _, body = await gateway.get("/admin/prefixes")
        [row] = body["rows"]
        rates.append(row["hit_rate"])
        assert (row["advice"] is not None) == varies_first
    assert rates[0] < 0.05
    assert rates[1] > 0.5
