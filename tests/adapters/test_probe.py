"""The probe: an honest engine passes, every lie is caught by name, and an engine behind a url is recognised."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from adapters.cli import app
from adapters.errors import EngineFailed, EngineTimeout, EngineUnavailable, InvalidRequest, Overloaded
from adapters.fake import FakeOptions
from adapters.probing import life, proofs
from adapters.probing import probe as probing
from adapters.probing.answers import fold
from adapters.probing.faces import headline, tally, times_markdown, verdicts_markdown
from adapters.probing.probe import Report, Result, probe, served_model
from adapters.probing.recognise import recognise, tell
from adapters.probing.verdicts import MEANINGS, Seen, Verdict, from_error, honoured, ignored, judge
from adapters.registry import adapter_class
from adapters.servers import fake_server
from adapters.types import Chunk
from tests.adapters import honest_engine
from tests.contract.twin import Reply, Twin

# What one answer cannot show, however honest the engine is.
UNPROVABLE = {
    "parallel_tool_calls", "reasoning_effort", "unknown model", "functions", "function_call", "prediction",
    "modalities", "audio", "web_search_options",
}  # fmt: skip


async def probed(**options: Any) -> dict[str, Result]:
    adapter = honest_engine.Adapter(msgspec.convert(options, honest_engine.HonestOptions))
    return {each.capability: each for each in (await probe(adapter)).results}


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a twin does not tell at once, it never will."""
    monkeypatch.setattr(life, "LOAD_WITHIN_S", 0.1)
    monkeypatch.setattr(life, "IDLE_WITHIN_S", 0.1)


async def test_an_honest_engine_is_verified_in_everything_that_can_be_shown() -> None:
    results = await probed()
    assert {name for name, each in results.items() if each.verdict is Verdict.NOT_SHOWN} == UNPROVABLE
    rest = {name: each for name, each in results.items() if name not in UNPROVABLE}
    assert {name: each.evidence for name, each in rest.items() if each.verdict is not Verdict.VERIFIED} == {}


