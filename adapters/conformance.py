"""The contract suite: what every engine's adapter keeps (adapters/base.py), as tests that any package can run over its
own. Needs pytest, and pytest-asyncio in its `auto` mode; nothing that serves imports this module.

    from adapters.conformance import Conformance, Subject

    class AcmeSubject(Subject): ...           # how to make your engine answer, talk on, stay silent

    class TestAcme(Conformance):
        @pytest.fixture
        async def subject(self) -> AsyncIterator[Subject]:
            async with conforming(AcmeSubject("acme")) as subject:
                yield subject

docs/adding-an-engine.md goes through it with an example.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

import msgspec
import pytest

from adapters.base import EngineAdapter
from adapters.errors import ContextLengthExceeded, EngineUnavailable, UnsupportedOperation, UnsupportedParameter
from adapters.types import (
    ChatRequest,
    Chunk,
    CompletionRequest,
    EmbeddingRequest,
    GenerateRequest,
    TokenizeRequest,
)

LONG = {"max_tokens": 400}


def chat(**fields: Any) -> ChatRequest:
    body = {"model": "small", "messages": [{"role": "user", "content": "Hi"}], **fields}
    return msgspec.convert(body, ChatRequest)


def completion(**fields: Any) -> CompletionRequest:
    return msgspec.convert({"model": "small", "prompt": "Once", **fields}, CompletionRequest)


async def collect(adapter: EngineAdapter[Any], request: GenerateRequest, request_id: str = "r-1") -> list[Chunk]:
    return [chunk async for chunk in adapter.generate(request, request_id=request_id)]


class Subject(ABC):
    """One engine under test. Its adapter is made, but started by the test."""

    engine: str
    # A field that it cannot honour, with a value; None: it leaves that to somebody else.
    refused: tuple[str, Any] | None
    adapter: EngineAdapter[Any]
    may_begin_empty: bool = False  # the first chunk of an answer may hold no text yet
    streams_choices: bool = True  # False: several choices come whole, so none can be left half-way

    def __init__(self, engine: str) -> None:
        self.engine = engine

    @property
    def to_the_end(self) -> dict[str, Any]:
        """Fields that keep an engine from ending before its limit, where it has them."""
        return {"ignore_eos": True} if "ignore_eos" in self.adapter.capabilities.parameters else {}

    @abstractmethod
    async def set_up(self, stack: AsyncExitStack) -> None:
        """Make the adapter, whose engine answers with `max_tokens` tokens; `stack` undoes what it needed."""

    def answers(self, *, num_choices: int = 1) -> None:  # noqa: B027 - most engines need not be told
        """From now on: a short answer, to be asked for as often as the engine needs for that many choices."""

    @abstractmethod
    def talks_on(self) -> None:
        """From now on: a first piece comes soon, and the answer lasts for long."""

    @abstractmethod
    def stays_silent(self) -> None:
        """From now on: nothing comes for long."""

    async def asked(self) -> None:
        """Wait until a generation has reached the engine."""
        await asyncio.sleep(0)

    @abstractmethod
    async def wait_idle(self) -> None:
        """Wait until the engine does nothing for us any more; a second is the limit."""

    @abstractmethod
    def overflows(self) -> GenerateRequest:
        """A request that does not fit the context."""


S = TypeVar("S", bound=Subject)


@asynccontextmanager
async def conforming(subject: S) -> AsyncIterator[S]:
    """The subject, set up, and its adapter closed at the end."""
    async with AsyncExitStack() as stack:
        await subject.set_up(stack)
        try:
            yield subject
        finally:
            await subject.adapter.close()


async def wait_for_idle_load(adapter: EngineAdapter[Any]) -> None:
    """`wait_idle` for an engine whose load says when it is."""
    async with asyncio.timeout(1):
        # ASYNC110: an engine's load is a question, there is no event to wait for
        while (load := await adapter.load()).running or load.waiting:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
HISTORY = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": " there"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "4", "tool_call_id": "c1"},
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "content": "", "tool_call_id": "c1"},
    {"role": "assistant", "content": []},
    {"role": "user", "content": ""},
]


def check_order(chunks: list[Chunk], num_choices: int) -> None:
    """The order that `Chunk` documents."""
    assert chunks[-1].usage is not None
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert (chunks[-1].text, chunks[-1].finish_reason) == ("", None)
    for index in range(num_choices):
        own = [chunk for chunk in chunks[:-1] if chunk.index == index]
        assert [chunk.finish_reason is not None for chunk in own] == [False] * (len(own) - 1) + [True]
    assert {chunk.index for chunk in chunks[:-1]} == set(range(num_choices))


def needs_several_choices(subject: Subject) -> None:
    if "n" not in subject.adapter.capabilities.parameters:
        pytest.skip(f"{subject.engine} gives one choice, and refuses `n`")


@contextlib.contextmanager
def offered(subject: Subject, operation: str, *, is_offered: bool) -> Iterator[None]:
    """The block does what is offered, and is refused by name where it is not."""
    if is_offered:
        yield
        return
    with pytest.raises(UnsupportedOperation, match=f"{subject.engine}.* {operation}\\."):
        yield


class Conformance:
    """The suite. A subclass named `Test...` gives the fixture `subject`."""

    async def test_pieces_come_first_then_one_finish_reason_then_the_usage(self, subject: Subject) -> None:
        await subject.adapter.start()
        chunks = await collect(subject.adapter, chat(max_tokens=2, **subject.to_the_end))
        check_order(chunks, 1)
        assert chunks[-2].finish_reason == "length"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 2
        assert chunks[-1].usage.prompt_tokens > 0

    async def test_a_completion_keeps_the_same_order(self, subject: Subject) -> None:
        await subject.adapter.start()
        chunks = await collect(subject.adapter, completion(max_tokens=2, **subject.to_the_end))
        check_order(chunks, 1)
        assert chunks[-2].finish_reason == "length"

    async def test_a_prompt_of_token_ids_is_answered_or_refused_by_name(self, subject: Subject) -> None:
        await subject.adapter.start()
        request = completion(prompt=[5, 6, 7], max_tokens=2, **subject.to_the_end)
        if subject.adapter.capabilities.token_prompts:
            check_order(await collect(subject.adapter, request), 1)
        else:
            with pytest.raises(UnsupportedParameter, match=f"{subject.engine}.*prompt"):
                await collect(subject.adapter, request)

    async def test_every_choice_finishes_once_and_the_account_covers_all(self, subject: Subject) -> None:
        needs_several_choices(subject)
        subject.answers(num_choices=2)
        await subject.adapter.start()
        chunks = await collect(subject.adapter, chat(max_tokens=2, **subject.to_the_end, n=2))
        check_order(chunks, 2)
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 4

    async def test_a_field_that_the_engine_cannot_honour_is_refused_with_field_and_engine(
        self, subject: Subject
    ) -> None:
        await subject.adapter.start()
        if subject.refused is None:
            pytest.skip("a peer refuses for itself, and names the field in its answer")
        field, value = subject.refused
        make = completion if field in {"suffix"} else chat
        with pytest.raises(UnsupportedParameter, match=f"{subject.engine}.*{field}") as caught:
            await collect(subject.adapter, make(**{field: value}))
        assert caught.value.param == field

    async def test_fields_that_never_change_the_text_and_values_that_ask_for_nothing_are_accepted(
        self, subject: Subject
    ) -> None:
        await subject.adapter.start()
        request = chat(
            max_tokens=2, **subject.to_the_end, user="u", metadata={"a": "b"}, n=1, top_p=1, tools=[],
            tool_choice="auto", response_format={"type": "text"}, logit_bias={}, logprobs=False,
            stream_options={"include_usage": True},
        )  # fmt: skip
        check_order(await collect(subject.adapter, request), 1)

    async def test_usage_with_each_piece_runs_up_to_the_account_or_is_refused_by_name(self, subject: Subject) -> None:
        await subject.adapter.start()
        options = {"include_usage": True, "continuous_usage_stats": True}
        request = chat(max_tokens=2, **subject.to_the_end, stream=True, stream_options=options)
        if not subject.adapter.capabilities.usage_so_far:
            with pytest.raises(UnsupportedParameter, match=f"{subject.engine}.*continuous_usage_stats"):
                await collect(subject.adapter, request)
            return
        chunks = await collect(subject.adapter, request)
        check_order(chunks, 1)
        told = [chunk.usage_so_far.completion_tokens for chunk in chunks if chunk.usage_so_far is not None]
        assert told == sorted(told)
        assert all(count <= 2 for count in told)

    async def test_history_with_every_form_of_content_is_accepted(self, subject: Subject) -> None:
        """Content null, absent, empty and in parts, beside tool calls and without."""
        await subject.adapter.start()
        check_order(await collect(subject.adapter, chat(messages=HISTORY, max_tokens=2, **subject.to_the_end)), 1)

    async def test_embeddings_are_answered_or_refused_by_operation_and_engine(self, subject: Subject) -> None:
        await subject.adapter.start()
        with offered(subject, "embeddings", is_offered=subject.adapter.capabilities.embeddings):
            told = await subject.adapter.embed(EmbeddingRequest(model="small", input=["Once", "Hi there"]))
            assert len(told.vectors) == 2
            assert len(told.vectors[0]) == len(told.vectors[1]) > 0

    async def test_a_choice_of_dimensions_is_taken_or_refused(self, subject: Subject) -> None:
        await subject.adapter.start()
        can = subject.adapter.capabilities
        request = EmbeddingRequest(model="small", input=["Once", "Hi there"], dimensions=2)
        if can.embeddings and can.dimensions:
            with contextlib.suppress(UnsupportedParameter):  # some engines allow it for some models only
                assert [len(vector) for vector in (await subject.adapter.embed(request)).vectors] == [2, 2]
        else:
            with pytest.raises(UnsupportedParameter if can.embeddings else UnsupportedOperation, match=subject.engine):
                await subject.adapter.embed(request)

    async def test_token_ids_and_their_text_are_told_or_refused_by_operation_and_engine(self, subject: Subject) -> None:
        await subject.adapter.start()
        can, ids = subject.adapter.capabilities, [5, 6]
        with offered(subject, "tokenize", is_offered=can.tokenize):
            ids = (await subject.adapter.tokenize(TokenizeRequest(model="small", prompt="Once"))).ids
            assert ids
        with offered(subject, "tokenize of messages", is_offered=can.tokenize_chat):
            turns = TokenizeRequest(model="small", messages=chat().messages)
            assert (await subject.adapter.tokenize(turns)).ids
        with offered(subject, "detokenize", is_offered=can.detokenize):
            assert await subject.adapter.detokenize(ids)

    async def test_closing_the_iterator_stops_the_engine_within_a_second(self, subject: Subject) -> None:
        subject.talks_on()
        await subject.adapter.start()
        async with contextlib.aclosing(
            subject.adapter.generate(chat(**LONG, **subject.to_the_end), request_id="r")
        ) as chunks:
            first = await anext(chunks)
            assert first.text or subject.may_begin_empty
        await subject.wait_idle()

    async def test_cancelling_the_reader_in_the_middle_stops_the_engine_within_a_second(self, subject: Subject) -> None:
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

    async def test_cancelling_before_the_first_token_stops_the_engine_within_a_second(self, subject: Subject) -> None:
        subject.stays_silent()
        await subject.adapter.start()
        task = asyncio.create_task(collect(subject.adapter, chat(**LONG, **subject.to_the_end)))
        await subject.asked()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await subject.wait_idle()

    async def test_leaving_one_of_several_choices_unread_stops_them_all(self, subject: Subject) -> None:
        needs_several_choices(subject)
        if not subject.streams_choices:
            pytest.skip(f"several choices of {subject.engine} come in one piece")
        subject.talks_on()
        await subject.adapter.start()
        async with contextlib.aclosing(
            subject.adapter.generate(chat(**LONG, **subject.to_the_end, n=2), request_id="r")
        ) as chunks:
            await anext(chunks)
        await subject.wait_idle()

    async def test_health_follows_the_life_of_the_adapter(self, subject: Subject) -> None:
        before = await subject.adapter.health()
        await subject.adapter.start()
        during = await subject.adapter.health()
        await subject.adapter.close()
        after = await subject.adapter.health()
        assert (before.ready, during.ready, after.ready) == (False, True, False)
        assert before.reason
        assert after.reason

    async def test_an_adapter_that_is_not_started_says_so(self, subject: Subject) -> None:
        with pytest.raises(EngineUnavailable, match="not started"):
            await collect(subject.adapter, chat())

    async def test_close_is_safe_before_a_start_and_twice(self, subject: Subject) -> None:
        await subject.adapter.close()
        await subject.adapter.start()
        await subject.adapter.close()
        await subject.adapter.close()

    async def test_a_request_that_does_not_fit_the_context_is_a_fault_of_the_request(self, subject: Subject) -> None:
        await subject.adapter.start()
        request = subject.overflows()
        with pytest.raises(ContextLengthExceeded) as caught:
            await collect(subject.adapter, request)
        assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
        assert not caught.value.retryable
