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
from gateway.body import MAX_DEPTH, check_depth
from tests.gateway.rig import HELLO, Gateway, Start, fake_model, until

CHAT = "/v1/chat/completions"


def chat_body(**fields: Any) -> bytes:
    return json.dumps({**HELLO, **fields}).encode()


MESSAGES = b'{"model":"m","messages":'
SYMPTOMS: dict[str, tuple[bytes, str | None]] = {
    "A15 a million opening brackets": (b"[" * 1_000_000, None),
    "A15 deep objects": (b'{"a":' * 100_000, None),
    "A15 brackets deep inside tools": (
        b'{"model":"m","messages":[],"tools":[' + b"[" * 4000 + b"]" * 4000 + b"]}",
        None,
    ),
    "A17 invalid UTF-8": (MESSAGES + b'[{"role":"user","content":"\xff\xfe"}]}', None),
    "A17 overlong UTF-8": (MESSAGES + b'[{"role":"user","content":"\xc0\xaf"}]}', None),
    "A17 a byte order mark": (b"\xef\xbb\xbf" + chat_body(), None),
    "A17 UTF-16": (chat_body().decode().encode("utf-16"), None),
    "A18 messages null": (chat_body(messages=None), "messages"),
    "A18 messages empty": (chat_body(messages=[]), "messages"),
    "A18 messages a text": (chat_body(messages="hi"), "messages"),
    "A18 messages nested": (chat_body(messages=[[HELLO]]), "messages"),
    "A18 an unknown role": (chat_body(messages=[{"role": "root", "content": "x"}]), "messages"),
    "A18 an unknown part": (chat_body(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), "messages"),
    "A18 too many parts": (
        chat_body(messages=[{"role": "user", "content": [{"type": "text", "text": "x"}] * 250_000}]),
        None,
    ),
    "A19 n huge": (chat_body(n=10**9), "n"),
    "A19 n negative": (chat_body(n=-1), "n"),
    "A19 n zero": (chat_body(n=0), "n"),
    "A19 n true": (chat_body(n=True), "n"),
    "A19 n a fraction": (chat_body(n=1.5), "n"),
    "A19 n a text": (chat_body(n="1"), "n"),
    "A21 top_logprobs negative": (chat_body(top_logprobs=-1), "top_logprobs"),
    "A21 top_logprobs huge": (chat_body(top_logprobs=10**9), "top_logprobs"),
    "A22 temperature NaN": (chat_body(temperature=float("nan")), None),
    "A22 temperature negative": (chat_body(temperature=-1), "temperature"),
    "A22 temperature 1e308": (chat_body(temperature=1e308), "temperature"),
    "A22 top_p 1e999": (b'{"top_p":1e999,' + chat_body()[1:], None),
    "A22 a huge seed": (chat_body(seed=10**30), "seed"),
    "A22 logit_bias of no use": (chat_body(logit_bias={"1": "x"}), "logit_bias"),
    "A22 logit_bias beyond its range": (chat_body(logit_bias={"1": 101}), "logit_bias"),
    "A22 logit_bias of a million tokens": (chat_body(logit_bias={str(n): 1 for n in range(10**6)}), "logit_bias"),
    "A26 ten thousand tools": (chat_body(tools=[{"type": "function"}] * 10_000), "tools"),
    "A23 100,000 stop strings": (chat_body(stop=["x"] * 100_000), "stop"),
    "A23 a stop string of a megabyte": (chat_body(stop="x" * 1_000_000), "stop"),
    "A23 an empty stop string": (chat_body(stop=""), "stop"),
    "A27 a chat template of the caller's": (chat_body(chat_template="{{ 7 * 7 }}"), "chat_template"),
    "A29 prompt_embeds": (chat_body(prompt_embeds="gASV"), "prompt_embeds"),
    "no model": (b'{"messages":[{"role":"user","content":"x"}]}', None),
    "stream_options without stream": (chat_body(stream_options={"include_usage": True}), "stream_options"),
    "not JSON": (b"{", None),
    "nothing": (b"", None),
    "a list": (b"[]", None),
}


