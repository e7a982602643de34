"""Tenants do not meet each other's prompts in an engine's prefix cache, and each meets his own."""

from __future__ import annotations

import json
import logging
import stat
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from adapters.errors import InvalidRequest
from adapters.registry import adapter_class
from adapters.types import SALT_HEADER, CacheSalt, ChatRequest, CompletionRequest, Message, decode_chat
from gateway.config import ConfigError, parse_config
from gateway.tenants.keys import Key, KeyStore, NewKey
from gateway.tenants.salts import Salts, kept_key
from tests.gateway.rig import HELLO, Gateway, Reply, Script, Start, Upstream, fake_model, model, until
from tests.native_engine.tiny_llama import write_tiny_chat_llama

UpstreamOf = Callable[[Script], Awaitable[Upstream]]

LONG = "All of this stands at the beginning of every prompt of ours, for several blocks of the cache. " * 2
DIALECTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": HELLO,
    "/v1/completions": {"model": "m", "prompt": "Hello"},
    "/v1/messages": {**HELLO, "max_tokens": 5},
    "/v1/responses": {"model": "m", "input": "Hello"},
}


async def whole(reply: Reply) -> None:
    if reply.request.path == "/v1/completions":
        await reply.begin()
        await reply.event(b'{"choices":[{"index":0,"text":"a","finish_reason":"stop"}]}')
        await reply.done()
    else:
        await reply.answer("a")


def keys_of(home: Path, **tenants: str) -> dict[str, dict[str, str]]:
    """The header of a key for each name, by the tenant whose it is."""
    store = KeyStore(home)
    return {name: {"x-api-key": store.create(NewKey(name=name, tenant=tenant))} for name, tenant in tenants.items()} | {
        "admin": {"x-api-key": store.create(NewKey(name="admin", role="admin"))}
    }


def salts_in(upstream: Upstream) -> list[str | None]:
    return [json.loads(each.body).get("cache_salt") for each in upstream.requests]


# ------------------------------------------------------------------------------------------------ what engines are told


@pytest.mark.replay("G35")
@pytest.mark.parametrize("path", DIALECTS)
async def test_g35_each_tenant_has_a_salt_that_his_keys_share_and_nobody_can_read(
    start: Start, upstream_of: UpstreamOf, tmp_path: Path, path: str
) -> None:
    upstream = await upstream_of(whole)
    keys = keys_of(tmp_path, alice="acme", bob="acme", carol="rival")
    gateway = await start(model(upstream.replica()))
    for name in ("alice", "bob", "carol", "alice"):
        status, answer, _ = await gateway.post(path, DIALECTS[path], **keys[name])
        assert status == 200, answer
    alice, bob, carol, again = salts_in(upstream)
    assert alice == bob == again
    assert alice != carol
    assert alice is not None
    assert len(alice) == 43
    assert not any(name.encode() in each.body for each in upstream.requests for name in ("acme", "rival", "alice"))


async def test_several_prompts_of_one_request_have_one_salt(
    start: Start, upstream_of: UpstreamOf, tmp_path: Path
) -> None:
    upstream = await upstream_of(whole)
    keys = keys_of(tmp_path, alice="acme")
    gateway = await start(model(upstream.replica()))
    await gateway.post("/v1/completions", {"model": "m", "prompt": ["a", "b"]}, **keys["alice"])
    first, second = salts_in(upstream)
    assert first == second is not None


async def test_without_keys_there_is_one_tenant_and_no_salt(
    start: Start, upstream_of: UpstreamOf, tmp_path: Path
) -> None:
    upstream = await upstream_of(whole)
    gateway = await start(model(upstream.replica()))
    assert (await gateway.chat())[0] == 200
    assert salts_in(upstream) == [None]
    assert not (tmp_path / "state" / "cache_salt").exists()


async def test_off_is_off(start: Start, upstream_of: UpstreamOf, tmp_path: Path) -> None:
    upstream = await upstream_of(whole)
    keys = keys_of(tmp_path, alice="acme")
    gateway = await start(model(upstream.replica()), tenants={"isolate_prefix_cache": "off"})
    assert (await gateway.post("/v1/chat/completions", HELLO, **keys["alice"]))[0] == 200
    assert salts_in(upstream) == [None]


