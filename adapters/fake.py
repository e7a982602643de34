"""The fake engine: deterministic text at a chosen pace, with chosen faults. It proves what stands around an engine.

    engine: fake
    options: {ttft_ms: 50, itl_ms: 10, tokens: 64, fail_rate: 0.1, fail_kinds: [cut]}

In process it is an adapter like any other, and the shortest example of one; over HTTP the same dials are served by
`python -m adapters.servers.fake_server`. Equal prompt, seed and choice give equal text. Which request fails is a
function of `seed` and the request's id alone, so a run can be repeated (an embedding, which has no id, is known by
its inputs). A token is one word; those that it says are its vocabulary, and any other has an id of its own but reads
back as `<unk>`. Vectors count words: texts that share them lie close.
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
import zlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from adapters.base import Capabilities, EngineAdapter, EngineOptions, Health, Load, ModelInfo
from adapters.errors import (
    ContextLengthExceeded,
    EngineFailed,
    EngineUnavailable,
    InvalidRequest,
    Overloaded,
    StreamInterrupted,
)
from adapters.launching.launch import Installation, Launchable, LaunchSpec
from adapters.types import (
    ChatRequest,
    Chunk,
    EmbeddingRequest,
    Embeddings,
    FinishReason,
    GenerateRequest,
    TokenizeRequest,
    Tokens,
    Usage,
)

if TYPE_CHECKING:
    from adapters.models.model_store import Model

# error: fails before the first token. overloaded: says that it is full. error_event: reports a failure half way.
# cut: drops the connection half way. stall: falls silent half way, until the caller leaves.
FaultKind: TypeAlias = Literal["error", "overloaded", "error_event", "cut", "stall"]

# fmt: off
WORDS = (
    "the", "a", "one", "every", "small", "quiet", "open", "old", "new", "plain", "river", "garden", "engine", "window",
    "letter", "morning", "city", "signal", "road", "story", "carries", "follows", "answers", "keeps", "turns", "finds",
    "reads", "moves", "waits", "opens", "under", "over", "near", "after", "before", "with", "and", "then", "so",
)
# fmt: on
KNOWN = {word: number for number, word in enumerate(WORDS)}
UNKNOWN = "<unk>"
MAX_DIMENSIONS = 4096


class FakeOptions(EngineOptions):
    """The dials. Times are those of one request that is not queueing."""

    model: str = "fake"
    ttft_ms: Annotated[float, Meta(ge=0)] = 20.0
    itl_ms: Annotated[float, Meta(ge=0)] = 5.0
    tokens: Annotated[int, Meta(ge=1)] = 32  # the length of an answer that nothing else limits
    fail_rate: Annotated[float, Meta(ge=0, le=1)] = 0.0
    fail_kinds: Annotated[tuple[FaultKind, ...], Meta(min_length=1)] = ("error",)
    max_concurrent: Annotated[int, Meta(ge=0)] = 0  # requests served at a time, the rest queue in order; 0 = no limit
    max_queued: Annotated[int, Meta(ge=0)] = 1_000_000  # longer queues are refused
    max_model_len: Annotated[int, Meta(ge=1)] = 32_768
    dimensions: Annotated[int, Meta(ge=1, le=MAX_DIMENSIONS)] = 64  # of a vector, where the request does not say
    seed: int = 0


class Answer(Struct, frozen=True):
    """What one choice will say, decided before its first token."""

    pieces: list[str]
    finish_reason: FinishReason
    stop_string: str | None = None


class Adapter(Launchable, EngineAdapter[FakeOptions]):
    engine = "fake"
    hardware = frozenset({"cpu"})
    needs_model = False
    Options = FakeOptions
    # Nothing is sampled here, so every sampling field is honoured by doing the same as ever.
    capabilities = Capabilities(
        token_prompts=True,
        usage_so_far=True,
        parameters=frozenset(
            {"max_tokens", "max_completion_tokens", "min_tokens", "ignore_eos", "stop", "seed", "n"}
            | {"temperature", "top_p", "top_k", "min_p"}
            | {"presence_penalty", "frequency_penalty", "repetition_penalty"}
        ),
        embeddings=True,
        dimensions=True,
        tokenize=True,
        tokenize_chat=True,
        detokenize=True,
        load=frozenset({"running", "waiting"}),
    )

    def __init__(self, options: FakeOptions) -> None:
        super().__init__(options)
        self._slots = asyncio.Semaphore(options.max_concurrent or 1_000_000)
        self._num_running = 0
        self._num_waiting = 0
        self._is_started = False

    @classmethod
    def installed(cls, home: Path) -> Installation:
        return Installation(available=True, version="built in", how="")

    @classmethod
    def launch_options(cls) -> type[Struct]:
        return FakeOptions

    @classmethod
    def launch_spec(cls, *, home: Path, model: Model, port: int, options: Mapping[str, Any]) -> LaunchSpec:
        """The HTTP form in a process of its own, answering under the model's name."""
        dials = msgspec.convert({**options, "model": model.name}, FakeOptions)
        flags = tuple(
            f"--{name.replace('_', '-')}={_as_flag(value)}" for name, value in msgspec.to_builtins(dials).items()
        )
        argv = (sys.executable, "-m", "adapters.servers.fake_server", f"--port={port}", *flags)
        package_root = {"PYTHONPATH": str(Path(__file__).parents[1])}
        return LaunchSpec(name="fake", argv=argv, env=package_root, port=port, ready_timeout_s=20)

    async def start(self) -> None:
        self._is_started = True

    async def close(self) -> None:
        self._is_started = False

    async def health(self) -> Health:
        return Health(True) if self._is_started else Health(False, "The fake engine is not started.")

    async def models(self) -> list[ModelInfo]:
        return [ModelInfo(self.options.model, self.options.max_model_len)]

    async def load(self) -> Load:
        return Load(running=self._num_running, waiting=self._num_waiting)

    async def version(self) -> str:
        return version("goodgate")

    async def embed(self, request: EmbeddingRequest) -> Embeddings:
        self._check_started()
        size = request.dimensions if isinstance(request.dimensions, int) else self.options.dimensions
        if size > MAX_DIMENSIONS:
            raise InvalidRequest(f"The fake engine has at most {MAX_DIMENSIONS} dimensions.", param="dimensions")
        inputs = [each if isinstance(each, list) else ids_of(each) for each in request.input]
        fault = fault_of(str(inputs), self.options)
        async with self._slot():
            await asyncio.sleep(self.options.ttft_ms / 1000)
            await _embedding_fault(fault)
            return Embeddings([vector_of(ids, size) for ids in inputs], sum(map(len, inputs)))

    async def tokenize(self, request: TokenizeRequest) -> Tokens:
        self._check_started()
        return Tokens(ids_of(prompt_text(request.as_generation())), self.options.max_model_len)

    async def detokenize(self, ids: Sequence[int]) -> str:
        self._check_started()
        return " ".join(WORDS[number] if number < len(WORDS) else UNKNOWN for number in ids)

    def _check_started(self) -> None:
        if not self._is_started:
            raise EngineUnavailable("The fake engine is not started.")

    async def generate(self, request: GenerateRequest, *, request_id: str) -> AsyncGenerator[Chunk, None]:
        self.check_parameters(request)
        self._check_started()
        num_prompt_tokens = count_prompt_tokens(request)
        _check_context(num_prompt_tokens, request, self.options)
        answers = [answer(request, self.options, index) for index in range(request.num_choices)]
        fault = fault_of(request_id, self.options)
        async with self._slot():
            num_given = 0
            async for chunk in _paced(answers, fault, self.options):
                num_given += 1  # a piece is a token
                yield (
                    _with_usage(chunk, Usage(num_prompt_tokens, num_given, 0)) if request.wants_usage_so_far else chunk
                )
        completion_tokens = sum(len(each.pieces) for each in answers)
        yield Chunk(usage=Usage(num_prompt_tokens, completion_tokens, cached_tokens=0))

    @asynccontextmanager
    async def _slot(self) -> AsyncGenerator[None, None]:
        """One of `max_concurrent` places; waiting for it is the fake's queue."""
        if self._slots.locked() and self._num_waiting >= self.options.max_queued:
            raise Overloaded("The fake engine's queue is full.", retry_after_s=1)
        self._num_waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self._num_waiting -= 1
        self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1
            self._slots.release()


