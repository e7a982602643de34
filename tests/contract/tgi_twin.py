"""A server that behaves as text-generation-inference 3.3.7 does on its routes, without a model: its words are drawn by
hash from the prompt, so that every client which asks for the same gets the same.

    async with TGITwin() as tgi:
        ...                                    # tgi.url; tgi.failures, tgi.num_running tell what it saw

What it keeps of TGI, from its router's source at 3.3.7 (server.rs, validation.rs, chat.rs, infer/mod.rs):
- A body is decoded strictly: JSON of wrong types is a plain-text 422, no JSON a plain-text 400, over 2 MB a plain 413.
- Values are validated in the order and the words of `validation.rs`: 422, or in a stream an event under status 200.
- A stop string counts only at the end of what was generated, so one that ends inside a token is not seen.
- Streams end with EOF on its own route and with `[DONE]` on OpenAI's; a comment fills every silence of `ping_s`.
- A client that has left is noticed when the next token is written.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from aiohttp import web
from jinja2 import Template
from msgspec import Meta, Struct

from tests.contract.word_model import TEMPLATE

MODEL_ID, VERSION = "org/small", "3.3.7"
MAX_BODY = 2 << 20
MAX_STOPS, MAX_BEST_OF, MAX_TOP_N, MAX_INPUT, MAX_TOTAL = 4, 2, 5, 1024, 2048
NUM_WORDS = 12  # of an answer that nothing ends earlier
WORDS = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta")
EOS = "</s>"

Unsigned = Annotated[int, Meta(ge=0)]


STATUS = {"validation": 422, "tool_error": 422, "overloaded": 429, "generation": 424}


class InferError(Exception):
    """A fault with TGI's word for it. The status follows from the word."""

    def __init__(self, error_type: str, message: str) -> None:
        super().__init__(message)
        self.error_type = error_type

    @property
    def body(self) -> dict[str, str]:
        return {"error": str(self), "error_type": self.error_type}


def invalid(message: str) -> InferError:
    return InferError("validation", f"Input validation error: {message}")


# ------------------------------------------------------------------------------------------------------------ requests


class Grammar(Struct):
    type: str
    value: Any


class Parameters(Struct):
    best_of: Unsigned | None = None
    temperature: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    typical_p: float | None = None
    do_sample: bool = False
    max_new_tokens: Unsigned | None = 100
    return_full_text: bool | None = None
    stop: list[str] = []
    truncate: Unsigned | None = None
    watermark: bool = False
    details: bool = False
    decoder_input_details: bool = False
    seed: Unsigned | None = None
    top_n_tokens: Unsigned | None = None
    grammar: Grammar | None = None
    adapter_id: str | None = None


class Generate(Struct):
    inputs: str
    parameters: Parameters = msgspec.field(default_factory=Parameters)
    stream: bool = False  # only `/` reads it


class StreamOptions(Struct):
    include_usage: bool = True


class Chat(Struct):
    messages: list[dict[str, Any]]
    model: str | None = None
    frequency_penalty: float | None = None
    logit_bias: list[float] | None = None
    logprobs: bool | None = None
    top_logprobs: Unsigned | None = None
    max_tokens: Unsigned | None = None
    n: Unsigned | None = None
    presence_penalty: float | None = None
    stop: list[str] | None = None
    stream: bool = False
    seed: Unsigned | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = "auto"
    response_format: dict[str, Any] | None = None
    stream_options: StreamOptions | None = None


class Completion(Struct):
    prompt: str | list[str]
    model: str | None = None
    max_tokens: Unsigned | None = 100
    seed: Unsigned | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool = False
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    suffix: str | None = None
    stop: list[str] | None = None


