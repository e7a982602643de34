"""Models that are loaded when they are asked for: requests wait, the rules hold, and no process is left behind."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import msgspec
import openai
import pytest

from adapters.fake import Adapter as FakeAdapter
from adapters.launching.launch import LaunchSpec
from adapters.launching.restart import Policy
from adapters.launching.supervise import descendants
from adapters.models.model_store import Model, ModelStore
from gateway.app import PARTS
from gateway.replicas.replica import ServedModel, State
from tests.gateway.rig import HELLO, Gateway, Start, fake, model, until
from tests.gateway.test_cancellation import at_rest

PATIENCE_S = 30
NATIVE_MODEL = "smollm2-135m-instruct"
PROMPTLY = {"heartbeat_s": 0.05}
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")


def in_shell(spec: LaunchSpec, before: str) -> LaunchSpec:
    return msgspec.structs.replace(spec, argv=("/bin/sh", "-c", f'{before}; exec "$0" "$@"', *spec.argv))


class Slow(FakeAdapter):
    """The fake engine, which takes its time to load."""

    engine = "slow"

    @classmethod
    def launch_spec(cls, *, home: Path, model: Model, port: int, options: Mapping[str, Any]) -> LaunchSpec:
        spec = super().launch_spec(home=home, model=model, port=port, options=options)
        return in_shell(spec, "sleep 0.7")


class Stuck(FakeAdapter):
    """The fake engine, which loads for ever."""

    engine = "stuck"

    @classmethod
    def launch_spec(cls, *, home: Path, model: Model, port: int, options: Mapping[str, Any]) -> LaunchSpec:
        return in_shell(super().launch_spec(home=home, model=model, port=port, options=options), "sleep 600")


class Frail(FakeAdapter):
    """The fake engine, which ends while it loads as long as the file `frail` in its home says so."""

    engine = "frail"

    @classmethod
    def launch_spec(cls, *, home: Path, model: Model, port: int, options: Mapping[str, Any]) -> LaunchSpec:
        spec = super().launch_spec(home=home, model=model, port=port, options=options)
        return in_shell(spec, f"test -e {home}/frail && {{ sleep 0.3; echo error: out of memory; exit 3; }}")


ENGINES = {"slow": Slow, "stuck": Stuck, "frail": Frail}


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.replicas.lives.RESTARTS", Policy(first_delay_s=0.05, last_delay_s=0.05, max_quick=2))


def on_demand(name: str = "m", engine: str = "fake", fields: dict[str, Any] | None = None, **dials: Any) -> Any:
    options = {"ttft_ms": 1, "itl_ms": 0, "tokens": 3, **dials}
    replica = {"engine": engine, "name": f"{engine}-of-{name}", "launch": True, "model": "tiny", "options": options}
    return model(replica, name=name, load="on_demand", **(fields or {}))


async def begin(start: Start, *models: Any, max_loaded: int | None = None, **sections: Any) -> Gateway:
    residency = {"max_loaded": max_loaded, **sections.pop("residency", {})}
    return await start(*models, engines=ENGINES, is_ready=False, residency=residency, **sections)


def served(gateway: Gateway, name: str = "m") -> ServedModel:
    return gateway.fleet.models[name]


def state_of(gateway: Gateway, name: str = "m") -> dict[str, Any]:
    status = gateway.app[PARTS].loader.status(served(gateway, name))
    assert status is not None
    return status


def loaded(gateway: Gateway) -> set[str]:
    return {name for name, each in gateway.fleet.models.items() if each.is_ready}


def processes() -> list[int]:
    """Engines with their supervisors. What multiprocessing keeps beside the tests' own process is none of theirs."""
    return [pid for pid in descendants(os.getpid()) if not is_resource_tracker(pid)]


def is_resource_tracker(pid: int) -> bool:
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


def resident_mib(pid: int) -> float:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


async def metric(gateway: Gateway, name: str) -> float:
    async with gateway.client.get(f"{gateway.url}/metrics") as response:
        lines = (await response.text()).splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


