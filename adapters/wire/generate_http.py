"""Engines with a text-in, text-out route of their own (TGI, SGLang, Triton): what their streams have in common.

    reader = GenerateReader("tgi", request, parse)       # parse: one event's JSON -> a Piece

- Text may come as what is new or as all so far (a piece says which); only what is new and final goes out.
- Stop strings are cut here too: an engine may leave them in, or not see one in the middle of a token. What might become
  one is held back. Once cut, the engine is left.
- Tool calls are text as well, and so is what a model thinks aloud: `text_reader` takes both out.
- `n` that an engine does not have is several generations at once (`choices_apart`).
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from typing import Protocol

import msgspec
from msgspec import UNSET, Raw, Struct

from adapters.errors import EngineProtocolError, GoodgateError, StreamInterrupted
from adapters.interleaving import interleaved
from adapters.tools.formats import ToolFormat
from adapters.tools.think_text import ThinkChunks, thoughts_of
from adapters.tools.tool_calls import CallChunks, Offer
from adapters.types import ChatRequest, Chunk, GenerateRequest, Usage
from adapters.wire.engine_client import Reader
from adapters.wire.sse import Event, EventSplitter
from adapters.wire.vocabulary import as_completion_logprobs, as_finish_reason, max_pieces
from adapters.wire.wire_errors import as_failure, stream_error

HALF_CHARACTER = "\ufffd"  # what detokenizers write for bytes whose character is not complete yet


class Piece(Struct, frozen=True, kw_only=True):
    """What one event says of one choice. `finish_reason` is the engine's own word; logprobs have chat's shape."""

    index: int = 0
    text: str = ""
    is_whole: bool = False  # `text` is all so far, not only what is new
    finish_reason: str | None = None
    failure: GoodgateError | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None  # of this choice so far, where the engine tells
    cached_tokens: int | None = None
    logprobs: Raw | None = None


class Answer:
    """The text of one choice on its way out: whole characters, and nothing of a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self._num_given = 0
        self._last_whole = 0
        self.text = ""  # all that went out
        self.num_events = 0
        self.num_pieces = 0  # events that brought text
        self.is_cut = False
        self.is_finished = False
        self.completion_tokens: int | None = None

    def add(self, text: str, *, is_whole: bool = False) -> None:
        self.num_events += 1
        if not is_whole:
            self._held += text
            self.num_pieces += bool(text)
            return
        self._held = text[self._num_given :]
        self.num_pieces += len(text) != self._last_whole
        self._last_whole = len(text)

    def take(self, *, is_last: bool) -> str:
        """What may go out now. A stop string cuts it, and everything that follows."""
        found = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if found:
            self.is_cut = True
            return self._give(min(found))
        return self._give(len(self._held) - (0 if is_last else self._num_unsure()))

    def _give(self, length: int) -> str:
        given, self._held = self._held[:length], "" if self.is_cut else self._held[length:]
        self._num_given += len(given)
        self.text += given
        return given

    def _num_unsure(self) -> int:
        """How much of the end may still change, or turn out to belong to a stop string."""
        sure = self._held.rstrip(HALF_CHARACTER)
        unsure = max((_overlap(sure, stop) for stop in self._stops), default=0)
        return len(self._held) - len(sure) + unsure

    @property
    def num_tokens(self) -> int:
        """The engine's count, or one for each piece: engines stream token by token."""
        return max(self.completion_tokens or 0, self.num_pieces)


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that `stop` begins with."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


Parse = Callable[[bytes], Piece]
Count = Callable[[str], int | None]


class _Mark(Struct):
    error: Raw = Raw(b"")


