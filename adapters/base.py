"""The contract between Goodgate and an engine.

An adapter is one file, `adapters/<engine>.py`, holding one `EngineAdapter` subclass called `Adapter`. One instance
speaks to one running engine. What it is asked for, an OpenAI-shaped request, it turns into the engine's words; what the
engine answers it turns into `Chunk`s. Everything that differs between engines lives there, and nowhere else.

    adapter = Adapter(options)            # options: the engine's own keys from the config file
    await adapter.start()
    async for chunk in adapter.generate(request, request_id="..."):
        ...                               # closing the iterator cancels: the engine's work stops
    await adapter.close()

Rules an adapter keeps, checked for every one of them by tests/contract:
- `generate` raises before the first chunk, or yields chunks in the order that `Chunk` documents.
- A stream that ends without a finish reason raises `StreamInterrupted`; it never looks like success.
- A field outside `capabilities.parameters` is refused by `check_parameters`, never ignored.
- Closing the iterator, or cancelling the task that reads it, closes the engine's side at once.
- It raises only errors of `adapters.errors`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Collection, Sequence
from typing import ClassVar, Generic, TypeVar

from msgspec import Struct

from adapters.errors import UnsupportedContent, UnsupportedOperation, UnsupportedParameter
from adapters.types import (
    INFORMATIONAL,
    ChatRequest,
    Chunk,
    EmbeddingRequest,
    Embeddings,
    GenerateRequest,
    Message,
    PartKind,
    Route,
    TokenizeRequest,
    Tokens,
    route_of,
    set_fields,
)

ANY = "*"  # in an engine's name for its model: what the caller has asked for


class Capabilities(Struct, frozen=True, kw_only=True):
    """What an engine can do. `parameters` holds the request fields it honours (prompt and messages aside)."""

    chat: bool = True
    completions: bool = True
    embeddings: bool = False
    dimensions: bool = False  # of embeddings: the caller may choose how many
    tokenize: bool = False  # of a text
    tokenize_chat: bool = False  # of messages, through the chat template
    detokenize: bool = False
    token_prompts: bool = False  # takes lists of token ids as a prompt
    usage_so_far: bool = False  # tells the exact count of tokens with each piece
    parts: frozenset[PartKind] = frozenset()  # what it takes in messages beside text
    parameters: frozenset[str] = frozenset()
    cache_salt: frozenset[Route] = frozenset()  # where prompts with different salts share no cached prefix
    load: frozenset[str] = frozenset()  # the fields of `Load` that it tells


class Health(Struct, frozen=True):
    """Can the engine serve now? `reason` is one sentence when it cannot."""

    ready: bool
    reason: str = ""


class Load(Struct, frozen=True):
    """What the engine says of its own load; None where it does not tell. Shares run from 0 to 1, drafts are counted
    since it started."""

    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    prefix_hit_rate: float | None = None
    draft_tokens: int | None = None  # guessed by speculation
    accepted_draft_tokens: int | None = None


class ModelInfo(Struct, frozen=True):
    """One model as an engine lists it."""

    id: str
    max_model_len: int | None = None


class EngineOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    """An engine's own keys in a replica's `options:`. Each engine extends it."""


O = TypeVar("O", bound=EngineOptions)  # noqa: E741 - the conventional one-letter name for a type variable


class EngineAdapter(ABC, Generic[O]):
    """One running engine. Subclasses set the three class attributes and implement the five verbs."""

    engine: ClassVar[str]
    Options: ClassVar[type[EngineOptions]]
    how_to_reach: ClassVar[str] = "start it yourself and name its `url` in the configuration"
    in_process: ClassVar[bool] = False  # lives and dies with our process: several gateway processes cannot share one
    licence: ClassVar[str] = ""  # SPDX id of the engine's own code; empty: not known
    hardware: ClassVar[frozenset[str]] = frozenset()  # that it computes on: cpu, cuda, rocm, ...; empty: not known
    hosted: ClassVar[bool | None] = False  # by a provider, so that prompts leave the site; None: it depends on the url
    tokenizes_tools: ClassVar[bool] = False  # counts them with the messages, as a generation would
    capabilities: Capabilities

    def __init__(self, options: O) -> None:
        self.options = options

    @abstractmethod
    async def start(self) -> None:
        """Connect or load. Raises `EngineUnavailable` with what to do when it cannot."""

    @abstractmethod
    async def close(self) -> None:
        """Give everything back. Safe to call twice, and after a failed start."""

    @abstractmethod
    async def health(self) -> Health:
        """An engine that cannot be asked is not ready. Raises `HostExhausted` alone: nobody could be asked. Generates
        nothing."""

    @abstractmethod
    async def models(self) -> list[ModelInfo]: ...

    async def version(self) -> str:
        """The engine's own version, empty where it does not tell."""
        return ""

    async def load(self) -> Load:
        return Load()

    @abstractmethod
    def generate(self, request: GenerateRequest, *, request_id: str) -> AsyncGenerator[Chunk, None]:
        """An async generator of chunks for one prompt and its `n` choices. `request_id` is unique for each call."""

    async def embed(self, request: EmbeddingRequest) -> Embeddings:
        """One vector for each input, in order. Raises `UnsupportedOperation` where the engine has none."""
        raise UnsupportedOperation("embeddings", self.engine)

    async def tokenize(self, request: TokenizeRequest) -> Tokens:
        """The token ids that the engine would see. Raises `UnsupportedOperation` where it does not tell."""
        raise UnsupportedOperation(_operation(request), self.engine)

    async def detokenize(self, ids: Sequence[int]) -> str:
        """The text of token ids. Raises `UnsupportedOperation` where the engine does not tell."""
        raise UnsupportedOperation("detokenize", self.engine)

    def check_parameters(self, request: GenerateRequest) -> None:
        """Refuse what this engine cannot honour, naming the field and the engine."""
        capabilities = self.capabilities
        if isinstance(request, ChatRequest):
            if not capabilities.chat:
                raise UnsupportedParameter("messages", self.engine)
            check_parts(request.messages, capabilities.parts, self.engine)
        elif not capabilities.completions or (isinstance(request.prompt, list) and not capabilities.token_prompts):
            raise UnsupportedParameter("prompt", self.engine)
        if request.wants_usage_so_far and not capabilities.usage_so_far:
            raise UnsupportedParameter("stream_options.continuous_usage_stats", self.engine)
        for field in sorted(set_fields(request) - capabilities.parameters - _TAKEN_BY_ALL):
            if _asks_for_one_call(field, request) or not is_default(field, getattr(request, field)):
                raise UnsupportedParameter(field, self.engine)

    def check_salt(self, request: GenerateRequest) -> None:
        """Refuse to share a cached prefix with requests of another salt, where that could not be helped."""
        if request.salt is not None and route_of(request) not in self.capabilities.cache_salt:
            raise UnsupportedOperation("a prefix cache that tenants do not share", self.engine)

    def check_embedding(self, request: EmbeddingRequest) -> None:
        """Refuse what this engine cannot honour, naming the operation or the field, and the engine."""
        if not self.capabilities.embeddings:
            raise UnsupportedOperation("embeddings", self.engine)
        if isinstance(request.dimensions, int) and not self.capabilities.dimensions:
            raise UnsupportedParameter("dimensions", self.engine)
        if isinstance(request.input[0], list) and not self.capabilities.token_prompts:
            raise UnsupportedParameter("input", self.engine)

    def check_tokenize(self, request: TokenizeRequest) -> None:
        """The same for token ids: of messages an engine may know nothing, though it has a tokenizer."""
        is_chat = request.messages is not None
        if not (self.capabilities.tokenize_chat if is_chat else self.capabilities.tokenize):
            raise UnsupportedOperation(_operation(request), self.engine)
        if request.tools and not (self.tokenizes_tools and "tools" in self.capabilities.parameters):
            raise UnsupportedParameter("tools", self.engine)
        check_parts(request.messages or (), self.capabilities.parts, self.engine)

    def check_detokenize(self) -> None:
        if not self.capabilities.detokenize:
            raise UnsupportedOperation("detokenize", self.engine)


