"""The one vocabulary on both sides of the adapter seam: OpenAI-shaped requests in, `Chunk`s out.

A request holds exactly one prompt (the gateway fans out lists of prompts) and asks for `n` choices of it. A field that
was not sent is `UNSET`; null is taken for every optional field and means the same, because clients that dump their
own objects send it. `set_fields` names what was asked, and only that is forwarded.

>>> request = decode_chat(b'{"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}')
>>> set_fields(request)
frozenset({'max_tokens', 'messages', 'model'})

Source of the shapes: the OpenAI API reference (chat, completions) and, for the sampling fields beyond it, vLLM's
protocol.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from adapters.errors import InvalidRequest
from adapters.schemas import MAX_REASON, check_calls, check_choice, check_format, check_tools

T = TypeVar("T")
R = TypeVar("R", bound="GenerationFields")


Role: TypeAlias = Literal["system", "developer", "user", "assistant", "tool"]
FinishReason: TypeAlias = Literal["stop", "length", "tool_calls", "content_filter"]

Probability: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
Penalty: TypeAlias = Annotated[float, Meta(ge=-2, le=2)]
Bias: TypeAlias = Annotated[float, Meta(ge=-100, le=100)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Positive: TypeAlias = Annotated[int, Meta(ge=1, le=2**31 - 1)]
TokenId: TypeAlias = Annotated[str, Meta(pattern=r"\A[0-9]{1,10}\Z")]  # as a key of an object
Label: TypeAlias = Annotated[str, Meta(max_length=4096)]  # what says nothing about the answer
Metadata: TypeAlias = Annotated[  # OpenAI's bounds
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]
BadWord: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256)]
StopString: TypeAlias = Annotated[str, Meta(min_length=1, max_length=1024)]
Text: TypeAlias = Annotated[str, Meta(max_length=16 << 20)]


Route: TypeAlias = Literal["chat", "completions"]

SALT_HEADER = "X-Goodgate-Cache-Salt"  # from one gateway to the next


class CacheSalt(str):
    """What keeps a tenant's prompts apart in an engine's prefix cache. Nothing in JSON becomes one, so only the gateway
    can give a request its salt, and never a client."""

    __slots__ = ()


class Continuation(Struct, frozen=True, forbid_unknown_fields=True):
    """Of a generation that may have to be continued elsewhere, from one gateway to the next: tell with each piece the
    tokens that it is made of; and where there are `ids`, go on after these, which have given so many characters."""

    ids: list[Count] = []
    num_chars: Count = 0
    fingerprint: Annotated[str, Meta(max_length=128)] = ""


class Progress(Struct, frozen=True):
    """The tokens that have come since the piece before. The fingerprint is equal where the same prompt would give the
    same tokens: of the model, its numbers, the code, and the prompt's own tokens."""

    ids: list[int]
    fingerprint: str


class TextPart(Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    text: Text


class RefusalPart(Struct, tag_field="type", tag="refusal", forbid_unknown_fields=True):
    """What an earlier answer said instead of an answer: text like any other."""

    refusal: Text

    @property
    def text(self) -> str:
        return self.refusal


class ImageURL(Struct, forbid_unknown_fields=True):
    url: Text
    detail: Literal["auto", "low", "high"] | UnsetType = UNSET


class ImagePart(Struct, tag_field="type", tag="image_url", forbid_unknown_fields=True):
    image_url: ImageURL


class InputAudio(Struct, forbid_unknown_fields=True):
    data: Text
    format: Literal["wav", "mp3"]


class AudioPart(Struct, tag_field="type", tag="input_audio", forbid_unknown_fields=True):
    input_audio: InputAudio


PartKind: TypeAlias = Literal["image_url", "input_audio"]  # those that are no text
Part: TypeAlias = TextPart | RefusalPart | ImagePart | AudioPart


class Message(Struct, kw_only=True):
    """One turn. `content` is a string, a list of parts, or absent beside `tool_calls`. What the model thought on the
    way to an earlier answer comes back under either name that servers have for it.
    """

    role: Role
    content: Text | list[Part] | None = None
    name: str | UnsetType | None = UNSET
    tool_calls: list[dict[str, Any]] | UnsetType | None = UNSET
    tool_call_id: str | UnsetType | None = UNSET
    reasoning_content: Text | UnsetType | None = UNSET
    reasoning: Text | UnsetType | None = UNSET

    def __post_init__(self) -> None:
        if isinstance(self.tool_calls, list):
            check_calls(self.tool_calls)

    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content if isinstance(part, TextPart | RefusalPart))
        return self.content or ""

    def other_parts(self) -> Sequence[tuple[int, PartKind]]:
        """Places and kinds of the parts that are no text."""
        if not isinstance(self.content, list):
            return ()
        return [
            (place, "image_url" if isinstance(part, ImagePart) else "input_audio")
            for place, part in enumerate(self.content)
            if isinstance(part, ImagePart | AudioPart)
        ]

    def thought(self) -> str:
        """What led to the answer, if this is one."""
        told = (self.reasoning_content, self.reasoning) if self.role == "assistant" else ()
        return next((each for each in told if isinstance(each, str) and each), "")

    def for_template(self) -> dict[str, Any]:
        """The turn as a chat template reads it: the developer is the system, and arguments of tool calls are objects.

        What a template makes of names and tool calls is the model's affair; many leave them out.
        """
        turn: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": self.text()}
        for field in ("name", "tool_call_id"):
            if isinstance(value := getattr(self, field), str):
                turn[field] = value
        if thought := self.thought():
            turn["reasoning_content"] = thought  # its name in the templates that look for it, Qwen 3's among them
        if isinstance(self.tool_calls, list) and self.tool_calls:
            turn["tool_calls"] = [_with_decoded_arguments(call) for call in self.tool_calls]
        return turn


