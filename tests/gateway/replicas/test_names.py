"""What a name leads to: written-out names, patterns, groups, and who may go there by which."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anthropic
import pytest

from gateway.config import ConfigError, parse_config
from gateway.replicas.names import Names
from gateway.tenants.keys import KeyStore, NewKey
from tests.gateway.rig import HELLO, Gateway, Reply, Script, Start, Upstream, fake, fake_model, model

UpstreamOf = Callable[[Script], Awaitable[Upstream]]

TOO_LONG = b'{"error":{"message":"maximum context length is 8","code":"context_length_exceeded"}}'
HOSTILE = [
    "gpt-4" + "x" * 100_000,
    "gpt-4/../../admin",
    "gpt-4//host",
    "gpt-4/",
    "gpt-4\nHost: x",
    "gpt-4\x00",
    "gpt-4\u202eo",
    "gpt-4?key=1",
    "gpt-4#",
    "gpt-4%2e%2e",
    "gpt-4 o",
    "\ud800",
    "*",
    "gpt-4*",
]


async def whole(reply: Reply) -> None:
    if reply.request.path == "/v1/embeddings":
        await reply.status(200, b'{"data":[{"index":0,"embedding":[1.0]}],"usage":{"prompt_tokens":1}}')
    elif reply.request.path == "/v1/models":
        await reply.status(200, b'{"data":[]}')
    else:
        await reply.answer("a", "b")


async def too_long(reply: Reply) -> None:
    await reply.status(400, TOO_LONG, "Connection: close")


async def broken(reply: Reply) -> None:
    await reply.status(500, b"{}", "Connection: close")


def sent_models(upstream: Upstream) -> list[str]:
    return [json.loads(each.body)["model"] for each in upstream.requests if each.body]


async def answered_by(gateway: Gateway, name: str, **headers: str) -> str:
    status, body, _ = await gateway.post("/v1/chat/completions", {**HELLO, "model": name}, **headers)
    return str(body["model"]) if status == 200 else str(body["error"]["code"])


# ------------------------------------------------------------------------------------------------------------ patterns


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("gpt-4o", ("written out", None)),
        ("gpt-4o-mini", ("gpt-4", "o-mini")),
        ("gpt-4", ("gpt-4", "")),
        ("gpt-5", ("any", "gpt-5")),
        ("o-mini", ("mini", "o")),
        ("gpt-x-mini", ("mini", "gpt-x")),  # as many letters as `gpt-*`, but a longer one of its own
        ("gpt", ("any", "gpt")),
        ("", None),
        ("-mini", None),  # it begins like an option of a command
    ],
)
def test_the_most_specific_name_wins(name: str, found: tuple[str, str | None] | None) -> None:
    names = Names({"*": "any", "gpt-4*": "gpt-4", "*-mini": "mini", "gpt-4o": "written out"})
    match = names.find(name)
    assert (match and (match.target, match.part)) == found


def test_of_equally_specific_patterns_the_first_one_wins() -> None:
    assert Names({"a*": 1, "*a": 2}).find("aba") == (1, "ba")
    assert Names({"*a": 2, "a*": 1}).find("aba") == (2, "ab")


def test_a_pattern_does_not_use_a_letter_twice() -> None:
    assert Names({"aba*ba": 1}).find("aba") is None


async def test_a_name_that_a_pattern_matches_is_answered_in_the_configured_name(start: Start) -> None:
    gateway = await start(fake_model() | {"aliases": ["gpt-4*", "default"]})
    assert await answered_by(gateway, "gpt-4o") == "m"
    assert await answered_by(gateway, "gpt-3") == "model_not_found"
    message = (await gateway.chat(model="gpt-3"))[1]["error"]["message"]
    assert "gpt-4*" not in message  # a hint is a name that can be asked for
    status, listed = await gateway.get("/v1/models")
    assert (status, [each["id"] for each in listed["data"]]) == (200, ["m"])
    assert (await gateway.get("/v1/models/gpt-4-turbo"))[1]["id"] == "m"
    _, metrics = await _metrics(gateway)
    assert "gpt-4o" not in metrics
    assert 'model="m"' in metrics


async def _metrics(gateway: Gateway) -> tuple[int, str]:
    async with gateway.client.get(f"{gateway.url}/metrics") as response:
        return response.status, await response.text()


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_name_matches_no_pattern_and_is_refused_at_once(
    start: Start, upstream_of: UpstreamOf, name: str
) -> None:
    upstream = await upstream_of(whole)
    gateway = await start(model(upstream.replica(model="up/*"), aliases=["gpt-4*", "*"]))
    began = time.monotonic()
    status, body, _ = await gateway.chat(model=name)
    assert status in (400, 404)
    assert body["error"]["param"] == "model" or "JSON" in body["error"]["message"]
    assert len(body["error"]["message"]) < 1000
    assert time.monotonic() - began < 2
    assert not upstream.requests


@pytest.mark.parametrize(
    ("alias", "theirs", "asked", "sent"),
    [
        ("openai/*", "*", "openai/gpt-4o", "gpt-4o"),
        ("openai/*", "azure/*-eu", "openai/gpt-4o", "azure/gpt-4o-eu"),
        ("gpt-4*", "gpt-4*", "gpt-4o", "gpt-4o"),
        ("*", "openai/*", "a/b:free", "openai/a/b:free"),
        ("plain", "openai/*", "plain", "openai/plain"),  # written out: the whole name
        ("gpt-4*", "served", "gpt-4o", "served"),
    ],
)
async def test_the_engine_is_asked_for_what_the_star_stands_for(
    start: Start, upstream_of: UpstreamOf, alias: str, theirs: str, asked: str, sent: str
) -> None:
    upstream = await upstream_of(whole)
    replica = upstream.replica(engine="openai_compatible", model=theirs, embeddings=True)
    gateway = await start(model(replica, aliases=[alias]))
    upstream.requests.clear()
    assert await answered_by(gateway, asked) == "m"
    status, body, _ = await gateway.post("/v1/embeddings", {"model": asked, "input": "a"})
    assert (status, body["model"]) == (200, "m")
    assert sent_models(upstream) == [sent, sent]


async def test_what_names_no_model_cannot_be_asked_of_whichever_model_is_asked_for(
    start: Start, upstream_of: UpstreamOf
) -> None:
    upstream = await upstream_of(whole)
    gateway = await start(model(upstream.replica(model="*")))
    status, body, _ = await gateway.post("/detokenize", {"model": "m", "tokens": [1]})
    assert (status, body["error"]["code"]) == (400, "unsupported_operation")


# ---------------------------------------------------------------------------------------------------------------- keys


async def test_a_key_reaches_nothing_through_a_pattern_that_it_may_not_ask_for_by_name(
    start: Start, tmp_path: Path
) -> None:
    store = KeyStore(tmp_path)

    def key(*models: str) -> dict[str, str]:
        return {"x-api-key": store.create(NewKey(name=f"k{len(store.all())}", models=models))}

    of_small, of_both, of_all, of_model = key("small*"), key("gpt-4*", "cloud"), key("*"), key("cloud")
    gateway = await start(
        model(fake(), name="small"), model(fake(), name="cloud", aliases=["*"]), auth={"required": True}
    )
    assert await answered_by(gateway, "small", **of_small) == "small"
    assert await answered_by(gateway, "small-2", **of_small) == "model_not_found"  # the pattern leads to `cloud`
    assert await answered_by(gateway, "gpt-4o", **of_small) == "model_not_found"
    assert await answered_by(gateway, "gpt-4o", **of_both) == "cloud"
    assert await answered_by(gateway, "gpt-5", **of_both) == "model_not_found"
    assert await answered_by(gateway, "gpt-5", **of_all) == "cloud"
    assert await answered_by(gateway, "cloud", **of_model) == "cloud"
    assert await answered_by(gateway, "gpt-5", **of_model) == "model_not_found"


async def test_a_key_for_a_group_is_one_for_what_answers_in_its_name(start: Start, tmp_path: Path) -> None:
    headers = {"x-api-key": KeyStore(tmp_path).create(NewKey(name="k", models=("best",)))}
    gateway = await start(
        model(fake(), name="a"),
        model(fake(), name="b"),
        groups=[{"name": "best", "models": ["a", "b"]}],
        auth={"required": True},
    )
    assert await answered_by(gateway, "best", **headers) == "a"
    assert await answered_by(gateway, "a", **headers) == "model_not_found"


# -------------------------------------------------------------------------------------------------------------- groups


async def test_a_groups_first_model_answers_until_it_cannot(start: Start, upstream_of: UpstreamOf) -> None:
    bad, good = await upstream_of(broken), await upstream_of(whole)
    gateway = await start(
        model(bad.replica(), name="a"),
        model(good.replica(), name="b"),
        groups=[{"name": "best", "aliases": ["the-*"], "models": ["a", "b"]}],
    )
    for name in ("best", "the-best"):
        assert await answered_by(gateway, name) == "b"  # what answered is named
    assert bad.num_generations == good.num_generations == 2
    assert await answered_by(gateway, "a") == "engine_failed"  # the model alone is no group
    listed = (await gateway.get("/v1/models"))[1]["data"]
    assert [each["id"] for each in listed] == ["a", "b", "best"]
    assert 'goodgate_requests_total{model="best",' in (await _metrics(gateway))[1]


async def test_a_group_may_share_its_load(start: Start) -> None:
    group = {"name": "any", "models": ["a", "b"], "routing": "round_robin"}
    gateway = await start(model(fake(), name="a"), model(fake(), name="b"), groups=[group])
    (told,) = (await gateway.get("/admin/status"))[1]["groups"]
    assert (told["name"], told["models"], told["routing"], told["ready"]) == ("any", ["a", "b"], "round_robin", True)
    assert [await answered_by(gateway, "any") for _ in range(4)] == ["a", "b", "a", "b"]


async def test_vectors_and_token_ids_of_a_group_are_always_those_of_its_first_model(
    start: Start, upstream_of: UpstreamOf
) -> None:
    first, second = await upstream_of(whole), await upstream_of(whole)
    gateway = await start(
        model(first.replica(engine="openai_compatible", embeddings=True), name="a"),
        model(second.replica(engine="openai_compatible", embeddings=True), name="b"),
        groups=[{"name": "any", "models": ["a", "b"], "routing": "round_robin"}],
    )
    second.requests.clear()
    for _ in range(3):
        assert (await gateway.post("/v1/embeddings", {"model": "any", "input": "a"}))[1]["model"] == "a"
    assert not second.requests


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.replay("S12")
async def test_s12_a_prompt_that_is_too_long_goes_to_the_model_for_long_ones(
    start: Start, upstream_of: UpstreamOf, is_stream: bool
) -> None:
    short, spare, long = await upstream_of(too_long), await upstream_of(whole), await upstream_of(whole)
    gateway = await start(
        model(short.replica(), name="m", fallbacks=["spare"], context_fallbacks=["long"]),
        model(spare.replica(), name="spare"),
        model(long.replica(), name="long"),
    )
    if is_stream:
        events = await gateway.events()
        assert json.loads(events[0])["model"] == "long"
    else:
        assert await answered_by(gateway, "m") == "long"
    assert (short.num_generations, spare.num_generations, long.num_generations) == (1, 0, 1)


async def test_a_prompt_that_is_too_long_for_all_says_so_after_one_try_each(
    start: Start, upstream_of: UpstreamOf
) -> None:
    short, long = await upstream_of(too_long), await upstream_of(too_long)
    gateway = await start(
        model(short.replica(), name="m", context_fallbacks=["long"]),
        model(long.replica(), name="long", context_fallbacks=["m"]),
    )
    assert await answered_by(gateway, "m") == "context_length_exceeded"
    assert (short.num_generations, long.num_generations) == (1, 1)


async def test_models_that_fall_back_to_each_other_are_tried_in_turns_and_not_for_ever(
    start: Start, upstream_of: UpstreamOf
) -> None:
    one, two = await upstream_of(broken), await upstream_of(broken)
    gateway = await start(
        model(one.replica(), name="one", fallbacks=["two"], max_attempts=4),
        model(two.replica(), name="two", fallbacks=["one"], max_attempts=4),
    )
    assert await answered_by(gateway, "one") == "engine_failed"
    assert (one.num_generations, two.num_generations) == (2, 2)


async def test_fallbacks_of_a_fallback_are_not_followed(start: Start, upstream_of: UpstreamOf) -> None:
    bad, last = await upstream_of(broken), await upstream_of(whole)
    gateway = await start(
        model(bad.replica(), name="a", fallbacks=["b"]),
        model(bad.replica(), name="b", fallbacks=["c"]),
        model(last.replica(), name="c"),
    )
    assert await answered_by(gateway, "a") == "engine_failed"
    assert last.num_generations == 0


# ------------------------------------------------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"models": [fake_model() | {"name": "gpt-*"}]}, r"'gpt-\*' is a pattern: give a plain name"),
        ({"models": [fake_model() | {"aliases": ["a*b*"]}]}, r"more than one `\*`"),
        ({"models": [fake_model() | {"aliases": ["a*", "a*"]}]}, r"'a\*' leads to two models"),
        ({"groups": [{"name": "m", "models": ["m"]}]}, r"'m' leads to two models"),
        ({"groups": [{"name": "g", "models": ["n"]}]}, r"Group 'g' holds an unknown model 'n'"),
        ({"groups": [{"name": "g", "models": ["m", "m"]}]}, r"holds the model 'm' twice"),
        ({"groups": [{"name": "g", "models": []}]}, r"length >= 1"),
        (
            {"groups": [{"name": "g", "models": ["m"], "fallbacks": ["m"]}]},
            r"falls back to 'm', which is a model of it",
        ),
        ({"groups": [{"name": "g", "models": ["m"]}, {"name": "h", "models": ["g"]}]}, r"unknown model 'g'"),
        ({"models": [fake_model() | {"context_fallbacks": ["m"]}]}, r"falls back to itself"),
        ({"models": [fake_model() | {"context_fallbacks": ["n"]}]}, r"unknown model 'n'"),
        ({"groups": [{"name": "g", "models": ["m"], "replicas": []}]}, r"Unknown key `groups\[0\].replicas`"),
    ],
)
def test_names_that_lead_nowhere_are_explained(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parse_config({"models": [fake_model()], **changes})


# ---------------------------------------------------------------------------------------------------- Anthropic's lists


async def test_anthropics_client_lists_models_page_by_page(start: Start) -> None:
    names = [f"m{number:02}" for number in range(25)]
    gateway = await start(*(model(fake(), name=name) for name in names))
    assert [each.id async for each in gateway.anthropic.models.list()] == names
    first = await gateway.anthropic.models.list(limit=10)
    assert ([each.id for each in first.data], first.has_more) == (names[:10], True)
    last = await gateway.anthropic.models.list(limit=10, after_id="m19")
    assert ([each.id for each in last.data], last.has_more) == (names[20:], False)
    back = await gateway.anthropic.models.list(limit=10, before_id="m19")
    assert ([each.id for each in back.data], back.has_more) == (names[9:19], True)
    assert (back.first_id, back.last_id) == ("m09", "m18")


async def test_anthropics_client_finds_a_model_by_any_of_its_names(start: Start) -> None:
    gateway = await start(fake_model() | {"aliases": ["claude-*"]})
    for name in ("m", "claude-opus-4"):
        found = await gateway.anthropic.models.retrieve(name)
        assert (found.type, found.id, found.display_name) == ("model", "m", "m")
        assert abs(found.created_at.timestamp() - time.time()) < 60
    with pytest.raises(anthropic.NotFoundError, match="no model 'gpt'") as failure:
        await gateway.anthropic.models.retrieve("gpt")
    assert failure.value.type == "not_found_error"
    assert failure.value.request_id == failure.value.response.headers["x-request-id"]
    assert [each.id async for each in gateway.openai.models.list()] == ["m"]  # the others see what they always saw


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=1001", "limit"),
        ("limit=-1", "limit"),
        ("limit=%C2%B2", "limit"),
        ("limit=" + "9" * 5000, "limit"),
        ("after_id=x", "no model 'x'"),
        ("before_id=", "no model ''"),
        ("after_id=m&before_id=m", "exclude each other"),
    ],
)
async def test_a_page_that_cannot_be_is_explained_in_anthropics_shape(start: Start, query: str, param: str) -> None:
    gateway = await start(fake_model())
    async with gateway.client.get(
        f"{gateway.url}/v1/models?{query}", headers={"anthropic-version": "2023-06-01"}
    ) as response:
        body = await response.json()
    assert response.status == 400
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert param in body["error"]["message"]


async def test_a_key_sees_its_own_models_in_anthropics_list(start: Start, tmp_path: Path) -> None:
    key = KeyStore(tmp_path).create(NewKey(name="k", models=("b*",)))
    gateway = await start(*(model(fake(), name=name) for name in ("a", "b", "c")), auth={"required": True})
    client = gateway.anthropic.with_options(api_key=key)
    assert [each.id async for each in client.models.list()] == ["b"]
    with pytest.raises(anthropic.BadRequestError, match="no model 'a'"):
        await client.models.list(after_id="a")