async def raw_stream(gateway: Gateway, path: str, **fields: Any) -> tuple[int, str]:
    async with gateway.client.post(gateway.url + path, json={**HELLO, "stream": True, **fields}) as response:
        return response.status, await response.text()


async def leave_after(gateway: Gateway, seconds: float, **fields: Any) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    body = json.dumps({**HELLO, **fields}).encode()
    writer.write(HEAD % len(body) + body)
    await asyncio.sleep(seconds)
    writer.close()


async def test_the_first_request_waits_and_is_answered(start: Start) -> None:
    gateway = await begin(start, on_demand())
    assert processes() == []
    assert await gateway.get("/ready") == (200, {"status": "ready"})
    assert [each["id"] for each in (await gateway.get("/v1/models"))[1]["data"]] == ["m"]
    assert served(gateway).replicas[0].state is State.UNLOADED
    status, body, headers = await gateway.chat()
    assert (status, body["usage"]["completion_tokens"]) == (200, 3)
    assert headers["x-goodgate-replica"] == "fake-of-m"
    assert len(processes()) == 2, "a supervisor and an engine"
    assert state_of(gateway) == {"state": "loaded", "open": 0, "waiting": 0, "makes_room": False, "failure": ""}
    assert (await gateway.chat())[0] == 200
    assert await metric(gateway, "goodgate_model_load_seconds_count") == 1
    assert await metric(gateway, "goodgate_model_loaded") == 1


async def test_nothing_is_probed_before_it_is_loaded(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    gateway = await begin(start, on_demand(), health={"interval_s": 0.02})
    await asyncio.sleep(0.2)
    assert served(gateway).replicas[0].state is State.UNLOADED
    assert (await gateway.chat())[0] == 200
    await gateway.app[PARTS].loader.unload(served(gateway))
    await asyncio.sleep(0.2)
    assert served(gateway).replicas[0].state is State.UNLOADED
    assert await metric(gateway, "goodgate_replica_ready") == 1, "an alert for what is merely unloaded wakes people up"
    assert not [each for each in caplog.records if each.levelname == "ERROR"]


async def test_two_hundred_first_requests_start_one_process(start: Start) -> None:
    gateway = await begin(start, on_demand(engine="slow"))
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:

        async def ask() -> int:
            async with client.post(f"{gateway.url}/v1/chat/completions", json=HELLO) as response:
                await response.read()
                return response.status

        answers = asyncio.gather(*(ask() for _ in range(200)))
        await until(lambda: state_of(gateway)["waiting"] == 200, PATIENCE_S)
        assert await metric(gateway, "goodgate_model_waiting") == 200
        assert set(await answers) == {200}
    assert await metric(gateway, "goodgate_model_load_seconds_count") == 1
    assert len(processes()) == 2
    assert state_of(gateway)["open"] == 0


async def test_a_stream_that_waits_gets_heartbeats_and_then_its_answer(start: Start) -> None:
    gateway = await begin(start, on_demand(engine="slow"), server=PROMPTLY)
    status, text = await raw_stream(gateway, "/v1/chat/completions")
    assert status == 200
    assert text.startswith(": keep-alive\n\n" * 3)
    assert text.endswith("data: [DONE]\n\n")
    assert text.count('"content"') >= 3


async def test_a_list_of_prompts_begins_its_stream_once(start: Start) -> None:
    gateway = await begin(start, on_demand(engine="slow"), server=PROMPTLY)
    asked = {"model": "m", "prompt": ["a", "b", "c"], "stream": True}
    async with gateway.client.post(f"{gateway.url}/v1/completions", json=asked) as response:
        text = await response.text()
    assert text.startswith(": keep-alive\n\n")
    assert text.count('"finish_reason":"stop"') == 3
    assert text.endswith("data: [DONE]\n\n")


async def test_official_clients_wait_through_the_heartbeats(start: Start) -> None:
    gateway = await begin(start, on_demand(engine="slow"), server=PROMPTLY)

    async def chat() -> str:
        stream = await gateway.openai.chat.completions.create(**HELLO, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])

    async def message() -> str:
        async with gateway.anthropic.messages.stream(**HELLO, max_tokens=8) as stream:
            return await stream.get_final_text()

    async def response() -> str:
        async with gateway.openai.responses.stream(model="m", input="Hello") as stream:
            return (await stream.get_final_response()).output_text

    answers = await asyncio.gather(chat(), message(), response())
    assert [len(answer.split()) for answer in answers] == [3, 3, 3]