def check_parts(messages: Sequence[Message], taken: Collection[PartKind], engine: str) -> None:
    """Refuse what the engine does not take in messages beside text, naming its place, its kind and the engine."""
    for at, message in enumerate(messages):
        for place, kind in message.other_parts():
            if kind not in taken:
                raise UnsupportedContent(kind, f"messages[{at}].content[{place}]", engine)


_TAKEN_BY_ALL = INFORMATIONAL | {"messages", "prompt"}


def _operation(request: TokenizeRequest) -> str:
    return "tokenize" if request.messages is None else "tokenize of messages"


# Values that ask for nothing: clients send them out of habit, and every engine honours them by doing as it always does.
_DEFAULTS: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False,),
    "echo": (False,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "top_k": (0, -1),
    "top_p": (1,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "suffix": ("",),
    "stop": ([],),
    "tools": ([],),
    "functions": ([],),
    "modalities": (["text"],),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "parallel_tool_calls": (True, False),
}


def is_default(field: str, value: object) -> bool:
    """True where `value` asks for what happens anyway.

    `logprobs: 0` of a completion does ask for something, so 0 is not False here.
    """
    return any(
        (type(value) is type(default) and value == default) or _same_number(value, default)
        for default in _DEFAULTS.get(field, ())
    )


def _asks_for_one_call(field: str, request: GenerateRequest) -> bool:
    """`parallel_tool_calls: false` asks for nothing only where there are no tools."""
    return (
        field == "parallel_tool_calls"
        and isinstance(request, ChatRequest)
        and bool(request.tools)
        and (request.parallel_tool_calls is False)
    )


def _same_number(value: object, default: object) -> bool:
    numbers = (int, float)
    both = isinstance(value, numbers) and isinstance(default, numbers)
    return both and not isinstance(value, bool) and not isinstance(default, bool) and value == default
