"""litellm in a process of its own, which adapters/servers/litellm_process.py starts and speaks to.

    python -I litellm_worker.py FD          # FD: one end of a socket pair; the other end's close ends this process

Frames go both ways, each for one call: a head, then JSON. The first sets up the model and its key, which are answered
with what litellm knows of it, or with the reason why it cannot be used; then calls are answered event by event, in
OpenAI's words. It runs on the standard library and litellm, possibly in an environment of litellm's own.

Why a process: the import takes 3 s and 160 MiB, brings native code, and reads its settings from the environment, of
which this process gets next to nothing. What litellm 1.106.12 does, and does not do, is made good here:
- It fetches a price list, headers and news when it is imported, and reads a stray `.env`: `OFFLINE` switches that off.
- Closing its stream leaves Anthropic's connection open, and the provider generating (streaming_handler.py looks for an
  `aclose` that the stream below does not have): the HTTP responses of a call are noted, and closed with it.
- A stream that breaks off is given the finish reason `stop`, and one without an account gets an estimate: neither is
  passed on. Streams of several choices lose all finish reasons but one: they are asked for in one piece.
- A call with tools imports the MCP gateway, which needs a package that is not there, and would let a caller name a
  server to connect to: it is switched off, and the adapter takes functions only.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.metadata
import json
import os
import re
import socket
import struct
import sys
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

PINNED = "1.106.12"
HOW = f"pip install 'litellm=={PINNED}'"
MALICIOUS = ("1.82.7", "1.82.8", "1.107.")  # 1.82.7 and 1.82.8: MAL-2026-2144; 1.107.x is reported to be as bad

# Read by litellm when it is imported: __init__.py, get_model_cost_map.py, anthropic_beta_headers_manager.py and
# get_blog_posts.py of 1.106.12. Later versions have the other two; they do no harm here.
OFFLINE = {
    "LITELLM_MODE": "PRODUCTION",  # no .env
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_LOCAL_ANTHROPIC_BETA_HEADERS": "True",
    "LITELLM_LOCAL_BLOG_POSTS": "True",
    "LITELLM_OFFLINE_MODE": "true",
    "LITELLM_DISABLE_LATEST_RELEASE_CHECK": "True",
    "LITELLM_LOG": "ERROR",
}

# The fields of a call that may reach litellm, by name. Above all not among them: addresses, keys, headers.
FIELDS = frozenset(
    {"messages", "prompt", "input", "stream", "stream_options", "max_tokens", "max_completion_tokens", "temperature"}
    | {"top_p", "n", "stop", "seed", "presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "top_logprobs"}
    | {"tools", "tool_choice", "parallel_tool_calls", "response_format", "reasoning_effort", "prediction", "dimensions"}
    | {"encoding_format"}
)

HEAD = struct.Struct(">IIc")  # the length of what follows, the call, the kind
MAX_FRAME = 64 << 20
WINDOW = 64  # events of one call that may be under way: a reader that is slow stops its own stream and no other

SETUP, CALL, MORE, CANCEL, PING = b"S", b"Q", b"M", b"C", b"P"
READY, REFUSED, EVENT, END, FAILED, PONG = b"R", b"X", b"E", b"Z", b"F", b"O"

Frame = tuple[int, bytes, bytes]  # call, kind, payload


def frame(call: int, kind: bytes, payload: bytes = b"") -> bytes:
    return HEAD.pack(len(payload), call, kind) + payload


async def read_frame(reader: asyncio.StreamReader) -> Frame | None:
    """The next frame; None when the other side has hung up, or sends what it never would."""
    try:
        length, call, kind = HEAD.unpack(await reader.readexactly(HEAD.size))
        return (call, kind, await reader.readexactly(length)) if length <= MAX_FRAME else None
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


# ------------------------------------------------------------------------------------------------------------- litellm


class Unusable(Exception):
    """litellm cannot be used here; the message says what to do."""


def import_litellm() -> Any:
    """The library, offline, silent and without retries of its own. Raises `Unusable`."""
    try:
        version = importlib.metadata.version("litellm")
    except importlib.metadata.PackageNotFoundError:
        raise Unusable(
            "litellm is not installed; install it with: pip install 'goodgate[cloud]', "
            f"or name in options.python a Python that has it ({HOW})."
        ) from None
    if version != PINNED:
        is_bad = version.startswith(MALICIOUS)
        warning = " That release is malicious: delete the environment and change every key it could read." * is_bad
        raise Unusable(f"litellm {version} is installed, and only {PINNED} is used.{warning} Install it with: {HOW}")
    os.environ.update(OFFLINE)
    import litellm

    litellm.disable_hf_tokenizer_download = True
    litellm.suppress_debug_info = True
    litellm.redact_messages_in_exceptions = True
    litellm.drop_params = False  # what a provider cannot honour is an error
    litellm.num_retries = 0  # the gateway decides about other tries
    litellm.REPEATED_STREAMING_CHUNK_LIMIT = sys.maxsize  # it would end answers that repeat a piece 100 times
    for callbacks in ("callbacks", "input_callback", "success_callback", "failure_callback"):
        getattr(litellm, callbacks).clear()
    _watch_calls()
    return litellm


_current: ContextVar[Call | None] = ContextVar("current", default=None)


def _watch_calls() -> None:
    """Note each HTTP response and each of litellm's streams with the call that caused it, and follow no redirect.

    A redirect would take the prompt, and a key that is not in `Authorization` (Anthropic's, Azure's), to whomever it
    names: httpx (0.28) takes only that one header off. There is no other way to all this that works for every provider;
    the version is pinned, and tests replay it.
    """
    client: Any = importlib.import_module("httpx").AsyncClient
    stream: Any = importlib.import_module("litellm.litellm_core_utils.streaming_handler").CustomStreamWrapper
    send, init = client.send, stream.__init__

    async def noted_send(*arguments: Any, **options: Any) -> Any:
        response = await send(*arguments, **{**options, "follow_redirects": False})
        if (call := _current.get()) is not None:
            call.responses.append(response)
        return response

    def noted_init(self: Any, *arguments: Any, **options: Any) -> None:
        init(self, *arguments, **options)
        if (call := _current.get()) is not None:
            call.streams.append(self)

    client.send = noted_send
    stream.__init__ = noted_init


class Model:
    """The configured model, as litellm knows it."""

    def __init__(self, litellm: Any, setup: Mapping[str, Any]) -> None:
        self._litellm = litellm
        self._name: str = setup["model"]
        timeout = importlib.import_module("httpx").Timeout(
            setup["silence_timeout_s"], connect=setup["connect_timeout_s"]
        )
        self._fixed = {**setup["connection"], "timeout": timeout, "max_retries": 0, "num_retries": 0}

    def facts(self) -> dict[str, Any]:
        """What the adapter derives its capabilities from. Raises `Unusable` for a name without a known provider."""
        try:
            name, provider, _, _ = self._litellm.get_llm_provider(model=self._name)
        except self._litellm.BadRequestError:
            raise Unusable(
                f"litellm knows no provider for the model {self._name!r}; write it as PROVIDER/MODEL, "
                "for example anthropic/claude-sonnet-4-5."
            ) from None
        supported = self._litellm.get_supported_openai_params(name, custom_llm_provider=provider)
        embeds = self._litellm.get_supported_openai_params(
            name, custom_llm_provider=provider, request_type="embeddings"
        )
        return {
            "version": PINNED,
            "provider": provider,
            "mode": self._mode(),
            "parameters": sorted(set(supported or ())),
            "embedding_parameters": sorted(set(embeds or ())),
            # Elsewhere litellm would send the prompt as a user's message, which is another thing.
            "has_text_route": provider in {"text-completion-openai", "azure_text"}
            or (provider == "openai" and "*" not in name and name not in self._litellm.open_ai_chat_completion_models),
        }

    def _mode(self) -> str:
        """`chat`, `completion`, `embedding`, ... of its list of models; empty for one that is not in it."""
        try:
            return self._litellm.get_model_info(self._name).get("mode") or ""
        except Exception:  # it raises a plain one
            return ""

    async def events(self, route: str, fields: dict[str, Any], call: Call) -> AsyncGenerator[dict[str, Any], None]:
        """The answer to one request, as OpenAI's stream has it; vectors one by one."""
        unknown = fields.keys() - FIELDS - ({"model"} if "*" in self._name else set())
        if unknown:
            raise ValueError(f"the field {min(unknown)!r} is not passed on")
        asked = {"model": self._name, **fields, **self._fixed}
        if route == "embeddings":
            async for event in self._vectors(asked):
                yield event
            return
        if route == "chat":
            answer = await self._litellm.acompletion(**asked, _skip_mcp_handler=True)
        else:
            answer = await self._litellm.atext_completion(**asked)
        if not fields.get("stream"):
            for event in whole_answer(answer):
                yield event
            return
        async for chunk in answer:
            if (told := read_chunk(chunk, call)) is not None:
                yield told

    async def _vectors(self, asked: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        answer = await self._litellm.aembedding(**asked)
        for each in answer.data:
            yield {"index": each["index"], "embedding": each["embedding"]}
        yield {"prompt_tokens": answer.usage.prompt_tokens if answer.usage else 0}


def read_chunk(chunk: Any, call: Call) -> dict[str, Any] | None:
    """One of litellm's chunks as OpenAI's, without what litellm has made up; None when nothing is left."""
    event: dict[str, Any] = {}
    usage = getattr(chunk, "usage", None)
    if usage is not None and call.provider_counted:
        event["usage"] = _usage(usage)
    choices = [_choice(each, call) for each in chunk.choices]
    event["choices"] = [each for each in choices if each.keys() - {"index"}]
    return event if event.get("usage") or event["choices"] else None


def whole_answer(answer: Any) -> Iterator[dict[str, Any]]:
    """An answer that came in one piece."""
    for choice in answer.choices:
        yield {"choices": [_choice(choice)]}
    if getattr(answer, "usage", None) is not None:
        yield {"choices": [], "usage": _usage(answer.usage)}


def _choice(choice: Any, call: Call | None = None) -> dict[str, Any]:
    told: dict[str, Any] = {"index": choice.index}
    delta = getattr(choice, "delta", None) or getattr(choice, "message", None)
    said = _delta(delta) if delta is not None else {}
    if said:
        told["delta"] = said
    if text := getattr(choice, "text", None):
        told["text"] = text
    logprobs = getattr(choice, "logprobs", None)
    if logprobs is not None:
        told["logprobs"] = _plain(logprobs)
    if choice.finish_reason and (call is None or call.provider_finished):
        told["finish_reason"] = choice.finish_reason
    return told


def _delta(delta: Any) -> dict[str, Any]:
    said = {
        "content": getattr(delta, "content", None),
        "reasoning_content": getattr(delta, "reasoning_content", None),
        "tool_calls": [_plain(each) for each in getattr(delta, "tool_calls", None) or ()],
    }
    return {name: value for name, value in said.items() if value}


def _usage(usage: Any) -> dict[str, Any]:
    cached = getattr(getattr(usage, "prompt_tokens_details", None), "cached_tokens", None)
    thought = getattr(getattr(usage, "completion_tokens_details", None), "reasoning_tokens", None)
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": thought},
    }