async def test_anthropics_stream_waits_with_pings(start: Start) -> None:
    gateway = await begin(start, on_demand(engine="slow"), server=PROMPTLY)
    status, text = await raw_stream(gateway, "/v1/messages", max_tokens=8)
    assert status == 200
    events = [line.removeprefix("event: ") for line in text.splitlines() if line.startswith("event: ")]
    assert events[:2] == ["ping", "ping"]
    assert events.index("message_start") < events.index("content_block_start")
    assert events[-1] == "message_stop"


async def test_a_load_that_fails_before_the_first_heartbeat_keeps_its_status(start: Start, tmp_path: Path) -> None:
    (tmp_path / "frail").touch()
    gateway = await begin(start, on_demand(engine="frail"))
    for fields in ({}, {"stream": True}):
        await until(lambda: state_of(gateway)["state"] == "unloaded", PATIENCE_S)
        gateway.app[PARTS].loader._slots["m"].retry_at = 0
        status, body, headers = await gateway.chat(**fields)
        assert (status, body["error"]["code"]) == (503, "engine_unavailable")
        assert "Model 'm' could not be loaded: fake ended with exit code 3" in body["error"]["message"]
        assert str(tmp_path) not in body["error"]["message"], "the log's path and lines are for those who run it"
        assert int(headers["retry-after"]) >= 1
    assert "error: out of memory" in served(gateway).replicas[0].details
    assert state_of(gateway)["failure"]
    assert await metric(gateway, "goodgate_model_load_failures_total") == 2


async def test_a_load_that_fails_after_the_first_heartbeat_ends_each_dialects_stream_with_its_error(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "frail").touch()
    gateway = await begin(start, on_demand(engine="frail"), server=PROMPTLY)

    async def chat() -> str:
        with pytest.raises(openai.APIError) as failure:
            async for _ in await gateway.openai.chat.completions.create(**HELLO, stream=True):
                pass
        return str(failure.value)

    async def message() -> str:
        with pytest.raises(anthropic.APIStatusError) as failure:
            async with gateway.anthropic.messages.stream(**HELLO, max_tokens=8) as stream:
                await stream.get_final_text()
        return str(failure.value)

    async def response() -> str:
        with pytest.raises(openai.APIError) as failure:
            async for _ in await gateway.openai.responses.create(model="m", input="Hello", stream=True):
                pass
        return str(failure.value)

    for told in await asyncio.gather(chat(), message(), response()):
        assert "could not be loaded: fake ended with exit code 3" in told


@pytest.mark.parametrize(
    ("path", "fields", "said"),
    [
        ("/v1/chat/completions", {"logit_bias": {"1": 1}}, "'logit_bias'"),
        ("/v1/messages", {"max_tokens": 8, "tools": [{"name": "t", "input_schema": {"type": "object"}}]}, "'tools'"),
        (
            "/v1/responses",
            {"messages": None, "input": "Hi", "text": {"format": {"type": "json_object"}}},
            "'text.format'",
        ),
    ],
)
async def test_what_the_engine_refuses_when_it_is_loaded_is_told_in_the_callers_words(
    start: Start, path: str, fields: dict[str, Any], said: str
) -> None:
    gateway = await begin(start, on_demand(engine="slow"), server=PROMPTLY)
    body = {key: value for key, value in {**HELLO, "stream": True, **fields}.items() if value is not None}
    async with gateway.client.post(gateway.url + path, json=body) as response:
        assert response.status == 200, await response.text()
        text = await response.text()
    assert said in text.split("error", 1)[1]