def validated(request: Generate) -> int:
    """The number of prompt tokens, once the request is one that TGI would take."""
    given = request.parameters
    is_sampling = given.do_sample or any(
        value is not None for value in (given.temperature, given.top_k, given.top_p, given.typical_p)
    )
    several = (given.best_of or 1) > 1
    num_prompt = len(tokenize(request.inputs))
    wanted = 0 if given.max_new_tokens is None else given.max_new_tokens
    faults: list[tuple[bool, str]] = [
        (several and not is_sampling, "you must use sampling when `best_of` is > 1"),
        (_below(given.temperature, 0), "`temperature` must be strictly positive"),
        (_below(given.repetition_penalty, 0), "`repetition_penalty` must be strictly positive"),
        (not -2 <= (given.frequency_penalty or 0) <= 2, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
        (given.top_p is not None and not 0 < given.top_p < 1, "`top_p` must be > 0.0 and < 1.0"),
        (given.typical_p is not None and not 0 < given.typical_p < 1, "`typical_p` must be > 0.0 and < 1.0"),
        (_below(given.top_k, 0), "`top_k` must be strictly positive"),
        (given.max_new_tokens == 0, "`max_new_tokens` must be strictly positive"),
        (
            len(given.stop) > MAX_STOPS,
            f"`stop` supports up to {MAX_STOPS} stop sequences. Given: {len(given.stop)}",
        ),
        (several and given.seed is not None, "`seed` must not be set when `best_of` > 1"),
        (
            (given.top_n_tokens or 0) > MAX_TOP_N,
            f"`top_n_tokens` must be >= 0 and <= {MAX_TOP_N}. Given: {given.top_n_tokens}",
        ),
        (not request.inputs, "`inputs` cannot be empty"),
        (
            num_prompt + wanted > MAX_TOTAL,
            f"`inputs` tokens + `max_new_tokens` must be <= {MAX_TOTAL}. Given: {num_prompt} `inputs` tokens and "
            f"{wanted} `max_new_tokens`",
        ),
        (num_prompt > MAX_INPUT, f"`inputs` must have less than {MAX_INPUT} tokens. Given: {num_prompt}"),
        (
            given.grammar is not None and given.grammar.type == "json" and "properties" not in given.grammar.value,
            "Grammar is not valid: Grammar must have a 'properties' field",
        ),
        (
            not 1 <= (1 if given.best_of is None else given.best_of) <= MAX_BEST_OF,
            f"`best_of` must be > 0 and <= {MAX_BEST_OF}. Given: {given.best_of}",
        ),
    ]
    for is_fault, message in faults:
        if is_fault:
            raise invalid(message)
    return num_prompt


def _below(value: float | None, bound: float) -> bool:
    return value is not None and value <= bound


# ---------------------------------------------------------------------------------------------------------- generation


def tokenize(text: str) -> list[dict[str, Any]]:
    """Words with the space before them, behind a beginning-of-sequence token."""
    words = [(found.group(), *found.span()) for found in re.finditer(r" ?\w+|\W", text)]
    return [
        {"id": 1, "text": "", "start": 0, "stop": 0},
        *({"id": token_id(word), "text": word, "start": start, "stop": stop} for word, start, stop in words),
    ]


def token_id(text: str) -> int:
    return 3 + zlib.crc32(text.encode()) % 32_000


def words_of(request: Generate, attempt: int) -> Iterator[str]:
    """What the model would say, up to its own end. Without a seed, `attempt` stands for chance."""
    given = request.parameters
    if given.grammar is not None:
        yield from re.findall(r'"[,:}]+| ?\w+|\W', json.dumps(instance_of(given.grammar.value)))
        return
    is_greedy = not given.do_sample and given.temperature is None
    draw = "greedy" if is_greedy else f"{attempt if given.seed is None else given.seed}"
    for step in range(NUM_WORDS):
        word = WORDS[zlib.crc32(f"{draw}/{step}/{request.inputs}".encode()) % len(WORDS)]
        yield f" {word}" if step else word


def instance_of(schema: dict[str, Any]) -> Any:
    """The smallest value that a JSON schema takes, as far as the tests need one."""
    if "const" in schema:
        return schema["const"]
    if "properties" in schema:
        return {name: instance_of(each) for name, each in schema["properties"].items()}
    return {"integer": 7, "number": 0.5, "boolean": True, "array": []}.get(schema.get("type", "string"), "alpha")


@dataclass
class Token:
    text: str
    number: int
    special: bool = False

    def as_json(self) -> dict[str, Any]:
        number = 2 if self.special else token_id(self.text)
        return {"id": number, "text": self.text, "logprob": -0.125 * self.number, "special": self.special}


@dataclass
class Generation:
    """One answer, and where it ends."""

    request: Generate
    num_prompt: int
    attempt: int = 0
    tokens: list[Token] = field(default_factory=list)
    finish_reason: str = ""

    def __iter__(self) -> Iterator[Token]:
        given = self.request.parameters
        limit = MAX_TOTAL - self.num_prompt if given.max_new_tokens is None else given.max_new_tokens
        for text in itertools.chain(words_of(self.request, self.attempt), [EOS]):
            self.tokens.append(Token(text, len(self.tokens) + 1, special=text == EOS))
            if len(self.tokens) >= limit:
                self.finish_reason = "length"
            elif text == EOS:
                self.finish_reason = "eos_token"
            elif any(self.text.endswith(stop) for stop in given.stop):
                self.finish_reason = "stop_sequence"
            yield self.tokens[-1]
            if self.finish_reason:
                return

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens if not token.special)

    @property
    def full_text(self) -> str:
        return (self.request.inputs if self.request.parameters.return_full_text else "") + self.text

    @property
    def openai_reason(self) -> str:
        return "stop" if self.finish_reason == "eos_token" else self.finish_reason

    @property
    def usage(self) -> dict[str, int]:
        num = len(self.tokens)
        return {"prompt_tokens": self.num_prompt, "completion_tokens": num, "total_tokens": self.num_prompt + num}

    def top_tokens(self, token: Token) -> list[dict[str, Any]]:
        wanted = self.request.parameters.top_n_tokens or 0
        return [Token(f"{token.text}{number}", token.number + number).as_json() for number in range(wanted)]

    def event(self, token: Token) -> dict[str, Any]:
        """One event of TGI's own stream."""
        is_last = bool(self.finish_reason)
        end = {**self.end(), "input_length": self.num_prompt} if self.request.parameters.details and is_last else None
        top = self.top_tokens(token)
        return {
            "index": token.number,
            "token": token.as_json(),
            **({"top_tokens": top} if top else {}),
            "generated_text": self.full_text if is_last else None,
            "details": end,
        }

    def end(self) -> dict[str, Any]:
        seed = self.request.parameters.seed if self.request.parameters.do_sample else None
        return {"finish_reason": self.finish_reason, "generated_tokens": len(self.tokens), "seed": seed}

    def details(self) -> dict[str, Any]:
        prompt = tokenize(self.request.inputs) if self.request.parameters.decoder_input_details else []
        prefill = [{"id": each["id"], "text": each["text"], "logprob": -1.0 if n else None}
                   for n, each in enumerate(prompt)]  # fmt: skip
        top = [self.top_tokens(token) for token in self.tokens] if self.request.parameters.top_n_tokens else []
        more = {"top_tokens": top} if top else {}
        return {**self.end(), "prefill": prefill, "tokens": [token.as_json() for token in self.tokens], **more}

    def logprobs(self, token: Token) -> dict[str, Any]:
        """OpenAI's shape, without the `bytes` that TGI leaves out."""
        top = [{"token": each["text"], "logprob": each["logprob"]} for each in self.top_tokens(token)]
        own = token.as_json()
        return {"content": [{"token": own["text"], "logprob": own["logprob"], "top_logprobs": top}]}