CHAT = ChatRequest(model="m", messages=[Message(role="user", content="Hi")], cache_salt=CacheSalt("s4lt"))
COMPLETION = CompletionRequest(model="m", prompt="Hi", cache_salt=CacheSalt("s4lt"))


@pytest.mark.parametrize(
    ("engine", "options", "request_", "told"),
    [
        ("vllm", {}, CHAT, {"cache_salt": "s4lt"}),
        ("vllm", {}, COMPLETION, {"cache_salt": "s4lt"}),
        ("sglang", {}, CHAT, {"cache_salt": "s4lt"}),
        ("sglang", {}, COMPLETION, {"cache_salt": "s4lt"}),
        ("sglang", {"route": "native"}, COMPLETION, {"extra_key": "s4lt"}),
        ("tensorrt_llm", {}, CHAT, {"cache_salt": "s4lt"}),
        ("tensorrt_llm", {}, COMPLETION, {}),  # it would answer 400 to a field that it does not know there
        ("llama_cpp", {}, CHAT, {}),
        ("openai_compatible", {}, CHAT, {}),
        ("goodgate_peer", {}, CHAT, {}),
        ("goodgate_peer", {"tells_tenants": True}, CHAT, {SALT_HEADER: "s4lt"}),
    ],
)
async def test_an_engine_is_told_in_its_own_words_and_declares_it(
    engine: str, options: dict[str, Any], request_: ChatRequest | CompletionRequest, told: dict[str, str]
) -> None:
    kind = adapter_class(engine)
    adapter: Any = kind(msgspec.convert({"url": "http://127.0.0.1:9", "model": "served", **options}, kind.Options))
    adapter.check_parameters(request_)  # a salt is never refused as a parameter
    exchange = await adapter.exchange(request_, "r")
    assert ("s4lt" in json.dumps([exchange.body, dict(exchange.headers)])) == bool(told)
    assert told.items() <= {**exchange.body, **exchange.headers}.items()
    route = "chat" if isinstance(request_, ChatRequest) else "completions"
    assert (route in adapter.capabilities.cache_salt) == bool(told)


# ------------------------------------------------------------------------------------------------------- the real cache


async def cached_tokens(gateway: Gateway, prompt: str, **headers: str) -> list[int]:
    """Of a chat and of a completion with this beginning."""
    counts = []
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": prompt}]}),
        ("/v1/completions", {"prompt": prompt}),
    ):
        status, answer, _ = await gateway.post(path, {"model": "m", "max_tokens": 1, **body}, **headers)
        assert status == 200, answer
        counts.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    return counts


@pytest.fixture
def native(tmp_path: Path) -> dict[str, Any]:
    tiny = write_tiny_chat_llama(tmp_path / "tiny")
    return model({"engine": "native", "options": {"model": str(tiny), "kv_cache_mib": 16, "home": str(tmp_path)}})


@pytest.mark.replay("A45")
async def test_a45_a_tenant_meets_his_own_prompts_in_the_native_engines_cache_and_no_others(
    start: Start, tmp_path: Path, native: dict[str, Any]
) -> None:
    keys = keys_of(tmp_path, alice="acme", bob="acme", carol="rival")
    gateway = await start(native, is_ready=False, tenants={"isolate_prefix_cache": "require"})
    await until(lambda: gateway.fleet.replicas[0].is_ready, timeout_s=60)
    assert await cached_tokens(gateway, LONG, **keys["alice"]) == [0, 0]
    assert await cached_tokens(gateway, LONG, **keys["carol"]) == [0, 0]  # what acme has just sent is not there
    assert min(await cached_tokens(gateway, LONG, **keys["bob"])) >= 64  # for another key of acme's it is
    assert min(await cached_tokens(gateway, LONG, **keys["carol"])) >= 64  # and by now rival has its own


@pytest.mark.replay("A45")
async def test_a45_a_gateway_behind_a_gateway_keeps_its_tenants_apart_once_it_is_told_of_them(
    start: Start, tmp_path: Path, native: dict[str, Any]
) -> None:
    keys = keys_of(tmp_path, alice="acme", carol="rival")
    behind = await start(native, is_ready=False, auth={"required": False})
    await until(lambda: behind.fleet.replicas[0].is_ready, timeout_s=60)

    def peer(**options: Any) -> dict[str, Any]:
        return {"engine": "goodgate_peer", "options": {"url": behind.url, "model": "m", **options}}

    telling, silent = await start(model(peer(tells_tenants=True))), await start(model(peer()))
    assert await cached_tokens(telling, LONG, **keys["alice"]) == [0, 0]
    assert await cached_tokens(telling, LONG, **keys["carol"]) == [0, 0]
    assert min(await cached_tokens(telling, LONG, **keys["alice"])) >= 64
    assert await cached_tokens(silent, LONG, **keys["alice"]) == [0, 0]
    assert min(await cached_tokens(silent, LONG, **keys["carol"])) >= 64  # why `auto` is a best effort