def _with_decoded_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = msgspec.json.decode(function["arguments"])
    except (msgspec.DecodeError, RecursionError):
        return call  # a model wrote it, and it need not be JSON
    return {**call, "function": {**function, "arguments": arguments}}


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool | None = False
    include_obfuscation: bool | None = False  # padding against eavesdroppers who measure events; never changes the text
    continuous_usage_stats: bool | None = False  # vLLM's: every event tells the usage so far

    def __post_init__(self) -> None:
        if self.continuous_usage_stats and not self.include_usage:
            raise ValueError("`continuous_usage_stats` needs `include_usage: true`")


class GenerationFields(Struct, kw_only=True, forbid_unknown_fields=True, dict=True):
    """What chat and completions have in common. Ranges are those of the OpenAI and vLLM references. A request is never
    changed, only copied."""

    model: Annotated[str, Meta(min_length=1, max_length=256)]
    max_tokens: Positive | UnsetType | None = UNSET
    min_tokens: Count | UnsetType | None = UNSET
    temperature: Annotated[float, Meta(ge=0, le=2)] | UnsetType | None = UNSET
    top_p: Annotated[float, Meta(gt=0, le=1)] | UnsetType | None = UNSET
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | UnsetType | None = UNSET
    min_p: Probability | UnsetType | None = UNSET
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | UnsetType | None = UNSET
    n: Annotated[int, Meta(ge=1, le=8)] | UnsetType | None = UNSET
    stop: StopString | Annotated[list[StopString], Meta(max_length=16)] | UnsetType | None = UNSET
    presence_penalty: Penalty | UnsetType | None = UNSET
    frequency_penalty: Penalty | UnsetType | None = UNSET
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | UnsetType | None = UNSET
    ignore_eos: bool | UnsetType | None = UNSET
    logit_bias: Annotated[dict[TokenId, Bias], Meta(max_length=4096)] | UnsetType | None = UNSET
    bad_words: Annotated[list[BadWord], Meta(max_length=128)] | UnsetType | None = UNSET
    stream: bool | UnsetType | None = UNSET
    stream_options: StreamOptions | UnsetType | None = UNSET
    user: Label | UnsetType | None = UNSET
    cache_salt: CacheSalt | UnsetType = UNSET
    continuation: Continuation | UnsetType = UNSET

    @cached_property
    def given(self) -> frozenset[str]:
        """What `set_fields` tells; several ask, and there are forty fields to look at."""
        values = zip(self.__struct_fields__, msgspec.structs.astuple(self), strict=True)
        return frozenset([field for field, value in values if value is not UNSET and value is not None])

    @property
    def salt(self) -> str | None:
        """Only requests with the same salt, or without any, may share cached prefixes."""
        return str(self.cache_salt) if isinstance(self.cache_salt, CacheSalt) else None

    @cached_property
    def num_choices(self) -> int:
        return self.n or 1 if isinstance(self.n, int) else 1

    @property
    def is_stream(self) -> bool:
        return self.stream is True

    @property
    def wants_usage(self) -> bool:
        return isinstance(self.stream_options, StreamOptions) and self.stream_options.include_usage is True

    @property
    def wants_usage_so_far(self) -> bool:
        return isinstance(self.stream_options, StreamOptions) and self.stream_options.continuous_usage_stats is True

    @property
    def stop_strings(self) -> list[str]:
        if isinstance(self.stop, str):
            return [self.stop]
        return list(self.stop) if isinstance(self.stop, list) else []


