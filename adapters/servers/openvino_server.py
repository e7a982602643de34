"""A thin OpenAI server over OpenVINO GenAI. launching/recipes/openvino.py starts it inside OpenVINO's own environment:

    python -m adapters.servers.openvino_server --model FILE.gguf --served-model-name NAME --port 8000

Routes: `/v1/chat/completions` and `/v1/completions` (streaming or not), `/tokenize` and `/detokenize` as vLLM has them,
`/v1/models`, `/version`, `/health`, `/metrics`. The port opens when the model is loaded. Fields that OpenVINO cannot
honour are refused by name. Tool calls and thoughts are read out of the text, where the chat template shows how the
model writes them. A client that leaves stops its work. The pipeline runs in a process of its own
(adapters/servers/openvino_worker.py); this one speaks HTTP and turns text into token ids and back.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any, get_args
from uuid import uuid4

import msgspec
import uvloop
from aiohttp import web
from msgspec import Raw, Struct

from adapters.base import check_parts, is_default
from adapters.errors import (
    ContextLengthExceeded,
    GoodgateError,
    InvalidRequest,
    ModelNotFound,
    UnsupportedParameter,
)
from adapters.servers.openvino_text import ModelText, TextStream, library_version
from adapters.servers.openvino_worker import Generation, Job, PipelineProcess, Settings
from adapters.servers.side_answers import decode_detokenize, decode_tokenize, text_answer, tokens_answer
from adapters.tools.formats import FORMATS
from adapters.tools.think_text import ReasoningParser, thoughts_of
from adapters.tools.tool_calls import CallChunks, for_template, offered, whole_calls
from adapters.types import (
    INFORMATIONAL,
    ChatRequest,
    Chunk,
    CompletionRequest,
    FinishReason,
    GenerateRequest,
    Tokens,
    decode_chat,
    decode_completion,
    set_fields,
)

ENGINE = "openvino"
LIMITS = {"max_tokens", "max_completion_tokens", "min_tokens", "ignore_eos", "stop", "n"}
SAMPLING = {"temperature", "top_p", "top_k", "min_p", "seed"}
PENALTIES = {"presence_penalty", "frequency_penalty", "repetition_penalty"}
TOOLS = {"tools", "parallel_tool_calls"}  # a forced call would need a grammar
SUPPORTED = LIMITS | SAMPLING | PENALTIES | INFORMATIONAL
MAX_BODY_BYTES = 32 << 20

_encode = msgspec.json.Encoder().encode


class Piece(Struct, frozen=True):
    """Something new for one choice."""

    chunk: Chunk
    num_tokens: int


class Told(Struct):
    """All pieces of one choice."""

    text: str = ""
    thought: str = ""
    calls: list[Raw] = []
    finish_reason: str | None = None

    def add(self, chunk: Chunk) -> None:
        self.text += chunk.text
        self.thought += chunk.reasoning
        self.calls += [] if chunk.tool_calls is None else [chunk.tool_calls]
        self.finish_reason = chunk.finish_reason or self.finish_reason


class Shape:
    """How one route words its answers: the chat route here, the completion route in the subclass."""

    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, model: str) -> None:
        self._common = {"id": f"{self.prefix}-{uuid4().hex}", "created": int(time.time()), "model": model}

    def opening(self, index: int) -> dict[str, Any] | None:
        """A choice's first delta, which precedes its text."""
        return {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}

    def delta(self, chunk: Chunk) -> dict[str, Any]:
        said = {"content": chunk.text, "reasoning_content": chunk.reasoning, "tool_calls": chunk.tool_calls}
        delta = {name: value for name, value in said.items() if value}
        return {"index": chunk.index, "delta": delta, "finish_reason": chunk.finish_reason}

    def choice(self, index: int, told: Told) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": told.text if told.text or not told.calls else None}
        if told.thought:
            message["reasoning_content"] = told.thought
        if told.calls:
            message["tool_calls"] = whole_calls(told.calls)
        return {"index": index, "message": message, "finish_reason": told.finish_reason}

    def event(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> bytes:
        body = {**self._common, "object": self.chunk, "choices": choices}
        return b"data: " + _encode(body if usage is None else {**body, "usage": usage}) + b"\n\n"

    def answer(self, choices: list[dict[str, Any]], usage: dict[str, int]) -> bytes:
        return _encode({**self._common, "object": self.whole, "choices": choices, "usage": usage})


class CompletionShape(Shape):
    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    def opening(self, index: int) -> dict[str, Any] | None:
        return None

    def delta(self, chunk: Chunk) -> dict[str, Any]:
        return self.choice(chunk.index, Told(chunk.text, finish_reason=chunk.finish_reason))

    def choice(self, index: int, told: Told) -> dict[str, Any]:
        return {"index": index, "text": told.text, "finish_reason": told.finish_reason, "logprobs": None}


class Reading:
    """What one request's chunks hold beside text."""

    def __init__(self, body: GenerateRequest, prompt: str, text: ModelText) -> None:
        offer = offered(body, ENGINE) if text.tool_format is not None else None
        self._thoughts = thoughts_of(body, prompt) if text.thinks_aloud else None
        self._calls: CallChunks | None = None
        if offer is not None and text.tool_format is not None:
            self._calls = CallChunks(offer, text.tool_format, num_choices=body.num_choices)

    def feed(self, chunk: Chunk) -> list[Chunk]:
        passed = chunk if self._thoughts is None else self._thoughts.feed(chunk)
        if passed is None:
            return []
        return [passed] if self._calls is None else list(self._calls.feed(passed))


class Server:
    """The HTTP face of one model."""

    def __init__(self, pipeline: PipelineProcess, text: ModelText, *, name: str, max_model_len: int) -> None:
        self._pipeline = pipeline
        self._text = text
        self._name = name
        self._max_model_len = max_model_len
        self._created = int(time.time())

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[answer_errors])
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_post("/v1/completions", self.complete)
        app.router.add_post("/tokenize", self.tokenize)
        app.router.add_post("/detokenize", self.detokenize)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/version", self.version)
        app.router.add_get("/health", self.health)
        app.router.add_get("/metrics", self.metrics)
        return app

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = decode_chat(await request.read())
        self._check(body, "messages")
        prompt = self._chat_prompt(body)
        ids = self._text.encode(prompt, add_special_tokens=False)
        return await self._answer(request, body, ids, Shape(self._name), Reading(body, prompt, self._text))

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = decode_completion(await request.read())
        self._check(body, "prompt")
        reading = Reading(body, "", self._text)
        return await self._answer(request, body, self._prompt_ids(body), CompletionShape(self._name), reading)

    async def tokenize(self, request: web.Request) -> web.Response:
        body = decode_tokenize(await request.read())
        self._check_model(body.model)
        asked = body.request(self._name)
        generation = asked.as_generation()
        if isinstance(generation, ChatRequest):
            check_parts(generation.messages, (), ENGINE)
            ids = self._text.encode(self._chat_prompt(generation), add_special_tokens=False)
        else:
            ids = self._text.encode(asked.prompt or "", add_special_tokens=asked.add_special_tokens)
        return _json(tokens_answer(Tokens(ids, self._max_model_len)))

    async def detokenize(self, request: web.Request) -> web.Response:
        body = decode_detokenize(await request.read())
        self._check_model(body.model)
        self._check_ids(body.tokens, "tokens")
        return _json(text_answer(self._text.decode(body.tokens)))

    async def version(self, _: web.Request) -> web.Response:
        return _json(_encode({"version": library_version()}))

    async def models(self, _: web.Request) -> web.Response:
        model = {"id": self._name, "object": "model", "created": self._created, "owned_by": ENGINE}
        told = {"max_model_len": self._max_model_len, "tools": self._text.tool_format is not None}
        body = {"object": "list", "data": [{**model, **told}]}
        return _json(_encode(body))

    async def health(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self._pipeline.ended.is_set() else 200)

    async def metrics(self, _: web.Request) -> web.Response:
        load = self._pipeline.load()
        gauges = {"requests_running": load.running, "requests_waiting": load.waiting, "kv_cache_usage": load.kv_usage}
        lines = [f"# TYPE openvino:{name} gauge\nopenvino:{name} {value}\n" for name, value in gauges.items()]
        return web.Response(text="".join(lines))

    def _check(self, body: GenerateRequest, prompt_field: str) -> None:
        self._check_model(body.model)
        if isinstance(body, ChatRequest):
            check_parts(body.messages, (), ENGINE)
        supported = SUPPORTED | (TOOLS if self._text.tool_format is not None else set())
        for field in sorted(set_fields(body) - supported - {prompt_field}):
            if not is_default(field, getattr(body, field)):
                raise UnsupportedParameter(field, ENGINE)

    def _check_model(self, model: str | None) -> None:
        if model not in (None, self._name):
            raise ModelNotFound(f"There is no model {model!r} here, only {self._name!r}.", param="model")

    def _check_ids(self, ids: list[int], field: str) -> None:
        if any(token >= len(self._text.pieces) for token in ids):
            raise InvalidRequest(f"Token ids end at {len(self._text.pieces) - 1}.", param=field)

    def _chat_prompt(self, body: ChatRequest) -> str:
        if self._text.template is None:
            raise InvalidRequest("This model has no chat template; use /v1/completions.", param="messages")
        turns, tools = for_template(body, self._text.template, self._text.tool_format)
        return self._text.template.render(turns, tools=tools)

    def _prompt_ids(self, body: CompletionRequest) -> list[int]:
        if isinstance(body.prompt, str):
            return self._text.encode(body.prompt, add_special_tokens=True)
        self._check_ids(body.prompt, "prompt")
        return body.prompt

    async def _answer(
        self, request: web.Request, body: GenerateRequest, prompt_ids: list[int], shape: Shape, reading: Reading
    ) -> web.StreamResponse:
        generation = self._pipeline.submit(make_jobs(body, prompt_ids, self._max_model_len))
        try:
            async with aclosing(self._pieces(generation, body, reading)) as pieces:
                if body.is_stream:
                    return await stream(request, pieces, shape, len(prompt_ids), body)
                return await fold(pieces, shape, len(prompt_ids), body.num_choices)
        finally:
            generation.cancel()  # nothing is left to cancel unless the client has gone or an error came

    async def _pieces(
        self, generation: Generation, body: GenerateRequest, reading: Reading
    ) -> AsyncGenerator[Piece, None]:
        """Token ids become text here, and a stop string ends its choice, or a call where one is all that is wanted."""
        texts = [TextStream(self._text.pieces, body.stop_strings) for _ in range(body.num_choices)]
        async for index, output in generation:
            text, finish = texts[index].feed(output.token_ids), output.finish
            if texts[index].stopped:
                generation.cancel(index)
            elif finish is not None:
                text += texts[index].close()
            reason = "stop" if texts[index].stopped else _REASONS.get(finish)
            num_tokens = len(output.token_ids)
            for chunk in reading.feed(Chunk(index=index, text=text, finish_reason=reason)):
                if chunk.finish_reason is not None and reason is None:
                    generation.cancel(index)
                yield Piece(chunk, num_tokens)
                num_tokens = 0
            if num_tokens:
                yield Piece(Chunk(index=index), num_tokens)