async def test_after_a_load_that_failed_requests_are_refused_for_a_while_and_then_it_is_tried_again(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "frail").touch()
    gateway = await begin(start, on_demand(engine="frail"))
    assert (await gateway.chat())[0] == 503
    (tmp_path / "frail").unlink()
    status, body, headers = await gateway.chat()
    assert (status, headers["retry-after"]) == (503, "1")
    assert "The next try may be made in 1 s" in body["error"]["message"]
    assert await metric(gateway, "goodgate_model_load_failures_total") == 1
    assert (await gateway.get("/ready"))[0] == 200, "the next request has it loaded"
    await asyncio.sleep(1)
    assert (await gateway.chat())[0] == 200
    assert state_of(gateway)["failure"] == ""


async def test_a_load_that_takes_too_long_is_given_up(start: Start) -> None:
    gateway = await begin(start, on_demand(engine="stuck"), residency={"load_timeout_s": 0.3})
    status, body, _ = await gateway.chat()
    assert status == 503
    assert "It was not ready within 0.3 s (`residency.load_timeout_s`)" in body["error"]["message"]
    await until(lambda: processes() == [], PATIENCE_S)


async def test_a_request_does_not_wait_for_ever(start: Start) -> None:
    gateway = await begin(start, on_demand(engine="stuck"), residency={"wait_timeout_s": 0.3})
    status, body, headers = await gateway.chat()
    assert (status, body["error"]["code"], headers["retry-after"]) == (503, "overloaded", "10")
    assert "within 0.3 s (`residency.wait_timeout_s`)" in body["error"]["message"]
    assert state_of(gateway) == {"state": "loading", "open": 0, "waiting": 0, "makes_room": False, "failure": ""}


async def test_who_waits_in_vain_is_not_told_which_models_others_use(start: Start) -> None:
    hidden = on_demand("hidden", engine="stuck")
    gateway = await begin(start, hidden, on_demand(engine="stuck"), residency={"max_loaded": 1, "wait_timeout_s": 0.3})
    answers = await asyncio.gather(gateway.chat(model="hidden"), gateway.chat())
    assert [status for status, _, _ in answers] == [503, 503]
    assert "hidden" not in answers[1][1]["error"]["message"]


async def test_a_second_model_evicts_the_idle_first(start: Start) -> None:
    gateway = await begin(start, on_demand("a"), on_demand("b"), max_loaded=1)
    assert (await gateway.chat(model="a"))[0] == 200
    first = processes()
    assert (await gateway.chat(model="b"))[0] == 200
    assert loaded(gateway) == {"b"}
    assert len(processes()) == 2
    assert not set(first) & set(processes())
    assert await metric(gateway, 'goodgate_model_unloads_total{model="a",reason="evicted"}') == 1
    assert served(gateway, "a").replicas[0].reason == "It is loaded when a request comes."


async def test_models_of_one_group_stay_together_and_another_takes_their_place(start: Start) -> None:
    models = [on_demand(name) for name in "abc"]
    gateway = await begin(start, *models, residency={"groups": [["a", "b"], ["c"]]})
    assert [(await gateway.chat(model=name))[0] for name in "ab"] == [200, 200]
    assert loaded(gateway) == {"a", "b"}
    assert (await gateway.chat(model="c"))[0] == 200
    assert loaded(gateway) == {"c"}


async def test_memory_is_not_promised_twice(start: Start) -> None:
    sizes = {"a": 6, "b": 5, "c": 4}
    models = [on_demand(name, fields={"memory_gib": size}) for name, size in sizes.items()]
    gateway = await begin(start, *models, residency={"memory_gib": 10})
    for name, left in (("a", {"a"}), ("c", {"a", "c"}), ("b", {"b", "c"})):
        assert (await gateway.chat(model=name))[0] == 200
        assert loaded(gateway) == left


