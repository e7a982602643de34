"""Text for OpenVINO's server: prompts into token ids, token ids into text as they come, stop strings; and how the
model writes tool calls and thoughts.

Detokenising goes by bytes: the tokenizer's vocabulary gives the bytes of every token, so a new token costs a lookup and
a character is held back exactly until its last byte is there. Asking the library to decode costs 45 µs a token instead,
and turns half characters into nothing.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adapters.errors import EngineUnavailable
from adapters.models.chat_template import ChatTemplate
from adapters.tools.formats import ToolFormat
from adapters.tools.think_text import ReasoningParser, reads_thoughts
from adapters.tools.tool_calls import ToolParser, usable_format

_TRIAL_TEXT = "Hello, wörld: 漢字 and 😀, 42!"


class ModelText:
    """The text side of a model. `pieces[i]` is what token i adds to a text, in bytes; nothing for special tokens."""

    def __init__(
        self,
        tokenizer: Any,
        template: str | None = None,
        *,
        tool_parser: ToolParser = "auto",
        reasoning_parser: ReasoningParser = "auto",
    ) -> None:
        self._tokenizer = tokenizer
        self.pieces, self._specials = _pieces(tokenizer)
        if b"".join(self.pieces[token] for token in self.encode(_TRIAL_TEXT)) != _TRIAL_TEXT.encode():
            raise EngineUnavailable("OpenVINO's vocabulary for this model does not spell text byte by byte.")
        source = template or tokenizer.get_original_chat_template()
        tokens = {"bos_token": tokenizer.get_bos_token(), "eos_token": tokenizer.get_eos_token()}
        self.template = ChatTemplate(source, **tokens) if source else None
        self.tool_format: ToolFormat | None = None
        self.thinks_aloud = False
        if self.template is not None:
            hidden = {special.decode("utf-8", "replace") for special in self._specials.values()}
            self.tool_format = usable_format(tool_parser, self.template, hidden)
            self.thinks_aloud = reads_thoughts(reasoning_parser, self.template, hidden)

    @classmethod
    def load(
        cls, model: Path, template: Path | None, *, tool_parser: ToolParser, reasoning_parser: ReasoningParser
    ) -> ModelText:
        """`template` is a Jinja file that replaces the model's own chat template."""
        import openvino_genai

        return cls(
            openvino_genai.Tokenizer(str(model)),
            template.read_text("utf-8") if template else None,
            tool_parser=tool_parser,
            reasoning_parser=reasoning_parser,
        )

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        if not text:
            return []  # the library answers one empty text with an id that is none
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).input_ids.data[0].tolist()
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens as they are spelled."""
        return b"".join([self.pieces[token] or self._specials.get(token, b"") for token in ids]).decode(
            "utf-8", "replace"
        )


def library_version() -> str:
    import openvino_genai

    version: str = openvino_genai.__version__
    return version


def _pieces(tokenizer: Any) -> tuple[list[bytes], dict[int, bytes]]:
    """The bytes of every token, none for special ones, and how those are spelled."""
    vocabulary: dict[bytes, int] = tokenizer.get_vocab()
    pieces = [b""] * (max(vocabulary.values()) + 1)
    for piece, token in vocabulary.items():
        pieces[token] = piece
    every = [[token] for token in range(len(pieces))]
    without, with_special = tokenizer.decode(every, True), tokenizer.decode(every, False)
    specials = {
        token: special.encode()
        for token, (shown, special) in enumerate(zip(without, with_special, strict=True))
        if shown == "" and special != ""
    }
    return [b"" if token in specials else piece for token, piece in enumerate(pieces)], specials


class TextStream:
    """Turns the token ids of one choice into text that can be sent: whole characters, and nothing of a stop string."""

    def __init__(self, pieces: Sequence[bytes], stops: Sequence[str] = ()) -> None:
        self._pieces = pieces
        self._stops = stops
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.stopped = False

    def feed(self, token_ids: Sequence[int]) -> str:
        """What became certain. Sets `stopped` when a stop string is complete; what follows it is dropped."""
        return self._release(self._decoder.decode(b"".join([self._pieces[token] for token in token_ids])))

    def close(self) -> str:
        """What was held back, when the choice ends otherwise than by a stop string."""
        if self.stopped:
            return ""
        text = self._release(self._decoder.decode(b"", final=True))
        return text if self.stopped else text + self._held

    def _release(self, text: str) -> str:
        if not self._stops:
            return text
        text = self._held + text
        ends = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            self.stopped = True
            return text[: min(ends)]
        cut = len(text) - _num_held_back(text, self._stops)
        self._held = text[cut:]
        return text[:cut]


def _num_held_back(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end may be the beginning of a stop string."""
    longest = max(map(len, stops)) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops):
            return length
    return 0