_REASONS: dict[str | None, FinishReason] = {"stop": "stop", "length": "length"}


def make_jobs(body: GenerateRequest, prompt_ids: list[int], max_model_len: int) -> list[Job]:
    """One job for each choice, with seeds that differ; refuses what does not fit the model's context."""
    if not prompt_ids:
        raise InvalidRequest("The prompt is empty.", param="prompt")
    room = max_model_len - len(prompt_ids)
    max_tokens = body.token_limit
    if room < (max_tokens or 1):
        raise ContextLengthExceeded(
            f"The prompt has {len(prompt_ids)} tokens and {max_tokens or 'at least 1'} were asked for, "
            f"but the context length is {max_model_len}."
        )
    fields = {name: getattr(body, name) for name in set_fields(body) & COPIED}
    if fields.get("top_k", 0) < 0:
        fields["top_k"] = 0  # -1 and 0 both mean off
    seed = body.seed if isinstance(body.seed, int) else random.getrandbits(63)
    return [
        Job(prompt_ids=prompt_ids, max_tokens=max_tokens or room, seed=(seed + choice) % 2**64, **fields)
        for choice in range(body.num_choices)
    ]


COPIED = (SUPPORTED & frozenset(Job.__struct_fields__)) - {"max_tokens", "seed"}  # same name and meaning on both sides


