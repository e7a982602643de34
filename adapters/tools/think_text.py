"""What a model thinks aloud before it answers, taken out of its text. Pure and incremental: text in, events out.

    parser = ThinkText(begins_inside=False)
    for piece in pieces:
        thought, said = parser.feed(piece)
    thought, said = parser.finish()

The same text gives the same answer however it is cut. A thought stands between `<think>` and `</think>`, and only at
the beginning: later marks are text. Some chat templates write the first mark themselves (`begins_inside`); then all is
thought up to the second mark, and a model that writes the first one again is forgiven. Nothing is lost but the white
space on either side of a mark. Whoever looks for tool calls looks at what is left: a call in a thought is none.

Source: the chat templates of Qwen 3, QwQ, DeepSeek R1 and its distillations (models/templates in llama.cpp, release
b11434).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import aclosing
from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec

from adapters.errors import EngineUnavailable
from adapters.types import ChatRequest, Chunk, GenerateRequest

if TYPE_CHECKING:
    from adapters.models.chat_template import ChatTemplate

OPEN, CLOSE = "<think>", "</think>"
ReasoningParser: TypeAlias = Literal["auto", "none", "think"]  # an engine's option: `auto` asks the chat template
Parts: TypeAlias = tuple[str, str]  # of the thought, and of the answer


class ThinkText:
    """Parts thought and answer of one choice."""

    def __init__(self, *, begins_inside: bool = False) -> None:
        self._begins_inside = begins_inside
        self._held = ""  # what is not certain yet: white space, and what may be the beginning of a mark
        self._step: Callable[[bool], Parts | None] = self._begin

    def feed(self, text: str) -> Parts:
        """What `text` makes certain."""
        self._held += text
        return self._advance(is_last=False)

    def finish(self) -> Parts:
        """The text is over: what was undecided."""
        return self._advance(is_last=True)

    def _advance(self, *, is_last: bool) -> Parts:
        thought = said = ""
        while (parts := self._step(is_last)) is not None:
            thought, said = thought + parts[0], said + parts[1]
        return thought, said

    # Each step takes what it can off `_held`; None where it cannot go on.

    def _begin(self, is_last: bool) -> Parts | None:
        text = self._held.lstrip()
        if text.startswith(OPEN):
            self._held, self._step = text[len(OPEN) :], self._begin_thought
        elif OPEN.startswith(text) and not is_last:
            return None
        else:
            self._step = self._begin_thought if self._begins_inside else self._answer
        return "", ""

    def _begin_thought(self, is_last: bool) -> Parts | None:
        self._held = self._held.lstrip()
        if not self._held:
            return None
        self._step = self._think
        return "", ""

    def _think(self, is_last: bool) -> Parts | None:
        thought, mark, rest = self._held.partition(CLOSE)
        if mark:
            self._held, self._step = rest, self._begin_answer
            return thought.rstrip(), ""
        sure = len(self._held) if is_last else _num_sure(self._held)
        thought, self._held = self._held[:sure], self._held[sure:]
        return (thought, "") if thought else None

    def _begin_answer(self, is_last: bool) -> Parts | None:
        self._held = self._held.lstrip()
        if not self._held:
            return None
        self._step = self._answer
        return "", ""

    def _answer(self, is_last: bool) -> Parts | None:
        said, self._held = self._held, ""
        return ("", said) if said else None


def _num_sure(thought: str) -> int:
    """The length of what is thought whatever follows: neither a beginning of the mark nor white space before one."""
    overlap = next((n for n in range(len(CLOSE) - 1, 0, -1) if thought.endswith(CLOSE[:n])), 0)
    return len(thought[: len(thought) - overlap].rstrip())


class ThinkChunks:
    """The chunks of one request, with thoughts out of the text of those that an engine gives."""

    def __init__(self, prompt: str, *, num_choices: int) -> None:
        begins_inside = prompt.rstrip().endswith(OPEN)
        self._parsers = [ThinkText(begins_inside=begins_inside) for _ in range(num_choices)]

    def feed(self, chunk: Chunk) -> Chunk | None:
        """What of `chunk` may go out now; None for nothing."""
        if chunk.usage is not None:
            return chunk
        parser = self._parsers[chunk.index]
        thought, said = parser.feed(chunk.text)
        if chunk.finish_reason is not None:
            last_thought, last_said = parser.finish()
            thought, said = thought + last_thought, said + last_said
        elif not (thought or said or chunk.reasoning or chunk.logprobs or chunk.tool_calls):
            return None
        return msgspec.structs.replace(chunk, text=said, reasoning=chunk.reasoning + thought)


def reads_thoughts(wanted: ReasoningParser, template: ChatTemplate, hidden: Collection[str] = ()) -> bool:
    """Whether the thoughts of a model with this template are looked for. `hidden` are the special tokens, for an engine
    that leaves them out of its text. Raises `EngineUnavailable` where the wanted parser cannot work.
    """
    if wanted == "none" or (wanted == "auto" and CLOSE not in template.source):
        return False
    if {OPEN, CLOSE}.isdisjoint(hidden):
        return True
    if wanted == "auto":
        return False
    raise EngineUnavailable(
        "reasoning_parser 'think' cannot work: the engine hides the special tokens that mark a thought; leave it out."
    )


def thoughts_of(request: GenerateRequest, prompt: str, *, must_call: bool = False) -> ThinkChunks | None:
    """The reader of an answer to `prompt`; None where the answer is no chat's, or a grammar leaves no place for a
    thought, as it does for a forced call (`must_call`) or a wanted format.
    """
    if not isinstance(request, ChatRequest) or must_call:
        return None
    if isinstance(request.response_format, dict) and request.response_format.get("type") != "text":
        return None
    return ThinkChunks(prompt, num_choices=request.num_choices)


async def with_thoughts(chunks: AsyncGenerator[Chunk, None], thoughts: ThinkChunks) -> AsyncGenerator[Chunk, None]:
    """A stream with its thoughts."""
    async with aclosing(chunks):
        async for chunk in chunks:
            if (passed := thoughts.feed(chunk)) is not None:
                yield passed
