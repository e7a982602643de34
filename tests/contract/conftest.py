"""Every engine in a shape that the contract suite can drive: it answers briefly, talks on, stays silent, refuses."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from adapters.conformance import Subject, chat, collect, completion, conforming, wait_for_idle_load
from adapters.registry import adapter_class
from adapters.types import GenerateRequest
from tests.adapters.cloud import NO_CLOUD, cloud_python
from tests.contract import sglang_transcripts, tensorrt_transcripts, tgi_transcripts, transcripts
from tests.contract.sides import EMBEDDINGS, OPENAI_VECTORS, replies_of
from tests.contract.twin import Reply, Twin, event
from tests.contract.word_model import write_word_model
from tests.native_engine.tiny_llama import CHAT_CONTEXT, write_tiny_chat_llama

__all__ = ["chat", "collect", "completion"]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
OF_OLD = {"vllm": "VLLM", "llama_cpp": "LLAMA", "openvino": "OPENVINO", "goodgate_peer": "PEER"}
MODULES: dict[str, ModuleType] = {
    "sglang": sglang_transcripts,
    "tgi": tgi_transcripts,
    "tensorrt_llm": tensorrt_transcripts,
}
HTTP_ENGINES = (*OF_OLD, *MODULES, "openai_compatible")
FANS_OUT = {"tgi"}  # has no `n`: each choice is a request of its own

# Engines with a text route of their own: the route, the options, what it says, and how it says "too long".
GENERATE_ENGINES: dict[str, tuple[str, str, dict[str, Any], bytes, Reply]] = {
    "sglang-native": (
        "sglang",
        "/generate",
        {"route": "native"},
        sglang_transcripts.NATIVE,
        Reply.plain(400, {"object": "error", "message": "Input length (9000) exceeds the maximum.", "code": 400}),
    ),
    "tgi-generate": (
        "tgi",
        "/generate_stream",
        {},
        tgi_transcripts.NATIVE,
        Reply.stream(
            b'data:{"error":"Input validation error: `inputs` tokens + `max_new_tokens` must be <= 2048. Given: 9000 '
            b'`inputs` tokens and 16 `max_new_tokens`","error_type":"validation"}\n\n'
        ),
    ),
    "triton-llmapi": (
        "triton_server",
        "/v2/models/small/generate_stream",
        {"dialect": "llmapi"},
        tensorrt_transcripts.LLMAPI,
        Reply.plain(
            500,
            {
                "error": "Error generating request: The sum of prompt length (9000.0), query length (0) should not "
                "exceed max_num_tokens (8192)"
            },
        ),
    ),
    "triton-ensemble": (
        "triton_server",
        "/v2/models/small/generate_stream",
        {"dialect": "ensemble"},
        tensorrt_transcripts.ENSEMBLE,
        Reply.plain(400, {"error": "Encountered an error: Prompt length (9000) exceeds maximum input length (2048)"}),
    ),
}


class TwinSubject(Subject):
    """An engine whose side is scripted."""

    twin: Twin
    path = CHAT
    health_path = "/health"

    def answers_questions(self) -> None:
        """From now on: what is asked beside generation is answered, where the engine has such routes."""
        for path, body in replies_of(self.engine).items():
            self.twin.reply(path, Reply.plain(200, body))

    async def asked(self) -> None:
        await self.twin.asked()

    async def wait_idle(self) -> None:
        await self.twin.client_left(within_s=1)


class HTTPSubject(TwinSubject):
    def __init__(self, engine: str) -> None:
        super().__init__(engine)
        self.refused = None if engine == "goodgate_peer" else ("suffix", "end")
        if engine == "openai_compatible":
            self.refused = ("top_k", 5)

    async def set_up(self, stack: AsyncExitStack) -> None:
        self.twin = await stack.enter_async_context(Twin())
        cls = adapter_class(self.engine)
        self.adapter = cls(msgspec.convert({"url": self.twin.url, "model": "small"}, cls.Options))
        self.health_path = cls.health_path  # type: ignore[attr-defined]
        self.twin.reply(self.health_path, Reply.plain(200, b""))
        self.answers()

    def transcript(self, name: str) -> bytes:
        if self.engine in MODULES:
            recorded: bytes = getattr(MODULES[self.engine], name)
        else:
            recorded = getattr(transcripts, f"{OF_OLD.get(self.engine, 'PEER')}_{name}")
        return recorded

    def answers(self, *, num_choices: int = 1) -> None:
        self.twin.reply(CHAT, Reply.stream(self.transcript("CHAT" if num_choices == 1 else "CHAT_TWO")))
        self.twin.reply(COMPLETIONS, Reply.stream(self.transcript("COMPLETION")))

    def talks_on(self) -> None:
        first = self.transcript("CHAT").partition(b" world")[0].rpartition(b"data:")[0]
        self.twin.reply(CHAT, Reply.stream(first, "hold"))

    def stays_silent(self) -> None:
        self.twin.reply(CHAT, Reply.silent())

    def overflows(self) -> GenerateRequest:
        error = {
            "vllm": {"message": "Input length (9000) exceeds model's maximum context length (4096).", "code": 400},
            "llama_cpp": {"message": "too many tokens", "type": "exceed_context_size_error", "n_ctx": 4096},
            "openvino": {"message": "The prompt is too long.", "code": "context_length_exceeded"},
            "goodgate_peer": {"message": "The prompt is too long.", "code": "context_length_exceeded"},
            "openai_compatible": {"message": "This model's maximum context length is 8 tokens.", "code": 400},
            "tgi": {"message": "`inputs` must have less than 1024 tokens. Given: 9000", "http_status_code": 422},
            "sglang": {"message": "The input (9000 tokens) is longer than the model's context length.", "code": 400},
            "tensorrt_llm": {"message": "The sum of prompt length (9000) should not exceed max_num_tokens (8192)"},
        }[self.engine]
        self.twin.reply(CHAT, Reply.plain(400, {"error": error}))
        return chat()


class GenerateSubject(TwinSubject):
    refused = ("tools", [{"type": "function", "function": {"name": "f"}}])

    def __init__(self, name: str, text_model: Path) -> None:
        engine, self.path, self._options, self._answer, self._overflow = GENERATE_ENGINES[name]
        super().__init__(engine)
        self._text_model = text_model

    async def set_up(self, stack: AsyncExitStack) -> None:
        self.twin = await stack.enter_async_context(Twin())
        cls = adapter_class(self.engine)
        options = {"url": self.twin.url, "model": "small", "chat_template": str(self._text_model), **self._options}
        self.adapter = cls(msgspec.convert(options, cls.Options))
        self.health_path = "/v2/models/small/ready" if self.engine == "triton_server" else "/health"
        self.twin.reply(self.health_path, Reply.plain(200, b""))
        self.answers()

    def answers(self, *, num_choices: int = 1) -> None:
        has_n = self.engine == "sglang" and num_choices == 2
        self.twin.reply(self.path, Reply.stream(sglang_transcripts.NATIVE_TWO if has_n else self._answer))

    def event(self, pieces: list[str], reason: str | None = None) -> bytes:
        """The event that follows after all but the last of `pieces`."""
        if self.engine == "sglang":
            return event(sglang_transcripts.native("".join(pieces), len(pieces), reason and {"type": reason}))
        if self.engine == "tgi":
            own = {"stop": "stop_sequence", "end": "eos_token"}.get(reason or "", reason)
            more = {"details": tgi_transcripts.details(own, len(pieces))} if own else {}
            return event(tgi_transcripts.token(pieces[-1], len(pieces), **more))
        if self.is_ensemble:
            return event(tensorrt_transcripts.triton(pieces[-1], num_input_tokens="9", num_output_tokens=[len(pieces)]))
        return event(tensorrt_transcripts.triton("".join(pieces), finish_reason=reason or "None"))

    def stream(self, *pieces: str, reason: str | None = "stop") -> bytes:
        """A whole stream in the engine's accent; without a reason it breaks off."""
        so_far = [list(pieces[: number + 1]) for number in range(len(pieces))]
        return b"".join(self.event(each, reason if each == list(pieces) else None) for each in so_far)

    @property
    def is_ensemble(self) -> bool:
        return self._options.get("dialect") == "ensemble"

    def says(self, *steps: Any) -> None:
        self.twin.reply(self.path, Reply.stream(*steps))

    def talks_on(self) -> None:
        head, mark, rest = self._answer.partition(b"data:")
        self.says(head + mark + rest.partition(b"\n\n")[0] + b"\n\n", "hold")

    def stays_silent(self) -> None:
        self.twin.reply(self.path, Reply.silent())

    def overflows(self) -> GenerateRequest:
        self.twin.reply(self.path, self._overflow)
        return chat()


