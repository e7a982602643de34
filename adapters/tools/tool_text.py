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

The formats and their sources are in tools/formats.py.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection

from adapters.tools.call_text import MAX_ATOM_CHARS, CallText, NoCall, Steps
from adapters.tools.formats import (
    CALL_BEGIN,
    CALL_END,
    CALL_SEP,
    CALLS_BEGIN,
    CALLS_END,
    CHANNEL,
    CONSTRAIN,
    ENDS,
    MARKERS,
    MESSAGE,
    PYTHON_TAG,
    START,
    ToolFormat,
    new_call_id,
)

_NAME = re.compile(r"[-.:/\w]+")
_WORDS = re.compile(r"[^<\[{]*")
_LINE = re.compile(r"[^\n<`{]*")
_RECIPIENT = re.compile(r"\bto=([-.:/\w]+)")


class ToolText(CallText):
    """Takes the calls out of one answer."""

    def __init__(
        self,
        tool_format: ToolFormat,
        names: Collection[str],
        *,
        only_first: bool = False,
        new_id: Callable[[], str] | None = None,
    ) -> None:
        """`only_first`: the answer is over (`is_over`) once a first call is complete."""
        super().__init__(names, only_first=only_first, new_id=new_id or (lambda: new_call_id(tool_format)))
        self._format = tool_format

    def _answer(self) -> Steps:
        return _READERS[self._format](self)

    def _hermes(self) -> Steps:
        begin, end = MARKERS["hermes"]
        while (yield from self._text_until(begin)):
            with contextlib.suppress(NoCall):
                yield from self._take(begin)
                yield from self._calls(needs_arguments=False)
                if (yield from self._take(end)):
                    self._read = []
            self._take_back()

    def _llama3_json(self) -> Steps:
        while (yield from self._text_until("{", PYTHON_TAG)):
            with contextlib.suppress(NoCall):
                yield from self._take(PYTHON_TAG)
                yield from self._calls(needs_arguments=True)
            self._take_back()

    def _json(self) -> Steps:
        with contextlib.suppress(NoCall):
            yield from self._calls(needs_arguments=True)
        self._take_back()

    def _mistral(self) -> Steps:
        begin, call_id, args = MARKERS["mistral"]
        while (yield from self._text_until(begin)):
            with contextlib.suppress(NoCall):
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

    def _deepseek(self) -> Steps:
        while (yield from self._text_until(CALLS_BEGIN, CALL_BEGIN)):
            with contextlib.suppress(NoCall):
                if (yield from self._take(CALLS_BEGIN)):
                    yield from self._skip_space()
                if not (yield from self._take(CALL_BEGIN)):
                    self._no_call()
                yield from self._deepseek_call()
                yield from self._skip_space()
                if (yield from self._take(CALLS_END)):
                    self._read = []
            self._take_back()

    def _deepseek_call(self) -> Steps:
        name = yield from self._atom(_WORDS)
        if not (yield from self._take(CALL_SEP)):
            self._no_call()
        if (yield from self._skip_space()) != "{":  # V3 and R1: what was read is the type
            name = yield from self._atom(_LINE)
            yield from self._skip_space()
            yield from self._take("```json", "```")
        yield from self._object_of(name.strip())
        yield from self._skip_space()
        yield from self._take("```")
        yield from self._skip_space()
        if (yield from self._take(CALL_END)):
            self._read = []

    def _gpt_oss(self) -> Steps:
        """Message after message. The prompt ends with the `<|start|>assistant` of the first."""
        marker: str | None = START
        while marker:
            if marker == START:
                with contextlib.suppress(NoCall):
                    yield from self._message()
                self._take_back()
            if marker := (yield from self._text_until(START, *ENDS)):
                yield from self._take(marker)
                self._read = []

    def _message(self) -> Steps:
        header = ""
        while not header.endswith(MESSAGE):
            header += yield from self._atom(_WORDS)
            marker = yield from self._take(CHANNEL, CONSTRAIN, MESSAGE)
            if marker is None or len(header) > MAX_ATOM_CHARS:
                self._no_call()
            header += marker
        if recipient := _RECIPIENT.search(header):
            yield from self._object_of(recipient[1].removeprefix("functions."))
        else:
            self._read = []
            say = self._think if f"{CHANNEL}analysis" in header else self._say
            yield from self._text_until(START, *ENDS, say=say)


_READERS: dict[ToolFormat, Callable[[ToolText], Steps]] = {
    "hermes": ToolText._hermes,
    "llama3_json": ToolText._llama3_json,
    "mistral": ToolText._mistral,
    "deepseek": ToolText._deepseek,
    "gpt_oss": ToolText._gpt_oss,
    "json": ToolText._json,
}