async def test_a_busy_model_is_never_evicted_and_who_comes_meanwhile_waits_his_turn(start: Start) -> None:
    busy = on_demand("a", itl_ms=20, tokens=60)
    gateway = await begin(start, busy, on_demand("b"), max_loaded=1)
    order: list[str] = []

    async def ask(name: str, label: str, **fields: Any) -> None:
        events = await gateway.events(model=name, **fields)
        assert events[-1] == "[DONE]"
        order.append(label)

    first = asyncio.create_task(ask("a", "a"))
    await until(lambda: served(gateway, "a").replicas[0].in_flight == 1, PATIENCE_S)
    second = asyncio.create_task(ask("b", "b"))
    await until(lambda: state_of(gateway, "a")["makes_room"])
    third = asyncio.create_task(ask("a", "a again", max_tokens=2))
    await until(lambda: state_of(gateway, "a")["waiting"] == 1)
    await asyncio.gather(first, second, third)
    assert order == ["a", "b", "a again"]


async def test_two_models_that_take_turns_under_load_answer_every_request(start: Start) -> None:
    gateway = await begin(start, on_demand("a"), on_demand("b"), max_loaded=1)
    most = 0

    async def client(number: int) -> list[int]:
        nonlocal most
        statuses = []
        for turn in range(4):
            statuses.append((await gateway.chat(model="ab"[(number + turn) % 2]))[0])
            most = max(most, len(loaded(gateway)))
        return statuses

    answers = await asyncio.gather(*(client(number) for number in range(8)))
    assert answers == [[200] * 4] * 8
    assert most == 1
    assert state_of(gateway, "a")["open"] == state_of(gateway, "b")["open"] == 0


@pytest.mark.replay("F14")
async def test_f14_a_client_that_leaves_during_a_load_leaks_nothing(start: Start) -> None:
    gateway = await begin(start, on_demand(engine="slow"), server=PROMPTLY)
    await asyncio.gather(leave_after(gateway, 0.05), leave_after(gateway, 0.2, stream=True))
    await until(lambda: state_of(gateway)["waiting"] == 0 and at_rest(gateway))
    assert state_of(gateway)["state"] == "loading", "the load goes on: whoever asked once asks again"
    await until(lambda: served(gateway).is_ready, PATIENCE_S)
    assert state_of(gateway)["open"] == 0
    assert (await gateway.chat())[0] == 200


async def test_a_load_for_nobody_is_given_up_for_a_model_that_is_waited_for(start: Start) -> None:
    gateway = await begin(start, on_demand("a", engine="stuck"), on_demand("b"), max_loaded=1)
    await leave_after(gateway, 0.3, model="a")
    assert (await gateway.chat(model="b"))[0] == 200
    assert state_of(gateway, "a")["state"] == "unloaded"
    assert len(processes()) == 2


async def test_clients_that_come_and_go_at_any_moment_leave_the_counts_right(start: Start) -> None:
    gateway = await begin(start, on_demand("a", itl_ms=5), on_demand("b", itl_ms=5), max_loaded=1, server=PROMPTLY)
    moments = [0.002 * number**2 for number in range(24)]
    leaving = (leave_after(gateway, at, model="ab"[n % 2], stream=n % 3 > 0) for n, at in enumerate(moments))
    await asyncio.gather(*leaving)
    await until(lambda: gateway.open_requests.in_flight == 0)
    assert [(await gateway.chat(model=name))[0] for name in "ab"] == [200, 200]
    assert {state_of(gateway, name)[count] for name in "ab" for count in ("open", "waiting")} == {0}


async def test_an_idle_model_is_unloaded_and_its_process_is_gone(start: Start) -> None:
    gateway = await begin(start, on_demand(fields={"unload_after_s": 0.3}))
    assert (await gateway.chat())[0] == 200
    await until(lambda: processes() == [], PATIENCE_S)
    assert await metric(gateway, 'goodgate_model_unloads_total{model="m",reason="idle"}') == 1
    assert (await gateway.chat())[0] == 200