class CloudSubject(TwinSubject):
    """litellm, in its process, in front of a provider that speaks OpenAI."""

    refused = ("top_k", 5)
    streams_choices = False

    async def set_up(self, stack: AsyncExitStack) -> None:
        python = cloud_python()
        if python is None:
            pytest.skip(NO_CLOUD)
        self.twin = await stack.enter_async_context(Twin())
        cls = adapter_class(self.engine)
        options = {"model": "openai/small", "api_key": "k", "api_base": f"{self.twin.url}/v1", "python": python}
        self.adapter = cls(msgspec.convert(options, cls.Options))
        self.answers()

    def answers(self, *, num_choices: int = 1) -> None:
        if num_choices == 1:
            self.twin.reply(CHAT, Reply.stream(transcripts.VLLM_CHAT))
        else:
            self.twin.reply(CHAT, Reply.plain(200, transcripts.TWO_AT_ONCE))
        self.twin.reply(COMPLETIONS, Reply.stream(transcripts.VLLM_COMPLETION))
        self.twin.reply(EMBEDDINGS, Reply.plain(200, OPENAI_VECTORS))

    def talks_on(self) -> None:
        first = transcripts.VLLM_CHAT.partition(b" world")[0].rpartition(b"data:")[0]
        self.twin.reply(CHAT, Reply.stream(first, "hold"))

    def stays_silent(self) -> None:
        self.twin.reply(CHAT, Reply.silent())

    def overflows(self) -> GenerateRequest:
        error = {"message": "This model's maximum context length is 8 tokens.", "code": "context_length_exceeded"}
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
        await wait_for_idle_load(self.adapter)

    def overflows(self) -> GenerateRequest:
        return chat(messages=[{"role": "user", "content": "word " * 40_000}])


