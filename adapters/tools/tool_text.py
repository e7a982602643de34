"""Tool calls that a model writes into its text, taken out of it again. Pure and incremental: text in, events out.

    parser = ToolText("hermes", names={"get_weather"})
    for piece in pieces:
        for event in parser.feed(piece): ...     # Said, Thought, CallBegun, Arguments
    for event in parser.finish(): ...
    parser.num_complete                          # calls whose arguments are whole

The same text gives the same answer however it is cut. What it promises:

- Nothing of a marker goes out as text before it is known not to be one.
- A call is certain once its name is one of `names` and its arguments have begun: then `CallBegun` goes out, and the
  arguments follow as the model writes them, character for character, as far as they are valid JSON.
- What is not certain to be a call by then (an unknown name, broken JSON, no arguments where the format needs them) is
  text, markers and all. Where JSON breaks later, the call stays incomplete and the rest is text.
- Nothing is lost: text, arguments and the frames of calls make up the whole. Only white space beside a call is left
  out, because the formats put it there.
- Arguments that are a JSON string of an object are the object; none at all are `{}`.

The formats, each with a public source (templates: models/templates in llama.cpp, release b11434):

- `hermes`: `<tool_call>{"name": .., "arguments": {..}}</tool_call>`, one for each call. Qwen 2.5 and 3, Hermes 2 and 3,
  Granite 4: templates Qwen-Qwen2.5-7B-Instruct, NousResearch-Hermes-3-Llama-3.1-8B-tool_use.
- `llama3_json`: `{"name": .., "parameters": {..}}`, sometimes after `<|python_tag|>`, several with `;` in between.
  Llama 3.1 to 3.3: template meta-llama-Llama-3.1-8B-Instruct, and vLLM 0.32, tool_parsers/llama_tool_parser.py.
- `mistral`: `[TOOL_CALLS][{"name": .., "arguments": {..}}, ..]` up to tokenizer version 7, later
  `[TOOL_CALLS]name[ARGS]{..}`, with `[CALL_ID]id` after the name in version 11. mistral_common, experimental/tools.py;
  ids of nine letters and digits: mistral_common, protocol/instruct/validator.py.
- `deepseek`: each call between `<｜tool▁call▁begin｜>` and `<｜tool▁call▁end｜>`, all of them between another such pair
  with `calls` for `call`. V3 and R1 write `function<｜tool▁sep｜>name` and the arguments in a fence of JSON, V3.1
  `name<｜tool▁sep｜>{..}`: templates llama-cpp-deepseek-r1 and deepseek-ai-DeepSeek-V3.1.
- `gpt_oss`: harmony messages, `<|channel|>NAME to=functions.f <|constrain|>json<|message|>{..}<|call|>`; the channel
  `analysis` is thought, others without a recipient are text. openai/harmony, docs/format.md; template
  openai-gpt-oss-120b.
- `json`: the answer begins with a call or a list of calls, `{"name": .., "arguments": {..}}`, as a grammar forces it.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import string
from collections.abc import Callable, Collection, Generator
from hashlib import sha256
from typing import Literal, NoReturn, TypeAlias, get_args

from msgspec import Struct

ToolFormat: TypeAlias = Literal["hermes", "llama3_json", "mistral", "deepseek", "gpt_oss", "json"]
FORMATS: tuple[ToolFormat, ...] = get_args(ToolFormat)

MAX_ATOM_CHARS = 1024  # of a key, a name, a header, a number: longer ones are no part of a call

# What marks a call. Engines that hide special tokens hide these too where the model's tokenizer has them as such.
_CALLS_BEGIN, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL_BEGIN, _CALL_SEP, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_START, _CHANNEL, _CONSTRAIN, _MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")

MARKERS: dict[ToolFormat, tuple[str, ...]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "llama3_json": (),  # its `<|python_tag|>` may be left out
    "mistral": ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    "deepseek": (_CALLS_BEGIN, _CALLS_END, _CALL_BEGIN, _CALL_SEP, _CALL_END),
    "gpt_oss": (_START, _CHANNEL, _CONSTRAIN, _MESSAGE, *_ENDS),
    "json": (),
}
_PYTHON_TAG = "<|python_tag|>"
_ALPHANUMERIC = string.ascii_letters + string.digits
TOOL_TOKENS = frozenset({_PYTHON_TAG}.union(*MARKERS.values()))


def format_of(template: str) -> ToolFormat | None:
    """The format that a chat template teaches its model, by the markers in it; None where it is none of ours.

    Some have the markers and put something other than JSON between them: `<function=..>` (Qwen3-Coder, Nemotron),
    `<arg_key>` (GLM), `<invoke ..>` (MiniMax).
    """
    if any(mark in template for mark in ("<function=", "<arg_key>", "<invoke")):
        return None
    if _CALL_BEGIN in template:
        return "deepseek"
    if _CHANNEL in template and "functions." in template:
        return "gpt_oss"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template:
        return "hermes"
    if _PYTHON_TAG in template or ('"parameters": ' in template and "<|start_header_id|>ipython" in template):
        return "llama3_json"
    return None


def new_call_id(tool_format: ToolFormat | None = None) -> str:
    """A fresh id, in the shape that the model's template wants to see again."""
    fresh = f"call_{secrets.token_hex(12)}"
    return mistral_id(fresh) if tool_format == "mistral" else fresh


