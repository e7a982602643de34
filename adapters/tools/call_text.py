"""A text with tool calls in it, read piece by piece: what every format has in common. Pure: text in, events out.

A format (tools/tool_text.py) is a coroutine over the methods here. They take text as far as it is certain to belong to
a call, give out what is certain, and take back what turns out to be none.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator
from typing import NoReturn, TypeAlias

from msgspec import Struct

MAX_ATOM_CHARS = 1024  # of a key, a name, a header, a number: longer ones are no part of a call


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


class NoCall(Exception):
    """What was read cannot be a call, or is none any more."""


class _Over(Exception):
    """The text ended in the middle of something."""


class _Enough(Exception):
    """The first call is complete, and no other is wanted."""


Steps: TypeAlias = Generator[None, None, None]

_SPACE = re.compile(r"[ \t\r\n]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')  # what needs no look inside a JSON string
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_ESCAPE_BEGUN = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_SCALAR_CHARS = re.compile(r"[-+.0-9A-Za-z_]*")
_CLOSER = {"{": "}", "[": "]"}


class CallText(ABC):
    """Reads one answer, whose format is that of the subclass: a coroutine, which reads on from where it is and pauses
    where the text so far ends. What it takes is kept as `_read` until it is known what it was.
    """

    def __init__(
        self,
        names: Collection[str],
        *,
        only_first: bool,
        new_id: Callable[[], str],
    ) -> None:
        """`only_first`: the answer is over (`is_over`) once a first call is complete."""
        self._names = frozenset(names)
        self._only_first = only_first
        self._new_id = new_id
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
        self._steps = self._run()

    @abstractmethod
    def _answer(self) -> Steps:
        """The format: say what is text, begin and complete what is a call. What it leaves is text."""

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

    def _run(self) -> Steps:
        try:
            yield from self._answer()
            yield from self._say_the_rest()
        except _Over:
            self._end_abruptly()
        except _Enough:
            self.is_over = True
        if self._space and not self._is_beside_call:
            self._events.append(Said("".join(self._space)))

    def _say_the_rest(self) -> Steps:
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
        raise NoCall

    def _more(self) -> Steps:
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
                if self._has_ended or not word.startswith(self._text[self._at : self._at + len(word)]):
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

    def _text_until(self, *markers: str, say: Callable[[str], None] | None = None) -> Generator[None, None, str | None]:
        """Say the text before the first of `markers`, which is next then; None where there is none to the end."""
        pattern = re.compile("|".join(map(re.escape, markers)))
        say = say or self._say
        while True:
            found = pattern.search(self._text, self._at)
            end = found.start() if found else len(self._text) - (0 if self._has_ended else self._num_unsure(markers))
            say(self._text[self._at : end])
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

    def _value(self) -> Steps:
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

    def _key(self) -> Steps:
        if (yield from self._skip_space()) != '"':
            self._no_call()
        yield from self._string()
        if (yield from self._skip_space()) != ":":
            self._no_call()
        self._advance(self._at + 1)

    def _string(self) -> Steps:
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

    def _scalar(self) -> Steps:
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

    def _call_object(self, *, needs_arguments: bool) -> Steps:
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
        except NoCall:
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

    def _calls(self, *, needs_arguments: bool) -> Steps:
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

    def _object_of(self, name: str) -> Steps:
        """Arguments that are written bare, behind the name."""
        self._check_name(name)
        if (yield from self._skip_space()) != "{":
            self._no_call()
        yield from self._arguments_of(name)


def _is_object(text: object) -> bool:
    if not isinstance(text, str):
        return False
    try:
        text.encode()  # half a surrogate pair cannot go out
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