def _plain(value: Any) -> Any:
    return value.model_dump(exclude_none=True) if hasattr(value, "model_dump") else value


# -------------------------------------------------------------------------------------------------------------- errors

_CONNECTION_LOST = {"httpx.TransportError", "aiohttp.ClientConnectionError", "aiohttp.ClientPayloadError"}
_KINDS = (
    ("context", {"litellm.ContextWindowExceededError"}),
    ("unsupported", {"litellm.UnsupportedParamsError"}),
    ("timeout", {"litellm.Timeout", "openai.APITimeoutError", "httpx.TimeoutException"}),
    ("connection", {*_CONNECTION_LOST, "builtins.ConnectionError"}),
    ("protocol", {"litellm.APIResponseValidationError"}),
)
_PREFIX = re.compile(r"^\s*(?:(?:litellm\.)?[A-Za-z_0-9]*(?:Error|Exception|Timeout)\s*(?::|-)\s*)+")
_PARAMETERS = re.compile(r"does not support parameters: \['(\w+)'|Setting (\w+) is not supported")
MAX_MESSAGE = 500


def describe(error: BaseException, secrets: tuple[str, ...]) -> dict[str, Any]:
    """What went wrong, for the adapter to choose an error of ours: a kind where the class tells, the provider's status
    (litellm changes some), and the provider's own words, with every secret taken out."""
    chain = list(_chain(error))
    classes = {f"{cls.__module__.partition('.')[0]}.{cls.__name__}" for each in chain for cls in type(each).__mro__}
    kind = next((kind for kind, names in _KINDS if names & classes), "status")
    statuses = [status for each in chain if isinstance(status := getattr(each, "status_code", None), int)]
    message = _words(_origin(error))
    for secret in secrets:
        message = message.replace(secret, "[key]")
    found = _PARAMETERS.search(message)
    return {
        "kind": kind,
        "status": statuses[-1] if statuses else 500,
        "message": message[:MAX_MESSAGE],
        "param": next((name for name in found.groups() if name), None) if found else None,
        "retry_after": next(filter(None, map(_retry_after, chain)), None),
    }


