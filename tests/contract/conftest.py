"""Every engine in a shape that the contract suite can drive: it answers briefly, talks on, stays silent, refuses."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from adapters.base import EngineAdapter
from adapters.registry import adapter_class
from adapters.types import ChatRequest, Chunk, CompletionRequest, GenerateRequest
from tests.contract import transcripts
from tests.contract.twin import Reply, Twin
from tests.native_engine.tiny_llama import CHAT_CONTEXT, write_tiny_chat_llama

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HTTP_ENGINES = ("vllm", "llama_cpp", "openvino", "goodgate_peer")


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
    refused: tuple[str, Any] | None  # a field that it cannot honour, with a value; a peer leaves that to the peer
    adapter: EngineAdapter[Any]

    def __init__(self, engine: str) -> None:
        self.engine = engine

    @abstractmethod
    async def set_up(self, stack: AsyncExitStack) -> None:
        """Make the adapter, which answers with `max_tokens` tokens; `stack` undoes what it needed."""

    @abstractmethod
    def talks_on(self) -> None:
        """From now on: a first piece comes soon, and the answer lasts for long."""

    @abstractmethod
    def stays_silent(self) -> None:
        """From now on: nothing comes for long."""

    @abstractmethod
    async def wait_idle(self) -> None:
        """Wait until the engine does nothing for us any more; a second is the limit."""

    @abstractmethod
    def overflows(self) -> GenerateRequest:
        """A request that does not fit the context."""


class HTTPSubject(Subject):
    def __init__(self, engine: str) -> None:
        super().__init__(engine)
        self.refused = None if engine == "goodgate_peer" else ("suffix", "end")

    async def set_up(self, stack: AsyncExitStack) -> None:
        self.twin = await stack.enter_async_context(Twin())
        cls = adapter_class(self.engine)
        self.adapter = cls(msgspec.convert({"url": self.twin.url, "model": "small"}, cls.Options))
        self.twin.reply("/health", Reply.plain(200, b""))
        self.answers()

    def transcript(self, name: str) -> bytes:
        prefix = {"vllm": "VLLM", "llama_cpp": "LLAMA", "openvino": "OPENVINO", "goodgate_peer": "PEER"}[self.engine]
        recorded: bytes = getattr(transcripts, f"{prefix}_{name}")
        return recorded

    def answers(self, *, num_choices: int = 1) -> None:
        self.twin.reply(CHAT, Reply.stream(self.transcript("CHAT" if num_choices == 1 else "CHAT_TWO")))
        self.twin.reply(COMPLETIONS, Reply.stream(self.transcript("COMPLETION")))

    def talks_on(self) -> None:
        first = self.transcript("CHAT").partition(b" world")[0].rpartition(b"data:")[0]
        self.twin.reply(CHAT, Reply.stream(first, "hold"))

    def stays_silent(self) -> None:
        self.twin.reply(CHAT, Reply.silent())

    async def wait_idle(self) -> None:
        await self.twin.client_left(within_s=1)

    def overflows(self) -> GenerateRequest:
        error = {
            "vllm": {"message": "Input length (9000) exceeds model's maximum context length (4096).", "code": 400},
            "llama_cpp": {"message": "too many tokens", "type": "exceed_context_size_error", "n_ctx": 4096},
            "openvino": {"message": "The prompt is too long.", "code": "context_length_exceeded"},
            "goodgate_peer": {"message": "The prompt is too long.", "code": "context_length_exceeded"},
        }[self.engine]
        self.twin.reply(CHAT, Reply.plain(400, {"error": error}))
        return chat()


class FakeSubject(Subject):
    refused = ("logit_bias", {"5": 1.0})

    async def set_up(self, stack: AsyncExitStack) -> None:
        self._dial(ttft_ms=1, itl_ms=1, tokens=1000)

    def _dial(self, **dials: Any) -> None:
        cls = adapter_class("fake")
        if hasattr(self, "adapter"):
            self.adapter.options = msgspec.convert(dials, cls.Options)
        else:
            self.adapter = cls(msgspec.convert(dials, cls.Options))

    def talks_on(self) -> None:
        self._dial(ttft_ms=1, itl_ms=20, tokens=1000)

    def stays_silent(self) -> None:
        self._dial(ttft_ms=60_000)

    async def wait_idle(self) -> None:
        await idle(self.adapter)

    def overflows(self) -> GenerateRequest:
        return chat(messages=[{"role": "user", "content": "word " * 40_000}])


class NativeSubject(Subject):
    refused = ("logit_bias", {"5": 1.0})

    def __init__(self, engine: str, model: Path, home: Path) -> None:
        super().__init__(engine)
        self._options = {"model": str(model), "home": str(home), "kv_cache_mib": 16, "num_threads": 1}

    async def set_up(self, stack: AsyncExitStack) -> None:
        cls = adapter_class("native")
        self.adapter = cls(msgspec.convert(self._options, cls.Options))

    def talks_on(self) -> None:
        """It always does, when asked to ignore the end."""

    def stays_silent(self) -> None:
        """It never does: the test leaves before the first step is over."""

    async def wait_idle(self) -> None:
        await idle(self.adapter)

    def overflows(self) -> GenerateRequest:
        return chat(messages=[{"role": "user", "content": "x" * CHAT_CONTEXT}])


async def idle(adapter: EngineAdapter[Any]) -> None:
    async with asyncio.timeout(1):
        # ASYNC110: an engine's load is a question, there is no event to wait for
        while (load := await adapter.load()).running or load.waiting:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@pytest.fixture(scope="session")
def native_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_chat_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(params=[*HTTP_ENGINES, "fake", "native"])
async def subject(request: pytest.FixtureRequest) -> AsyncIterator[Subject]:
    kinds = {"fake": FakeSubject, **dict.fromkeys(HTTP_ENGINES, HTTPSubject)}
    async with AsyncExitStack() as stack:
        if request.param == "native":
            model, home = request.getfixturevalue("tiny_model"), request.getfixturevalue("native_home")
            made: Subject = NativeSubject("native", model, home)
        else:
            made = kinds[request.param](request.param)
        await made.set_up(stack)
        yield made
        await made.adapter.close()


@pytest.fixture(params=HTTP_ENGINES)
async def http_subject(request: pytest.FixtureRequest) -> AsyncIterator[HTTPSubject]:
    async with AsyncExitStack() as stack:
        made = HTTPSubject(request.param)
        await made.set_up(stack)
        await made.adapter.start()
        yield made
        await made.adapter.close()