async def test_the_clock_of_an_idle_model_stands_still_while_it_answers(start: Start) -> None:
    gateway = await begin(start, on_demand(fields={"unload_after_s": 0.2}, itl_ms=200, tokens=4))
    assert (await gateway.events())[-1] == "[DONE]"
    assert await metric(gateway, "goodgate_model_load_seconds_count") == 1


async def test_an_engine_that_ends_by_itself_is_started_again_and_given_up_until_the_next_request(
    start: Start,
) -> None:
    gateway = await begin(start, on_demand())
    assert (await gateway.chat())[0] == 200
    (replica,) = served(gateway).replicas
    for lives in (1, 2):
        assert replica.process is not None
        assert replica.process.pid is not None
        os.kill(descendants(replica.process.pid)[0], 9)
        if lives == 1:
            await until(lambda: replica.num_restarts == 1 and replica.is_ready, PATIENCE_S)
            assert (await gateway.chat())[0] == 200
    await until(lambda: replica.state is State.UNLOADED, PATIENCE_S)
    assert "2 quick crashes in a row" in replica.reason
    assert gateway.fleet.fatal is not None
    assert not gateway.fleet.fatal.done()
    gateway.app[PARTS].loader._slots["m"].retry_at = 0
    assert (await gateway.chat())[0] == 200


async def test_admins_load_and_unload(start: Start) -> None:
    gateway = await begin(start, on_demand(itl_ms=50, tokens=20), model(fake(), name="always"))
    status, told, _ = await gateway.post("/admin/models/m/load", {})
    assert (status, told["ready"], told["on_demand"]["state"]) == (200, True, "loaded")
    stream = asyncio.create_task(gateway.events())
    await until(lambda: state_of(gateway)["open"] == 1)
    status, told, _ = await gateway.post("/admin/models/m/unload", {})
    assert (status, told["error"]["code"]) == (409, "model_busy")
    assert (await stream)[-1] == "[DONE]"
    status, told, _ = await gateway.post("/admin/models/m/unload", {})
    assert (status, told["ready"], told["on_demand"]["state"]) == (200, False, "unloaded")
    assert processes() == []
    assert (await gateway.post("/admin/models/m/unload", {}))[0] == 200, "it is unloaded, as was wanted"
    status, told, _ = await gateway.post("/admin/models/always/unload", {})
    assert status == 400
    assert "`load: on_demand`" in told["error"]["message"]
    assert (await gateway.post("/admin/models/nobody/load", {}))[0] == 404


async def test_a_fallback_is_loaded_only_when_it_is_reached(start: Start) -> None:
    broken = model(fake("broken", fail_rate=1), name="m", fallbacks=["spare"])
    sound = model(fake("sound"), name="n", fallbacks=["spare"])
    gateway = await begin(start, broken, sound, on_demand("spare"))
    await until(lambda: loaded(gateway) == {"m", "n"})
    assert (await gateway.chat(model="n"))[0] == 200
    assert processes() == []
    status, _, headers = await gateway.chat(model="m")
    assert (status, headers["x-goodgate-replica"]) == (200, "fake-of-spare")


async def test_a_model_that_cannot_be_loaded_falls_back(start: Start, tmp_path: Path) -> None:
    (tmp_path / "frail").touch()
    models = on_demand("m", engine="frail", fields={"fallbacks": ["spare"]}), on_demand("spare")
    gateway = await begin(start, *models, max_loaded=1, server=PROMPTLY)
    status, text = await raw_stream(gateway, "/v1/chat/completions")
    assert status == 200
    assert text.startswith(": keep-alive")
    assert '"model":"spare"' in text
    assert text.endswith("data: [DONE]\n\n")


async def test_a_request_that_falls_back_gives_up_the_place_of_the_model_that_failed_it(start: Start) -> None:
    """Or it would wait for itself to leave."""
    models = on_demand("m", fields={"fallbacks": ["spare"]}, fail_rate=1), on_demand("spare")
    gateway = await begin(start, *models, max_loaded=1)
    status, _, headers = await gateway.chat()
    assert (status, headers["x-goodgate-replica"]) == (200, "fake-of-spare")


