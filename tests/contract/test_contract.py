"""What every engine's adapter keeps (adapters/base.py), checked on each of them through the same door."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from adapters.errors import ContextLengthExceeded, EngineUnavailable, UnsupportedParameter
from adapters.types import Chunk
from tests.contract.conftest import HTTPSubject, Subject, TwinSubject, chat, collect, completion

LONG = {"max_tokens": 400}


def check_order(chunks: list[Chunk], num_choices: int) -> None:
    """The order that `Chunk` documents."""
    assert chunks[-1].usage is not None
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert (chunks[-1].text, chunks[-1].finish_reason) == ("", None)
    for index in range(num_choices):
        own = [chunk for chunk in chunks[:-1] if chunk.index == index]
        assert [chunk.finish_reason is not None for chunk in own] == [False] * (len(own) - 1) + [True]
    assert {chunk.index for chunk in chunks[:-1]} == set(range(num_choices))


async def test_pieces_come_first_then_one_finish_reason_then_the_usage(subject: Subject) -> None:
    await subject.adapter.start()
    chunks = await collect(subject.adapter, chat(max_tokens=2, **subject.to_the_end))
    check_order(chunks, 1)
    assert chunks[-2].finish_reason == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 2
    assert chunks[-1].usage.prompt_tokens > 0


async def test_a_completion_keeps_the_same_order(subject: Subject) -> None:
    await subject.adapter.start()
    chunks = await collect(subject.adapter, completion(max_tokens=2, **subject.to_the_end))
    check_order(chunks, 1)
    assert chunks[-2].finish_reason == "length"


async def test_a_prompt_of_token_ids_is_answered_or_refused_by_name(subject: Subject) -> None:
    await subject.adapter.start()
    request = completion(prompt=[5, 6, 7], max_tokens=2, **subject.to_the_end)
    if subject.adapter.capabilities.token_prompts:
        check_order(await collect(subject.adapter, request), 1)
    else:
        with pytest.raises(UnsupportedParameter, match=f"{subject.engine}.*prompt"):
            await collect(subject.adapter, request)


async def test_every_choice_finishes_once_and_the_account_covers_all(subject: Subject) -> None:
    if isinstance(subject, TwinSubject):
        subject.answers(num_choices=2)
    await subject.adapter.start()
    chunks = await collect(subject.adapter, chat(max_tokens=2, **subject.to_the_end, n=2))
    check_order(chunks, 2)
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 4


async def test_a_field_that_the_engine_cannot_honour_is_refused_with_field_and_engine(subject: Subject) -> None:
    await subject.adapter.start()
    if subject.refused is None:
        pytest.skip("a peer refuses for itself, and names the field in its answer")
    field, value = subject.refused
    make = completion if field in {"suffix"} else chat
    with pytest.raises(UnsupportedParameter, match=f"{subject.engine}.*{field}") as caught:
        await collect(subject.adapter, make(**{field: value}))
    assert caught.value.param == field


async def test_fields_that_never_change_the_text_and_values_that_ask_for_nothing_are_accepted(subject: Subject) -> None:
    await subject.adapter.start()
    request = chat(
        max_tokens=2, **subject.to_the_end, user="u", metadata={"a": "b"}, n=1, top_p=1, tools=[], tool_choice="auto",
        response_format={"type": "text"}, logit_bias={}, logprobs=False, stream_options={"include_usage": True},
    )  # fmt: skip
    check_order(await collect(subject.adapter, request), 1)


async def test_history_with_every_form_of_content_is_accepted(subject: Subject) -> None:
    """W10: content null, absent, empty and in parts, beside tool calls and without."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": " there"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_call_id": "c1"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "", "tool_call_id": "c1"},
        {"role": "assistant", "content": []},
        {"role": "user", "content": ""},
    ]
    await subject.adapter.start()
    check_order(await collect(subject.adapter, chat(messages=messages, max_tokens=2, **subject.to_the_end)), 1)
    if isinstance(subject, HTTPSubject):
        sent = subject.twin.bodies[-1]["messages"]
        beside_calls = None if subject.engine == "tgi" else ""  # TGI would read content alone, even an empty one
        contents = ["Be brief.", "Hi there", beside_calls, "4", beside_calls, "", "", ""]
        assert [message.get("content") for message in sent] == contents
        assert sent[0]["role"] == "system"


async def test_closing_the_iterator_stops_the_engine_within_a_second(subject: Subject) -> None:
    subject.talks_on()
    await subject.adapter.start()
    async with contextlib.aclosing(
        subject.adapter.generate(chat(**LONG, **subject.to_the_end), request_id="r")
    ) as chunks:
        first = await anext(chunks)
        assert first.text or subject.engine == "native"  # a random model may begin with half a character
    await subject.wait_idle()


async def test_cancelling_the_reader_in_the_middle_stops_the_engine_within_a_second(subject: Subject) -> None:
    subject.talks_on()
    await subject.adapter.start()
    begun = asyncio.Event()

    async def read() -> None:
        async for _ in subject.adapter.generate(chat(**LONG, **subject.to_the_end), request_id="r"):
            begun.set()

    task = asyncio.create_task(read())
    await asyncio.wait_for(begun.wait(), 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await subject.wait_idle()


async def test_cancelling_before_the_first_token_stops_the_engine_within_a_second(subject: Subject) -> None:
    subject.stays_silent()
    await subject.adapter.start()
    task = asyncio.create_task(collect(subject.adapter, chat(**LONG, **subject.to_the_end)))
    if isinstance(subject, TwinSubject):
        await subject.twin.asked()
    else:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await subject.wait_idle()


async def test_leaving_one_of_several_choices_unread_stops_them_all(subject: Subject) -> None:
    subject.talks_on()
    await subject.adapter.start()
    async with contextlib.aclosing(
        subject.adapter.generate(chat(**LONG, **subject.to_the_end, n=2), request_id="r")
    ) as chunks:
        await anext(chunks)
    await subject.wait_idle()


async def test_health_follows_the_life_of_the_adapter(subject: Subject) -> None:
    before = await subject.adapter.health()
    await subject.adapter.start()
    during = await subject.adapter.health()
    await subject.adapter.close()
    after = await subject.adapter.health()
    assert (before.ready, during.ready, after.ready) == (False, True, False)
    assert before.reason
    assert after.reason


async def test_an_adapter_that_is_not_started_says_so(subject: Subject) -> None:
    with pytest.raises(EngineUnavailable, match="not started"):
        await collect(subject.adapter, chat())


async def test_close_is_safe_before_a_start_and_twice(subject: Subject) -> None:
    await subject.adapter.close()
    await subject.adapter.start()
    await subject.adapter.close()
    await subject.adapter.close()


async def test_a_request_that_does_not_fit_the_context_is_a_fault_of_the_request(subject: Subject) -> None:
    await subject.adapter.start()
    request = subject.overflows()
    with pytest.raises(ContextLengthExceeded) as caught:
        await collect(subject.adapter, request)
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
    assert not caught.value.retryable