async def stream(
    request: web.Request,
    pieces: AsyncGenerator[Piece, None],
    shape: Shape,
    num_prompt_tokens: int,
    body: GenerateRequest,
) -> web.StreamResponse:
    """Server-sent events. The 200 waits for the first piece, so that a refusal still leaves with its own status."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    opened: set[int] = set()
    num_tokens = num_told = 0
    try:
        async for piece in pieces:
            if not response.prepared:
                await response.prepare(request)
            num_tokens += piece.num_tokens
            chunk = piece.chunk
            if chunk.text or chunk.reasoning or chunk.tool_calls is not None or chunk.finish_reason:
                is_first = chunk.index not in opened
                opened.add(chunk.index)
                opening = shape.opening(chunk.index) if is_first else None
                before, so_far = None, None
                if body.wants_usage_so_far:
                    before, so_far = usage(num_prompt_tokens, num_told), usage(num_prompt_tokens, num_tokens)
                    num_told = num_tokens
                head = shape.event([opening], before) if opening else b""
                await response.write(head + shape.event([shape.delta(chunk)], so_far))
        tail = shape.event([], usage(num_prompt_tokens, num_tokens)) if body.wants_usage else b""
        await response.write(tail + b"data: [DONE]\n\n")
    except GoodgateError as error:
        if not response.prepared:
            raise
        await response.write(b"data: " + envelope(error) + b"\n\n")  # and no [DONE]: this is no success
    await response.write_eof()
    return response


async def fold(
    pieces: AsyncGenerator[Piece, None], shape: Shape, num_prompt_tokens: int, num_choices: int
) -> web.Response:
    told = [Told() for _ in range(num_choices)]
    num_tokens = 0
    async for piece in pieces:
        told[piece.chunk.index].add(piece.chunk)
        num_tokens += piece.num_tokens
    choices = [shape.choice(index, each) for index, each in enumerate(told)]
    body = shape.answer(choices, usage(num_prompt_tokens, num_tokens))
    return _json(body)


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")


def usage(num_prompt_tokens: int, num_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt_tokens + num_tokens,
    }


def envelope(error: GoodgateError) -> bytes:
    detail = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    return _encode({"error": detail})


@web.middleware
async def answer_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except GoodgateError as error:
        return web.Response(status=error.status, body=envelope(error), content_type="application/json")
    except web.HTTPException as error:
        refusal = InvalidRequest(error.reason)
        return web.Response(status=error.status, body=envelope(refusal), content_type="application/json")


async def serve(arguments: argparse.Namespace) -> int:
    """Load, serve until TERM or INT (exit code 0) or until the pipeline ends by itself (exit code 1)."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    settings = Settings(**{name: getattr(arguments, name) for name in Settings.__struct_fields__})
    pipeline, text = await asyncio.gather(
        PipelineProcess.start(settings),
        asyncio.to_thread(
            ModelText.load,
            Path(arguments.model),
            arguments.chat_template,
            tool_parser=arguments.tool_parser,
            reasoning_parser=arguments.reasoning_parser,
        ),
    )
    server = Server(pipeline, text, name=arguments.served_model_name, max_model_len=arguments.max_model_len)
    runner = web.AppRunner(server.app(), handler_cancellation=True, access_log=None, keepalive_timeout=75)
    await runner.setup()
    await web.TCPSite(runner, arguments.host, arguments.port, shutdown_timeout=2).start()
    print(f"serving {arguments.served_model_name} on http://{arguments.host}:{arguments.port}", flush=True)
    waits = [asyncio.create_task(event.wait()) for event in (stop, pipeline.ended)]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    await runner.cleanup()
    pipeline.close()
    return 0 if stop.is_set() else 1


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m adapters.servers.openvino_server", description="Serve a GGUF file."
    )
    parser.add_argument("--model", required=True, help="a GGUF file")
    parser.add_argument("--served-model-name", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True, help="inference threads")
    parser.add_argument("--kv-cache-gib", type=int, default=1)
    parser.add_argument("--max-model-len", type=int, default=4096, help="prompt and answer together, in tokens")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=256)
    parser.add_argument("--chat-template", type=Path, help="a Jinja file to use instead of the model's own template")
    parser.add_argument("--tool-parser", default="auto", choices=["auto", "none", *FORMATS])
    parser.add_argument("--reasoning-parser", default="auto", choices=get_args(ReasoningParser))
    parser.add_argument("--no-prefix-caching", dest="prefix_caching", action="store_false")
    return parser.parse_args(arguments)


def main() -> int:
    try:
        return uvloop.run(serve(parse(sys.argv[1:])))
    except GoodgateError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
