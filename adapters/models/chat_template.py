"""Chat templates: a model's own Jinja text that turns messages into the prompt it was trained on.

    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
    prompt = template.render([{"role": "user", "content": "Hi"}], tools=[...])   # tools where it `renders_tools`

Templates behave as they do in transformers (trim_blocks, lstrip_blocks, loop controls, `raise_exception`,
`strftime_now`, `tojson` that does not escape HTML, `{% generation %}`). They come out of model files and are not
trusted: they run in Jinja's immutable sandbox, and what one rendering may read, repeat and write is bounded, because
a sandbox keeps a template from the system but not from the memory. What is not bounded is time spent in loops over
the messages themselves.

Tokenizers take the spelling of a special token for the token. What a caller writes must not open a new turn that way,
so a prompt can be had in pieces, to be encoded one by one: they are cut inside each such spelling in a message or tool.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from adapters.errors import EngineUnavailable, InvalidRequest

MAX_SOURCE_CHARS = 256 << 10  # the longest in use are about 30 KiB
MAX_OUTPUT_CHARS = 64 << 20  # far above the largest body that the gateway accepts
MAX_REPEATED_CHARS = 1 << 20
MAX_RANGE_STEPS = 100_000  # of all `range()`s of one rendering together


class ChatTemplate:
    """One compiled template. Rendering is pure but for `strftime_now`."""

    def __init__(
        self, source: str, *, bos_token: str = "", eos_token: str = "", now: Callable[[], datetime] = datetime.now
    ) -> None:
        """Raises `EngineUnavailable` for a template that cannot be compiled: then the model is at fault, no request."""
        if len(source) > MAX_SOURCE_CHARS:
            raise EngineUnavailable(f"The model's chat template is longer than {MAX_SOURCE_CHARS} characters.")
        try:
            self._template, self.renders_tools = _compiled(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise EngineUnavailable(f"The model's chat template is not valid: {error}.") from error
        self.source = source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._now = now

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt. Raises `InvalidRequest` where the template refuses the messages or fails on them."""
        variables = {
            "messages": messages,
            "tools": tools or None,  # templates ask whether it is none
            "add_generation_prompt": add_generation_prompt,
            "strftime_now": lambda pattern: self._now().strftime(pattern),
            "range": _RangeBudget(),
            **self._tokens,
        }
        pieces: list[str] = []
        num_chars = 0
        try:
            for piece in self._template.generate(variables):
                num_chars += len(piece)
                if num_chars > MAX_OUTPUT_CHARS:
                    raise _OutOfBounds(f"it writes more than {MAX_OUTPUT_CHARS} characters")
                pieces.append(piece)
        except _Refused as error:
            raise _refusal(str(error)) from error
        except _FAILURES as error:
            raise _refusal(f"The model's chat template failed on these messages: {error}.") from error
        return "".join(pieces)

    def render_pieces(
        self,
        messages: Sequence[Mapping[str, Any]],
        reserved: Iterable[str],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[str]:
        """The prompt in pieces; joined they are the prompt. No `reserved` spelling of a message lies whole in one."""
        spellings = "|".join(re.escape(text) for text in reserved if len(text) > 1)
        if not spellings:
            return [self.render(messages, tools=tools)]
        first_of_spelling = re.compile(f"(?={spellings}).", re.DOTALL)  # looks ahead: they may overlap
        cut = secrets.token_hex(16)  # nobody can guess it, so nobody has written it; JSON leaves it as it is

        def with_cuts(value: Any) -> Any:
            if isinstance(value, str):
                return first_of_spelling.sub(rf"\g<0>{cut}", value)
            if isinstance(value, Mapping):  # names of arguments and parameters are the caller's words too
                return {with_cuts(key): with_cuts(each) for key, each in value.items()}
            return [with_cuts(each) for each in value] if isinstance(value, list) else value

        try:
            turns, functions = with_cuts(list(messages)), with_cuts(list(tools or ()))
        except RecursionError as error:  # arguments of a call are a text, and may nest as deep as they like
            raise InvalidRequest(f"The messages nest too deep: {error}.", param="messages") from error
        return self.render(turns, tools=functions).split(cut)


def _refusal(message: str) -> InvalidRequest:
    """In the template's own words, which may quote the messages."""
    error = InvalidRequest(message, param="messages")
    error.for_records = "The model's chat template refused the messages."
    return error


class _Refused(Exception):
    """The template called `raise_exception`."""


class _OutOfBounds(Exception):
    """The template asked for more than one rendering may use."""


# What code in a template can raise: whatever Python's operators and methods can.
_FAILURES = (
    jinja2.TemplateError, _OutOfBounds, TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError,
    RecursionError, MemoryError,
)  # fmt: skip


class _RangeBudget:
    """`range` for one rendering: all its calls share one budget, so that nested loops cannot multiply."""

    def __init__(self) -> None:
        self._num_left = MAX_RANGE_STEPS

    def __call__(self, *bounds: int) -> range:
        steps = range(*bounds)
        self._num_left -= len(steps)
        if self._num_left < 0:
            raise _OutOfBounds(f"its ranges have more than {MAX_RANGE_STEPS} steps")
        return steps


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, where `*` and `**` cannot make something huge."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not (abs(left) < 1e6 and abs(right) < 64):
            raise _OutOfBounds("it raises to a large power")
        if operator == "*" and _repeated_length(left, right) > MAX_REPEATED_CHARS:
            raise _OutOfBounds(f"it repeats something to more than {MAX_REPEATED_CHARS}")
        return super().call_binop(context, operator, left, right)


def _repeated_length(left: Any, right: Any) -> int:
    """The length of `left * right` where one of them is a sequence; 0 for numbers."""
    for repeated, times in ((left, right), (right, left)):
        if isinstance(repeated, str | list | tuple) and isinstance(times, int):
            return len(repeated) * times
    return 0


class _GenerationBlock(Extension):
    """`{% generation %}` marks an answer for training; here its body is all that counts."""

    tags = {"generation"}  # noqa: RUF012 - the name and type that Jinja asks for

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: object) -> NoReturn:
    raise _Refused(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter with the parameters that it has in transformers."""
    plain = list(value) if isinstance(value, Iterator) else value  # of `map` and its like
    return json.dumps(plain, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> _Sandbox:
    extensions = ["jinja2.ext.loopcontrols", _GenerationBlock]
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    return environment


@lru_cache(maxsize=16)  # compiling takes milliseconds, and replicas of one model share a template
def _compiled(source: str) -> tuple[jinja2.Template, bool]:
    """The template, and whether it makes anything of `tools`."""
    environment = _environment()
    tree = environment.parse(source)
    renders_tools = any(name.name == "tools" and name.ctx == "load" for name in tree.find_all(nodes.Name))
    return environment.from_string(source), renders_tools