class NativeSubject(Subject):
    refused = ("suffix", "end")
    may_begin_empty = True  # a random model may begin with half a character

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
        await wait_for_idle_load(self.adapter)

    def overflows(self) -> GenerateRequest:
        return chat(messages=[{"role": "user", "content": "x" * CHAT_CONTEXT}])


@pytest.fixture(scope="session")
def native_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_chat_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_word_model(tmp_path_factory.mktemp("text"))


@pytest.fixture(params=[*HTTP_ENGINES, *GENERATE_ENGINES, "litellm_cloud", "fake", "native"])
async def subject(request: pytest.FixtureRequest) -> AsyncIterator[Subject]:
    if request.param == "native":
        model, home = request.getfixturevalue("tiny_model"), request.getfixturevalue("native_home")
        made: Subject = NativeSubject("native", model, home)
    elif request.param == "fake":
        made = FakeSubject("fake")
    elif request.param == "litellm_cloud":
        made = CloudSubject("litellm_cloud")
    else:
        made = _scripted(request)
    async with conforming(made):
        if isinstance(made, TwinSubject):
            made.answers_questions()
        yield made


def _scripted(request: pytest.FixtureRequest) -> TwinSubject:
    if request.param in GENERATE_ENGINES:
        return GenerateSubject(request.param, request.getfixturevalue("text_model"))
    return HTTPSubject(request.param)


async def _started(request: pytest.FixtureRequest) -> AsyncIterator[TwinSubject]:
    async with conforming(_scripted(request)) as made:
        await made.adapter.start()
        yield made


# The same for some of the engines, started: those with a text route, those that speak OpenAI, and both.
generate_subject = pytest.fixture(_started, params=GENERATE_ENGINES, name="generate_subject")
http_subject = pytest.fixture(_started, params=HTTP_ENGINES, name="http_subject")
twin_subject = pytest.fixture(_started, params=[*HTTP_ENGINES, *GENERATE_ENGINES], name="twin_subject")