def mistral_id(call_id: str) -> str:
    """The id in Mistral's shape, nine letters or digits; the same one for the same id."""
    if re.fullmatch("[a-zA-Z0-9]{9}", call_id):
        return call_id
    number = int.from_bytes(sha256(call_id.encode()).digest())
    return "".join(_ALPHANUMERIC[number // 62**place % 62] for place in range(9))


# ------------------------------------------------------------------------------------------------------------ events


class Said(Struct, frozen=True):
    text: str


class Thought(Struct, frozen=True):
    text: str


class CallBegun(Struct, frozen=True):
    index: int
    id: str
    name: str


class Arguments(Struct, frozen=True):
    index: int
    text: str  # what is new of them


Event: TypeAlias = Said | Thought | CallBegun | Arguments


# ------------------------------------------------------------------------------------------------------------ parser


class _NoCall(Exception):
    """What was read cannot be a call, or is none any more."""


class _Over(Exception):
    """The text ended in the middle of something."""


_Steps: TypeAlias = Generator[None, None, None]

_SPACE = re.compile(r"[ \t\r\n]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')  # what needs no look inside a JSON string
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_ESCAPE_BEGUN = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_SCALAR_CHARS = re.compile(r"[-+.0-9A-Za-z_]*")
_NAME = re.compile(r"[-.\w]+")
_WORDS = re.compile(r"[^<\[{]*")
_LINE = re.compile(r"[^\n<`{]*")
_RECIPIENT = re.compile(r"\bto=([-.\w]+)")
_CLOSER = {"{": "}", "[": "]"}


class ToolText:
    """Takes the calls out of one answer.

    Inside, each format is a coroutine that reads on from where it is and pauses where the text so far ends. What a
    coroutine takes is kept as `_read` until it is known what it was.
    """

    def __init__(
        self,
        tool_format: ToolFormat,
        names: Collection[str],
        *,
        only_first: bool = False,
        new_id: Callable[[], str] | None = None,
    ) -> None:
        """`only_first`: the answer is over (`is_over`) once a first call is complete."""
        self._names = frozenset(names)
        self._only_first = only_first
        self._new_id = new_id or (lambda: new_call_id(tool_format))
        self._text = ""
        self._at = 0
        self._has_ended = False
        self._events: list[Event] = []
        self._read: list[str] = []  # of something undecided; it becomes text if it is no call
        self._space: list[str] = []  # white space that is text only if no call lies beside it
        self._is_beside_call = False
        self._arguments: list[str] | None = None  # of the open call, not yet in an event
        self._num_calls = 0
        self.num_complete = 0
        self.is_over = False
        self._steps = self._run(_READERS[tool_format])

    def feed(self, text: str) -> list[Event]:
        """What `text` makes certain."""
        if self.is_over or not text:
            return []
        self._text, self._at = self._text[self._at :] + text, 0
        return self._step()

    def finish(self) -> list[Event]:
        """The text is over: what was undecided."""
        if self.is_over:
            return []
        self._has_ended = True
        events = self._step()
        self.is_over = True
        return events

    def _step(self) -> list[Event]:
        next(self._steps, None)
        self._hand_over_arguments()
        events, self._events = self._events, []
        return events

    def _run(self, reader: Callable[[ToolText], _Steps]) -> _Steps:
        try:
            yield from reader(self)
            yield from self._say_the_rest()
        except _Over:
            self._end_abruptly()
        except _Enough:
            self.is_over = True
        if self._space and not self._is_beside_call:
            self._events.append(Said("".join(self._space)))

    def _say_the_rest(self) -> _Steps:
        while True:
            self._say(self._rest())
            if self._has_ended:
                return
            yield

    def _end_abruptly(self) -> None:
        """The end of the text, wherever it came: a call that has begun keeps what there is of it, the rest is text."""
        if self._arguments is not None:
            self._arguments.append(self._rest())
            self._close_arguments()
        else:
            self._read.append(self._rest())
            self._take_back()

    def _rest(self) -> str:
        rest, self._at = self._text[self._at :], len(self._text)
        return rest

    # ------------------------------------------------------------------------------------------------------------ out

    def _say(self, text: str) -> None:
        """Text goes out but for the white space at its end, which waits for what follows."""
        kept = text.rstrip()
        if not kept:
            self._space.append(text)
            return
        self._events.append(Said("".join(self._space) + kept))
        self._space = [text[len(kept) :]]
        self._is_beside_call = False

    def _think(self, text: str) -> None:
        if text:
            self._events.append(Thought(text))

    def _take_back(self) -> None:
        """What was read is no call after all."""
        read, self._read = "".join(self._read), []
        self._say(read)

    def _begin_call(self, name: str) -> None:
        self._read = []
        self._space = []
        self._is_beside_call = True
        self._events.append(CallBegun(self._num_calls, self._new_id(), name))
        self._arguments = []

    def _hand_over_arguments(self) -> None:
        if text := "".join(self._arguments or ()):
            self._events.append(Arguments(self._num_calls, text))
            self._arguments = []

    def _close_arguments(self) -> None:
        """No more of them: whatever comes next is not part of the call."""
        self._hand_over_arguments()
        self._arguments = None
        self._num_calls += 1

    def _complete_call(self) -> None:
        self._close_arguments()
        self.num_complete += 1
        if self._only_first:
            raise _Enough

    def _call_at_once(self, name: str, arguments: str) -> None:
        self._begin_call(name)
        self._arguments = [arguments]
        self._complete_call()

    # ------------------------------------------------------------------------------------------------------------- in

    def _advance(self, to: int) -> str:
        """Take the text up to `to`: into the open call's arguments, or among what is undecided."""
        taken, self._at = self._text[self._at : to], to
        if taken:
            (self._read if self._arguments is None else self._arguments).append(taken)
        return taken

    def _no_call(self) -> NoReturn:
        raise _NoCall

    def _more(self) -> _Steps:
        if self._has_ended:
            raise _Over
        yield

    def _skip_space(self) -> Generator[None, None, str]:
        """Past white space, to the next character. It is not taken."""
        while True:
            space = _SPACE.match(self._text, self._at)
            assert space is not None
            self._advance(space.end())
            if self._at < len(self._text):
                return self._text[self._at]
            yield from self._more()

    def _take(self, *words: str) -> Generator[None, None, str | None]:
        """The one of `words` that comes next; the first of them, where one begins with another."""
        for word in words:
            while not self._text.startswith(word, self._at):
                if self._has_ended or not word.startswith(self._text[self._at :]):
                    break
                yield
            else:
                self._advance(self._at + len(word))
                return word
        return None

    def _atom(self, pattern: re.Pattern[str]) -> Generator[None, None, str]:
        """The longest match of a run of characters, once it is known where it ends."""
        while True:
            found = pattern.match(self._text, self._at)
            end = found.end() if found else self._at
            if end - self._at > MAX_ATOM_CHARS:
                self._no_call()
            if end < len(self._text) or self._has_ended:
                return self._advance(end)
            yield

    def _text_until(
        self, *markers: str, say: Callable[[ToolText, str], None] | None = None
    ) -> Generator[None, None, str | None]:
        """Say the text before the first of `markers`, which is next then; None where there is none to the end."""
        pattern = re.compile("|".join(map(re.escape, markers)))
        say = say or ToolText._say
        while True:
            found = pattern.search(self._text, self._at)
            end = found.start() if found else len(self._text) - (0 if self._has_ended else self._num_unsure(markers))
            say(self, self._text[self._at : end])
            self._at = end
            if found or self._has_ended:
                return found.group() if found else None
            yield

    def _num_unsure(self, markers: tuple[str, ...]) -> int:
        """How many characters at the end may be the beginning of a marker."""
        longest = min(max(map(len, markers)) - 1, len(self._text) - self._at)
        for length in range(longest, 0, -1):
            if any(marker.startswith(self._text[-length:]) for marker in markers):
                return length
        return 0

    # ----------------------------------------------------------------------------------------------------------- JSON

    def _value(self) -> _Steps:
        """Past one JSON value, as far as it is valid; what is taken is taken no later than it is known to be."""
        open_ones: list[str] = []
        while True:
            char = yield from self._skip_space()
            if char in "{[":
                self._advance(self._at + 1)
                open_ones.append(char)
                following = yield from self._skip_space()
                if following != _CLOSER[char]:
                    if char == "{":
                        yield from self._key()
                    continue
            elif char == '"':
                yield from self._string()
            else:
                yield from self._scalar()
            while open_ones:  # behind a value
                char = yield from self._skip_space()
                if char == _CLOSER[open_ones[-1]]:
                    self._advance(self._at + 1)
                    open_ones.pop()
                elif char == ",":
                    self._advance(self._at + 1)
                    if open_ones[-1] == "{":
                        yield from self._key()
                    break
                else:
                    self._no_call()
            if not open_ones:
                return

    def _key(self) -> _Steps:
        if (yield from self._skip_space()) != '"':
            self._no_call()
        yield from self._string()
        if (yield from self._skip_space()) != ":":
            self._no_call()
        self._advance(self._at + 1)

    def _string(self) -> _Steps:
        """Past a string, whose first quote is next."""
        self._advance(self._at + 1)
        while True:
            if plain := _PLAIN.match(self._text, self._at):
                self._advance(plain.end())
            if self._at == len(self._text):
                yield from self._more()
            elif self._text[self._at] == '"':
                self._advance(self._at + 1)
                return
            elif escape := _ESCAPE.match(self._text, self._at):
                self._advance(escape.end())
            elif (begun := _ESCAPE_BEGUN.match(self._text, self._at)) and begun.end() == len(self._text):
                yield from self._more()
            else:
                self._no_call()

    def _scalar(self) -> _Steps:
        while True:
            run = _SCALAR_CHARS.match(self._text, self._at)
            assert run is not None
            if run.end() - self._at > MAX_ATOM_CHARS:
                self._no_call()
            if run.end() < len(self._text):
                break
            yield from self._more()
        if not _SCALAR.fullmatch(run.group()):
            self._no_call()
        self._advance(run.end())

    def _short_string(self) -> Generator[None, None, str]:
        """A whole string that is a key or a name."""
        if (yield from self._skip_space()) != '"':
            self._no_call()
        mark = len(self._read)
        yield from self._string()
        written = "".join(self._read[mark:])
        if len(written) > MAX_ATOM_CHARS:
            self._no_call()
        decoded: str = json.loads(written)
        return decoded

    # ---------------------------------------------------------------------------------------------------------- calls

    def _call_object(self, *, needs_arguments: bool) -> _Steps:
        """`{"name": .., "arguments": {..}}`, its keys in any order. `parameters` is the same, `id` and `type` are left
        aside, and any other key makes it no call.
        """
        if (yield from self._skip_space()) != "{":
            self._no_call()
        self._advance(self._at + 1)
        name, early, has_called = None, None, False
        keys: set[str] = set()
        while True:
            key = yield from self._short_string()
            key = "arguments" if key == "parameters" else key
            if (yield from self._skip_space()) != ":" or key in keys:
                self._no_call()
            self._advance(self._at + 1)
            keys.add(key)
            if key == "name":
                name = yield from self._short_string()
                self._check_name(name)
                if early is not None:
                    self._call_at_once(name, early)
                    has_called = True
            elif key == "arguments" and name is not None:
                has_called = yield from self._arguments_of(name)
            elif key == "arguments":
                early = yield from self._early_arguments()
            elif key in {"id", "type"}:
                yield from self._short_string()
            else:
                self._no_call()
            following = yield from self._skip_space()
            if following != ",":
                break
            self._advance(self._at + 1)
        if not has_called:
            if following != "}" or name is None or (needs_arguments and "arguments" not in keys):
                self._no_call()
            self._advance(self._at + 1)
            self._call_at_once(name, "{}")
        elif following == "}":
            self._advance(self._at + 1)
        # A model may forget the last brace: the call is complete without it.

    def _check_name(self, name: str) -> None:
        if name not in self._names:
            self._no_call()

    def _arguments_of(self, name: str) -> Generator[None, None, bool]:
        """The arguments, which come next. False for null, which leaves open whether this is a call."""
        if (yield from self._skip_space()) != "{":
            written = yield from self._early_arguments()
            if written is None:
                return False
            self._call_at_once(name, written)
            return True
        self._begin_call(name)
        try:
            yield from self._value()
        except _NoCall:
            self._close_arguments()
            raise
        self._complete_call()
        return True

    def _early_arguments(self) -> Generator[None, None, str | None]:
        """The whole of arguments that cannot go out as they are written: the name is missing, or they are a string."""
        char = yield from self._skip_space()
        if char not in '{"n':
            self._no_call()
        mark = len(self._read)
        yield from self._value()
        written = "".join(self._read[mark:])
        if char == "{":
            return written
        decoded = json.loads(written)
        if decoded is None:
            return None
        if not _is_object(decoded):
            self._no_call()
        text: str = decoded
        return text

    def _calls(self, *, needs_arguments: bool) -> _Steps:
        """One call, a list of them, or several in a row."""
        first = yield from self._skip_space()
        if first == "[":
            self._advance(self._at + 1)
        while True:
            yield from self._call_object(needs_arguments=needs_arguments)
            self._read = []
            following = yield from self._skip_space()
            if following in ",;":
                self._advance(self._at + 1)
            elif following != "{":
                break
        if first == "[" and following == "]":
            self._advance(self._at + 1)
            self._read = []

    # -------------------------------------------------------------------------------------------------------- formats

    def _hermes(self) -> _Steps:
        begin, end = MARKERS["hermes"]
        while (yield from self._text_until(begin)):
            with contextlib.suppress(_NoCall):
                yield from self._take(begin)
                yield from self._calls(needs_arguments=False)
                if (yield from self._take(end)):
                    self._read = []
            self._take_back()

    def _llama3_json(self) -> _Steps:
        while (yield from self._text_until("{", _PYTHON_TAG)):
            with contextlib.suppress(_NoCall):
                yield from self._take(_PYTHON_TAG)
                yield from self._calls(needs_arguments=True)
            self._take_back()

    def _json(self) -> _Steps:
        with contextlib.suppress(_NoCall):
            yield from self._calls(needs_arguments=True)
        self._take_back()

    def _mistral(self) -> _Steps:
        begin, call_id, args = MARKERS["mistral"]
        while (yield from self._text_until(begin)):
            with contextlib.suppress(_NoCall):
                yield from self._take(begin)
                if (yield from self._skip_space()) in "[{":
                    yield from self._calls(needs_arguments=False)
                else:
                    name = yield from self._atom(_NAME)
                    if (yield from self._take(call_id)):
                        yield from self._atom(_NAME)
                    if not (yield from self._take(args)):
                        self._no_call()
                    yield from self._object_of(name)
            self._take_back()

    def _object_of(self, name: str) -> _Steps:
        """Arguments that are written bare, behind the name."""
        self._check_name(name)
        if (yield from self._skip_space()) != "{":
            self._no_call()
        yield from self._arguments_of(name)

    def _deepseek(self) -> _Steps:
        while (yield from self._text_until(_CALLS_BEGIN, _CALL_BEGIN)):
            with contextlib.suppress(_NoCall):
                if (yield from self._take(_CALLS_BEGIN)):
                    yield from self._skip_space()
                if not (yield from self._take(_CALL_BEGIN)):
                    self._no_call()
                yield from self._deepseek_call()
                yield from self._skip_space()
                if (yield from self._take(_CALLS_END)):
                    self._read = []
            self._take_back()

    def _deepseek_call(self) -> _Steps:
        name = yield from self._atom(_WORDS)
        if not (yield from self._take(_CALL_SEP)):
            self._no_call()
        if (yield from self._skip_space()) != "{":  # V3 and R1: what was read is the type
            name = yield from self._atom(_LINE)
            yield from self._skip_space()
            yield from self._take("```json", "```")
        yield from self._object_of(name.strip())
        yield from self._skip_space()
        yield from self._take("```")
        yield from self._skip_space()
        if (yield from self._take(_CALL_END)):
            self._read = []

    def _gpt_oss(self) -> _Steps:
        """Message after message. The prompt ends with the `<|start|>assistant` of the first."""
        marker: str | None = _START
        while marker:
            if marker == _START:
                with contextlib.suppress(_NoCall):
                    yield from self._message()
                self._take_back()
            if marker := (yield from self._text_until(_START, *_ENDS)):
                yield from self._take(marker)
                self._read = []

    def _message(self) -> _Steps:
        header = ""
        while not header.endswith(_MESSAGE):
            header += yield from self._atom(_WORDS)
            marker = yield from self._take(_CHANNEL, _CONSTRAIN, _MESSAGE)
            if marker is None or len(header) > MAX_ATOM_CHARS:
                self._no_call()
            header += marker
        if recipient := _RECIPIENT.search(header):
            yield from self._object_of(recipient[1].removeprefix("functions."))
        else:
            self._read = []
            say = ToolText._think if f"{_CHANNEL}analysis" in header else ToolText._say
            yield from self._text_until(_START, *_ENDS, say=say)


class _Enough(Exception):
    """The first call is complete, and no other is wanted."""


def _is_object(text: object) -> bool:
    if not isinstance(text, str):
        return False
    try:
        text.encode()  # half a surrogate pair cannot go out
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


_READERS: dict[ToolFormat, Callable[[ToolText], _Steps]] = {
    "hermes": ToolText._hermes,
    "llama3_json": ToolText._llama3_json,
    "mistral": ToolText._mistral,
    "deepseek": ToolText._deepseek,
    "gpt_oss": ToolText._gpt_oss,
    "json": ToolText._json,
}