def _origin(error: BaseException) -> BaseException:
    """litellm wraps what breaks a stream once more."""
    inner = getattr(error, "original_exception", None)
    return inner if isinstance(inner, BaseException) else error


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what caused it, the first cause last."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        inner = _origin(error)
        error = inner if inner is not error else error.__cause__ or error.__context__


def _words(error: BaseException) -> str:
    """The provider's message out of litellm's, which puts class names before it and whole bodies into it."""
    message = getattr(error, "message", None)
    text = message if isinstance(message, str) else str(error)
    start = text.find("{")
    if start >= 0:
        with contextlib.suppress(ValueError, AttributeError, KeyError, TypeError):  # not JSON, or of another shape
            body = json.JSONDecoder().raw_decode(text, start)[0]
            inner = body.get("error", body)
            return str(inner["message"] if isinstance(inner, dict) else inner)
    words = _PREFIX.sub("", text).strip().partition("\n")[0]
    return "" if words == "b''" else words  # how litellm writes an empty body


def _retry_after(error: BaseException) -> str | None:
    for headers in (getattr(error, "litellm_response_headers", None), getattr(error, "headers", None)):
        if isinstance(headers, Mapping) and headers.get("retry-after"):
            return str(headers["retry-after"])
    return None


# --------------------------------------------------------------------------------------------------------------- calls