# ------------------------------------------------------------------------------------------------------ OpenAI's words


def from_chat(chat: Chat) -> tuple[Generate, str]:
    """The generation that a chat asks for, and the name of the function it will call, if any."""
    if chat.response_format is not None and chat.tools:
        raise InferError("tool_error", "Tool error: Grammar and tools are mutually exclusive")
    inputs = templated(chat.messages)
    called = _called(chat) if chat.tools else None
    grammar = _grammar(chat.response_format)
    if called is not None:
        function = next(each["function"] for each in chat.tools or [] if each["function"]["name"] == called)
        properties = (function.get("parameters") or {}).get("properties", {})
        own = {"function": {"properties": {"_name": {"const": called}, **properties}}}
        grammar = Grammar("json", {"properties": own})
    given = Parameters(
        temperature=chat.temperature or None, do_sample=chat.temperature != 0, top_p=chat.top_p, seed=chat.seed,
        frequency_penalty=chat.frequency_penalty, max_new_tokens=chat.max_tokens, stop=chat.stop or [], details=True,
        repetition_penalty=None if chat.presence_penalty is None else chat.presence_penalty + 2.0,
        top_n_tokens=chat.top_logprobs, decoder_input_details=not chat.stream, grammar=grammar,
        adapter_id=None if chat.model in (None, "tgi", "dummy") else chat.model,
    )  # fmt: skip
    return Generate(inputs, given), called or ""


