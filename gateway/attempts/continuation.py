"""A greedy stream that breaks off goes on at another replica, and its client sees the tokens that it would have seen
anyway.

    telling = with_progress(model.config, request, strict)   # the request, asking for token ids too; None: it cannot be
    answer = await continued(stack, held, first, telling, resume, note)

Replicas that can (native engines, and Goodgates in front of them) tell the token ids of each piece. After a break the
next one gets the prompt, the ids and the number of characters that the client has; it brings its text to that place
and goes on. It refuses where it is another model, build, processor or prompt, and then the client sees the failure, as
it does without all this. Exact is what the tokens alone decide: a temperature of 0, one choice, and no penalties,
tools, `response_format` or log-probabilities. Each further try needs progress in the one before; there are three.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing
from typing import TypeAlias

import msgspec

from adapters.base import is_default
from adapters.errors import GoodgateError
from adapters.tools.strict import StrictTools
from adapters.types import Chunk, Continuation, GenerateRequest, Usage, set_fields
from gateway.attempts.answer import Answer
from gateway.config import GroupConfig, ModelConfig
from gateway.replicas.replica import Replica

MAX_CONTINUATIONS = 3
COLDEST = 1e-6  # below it the native engine is greedy
_EXACT = frozenset(
    {"model", "messages", "prompt", "max_tokens", "max_completion_tokens", "min_tokens", "ignore_eos", "stop", "seed"}
    | {"temperature", "top_p", "top_k", "min_p", "stream", "stream_options", "user", "cache_salt", "metadata", "store"}
    | {"n", "continuation"}
)  # fmt: skip

Resume: TypeAlias = Callable[[Answer, GenerateRequest], AbstractAsyncContextManager[Answer]]
Note: TypeAlias = Callable[[str], None]  # told `ok`, or the code of what kept a stream from being continued


def with_progress(
    config: ModelConfig | GroupConfig, request: GenerateRequest, strict: StrictTools | None
) -> GenerateRequest | None:
    """The request, asking for token ids too; None where its answer could not be continued."""
    if not config.continuation or strict is not None or not _is_exact(request):
        return None
    return msgspec.structs.replace(request, continuation=Continuation())


def can_continue(replica: Replica) -> bool:
    return "continuation" in replica.started_adapter.capabilities.parameters


async def continued(
    stack: AsyncExitStack, held: AsyncExitStack, first: Answer, telling: GenerateRequest, resume: Resume, note: Note
) -> Answer:
    """The answer that is open on `held`, going on elsewhere where it breaks off."""
    story = _Continued(held, first, telling, resume, note)
    chunks = await stack.enter_async_context(aclosing(story.chunks()))
    return Answer(first.model, [await anext(chunks)], chunks, story.account, by=first.by)


def _is_exact(request: GenerateRequest) -> bool:
    is_greedy = isinstance(request.temperature, int | float) and request.temperature < COLDEST
    is_first = not isinstance(request.continuation, Continuation)  # otherwise the gateway in front sees to it
    if not (request.is_stream and is_greedy and is_first and request.num_choices == 1):
        return False
    return all(is_default(field, getattr(request, field)) for field in set_fields(request) - _EXACT)


class _Continued:
    """The chunks of a stream, whoever has written them; `account` tells the one who writes."""

    def __init__(
        self, held: AsyncExitStack, first: Answer, telling: GenerateRequest, resume: Resume, note: Note
    ) -> None:
        self._held = held
        self._answer = first
        self._telling = telling
        self._resume = resume
        self._note = note
        self._ids: list[int] = []
        self._num_chars = 0
        self._fingerprint = ""

    def account(self, usage: Usage) -> None:
        self._answer.account(usage)

    async def chunks(self) -> AsyncGenerator[Chunk, None]:
        num_left = MAX_CONTINUATIONS
        while True:
            num_before = len(self._ids)
            try:
                async with self._held:
                    async for chunk in self._answer:
                        yield self._noted(chunk)
                    return
            except GoodgateError as failure:
                if not self._can_go_on(failure) or num_left == 0 or len(self._ids) == num_before:
                    raise
                num_left -= 1
                await self._go_on(failure)

    def _noted(self, chunk: Chunk) -> Chunk:
        if chunk.progress is None:
            if chunk.finish_reason is not None or chunk.text:
                self._fingerprint = ""  # it is at its end, or its writer tells no ids
            return chunk
        self._ids.extend(chunk.progress.ids)
        self._num_chars += len(chunk.text)
        self._fingerprint = chunk.progress.fingerprint
        return msgspec.structs.replace(chunk, progress=None)

    def _can_go_on(self, failure: GoodgateError) -> bool:
        return failure.retryable and bool(self._fingerprint)

    async def _go_on(self, failure: GoodgateError) -> None:
        """Opens the rest on another replica. Raises the failure that broke the stream where that is not to be had."""
        rest = Continuation(self._ids, self._num_chars, self._fingerprint)
        self._held = AsyncExitStack()
        try:
            asked = msgspec.structs.replace(self._telling, continuation=rest)
            self._answer = await self._held.enter_async_context(self._resume(self._answer, asked))
        except GoodgateError as error:
            self._note(error.code or error.type)
            raise failure from error
        self._note("ok")
