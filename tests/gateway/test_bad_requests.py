"""Bad input is refused with a 4xx in the one envelope, quickly, and never reaches an engine."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import time
from typing import Any

import pytest

from adapters.errors import InvalidRequest
from gateway.web.body import MAX_DEPTH, MAX_MEMBERS, check_depth
from tests.gateway.rig import HELLO, Start, fake_model, raw, until

CHAT = "/v1/chat/completions"


def chat_body(**fields: Any) -> bytes:
    return json.dumps({**HELLO, **fields}).encode()


@pytest.mark.replay("A17")
async def test_odd_text_comes_through_or_is_refused_but_never_fails(start: Start) -> None:
    gateway = await start(fake_model())
    for text in ("\x00", "\u202e\u200b", "\ud800", "😀" * 10, "<|im_start|>system"):
        status, body, _ = await gateway.post(CHAT, chat_body(messages=[{"role": "user", "content": text}]))
        assert status in (200, 400), body
    status, body, _ = await gateway.chat(model="m\n2026 ERROR \x1b[31mforged\x00")
    assert (status, body["error"]["code"]) == (404, "model_not_found")


async def test_an_unknown_model_is_404_with_the_nearest_name(start: Start) -> None:
    gateway = await start({**fake_model(), "name": "smollm2-135m-instruct"})
    status, body, _ = await gateway.chat(model="smollm2-135m-instuct")
    assert status == 404
    assert body["error"]["code"] == "model_not_found"
    assert body["error"]["param"] == "model"
    assert "'smollm2-135m-instruct'" in body["error"]["message"]


async def test_any_accept_and_a_charset_are_fine(start: Start) -> None:
    gateway = await start(fake_model())
    headers = {"Content-Type": "application/json; charset=utf-8", "Accept": "application/xml"}
    async with gateway.client.post(gateway.url + CHAT, data=chat_body(), headers=headers) as response:
        assert response.status == 200


@pytest.mark.replay("W24", "A14")
@pytest.mark.parametrize("is_declared", [True, False])
async def test_a14_a_body_over_the_limit_is_413_and_one_below_passes(start: Start, is_declared: bool) -> None:
    gateway = await start(fake_model(), server={"max_body_mib": 4})

    async def pieces(body: bytes) -> Any:
        for at in range(0, len(body), 1 << 16):
            yield body[at : at + (1 << 16)]

    for size, expected in ((3 << 20, 200), (5 << 20, 413)):
        body = chat_body(messages=[{"role": "user", "content": "x" * size}])
        headers = {"Content-Type": "application/json"}
        if is_declared:
            headers["Content-Length"] = str(len(body))
        async with gateway.client.post(gateway.url + CHAT, data=pieces(body), headers=headers) as response:
            assert response.status == expected
            if expected == 413:
                assert (await response.json())["error"]["code"] == "body_too_large"


async def test_a_gzipped_body_is_read_and_a_broken_one_leaves_no_traceback_in_the_log(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = await start(fake_model())
    for body, status in ((gzip.compress(chat_body()), b"200"), (chat_body(), b"400")):
        head = POST + f"Content-Encoding: gzip\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        assert (await raw(gateway, head + body)).split()[1] == status
    assert "Traceback" not in caplog.text


POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@pytest.mark.replay("A10")
async def test_a10_headers_that_do_not_come_are_not_waited_for(start: Start) -> None:
    gateway = await start(fake_model(), server={"header_timeout_s": 0.2})
    assert await raw(gateway, b"POST /v1/chat") == b""
    assert await raw(gateway, b"") == b""


@pytest.mark.replay("A10")
async def test_a10_a_body_that_does_not_come_is_408(start: Start) -> None:
    gateway = await start(fake_model(), server={"body_timeout_s": 0.2})
    answer = await raw(gateway, POST + b"Content-Length: 100\r\n\r\n{")
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"request_timeout" in answer
    assert not answer.endswith(b"<open>")


@pytest.mark.replay("A10")
async def test_a_body_that_is_cut_leaves_nothing_behind(start: Start) -> None:
    gateway = await start(fake_model())
    _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(POST + b"Content-Length: 100\r\n\r\n{")
    await asyncio.sleep(0.05)
    writer.close()
    await until(lambda: gateway.open_requests.in_flight == 0)
    assert (await gateway.chat())[0] == 200


@pytest.mark.replay("G41", "A41")
@pytest.mark.parametrize(
    ("target", "method", "status"),
    [
        ("//v1/models", "GET", 404),
        ("/V1/models", "GET", 404),
        ("/v1/../admin/status", "GET", 404),
        ("/%2e%2e/admin/status", "GET", 404),
        ("/admin/status;a=b", "GET", 404),
        ("/v1/models.", "GET", 404),
        ("/v1/chat/completions", "GET", 405),
        ("/v1/models", "POST", 405),
        ("/health", "TRACE", 405),
        ("/nowhere", "QUERY", 404),
    ],
)
async def test_g41_a41_odd_paths_and_methods_match_no_route(
    start: Start, target: str, method: str, status: int
) -> None:
    gateway = await start(fake_model())
    for host in ("x", "x/admin/status?", "x#/admin"):
        request = f"{method} {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
        answer = await raw(gateway, request.encode())
        assert answer.split()[1] in (str(status).encode(), b"400"), answer
        assert b'"error"' in answer
        assert b'"replicas"' not in answer


async def test_404_and_405_speak_the_envelope_too(start: Start) -> None:
    gateway = await start(fake_model())
    status, body = await gateway.get("/v1/nothing")
    assert (status, body["error"]["code"]) == (404, "not_found")
    status, body = await gateway.get("/v1/chat/completions")
    assert (status, body["error"]["code"]) == (405, "method_not_allowed")
    assert "POST" in body["error"]["message"]
    async with gateway.client.options(f"{gateway.url}/v1/models") as response:
        assert (response.status, response.headers["Allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize("depth", [1, 30, MAX_DEPTH])
def test_nesting_up_to_the_cap_passes(depth: int) -> None:
    check_depth(b'{"a":' * depth + b"1" + b"}" * depth)
    check_depth(b"[" * depth + b"]" * depth + b'"[[[["' * 100)


@pytest.mark.parametrize("wrap", [b"%b", b'["\\"[", %b]', b'[{"a": 1}, %b]'])
def test_nesting_beyond_the_cap_is_seen_wherever_it_is(wrap: bytes) -> None:
    deep = b'{"a":[' * (MAX_DEPTH // 2 + 1) + b"]}" * (MAX_DEPTH // 2 + 1)
    with pytest.raises(InvalidRequest, match="deeper"):
        check_depth(wrap % deep)


@pytest.mark.replay("A15")
@pytest.mark.parametrize(
    "body",
    [
        b'"' + b'\\"' * 2_000_000,
        b"[]" * 8_000_000,
        b"[" * 16_000_000,
        (b"[" * 64 + b"]" * 64) * 100_000,
        b'"\\' * 4_000_000,
    ],
)
def test_the_depth_check_takes_linear_time_on_any_bytes(body: bytes) -> None:
    started = time.perf_counter()
    with contextlib.suppress(InvalidRequest):
        check_depth(body)
    assert time.perf_counter() - started < 1


async def test_objects_of_a_million_members_are_refused_before_they_are_decoded(start: Start) -> None:
    """Decoding them took half a second, in which no other stream went on. Colons in a text are no members."""
    gateway = await start(fake_model())
    for field in ({"logit_bias": dict.fromkeys(range(MAX_MEMBERS + 1), 1)}, {"x": [{"a": 1}] * (MAX_MEMBERS + 1)}):
        status, body, _ = await gateway.post(CHAT, chat_body(**field))
        assert status == 400
        assert "members" in body["error"]["message"] or "objects and lists" in body["error"]["message"]
    text = ": " * (MAX_MEMBERS + 1)
    status, body, _ = await gateway.post(CHAT, chat_body(messages=[{"role": "user", "content": text}], max_tokens=1))
    assert "members" not in str(body)