class GenerateReader:
    """One stream of a text route."""

    def __init__(
        self,
        engine: str,
        request: GenerateRequest,
        parse: Parse,
        *,
        ends_without_reason: bool = False,
        limit: int | None = None,
        prompt_tokens: int | None = None,
        count: Count = lambda _: None,
        on_unknown_reason: Callable[[], None] = lambda: None,
    ) -> None:
        """`ends_without_reason`: a clean end of the stream is the only sign of success, and `limit` tells which end it
        was. `prompt_tokens` and `count` stand in for an engine that counts nothing.
        """
        self._engine = engine
        self._request = request
        self._parse = parse
        self._ends_without_reason = ends_without_reason
        self._limit = limit
        self._count = count
        self._on_unknown_reason = on_unknown_reason
        self._splitter = EventSplitter(who=f"The engine {engine!r}")
        self._answers = [Answer(request.stop_strings) for _ in range(request.num_choices)]
        self._max_pieces = max_pieces(request)
        self._prompt_tokens = prompt_tokens
        self._cached_tokens: int | None = None
        self.num_chunks = 0
        self.is_done = False
        self.is_cut = False

    def feed(self, data: bytes) -> Iterator[Chunk]:
        """Chunks that `data` completes, lazily: an error that the engine reports comes after what preceded it."""
        return self._read(self._splitter.feed(data))

    def finish(self) -> list[Chunk]:
        rest = list(self._read(self._splitter.close()))
        for index, answer in enumerate(self._answers):
            if answer.is_finished:
                continue
            if not self._ends_without_reason or not answer.num_events:
                raise StreamInterrupted(f"The stream of the engine {self._engine!r} ended before its finish reason.")
            rest.append(self._last_chunk(index))
        return [*rest, Chunk(usage=self.account())]

    def account(self) -> Usage:
        counted = [self._count(answer.text) if answer.completion_tokens is None else None for answer in self._answers]
        completion_tokens = sum(
            answer.num_tokens if count is None else count for answer, count in zip(self._answers, counted, strict=True)
        )
        return Usage(self._prompt_tokens or 0, completion_tokens, self._cached_tokens)

    def _last_chunk(self, index: int) -> Chunk:
        """The end of a choice whose engine says only that it is over."""
        answer = self._answers[index]
        answer.is_finished = True
        reached = self._limit is not None and answer.num_tokens >= self._limit
        return Chunk(index=index, text=answer.take(is_last=True), finish_reason="length" if reached else "stop")

    def _read(self, events: list[Event]) -> Iterator[Chunk]:
        for event in events:
            if self.is_done or not event.data:
                continue
            if event.data.startswith(b"[DONE]"):
                self.is_done = True
            elif (chunk := self._read_event(event)) is not None:
                yield chunk

    def _read_event(self, event: Event) -> Chunk | None:
        try:
            if event.event == "error" or (b'"error"' in event.data and _tells_error(event.data)):
                raise stream_error(self._engine, event.data, has_begun=self.num_chunks > 0)
            piece = self._parse(event.data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise EngineProtocolError(
                f"The engine {self._engine!r} sent a stream event that is not as documented."
            ) from error
        if piece.failure is not None:
            raise as_failure(self._engine, piece.failure) if self.num_chunks else piece.failure
        if not 0 <= piece.index < len(self._answers):
            raise EngineProtocolError(f"The engine {self._engine!r} answered a choice that was not asked for.")
        return self._read_piece(piece, self._answers[piece.index])

    def _read_piece(self, piece: Piece, answer: Answer) -> Chunk | None:
        self._prompt_tokens = piece.prompt_tokens or self._prompt_tokens
        self._cached_tokens = self._cached_tokens if piece.cached_tokens is None else piece.cached_tokens
        if answer.is_finished:
            return None
        offset = len(answer.text)
        reason = as_finish_reason(self._engine, piece.finish_reason, self._on_unknown_reason)
        answer.add(piece.text, is_whole=piece.is_whole)
        answer.completion_tokens = piece.completion_tokens or answer.completion_tokens
        self._check_length()
        text = answer.take(is_last=reason is not None)
        if answer.is_cut:
            self._leave_if_all_are_over(answer, engine_goes_on=reason is None)
            reason = "stop"
        answer.is_finished = reason is not None
        logprobs = self._logprobs(piece.logprobs, offset) if text or not answer.is_cut else None
        if not text and reason is None and logprobs is None:
            return None
        self.num_chunks += 1
        return Chunk(index=piece.index, text=text, logprobs=logprobs, finish_reason=reason)

    def _check_length(self) -> None:
        if self._max_pieces is not None and sum(answer.num_pieces for answer in self._answers) > self._max_pieces:
            raise EngineProtocolError(f"The engine {self._engine!r} goes on far beyond the limit that was asked for.")

    def _leave_if_all_are_over(self, answer: Answer, *, engine_goes_on: bool) -> None:
        """A choice was cut; when no other is open there is nothing to wait for."""
        if engine_goes_on and all(other.is_finished for other in self._answers if other is not answer):
            self.is_done = self.is_cut = True

    def _logprobs(self, logprobs: Raw | None, offset: int) -> Raw | None:
        if logprobs is None or isinstance(self._request, ChatRequest):
            return logprobs
        return as_completion_logprobs(logprobs, offset)


def _tells_error(data: bytes) -> bool:
    return bytes(msgspec.json.decode(data, type=_Mark).error) not in (b"", b"null")


class _CountingReader(Reader, Protocol):
    def account(self) -> Usage: ...


class StopCutter:
    """Cuts stop strings out of another reader's stream of one choice, for an engine that leaves them in."""

    def __init__(self, inner: _CountingReader, stops: Sequence[str]) -> None:
        self._inner = inner
        self._answer = Answer(stops)
        self.is_cut = False

    @property
    def is_done(self) -> bool:
        return self.is_cut or self._inner.is_done

    @property
    def num_chunks(self) -> int:
        return self._inner.num_chunks

    def feed(self, data: bytes) -> Iterator[Chunk]:
        for chunk in self._inner.feed(data):
            if (passed := self._passed(chunk)) is not None:
                yield passed
            if self.is_cut:
                return

    def finish(self) -> list[Chunk]:
        if self.is_cut:
            return [Chunk(usage=self._inner.account())]
        return [passed for chunk in self._inner.finish() if (passed := self._passed(chunk)) is not None]

    def _passed(self, chunk: Chunk) -> Chunk | None:
        """What of `chunk` may go out now."""
        self._answer.add(chunk.text)
        text = self._answer.take(is_last=chunk.finish_reason is not None)
        if self._answer.is_cut and chunk.usage is None:
            self.is_cut = chunk.finish_reason is None
            return msgspec.structs.replace(chunk, text=text, finish_reason="stop")
        is_held_back = chunk.text and not text and chunk.finish_reason is None
        return None if is_held_back else msgspec.structs.replace(chunk, text=text)


class ThoughtReader:
    """Takes what the model thinks out of another reader's text."""

    def __init__(self, inner: _CountingReader, thoughts: ThinkChunks) -> None:
        self._inner = inner
        self._thoughts = thoughts

    @property
    def is_cut(self) -> bool:
        return self._inner.is_cut

    @property
    def is_done(self) -> bool:
        return self._inner.is_done

    @property
    def num_chunks(self) -> int:
        return self._inner.num_chunks

    def feed(self, data: bytes) -> Iterator[Chunk]:
        return self._passed(self._inner.feed(data))

    def finish(self) -> list[Chunk]:
        return list(self._passed(self._inner.finish()))

    def _passed(self, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        return (passed for chunk in chunks if (passed := self._thoughts.feed(chunk)) is not None)

    def account(self) -> Usage:
        return self._inner.account()


class CallReader:
    """Takes the tool calls out of another reader's text. Where one call is all that is wanted, the engine is left."""

    def __init__(self, inner: _CountingReader, calls: CallChunks) -> None:
        self._inner = inner
        self._calls = calls

    @property
    def is_cut(self) -> bool:
        return self._calls.has_enough or self._inner.is_cut

    @property
    def is_done(self) -> bool:
        return self._calls.has_enough or self._inner.is_done

    @property
    def num_chunks(self) -> int:
        return self._inner.num_chunks

    def feed(self, data: bytes) -> Iterator[Chunk]:
        for chunk in self._inner.feed(data):
            yield from self._calls.feed(chunk)
            if self._calls.has_enough:
                return

    def finish(self) -> list[Chunk]:
        if self._calls.has_enough:
            return [Chunk(usage=self._inner.account())]
        return [passed for chunk in self._inner.finish() for passed in self._calls.feed(chunk)]

    def account(self) -> Usage:
        return self._inner.account()


class Writing(Struct, frozen=True):
    """How a model writes what is more than text."""

    tool_format: ToolFormat | None = None
    thinks_aloud: bool = False


def text_reader(
    inner: GenerateReader, request: GenerateRequest, prompt: str, offer: Offer | None, writing: Writing
) -> Reader:
    """The reader of an answer to `request`, which was sent as `prompt` and offers its model some functions, or none."""
    reader: _CountingReader = inner
    must_call = offer is not None and offer.must_call
    if writing.thinks_aloud and (thoughts := thoughts_of(request, prompt, must_call=must_call)) is not None:
        reader = ThoughtReader(reader, thoughts)
    if offer is not None and writing.tool_format is not None:
        reader = CallReader(reader, CallChunks(offer, writing.tool_format, num_choices=request.num_choices))
    return reader


# ----------------------------------------------------------------------------------------------------------- choices


class Generate(Protocol):
    def __call__(self, request: GenerateRequest, *, request_id: str) -> AsyncGenerator[Chunk, None]: ...


async def choices_apart(
    generate: Generate, request: GenerateRequest, *, request_id: str
) -> AsyncGenerator[Chunk, None]:
    """`n` choices from an engine that gives one at a time. Closing it closes every generation."""
    num_choices = request.num_choices
    streams = [
        generate(_one_choice(request, index), request_id=f"{request_id}-{index}" if num_choices > 1 else request_id)
        for index in range(num_choices)
    ]
    usages: list[Usage] = []
    async with contextlib.aclosing(interleaved(streams)) as chunks:
        async for index, chunk in chunks:
            if chunk.usage is None:
                yield msgspec.structs.replace(chunk, index=index) if index else chunk
            else:
                usages.append(chunk.usage)
    completion_tokens = sum(usage.completion_tokens for usage in usages)
    yield Chunk(usage=msgspec.structs.replace(usages[0], completion_tokens=completion_tokens))


def _one_choice(request: GenerateRequest, index: int) -> GenerateRequest:
    """The request for one choice. Choices of a seeded request differ, but repeatably."""
    seed = (request.seed + index + 2**63) % 2**64 - 2**63 if isinstance(request.seed, int) else request.seed
    return msgspec.structs.replace(request, n=UNSET, seed=seed)