LIES = {
    "max_tokens": "max_tokens", "max_completion_tokens": "max_completion_tokens", "min_tokens": "min_tokens",
    "ignore_eos": "ignore_eos", "stop": "stop", "temperature": "temperature", "top_p": "top_p", "top_k": "top_k",
    "min_p": "min_p", "seed": "seed", "logit_bias": "logit_bias", "bad_words": "bad_words",
    "presence_penalty": "presence_penalty", "frequency_penalty": "frequency_penalty",
    "repetition_penalty": "repetition_penalty", "n": "n", "echo": "echo", "suffix": "suffix", "logprobs": "logprobs",
    "top_logprobs": "top_logprobs", "response_format": "response_format", "tokenize": "tokenise a text",
    "tokenize_chat": "tokenise a chat", "detokenize": "detokenise",
    "token_prompts": "prompts of token ids", "usage_so_far": "usage in each event",
    "embeddings": "embeddings", "dimensions": "chosen dimensions",
    "running": "running requests", "kv_usage": "KV cache use", "prefix_hit_rate": "prefix cache hits",
    "draft_tokens": "draft tokens", "accepted_draft_tokens": "accepted draft tokens",
    "cache_salt.chat": "tenants apart in chats", "cache_salt.completions": "tenants apart in completions",
    "usage": "usage", "cancellation": "cancellation", "context overflow": "context overflow",
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
async def test_a_lie_is_caught_by_its_name(lie: str) -> None:
    results = await probed(lies=[lie])
    assert results[LIES[lie]].verdict is Verdict.CONTRADICTED


@pytest.mark.parametrize("lie", ["stop", "seed", "top_k", "response_format", "echo", "cache_salt.chat"])
async def test_one_lie_is_not_held_against_another_capability(lie: str) -> None:
    contradicted = {name for name, each in (await probed(lies=[lie])).items() if each.verdict is Verdict.CONTRADICTED}
    assert contradicted == {LIES[lie]}


async def test_a_model_that_calls_no_tool_is_no_contradiction() -> None:
    results = await probed(lies=["tools"])
    assert results["tools"].verdict is Verdict.NOT_SHOWN
    assert "no call" in results["tools"].evidence


async def test_a_declared_field_that_is_refused_is_contradicted_with_the_engines_words() -> None:
    result = (await probed(refuses=["min_p"]))["min_p"]
    assert (result.seen, result.verdict) == (Seen.REFUSED, Verdict.CONTRADICTED)
    assert "This model has no min_p" in result.evidence


async def test_what_is_not_declared_and_refused_is_not_offered() -> None:
    results = await probed(lacks=["min_p", "kv_usage"])
    assert results["min_p"].verdict is Verdict.NOT_OFFERED
    assert not results["min_p"].declared


async def test_a_probe_without_time_left_says_so_and_contradicts_nothing() -> None:
    adapter = honest_engine.Adapter(honest_engine.HonestOptions(lies=frozenset({"stop"})))
    report = await probe(adapter, timeout_s=1e-9)
    assert {each.verdict for each in report.results} == {Verdict.NOT_SHOWN}
    assert "raise --timeout" in report.results[0].evidence


async def test_a_silent_engine_costs_one_question_its_time_and_not_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(lab: Any) -> Any:
        await asyncio.Event().wait()

    monkeypatch.setattr(probing, "QUESTION_TIMEOUT_S", 0.05)
    monkeypatch.setitem(proofs.PROOFS, "stop", never)
    results = await probed()
    assert (results["stop"].verdict, results["stop"].evidence) == (Verdict.NOT_SHOWN, "no answer within 0.05 s")
    assert results["temperature"].verdict is Verdict.VERIFIED


async def test_a_contradiction_has_to_show_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Near ties between tokens fall either way, and an answer may then look as if it had ignored something."""
    seen = iter([ignored("a near tie"), honoured("the second time")])

    async def unlucky_once(lab: Any) -> Any:
        return next(seen)

    monkeypatch.setitem(proofs.PROOFS, "stop", unlucky_once)
    assert (await probed())["stop"].verdict is Verdict.VERIFIED


@pytest.mark.parametrize(
    ("lacks", "verdict"), [([], Verdict.CONTRADICTED), (["temperature"], Verdict.NOT_SHOWN)], ids=["with", "without"]
)
async def test_what_looks_ignored_is_no_contradiction_without_temperature(
    monkeypatch: pytest.MonkeyPatch, lacks: list[str], verdict: Verdict
) -> None:
    """Then no answer can be repeated, and the next one differs anyway."""

    async def looks_ignored(lab: Any) -> Any:
        return ignored("another answer")

    monkeypatch.setitem(proofs.PROOFS, "stop", looks_ignored)
    assert (await probed(lacks=lacks))["stop"].verdict is verdict


async def test_an_answer_of_another_shape_fails_its_capability_and_not_the_probe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(honest_engine.Adapter, "_logprobs", lambda *_: msgspec.Raw(b'{"content": [{"token": "a"}]}'))
    results = await probed()
    assert results["logprobs"].verdict is Verdict.CONTRADICTED
    assert "another shape" in results["logprobs"].evidence
    assert results["stop"].verdict is Verdict.VERIFIED


# ------------------------------------------------------------------------------------------------------------ verdicts


@pytest.mark.parametrize(
    ("declared", "seen", "verdict"),
    [
        (True, Seen.HONOURED, Verdict.VERIFIED),
        (True, Seen.UNCLEAR, Verdict.NOT_SHOWN),
        (True, Seen.IGNORED, Verdict.CONTRADICTED),
        (True, Seen.REFUSED, Verdict.CONTRADICTED),
        (True, Seen.FAILED, Verdict.CONTRADICTED),
        (False, Seen.HONOURED, Verdict.UNDECLARED),
        (False, Seen.UNCLEAR, Verdict.NOT_OFFERED),
        (False, Seen.IGNORED, Verdict.NOT_OFFERED),
        (False, Seen.REFUSED, Verdict.NOT_OFFERED),
    ],
)
def test_the_verdict_follows_from_what_was_declared_and_seen(declared: bool, seen: Seen, verdict: Verdict) -> None:
    assert judge(declared=declared, seen=seen) is verdict


def test_a_relay_may_refuse_what_it_only_passes_on() -> None:
    assert judge(declared=True, seen=Seen.REFUSED, is_relay=True) is Verdict.NOT_OFFERED
    assert judge(declared=True, seen=Seen.IGNORED, is_relay=True) is Verdict.CONTRADICTED


def test_a_busy_or_slow_engine_has_said_nothing() -> None:
    assert from_error(Overloaded("full")).seen is from_error(EngineTimeout("late")).seen is Seen.UNCLEAR
    assert from_error(EngineFailed("broken")).seen is Seen.FAILED
    assert from_error(InvalidRequest("no")).seen is Seen.REFUSED


def test_pieces_of_a_tool_call_are_put_together() -> None:
    def delta(**function: str) -> Chunk:
        return Chunk(tool_calls=msgspec.Raw(json.dumps([{"index": 0, "function": function}]).encode()))

    answer = fold(
        [delta(name="f"), delta(arguments='{"a"'), delta(arguments=": 1}"), Chunk(finish_reason="tool_calls")]
    )
    assert answer.choices[0].calls == {0: {"name": "f", "arguments": '{"a": 1}'}}
    assert answer.finish_reason == "tool_calls"


# ------------------------------------------------------------------------------------------------- engines behind urls


@pytest.fixture
async def fake_url() -> AsyncIterator[str]:
    server = fake_server.Server(FakeOptions(model="small", ttft_ms=0, itl_ms=1, max_model_len=600))
    port = await server.start("127.0.0.1", 0)
    yield f"http://127.0.0.1:{port}"
    await server.stop()


async def test_what_works_without_being_declared_is_found_past_the_adapters_refusal(fake_url: str) -> None:
    cls = adapter_class("openai_compatible")
    adapter = cls(msgspec.convert({"url": fake_url, "parameters": ["max_tokens", "temperature"]}, cls.Options))
    await adapter.start()
    report = await probe(adapter)
    await adapter.close()
    results = {each.capability: each for each in report.results}
    assert results["stop"].verdict is Verdict.UNDECLARED
    assert results["seed"].verdict is Verdict.UNDECLARED
    assert results["max_tokens"].verdict is Verdict.VERIFIED
    assert results["temperature"].verdict is Verdict.CONTRADICTED, "the fake draws no samples"
    assert results["unknown model"].verdict is Verdict.VERIFIED
    assert results["context overflow"].verdict is Verdict.VERIFIED
    assert (report.model, report.max_model_len) == ("small", 600)
    assert report.first_token_s is not None


@pytest.mark.parametrize(
    ("answers", "engine"),
    [
        ({"/v1/models": {"data": [{"id": "m", "owned_by": "vllm"}]}}, "vllm"),
        ({"/v1/models": {"data": [{"id": "m", "owned_by": "sglang"}]}}, "sglang"),
        ({"/v1/models": {"data": [{"id": "m", "owned_by": "tensorrt_llm"}]}}, "tensorrt_llm"),
        ({"/v1/models": {"data": [{"id": "m", "owned_by": "llamacpp"}]}}, "llama_cpp"),
        ({"/v1/models": {"data": [{"id": "m", "owned_by": "openvino"}]}}, "openvino"),
        ({"/v1/models": {"data": [{"id": "m", "owned_by": "goodgate"}]}}, "goodgate_peer"),
        ({"/info": {"model_id": "m", "max_total_tokens": 2048, "version": "3.3.7"}}, "tgi"),
        ({"/props": {"default_generation_settings": {"n_ctx": 1}}}, "llama_cpp"),
        ({"/v2": {"name": "triton", "version": "2.60", "extensions": ["classification"]}}, "triton_server"),
        ({"/model_info": {"model_path": "m", "is_generation": True}}, "sglang"),
        ({"/v1/models": {"data": [{"id": "m", "owned_by": "someone"}]}}, "openai_compatible"),
        ({"/v1/models": {"data": "nonsense"}, "/info": []}, "openai_compatible"),
        ({}, "openai_compatible"),
    ],
)
def test_an_engine_is_recognised_by_what_it_says_of_itself(answers: dict[str, Any], engine: str) -> None:
    found = tell(answers)
    assert found.engine == engine
    assert ("--engine" in found.why) is (engine == "openai_compatible")


async def test_an_engine_is_recognised_over_a_socket_and_with_or_without_v1() -> None:
    async with Twin() as twin:
        twin.reply("/v1/models", Reply.plain(200, {"data": [{"id": "m", "owned_by": "vllm"}]}))
        twin.reply("/info", Reply.plain(200, b"<html>", content_type="text/html"))
        assert (await recognise(twin.url)).engine == "vllm"
        assert (await recognise(f"{twin.url}/v1/", {"Authorization": "Bearer k"})).engine == "vllm"
        assert twin.requests[-1].headers["authorization"] == "Bearer k"


async def test_an_engine_is_recognised_by_an_answer_that_comes_in_several_pieces() -> None:
    told = {"default_generation_settings": {"n_ctx": 1}, "chat_template": "x" * 1000}
    whole = Reply.plain(200, told)
    (body,) = whole.steps
    assert isinstance(body, bytes)
    async with Twin() as twin:
        twin.reply("/props", Reply(200, whole.headers, (body[:100], 0.05, body[100:]), is_chunked=False))
        assert (await recognise(twin.url)).engine == "llama_cpp"


async def test_a_url_where_nobody_answers_is_said_to_be_one() -> None:
    with pytest.raises(EngineUnavailable, match="Start the engine, or check the address"):
        await recognise("http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (Reply.plain(404, b"<html>404 Not Found</html>", content_type="text/html"), "says HTTP 404; check the address"),
        (
            Reply.plain(200, b"<html>Welcome</html>", content_type="text/html"),
            "is no list of models; check the address",
        ),
        (Reply.plain(200, [1, 2]), "is no list of models; check the address"),
        (Reply.plain(401, {"error": "no"}), "wants a key (HTTP 401); name the variable that holds it"),
        (
            Reply.plain(301, b"", Location="https://elsewhere/"),
            "redirects /v1/models to https://elsewhere/; probe",
        ),
    ],
)
async def test_a_server_that_is_no_engine_is_said_to_be_none_and_is_not_probed(reply: Reply, reason: str) -> None:
    async with Twin() as twin:
        twin.reply("/v1/models", reply)
        with pytest.raises(EngineUnavailable, match=f"at {twin.url} is no engine that can be told") as refusal:
            await recognise(twin.url)
    assert reason in refusal.value.message


async def test_an_engine_without_a_model_is_asked_for_one_or_for_its_name() -> None:
    async with Twin() as twin:
        twin.reply("/v1/models", Reply.plain(200, {"data": []}))
        cls = adapter_class("vllm")
        adapter = cls(cls.Options(url=twin.url))
        await adapter.start()
        with pytest.raises(EngineUnavailable, match="lists no models; let it load one, or name it with --model"):
            await served_model(adapter)
        await adapter.close()


# ---------------------------------------------------------------------------------------------------------- the command


async def test_the_command_recognises_probes_and_fails_on_a_contradiction(fake_url: str) -> None:
    result = await asyncio.to_thread(
        CliRunner().invoke, app, ["probe", fake_url, "--json", "-o", "connect_timeout_s=5"]
    )
    report = json.loads(result.stdout)
    assert "nothing tells it apart" in report["recognised_by"]
    assert report["engine"] == "openai_compatible"
    assert {each["capability"] for each in report["results"] if each["verdict"] == "contradicted"} >= {"temperature"}
    assert result.exit_code == 1


async def test_the_command_is_content_with_an_engine_that_keeps_what_is_declared(fake_url: str) -> None:
    arguments = ["probe", fake_url, "--engine", "openai_compatible", "-o", "parameters=[max_tokens, stop, seed]"]
    result = await asyncio.to_thread(CliRunner().invoke, app, arguments, env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.stdout
    for words in ("openai_compatible", "first token of the first request", "verified", "undeclared"):
        assert words in result.stdout


def test_an_engine_by_name_is_started_for_the_probe_and_its_start_is_timed() -> None:
    result = CliRunner().invoke(app, ["probe", "fake", "--model", "small", "--json"])
    report = json.loads(result.stdout)
    assert report["ready_s"] is not None
    assert report["model"] == "small"
    assert result.exit_code == 1, "the fake declares sampling and draws no samples"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["probe", "http://127.0.0.1:9"], 1, "Nothing answers at http://127.0.0.1:9"),
        (["probe", "vlm"], 2, "Did you mean 'vllm'?"),
        (["probe", "http://127.0.0.1:9", "--engine", "vllm", "-o", "modle=x"], 1, "`modle`; did you mean `model`?"),
        (["probe", "http://127.0.0.1:9", "--engine", "sglang", "-o", "route=x"], 1, "choose one of: openai, native."),
        (["probe", "http://127.0.0.1:9", "--engine", "vllm", "-o", "model=[x]"], 1, "An option of vllm is wrong: "),
        (
            ["probe", "localhost:8000"],
            2,
            "'localhost:8000' is neither an engine nor a url; write a url as http://HOST:PORT.",
        ),
        (["probe", "HTTP://127.0.0.1:9"], 1, "Nothing answers at HTTP://127.0.0.1:9: the connection is refused. Start"),
        (["probe", "sglang"], 1, "cannot be started from here"),
    ],
)
def test_what_cannot_be_probed_is_told_in_a_sentence(arguments: list[str], code: int, words: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, words in result.stderr) == (code, True), result.stderr


def test_the_help_has_an_example() -> None:
    assert "Example: goodgate engines probe" in CliRunner().invoke(app, ["probe", "--help"]).stdout


# --------------------------------------------------------------------------------------------------------------- faces


def a_report(**changes: Any) -> Report:
    results = [
        Result("limits", "stop", True, Seen.HONOURED, "cut", Verdict.VERIFIED),
        Result("sampling", "min_p", False, Seen.REFUSED, "no", Verdict.NOT_OFFERED),
    ]
    fields: dict[str, Any] = {
        "engine": "llama_cpp", "version": "7", "model": "m", "max_model_len": 1024, "ready_s": 1.25,
        "first_token_s": 0.5, "ttft_s": 0.02, "results": results,
    }  # fmt: skip
    return Report(**{**fields, **changes})


def test_a_report_in_a_line() -> None:
    assert headline(a_report(recognised_by="a mark")) == "llama_cpp 7 (a mark): m, context 1024 tokens"
    assert headline(a_report(version="", max_model_len=None)) == "llama_cpp (version not told): m, context not told"
    assert tally(a_report()) == "1 verified, 1 not offered"


def test_reports_side_by_side_leave_no_cell_empty() -> None:
    table = verdicts_markdown([a_report(), a_report(engine="vllm", results=[])])
    assert "| stop | verified | - |" in table
    assert "| **sampling** | | |" in table
    assert all(meaning in table for meaning in MEANINGS.values())
    assert "| `llama_cpp` | 7 | 1.2 s | 500 ms | 20 ms |" in times_markdown([a_report()])
