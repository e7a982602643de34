"""Goodgate's own engine, in this process: the one adapter that imports `native_engine`, and only when it is started.

    engine: native
    options: {model: smollm2-135m-instruct, kv_cache_mib: 512, max_num_seqs: 64}

Messages and tools become text through the model's own chat template, text becomes token ids here, and several choices
are forks of one request, whose prompt is computed once. Tool calls are read out of the text,
where no special token, which the engine does not give out, marks a call; a template that makes nothing of tools gets
turns that describe them. Grammars hold an answer to its `response_format`, a forced call to its tool's parameters, and
a free one where a tool is strict. What they cannot express is refused. Log-probabilities are those of the model itself,
before temperature, penalties, biases and grammars.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from collections.abc import AsyncGenerator, Iterator, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from adapters.base import Capabilities, EngineAdapter, EngineOptions, Health, Load, ModelInfo
from adapters.config import goodgate_home
from adapters.errors import (
    ContextLengthExceeded,
    EngineFailed,
    EngineUnavailable,
    GoodgateError,
    InvalidRequest,
    Overloaded,
    StreamInterrupted,
)
from adapters.launching.launch import Launchable
from adapters.models.chat_template import ChatTemplate
from adapters.models.model_files import not_installed
from adapters.models.model_store import ModelStore, is_store_name
from adapters.response_format import wanted_schema
from adapters.tools.call_grammar import forced_call, forced_format, free_calls
from adapters.tools.formats import ToolFormat
from adapters.tools.think_text import ReasoningParser, reads_thoughts, thoughts_of, with_thoughts
from adapters.tools.tool_calls import (
    CallChunks,
    Offer,
    ToolParser,
    for_template,
    offered,
    usable_format,
    with_tool_calls,
    with_tools,
)
from adapters.types import (
    ChatRequest,
    Chunk,
    CompletionRequest,
    Continuation,
    GenerateRequest,
    Progress,
    TokenizeRequest,
    Tokens,
    Usage,
)
from adapters.wire.told_tokens import Candidates, Echo, Likely, ToldToken, as_chat, as_completion

if TYPE_CHECKING:
    from native_engine.async_engine import AsyncEngine, Delta, Replay
    from native_engine.errors import EngineError as NativeError
    from native_engine.logprobs import Logprobs
    from native_engine.sampling_params import Grammar, SamplingParams

LONG_PROMPT_CHARS = 20_000  # about 5 ms of rendering or tokenising: longer ones go to a thread; other streams go on

AtLeastOne = Annotated[int, Meta(ge=1)]


class NativeSettings(EngineOptions):
    """How the native engine runs. What is left out is its own default (native_engine/config.py)."""

    dtype: Literal["bfloat16", "float32"] | None = None
    max_model_len: AtLeastOne | None = None
    kv_cache_mib: AtLeastOne | None = None
    kv_cache_dtype: Literal["auto", "int8"] | None = None
    max_num_seqs: AtLeastOne | None = None
    max_num_batched_tokens: AtLeastOne | None = None
    enable_prefix_caching: bool | None = None
    preemption: Literal["recompute", "swap", "auto"] | None = None
    swap_space_mib: AtLeastOne | None = None
    num_threads: AtLeastOne | None = None
    ttft_target_ms: Annotated[float, Meta(gt=0)] | None = None
    tpot_target_ms: Annotated[float, Meta(gt=0)] | None = None
    when_late: Literal["queue", "relegate", "refuse"] | None = None  # a request whose first token cannot be in time
    speculation: Literal["off", "ngram", "draft"] | None = None  # drafts of the next tokens, checked in one step
    num_speculative_tokens: AtLeastOne | None = None
    speculation_max_rows: AtLeastOne | None = None
    ngram_max: AtLeastOne | None = None
    ngram_min: AtLeastOne | None = None
    draft_model: Annotated[str, Meta(min_length=1)] | None = None  # as `model` is named
    draft_kv_cache_mib: AtLeastOne | None = None


class NativeOptions(NativeSettings, kw_only=True):
    """Keys of a replica that runs in this process: the settings, and what to load."""

    model: Annotated[str, Meta(min_length=1)]  # a name in the model store, or a path to a GGUF file or folder
    home: str | None = None  # where the model store is; default: GOODGATE_HOME
    tool_parser: ToolParser = "auto"  # how the model writes tool calls
    reasoning_parser: ReasoningParser = "auto"  # and how it marks what it thinks


class Adapter(Launchable, EngineAdapter[NativeOptions]):
    engine = "native"
    hardware = frozenset({"cpu", "cuda"})
    Options = NativeOptions
    in_process = True
    tokenizes_tools = True
    capabilities = Capabilities(
        token_prompts=True,
        usage_so_far=True,
        parameters=frozenset(
            {"max_tokens", "max_completion_tokens", "min_tokens", "ignore_eos", "stop", "n", "seed"}
            | {"temperature", "top_p", "top_k", "min_p", "logit_bias", "bad_words"}
            | {"logprobs", "top_logprobs", "echo", "best_of"}
            | {"presence_penalty", "frequency_penalty", "repetition_penalty", "response_format", "continuation"}
        ),
        tokenize=True,
        tokenize_chat=True,
        detokenize=True,
        cache_salt=frozenset({"chat", "completions"}),
        load=frozenset({"running", "waiting", "kv_usage", "prefix_hit_rate"}),
    )

    def __init__(self, options: NativeOptions) -> None:
        super().__init__(options)
        self._drafts = options.speculation not in (None, "off")
        capabilities = _telling_drafts(self.capabilities) if self._drafts else self.capabilities
        self.capabilities = with_tools(capabilities, options.tool_parser != "none", can_force=True)
        self._engine: AsyncEngine | None = None
        self._template: ChatTemplate | None = None
        self._tool_format: ToolFormat | None = None
        self._thinks_aloud = False

    @classmethod
    def launch_options(cls) -> type[NativeSettings]:
        return NativeSettings

    # ------------------------------------------------------------------------------------------------------ lifecycle

    async def start(self) -> None:
        """Load the model, in a thread: seconds during which the event loop goes on."""
        if self._engine is not None:
            return
        loading = asyncio.get_running_loop().run_in_executor(None, self._load)
        try:
            self._engine = await asyncio.shield(loading)
        except asyncio.CancelledError:
            loading.add_done_callback(_close_if_loaded)
            raise
        self._template = _template_of(self._engine)
        if self._template is not None:
            wanted, hidden = self.options.tool_parser, self._engine.special_tokens
            self._tool_format = usable_format(wanted, self._template, hidden, teaches=True)
            self._thinks_aloud = reads_thoughts(self.options.reasoning_parser, self._template, hidden)
        self.capabilities = with_tools(self.capabilities, self._tool_format is not None, can_force=True)

    def _load(self) -> AsyncEngine:
        try:
            from native_engine.async_engine import AsyncEngine
            from native_engine.config import EngineConfig
            from native_engine.errors import EngineError as NativeError
        except ImportError as error:
            raise not_installed(error) from error
        home = Path(self.options.home) if self.options.home else goodgate_home()
        path = _model_path(self.options.model, home)
        try:
            config = EngineConfig(**self._config_fields(home))
            return AsyncEngine.load(path, config, kernel_cache=_kernel_cache(home))
        except (NativeError, OSError, MemoryError, ValueError, RuntimeError) as error:
            raise EngineUnavailable(f"The native engine could not load {path}: {error}") from error

    def _config_fields(self, home: Path) -> dict[str, Any]:
        chosen = {name: getattr(self.options, name) for name in NativeSettings.__struct_fields__}
        if self.options.draft_model is not None:
            chosen["draft_model"] = _model_path(self.options.draft_model, home)
        return {name: value for name, value in chosen.items() if value is not None}

    async def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            await asyncio.to_thread(engine.close)

    # ------------------------------------------------------------------------------------------------------ questions

    async def health(self) -> Health:
        if self._engine is None:
            return Health(False, "The native engine is not started.")
        if not self._engine.is_running:
            return Health(False, "The native engine has stopped; its log says why.")
        return Health(True)

    async def models(self) -> list[ModelInfo]:
        name = self.options.model if is_store_name(self.options.model) else Path(self.options.model).stem
        return [ModelInfo(name, self._running().max_model_len)]

    async def load(self) -> Load:
        if self._engine is None:
            return Load()
        stats = self._engine.stats()
        return Load(
            running=stats.num_running,
            waiting=stats.num_waiting,
            kv_usage=stats.kv_blocks_used / stats.kv_blocks_total,
            prefix_hit_rate=stats.prefix_hits / stats.prefix_queries if stats.prefix_queries else None,
            draft_tokens=stats.draft_tokens if self._drafts else None,
            accepted_draft_tokens=stats.accepted_draft_tokens if self._drafts else None,
        )

    async def version(self) -> str:
        return version("goodgate")  # it is part of this package

    async def tokenize(self, request: TokenizeRequest) -> Tokens:
        self.check_tokenize(request)
        engine = self._running()
        generation = request.as_generation()
        pieces = await self._pieces(generation, engine)
        ids = await self._encode(engine, generation, pieces, add_special_tokens=request.add_special_tokens)
        return Tokens(ids, engine.max_model_len)

    async def detokenize(self, ids: Sequence[int]) -> str:
        engine = self._running()
        if ids and max(ids) >= engine.vocab_size:
            raise InvalidRequest(
                f"The model has no token {max(ids)}; its last is {engine.vocab_size - 1}.", param="tokens"
            )
        decode = partial(engine.decode, ids, with_special_tokens=True)
        return await asyncio.to_thread(decode) if len(ids) > LONG_PROMPT_CHARS else decode()

    def _running(self) -> AsyncEngine:
        if self._engine is None:
            raise EngineUnavailable("The native engine is not started.")
        return self._engine

    # ----------------------------------------------------------------------------------------------------- generation

    async def generate(self, request: GenerateRequest, *, request_id: str) -> AsyncGenerator[Chunk, None]:
        self.check_parameters(request)
        offer = offered(request, self.engine)
        account = _Account(num_candidates(request))
        pieces = await self._pieces(request, self._running())
        grammar = self._grammar_of(request, offer)
        chunks = self._chunks(request, pieces, grammar, request_id, account)
        must_call = offer is not None and offer.must_call
        if self._thinks_aloud and (thoughts := thoughts_of(request, "".join(pieces), must_call=must_call)) is not None:
            chunks = with_thoughts(chunks, thoughts)
        if offer is not None and self._tool_format is not None:
            forced = forced_format(self._tool_format)
            calls = CallChunks(offer, self._tool_format, num_choices=request.num_choices, forced_format=forced)
            chunks = with_tool_calls(chunks, calls, account.usage)
        async with contextlib.aclosing(chunks):
            if request.wants_usage_so_far:  # out here, where thoughts and calls have become chunks of their own
                async for chunk in chunks:
                    yield chunk if chunk.usage else msgspec.structs.replace(chunk, usage_so_far=account.usage())
                return
            async for chunk in chunks:
                yield chunk

    async def _chunks(
        self,
        request: GenerateRequest,
        pieces: list[str],
        grammar: Grammar | None,
        request_id: str,
        account: _Account,
    ) -> AsyncGenerator[Chunk, None]:
        from native_engine.errors import EngineError as NativeError

        engine = self._running()
        try:
            prompt_ids = await self._encode(engine, request, pieces)
            _check_prompt(len(prompt_ids), request, engine.max_model_len)
            teller = _teller(request, prompt_ids, engine.identity)
            params = [params_of(request, index, grammar) for index in range(account.num_choices)]
            wording = _Wording(request, engine, prompt_ids)
            candidates = Candidates(account.num_choices) if account.num_choices > request.num_choices else None
            async with contextlib.aclosing(
                engine.generate_choices(
                    prompt_ids,
                    params,
                    request_id=request_id,
                    cache_salt=request.salt,
                    after=None if teller is None else teller.after,
                )
            ) as deltas:
                async for index, delta in deltas:
                    account.add(index, delta)
                    if teller is not None:
                        teller.add(delta.token_ids)
                    if delta.prompt_logprobs and not wording.knows_prompt:
                        await asyncio.to_thread(wording.read_prompt, delta.prompt_logprobs)
                    for chunk in wording.chunks(index, delta, teller):
                        if candidates is None:
                            yield chunk
                        else:
                            candidates.add(chunk)
                    if candidates is not None:
                        candidates.rate(index, delta.cumulative_logprob, delta.num_output_tokens)
        except NativeError as error:
            raise _translated(error, request, has_begun=account.has_begun) from error
        if not account.is_complete:
            raise StreamInterrupted("The native engine ended a request without a finish reason.")
        for chunk in () if candidates is None else candidates.best(request.num_choices):
            yield chunk
        yield Chunk(usage=account.usage())

    async def _pieces(self, request: GenerateRequest, engine: AsyncEngine) -> list[str]:
        """The prompt as text, in pieces to encode one by one; none where it is token ids already."""
        if isinstance(request, ChatRequest):
            is_long = len(msgspec.json.encode((request.messages, request.tools or ()))) > LONG_PROMPT_CHARS
            render = partial(self._render, request, engine.special_tokens)
            return await asyncio.to_thread(render) if is_long else render()
        return [request.prompt] if isinstance(request.prompt, str) else []

    async def _encode(
        self, engine: AsyncEngine, request: GenerateRequest, pieces: list[str], *, add_special_tokens: bool = True
    ) -> list[int]:
        if not isinstance(request, ChatRequest) and isinstance(request.prompt, list):
            return list(request.prompt)
        needs_special_tokens = add_special_tokens and not isinstance(request, ChatRequest)  # templates write their own

        def encode() -> list[int]:
            return [
                token for piece in pieces for token in engine.encode(piece, add_special_tokens=needs_special_tokens)
            ]

        num_chars = sum(map(len, pieces))
        if num_chars > engine.max_prompt_chars:
            raise ContextLengthExceeded(
                f"The prompt has {num_chars} characters; the context of the model holds {engine.max_model_len} tokens.",
                param=_prompt_field(request),
            )
        return await asyncio.to_thread(encode) if num_chars > LONG_PROMPT_CHARS else encode()

    def _render(self, request: ChatRequest, reserved: list[str]) -> list[str]:
        if self._template is None:
            raise InvalidRequest(
                f"The model {self.options.model!r} has no chat template; use /v1/completions.", param="messages"
            )
        turns, tools = for_template(request, self._template, self._tool_format)
        return self._template.render_pieces(turns, reserved, tools=tools)

    def _grammar_of(self, request: GenerateRequest, offer: Offer | None) -> Grammar | None:
        """What the whole answer must be; None where any text will do."""
        from native_engine.sampling_params import Grammar

        if offer is None or self._tool_format is None:
            schema = wanted_schema(request, self.engine)
            return None if schema is None else Grammar("json", msgspec.json.encode(schema).decode())
        hold = forced_call if offer.must_call else free_calls
        source = hold(offer, self._tool_format)
        return None if source is None else Grammar("lark", source)


class _Wording:
    """The deltas of one request as chunks: behind the echo of its prompt, and with log-probabilities in the form of its
    route, where they are wanted."""

    def __init__(self, request: GenerateRequest, engine: AsyncEngine, prompt_ids: list[int]) -> None:
        self._engine = engine
        self._prompt_ids = prompt_ids
        self._in_form = as_chat if isinstance(request, ChatRequest) else as_completion
        self._tells_logprobs = num_logprobs(request) is not None
        self._echo: Echo | None = None
        if isinstance(request, CompletionRequest) and request.echo is True:
            prompt = request.prompt
            self._echo = Echo(
                prompt if isinstance(prompt, str) else engine.decode(prompt_ids, with_special_tokens=True)
            )
        self._begun: set[int] = set()
        self.knows_prompt = False

    def read_prompt(self, logprobs: Sequence[Logprobs]) -> None:
        """`logprobs`: of all its tokens but the first, which nothing stands before."""
        self.knows_prompt = True
        if self._echo is not None:
            first = (self._engine.spell(self._prompt_ids[0]), None, ())
            self._echo.tell([first, *(self._spelled(told) for told in logprobs)])

    def chunks(self, index: int, delta: Delta, teller: _Teller | None) -> Iterator[Chunk]:
        if self._echo is not None and index not in self._begun:
            self._begun.add(index)
            yield from self._echo.chunks(index)
        if delta.text or delta.finish_reason is not None:
            yield Chunk(
                index=index,
                text=delta.text,
                logprobs=self._in_form(self._told(delta)) if delta.logprobs and self._tells_logprobs else None,
                finish_reason=delta.finish_reason,
                stop_string=delta.stop_string,
                progress=None if teller is None or delta.finish_reason else teller.progress(),
            )

    def _told(self, delta: Delta) -> Iterator[ToldToken]:
        start = 0 if self._echo is None else len(self._echo.text)
        for placed in delta.logprobs:
            raw, logprob, top = self._spelled(placed.of)
            yield ToldToken(raw, start + placed.offset, logprob, top)

    def _spelled(self, told: Logprobs) -> tuple[bytes, float, Sequence[Likely]]:
        spell = self._engine.spell
        return spell(told.token_id), told.logprob, [Likely(spell(each), logprob) for each, logprob in told.top]


class _Teller:
    """Tells the tokens of a generation that may have to be continued elsewhere."""

    def __init__(self, fingerprint: str, after: Replay | None) -> None:
        self.after = after
        self._fingerprint = fingerprint
        self._ids: list[int] = []

    def add(self, ids: list[int]) -> None:
        self._ids.extend(ids)

    def progress(self) -> Progress:
        ids, self._ids = self._ids, []
        return Progress(ids, self._fingerprint)


def _teller(request: GenerateRequest, prompt_ids: list[int], identity: str) -> _Teller | None:
    """None where nobody asks. Refuses to go on with what another model, another build or another prompt has begun."""
    from native_engine.async_engine import Replay

    asked = request.continuation
    if not isinstance(asked, Continuation):
        return None
    if request.num_choices > 1:
        raise InvalidRequest("'continuation' is for one choice.", param="continuation")
    fingerprint = hashlib.sha256(f"{identity} {prompt_ids}".encode()).hexdigest()[:32]
    if not asked.ids:
        return _Teller(fingerprint, None)
    if asked.fingerprint != fingerprint:
        raise InvalidRequest(
            "'continuation' does not fit: another model, build or prompt has begun it.", param="continuation"
        )
    return _Teller(fingerprint, Replay(asked.ids, asked.num_chars))


class _Account:
    """What the choices of one request have used. The prompt counts once."""

    def __init__(self, num_choices: int) -> None:
        self.num_choices = num_choices
        self._num_output_tokens = [0] * num_choices
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0
        self._num_unfinished = num_choices
        self.has_begun = False

    def add(self, index: int, delta: Delta) -> None:
        self.has_begun = True
        self._num_output_tokens[index] = delta.num_output_tokens
        self._num_prompt_tokens = delta.num_prompt_tokens
        if index == 0:  # its siblings find the prompt that it has just left in the cache
            self._num_cached_tokens = delta.num_cached_tokens
        self._num_unfinished -= delta.finish_reason is not None

    @property
    def is_complete(self) -> bool:
        return self._num_unfinished == 0

    def usage(self) -> Usage:
        return Usage(self._num_prompt_tokens, sum(self._num_output_tokens), self._num_cached_tokens)


def params_of(request: GenerateRequest, index: int, grammar: Grammar | None = None) -> SamplingParams:
    """The engine's sampling parameters for choice `index`. Choices of a seeded request differ, but repeatably."""
    from native_engine.sampling_params import SamplingParams

    given: dict[str, Any] = {
        name: value for name in _SAMPLING_FIELDS if isinstance(value := getattr(request, name), int | float)
    }
    if "top_k" in given:
        given["top_k"] = max(given["top_k"], 0)
    if "seed" in given:
        given["seed"] = (given["seed"] + index) % 2**63
    wanted = num_logprobs(request)
    return SamplingParams(
        max_tokens=request.token_limit,
        stop=tuple(request.stop_strings),
        grammar=grammar,
        logit_bias=tuple((int(token), bias) for token, bias in request.logit_bias.items())
        if isinstance(request.logit_bias, dict)
        else (),
        bad_words=tuple(request.bad_words) if isinstance(request.bad_words, list) else (),
        logprobs=0 if wanted is None and num_candidates(request) > request.num_choices else wanted,
        prompt_logprobs=wanted if isinstance(request, CompletionRequest) and request.echo is True else None,
        **given,
    )


