"""Goodgate's adapter for Acme: one file, one class called `Adapter`.

Acme speaks JSON lines over HTTP. `POST /speak` is answered by one object a line, `{"say": "Hel"}`, of which the last is
`{"over": "limit", "heard": 9, "said": 2}`; what goes wrong on the way is `{"error": "..."}`. `GET /status` tells the
rest. It has no `n`, honours five fields under names of its own, and refuses nothing: unknown fields are ignored.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import msgspec
from msgspec import Struct

from adapters.base import Capabilities, EngineAdapter, Health, Load, ModelInfo
from adapters.errors import EngineProtocolError, GoodgateError, StreamInterrupted
from adapters.launching.launch import Installation, Launchable, LaunchSpec
from adapters.models.model_store import Model
from adapters.types import ChatRequest, Chunk, FinishReason, GenerateRequest, Usage, set_fields
from adapters.wire.engine_client import EngineClient, Exchange, HTTPOptions
from adapters.wire.generate_http import choices_apart
from adapters.wire.vocabulary import max_pieces
from adapters.wire.wire_errors import stream_error

# What Acme honours, and how it calls it. Anything else is refused by name, because Acme would ignore it.
NAMES = {"temperature": "heat", "seed": "dice", "top_k": "width"}
PARAMETERS = frozenset({"max_tokens", "max_completion_tokens", "stop", "n", *NAMES})

REASONS: dict[str, FinishReason] = {"limit": "length", "end": "stop", "until": "stop"}

MAX_LINE_BYTES = 8 << 20


class AcmeOptions(HTTPOptions):
    """Keys of a replica's `options:`; those of every engine that is reached over HTTP, and one of Acme's own."""

    loud: bool = False  # it answers in capitals


class LaunchOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of `options:` where Goodgate starts the engine itself."""

    token_ms: float = 5.0


class Adapter(Launchable, EngineAdapter[AcmeOptions]):
    engine = "acme"
    Options: ClassVar[type[AcmeOptions]] = AcmeOptions
    capabilities = Capabilities(parameters=PARAMETERS, load=frozenset({"running", "waiting"}))
    needs_model = False

    def __init__(self, options: AcmeOptions) -> None:
        super().__init__(options)
        self.client = EngineClient(self.engine, options)

    async def start(self) -> None:
        await self.client.start()

    async def close(self) -> None:
        await self.client.close()

    # ------------------------------------------------------------------------------------------------------ questions

    async def _status(self) -> Status:
        return self.client.decode(await self.client.get("/status"), Status)

    async def health(self) -> Health:
        try:
            status = await self._status()
        except GoodgateError as error:
            return Health(False, error.message)
        is_ready = status.state == "ready"
        return Health(is_ready, "" if is_ready else f"The engine 'acme' is {status.state}.")

    async def models(self) -> list[ModelInfo]:
        status = await self._status()
        return [ModelInfo(status.model, status.context)]

    async def version(self) -> str:
        return (await self._status()).build

    async def load(self) -> Load:
        try:
            status = await self._status()
        except GoodgateError:
            return Load()  # unknown
        return Load(running=status.speaking, waiting=status.queued)

    # ----------------------------------------------------------------------------------------------------- generation

    def generate(self, request: GenerateRequest, *, request_id: str) -> AsyncGenerator[Chunk, None]:
        return choices_apart(self._one_choice, request, request_id=request_id)

    def _one_choice(self, request: GenerateRequest, *, request_id: str) -> AsyncGenerator[Chunk, None]:
        self.check_parameters(request)
        exchange = Exchange(
            path="/speak",
            body=speak_body(request, self.options),
            reader=LineReader(self.engine, request),
            content_type="application/x-ndjson",
        )
        return self.client.stream(exchange, request_id=request_id)

    # ------------------------------------------------------------------------------------------------------- starting

    @classmethod
    def installed(cls, home: Path) -> Installation:
        return Installation(available=True, version=version("acme-goodgate"))

    @classmethod
    def launch_options(cls) -> type[Struct]:
        return LaunchOptions

    @classmethod
    def launch_spec(cls, *, home: Path, model: Model, port: int, options: Mapping[str, Any]) -> LaunchSpec:
        chosen = msgspec.convert(dict(options), LaunchOptions)
        command = (sys.executable, "-m", "acme_goodgate.server", "--port", str(port), "--model", model.name)
        argv = (*command, "--token-ms", str(chosen.token_ms))
        return LaunchSpec(name="acme", argv=argv, port=port, ready_path="/status")


def speak_body(request: GenerateRequest, options: AcmeOptions) -> dict[str, Any]:
    """The request in Acme's words. What was not asked for stays absent."""
    body: dict[str, Any] = {"loud": options.loud}
    if isinstance(request, ChatRequest):
        body["turns"] = [{"who": each.role, "says": each.text()} for each in request.messages]
    else:
        body["text"] = request.prompt
    if request.token_limit is not None:
        body["at_most"] = request.token_limit
    if request.stop_strings:
        body["until"] = request.stop_strings
    for field in set_fields(request) & set(NAMES):
        body[NAMES[field]] = getattr(request, field)
    return body


class Status(Struct):
    state: str
    model: str = ""
    context: int | None = None
    build: str = ""
    speaking: int | None = None
    queued: int | None = None


class Line(Struct):
    """One line of an answer."""

    say: str = ""
    over: str | None = None
    heard: int = 0
    said: int = 0
    error: str | None = None


_lines = msgspec.json.Decoder(Line)


class LineReader:
    """Turns the bytes of one answer into chunks, however they are cut. No I/O, so that every cut can be tested."""

    is_cut = False  # it always reads to Acme's own end

    def __init__(self, engine: str, request: GenerateRequest) -> None:
        self._engine = engine
        self._held = b""
        self._usage: Usage | None = None
        self._max_pieces = max_pieces(request)
        self.num_chunks = 0

    @property
    def is_done(self) -> bool:
        return self._usage is not None

    def feed(self, data: bytes) -> Iterator[Chunk]:
        *lines, self._held = (self._held + data).split(b"\n")
        for line in lines:
            if line and not self.is_done and (chunk := self._read(line)) is not None:
                self.num_chunks += 1
                yield chunk
        if len(self._held) > MAX_LINE_BYTES or self.num_chunks > (self._max_pieces or self.num_chunks):
            raise EngineProtocolError(f"The engine {self._engine!r} goes on far beyond what was asked for.")

    def _read(self, line: bytes) -> Chunk | None:
        try:
            told = _lines.decode(line)
        except msgspec.DecodeError as error:
            raise EngineProtocolError(f"The engine {self._engine!r} sent a line that is not Acme's.") from error
        if told.error is not None:
            raise stream_error(self._engine, line, has_begun=self.num_chunks > 0)
        if told.over is None:
            return Chunk(text=told.say) if told.say else None
        self._usage = Usage(told.heard, told.said)
        return Chunk(text=told.say, finish_reason=REASONS.get(told.over, "stop"))

    def finish(self) -> list[Chunk]:
        if self._usage is None:
            raise StreamInterrupted(f"The stream of the engine {self._engine!r} ended before its last line.")
        return [Chunk(usage=self._usage)]