def _grammar(wanted: dict[str, Any] | None) -> Grammar | None:
    if wanted is None:
        return None
    if wanted["type"] == "json_schema":
        return Grammar("json", wanted["json_schema"]["schema"])
    return Grammar("json", wanted["value"])


def _called(chat: Chat) -> str | None:
    """`auto` calls the first function whose name was mentioned; anything else but `none` calls one in any case."""
    names = [tool["function"]["name"] for tool in chat.tools or []]
    if chat.tool_choice == "none":
        return None
    if chat.tool_choice == "auto":
        asked = str(chat.messages[-1].get("content"))
        return next((name for name in names if name in asked), None)
    if isinstance(chat.tool_choice, dict):
        return str(chat.tool_choice["function"]["name"])
    return names[0]


def templated(messages: list[dict[str, Any]]) -> str:
    """The prompt of a chat; the tokenizer will put the beginning-of-sequence token in front."""
    turns = [{**each, "content": each.get("content") or ""} for each in messages]
    return Template(TEMPLATE).render(messages=turns, bos_token="", add_generation_prompt=True)


def arguments_of(text: str) -> dict[str, Any]:
    return {name: value for name, value in json.loads(text)["function"].items() if name != "_name"}


# -------------------------------------------------------------------------------------------------------------- server


