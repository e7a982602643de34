"""TensorRT-LLM alone, behind its own server and behind Triton."""

from __future__ import annotations

from pathlib import Path

import pytest

from adapters.base import Load
from adapters.errors import (
    StreamInterrupted,
    UnsupportedParameter,
)
from tests.contract import tensorrt_transcripts
from tests.contract.conftest import (
    CHAT,
    chat,
    collect,
    completion,
)
from tests.contract.replay import HELLO, engine, reasons_of
from tests.contract.twin import Reply, Twin, event

# ------------------------------ trtllm-serve


@pytest.mark.replay("W08")
async def test_a_dropped_connection_of_trtllm_serve_is_an_interruption() -> None:
    """It has no error event: an exception in the middle ends the connection."""
    async with engine("tensorrt_llm", model="small") as (adapter, twin):
        for end in ("end", "reset"):
            twin.reply(CHAT, Reply.stream(event(HELLO[0]), 0.02, end))
            with pytest.raises(StreamInterrupted):
                await collect(adapter, chat())


@pytest.mark.replay("W21")
async def test_structured_output_is_refused_where_it_would_have_no_effect() -> None:
    wanted = {"type": "json_object"}
    async with engine("tensorrt_llm", model="small") as (adapter, twin):
        with pytest.raises(UnsupportedParameter, match="response_format"):
            await collect(adapter, chat(response_format=wanted))
    async with engine("tensorrt_llm", model="small", guided_decoding=True) as (adapter, twin):
        twin.reply(CHAT, Reply.stream(tensorrt_transcripts.CHAT))
        await collect(adapter, chat(response_format=wanted))
        assert twin.bodies[-1]["response_format"] == wanted


async def test_the_statistics_that_reading_empties_are_never_read() -> None:
    async with engine("tensorrt_llm", model="small") as (adapter, twin):
        assert await adapter.load() == Load()
        assert [each.path for each in twin.requests] == ["/prometheus/metrics"]


# ------------------------------ Triton


async def test_tritons_switch_named_stop_is_never_thrown_by_a_stop_string(text_model: Path) -> None:
    for dialect, name in (("llmapi", "sampling_param_stop"), ("ensemble", "stop_words")):
        async with engine("triton_server", model="m", dialect=dialect, chat_template=str(text_model)) as (
            adapter,
            twin,
        ):
            twin.reply("/v2/models/m/generate_stream", Reply.stream(tensorrt_transcripts.LLMAPI))
            await collect(adapter, chat(stop="END"))
            assert "stop" not in twin.bodies[0]
            assert twin.bodies[0][name] == ["END"]


@pytest.mark.parametrize("dialect", ["llmapi", "ensemble"])
async def test_triton_never_decodes_greedily_unless_asked(dialect: str) -> None:
    async with engine("triton_server", model="m", dialect=dialect) as (adapter, twin):
        stream = tensorrt_transcripts.LLMAPI if dialect == "llmapi" else tensorrt_transcripts.ENSEMBLE
        twin.reply("/v2/models/m/generate_stream", Reply.stream(stream))
        await collect(adapter, completion())
        await collect(adapter, completion(temperature=0, top_k=5))
        await collect(adapter, completion(top_k=-1, seed=-1))
        plain, greedy, off = (
            {name.removeprefix("sampling_param_"): value for name, value in body.items()} for body in twin.bodies
        )
        assert (plain["temperature"], plain["top_p"]) == (1.0, 1.0)
        assert (greedy["top_k"], "temperature" in greedy) == (1, False)
        assert ("top_k" in off, off["seed"]) == (False, 2**64 - 1)


async def test_an_ensemble_that_ends_cleanly_is_done_and_says_which_end_it_was() -> None:
    async with engine("triton_server", dialect="ensemble") as (adapter, twin):
        twin.reply("/v2/models/ensemble/generate_stream", Reply.stream(tensorrt_transcripts.ENSEMBLE))
        assert reasons_of(await collect(adapter, completion(max_tokens=2))) == ["length"]
        assert reasons_of(await collect(adapter, completion(max_tokens=3))) == ["stop"]


async def test_without_a_tokenizer_tritons_events_are_counted() -> None:
    async with engine("triton_server", model="m") as (adapter, twin):
        twin.reply("/v2/models/m/generate_stream", Reply.stream(tensorrt_transcripts.LLMAPI))
        usage = (await collect(adapter, completion()))[-1].usage
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens) == (0, 2)


async def test_tritons_load_comes_from_a_port_of_its_own() -> None:
    async with (
        Twin() as metrics,
        engine("triton_server", model="m", metrics_url=f"{metrics.url}/metrics") as (
            adapter,
            twin,
        ),
    ):
        metrics.reply("/metrics", Reply.plain(200, tensorrt_transcripts.TRITON_METRICS.encode(), "text/plain"))
        assert await adapter.load() == Load(3, 1, 0.25)
        assert adapter.capabilities.load == {"running", "waiting", "kv_usage"}
        assert twin.requests == []
    async with engine("triton_server", model="m") as (adapter, twin):
        assert await adapter.load() == Load()
        assert adapter.capabilities.load == frozenset()
        assert twin.requests == []


async def test_triton_lists_the_model_that_it_was_configured_with() -> None:
    for options, name in (({}, "tensorrt_llm"), ({"dialect": "ensemble"}, "ensemble"), ({"model": "m"}, "m")):
        async with engine("triton_server", **options) as (adapter, _):
            assert [model.id for model in await adapter.models()] == [name]