def num_logprobs(request: GenerateRequest) -> int | None:
    """How many alternatives are to be told beside each token's log-probability; None where none is to be told."""
    if isinstance(request, CompletionRequest):
        return request.logprobs if isinstance(request.logprobs, int) else None
    num_top = request.top_logprobs if isinstance(request.top_logprobs, int) else 0
    if num_top and request.logprobs is not True:
        raise InvalidRequest("`top_logprobs` needs `logprobs: true`.", param="top_logprobs")
    return num_top if request.logprobs is True else None


def num_candidates(request: GenerateRequest) -> int:
    """How many answers are made, of which `n` are given."""
    if not isinstance(request, CompletionRequest) or not isinstance(request.best_of, int):
        return request.num_choices
    if request.best_of < request.num_choices:
        raise InvalidRequest(
            f"`best_of` must be at least `n` ({request.num_choices}), not {request.best_of}.", param="best_of"
        )
    return request.best_of


_SAMPLING_FIELDS = (
    "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "ignore_eos",
)  # fmt: skip


def _prompt_field(request: GenerateRequest) -> str:
    return "messages" if isinstance(request, ChatRequest) else "prompt"


def _grammar_field(request: GenerateRequest) -> str:
    return "tools" if isinstance(request, ChatRequest) and request.tools else "response_format"