@dataclass
class TGITwin:
    """The dials are public, and may be turned while it runs."""

    api_key: str = ""
    max_concurrent_requests: int = 128
    token_s: float = 0.0  # between two tokens
    ping_s: float = 15.0
    fails_after: int | None = None  # tokens of each generation
    is_healthy: bool = True
    requests: list[tuple[str, Any]] = field(default_factory=list)  # path, and body as decoded
    headers: list[dict[str, str]] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    num_running: int = 0
    num_done: int = 0

    async def __aenter__(self) -> TGITwin:
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_post("/", self._route(Generate, self._compatible))
        app.router.add_post("/generate", self._route(Generate, self._generate))
        app.router.add_post("/generate_stream", self._route(Generate, self._generate_stream))
        app.router.add_post("/v1/chat/completions", self._route(Chat, self._chat))
        app.router.add_post("/v1/completions", self._route(Completion, self._completion))
        app.router.add_post("/tokenize", self._route(Generate, self._tokenize))
        app.router.add_post("/chat_tokenize", self._route(Chat, self._chat_tokenize))
        for path, answer in (("/info", self._info), ("/health", self._health), ("/ping", self._health),
                             ("/metrics", self._metrics), ("/v1/models", self._models)):  # fmt: skip
            app.router.add_get(path, answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    @property
    def bodies(self) -> list[Any]:
        return [body for _, body in self.requests]

    def _route(self, kind: type[Any], answer: Callable[..., Any]) -> Callable[[web.Request], Any]:
        """Decode, ask, and turn faults into what TGI answers before a stream has begun."""

        async def handle(request: web.Request) -> web.StreamResponse:
            if self.api_key and request.headers.get("Authorization") != f"Bearer {self.api_key}":
                return web.Response(status=401)
            self.headers.append(dict(request.headers))
            try:
                data = await request.read()
            except web.HTTPRequestEntityTooLarge:
                return web.Response(status=413, text="Failed to buffer the request body: length limit exceeded")
            if request.content_type != "application/json":
                return web.Response(status=415, text="Expected request with `Content-Type: application/json`")
            try:
                body = msgspec.json.decode(data, type=kind)
            except msgspec.ValidationError as error:
                what = f"Failed to deserialize the JSON body into the target type: {error}"
                return web.Response(status=422, text=what)
            except msgspec.DecodeError as error:
                return web.Response(status=400, text=f"Failed to parse the request body as JSON: {error}")
            self.requests.append((request.path, msgspec.json.decode(data)))
            try:
                answered: web.StreamResponse = await answer(request, body)
            except InferError as error:
                self.failures[error.error_type] += 1
                return web.json_response(error.body, status=STATUS[error.error_type])
            return answered

        return handle

    # ------------------------------------------------------------------------------------------------- generation

    async def _tokens(self, generation: Generation) -> AsyncIterator[Token]:
        """The tokens as they are made. One of `max_concurrent_requests` permits is held meanwhile."""
        if self.num_running >= self.max_concurrent_requests:
            raise InferError("overloaded", "Model is overloaded")
        generation.num_prompt = validated(generation.request)
        self.num_running += 1
        try:
            for token in generation:
                if self.fails_after is not None and token.number > self.fails_after:
                    raise InferError("generation", "Request failed during generation: CUDA out of memory")
                await asyncio.sleep(self.token_s)
                yield token
            self.num_done += 1
        finally:
            self.num_running -= 1

    async def _whole(self, request: Generate, attempt: int = 0) -> Generation:
        generation = Generation(request, 0, attempt)
        async for _ in self._tokens(generation):
            pass
        return generation

    async def _compatible(self, request: web.Request, body: Generate) -> web.StreamResponse:
        if body.stream:
            return await self._generate_stream(request, body)
        answer = await self._answer(body)
        return web.json_response([answer[0]], headers=answer[1])

    async def _generate(self, _: web.Request, body: Generate) -> web.StreamResponse:
        answer, headers = await self._answer(body)
        return web.json_response(answer, headers=headers)

    async def _answer(self, body: Generate) -> tuple[dict[str, Any], dict[str, str]]:
        begun = time.perf_counter()
        given = body.parameters
        validated(body)  # `best_of` too, before anything runs
        best, *others = [await self._whole(body, attempt) for attempt in range(given.best_of or 1)]
        answer: dict[str, Any] = {"generated_text": best.full_text}
        if given.details or given.decoder_input_details:
            rest = [{"generated_text": each.full_text, **each.details()} for each in others]
            answer["details"] = {**best.details(), **({"best_of_sequences": rest} if rest else {})}
        return answer, timings(best, begun)

    async def _generate_stream(self, request: web.Request, body: Generate) -> web.StreamResponse:
        generation = Generation(body, 0)

        async def events() -> AsyncIterator[dict[str, Any]]:
            if (body.parameters.best_of or 1) != 1:
                raise invalid("`best_of` != 1 is not supported when streaming tokens")
            if body.parameters.decoder_input_details:
                raise invalid("`decoder_input_details` == true is not supported when streaming tokens")
            async for token in self._tokens(generation):
                yield generation.event(token)

        return await self._stream(request, events(), body.inputs, lambda error: error.body, done=False)

    async def _chat(self, request: web.Request, body: Chat) -> web.StreamResponse:
        wanted, called = from_chat(body)
        begun = time.perf_counter()
        if body.stream:
            return await self._stream(request, self._chat_events(body, wanted, called), wanted.inputs, openai_error)
        generation = await self._whole(wanted)
        message: dict[str, Any] = {"role": "assistant", "content": generation.text}
        if called:
            arguments = json.dumps(arguments_of(generation.text), separators=(",", ":"))
            function = {"description": None, "name": called, "arguments": arguments}
            message = {"role": "assistant", "tool_calls": [{"id": "0", "type": "function", "function": function}]}
        logprobs = None
        if body.logprobs:
            each = [generation.logprobs(token)["content"][0] for token in generation.tokens]
            logprobs = {"content": each}
        choice = {"index": 0, "message": message, "logprobs": logprobs, "finish_reason": generation.openai_reason}
        whole = {**head("chat.completion"), "choices": [choice], "usage": generation.usage}
        return web.json_response(whole, headers=timings(generation, begun))

    async def _chat_events(self, body: Chat, wanted: Generate, called: str) -> AsyncIterator[dict[str, Any]]:
        generation = Generation(wanted, 0)
        deltas = ToolDeltas(called) if called else None
        async for token in self._tokens(generation):
            delta: dict[str, Any] | None = {"role": "assistant", "content": "" if token.special else token.text}
            if deltas is not None:
                delta = deltas.after(token)
            reason = generation.openai_reason or None
            if delta is not None:
                logprobs = generation.logprobs(token) if body.logprobs else None
                choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
                yield {**head("chat.completion.chunk"), "choices": [choice], "usage": None}
        if body.stream_options is not None and body.stream_options.include_usage:
            yield {**head("chat.completion.chunk"), "choices": [], "usage": generation.usage}

    async def _completion(self, request: web.Request, body: Completion) -> web.StreamResponse:
        if body.suffix is not None:
            error = {"error": "Suffix is not supported and can be achieved by preprocessing the prompt.",
                     "error_type": "suffix not supported"}  # fmt: skip
            return web.json_response(error, status=422)
        prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        given = Parameters(
            temperature=body.temperature or None, do_sample=body.temperature != 0, top_p=body.top_p, seed=body.seed,
            repetition_penalty=body.repetition_penalty, frequency_penalty=body.frequency_penalty, details=True,
            max_new_tokens=100 if body.max_tokens is None else body.max_tokens, stop=body.stop or [],
        )  # fmt: skip
        if body.stream:
            events = self._completion_events([Generate(prompt, given) for prompt in prompts])
            return await self._stream(request, events, "".join(prompts), openai_error)
        begun = time.perf_counter()
        answers = [await self._whole(Generate(prompt, given)) for prompt in prompts]
        choices = [text_choice(index, each.text, each.openai_reason) for index, each in enumerate(answers)]
        usage = {name: sum(each.usage[name] for each in answers) for name in answers[0].usage}
        whole = {**head("text_completion"), "choices": choices, "usage": usage}
        return web.json_response(whole, headers=timings(answers[0], begun))

    async def _completion_events(self, prompts: list[Generate]) -> AsyncIterator[dict[str, Any]]:
        for index, prompt in enumerate(prompts):
            generation = Generation(prompt, 0)
            async for token in self._tokens(generation):
                reason = generation.finish_reason  # its own words here, unlike in chats
                usage = generation.usage if reason else None
                yield {**head("text_completion"), "choices": [text_choice(index, token.text, reason)], "usage": usage}

    async def _stream(
        self,
        request: web.Request,
        events: AsyncIterator[dict[str, Any]],
        prompt: str,
        as_event: Callable[[InferError], dict[str, Any]],
        *,
        done: bool = True,
    ) -> web.StreamResponse:
        headers = {"x-compute-type": "cpu", "x-compute-characters": str(len(prompt)), "X-Accel-Buffering": "no"}
        response = web.StreamResponse(headers={"Cache-Control": "no-cache", **headers})
        response.content_type = "text/event-stream"
        await response.prepare(request)
        ping = asyncio.create_task(self._ping(response))
        try:
            await self._write_events(response, events, as_event)
            if done:
                await response.write(b"data: [DONE]\n\n")
        except ConnectionResetError:
            self.failures["dropped"] += 1
        finally:
            ping.cancel()
        return response

    async def _write_events(
        self,
        response: web.StreamResponse,
        events: AsyncIterator[dict[str, Any]],
        as_event: Callable[[InferError], dict[str, Any]],
    ) -> None:
        try:
            async for event in events:
                await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        except InferError as error:
            self.failures[error.error_type] += 1
            await response.write(b"data: " + json.dumps(as_event(error)).encode() + b"\n\n")
        finally:
            await events.aclose()  # type: ignore[attr-defined]

    async def _ping(self, response: web.StreamResponse) -> None:
        while True:
            await asyncio.sleep(self.ping_s)
            await response.write(b":\n\n")

    # -------------------------------------------------------------------------------------------------- questions

    async def _tokenize(self, _: web.Request, body: Generate) -> web.StreamResponse:
        return web.json_response(tokenize(body.inputs))

    async def _chat_tokenize(self, _: web.Request, body: Chat) -> web.StreamResponse:
        text = from_chat(body)[0].inputs
        return web.json_response({"tokenize_response": tokenize(text), "templated_text": text})

    async def _info(self, _: web.Request) -> web.StreamResponse:
        return web.json_response(
            {
                "model_id": MODEL_ID, "model_sha": None, "model_pipeline_tag": "text-generation",
                "max_concurrent_requests": self.max_concurrent_requests, "max_best_of": MAX_BEST_OF,
                "max_stop_sequences": MAX_STOPS, "max_input_tokens": MAX_INPUT, "max_total_tokens": MAX_TOTAL,
                "validation_workers": 2, "max_client_batch_size": 4, "router": "text-generation-router",
                "version": VERSION, "sha": None, "docker_label": None,
            }
        )  # fmt: skip

    async def _models(self, _: web.Request) -> web.StreamResponse:
        model = {"id": MODEL_ID, "object": "model", "created": 0, "owned_by": MODEL_ID}
        return web.json_response({"object": "list", "data": [model]})

    async def _health(self, _: web.Request) -> web.StreamResponse:
        if self.is_healthy:
            return web.Response()
        return web.json_response({"error": "unhealthy", "error_type": "healthcheck"}, status=503)

    async def _metrics(self, _: web.Request) -> web.StreamResponse:
        failed = "".join(f'tgi_request_failure{{err="{word}"}} {n}\n' for word, n in sorted(self.failures.items()))
        text = (
            f"tgi_batch_current_size {self.num_running}\ntgi_queue_size 0\ntgi_request_success {self.num_done}\n"
            f"tgi_batch_current_max_tokens {self.num_running * 256}\ntgi_batch_max_total_tokens 4096\n{failed}"
        )
        return web.Response(text=text)


@dataclass
class ToolDeltas:
    """A tool call as 3.3.7 streams it (chat.rs): nothing until the name is known, then the name in one delta alone, the
    arguments without the outer brace, and no finish reason, because the last token falls behind the call.
    """

    name: str
    _text: str = ""
    _is_open: bool = False

    def after(self, token: Token) -> dict[str, Any] | None:
        self._text += token.text
        if not self._is_open:
            self._is_open = _is_json(self._text.rstrip(" ,}") + "}}")
            return self._delta("{", self.name) if self._is_open else None
        if token.special:
            return {"role": "assistant", "content": ""}
        if not _is_json(self._text):
            return self._delta(token.text, None)
        self._is_open = False
        return self._delta(token.text.removesuffix("}"), None)

    def _delta(self, arguments: str, name: str | None) -> dict[str, Any]:
        function = {"name": name, "arguments": arguments}
        call = {"index": 0, "id": "0", "type": "function", "function": function}
        return {"role": "assistant", "tool_calls": [call]}


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return "_name" in text


def head(kind: str) -> dict[str, Any]:
    return {
        "object": kind, "id": "", "created": 1_790_000_000, "model": MODEL_ID,
        "system_fingerprint": f"{VERSION}-native",
    }  # fmt: skip


def text_choice(index: int, text: str, reason: str) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}


def openai_error(error: InferError) -> dict[str, Any]:
    """On OpenAI's routes an error in a stream says 422, whatever it is."""
    return {"error": {"message": str(error), "http_status_code": 422}}


def timings(generation: Generation, begun: float) -> dict[str, str]:
    elapsed_s = time.perf_counter() - begun
    whole_ms = str(int(elapsed_s * 1000))
    return {
        "x-compute-type": "cpu", "x-compute-time": str(elapsed_s), "x-total-time": whole_ms,
        "x-compute-characters": str(len(generation.request.inputs)), "x-validation-time": "0", "x-queue-time": "0",
        "x-inference-time": whole_ms, "x-time-per-token": "0", "x-prompt-tokens": str(generation.num_prompt),
        "x-generated-tokens": str(len(generation.tokens)),
    }  # fmt: skip