async def refused(gateway: Gateway, body: bytes, path: str = CHAT) -> dict[str, Any]:
    started = time.perf_counter()
    status, envelope, _ = await gateway.post(path, body)
    assert time.perf_counter() - started < 3  # far less, unless others keep the machine busy
    assert status == 400, envelope
    assert set(envelope) == {"error"}
    error: dict[str, Any] = envelope["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 1000
    return error


@pytest.mark.replay("A15", "A17", "A18", "A19", "A21", "A22", "A23", "A26", "A27", "A29")
@pytest.mark.parametrize("symptom", SYMPTOMS)
async def test_a_bad_chat_body_is_refused_naming_the_field(start: Start, symptom: str) -> None:
    gateway = await start(fake_model())
    body, param = SYMPTOMS[symptom]
    error = await refused(gateway, body)
    assert param is None or error["param"] == param
    assert gateway.fleet.models["m"].turn == 0  # nothing was routed
    assert (await gateway.chat())[0] == 200


@pytest.mark.parametrize(
    "prompt", [None, [], [[]], [1, "a"], ["a", [1]], [-1], [[1, -1]], {"a": 1}, [[1], []], ["x"] * 1000, True, [1.5]]
)
async def test_a_bad_prompt_is_refused(start: Start, prompt: object) -> None:
    gateway = await start(fake_model())
    error = await refused(gateway, json.dumps({"model": "m", "prompt": prompt}).encode(), "/v1/completions")
    assert error["param"] == "prompt"


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


@pytest.mark.replay("A13")
@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"]
)
async def test_a13_another_content_type_is_415(start: Start, content_type: str) -> None:
    gateway = await start(fake_model())
    headers = {"Content-Type": content_type}
    async with gateway.client.post(gateway.url + CHAT, data=chat_body(), headers=headers) as response:
        assert response.status == 415
        assert (await response.json())["error"]["code"] == "unsupported_media_type"


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


@pytest.mark.parametrize("encoding", ["banana", "br", "gzip, gzip"])
async def test_a_body_in_an_unknown_encoding_is_415_and_not_read_as_it_lies(start: Start, encoding: str) -> None:
    gateway = await start(fake_model())
    head = (
        POST
        + f"Content-Encoding: {encoding}\r\nConnection: close\r\nContent-Length: {len(chat_body())}\r\n\r\n".encode()
    )
    answer = await raw(gateway, head + chat_body())
    assert answer.split()[1] == b"415"
    assert b"unsupported_media_type" in answer


async def test_a_gzipped_body_is_read_and_a_broken_one_leaves_no_traceback_in_the_log(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = await start(fake_model())
    for body, status in ((gzip.compress(chat_body()), b"200"), (chat_body(), b"400")):
        head = POST + f"Content-Encoding: gzip\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        assert (await raw(gateway, head + body)).split()[1] == status
    assert "Traceback" not in caplog.text


async def raw(gateway: Gateway, data: bytes, wait_s: float = 3) -> bytes:
    """Everything the gateway says to these bytes, until it closes or falls silent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(data)
    answer = b""
    try:
        async with asyncio.timeout(wait_s):
            while piece := await reader.read(65536):
                answer += piece
    except TimeoutError:
        answer += b"<open>"
    finally:
        writer.close()
    return answer


POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@pytest.mark.replay("A01", "A02", "A03", "A06", "A07", "A51")
@pytest.mark.parametrize(
    "request_head",
    [
        POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        POST + b"Content-Length: +5\r\n\r\nhello",
        POST + b"Content-Length: -1\r\n\r\n",
        POST + b"Content-Length: 1_0\r\n\r\n0123456789",
        POST + "Content-Length: ５\r\n\r\nhello".encode(),
        POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        POST + b"X: " + b"a" * 9000 + b"\r\n\r\n",
        POST + b"".join(b"X-%d: a\r\n" % n for n in range(200)) + b"\r\n",
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
async def test_a01_a02_bytes_that_are_no_request_get_400_in_the_envelope_and_a_closed_connection(
    start: Start, request_head: bytes
) -> None:
    gateway = await start(fake_model())
    answer = await raw(gateway, request_head + b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert answer.split()[1] == b"400", answer  # HTTP/1.0: what these bytes are was never found out
    assert not answer.endswith(b"<open>")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert json.loads(body)["error"]["message"] == "This is not a valid HTTP request."
    assert b"application/json" in head
    assert b'"status":"ok"' not in answer


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
    await until(lambda: gateway.dispatcher.in_flight == 0)
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
