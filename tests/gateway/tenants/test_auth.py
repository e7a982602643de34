"""Who may call what. The matrix of routes, roles and headers is made from the router, so no route is left out."""

from __future__ import annotations

import json
import logging
import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
from aiohttp import web

from gateway.app import create_app
from gateway.config import ConfigError, parse_config
from gateway.tenants.auth import NEEDS_KEY, Access, check_exposure, declared_access, is_loopback
from gateway.tenants.keys import KeyStore, NewKey, digest
from tests.gateway.rig import HELLO, Gateway, Start, fake, fake_model, free_port, model, raw, until

FORMS = {
    "bearer": lambda secret: {"Authorization": f"Bearer {secret}"},
    "lower case": lambda secret: {"authorization": f"bearer {secret}"},
    "x-api-key": lambda secret: {"x-api-key": secret},
    "api-key": lambda secret: {"api-key": secret},
    "two that agree": lambda secret: {"Authorization": f"Bearer {secret}", "x-api-key": secret},
}
VALID = ("user", "admin")
ROLES = (*VALID, "revoked", "expired", "rotated", "wrong")


class Route(NamedTuple):
    method: str
    path: str
    access: Access | None

    @property
    def name(self) -> str:
        return f"{self.method} {self.path}"


def routes_of(app: web.Application) -> Iterator[Route]:
    for route in app.router.routes():
        assert route.resource is not None
        path = re.sub(r"\{\w+\}", "m", route.resource.canonical)
        yield Route(route.method, path, declared_access(route.handler))


def secrets_of(home: Path) -> dict[str, str]:
    """A key for each of `ROLES`: two that are valid, and some that are worth nothing."""
    store = KeyStore(home)
    made = {
        "user": store.create(NewKey(name="user")),
        "admin": store.create(NewKey(name="admin", role="admin")),
        "revoked": store.create(NewKey(name="revoked", role="admin")),
        "expired": store.create(NewKey(name="expired", role="admin", expires=time.time() - 1)),
        "rotated": store.create(NewKey(name="rotated", role="admin")),
        "wrong": "gg-" + secrets.token_urlsafe(32),
    }
    store.revoke("revoked")
    store.rotate("rotated")
    return made


class MatrixSize(NamedTuple):
    routes: int
    roles: int
    forms: int

    @property
    def cases(self) -> int:
        return self.routes * (1 + self.roles * self.forms)  # 1: no header


def matrix_size() -> MatrixSize:
    """How many requests the matrix of this gateway's routes makes. Nothing is started."""
    with TemporaryDirectory() as home:
        app = create_app(parse_config({"models": [fake_model()]}), home=Path(home))
    return MatrixSize(len(list(routes_of(app))), len(ROLES), len(FORMS))


def expected(route: Route, role: str) -> set[int]:
    """The statuses that the decision may lead to. A POST of `{}` that comes through is a 400 of its handler, where that
    looks at bodies; a GET of a response is a 404, because nobody has kept one."""
    looks_at_body = route.method == "POST" and route.path != "/admin/reload"
    passed = {400} if looks_at_body else {200, 404}
    if route.access is Access.PUBLIC:
        return passed
    if role not in VALID:
        return {401}
    return {403} if route.access is Access.ADMIN and role != "admin" else passed


async def status_of(gateway: Gateway, route: Route, headers: dict[str, str]) -> int:
    body = {"json": {}} if route.method == "POST" else {}
    async with gateway.client.request(route.method, gateway.url + route.path, headers=headers, **body) as response:
        return response.status


async def test_every_route_asks_every_role_for_the_right_key_in_every_form(start: Start, tmp_path: Path) -> None:
    made = secrets_of(tmp_path)
    assert tuple(made) == ROLES
    gateway = await start(fake_model())
    routes = list(routes_of(gateway.app))
    assert {route.access for route in routes} == set(Access)
    asked = [(route, "nobody", "no header", {}) for route in routes]
    asked += [
        (route, role, form, headers_of(secret))
        for route in routes
        for role, secret in made.items()
        for form, headers_of in FORMS.items()
    ]
    assert len(asked) == matrix_size().cases
    faults = [
        f"{route.name} as {role} by {form}: {status}"
        for route, role, form, headers in asked
        if (status := await status_of(gateway, route, headers)) not in expected(route, role)
    ]
    assert not faults, "\n".join(faults)


