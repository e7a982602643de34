"""The asynchronous face: text arrives, closing aborts, and nothing ever waits for an engine that is gone."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from native_engine.async_engine import AsyncEngine, Delta
from native_engine.config import EngineConfig
from native_engine.errors import EngineStopped, InvalidParams, PromptTooLong, StepFailed
from native_engine.gguf import BadModelFile
from native_engine.loading import LoadedModel, load
from native_engine.sampling_params import SamplingParams
from tests.native_engine.tiny_llama import ENGINE_CONFIG, EOS, write_tiny_llama

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPT = list(range(10, 40))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def loaded(folder: Path, kernel_cache: Path) -> LoadedModel:
    return load(folder, ENGINE_CONFIG, kernel_cache=kernel_cache)


@pytest.fixture
async def engine(loaded: LoadedModel) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(lambda: loaded)
    yield engine
    engine.close()


async def collect(engine: AsyncEngine, prompt: list[int], params: SamplingParams, name: str) -> list[Delta]:
    return [delta async for delta in engine.generate(prompt, params, request_id=name)]


async def until_running(engine: AsyncEngine, count: int) -> None:
    """The engine thread publishes its numbers and signals nobody, so they are polled."""
    async with asyncio.timeout(5):
        while engine.stats().num_running + engine.stats().num_waiting != count:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def joined(deltas: list[Delta]) -> tuple[str, list[int]]:
    return "".join(delta.text for delta in deltas), [token for delta in deltas for token in delta.token_ids]


async def test_deltas_add_up_to_the_text_of_their_tokens(engine: AsyncEngine) -> None:
    deltas = await collect(engine, PROMPT, GREEDY, "a")
    text, tokens = joined(deltas)
    assert len(tokens) == 24
    assert engine.decode(tokens).startswith(text)
    assert [delta.finish_reason for delta in deltas] == [None] * 23 + ["length"]
    assert [delta.num_output_tokens for delta in deltas] == list(range(1, 25))
    assert {delta.num_prompt_tokens for delta in deltas} == {len(PROMPT)}


async def test_requests_at_the_same_time_get_what_they_get_alone(engine: AsyncEngine) -> None:
    prompts = [list(range(start, start + 5 * start)) for start in range(4, 16)]
    alone = [joined(await collect(engine, prompt, GREEDY, "alone"))[1] for prompt in prompts]
    together = await asyncio.gather(
        *(collect(engine, prompt, GREEDY, f"together-{number}") for number, prompt in enumerate(prompts))
    )
    assert [joined(deltas)[1] for deltas in together] == alone


async def test_a_second_request_with_the_same_prompt_reports_cached_tokens(engine: AsyncEngine) -> None:
    cold = await collect(engine, PROMPT, GREEDY, "cold")
    warm = await collect(engine, PROMPT, GREEDY, "warm")
    salted = [d async for d in engine.generate(PROMPT, GREEDY, request_id="salted", cache_salt="another tenant")]
    assert (cold[-1].num_cached_tokens, warm[-1].num_cached_tokens, salted[-1].num_cached_tokens) == (0, 16, 0)
    assert joined(warm) == joined(cold) == joined(salted)


async def test_a_stop_string_ends_the_request_and_is_not_shown(engine: AsyncEngine) -> None:
    whole, tokens = joined(await collect(engine, PROMPT, GREEDY, "whole"))
    stop = whole[5:8]
    deltas = await collect(engine, PROMPT, SamplingParams(temperature=0, ignore_eos=True, stop=(stop,)), "stopped")
    assert joined(deltas)[0] == whole[: whole.index(stop)]
    assert deltas[-1].finish_reason == "stop"
    assert deltas[-1].num_output_tokens < len(tokens)
    await until_running(engine, 0)


async def test_a_stop_token_ends_the_request_and_has_no_text(engine: AsyncEngine) -> None:
    whole, tokens = joined(await collect(engine, PROMPT, GREEDY, "whole"))
    params = SamplingParams(temperature=0, ignore_eos=True, stop_token_ids=(tokens[6],))
    deltas = await collect(engine, PROMPT, params, "stopped")
    first = tokens.index(tokens[6])
    assert deltas[-1].finish_reason == "stop"
    text, stopped_tokens = joined(deltas)
    assert stopped_tokens == tokens[: first + 1]
    assert whole.startswith(text)
    assert len(text) < len(whole)


async def test_closing_the_iterator_ends_the_request_in_the_engine(engine: AsyncEngine) -> None:
    endless = SamplingParams(temperature=0, ignore_eos=True)
    stream = engine.generate(PROMPT, endless, request_id="left")
    await anext(stream)
    assert engine.stats().num_running == 1
    await stream.aclose()
    await until_running(engine, 0)
    assert engine.stats().kv_blocks_used == 0


async def test_cancelling_the_reader_ends_the_request_and_its_name_is_free_again(engine: AsyncEngine) -> None:
    task = asyncio.create_task(collect(engine, PROMPT, SamplingParams(temperature=0, ignore_eos=True), "again"))
    await until_running(engine, 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(joined(await collect(engine, PROMPT, GREEDY, "again"))[1]) == 24


async def test_a_request_that_cannot_be_served_fails_alone(engine: AsyncEngine) -> None:
    good = asyncio.create_task(collect(engine, PROMPT, GREEDY, "good"))
    with pytest.raises(PromptTooLong, match="300 tokens"):
        await collect(engine, [5] * 300, GREEDY, "long")
    with pytest.raises(InvalidParams, match="prompt_ids"):
        await collect(engine, [10**6], GREEDY, "outside")
    assert len(joined(await good)[1]) == 24


async def test_an_id_in_use_is_refused_and_the_first_request_goes_on(engine: AsyncEngine) -> None:
    first = engine.generate(PROMPT, GREEDY, request_id="same")
    deltas = [await anext(first)]
    with pytest.raises(InvalidParams, match="same"):
        await collect(engine, PROMPT, SamplingParams(temperature=0, max_tokens=200, ignore_eos=True), "same")
    deltas += [delta async for delta in first]
    assert len(joined(deltas)[1]) == 24


def after_steps(runner: Any, num_steps: int, instead: Callable[[Any], Any], *, times: int = 10**9) -> None:
    """Have the runner do something else, so often, once it has made so many steps."""
    num_run, run = 0, runner.run

    def run_or_not(plan: Any) -> Any:
        nonlocal num_run
        num_run += 1
        return instead(plan) if num_steps < num_run <= num_steps + times else run(plan)

    runner.run = run_or_not


def no_room(plan: Any) -> Any:
    raise MemoryError("no room for the step")


@pytest.mark.parametrize("num_steps", [0, 3])
async def test_a_step_that_fails_takes_those_in_it_and_the_engine_goes_on(
    loaded: LoadedModel, caplog: pytest.LogCaptureFixture, num_steps: int
) -> None:
    engine = AsyncEngine(lambda: loaded)
    whole = await collect(engine, PROMPT, GREEDY, "before")
    after_steps(loaded.engine._runner, num_steps, no_room, times=1)
    with pytest.raises(StepFailed, match="its log says why"):
        await collect(engine, PROMPT, GREEDY, "a")
    await until_running(engine, 0)
    assert engine.stats().kv_blocks_used == 0
    loaded.engine.check()
    assert engine.is_running
    assert joined(await collect(engine, PROMPT, GREEDY, "a")) == joined(whole)
    assert caplog.text.count("A step of the engine failed.") == 1
    assert "no room for the step" in caplog.text
    engine.close()


async def test_who_waits_while_a_step_fails_is_served_by_the_next_one(folder: Path, kernel_cache: Path) -> None:
    loaded = load(folder, dataclasses.replace(ENGINE_CONFIG, max_num_seqs=1), kernel_cache=kernel_cache)
    after_steps(loaded.engine._runner, 3, no_room, times=1)
    engine = AsyncEngine(lambda: loaded)
    first, second = await asyncio.gather(
        *(collect(engine, PROMPT, GREEDY, name) for name in ("a", "b")), return_exceptions=True
    )
    assert isinstance(first, StepFailed)
    assert isinstance(second, list)
    assert len(joined(second)[1]) == 24
    engine.close()


async def test_when_the_engine_thread_dies_every_request_fails_and_none_hangs(
    loaded: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    engine = AsyncEngine(lambda: loaded)
    runner: Any = loaded.engine._runner
    after_steps(runner, 3, lambda plan: [[10**9]] * len(plan.chunks))
    async with asyncio.timeout(5):
        results = await asyncio.gather(
            *(collect(engine, PROMPT, GREEDY, name) for name in ("a", "b")), return_exceptions=True
        )
        for result in results:
            assert isinstance(result, EngineStopped)
            assert "no token of the vocabulary" in str(result)
        with pytest.raises(EngineStopped, match="no token of the vocabulary"):
            await collect(engine, PROMPT, GREEDY, "later")
    assert not engine.is_running
    assert "The engine thread failed." in caplog.text
    engine.close()


async def test_closing_the_engine_fails_what_is_open_and_refuses_what_comes(loaded: LoadedModel) -> None:
    engine = AsyncEngine(lambda: loaded)
    open_request = asyncio.create_task(collect(engine, PROMPT, SamplingParams(temperature=0, ignore_eos=True), "open"))
    await until_running(engine, 1)
    engine.close()
    engine.close()
    with pytest.raises(EngineStopped, match="closed"):
        await open_request
    with pytest.raises(EngineStopped, match="closed"):
        await collect(engine, PROMPT, GREEDY, "late")


async def test_an_event_loop_that_is_gone_takes_only_its_own_requests_along(engine: AsyncEngine) -> None:
    async def start_and_leave() -> Any:
        stream = engine.generate(PROMPT, SamplingParams(temperature=0, ignore_eos=True), request_id="orphan")
        await anext(stream)
        return stream  # kept open beyond its loop, as a crashed server thread would

    def other_loop() -> Any:
        loop = asyncio.new_event_loop()
        stream = loop.run_until_complete(start_and_leave())
        loop.close()
        return stream

    orphan = await asyncio.to_thread(other_loop)
    assert len(joined(await collect(engine, PROMPT, GREEDY, "mine"))[1]) == 24
    await until_running(engine, 0)
    await orphan.aclose()


def test_a_model_that_cannot_be_loaded_fails_in_the_caller(tmp_path: Path) -> None:
    with pytest.raises(BadModelFile, match="no model at"):
        AsyncEngine.load(tmp_path / "nothing", ENGINE_CONFIG)


def test_the_face_tells_what_a_server_needs_to_know(loaded: LoadedModel) -> None:
    engine = AsyncEngine(lambda: loaded)
    try:
        assert engine.max_model_len == 256
        assert engine.chat_template == "{{ messages }}"
        assert (engine.bos_token, engine.eos_token) == ("<|begin|>", EOS)
        assert engine.decode(engine.encode("héllo")) == "héllo"
        assert engine.stats().kv_blocks_total > 0
    finally:
        engine.close()


@pytest.mark.model
async def test_the_default_model_answers_a_question(model_path: Path, kernel_cache: Path) -> None:
    engine = await asyncio.to_thread(
        AsyncEngine.load, model_path, EngineConfig(kv_cache_mib=32), kernel_cache=kernel_cache
    )
    try:
        prompt = engine.encode("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
        deltas = await collect(engine, prompt, SamplingParams(temperature=0, max_tokens=32), "paris")
        assert "Paris" in joined(deltas)[0]
        assert deltas[-1].finish_reason == "stop"
        assert "<|im_end|>" not in joined(deltas)[0]
    finally:
        engine.close()


async def test_a_thousand_requests_that_are_left_leave_nothing_behind(engine: AsyncEngine) -> None:
    """Left before their first token, in the middle, and while others finish: no block, no stream, no task remains."""
    source = random.Random(3)

    async def come_and_go(number: int) -> None:
        prompt = PROMPT[: source.randint(1, 30)] + [source.randrange(3, 300) for _ in range(source.randint(0, 40))]
        params = SamplingParams(max_tokens=source.randint(1, 40), ignore_eos=True, seed=number)
        task = asyncio.create_task(collect(engine, prompt, params, f"r{number}"))
        await asyncio.sleep(source.random() * 0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    for batch in range(20):
        await asyncio.gather(*(come_and_go(batch * 50 + number) for number in range(50)))
    await until_running(engine, 0)
    assert engine.stats().kv_blocks_used == 0
    assert not engine._streams
    assert not engine._commands
    engine._engine.check()
    assert len(joined(await collect(engine, PROMPT, GREEDY, "after"))[1]) == 24


async def test_a_stop_string_across_tokens_and_characters_cuts_where_it_begins(engine: AsyncEngine) -> None:
    """Every token of the tiny model is a byte: characters and stop strings are always torn apart."""
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=200, ignore_eos=True)
    whole = joined(await collect(engine, PROMPT, params, "whole"))[0]
    for start in range(0, len(whole) - 3, 7):
        stop = whole[start : start + 3]
        stopped = await collect(engine, PROMPT, dataclasses.replace(params, stop=(stop, "never")), f"at {start}")
        assert joined(stopped)[0] == whole[: whole.index(stop)]
        assert stopped[-1].finish_reason == "stop"
        late = dataclasses.replace(params, stop=(stop,), min_tokens=200)
        assert joined(await collect(engine, PROMPT, late, f"late {start}"))[0] == whole


@pytest.mark.parametrize(("length", "max_tokens", "answered"), [(255, None, 1), (255, 5, 1), (254, 9, 2), (30, 1, 1)])
async def test_a_prompt_next_to_the_end_of_the_context_gets_what_still_fits(
    engine: AsyncEngine, length: int, max_tokens: int | None, answered: int
) -> None:
    prompt = [3 + number % 300 for number in range(length)]
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=max_tokens)
    deltas = await collect(engine, prompt, params, "edge")
    assert deltas[-1].finish_reason == "length"
    assert deltas[-1].num_output_tokens == answered
    with pytest.raises(PromptTooLong, match="255"):
        await collect(engine, prompt + [9] * (256 - length), params, "over")