async def test_an_engine_of_ours_that_the_gateway_launches_is_told_of_its_tenants(start: Start, tmp_path: Path) -> None:
    keys = keys_of(tmp_path, alice="acme")
    gateway = await start(model({"engine": "fake", "launch": True, "model": "x"}), is_ready=False)
    await until(lambda: gateway.fleet.replicas[0].is_ready, timeout_s=30)
    adapter = gateway.fleet.replicas[0].adapter
    assert adapter is not None
    assert adapter.capabilities.cache_salt == {"chat", "completions"}
    assert (await gateway.post("/v1/chat/completions", HELLO, **keys["alice"]))[0] == 200


# --------------------------------------------------------------------------------------------------- what callers claim


@pytest.mark.replay("A46")
@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize("field", ["cache_salt", "extra_key"])
@pytest.mark.parametrize("value", ["theirs", "", None, 5, {"a": 1}])
async def test_a46_a_salt_in_a_body_is_refused_by_name(
    start: Start, upstream_of: UpstreamOf, path: str, field: str, value: Any
) -> None:
    upstream = await upstream_of(whole)
    gateway = await start(model(upstream.replica()))
    status, answer, _ = await gateway.post(path, {**DIALECTS[path], field: value})
    assert status == 400
    assert f"'{field}'" in answer["error"]["message"]
    assert not upstream.requests


@pytest.mark.replay("A46")
async def test_a46_only_a_gateway_may_say_whose_request_it_is(
    start: Start, upstream_of: UpstreamOf, tmp_path: Path
) -> None:
    upstream = await upstream_of(whole)
    keys = keys_of(tmp_path, alice="acme")
    gateway = await start(model(upstream.replica()))

    async def status(name: str, told: str) -> int:
        headers = {**keys[name], SALT_HEADER: told}
        return (await gateway.post("/v1/chat/completions", HELLO, **headers))[0]

    assert await status("alice", "theirs") == 403
    assert (await gateway.post("/v1/chat/completions", HELLO, **keys["alice"]))[0] == 200
    acme = salts_in(upstream)[0]
    assert acme is not None
    assert await status("admin", acme) == 200  # another tenant's salt, told as if it were one of a gateway's
    assert await status("admin", "acme") == 200
    assert len({*salts_in(upstream), "acme"}) == 4  # is a tenant of its own, and so is his name
    for told in ("", "a b", "a,b", "a" * 129, "ä"):
        assert await status("admin", told) == 400


def test_nothing_in_json_becomes_a_salt() -> None:
    for value in ('"x"', "null", "[]", '{"a":1}', "true", "1"):
        body = b'{"model":"m","messages":[{"role":"user"}],"cache_salt":%s}' % value.encode()
        with pytest.raises(InvalidRequest, match="'cache_salt' is the gateway's to set") as failure:
            decode_chat(body)
        assert failure.value.param == "cache_salt"


# ------------------------------------------------------------------------------------------------------------- required


async def test_required_isolation_leaves_out_engines_that_cannot(
    start: Start, upstream_of: UpstreamOf, tmp_path: Path
) -> None:
    able, unable = await upstream_of(whole), await upstream_of(whole)
    keys = keys_of(tmp_path, alice="acme")
    gateway = await start(
        model(unable.replica("unable", engine="llama_cpp"), able.replica("able")),
        tenants={"isolate_prefix_cache": "require"},
        is_ready=False,
    )
    await until(lambda: gateway.fleet.replicas[0].state.value == "failed" and gateway.fleet.replicas[1].is_ready)
    assert "'llama_cpp' cannot keep the prefix caches of tenants apart" in gateway.fleet.replicas[0].reason
    for _ in range(3):
        assert (await gateway.post("/v1/chat/completions", HELLO, **keys["alice"]))[0] == 200
    assert not unable.requests


