"""A thin OpenAI server over OpenVINO GenAI. launching/recipes/openvino.py starts it inside OpenVINO's own environment:

    python -m adapters.servers.openvino_server --model FILE.gguf --served-model-name NAME --port 8000

Routes: `/v1/chat/completions` and `/v1/completions` (streaming or not), `/tokenize` and `/detokenize` as vLLM has them,
`/v1/models`, `/version`, `/health`, `/metrics`. The port opens when the model is loaded. Fields that OpenVINO cannot
honour are refused by name. A client that leaves stops its work. The pipeline runs in a process of its own
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
from typing import Any
from uuid import uuid4

import msgspec
import uvloop
from aiohttp import web
from msgspec import Struct

from adapters.base import is_default
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
from adapters.types import (
    INFORMATIONAL,
    ChatRequest,
    CompletionRequest,
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
SUPPORTED = LIMITS | SAMPLING | PENALTIES | INFORMATIONAL
MAX_BODY_BYTES = 32 << 20

_encode = msgspec.json.Encoder().encode


class Piece(Struct, frozen=True):
    """Something new for one choice."""

    index: int
    text: str
    num_tokens: int
    finish_reason: str | None


class Shape:
    """How one route words its answers: the chat route here, the completion route in the subclass."""

    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, model: str) -> None:
        self._common = {"id": f"{self.prefix}-{uuid4().hex}", "created": int(time.time()), "model": model}

    def opening(self, index: int) -> dict[str, Any] | None:
        """A choice's first delta, which precedes its text."""
        return {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}

    def delta(self, piece: Piece) -> dict[str, Any]:
        content = {"content": piece.text} if piece.text else {}
        return {"index": piece.index, "delta": content, "finish_reason": piece.finish_reason}

    def choice(self, index: int, text: str, finish_reason: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text}
        return {"index": index, "message": message, "finish_reason": finish_reason}

    def event(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> bytes:
        body = {**self._common, "object": self.chunk, "choices": choices}
        return b"data: " + _encode(body if usage is None else {**body, "usage": usage}) + b"\n\n"

    def answer(self, choices: list[dict[str, Any]], usage: dict[str, int]) -> bytes:
        return _encode({**self._common, "object": self.whole, "choices": choices, "usage": usage})


class CompletionShape(Shape):
    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    def opening(self, index: int) -> dict[str, Any] | None:
        return None

    def delta(self, piece: Piece) -> dict[str, Any]:
        return self.choice(piece.index, piece.text, piece.finish_reason)

    def choice(self, index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "finish_reason": finish_reason, "logprobs": None}


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
        return await self._answer(request, body, self._chat_ids(body), Shape(self._name))

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = decode_completion(await request.read())
        self._check(body, "prompt")
        return await self._answer(request, body, self._prompt_ids(body), CompletionShape(self._name))

    async def tokenize(self, request: web.Request) -> web.Response:
        body = decode_tokenize(await request.read())
        self._check_model(body.model)
        asked = body.request(self._name)
        generation = asked.as_generation()
        if isinstance(generation, ChatRequest):
            ids = self._chat_ids(generation)
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
        body = {"object": "list", "data": [{**model, "max_model_len": self._max_model_len}]}
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
        for field in sorted(set_fields(body) - SUPPORTED - {prompt_field}):
            if not is_default(field, getattr(body, field)):
                raise UnsupportedParameter(field, ENGINE)

    def _check_model(self, model: str | None) -> None:
        if model not in (None, self._name):
            raise ModelNotFound(f"There is no model {model!r} here, only {self._name!r}.", param="model")

    def _check_ids(self, ids: list[int], field: str) -> None:
        if any(token >= len(self._text.pieces) for token in ids):
            raise InvalidRequest(f"Token ids end at {len(self._text.pieces) - 1}.", param=field)

    def _chat_ids(self, body: ChatRequest) -> list[int]:
        if self._text.template is None:
            raise InvalidRequest("This model has no chat template; use /v1/completions.", param="messages")
        messages = [message.for_template() for message in body.messages]
        return self._text.encode(self._text.template.render(messages), add_special_tokens=False)

    def _prompt_ids(self, body: CompletionRequest) -> list[int]:
        if isinstance(body.prompt, str):
            return self._text.encode(body.prompt, add_special_tokens=True)
        self._check_ids(body.prompt, "prompt")
        return body.prompt

    async def _answer(
        self, request: web.Request, body: GenerateRequest, prompt_ids: list[int], shape: Shape
    ) -> web.StreamResponse:
        generation = self._pipeline.submit(make_jobs(body, prompt_ids, self._max_model_len))
        try:
            async with aclosing(self._pieces(generation, body)) as pieces:
                if body.is_stream:
                    return await stream(request, pieces, shape, len(prompt_ids), with_usage=body.wants_usage)
                return await fold(pieces, shape, len(prompt_ids), body.num_choices)
        finally:
            generation.cancel()  # nothing is left to cancel unless the client has gone or an error came

    async def _pieces(self, generation: Generation, body: GenerateRequest) -> AsyncGenerator[Piece, None]:
        """Token ids become text here, and a stop string ends its choice."""
        texts = [TextStream(self._text.pieces, body.stop_strings) for _ in range(body.num_choices)]
        async for index, output in generation:
            text, finish = texts[index].feed(output.token_ids), output.finish
            if texts[index].stopped:
                generation.cancel(index)
            elif finish is not None:
                text += texts[index].close()
            yield Piece(index, text, len(output.token_ids), "stop" if texts[index].stopped else finish)


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
    *,
    with_usage: bool,
) -> web.StreamResponse:
    """Server-sent events. The 200 waits for the first piece, so that a refusal still leaves with its own status."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    opened: set[int] = set()
    num_tokens = 0
    try:
        async for piece in pieces:
            if not response.prepared:
                await response.prepare(request)
            num_tokens += piece.num_tokens
            if piece.text or piece.finish_reason:
                is_first = piece.index not in opened
                opened.add(piece.index)
                opening = shape.opening(piece.index) if is_first else None
                head = shape.event([opening]) if opening else b""
                await response.write(head + shape.event([shape.delta(piece)]))
        tail = shape.event([], usage(num_prompt_tokens, num_tokens)) if with_usage else b""
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
    texts: list[list[str]] = [[] for _ in range(num_choices)]
    reasons = [""] * num_choices
    num_tokens = 0
    async for piece in pieces:
        texts[piece.index].append(piece.text)
        reasons[piece.index] = piece.finish_reason or ""
        num_tokens += piece.num_tokens
    choices = [shape.choice(index, "".join(texts[index]), reasons[index]) for index in range(num_choices)]
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
        asyncio.to_thread(ModelText.load, Path(arguments.model), arguments.chat_template),
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
