"""What the ledger keeps of a request, seen through real sockets: tokens, times, attempts, candidates, no text."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from adapters.errors import UnsupportedParameter
from adapters.fake import Adapter as FakeAdapter
from adapters.types import GenerateRequest
from gateway.records.ledger_files import FOLDER
from gateway.records.ledger_reader import LedgerReader, Span
from gateway.records.record import PHASES, Record, detail_of
from gateway.tenants.keys import KeyStore, NewKey
from tests.gateway.rig import HELLO, Gateway, Reply, Script, Start, Upstream, fake, fake_model, model, until
from tests.gateway.routing.test_evidence import NATIVE, document, write

UpstreamOf = Callable[[Script], Awaitable[Upstream]]
DEAD = {"engine": "vllm", "name": "dead", "options": {"url": "http://127.0.0.1:9", "model": "x"}}


@pytest.fixture
def reader(tmp_path: Path) -> LedgerReader:
    return LedgerReader(tmp_path / FOLDER)


async def kept(reader: LedgerReader, request_id: str) -> Record:
    """The record of a request that has just ended."""
    await until(lambda: reader.find(request_id) is not None)
    found = reader.find(request_id)
    assert found is not None
    return found.record


async def record_of_chat(gateway: Gateway, reader: LedgerReader, **fields: Any) -> Record:
    _, _, headers = await gateway.chat(**fields)
    return await kept(reader, headers["x-request-id"])


def verdicts(record: Record) -> dict[str, str]:
    return {candidate.replica: candidate.verdict for candidate in detail_of(record).candidates}


async def test_every_kind_of_answer_leaves_one_record_with_the_usage_that_it_told(
    start: Start, reader: LedgerReader
) -> None:
    gateway = await start(fake_model(tokens=7))
    prompts = {"model": "m", "prompt": ["one two", "three", "four"], "max_tokens": 4}
    messages = {"model": "m", "max_tokens": 5, "messages": HELLO["messages"]}
    for path, body, counts in [
        ("/v1/chat/completions", HELLO, ("prompt_tokens", "completion_tokens")),
        ("/v1/chat/completions", {**HELLO, "n": 3}, ("prompt_tokens", "completion_tokens")),
        ("/v1/completions", prompts, ("prompt_tokens", "completion_tokens")),
        ("/v1/messages", messages, ("input_tokens", "output_tokens")),
        ("/v1/responses", {"model": "m", "input": "Hello"}, ("input_tokens", "output_tokens")),
        ("/v1/embeddings", {"model": "m", "input": ["a b", "c"]}, ("prompt_tokens",)),
    ]:
        status, answer, headers = await gateway.post(path, body)
        assert status == 200, answer
        record = await kept(reader, headers["x-request-id"])
        told = [answer["usage"][name] for name in counts]
        assert [record.prompt_tokens, record.completion_tokens][: len(told)] == told, path
        assert (record.route, record.status, record.model, record.is_estimated) == (path, 200, "m", False)
        assert record.prompt_tokens > 0


@pytest.mark.replay("G15")
async def test_g15_a_stream_whose_client_did_not_ask_for_usage_has_it_in_its_record(
    start: Start, upstream_of: UpstreamOf, reader: LedgerReader
) -> None:
    upstream = await upstream_of(lambda reply: reply.answer("a", "b", "c"))
    gateway = await start(model(upstream.replica()))
    async with gateway.client.post(f"{gateway.url}/v1/chat/completions", json={**HELLO, "stream": True}) as response:
        assert '"usage"' not in await response.text()
        record = await kept(reader, response.headers["x-request-id"])
    assert (record.prompt_tokens, record.completion_tokens, record.is_estimated) == (3, 3, False)
    assert (record.is_stream, record.status) == (True, 200)


@pytest.mark.replay("G06")
async def test_g06_a_client_that_leaves_at_token_20_has_an_estimate_of_at_least_20_tokens(
    start: Start, upstream_of: UpstreamOf, reader: LedgerReader
) -> None:
    async def twenty(reply: Reply) -> None:
        await reply.begin()
        for number in range(20):
            await reply.piece(f"w{number} ")
        await reply.until_left()

    upstream = await upstream_of(twenty)
    gateway = await start(model(upstream.replica()))
    headers = {"x-request-id": "left"}
    body = {**HELLO, "stream": True, "messages": [{"role": "user", "content": "a long prompt " * 20}]}
    async with gateway.client.post(f"{gateway.url}/v1/chat/completions", json=body, headers=headers) as response:
        await response.content.readuntil(b"w19")
        response.close()
    record = await kept(reader, "left")
    assert record.is_estimated
    assert 20 <= record.completion_tokens <= 22
    assert record.prompt_tokens >= 50
    assert (record.status, record.has_left, record.has_failed) == (499, True, False)
    assert detail_of(record).attempts[0].outcome == "cancelled"


@pytest.mark.replay("S16")
async def test_s16_the_account_names_the_fallback_model_that_answered(start: Start, reader: LedgerReader) -> None:
    gateway = await start(
        model(fake("broken", fail_rate=1), name="m", aliases=["alias"], fallbacks=["other"]),
        model(fake("good", tokens=6), name="other"),
    )
    record = await record_of_chat(gateway, reader, model="alias")
    assert (record.asked_model, record.model, record.served_model) == ("alias", "m", "other")
    assert (record.replica, record.completion_tokens, record.num_attempts) == ("good", 6, 2)
    [row], total = reader.usage(("model",), Span())
    assert (row.group, row.completion_tokens) == (("other",), 6)
    assert total == msgspec.structs.replace(row, group=())


async def test_the_phases_follow_each_other_and_sum_up_to_the_duration(start: Start, reader: LedgerReader) -> None:
    gateway = await start(model(fake("broken", fail_rate=1, ttft_ms=30), fake("good", ttft_ms=60, itl_ms=10, tokens=6)))
    record = await record_of_chat(gateway, reader)
    assert list(record.phases) == list(PHASES)
    assert sum(record.phases.values()) == pytest.approx(record.duration_s)
    assert record.failed_s >= 0.02
    assert record.prefill_s >= 0.05
    assert record.decode_s >= 0.04
    assert record.tpot_s == pytest.approx(record.decode_s / 5)
    assert record.ttft_s == pytest.approx(record.duration_s - record.decode_s, abs=0.05)
    assert record.engine_s == pytest.approx(record.prefill_s + record.decode_s, rel=0.1)  # what failed was no work
    failed, good = detail_of(record).attempts
    assert (failed.replica, failed.outcome, good.replica, good.outcome) == ("broken", "engine_failed", "good", "ok")
    assert failed.reason
    assert failed.ended_s <= good.started_s
    assert verdicts(record) == {"broken": "chosen 1st: engine_failed", "good": "chosen 2nd: answered"}


async def test_a_body_that_comes_slowly_is_its_clients_time(start: Start, reader: LedgerReader) -> None:
    gateway = await start(fake_model())

    async def slowly() -> Any:
        yield json.dumps(HELLO).encode()[:10]
        await asyncio.sleep(0.2)
        yield json.dumps(HELLO).encode()[10:]

    headers = {"Content-Type": "application/json", "x-request-id": "slow"}
    async with gateway.client.post(f"{gateway.url}/v1/chat/completions", data=slowly(), headers=headers) as response:
        assert response.status == 200
    record = await kept(reader, "slow")
    assert record.receive_s >= 0.15
    assert record.receive_s == max(record.phases.values())


async def test_a_client_that_takes_nothing_is_not_a_slow_engine(start: Start, reader: LedgerReader) -> None:
    gateway = await start(fake_model(tokens=60_000))
    body = json.dumps({**HELLO, "stream": True}).encode()
    asked, writer = await asyncio.open_connection("127.0.0.1", gateway.port, limit=1024)
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nx-request-id: stuck\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    )
    await asked.readuntil(b"\r\n\r\n")
    await asyncio.sleep(1.5)
    while not (await asked.read(1 << 20)).endswith(b"0\r\n\r\n"):
        pass
    writer.close()
    record = await kept(reader, "stuck")
    assert record.client_s >= 0.1
    assert sum(record.phases.values()) == pytest.approx(record.duration_s)
    assert record.completion_tokens == 60_000


async def test_a_refused_request_has_a_record_with_its_code(start: Start, reader: LedgerReader) -> None:
    gateway = await start(fake_model())
    record = await record_of_chat(gateway, reader, model="nope\x1b[31m")
    assert (record.status, record.code, record.model, record.num_attempts) == (404, "model_not_found", "", 0)
    assert record.asked_model == "nope\x1b[31m"
    record = await record_of_chat(gateway, reader, temperature="hot")
    assert (record.status, record.asked_model, record.has_failed) == (400, "", True)
    assert sum(record.phases.values()) == pytest.approx(record.duration_s)


async def test_the_candidates_say_who_could_have_served_and_why_not(start: Start, reader: LedgerReader) -> None:
    gateway = await start(
        model(fake("chosen"), fake("spare"), DEAD, fallbacks=["other"]), model(fake(), name="other"), is_ready=False
    )
    await until(lambda: gateway.fleet.replicas[0].is_ready and gateway.fleet.replicas[1].is_ready)
    await until(lambda: "127.0.0.1:9" in gateway.fleet.replicas[2].reason)
    record = await record_of_chat(gateway, reader)
    said = verdicts(record)
    assert (said["chosen"], said["spare"]) == ("chosen 1st: answered", "not needed")
    assert said["dead"].startswith("not ready: ")
    assert [candidate.place for candidate in detail_of(record).candidates] == [0, 1, None]
    assert detail_of(record).not_reached == ("other",)


async def test_the_candidates_of_a_group_are_the_replicas_of_its_models(start: Start, reader: LedgerReader) -> None:
    gateway = await start(
        model(fake(fail_rate=1), name="first"),
        model(fake(), name="second"),
        groups=[{"name": "both", "models": ["first", "second"], "routing": "order"}],
    )
    record = await record_of_chat(gateway, reader, model="both")
    assert (record.model, record.served_model) == ("both", "second")
    candidates = detail_of(record).candidates
    assert [(each.model, each.policy, each.verdict) for each in candidates] == [
        ("first", "order", "chosen 1st: engine_failed"),
        ("second", "order", "chosen 2nd: answered"),
    ]
    assert detail_of(record).not_reached == ()


async def test_a_replica_that_cannot_honour_a_field_is_a_candidate_that_was_refused(
    start: Start, reader: LedgerReader
) -> None:
    class Plain(FakeAdapter):
        def check_parameters(self, request: GenerateRequest) -> None:
            raise UnsupportedParameter("top_k", "plain")

    plain = {"engine": "plain", "options": {}}
    gateway = await start(model(plain, fake()), engines={"plain": Plain})
    record = await record_of_chat(gateway, reader, top_k=5)
    assert record.status == 200
    assert verdicts(record)["fake-1"] == "chosen 1st: answered"
    assert verdicts(record)["plain-0"].startswith("refused: ")
    assert "top_k" in verdicts(record)["plain-0"]


async def test_what_a_race_has_proven_stands_beside_the_candidates(
    start: Start, reader: LedgerReader, tmp_path: Path
) -> None:
    write(tmp_path / "evidence.json", document(NATIVE))
    gateway = await start(model(fake(), fake("other", ttft_ms=1)), evidence=str(tmp_path / "evidence.json"))
    record = await record_of_chat(gateway, reader)
    assert [candidate.proven_rps for candidate in detail_of(record).candidates] == [6.3, 6.3]


async def test_what_concerns_no_model_or_has_no_valid_key_is_not_kept(
    start: Start, reader: LedgerReader, tmp_path: Path
) -> None:
    secret = KeyStore(tmp_path).create(NewKey(name="alice", tenant="acme"))
    gateway = await start(fake_model())
    key = {"Authorization": f"Bearer {secret}"}
    for path in ("/health", "/ready", "/v1/models", "/nowhere"):
        async with gateway.client.get(gateway.url + path, headers=key):
            pass
    assert (await gateway.post("/v1/nowhere", HELLO, **key))[0] == 404
    assert (await gateway.chat())[0] == 401
    assert (await gateway.post("/v1/chat/completions", HELLO, Authorization="Bearer gg-wrong"))[0] == 401
    _, _, headers = await gateway.post("/v1/chat/completions", HELLO, **key)
    record = await kept(reader, headers["x-request-id"])
    assert (record.tenant, record.key) == ("acme", "alice")
    _, total = reader.usage((), Span())
    assert total is not None
    assert total.requests == 1


async def test_no_file_of_the_ledger_holds_a_prompt_an_answer_a_header_or_a_key(
    start: Start, reader: LedgerReader, tmp_path: Path
) -> None:
    secret = KeyStore(tmp_path).create(NewKey(name="alice"))
    gateway = await start(model(fake(fail_rate=0.5)))
    headers = {"Authorization": f"Bearer {secret}", "User-Agent": "xyzzy-agent", "Cookie": "a=xyzzy-cookie"}
    body = {**HELLO, "messages": [{"role": "user", "content": "xyzzy-prompt"}], "stop": ["xyzzy-stop"]}
    for stream in (False, True):
        for _ in range(4):
            async with gateway.client.post(
                f"{gateway.url}/v1/chat/completions", json={**body, "stream": stream}, headers=headers
            ) as response:
                answer = await response.text()
                await kept(reader, response.headers["x-request-id"])
    written = b"".join(path.read_bytes() for path in reader.folder.iterdir())
    assert b"alice" in written
    for forbidden in ("xyzzy", secret, secret.removeprefix("gg-")):
        assert forbidden.encode() not in written
    assert answer


async def test_a_tenant_that_reuses_ids_hides_nothing_of_another(
    start: Start, reader: LedgerReader, tmp_path: Path
) -> None:
    store = KeyStore(tmp_path)
    alice, bob = (store.create(NewKey(name=name)) for name in ("alice", "bob"))
    gateway = await start(fake_model())
    for secret, number in ((alice, 1), (bob, 3)):
        for _ in range(number):
            await gateway.post(
                "/v1/chat/completions", HELLO, Authorization=f"Bearer {secret}", **{"x-request-id": "id"}
            )
    await until(lambda: (found := reader.find("id")) is not None and found.count == 4)
    found, of_alice = reader.find("id"), reader.find("id", "alice")
    assert found is not None
    assert of_alice is not None
    assert (found.record.tenant, found.tenants) == ("bob", ("alice", "bob"))
    assert (of_alice.record.tenant, of_alice.count) == ("alice", 1)


async def test_a_gateway_that_is_to_keep_nothing_makes_no_folder(start: Start, reader: LedgerReader) -> None:
    gateway = await start(fake_model(), ledger={"keep": "none"})
    assert (await gateway.chat())[0] == 200
    assert not reader.folder.exists()


async def test_a_folder_that_cannot_be_written_does_not_stop_serving(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / FOLDER).write_text("in the way")
    gateway = await start(fake_model())
    for _ in range(3):
        assert (await gateway.chat())[0] == 200
    await until(lambda: "the ledger cannot be written" in caplog.text)
    assert (await gateway.chat())[0] == 200
    assert caplog.text.count("the ledger cannot be written") == 1
    (tmp_path / FOLDER).unlink()
    await until(lambda: (LedgerReader(tmp_path / FOLDER).usage((), Span())[1] or NOTHING).requests == 4)
    metrics = await metrics_of(gateway)
    assert (metrics["goodgate_ledger_records_total"], metrics["goodgate_ledger_dropped_total"]) == (4, 0)


class NOTHING:
    requests = 0


async def metrics_of(gateway: Gateway) -> Mapping[str, float]:
    async with gateway.client.get(f"{gateway.url}/metrics") as response:
        lines = (await response.text()).splitlines()
    return {line.split()[0]: float(line.split()[1]) for line in lines if line.startswith("goodgate_ledger")}


async def test_a_client_that_has_its_whole_stream_did_not_leave_too_early(
    start: Start, reader: LedgerReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = KeyStore(tmp_path).create(NewKey(name="alice"))
    gateway = await start(fake_model())
    quotas = gateway.quotas
    reserved = quotas.reserved

    @asynccontextmanager
    async def slow_to_release(*arguments: Any, **options: Any) -> AsyncIterator[Any]:
        async with reserved(*arguments, **options) as reservation:
            yield reservation
            await asyncio.sleep(30)

    monkeypatch.setattr(quotas, "reserved", slow_to_release)
    headers = {"Authorization": f"Bearer {secret}", "x-request-id": "whole"}
    body = {**HELLO, "stream": True}
    async with gateway.client.post(f"{gateway.url}/v1/chat/completions", json=body, headers=headers) as response:
        assert (await response.text()).endswith("data: [DONE]\n\n")
    await gateway.client.close()
    record = await kept(reader, "whole")
    assert (record.status, record.has_left, record.is_estimated) == (200, False, False)
