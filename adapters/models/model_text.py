"""What a gateway has to know of a model whose engine takes plain text: its chat template, and how it counts tokens.

    text = ModelText.load("smollm2-135m-instruct", home)     # or a Hugging Face folder, or a Jinja file
    prompt = text.prompt(request)
    text.count(prompt)                                       # None without a tokenizer
    text.encode(request)                                     # the ids that the engine will see

`load` reads files, and may export a GGUF model to the Hugging Face layout first: call it in a thread.

The engine encodes the prompt in one piece, so a message that spells a special token becomes that token there. Only an
engine that takes token ids, or applies the template itself, could tell the two apart.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from tokenizers import Tokenizer

from adapters.base import EngineAdapter, EngineOptions
from adapters.config import goodgate_home
from adapters.errors import EngineUnavailable, InvalidRequest
from adapters.models.chat_template import ChatTemplate
from adapters.models.model_store import ModelStore
from adapters.tools.formats import MARKERS, ToolFormat, format_of
from adapters.tools.think_text import ReasoningParser, reads_thoughts
from adapters.tools.tool_calls import ToolParser, for_template, rendered_tools, usable_format
from adapters.types import ChatRequest, GenerateRequest, TokenizeRequest, Tokens

O = TypeVar("O", bound=EngineOptions)  # noqa: E741 - the conventional one-letter name for a type variable

TOKENIZER, TOKENIZER_CONFIG, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"


class ModelText:
    """A model's template and tokenizer, without its weights."""

    def __init__(
        self,
        template: ChatTemplate,
        *,
        tool_template: ChatTemplate | None = None,
        bos_token: str = "",
        tokenizer: Tokenizer | None = None,
    ) -> None:
        """`tool_template` is that for requests with tools, where a model has one of its own."""
        self._template = template
        self._tool_template = tool_template or template
        self._tokenizer = tokenizer
        self._tool_format: ToolFormat | None = None
        self._doubled_bos = bos_token if tokenizer is not None and _adds_bos(tokenizer, bos_token) else ""

    @classmethod
    def load(cls, where: str, home: Path) -> ModelText:
        """`where` is a model of the store, a folder in Hugging Face layout, or a Jinja file, with or without its
        tokenizer's files beside it. Raises `EngineUnavailable` with what is wrong.
        """
        path = Path(where).expanduser()
        if not path.exists():
            if "/" in where or where.endswith(".jinja"):
                raise EngineUnavailable(f"There is no chat template at {path}.")
            path = ModelStore(home).hf_folder(where)
        folder = path if path.is_dir() else path.parent
        try:
            config = _config(folder)
            sources = _templates_in(folder, config) if path.is_dir() else {"default": path.read_text("utf-8")}
            file = folder / TOKENIZER
            tokenizer = Tokenizer.from_file(str(file)) if file.is_file() else None
        except Exception as error:  # tokenizers raises bare Exceptions for files that it cannot read
            raise EngineUnavailable(f"The model's text files in {folder} cannot be read: {error}.") from error
        if not sources.get("default"):
            raise EngineUnavailable(f"{folder} holds no chat template; name a Jinja file.")
        bos, eos = _token(config.bos_token), _token(config.eos_token)
        templates = {name: ChatTemplate(source, bos_token=bos, eos_token=eos) for name, source in sources.items()}
        return cls(templates["default"], tool_template=templates.get("tool_use"), bos_token=bos, tokenizer=tokenizer)

    def prompt(self, request: ChatRequest) -> str:
        """The messages as one text, without a beginning-of-sequence token that the engine's tokenizer adds again."""
        template = self._tool_template if rendered_tools(request) else self._template
        turns, tools = for_template(request, template, self._tool_format or format_of(template.source))
        return template.render(turns, tools=tools).removeprefix(self._doubled_bos)

    def choose_tool_format(self, wanted: ToolParser, *, hides_special_tokens: bool) -> ToolFormat | None:
        """How this model writes its calls, where an engine lets them be read (see `usable_format`), and how the prompt
        teaches it to, where its template does not.
        """
        hidden = self._special_tokens() if hides_special_tokens else ()
        self._tool_format = usable_format(wanted, self._tool_template, hidden)
        return self._tool_format

    def reads_thoughts(self, wanted: ReasoningParser, *, hides_special_tokens: bool) -> bool:
        """Whether this model's thoughts are looked for in its text (see `tools/think_text.py`)."""
        return reads_thoughts(wanted, self._template, self._special_tokens() if hides_special_tokens else ())

    def _special_tokens(self) -> set[str]:
        """Without a tokenizer, those marks of tool calls that are special tokens in the models that we know."""
        if self._tokenizer is None:
            return {mark for tool_format in ("mistral", "deepseek", "gpt_oss") for mark in MARKERS[tool_format]}
        return {token.content for token in self._tokenizer.get_added_tokens_decoder().values() if token.special}

    def count(self, text: str, *, is_prompt: bool = False) -> int | None:
        """Tokens of `text`; those of a prompt include the special ones that engines add to it."""
        if self._tokenizer is None:
            return None
        return len(self._tokenizer.encode(text, add_special_tokens=is_prompt).ids)

    @property
    def has_tokenizer(self) -> bool:
        return self._tokenizer is not None

    def encode(self, request: TokenizeRequest) -> list[int]:
        """The ids of a text or of messages; engines add the special tokens to the text of messages as well."""
        assert self._tokenizer is not None
        generation = request.as_generation()
        is_chat = isinstance(generation, ChatRequest)
        text = text_prompt(generation, self)
        adds_special = is_chat or request.add_special_tokens
        # A batch, because `encode` keeps the event loop waiting, in whatever thread it runs.
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=adds_special)[0].ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens included. `InvalidRequest` names an id that is none."""
        assert self._tokenizer is not None
        for token in ids:
            if self._tokenizer.id_to_token(token) is None:
                raise InvalidRequest(f"The model has no token {token}.", param="tokens")
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text


def text_prompt(request: GenerateRequest, text: ModelText | None) -> str:
    """The prompt of a request that `check_parameters` has let through."""
    if isinstance(request, ChatRequest):
        if text is None:
            raise EngineUnavailable("The adapter of the engine is not started.")
        return text.prompt(request)
    assert isinstance(request.prompt, str)
    return request.prompt


class LocalTokenizer(EngineAdapter[O]):
    """For engines that tell no token ids: the model's tokenizer does, here, where `chat_template` brings one."""

    _text: ModelText | None = None

    def declare_tokens(self, can: bool) -> None:
        self.capabilities = msgspec.structs.replace(self.capabilities, tokenize=can, tokenize_chat=can, detokenize=can)

    async def load_text(self, where: str) -> ModelText:
        """Only now it is known whether there is a tokenizer beside the template."""
        self._text = await asyncio.to_thread(ModelText.load, where, goodgate_home())
        self.declare_tokens(self._text.has_tokenizer)
        return self._text

    async def tokenize(self, request: TokenizeRequest) -> Tokens:
        self.check_tokenize(request)
        return Tokens(await asyncio.to_thread(self._loaded().encode, request))

    async def detokenize(self, ids: Sequence[int]) -> str:
        self.check_detokenize()
        return await asyncio.to_thread(self._loaded().decode, ids)

    def _loaded(self) -> ModelText:
        if self._text is None:
            raise EngineUnavailable(f"The adapter of the engine {self.engine!r} is not started.")
        return self._text


class _Config(Struct):
    bos_token: str | dict[str, Any] | None = None
    eos_token: str | dict[str, Any] | None = None
    chat_template: str | list[dict[str, str]] | None = None


def _config(folder: Path) -> _Config:
    file = folder / TOKENIZER_CONFIG
    return msgspec.json.decode(file.read_bytes(), type=_Config) if file.is_file() else _Config()


def _templates_in(folder: Path, config: _Config) -> dict[str, str]:
    """The templates by name: `default`, and in some models `tool_use` for requests with tools."""
    file = folder / TEMPLATE
    if file.is_file():
        return {"default": file.read_text("utf-8")}
    if isinstance(config.chat_template, list):
        named = {each.get("name", ""): each["template"] for each in config.chat_template}
        return {name: named[name] for name in ("default", "tool_use") if name in named}
    return {"default": config.chat_template or ""}


def _token(token: str | dict[str, Any] | None) -> str:
    return str(token.get("content", "")) if isinstance(token, dict) else token or ""


def _adds_bos(tokenizer: Tokenizer, bos_token: str) -> bool:
    return bool(bos_token) and tokenizer.encode("", add_special_tokens=True).tokens[:1] == [bos_token]