class ChatRequest(GenerationFields, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1, max_length=4096)]
    max_completion_tokens: Positive | UnsetType | None = UNSET
    logprobs: bool | UnsetType | None = UNSET
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | UnsetType | None = UNSET
    tools: Annotated[list[dict[str, Any]], Meta(max_length=1024)] | UnsetType | None = UNSET
    tool_choice: str | dict[str, Any] | UnsetType | None = UNSET
    parallel_tool_calls: bool | UnsetType | None = UNSET
    functions: list[dict[str, Any]] | UnsetType | None = UNSET
    function_call: str | dict[str, Any] | UnsetType | None = UNSET
    response_format: dict[str, Any] | UnsetType | None = UNSET
    modalities: list[str] | UnsetType | None = UNSET
    audio: dict[str, Any] | UnsetType | None = UNSET
    prediction: dict[str, Any] | UnsetType | None = UNSET
    web_search_options: dict[str, Any] | UnsetType | None = UNSET
    reasoning_effort: Label | UnsetType | None = UNSET
    metadata: Metadata | UnsetType | None = UNSET
    store: bool | UnsetType | None = UNSET
    service_tier: Label | UnsetType | None = UNSET
    prompt_cache_key: Label | UnsetType | None = UNSET
    prompt_cache_retention: Label | UnsetType | None = UNSET
    safety_identifier: Label | UnsetType | None = UNSET
    verbosity: Label | UnsetType | None = UNSET

    def __post_init__(self) -> None:
        tools = self.tools if isinstance(self.tools, list) else []
        if tools:
            check_tools(tools)
            if isinstance(self.tool_choice, str | dict):
                check_choice(self.tool_choice, tools)
        if isinstance(self.response_format, dict):
            check_format(self.response_format)

    @cached_property
    def token_limit(self) -> int | None:
        """The wanted number of output tokens; `max_completion_tokens` beats its old name."""
        for value in (self.max_completion_tokens, self.max_tokens):
            if isinstance(value, int):
                return value
        return None


class CompletionRequest(GenerationFields, kw_only=True):
    """`prompt` is one text or one list of token ids here; lists of prompts exist only at the gateway's door."""

    prompt: Text | list[Count]
    echo: bool | UnsetType | None = UNSET
    suffix: str | UnsetType | None = UNSET
    best_of: Annotated[int, Meta(ge=1, le=8)] | UnsetType | None = UNSET
    logprobs: Annotated[int, Meta(ge=0, le=5)] | UnsetType | None = UNSET

    @cached_property
    def token_limit(self) -> int | None:
        """The wanted number of output tokens; OpenAI's default for completions is 16."""
        return self.max_tokens if isinstance(self.max_tokens, int) else 16


GenerateRequest: TypeAlias = ChatRequest | CompletionRequest


def route_of(request: GenerateRequest) -> Route:
    return "chat" if isinstance(request, ChatRequest) else "completions"


class EmbeddingRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Texts, or lists of token ids, to turn into vectors; in how many dimensions, where the model lets one choose."""

    model: Annotated[str, Meta(min_length=1, max_length=256)]
    input: Annotated[list[Text | list[Count]], Meta(min_length=1, max_length=2048)]
    dimensions: Positive | UnsetType | None = UNSET
    user: Label | UnsetType | None = UNSET

    def __post_init__(self) -> None:
        if len({type(each) for each in self.input}) > 1:
            raise ValueError("`input` must hold texts or lists of token ids, not both")


class Embeddings(Struct, frozen=True):
    """One vector for each input, in the inputs' order."""

    vectors: list[list[float]]
    prompt_tokens: int


class TokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """What to tokenise: a text (`prompt`), or messages through the model's chat template. Exactly one of the two."""

    model: Annotated[str, Meta(min_length=1, max_length=256)]
    prompt: Text | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=4096)] | None = None
    add_special_tokens: bool = True  # those that the tokenizer puts around a text; a chat template writes its own
    tools: list[dict[str, Any]] | None = None  # rendered beside the messages

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("Give `prompt` or `messages`, one of the two")
        if self.tools is not None:
            check_tools(self.tools)

    def as_generation(self) -> GenerateRequest:
        """The generation whose prompt is asked for."""
        if self.messages is not None:
            return ChatRequest(model=self.model, messages=self.messages, tools=self.tools)
        return CompletionRequest(model=self.model, prompt=self.prompt or "")


class Tokens(Struct, frozen=True):
    ids: list[int]
    max_model_len: int | None = None