async def test_every_route_has_its_access_declared_beside_it(start: Start) -> None:
    gateway = await start(fake_model())
    undeclared = [route.name for route in routes_of(gateway.app) if route.access is None]
    assert not undeclared, f"say public(...), keyed(...) or admin(...) of {', '.join(undeclared)}"


async def test_a_route_whose_access_was_forgotten_is_for_admins_only(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def handler(_: web.Request) -> web.Response:
        return web.Response(text="secret")

    routes = [web.get("/forgotten", handler)]
    declared = "gateway.handlers.questions.QuestionHandlers.routes"
    monkeypatch.setattr(declared, lambda _: routes)
    made = secrets_of(tmp_path)
    gateway = await start(fake_model())
    [forgotten] = [route for route in routes_of(gateway.app) if route.access is None and route.method == "GET"]
    statuses = [await status_of(gateway, forgotten, FORMS["bearer"](made[role])) for role in ("wrong", *VALID)]
    assert statuses == [401, 403, 200]


async def test_without_any_key_everything_is_open_whatever_the_client_sends(start: Start) -> None:
    gateway = await start(fake_model())
    for headers in ({}, {"Authorization": "Bearer unused"}, {"x-api-key": "a", "api-key": "b"}):
        assert (await gateway.post("/v1/chat/completions", HELLO, **headers))[0] == 200
    assert (await gateway.get("/admin/status"))[0] == 200


async def test_a_key_can_be_asked_for_before_one_was_made_and_never(start: Start, tmp_path: Path) -> None:
    shut = await start(fake_model(), auth={"required": True})
    assert (await shut.get("/health"))[0] == 200
    assert (await shut.get("/v1/models"))[0] == 401
    KeyStore(tmp_path).create(NewKey(name="a"))
    never = await start(fake_model(), auth={"required": False})
    assert (await never.get("/v1/models"))[0] == 200


def spoiled(secret: str, user: str) -> dict[str, list[tuple[bytes, bytes]]]:
    """Everything that is not one valid key, as header lines."""
    key, other = secret.encode(), user.encode()
    bearer = b"Authorization", b"Bearer " + key
    return {
        "missing": [],
        "empty": [(b"Authorization", b"")],
        "empty bearer": [(b"Authorization", b"Bearer ")],
        "empty x-api-key": [(b"x-api-key", b"")],
        "a valid one beside an empty one": [bearer, (b"x-api-key", b"")],
        "without its scheme": [(b"Authorization", key)],
        "another scheme": [(b"Authorization", b"Basic " + key)],
        "a scheme in x-api-key": [(b"x-api-key", b"Bearer " + key)],
        "two blanks": [(b"Authorization", b"Bearer  " + key)],
        "SQL": [(b"Authorization", b"Bearer ' OR 1=1 --")],
        "a glob": [(b"Authorization", b"Bearer gg-*")],
        "%00": [(b"Authorization", b"Bearer " + key + b"%00")],
        "something behind it": [(b"x-api-key", key + b"x")],
        "non-ASCII": [(b"Authorization", "Bearer gg-ключ".encode())],
        "Latin-1": [(b"x-api-key", b"gg-\xff\xfe" + key[5:])],
        "fullwidth digits": [(b"x-api-key", ("gg-" + "１" * 43).encode())],
        "the right beginning with a wrong end": [(b"Authorization", b"Bearer " + key[:-1] + b"~")],
        "the same first 20 characters": [(b"Authorization", b"Bearer " + key[:20] + b"A" * (len(key) - 20))],
        "upper case": [(b"Authorization", b"Bearer " + key.upper())],
        "different keys in two forms": [bearer, (b"x-api-key", other)],
        "different keys in the other two": [(b"api-key", key), (b"x-api-key", other)],
        "four kilobytes": [(b"x-api-key", key * 90)],
        "its name": [(b"Authorization", b"Bearer user")],
        "in a cookie": [(b"Cookie", b"api_key=" + key + b"; Authorization=Bearer " + key)],
        "overridden": [(b"X-Original-Authorization", b"Bearer " + key), (b"X-Forwarded-For", b"127.0.0.1")],
    }


async def answer_to(gateway: Gateway, lines: list[tuple[bytes, bytes]], target: bytes = b"/v1/models") -> bytes:
    head = b"".join(name + b": " + value + b"\r\n" for name, value in lines)
    return await raw(gateway, b"GET " + target + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + head + b"\r\n")


def without_request_id(answer: bytes) -> bytes:
    return re.sub(rb"(x-request-id|Date): [^\r]+", rb"\1", answer)


@pytest.mark.replay("A35")
async def test_a35_whatever_is_wrong_with_a_key_the_answer_is_the_same_401(start: Start, tmp_path: Path) -> None:
    made = secrets_of(tmp_path)
    gateway = await start(fake_model())
    answers = {name: await answer_to(gateway, lines) for name, lines in spoiled(made["admin"], made["user"]).items()}
    for name in ("revoked", "expired", "rotated", "wrong"):
        answers[name] = await answer_to(gateway, [(b"Authorization", b"Bearer " + made[name].encode())])
    in_query = b"/v1/models?api_key=%s&key=%s" % (made["admin"].encode(), made["admin"].encode())
    answers["in the query"] = await answer_to(gateway, [], in_query)
    first, *others = {without_request_id(answer) for answer in answers.values()}
    assert not others, others
    assert first.startswith(b"HTTP/1.1 401 ")
    assert b"WWW-Authenticate: Bearer" in first
    error = json.loads(first.partition(b"\r\n\r\n")[2])["error"]
    assert (error["code"], error["message"]) == ("invalid_api_key", NEEDS_KEY)


@pytest.mark.replay("A35")
@pytest.mark.parametrize(
    "lines",
    [
        [(b"Authorization", b"Bearer %b"), (b"Authorization", b"Bearer %b")],
        [(b"Authorization", b"Bearer nonsense"), (b"Authorization", b"Bearer %b")],
        [(b"x-api-key", b"%b"), (b"X-API-Key", b"%b")],
        [(b"Authorization", b"Bearer %b" + b"x" * (1 << 20))],
        [(b"Authorization", b"Bearer %b\x00")],
        [(b"Authorization ", b"Bearer %b")],
    ],
    ids=["twice", "twice and different", "x-api-key twice", "a megabyte", "a NUL", "a blank before the colon"],
)
async def test_a35_a_header_that_comes_twice_or_is_malformed_lets_nobody_in(
    start: Start, tmp_path: Path, lines: list[tuple[bytes, bytes]]
) -> None:
    secret = KeyStore(tmp_path).create(NewKey(name="a")).encode()
    gateway = await start(fake_model())
    answer = await answer_to(gateway, [(name, value.replace(b"%b", secret)) for name, value in lines])
    assert answer.split()[1] in (b"400", b"401"), answer
    assert secret not in answer
    assert b'"object":"list"' not in answer


@pytest.mark.replay("A37", "G42")
async def test_a37_g42_the_stored_hash_is_no_key(start: Start, tmp_path: Path) -> None:
    secret = KeyStore(tmp_path).create(NewKey(name="a", role="admin"))
    gateway = await start(fake_model())
    stored = digest(secret)
    for shown in (stored.hex(), f"gg-{stored.hex()}", f"gg-{stored.hex()[:43]}", f"gg-{secrets.token_urlsafe(32)}"):
        for headers_of in FORMS.values():
            async with gateway.client.get(f"{gateway.url}/v1/models", headers=headers_of(shown)) as response:
                assert response.status == 401
    assert stored in (tmp_path / "state" / "keys.db").read_bytes() + wal_of(tmp_path)
    assert secret.encode() not in (tmp_path / "state" / "keys.db").read_bytes() + wal_of(tmp_path)


def wal_of(home: Path) -> bytes:
    wal = home / "state" / "keys.db-wal"
    return wal.read_bytes() if wal.exists() else b""


@pytest.mark.replay("G42")
async def test_g42_keys_with_the_same_first_20_characters_stay_apart(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tails = iter("ab")
    monkeypatch.setattr("gateway.tenants.keys.secrets.token_urlsafe", lambda _: "0" * 42 + next(tails))
    store = KeyStore(tmp_path)
    first, second = store.create(NewKey(name="one", models=("one",))), store.create(NewKey(name="two", models=("two",)))
    assert first[:45] == second[:45]
    gateway = await start(model(fake(), name="one"), model(fake(), name="two"))
    for _ in range(3):  # whatever is remembered of one must not serve the other
        for secret, name in ((first, "one"), (second, "two")):
            async with gateway.client.get(f"{gateway.url}/v1/models", headers={"x-api-key": secret}) as response:
                assert [each["id"] for each in (await response.json())["data"]] == [name]


@pytest.mark.replay("A39")
@pytest.mark.parametrize(
    "fields",
    [
        {"role": "admin"},
        {"allowed_routes": ["/admin/status"]},
        {"tenant_id": "other"},
        {"priority": "CRITICAL"},
        {"budget": -1},
        {"models": ["*"]},
    ],
    ids=lambda fields: next(iter(fields)),
)
async def test_a39_what_a_caller_writes_about_himself_changes_nothing(
    start: Start, tmp_path: Path, fields: dict[str, Any]
) -> None:
    store = KeyStore(tmp_path)
    headers = {"x-api-key": store.create(NewKey(name="a", models=("m",)))}
    before = store.all()
    gateway = await start(fake_model(), model(fake(), name="other"))
    status, body, _ = await gateway.post("/v1/chat/completions", {**HELLO, **fields}, **headers)
    assert (status, body["error"]["param"]) == (400, next(iter(fields)))
    claims = {f"x-{name.replace('_', '-')}": json.dumps(value) for name, value in fields.items()}
    query = "&".join(f"{name}={json.dumps(value)}" for name, value in fields.items())
    async with gateway.client.get(f"{gateway.url}/admin/status?{query}", headers={**headers, **claims}) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (403, "permission_denied")
    assert (await gateway.post("/v1/chat/completions", {**HELLO, "model": "other"}, **headers, **claims))[0] == 404
    assert store.all() == before


@pytest.mark.replay("G41", "A05", "A41")
@pytest.mark.parametrize("host", ["x", "127.0.0.1", "x/health?", "x#/health", "localhost:8080@x", "..", "health"])
@pytest.mark.parametrize(
    "target",
    [
        "/admin/status",
        "//admin/status",
        "/health/../admin/status",
        "/health/%2e%2e/admin/status",
        "/%2e%2e/admin/status",
        "/health/..%2fadmin/status",
        "/admin/status;a=b",
        "/admin/status;",
        "/admin%2fstatus",
        "/%61dmin/status",
        "/ADMIN/status",
        "/Admin/Status",
        "/admin/status/",
        "/admin/./status",
        "/admin\\status",
        "/admin/status?x=/health",
        "/admin/status#/health",
        "/health%00/../admin/status",
        "http://x/admin/status",
        "http://x/health/../admin/status",
        "/metrics",
        "/metrics;/health",
        "//metrics",
        "/v1/models",
        "//v1/models",
        "/V1/models",
        "/v1/models/m",
        "/v1/models/../../admin/status",
        "/v1/models/%2e%2e/%2e%2e/admin/status",
    ],
)
async def test_g41_no_spelling_of_a_path_or_host_leads_around_the_key(
    start: Start, tmp_path: Path, target: str, host: str
) -> None:
    KeyStore(tmp_path).create(NewKey(name="a"))
    gateway = await start(fake_model(), is_ready=False)
    proxied = "X-Original-URL: /health\r\nX-Rewrite-URL: /health\r\nX-HTTP-Method-Override: GET\r\n"
    for method in ("GET", "HEAD", "OPTIONS", "TRACE", "QUERY"):
        head = f"{method} {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{proxied}\r\n"
        answer = await raw(gateway, head.encode())
        assert answer.split()[1] in (b"400", b"401"), answer
        assert b'"replicas"' not in answer
        assert b'"object"' not in answer
        assert b"goodgate_" not in answer


async def test_what_matches_no_route_needs_a_key_too(start: Start, tmp_path: Path) -> None:
    secret = KeyStore(tmp_path).create(NewKey(name="a"))
    gateway = await start(fake_model())
    for path, status in (("/nowhere", 404), ("/v1/chat/completions", 405)):
        assert (await gateway.get(path))[0] == 401
        async with gateway.client.get(gateway.url + path, headers={"x-api-key": secret}) as response:
            assert response.status == status


async def test_this_machine_is_admin_where_the_configuration_says_so_and_a_proxy_on_it_is_not(
    start: Start, tmp_path: Path
) -> None:
    KeyStore(tmp_path).create(NewKey(name="a"))
    by_default = await start(fake_model())
    assert (await by_default.get("/metrics"))[0:1] == (401,)
    gateway = await start(fake_model(), auth={"loopback_is_admin": True})
    assert (await gateway.get("/admin/status"))[0] == 200
    assert (await gateway.get("/v1/models"))[0] == 401
    for header in ("Forwarded", "X-Forwarded-For", "X-Real-IP", "Via"):
        async with gateway.client.get(f"{gateway.url}/admin/status", headers={header: "127.0.0.1"}) as response:
            assert response.status == 401


async def test_a_key_is_in_no_log_metric_or_answer_and_its_name_is_in_the_log(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    store = KeyStore(tmp_path)
    good = store.create(NewKey(name="alice", role="admin", models=("m",)))
    bad = "gg-" + secrets.token_urlsafe(32)
    gateway = await start(fake_model())
    seen = ""
    for secret in (good, bad):
        headers = {"Authorization": f"Bearer {secret}"}
        for path, body in (("/v1/chat/completions", HELLO), ("/v1/chat/completions", {**HELLO, "model": "n"})):
            _, answer, answer_headers = await gateway.post(path, body, **headers)
            seen += str(answer) + str(answer_headers)
    async with gateway.client.get(f"{gateway.url}/metrics", headers={"x-api-key": good}) as response:
        seen += await response.text()
    seen += "".join(f"{record.getMessage()}{getattr(record, 'fields', '')}" for record in caplog.records)
    assert "'key': 'alice'" in seen
    assert 'code="invalid_api_key"' in seen
    for secret in (good, bad):
        assert secret not in seen
        assert secret[3:15] not in seen
        assert digest(secret).hex() not in seen


async def test_a_key_sees_and_uses_its_own_models_only_and_hears_of_no_other(start: Start, tmp_path: Path) -> None:
    secret = KeyStore(tmp_path).create(NewKey(name="a", models=("small*", "nick")))
    gateway = await start(
        model(fake(), name="small-1"),
        model(fake(), name="secret-1"),
        model(fake(), name="large", aliases=["nick"]),
    )
    headers = {"Authorization": f"Bearer {secret}"}
    async with gateway.client.get(f"{gateway.url}/v1/models", headers=headers) as response:
        assert [each["id"] for each in (await response.json())["data"]] == ["small-1", "large"]
    for name, status in (("small-1", 200), ("large", 200), ("nick", 200), ("secret-1", 404), ("secret", 404)):
        asked = {**HELLO, "model": name}
        answered = [await gateway.post("/v1/chat/completions", asked, **headers)]
        answered.append(await gateway.post("/v1/completions", {"model": name, "prompt": "x"}, **headers))
        async with gateway.client.get(f"{gateway.url}/v1/models/{name}", headers=headers) as response:
            answered.append((response.status, await response.json(), None))
        assert {each[0] for each in answered} == {status}
        if status == 404:
            assert {each[1]["error"]["code"] for each in answered} == {"model_not_found"}
            assert not any("secret-1" in each[1]["error"]["message"].replace(f"{name!r}", "") for each in answered)
    for path in ("/tokenize", "/v1/embeddings"):
        body = {"model": "secret-1", "prompt": "x"} if path == "/tokenize" else {"model": "secret-1", "input": "x"}
        assert (await gateway.post(path, body, **headers))[0] == 404
    status, body, _ = await gateway.post("/tokenize", {"prompt": "x"}, **headers)
    assert (status, "secret" in body["error"]["message"]) == (400, False)


async def test_a_fallback_that_a_key_may_not_use_does_not_answer_it(start: Start, tmp_path: Path) -> None:
    store = KeyStore(tmp_path)
    narrow, wide = store.create(NewKey(name="narrow", models=("m",))), store.create(NewKey(name="wide"))
    down = {"engine": "vllm", "options": {"url": f"http://127.0.0.1:{free_port()}", "model": "x"}}
    gateway = await start(model(down, fallbacks=["other"]), model(fake(), name="other"), is_ready=False)
    await until(lambda: gateway.fleet.models["other"].is_ready)
    assert (await gateway.post("/v1/chat/completions", HELLO, **FORMS["bearer"](wide)))[0] == 200
    assert (await gateway.post("/v1/chat/completions", HELLO, **FORMS["bearer"](narrow)))[0] == 503


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.0.0.5", "example.org", "::ffff:127.0.0.1"])
def test_an_open_gateway_does_not_listen_where_others_can_reach_it(host: str) -> None:
    config = parse_config({"server": {"host": host}, "models": [fake_model()]})
    with pytest.raises(ConfigError, match=r"goodgate keys create NAME.*--open"):
        check_exposure(config, has_keys=False)
    check_exposure(config, has_keys=True)
    for auth in ({"open": True}, {"required": True}):
        allowed = parse_config({"server": {"host": host}, "auth": auth, "models": [fake_model()]})
        check_exposure(allowed, has_keys=False)
    never = parse_config({"server": {"host": host}, "auth": {"required": False}, "models": [fake_model()]})
    with pytest.raises(ConfigError):
        check_exposure(never, has_keys=True)


@pytest.mark.parametrize(
    ("host", "is_local"),
    [("127.0.0.1", True), ("127.8.0.9", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), (None, False)],
)
def test_what_is_loopback(host: str | None, is_local: bool) -> None:
    assert is_loopback(host) is is_local
    if host is not None and is_local:
        check_exposure(parse_config({"server": {"host": host}, "models": [fake_model()]}), has_keys=False)


async def test_a_gateway_in_front_of_another_shows_it_a_key_of_its_own(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PEER_KEY", KeyStore(tmp_path).create(NewKey(name="front")))
    behind = await start(fake_model(tokens=3))
    for environment, status in (("PEER_KEY", 200), ("OTHER_KEY", 502)):
        monkeypatch.setenv("OTHER_KEY", "gg-" + secrets.token_urlsafe(32))
        peer = {"engine": "goodgate_peer", "options": {"url": behind.url, "api_key_env": environment}}
        front = await start(model(peer), auth={"required": False})
        answered, body, _ = await front.post("/v1/chat/completions", HELLO, Authorization="Bearer of-the-caller")
        assert answered == status, body
        assert "gg-" not in str(body)


@pytest.mark.replay("A38")
async def test_a38_a_response_is_there_for_the_key_that_asked_for_it_and_for_no_other(
    start: Start, tmp_path: Path
) -> None:
    store = KeyStore(tmp_path)
    mine, other = ({"x-api-key": store.create(NewKey(name=name))} for name in ("mine", "other"))
    gateway = await start(fake_model())
    _, made, _ = await gateway.post("/v1/responses", {"model": "m", "input": "Hello"}, **mine)

    async def status(method: str, path: str, headers: dict[str, str]) -> int:
        async with gateway.client.request(method, f"{gateway.url}/v1/responses/{path}", headers=headers) as response:
            return response.status

    for id in (made["id"], f"1:{made['id']}", f"1%3A{made['id']}"):
        for method, path in (("GET", id), ("GET", f"{id}/input_items"), ("DELETE", id)):
            assert await status(method, path, other) == 404
        following = {"model": "m", "input": "x", "previous_response_id": id}
        assert (await gateway.post("/v1/responses", following, **other))[0] == 404
    following["previous_response_id"] = made["id"]
    assert (await gateway.post("/v1/responses", following, **mine))[0] == 200
    assert [await status(method, made["id"], mine) for method in ("GET", "DELETE", "GET")] == [200, 200, 404]