async def test_a_group_has_its_models_loaded_one_after_the_other(start: Start, tmp_path: Path) -> None:
    (tmp_path / "frail").touch()
    group = {"name": "best", "models": ["a", "b", "c"]}
    models = on_demand("a", engine="frail"), on_demand("b"), on_demand("c")
    gateway = await begin(start, *models, groups=[group])
    status, _, headers = await gateway.chat(model="best")
    assert (status, headers["x-goodgate-replica"]) == (200, "fake-of-b")
    assert loaded(gateway) == {"b"}


async def test_a_prompt_too_long_for_one_model_frees_its_place_for_another(start: Start) -> None:
    """Or the request would wait for itself to leave."""
    models = on_demand("m", fields={"context_fallbacks": ["long"]}, max_model_len=4), on_demand("long")
    gateway = await begin(start, *models, max_loaded=1)
    status, _, headers = await gateway.chat(messages=[{"role": "user", "content": "one two three four five"}])
    assert (status, headers["x-goodgate-replica"]) == (200, "fake-of-long")


async def test_embeddings_wait_too(start: Start) -> None:
    gateway = await begin(start, on_demand(engine="slow"))
    status, body, _ = await gateway.post("/v1/embeddings", {"model": "m", "input": "river"})
    assert (status, len(body["data"])) == (200, 1)
    assert state_of(gateway)["open"] == 0


async def test_the_log_tells_how_long_a_request_waited(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    gateway = await begin(start, on_demand(engine="slow"))
    with caplog.at_level("INFO"):
        await gateway.chat()
        await gateway.chat()
    waits = [each.__dict__["fields"].get("waited_ms") for each in caplog.records if each.getMessage() == "request"]
    assert waits[0] > 500
    assert waits[1] is None


@pytest.fixture
def native_home(tmp_path: Path) -> None:
    """The gateway's home has the default model, and the kernels that were compiled before."""
    home = Path(os.environ.get("GOODGATE_HOME", ".goodgate")).resolve()
    if not (home / "models" / NATIVE_MODEL).exists():
        ModelStore(home).pull(NATIVE_MODEL)
    for folder in ("models", "cache"):
        (home / folder).mkdir(exist_ok=True)
        (tmp_path / folder).symlink_to(home / folder)


@pytest.mark.usefixtures("native_home")
async def test_our_own_engine_is_loaded_by_a_request_and_its_memory_is_free_again(start: Start) -> None:
    replica = {"engine": "native", "launch": True, "model": NATIVE_MODEL, "options": {"kv_cache_mib": 64}}
    gateway = await begin(start, model(replica, load="on_demand"), server={"heartbeat_s": 0.5})
    status, text = await raw_stream(gateway, "/v1/chat/completions", max_tokens=4)
    assert status == 200
    assert text.startswith(": keep-alive")
    assert text.endswith("data: [DONE]\n\n")
    engines = processes()
    assert sum(resident_mib(pid) for pid in engines) > 200
    assert (await gateway.post("/admin/models/m/unload", {}))[0] == 200
    assert processes() == []
    assert sum(resident_mib(pid) for pid in engines) == 0


@pytest.mark.parametrize("engine", ["slow", "stuck"])
async def test_stopping_while_a_model_is_loaded_leaves_no_process(start: Start, engine: str) -> None:
    gateway = await begin(start, on_demand(engine=engine), on_demand("n"), max_loaded=1)
    asked = [asyncio.create_task(gateway.chat(model=name)) for name in "mn"]
    await until(lambda: len(processes()) >= 2, PATIENCE_S)
    began = time.monotonic()
    await gateway.open_requests.drain(0.1)
    await gateway.app[PARTS].loader.close()
    await gateway.fleet.close()
    assert processes() == []
    assert time.monotonic() - began < 10
    assert {status for status, _, _ in await asyncio.gather(*asked)} == {503}
