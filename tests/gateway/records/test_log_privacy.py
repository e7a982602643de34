"""What was said to a model is in no log line, whatever goes wrong with it, and in no file and no public answer."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from adapters.errors import InvalidRequest
from adapters.fake import Adapter as FakeAdapter
from adapters.wire.wire_errors import as_failure, error_from_response
from gateway.records import logs
from gateway.records.logs import JSONLines, TextLines
from gateway.tenants.keys import KeyStore, NewKey
from tests.gateway.rig import Gateway, Reply, Script, Start, Upstream, fake, model, until

UpstreamOf = Callable[[Script], Awaitable[Upstream]]

PROMPT = "xyzzyprompt"  # what must not be found anywhere
ANSWER = "plughanswer"
HEADER = "quuxheader"
ECHO = json.dumps({"error": {"message": f"cannot do {PROMPT}", "type": PROMPT, "code": PROMPT}}).encode()
CHAT = {"model": "m", "messages": [{"role": "user", "content": PROMPT}]}
BODIES: list[tuple[str, Any]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, "stream": True}),
    ("/v1/completions", {"model": "m", "prompt": [PROMPT, f"{PROMPT} again"]}),
    ("/v1/messages", {**CHAT, "max_tokens": 9}),
    ("/v1/messages/count_tokens", CHAT),
    ("/v1/responses", {"model": "m", "input": PROMPT}),
    ("/v1/responses", {"model": "m", "input": PROMPT, "stream": True}),
    ("/v1/embeddings", {"model": "m", "input": PROMPT}),
    ("/tokenize", {"model": "m", "prompt": PROMPT}),
    ("/v1/chat/completions", {**CHAT, "temperature": PROMPT}),
    ("/v1/chat/completions", {**CHAT, PROMPT: 1}),
    ("/v1/chat/completions", {**CHAT, "tools": [{"type": "function", "function": {"name": PROMPT, "parameters": 1}}]}),
    ("/v1/chat/completions", {**CHAT, "messages": [{"role": PROMPT, "content": PROMPT}]}),
    ("/v1/chat/completions", f'{{"messages": "{PROMPT}'.encode()),
]


class Lines:
    """Everything that any logger writes, as both formats would have it."""

    def __init__(self) -> None:
        self._sinks = [io.StringIO(), io.StringIO()]
        self.handlers = [logging.StreamHandler(sink) for sink in self._sinks]
        for handler, formatter in zip(self.handlers, (JSONLines(), TextLines()), strict=True):
            handler.setFormatter(formatter)

    def __str__(self) -> str:
        return "".join(sink.getvalue() for sink in self._sinks)


@pytest.fixture
def lines() -> Iterator[Lines]:
    root, before = logging.getLogger(), logging.getLogger().level
    root.setLevel(logging.DEBUG)
    found = Lines()
    for handler in found.handlers:
        root.addHandler(handler)
    yield found
    for handler in found.handlers:
        root.removeHandler(handler)
    root.setLevel(before)


class Clumsy(FakeAdapter):
    """Fails in a way that nobody foresaw, and says what it was asked."""

    async def generate(self, request: Any, *, request_id: str) -> Any:
        async for chunk in super().generate(request, request_id=request_id):
            yield chunk
            if request.is_stream:
                break
        try:
            {}[PROMPT]
        except KeyError as error:
            raise RuntimeError(f"what is {PROMPT}?") from error


async def answers(reply: Reply) -> None:
    await reply.answer(ANSWER)


def fails_with(status: int) -> Script:
    async def script(reply: Reply) -> None:
        await reply.status(status, ECHO)

    return script


async def is_loading(reply: Reply) -> None:
    await reply.status(503, json.dumps({"error": {"message": f"loading, so not {PROMPT}"}}).encode())


async def fails_half_way(reply: Reply) -> None:
    await reply.begin()
    await reply.piece(ANSWER)
    await reply.event(ECHO)
    await reply.end()


async def writes_no_json(reply: Reply) -> None:
    await reply.begin()
    await reply.event(f"{{{PROMPT}".encode())
    await reply.end()


async def send_everything(gateway: Gateway, key: str) -> None:
    headers = {"Authorization": f"Bearer {key}", "x-custom": HEADER, "Content-Type": "application/json"}
    for path, body in BODIES:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with gateway.client.post(f"{gateway.url}{path}?q={PROMPT}", data=data, headers=headers) as response:
            await response.read()
    async with gateway.client.get(f"{gateway.url}/{PROMPT}", headers={**headers, "x-api-key": PROMPT}) as response:
        await response.read()


@pytest.mark.parametrize(
    "script",
    [
        answers,
        fails_with(400),
        fails_with(422),
        fails_with(429),
        fails_with(500),
        fails_with(503),
        is_loading,
        fails_half_way,
        writes_no_json,
    ],
    ids=["answers", "400", "422", "429", "500", "503", "is loading", "half way", "no JSON"],
)
async def test_nothing_of_a_prompt_is_written_whatever_an_engine_does(
    start: Start, upstream_of: UpstreamOf, lines: Lines, tmp_path: Path, script: Script
) -> None:
    engine = await upstream_of(script)
    key = KeyStore(tmp_path).create(NewKey(name="alice"))
    gateway = await start(model(engine.replica()), logs={"level": "debug", "format": "json"})
    await send_everything(gateway, key)
    async with gateway.client.get(f"{gateway.url}/ready") as response:
        assert PROMPT not in await response.text()
    assert engine.requests
    assert str(lines).count('"route":"/v1/chat/completions"') >= 2
    check(str(lines), key)
    await until(lambda: "/v1/embeddings" in written_under(tmp_path))  # the ledger has come that far
    check(written_under(tmp_path), key)


def written_under(folder: Path) -> str:
    return "".join(path.read_bytes().decode("latin-1") for path in folder.rglob("*") if path.is_file())


def check(text: str, key: str) -> None:
    for secret in (PROMPT, ANSWER, HEADER, key):
        at = text.find(secret)
        assert at < 0, text[max(at - 300, 0) : at + 100]


@pytest.mark.replay("A43")
async def test_a43_what_callers_and_engines_write_cannot_forge_a_line(
    start: Start, upstream_of: UpstreamOf, caplog: pytest.LogCaptureFixture
) -> None:
    hostile = (
        'x\n{"level":"error","event":"forged"}\r\x1b[31m%(name)s {0.__class__} ${jndi:ldap://x} \u2028\u202e\u009b31m'
    )

    async def hostile_engine(reply: Reply) -> None:
        await reply.status(500, json.dumps({"error": {"message": hostile}}).encode())

    caplog.set_level(logging.DEBUG)
    engine = await upstream_of(hostile_engine)
    gateway = await start(model(engine.replica()), logs={"verbatim": True})
    for fields in ({}, {"model": hostile}, {"user": hostile}):
        await gateway.chat(**fields)
    async with gateway.client.get(
        f"{gateway.url}/%0aforged%1b", headers={"x-request-id": 'a b="c" \u009b31m'}
    ) as response:
        assert response.status == 404
    events = [record for record in caplog.records if record.name.startswith(logs.ROOT)]
    assert {record.message for record in events} >= {"request", "attempt failed"}
    for record in events:
        as_json, as_text = JSONLines(is_verbatim=True).format(record), TextLines(is_verbatim=True).format(record)
        assert json.loads(as_json)["event"] == record.message
        for line in (as_json, as_text):
            assert line.isprintable()  # so neither a line's end nor what moves a terminal's cursor


async def test_a_fault_that_nobody_foresaw_is_logged_without_its_words(start: Start, lines: Lines) -> None:
    gateway = await start(model({**fake(), "engine": "clumsy"}), engines={"clumsy": Clumsy})
    assert (await gateway.chat(**CHAT))[0] == 500
    async with gateway.client.post(f"{gateway.url}/v1/chat/completions", json={**CHAT, "stream": True}) as response:
        assert "internal_error" in await response.text()
    written = str(lines)
    assert "unexpected failure" in written
    assert "a stream failed" in written
    assert "in generate" in written
    assert "builtins.KeyError" in written
    assert "builtins.RuntimeError" in written
    assert PROMPT not in written


async def test_a_client_that_leaves_takes_its_prompt_along(start: Start, lines: Lines) -> None:
    gateway = await start(model(fake(ttft_ms=10_000)))
    request = asyncio.create_task(gateway.chat(**CHAT))
    await until(lambda: gateway.open_requests.in_flight == 1)
    request.cancel()
    await until(lambda: gateway.open_requests.in_flight == 0)
    await until(lambda: "499" in str(lines))
    assert PROMPT not in str(lines)


async def test_verbatim_logs_have_the_engines_words(start: Start, upstream_of: UpstreamOf, lines: Lines) -> None:
    engine = await upstream_of(fails_with(500))
    gateway = await start(model(engine.replica()), logs={"verbatim": True})
    await gateway.chat(**CHAT)
    assert f"cannot do {PROMPT}" in str(lines)


def test_verbatim_tracebacks_have_the_faults_words() -> None:
    try:
        raise ValueError(PROMPT)
    except ValueError as error:
        record = logging.LogRecord("x", logging.ERROR, "", 0, "failed", (), (type(error), error, error.__traceback__))
    assert PROMPT in TextLines(is_verbatim=True).format(record)
    assert PROMPT not in TextLines().format(record)
    assert json.loads(JSONLines().format(record))["traceback"].endswith("shows what it says)")


def test_an_engines_words_are_kept_from_records_when_they_become_a_failure() -> None:
    error = error_from_response("vllm", 400, ECHO)
    assert isinstance(error, InvalidRequest)
    assert PROMPT in error.message
    failure = as_failure("vllm", error)
    assert PROMPT in failure.message
    assert PROMPT not in failure.for_records
    assert "HTTP 400" in failure.for_records
    silent = error_from_response("vllm", 500, b"")
    assert silent.for_records == silent.message


def test_a_configured_format_follows_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    from gateway.config import LogsConfig

    root = logging.getLogger(logs.ROOT)
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "propagate", True)
    level = root.level
    logs.configure(LogsConfig(verbatim=True))
    root.setLevel(level)
    formatter = root.handlers[0].formatter
    assert isinstance(formatter, TextLines)
    assert formatter._is_verbatim