async def test_required_isolation_is_kept_route_by_route(start: Start, upstream_of: UpstreamOf, tmp_path: Path) -> None:
    upstream = await upstream_of(whole)
    keys = keys_of(tmp_path, alice="acme")
    gateway = await start(model(upstream.replica(engine="tensorrt_llm")), tenants={"isolate_prefix_cache": "require"})
    assert (await gateway.post("/v1/chat/completions", HELLO, **keys["alice"]))[0] == 200
    status, body, _ = await gateway.post("/v1/completions", DIALECTS["/v1/completions"], **keys["alice"])
    assert (status, body["error"]["code"]) == (400, "unsupported_operation")
    assert "'tensorrt_llm' does not offer a prefix cache that tenants do not share" in body["error"]["message"]
    assert upstream.num_generations == 1


# -------------------------------------------------------------------------------------------------------------- the key


def key(tenant: str) -> Key:
    return Key(id=1, name="k", tenant=tenant)


def test_workers_of_one_home_agree_and_other_homes_differ(tmp_path: Path) -> None:
    here, beside, elsewhere = (Salts("auto", tmp_path / home) for home in ("a", "a", "b"))
    assert here.of(key("acme")) == beside.of(key("acme"))
    assert here.of(key("acme")) != elsewhere.of(key("acme"))
    assert stat.S_IMODE((tmp_path / "a" / "state" / "cache_salt").stat().st_mode) == 0o600
    assert list((tmp_path / "a" / "state").iterdir()) == [tmp_path / "a" / "state" / "cache_salt"]


def test_processes_that_make_the_key_at_once_get_the_same(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        keys = set(pool.map(kept_key, [tmp_path / "state" / "cache_salt"] * 64))
    assert len(keys) == 1


def test_hosts_that_share_a_secret_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret_file = tmp_path / "secret"
    secret_file.write_text("x" * 32 + "\n")
    monkeypatch.setenv("SALT", "x" * 32)
    one, two = (Salts("auto", tmp_path / home, b"x" * 32).of(key("acme")) for home in "ab")
    assert one == two
    for source in ({"cache_salt_env": "SALT"}, {"cache_salt_file": str(secret_file)}):
        parse_config({"models": [fake_model()], "tenants": source})
    assert not (tmp_path / "a").exists()


def test_a_key_that_cannot_be_kept_still_keeps_tenants_apart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "state").write_text("not a folder")
    with caplog.at_level(logging.WARNING):
        salts = Salts("auto", tmp_path)
        assert len({salts.of(key("a")), salts.of(key("b")), Salts("auto", tmp_path).of(key("a"))}) == 3
        assert salts.of(key("a")) == salts.of(key("a"))
    assert "the key of the cache salts is not kept" in caplog.text


@pytest.mark.parametrize("content", [b"", b"short", bytes(64)])
def test_a_damaged_key_is_no_key(tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "cache_salt").write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert Salts("auto", tmp_path).of(key("a")) is not None
    reason = caplog.records[-1].__dict__["fields"]["reason"]
    assert reason == f"It has {len(content)} bytes instead of 32; remove it, and a new one is made."


def test_no_name_of_a_tenant_is_the_salt_of_a_told_one(tmp_path: Path) -> None:
    salts = Salts("auto", tmp_path)
    assert len({salts.of(key("x")), salts.of(None, "x"), salts.of(key("told:x")), salts.of(None, "tenant:x")}) == 4
    assert salts.of(None) is None


@pytest.mark.parametrize(
    ("tenants", "sentence"),
    [
        ({"isolate_prefix_cache": "always"}, r"'always' at `tenants.isolate_prefix_cache`"),
        ({"cache_salt_env": "NO_SUCH_VARIABLE"}, r"'NO_SUCH_VARIABLE' named by `tenants.cache_salt_env` is not set"),
        ({"cache_salt_file": "/nowhere"}, r"Cannot read the file '/nowhere'"),
        ({"cache_salt_env": "SHORT"}, r"has 5 characters, and needs 32"),
        ({"cache_salt_env": "A", "cache_salt_file": "b"}, r"write one of them"),
        ({"cache_salt": "x" * 40}, r"Unknown key `tenants.cache_salt`"),
    ],
)
def test_a_faulty_configuration_is_explained(
    tenants: dict[str, Any], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHORT", "short")
    with pytest.raises(ConfigError, match=sentence):
        parse_config({"models": [fake_model()], "tenants": tenants})
