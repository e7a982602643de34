"""OpenAI's wire, seen from the client, without I/O: a request to a body, and a stream's bytes to chunks.

    body = request_body(request, dialect, model="served-name")
    reader = StreamReader("vllm", request, dialect)
    for data in reads:
        for chunk in reader.feed(data): ...     # may be lazy, so read it to its end
    last = reader.finish()                      # the usage; raises where the stream ended too early

`Dialect` is what differs between engines that speak it. Rules that hold for every one of them:
- Only fields of the engine's allow-list are sent, and those that were not asked for stay absent.
- A stream ends well with a finish reason for every choice; `[DONE]` is not needed (several engines leave it out).
- Role-only deltas, comments, pings, empty `choices` and unknown keys say nothing.
- Usage may come at the end, on every chunk, as null, or not at all.
- Tool calls leave in OpenAI's form (adapters/tools/tool_deltas.py), and after one a choice that stopped by itself says
  `tool_calls`, or `stop` where the caller had named the function, as OpenAI does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta, Raw, Struct

from adapters.base import is_default
from adapters.errors import EngineProtocolError, InvalidRequest, StreamInterrupted
from adapters.tools.tool_deltas import ToolDeltas
from adapters.types import (
    ChatRequest,
    Chunk,
    FinishReason,
    GenerateRequest,
    Message,
    Progress,
    Route,
    Usage,
    route_of,
    set_fields,
)
from adapters.wire.sse import Event, EventSplitter
from adapters.wire.text_event import TextEvent, shape_of
from adapters.wire.vocabulary import as_completion_logprobs, as_finish_reason, max_pieces
from adapters.wire.wire_errors import stream_error

_NOTHING = Raw(b"")
CHARS_A_TOKEN = 4  # about, where nobody counts
MAX_SHAPES = 4  # of events, that are learnt one after the other in a stream that never uses one


class Dialect(Struct, frozen=True, kw_only=True):
    """How one engine's OpenAI differs from OpenAI's."""

    parameters: frozenset[str]  # our names of the fields that it honours
    chat_limit: str = "max_tokens"  # what it calls the wanted number of output tokens
    renames: Mapping[str, str] = {}
    defaults: Mapping[str, object] = {}  # sent where the caller did not choose, keyed by the engine's names
    conversions: Mapping[str, Callable[[Any], object]] = {}  # of values, keyed by our names
    completion_logprobs_look_like_chat: bool = False
    counts_each_choice: bool = False  # a usage for each choice, where others send one for all
    tool_names_grow: bool = False  # the name of a tool call is whole only when its arguments begin
    usage_so_far: bool = False  # has vLLM's `continuous_usage_stats`
    thought_field: str = ""  # what it calls the thoughts of earlier answers; empty: they are left out
    cache_salt: frozenset[Route] = frozenset()  # where it takes one, under this name
    leaves_out_tool_reason: bool = False  # a stream that calls a tool may end with the account and no finish reason


# ---------------------------------------------------------------------------------------------------------- requests

_LIMITS = frozenset({"max_tokens", "max_completion_tokens"})
_OWN = frozenset({"model", "messages", "prompt", "stream", "stream_options"}) | _LIMITS
_TOOL_FIELDS = frozenset({"tools", "tool_choice", "parallel_tool_calls"})


def request_body(request: GenerateRequest, dialect: Dialect, model: str) -> dict[str, Any]:
    """The JSON body for `request`. It always asks for a stream with usage: an answer in one piece is a fold over it."""
    body: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    if request.wants_usage_so_far:
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    if isinstance(request, ChatRequest):
        body["messages"] = [_message(message, dialect.thought_field) for message in request.messages]
        limit_name = dialect.chat_limit
    else:
        body["prompt"] = request.prompt
        limit_name = dialect.renames.get("max_tokens", "max_tokens")
    if request.token_limit is not None:
        body[limit_name] = request.token_limit
    if request.salt is not None and route_of(request) in dialect.cache_salt:
        body["cache_salt"] = request.salt
    for field in _sendable(request) & dialect.parameters:
        value = getattr(request, field)
        convert = dialect.conversions.get(field)
        body[dialect.renames.get(field, field)] = convert(value) if convert else value
    return {**dialect.defaults, **body} if dialect.defaults else body


def _sendable(request: GenerateRequest) -> frozenset[str]:
    """Fields to send as they are. Without tools, the fields about tools ask for nothing, and vLLM refuses them."""
    fields = set_fields(request) - _OWN
    if not isinstance(request, ChatRequest):
        return fields
    if isinstance(request.tools, list) and request.tools:
        _check_are_functions(request.tools)
        return fields
    if "tool_choice" in fields and not is_default("tool_choice", request.tool_choice):
        raise InvalidRequest("tool_choice needs tools.", param="tool_choice")
    return fields - _TOOL_FIELDS


def _check_are_functions(tools: list[dict[str, Any]]) -> None:
    """OpenAI has tools of another type, `custom`, but no `Chunk` carries their calls."""
    if any(tool.get("type", "function") != "function" for tool in tools):
        raise InvalidRequest("Every tool must have the type 'function'.", param="tools")


def _message(message: Message, thought_field: str) -> dict[str, Any]:
    """One turn in the form that every engine reads: text is always a string, arguments of tool calls too."""
    turn: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": msgspec.to_builtins(message.content) if message.other_parts() else message.text(),
    }
    if thought_field and (thought := message.thought()):
        turn[thought_field] = thought
    if isinstance(message.name, str):
        turn["name"] = message.name
    if isinstance(message.tool_call_id, str):
        turn["tool_call_id"] = message.tool_call_id
    if isinstance(message.tool_calls, list) and message.tool_calls:
        turn["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    return turn


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    """A call of an earlier answer. Clients that keep the deltas of a stream send their `index` as well."""
    function = call.get("function")
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = msgspec.json.encode({} if arguments is None else arguments).decode()
    kept = {key: value for key, value in call.items() if key != "index"}
    return {"type": "function", **kept, "function": {**function, "arguments": arguments}}


# ----------------------------------------------------------------------------------------------------------- streams


class _Delta(Struct, gc=False):
    content: str | None = None
    reasoning: str | None = None  # vLLM's name
    reasoning_content: str | None = None  # the name in SGLang, TensorRT-LLM and llama.cpp
    tool_calls: Raw = _NOTHING


_NOTHING_NEW = _Delta()


class _Choice(Struct, gc=False):
    index: int = 0
    delta: _Delta | None = None
    message: _Delta | None = None  # in its place where the answer comes in one piece
    text: str | None = None
    logprobs: Raw = _NOTHING
    finish_reason: str | None = None
    stop_reason: Any = None  # vLLM: the stop string, or the id of a token
    matched_stop: Any = None  # the same in SGLang
    progress: Progress | None = None  # from another Goodgate, where `continuation` asks for it

    @property
    def stop_string(self) -> str | None:
        return next((told for told in (self.stop_reason, self.matched_stop) if isinstance(told, str)), None)


_TokenCount: TypeAlias = Annotated[int, Meta(ge=0, le=2**53)]


class _PromptDetails(Struct):
    cached_tokens: _TokenCount | None = None


class _CompletionDetails(Struct):
    reasoning_tokens: _TokenCount | None = None


class _Usage(Struct):
    prompt_tokens: _TokenCount | None = 0
    completion_tokens: _TokenCount | None = 0
    prompt_tokens_details: _PromptDetails | None = None
    completion_tokens_details: _CompletionDetails | None = None


class _Payload(Struct, gc=False):
    choices: list[_Choice] | None = None
    usage: Raw = _NOTHING
    error: Raw = _NOTHING
    object: str | None = None


_payloads = msgspec.json.Decoder(_Payload)


class StreamReader:
    """One stream. `is_done` turns true at `[DONE]`: nothing that follows is read."""

    is_cut = False  # it always reads to the engine's own end

    def __init__(
        self,
        engine: str,
        request: GenerateRequest,
        dialect: Dialect,
        *,
        on_unknown_reason: Callable[[], None] = lambda: None,
    ) -> None:
        self._engine = engine
        self._on_unknown_reason = on_unknown_reason
        self._splitter: EventSplitter | None = None  # an answer in one piece needs none
        self._num_choices = request.num_choices
        self._max_pieces = max_pieces(request)
        self._converts_logprobs = dialect.completion_logprobs_look_like_chat and not isinstance(request, ChatRequest)
        self._wants_usage_so_far = request.wants_usage_so_far
        self._counts_each_choice = dialect.counts_each_choice and self._num_choices > 1
        self._leaves_out_tool_reason = dialect.leaves_out_tool_reason
        self._reason_after_calls: FinishReason = "stop" if _names_a_function(request) else "tool_calls"
        call_ids: set[str] = set()
        names_grow = dialect.tool_names_grow
        self._calls = [ToolDeltas(call_ids, names_grow=names_grow) for _ in range(self._num_choices)]
        self._finished: set[int] = set()
        self._num_pieces = 0
        self._text_offsets = [0] * self._num_choices
        self._usage: _Usage | None = None
        self._shape: TextEvent | None = None
        self._shapes_left = MAX_SHAPES if self._num_choices == 1 else 0
        self.num_chunks = 0
        self.is_done = False

    def feed(self, data: bytes) -> Iterable[Chunk]:
        """Chunks that `data` completes, of several events lazily: an error that the engine reports comes after what
        preceded it.

        Raises that error, and `EngineProtocolError` for nonsense.
        """
        if self._splitter is None:
            self._splitter = EventSplitter(who=f"The engine {self._engine!r}")
        events = self._splitter.feed(data)
        return self._read_event(events[0]) if len(events) == 1 else self._read(events)

    def read_whole(self, body: bytes) -> list[Chunk]:
        """An answer in one piece, which some engines give whatever they are asked for: one event, and its end."""
        chunks = self._read_payload(Event(body))
        if not chunks:
            raise EngineProtocolError(f"The engine {self._engine!r} answered JSON that is no answer.")
        if self._usage is None:  # it has no pieces to count
            self._num_pieces = sum(len(chunk.text) + len(chunk.reasoning) for chunk in chunks) // CHARS_A_TOKEN + 1
        return [*chunks, *self.finish()]

    def finish(self) -> list[Chunk]:
        """The stream is over: what was left in it, and the usage. Raises `StreamInterrupted` if it ended too early."""
        rest = [] if self._splitter is None else list(self._read(self._splitter.close()))
        if self._leaves_out_tool_reason and self._usage is not None:  # the account comes with the last token only
            rest.extend(self._untold_ends())
        if len(self._finished) < self._num_choices:
            raise StreamInterrupted(f"The stream of the engine {self._engine!r} ended before its finish reason.")
        return [*rest, Chunk(usage=self.account())]

    def _untold_ends(self) -> list[Chunk]:
        """The ends of choices that called a tool, or reached their limit before the call's name was whole."""
        open_choices = [index for index in range(self._num_choices) if index not in self._finished]
        self._finished.update(open_choices)
        return [
            Chunk(index=index, finish_reason=self._reason_after_calls if self._calls[index].has_called else "length")
            for index in open_choices
        ]

    def _read(self, events: list[Event]) -> Iterator[Chunk]:
        for event in events:
            yield from self._read_event(event)

    def _read_event(self, event: Event) -> Sequence[Chunk]:
        data = event.data
        if self.is_done or not data or data[0] == 58:  # some proxies send comments as data: ": keepalive"
            return ()
        if self._shape is not None and (text := self._shape.text_of(data)) and not event.event and not self._finished:
            self._shapes_left = MAX_SHAPES
            self._count(0, text, is_piece=True)
            return (Chunk(text=text),)
        if data.startswith(b"[DONE]"):
            self.is_done = True
            return ()
        return () if event.event == "ping" else self._read_payload(event)

    def _not_openai(self) -> EngineProtocolError:
        return EngineProtocolError(f"The engine {self._engine!r} sent a stream event that is not OpenAI's.")

    def _read_payload(self, event: Event) -> list[Chunk]:
        try:
            payload = _payloads.decode(event.data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise self._not_openai() from error
        if _holds_something(payload.error) or payload.object == "error" or event.event == "error":
            raise stream_error(self._engine, event.data, has_begun=self.num_chunks > 0)
        usage = _usage_of(payload.usage)
        if usage is not None:
            self._usage = self._plus(usage) if self._counts_each_choice else usage
        elif self._shapes_left and _only_text(payload):
            self._shapes_left -= 1
            self._shape = shape_of(event.data, _read_text)
        chunks = (self._read_choice(choice) for choice in payload.choices or ())
        told = [chunk for chunk in chunks if chunk is not None]
        if usage is None or not self._wants_usage_so_far:
            return told
        return [msgspec.structs.replace(chunk, usage_so_far=self.account()) for chunk in told]

    def _plus(self, usage: _Usage) -> _Usage:
        """The account so far and that of one more choice. The prompt is the same one, and counts once."""
        if self._usage is None:
            return usage
        total = (self._usage.completion_tokens or 0) + (usage.completion_tokens or 0)
        return msgspec.structs.replace(self._usage, completion_tokens=total)

    def _read_choice(self, choice: _Choice) -> Chunk | None:
        index = choice.index
        if not 0 <= index < self._num_choices:
            raise EngineProtocolError(f"The engine {self._engine!r} answered a choice that was not asked for.")
        delta = choice.delta or choice.message or _NOTHING_NEW
        text = delta.content or choice.text or ""
        reasoning = delta.reasoning or delta.reasoning_content or ""
        reason = as_finish_reason(self._engine, choice.finish_reason, self._on_unknown_reason)
        tool_calls = None
        if reason is not None or _holds_something(delta.tool_calls):
            tool_calls = self._tool_calls(self._calls[index], delta.tool_calls, is_last=reason is not None)
        if reason in ("stop", "tool_calls") and self._calls[index].has_called:
            reason = self._reason_after_calls
        says_nothing = not text and not reasoning and tool_calls is None and reason is None
        if says_nothing or index in self._finished:
            return None
        logprobs = self._logprobs(choice.logprobs, index)
        self._count(index, text, is_piece=bool(text or reasoning or tool_calls))
        if reason is not None:
            self._finished.add(index)
        return Chunk(
            index=index,
            text=text,
            reasoning=reasoning,
            tool_calls=tool_calls,
            logprobs=logprobs,
            finish_reason=reason,
            stop_string=choice.stop_string if reason is not None else None,
            progress=choice.progress,
        )

    def _count(self, index: int, text: str, *, is_piece: bool) -> None:
        self._text_offsets[index] += len(text)
        self._num_pieces += is_piece
        self.num_chunks += 1
        if self._max_pieces is not None and self._num_pieces > self._max_pieces:
            raise EngineProtocolError(f"The engine {self._engine!r} goes on far beyond the limit that was asked for.")

    def _tool_calls(self, calls: ToolDeltas, raw: Raw, *, is_last: bool) -> Raw | None:
        try:
            told = calls.read(raw) if _holds_something(raw) else None
            waiting = calls.finish() if is_last else None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise self._not_openai() from error
        return _joined(told, waiting)

    def _logprobs(self, logprobs: Raw, index: int) -> Raw | None:
        if not _holds_something(logprobs):
            return None
        if not self._converts_logprobs:
            return _on_one_line(logprobs)
        try:
            return as_completion_logprobs(logprobs, self._text_offsets[index])
        except msgspec.DecodeError as error:
            raise self._not_openai() from error

    def account(self) -> Usage:
        """The engine's own count; without one, the pieces of text, which are one token each in every engine we know."""
        if self._usage is None:
            return Usage(0, self._num_pieces)
        of_prompt, of_completion = self._usage.prompt_tokens_details, self._usage.completion_tokens_details
        return Usage(
            self._usage.prompt_tokens or 0,
            self._usage.completion_tokens or 0,
            cached_tokens=of_prompt.cached_tokens if of_prompt else None,
            reasoning_tokens=of_completion.reasoning_tokens if of_completion else None,
        )


def _only_text(payload: _Payload) -> str | None:
    """The text of an event of the only choice that brings nothing else."""
    if not payload.choices or len(payload.choices) > 1:
        return None
    choice = payload.choices[0]
    delta = choice.delta or _NOTHING_NEW
    says_more = (
        choice.index
        or choice.message
        or choice.progress
        or choice.finish_reason is not None
        or delta.reasoning
        or delta.reasoning_content
        or any(map(_holds_something, (choice.logprobs, delta.tool_calls, payload.usage, payload.error)))
    )
    return None if says_more else delta.content or choice.text


def _read_text(data: bytes) -> str | None:
    return _only_text(_payloads.decode(data))


def _names_a_function(request: GenerateRequest) -> bool:
    return isinstance(request, ChatRequest) and isinstance(request.tool_choice, dict)


def _joined(first: Raw | None, second: Raw | None) -> Raw | None:
    """Two lists as one."""
    if first is None or second is None:
        return first or second
    return Raw(bytes(first)[:-1] + b"," + bytes(second)[1:])


def _holds_something(raw: Raw) -> bool:
    return raw is not _NOTHING and bytes(raw) not in (b"", b"null", b"[]")


def _usage_of(raw: Raw) -> _Usage | None:
    """The account that an event gives. One that cannot be true counts as none: it must not spoil a whole answer."""
    if not _holds_something(raw):
        return None
    try:
        return msgspec.json.decode(raw, type=_Usage)
    except msgspec.DecodeError:
        return None


def _on_one_line(raw: Raw) -> Raw:
    """JSON that is passed on as it came, for an event of ours: a line end in it would end the event."""
    return Raw(msgspec.json.format(bytes(raw), indent=-1)) if b"\n" in bytes(raw) else raw