async def _paced(answers: list[Answer], fault: FaultKind | None, dials: FakeOptions) -> AsyncGenerator[Chunk, None]:
    """The pieces of all choices, each at its moment. Moments are set from the start, so lateness does not add up."""
    _check_overload(fault)
    started = time.monotonic()
    num_steps = max(len(each.pieces) for each in answers)
    for step in range(num_steps):
        await _sleep_until(started + (dials.ttft_ms + step * dials.itl_ms) / 1000)
        if fault is not None and (fault == "error" or step >= num_steps // 2):
            await _fail(fault)
        for index, each in enumerate(answers):
            if step < len(each.pieces):
                is_last = step + 1 == len(each.pieces)
                yield Chunk(
                    index=index,
                    text=each.pieces[step],
                    finish_reason=each.finish_reason if is_last else None,
                    stop_string=each.stop_string if is_last else None,
                )


def _with_usage(chunk: Chunk, so_far: Usage) -> Chunk:
    return msgspec.structs.replace(chunk, usage_so_far=so_far)


async def _embedding_fault(fault: FaultKind | None) -> None:
    """An embedding is one piece, so every kind of fault comes instead of it."""
    _check_overload(fault)
    if fault is not None:
        await _fail(fault)


def _check_overload(fault: FaultKind | None) -> None:
    if fault == "overloaded":
        raise Overloaded("The fake engine was told to be overloaded.", retry_after_s=1)


async def _sleep_until(moment: float) -> None:
    await asyncio.sleep(max(0.0, moment - time.monotonic()))


async def _fail(fault: FaultKind) -> None:
    if fault == "stall":
        await asyncio.Event().wait()
    if fault == "cut":
        raise StreamInterrupted("The fake engine was told to drop the connection.")
    raise EngineFailed("The fake engine was told to fail.")


def answer(request: GenerateRequest, dials: FakeOptions, index: int) -> Answer:
    """What choice `index` will say: words drawn by hash, as many as the request and the dials ask for."""
    limit = request.token_limit
    num_tokens = max(dials.tokens, request.min_tokens or 0)
    if limit is not None:
        num_tokens = limit if request.ignore_eos is True else min(num_tokens, limit)
    seed = request.seed if isinstance(request.seed, int) else dials.seed
    start = zlib.crc32(f"{seed}/{index}/{prompt_text(request)}".encode())
    words = (WORDS[zlib.crc32(step.to_bytes(4, "big"), start) % len(WORDS)] for step in range(num_tokens))
    pieces = [word if step == 0 else f" {word}" for step, word in enumerate(words)]
    return _cut_at_stop(pieces, request.stop_strings) or Answer(pieces, "length" if num_tokens == limit else "stop")


def _cut_at_stop(pieces: list[str], stop: list[str]) -> Answer | None:
    """The pieces up to the first stop string, the last one cut before it; None where none occurs."""
    text = "".join(pieces)
    found = [(position, each) for each in stop if (position := text.find(each)) >= 0]
    if not found:
        return None
    kept: list[str] = []
    room, met = min(found)
    for piece in pieces:
        kept.append(piece[:room])
        room -= len(piece)
        if room < 0:
            break
    return Answer(kept, "stop", met)


def fault_of(request_id: str, dials: FakeOptions) -> FaultKind | None:
    """The fault this request meets: a draw from its id, uniform over the kinds."""
    draw = zlib.crc32(f"{dials.seed}/{request_id}".encode()) / 2**32
    if draw >= dials.fail_rate:
        return None
    return dials.fail_kinds[int(draw / dials.fail_rate * len(dials.fail_kinds))]


def _as_flag(value: object) -> str:
    return ",".join(value) if isinstance(value, tuple | list) else str(value)


def prompt_text(request: GenerateRequest) -> str:
    if isinstance(request, ChatRequest):
        return "\n".join(f"{message.role}: {message.text()}" for message in request.messages)
    return request.prompt if isinstance(request.prompt, str) else " ".join(map(str, request.prompt))


def count_prompt_tokens(request: GenerateRequest) -> int:
    return len(prompt_text(request).split())


def ids_of(text: str) -> list[int]:
    return [KNOWN.get(word, len(WORDS) + zlib.crc32(word.encode()) % 2**30) for word in text.split()]


def vector_of(ids: Sequence[int], size: int) -> list[float]:
    """Feature hashing: each word adds one to a dimension of its own, up or down; of length 1."""
    counts = [0.0] * size
    for token in ids:
        place = zlib.crc32(token.to_bytes(8, "big"))
        counts[place // 2 % size] += 1 if place % 2 else -1
    length = math.hypot(*counts)
    return [count / length for count in counts] if length else [1.0] + [0.0] * (size - 1)


def _check_context(num_prompt_tokens: int, request: GenerateRequest, dials: FakeOptions) -> None:
    wanted = num_prompt_tokens + (request.token_limit or 0)
    if wanted > dials.max_model_len:
        raise ContextLengthExceeded(
            f"The prompt ({num_prompt_tokens} tokens) and max_tokens ask for {wanted} tokens, "
            f"but the context holds {dials.max_model_len}."
        )