def one_or_several(given: str | list[int | str | list[int]], field: str, *, at_most: int) -> list[str | list[int]]:
    """What clients send as a text, a list of token ids, or a list of either, as a list of texts or of lists of ids.

    >>> one_or_several([5, 6], "prompt", at_most=2), one_or_several(["a", "b"], "prompt", at_most=2)
    ([[5, 6]], ['a', 'b'])
    """
    if isinstance(given, str):
        return [given]
    if all(isinstance(item, int) for item in given):
        return [[item for item in given if isinstance(item, int)]]
    if len(given) > at_most:
        raise InvalidRequest(f"One request may hold at most {at_most} texts or lists of ids.", param=field)
    texts = [item for item in given if isinstance(item, str)]
    token_lists = [item for item in given if isinstance(item, list)]
    if len(texts) == len(given):
        return list(texts)
    if len(token_lists) != len(given) or not all(token_lists):
        raise InvalidRequest(
            f"`{field}` must be a text, a list of token ids, or a list of either, with nothing mixed or empty.",
            param=field,
        )
    return list(token_lists)


# Fields that never change the text. They are accepted for every engine: clients send them out of habit, and the gateway
# its salt, which `Capabilities.cache_salt` says who keeps.
INFORMATIONAL = frozenset(
    [
        "model",
        "stream",
        "stream_options",
        "user",
        "cache_salt",
        "metadata",
        "store",
        "service_tier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "verbosity",
    ]
)


class Usage(Struct, frozen=True):
    """Tokens of one request, all choices together; the last two are parts of the first two, None where nobody told.

    `cached_tokens`: of the prompt, served from a prefix cache. `reasoning_tokens`: of the completion, thought.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class Chunk(Struct, frozen=True, kw_only=True, gc=False):
    """One event of a generation: a piece of one choice, or (with `usage`) the closing account of the request.

    The order an adapter keeps: any number of pieces per choice; exactly one piece per choice has a `finish_reason`, and
    it is that choice's last; one final chunk carries `usage` and nothing else. Choices may interleave.
    """

    index: int = 0
    text: str = ""
    reasoning: str = ""
    tool_calls: Raw | None = None  # OpenAI's list of tool-call deltas, as JSON
    logprobs: Raw | None = None  # the shape of the route that was called, as JSON
    finish_reason: FinishReason | None = None
    stop_string: str | None = None  # the one that ended the choice, where the engine tells which it was
    progress: Progress | None = None  # where `continuation` asks for it
    usage_so_far: Usage | None = None  # with this piece, where `continuous_usage_stats` asks for it
    usage: Usage | None = None


def set_fields(request: GenerateRequest) -> frozenset[str]:
    """Names of the fields sent with a value. An explicit null counts as not sent, as OpenAI treats it."""
    return request.given


def changed(request: R, **fields: Any) -> R:
    """A copy with these fields set. What it has been given is known: to look at forty fields again takes longer."""
    copy = msgspec.structs.replace(request, **fields)
    copy.__dict__["given"] = request.given | fields.keys()
    return copy


_decoders: dict[type, msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(kind) for kind in (ChatRequest, CompletionRequest)
}


def decode_chat(body: bytes) -> ChatRequest:
    """Decode and validate a chat body; `InvalidRequest` names the field at fault."""
    request: ChatRequest = _decode(ChatRequest, body)
    return request


def decode_completion(body: bytes) -> CompletionRequest:
    """Decode and validate a completion body that holds one prompt; `InvalidRequest` names the field at fault."""
    request: CompletionRequest = _decode(CompletionRequest, body)
    return request


def _decode(kind: type, body: bytes) -> Any:
    return decode_as(_decoders[kind], body)


def decode_as(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Decode with a decoder of the caller's own; `InvalidRequest` names the field at fault."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _named(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}.") from error


def _named(words: str) -> InvalidRequest:
    """The decoder's words, with the field at fault: "Expected `int`, got `str` - at `$.max_tokens`"."""
    reason, _, place = words.partition(" - at `")
    path = place.removeprefix("key` in `").strip("$`.")
    field = path.split(".")[0].split("[")[0] or None
    if reason.startswith("Object contains unknown field `"):
        name = reason.split("`")[1][:64]
        return InvalidRequest(f"Unknown parameter {name!r}{f' in {path}' if path else ''}.", param=field or name)
    if field == "cache_salt":
        return InvalidRequest("'cache_salt' is the gateway's to set; leave it out.", param=field)
    if field is None and reason.startswith("Object missing required field `"):
        field = reason.split("`")[1]
    return InvalidRequest(f"{reason[:MAX_REASON]}{f' in {path}' if path else ''}.", param=field)