def _check_prompt(num_prompt_tokens: int, request: GenerateRequest, max_model_len: int) -> None:
    if not num_prompt_tokens:
        raise InvalidRequest("The prompt is empty; it must hold at least one token.", param=_prompt_field(request))
    limit = request.token_limit or 0
    if num_prompt_tokens + limit > max_model_len:
        raise ContextLengthExceeded(
            f"The prompt has {num_prompt_tokens} tokens and asks for {limit} more, "
            f"but the context of the model holds {max_model_len}.",
            param=_prompt_field(request),
        )


def _translated(error: NativeError, request: GenerateRequest, *, has_begun: bool) -> GoodgateError:
    """Our error for one of the engine's. Its messages about a parameter begin with the name."""
    from native_engine.errors import GrammarFailed, InvalidParams, PromptTooLong, StepFailed, TooLate

    if isinstance(error, PromptTooLong):
        return ContextLengthExceeded(str(error), param=_prompt_field(request))
    if isinstance(error, InvalidParams):
        name, _, fault = str(error).partition(" ")
        name = {"prompt_ids": _prompt_field(request), "grammar": _grammar_field(request)}.get(name, name)
        return InvalidRequest(f"{name} {fault}", param=name)
    if isinstance(error, TooLate):
        return Overloaded(str(error), retry_after_s=error.retry_after_s)
    if isinstance(error, GrammarFailed | StepFailed) and not has_begun:
        return EngineFailed(str(error))
    return StreamInterrupted(str(error)) if has_begun else EngineUnavailable(str(error))


def _telling_drafts(capabilities: Capabilities) -> Capabilities:
    told = capabilities.load | {"draft_tokens", "accepted_draft_tokens"}
    return msgspec.structs.replace(capabilities, load=told)


def _template_of(engine: AsyncEngine) -> ChatTemplate | None:
    if engine.chat_template is None:
        return None
    return ChatTemplate(engine.chat_template, bos_token=engine.bos_token, eos_token=engine.eos_token)


def _model_path(model: str, home: Path) -> Path:
    return ModelStore(home).get(model).path if is_store_name(model) else Path(model).expanduser()


def _kernel_cache(home: Path) -> Path | None:
    """Where compiled kernels are kept; on a read-only disk the engine's own choice, a private temporary folder."""
    return home / "cache" / "native" if os.access(home, os.W_OK) else None


def _close_if_loaded(loading: asyncio.Future[AsyncEngine]) -> None:
    """A start that was given up may still end in a loaded engine, whose thread must not stay."""
    if not loading.cancelled() and loading.exception() is None:
        loading.result().close()