class Call:
    """One request under way."""

    def __init__(self) -> None:
        self.credit = asyncio.Semaphore(WINDOW)
        self.responses: list[Any] = []  # httpx's, of this call
        self.streams: list[Any] = []  # litellm's wrappers
        self.task: asyncio.Task[None] | None = None

    @property
    def provider_finished(self) -> bool:
        """The provider has given a finish reason; litellm gives one at the end of every stream."""
        return any(each.received_finish_reason or each.intermittent_finish_reason for each in self.streams)

    @property
    def provider_counted(self) -> bool:
        return any(getattr(chunk, "usage", None) is not None for each in self.streams for chunk in each.chunks)

    async def close(self) -> None:
        """Stop the provider: close what is still open of its connections."""
        for each in (*self.streams, *self.responses):
            with contextlib.suppress(Exception):  # it was broken already
                await each.aclose()


class Worker:
    """Answers frames until the other side hangs up."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._calls: dict[int, Call] = {}
        self._secrets: tuple[str, ...] = ()

    async def serve(self) -> None:
        model = await self._set_up()
        while model is not None and (received := await read_frame(self._reader)) is not None:
            number, kind, payload = received
            call = self._calls.get(number)
            if kind == CALL:
                self._begin(number, model, json.loads(payload))
            elif kind == PING:
                await self._send(number, PONG)
            elif kind == CANCEL and call is not None and call.task is not None:
                call.task.cancel()
            elif kind == MORE and call is not None:
                for _ in range(int(payload)):
                    call.credit.release()
        tasks = [call.task for call in self._calls.values() if call.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _set_up(self) -> Model | None:
        received = await read_frame(self._reader)
        if received is None:
            return None
        setup = json.loads(received[2])
        self._secrets = tuple(setup["secrets"])
        try:
            model = Model(import_litellm(), setup)
            await self._send(0, READY, model.facts())
        except Unusable as problem:
            await self._send(0, REFUSED, {"message": str(problem)})
            return None
        return model

    def _begin(self, number: int, model: Model, asked: dict[str, Any]) -> None:
        call = self._calls[number] = Call()
        call.task = asyncio.create_task(self._answer(number, call, model, asked))
        call.task.add_done_callback(lambda _: self._calls.pop(number, None))

    async def _answer(self, number: int, call: Call, model: Model, asked: dict[str, Any]) -> None:
        _current.set(call)
        try:
            async with contextlib.aclosing(model.events(asked["route"], asked["fields"], call)) as events:
                async for event in events:
                    await call.credit.acquire()
                    await self._send(number, EVENT, event)
            await self._send(number, END)
        except Exception as error:  # whatever a provider or litellm comes up with ends this call and no other
            await self._send(number, FAILED, describe(error, self._secrets))
        finally:
            await call.close()

    async def _send(self, call: int, kind: bytes, event: dict[str, Any] | None = None) -> None:
        payload = b"" if event is None else json.dumps(event).encode()
        if len(payload) > MAX_FRAME:
            raise ValueError("the provider sent more at once than can be passed on")
        with contextlib.suppress(ConnectionError):  # the other side has gone: `serve` reads that, and ends
            self._writer.write(frame(call, kind, payload))
            await self._writer.drain()


async def main(fd: int) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=socket.socket(fileno=fd))
    try:
        await Worker(reader, writer).serve()
    finally:
        writer.close()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
