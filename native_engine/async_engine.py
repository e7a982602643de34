"""The engine's asynchronous face: one thread steps the engine, any event loop reads the text.

    engine = AsyncEngine.load(path, EngineConfig())
    async for delta in engine.generate(engine.encode("Once"), SamplingParams(max_tokens=8), request_id="a"):
        print(delta.text, end="")
    engine.close()

The thread owns the engine. Others leave commands in a queue, and the thread takes them between two steps. After a
step it hands each event loop all its news in one call. Closing the iterator ends the request in the engine before its
next step. A step that cannot be computed, for want of memory for one, fails those who had a part in it with
`StepFailed`, and the thread goes on. When it ends, by `close` or by a fault of its own, every request that is open
fails with `EngineStopped`; nothing waits for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, Self, TypeAlias

from native_engine.config import EngineConfig
from native_engine.detokenizer import OutputText, Piece, PlacedLogprobs
from native_engine.engine import Choice, Stats, StepOutput
from native_engine.errors import EngineError, EngineStopped, GrammarFailed, InvalidParams, StepFailed, TooLate
from native_engine.loading import LoadedModel, load
from native_engine.logprobs import Logprobs
from native_engine.sampling_params import Grammar, SamplingParams
from native_engine.sequence import Matcher
from native_engine.structured import GrammarCompiler

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Delta:
    """What a request gained. Its last delta has a `finish_reason`; its `text` may be empty, e.g. half a character."""

    text: str
    token_ids: list[int]
    finish_reason: Literal["stop", "length"] | None
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    stop_string: str | None = None  # the one that ended it
    logprobs: SequenceOf[PlacedLogprobs] = ()  # of the tokens that make `text`: not that of the token that stopped it
    cumulative_logprob: float = 0.0  # of all tokens so far, that one too; where log-probabilities are wanted
    prompt_logprobs: SequenceOf[Logprobs] = ()  # with the first delta: of the prompt's tokens but the first


@dataclass(frozen=True, slots=True)
class Replay:
    """What a request has generated already, and how many characters of text that had given."""

    ids: list[int]
    num_chars: int


_News: TypeAlias = "asyncio.Queue[tuple[int, Delta | EngineError]]"


@dataclass(eq=False, slots=True)
class _Stream:
    """One request, between the engine thread that fills `news` and the event loop that reads it."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    cache_salt: str | None
    matcher: Matcher | None
    text: OutputText
    loop: asyncio.AbstractEventLoop
    news: _News
    index: int = 0  # among the choices that share `news`
    num_output_tokens: int = 0  # those that it goes on after count too
    num_replayed: int = 0  # and are the end of the prompt that the engine sees
    cumulative_logprob: float = 0.0

    def take(self, output: StepOutput) -> Delta:
        """Turn a step's tokens into text. The token that ended a request is counted, but is not part of its text. Of
        several tokens none is left behind a stop string: one at a time, they would not have come."""
        stopped_by_token = output.finish_reason == "stop"
        fed = output.token_ids[:-1] if stopped_by_token else output.token_ids
        piece = self.text.feed(fed, output.logprobs)
        token_ids = output.token_ids if piece.stop is None else output.token_ids[: piece.num_tokens]
        self.num_output_tokens += len(token_ids)
        self.cumulative_logprob += sum(told.logprob for told in output.logprobs[: len(token_ids)])
        reason: Literal["stop", "length"] | None = None
        if piece.stop is not None or stopped_by_token:
            reason = "stop"
        elif output.finish_reason == "length":
            reason = "length"
        rest = self.text.finish() if reason and piece.stop is None else Piece("")
        return Delta(
            text=piece.text + rest.text,
            token_ids=token_ids,
            finish_reason=reason,
            stop_string=piece.stop,
            num_prompt_tokens=output.num_prompt_tokens - self.num_replayed,
            num_output_tokens=self.num_output_tokens,
            num_cached_tokens=min(output.num_cached_tokens, output.num_prompt_tokens - self.num_replayed),
            logprobs=[*piece.logprobs, *rest.logprobs],
            cumulative_logprob=self.cumulative_logprob,
            prompt_logprobs=output.prompt_logprobs,
        )


@dataclass(frozen=True, slots=True)
class _Add:
    streams: list[_Stream]  # answers to one prompt


@dataclass(frozen=True, slots=True)
class _Abort:
    stream: _Stream


class AsyncEngine:
    def __init__(self, load_model: Callable[[], LoadedModel]) -> None:
        """`load_model` runs in the engine thread; its errors are raised here.

        OpenMP keeps a pool of workers for each thread that computes. Were the model loaded in another thread than the
        one that steps, there would be more workers than cores, and libgomp would put them to sleep after every kernel
        instead of letting them spin: on two cores that costs 40 % of the speed at one request, 20 % at thirty-two.
        """
        self._streams: dict[str, _Stream] = {}  # the engine thread's
        self._commands: deque[_Add | _Abort] = deque()  # under the lock, with the two fields below
        self._closing = False
        self._stopped: EngineStopped | None = None
        self._changed = threading.Condition()
        loaded: Future[LoadedModel] = Future()
        self._thread = threading.Thread(target=self._run, args=(load_model, loaded), name="native-engine", daemon=True)
        self._thread.start()
        self.max_model_len = loaded.result().max_model_len
        self.identity = loaded.result().identity
        self._tokenizer = loaded.result().tokenizer
        model = loaded.result().model_config
        self._grammars = GrammarCompiler(self._tokenizer, model.vocab_size, model.eos_token_ids)

    @classmethod
    def load(cls, path: Path, config: EngineConfig, *, kernel_cache: Path | None = None) -> Self:
        """Load the model at `path`, a GGUF file or a Hugging Face folder. Blocks for seconds: not for an event loop."""
        return cls(lambda: load(path, config, kernel_cache=kernel_cache))

    # --- text

    @property
    def chat_template(self) -> str | None:
        return self._tokenizer.chat_template

    @property
    def bos_token(self) -> str:
        return self._tokenizer.token_text(self._tokenizer.bos_token_id)

    @property
    def eos_token(self) -> str:
        return self._tokenizer.token_text(self._tokenizer.eos_token_id)

    @cached_property
    def special_tokens(self) -> list[str]:
        """How the special tokens are written; `encode` takes each such spelling for the token."""
        return [self._tokenizer.token_text(token) for token in sorted(self._tokenizer.special_ids)]

    @cached_property
    def max_prompt_chars(self) -> int:
        """No text that is longer fits the context, whatever it says: it need not be encoded to know that.

        The factor is for what a tokenizer's normalisation may join before it counts.
        """
        longest = max(map(len, [*self._tokenizer.token_bytes, *self.special_tokens]))
        return 4 * longest * self.max_model_len

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: SequenceOf[int], *, with_special_tokens: bool = False) -> str:
        return self._tokenizer.decode(ids, with_special_tokens=with_special_tokens)

    def spell(self, token_id: int) -> bytes:
        """The bytes that a token stands for; of a special one, its name."""
        return self._tokenizer.spell(token_id)

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.vocab_size

    # --- requests, from any event loop

    async def generate(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str,
        cache_salt: str | None = None,
        after: Replay | None = None,
    ) -> AsyncGenerator[Delta, None]:
        """Deltas until one has a finish reason. With `after` they are those that follow what has been generated before,
        here or elsewhere; the counts are those of the whole.

        Raises `PromptTooLong`, `InvalidParams` or `EngineStopped`, and `GrammarFailed` or `StepFailed` in the middle
        of a text.
        """
        choices = self.generate_choices(prompt_ids, [params], request_id=request_id, cache_salt=cache_salt, after=after)
        async with contextlib.aclosing(choices) as deltas:
            async for _, delta in deltas:
                yield delta

    async def generate_choices(
        self,
        prompt_ids: list[int],
        choices: SequenceOf[SamplingParams],
        *,
        request_id: str,
        cache_salt: str | None = None,
        after: Replay | None = None,
    ) -> AsyncGenerator[tuple[int, Delta], None]:
        """Several answers to one prompt, which is computed once: (index, delta) as they come, until each has a finish
        reason. Answer i is what a request with `choices[i]` gets alone; in the engine it is called `request_id/i`. The
        first failure ends all.

        Raises as `generate` does.
        """
        news: _News = asyncio.Queue()
        streams = [
            await self._stream(prompt_ids, params, f"{request_id}/{index}", cache_salt, news, index)
            for index, params in enumerate(choices)
        ]
        if after is not None:
            for stream in streams:
                _replay(after, stream)
        async with contextlib.aclosing(self._read(streams)) as deltas:
            async for index, delta in deltas:
                yield index, delta

    async def _stream(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        request_id: str,
        cache_salt: str | None,
        news: _News,
        index: int = 0,
    ) -> _Stream:
        matcher = None if params.grammar is None else await self._matcher(params.grammar)
        text = OutputText(self._tokenizer.token_bytes, params)
        loop = asyncio.get_running_loop()
        return _Stream(request_id, prompt_ids, params, cache_salt, matcher, text, loop, news, index)

    async def _read(self, streams: list[_Stream]) -> AsyncGenerator[tuple[int, Delta], None]:
        """Sends what shares one queue to the engine, and reads the queue until all have ended."""
        self._send(_Add(streams))
        unfinished = dict(enumerate(streams))
        try:
            while unfinished:
                index, news = await streams[0].news.get()
                if isinstance(news, EngineError):
                    del unfinished[index]
                    raise news
                if news.finish_reason is not None:
                    del unfinished[index]
                yield index, news
        finally:
            for stream in unfinished.values():
                self._send_if_running(_Abort(stream))

    async def _matcher(self, grammar: Grammar) -> Matcher:
        return await asyncio.wrap_future(self._grammars.matcher(grammar))

    def stats(self) -> Stats:
        """As of the last step."""
        return self._stats

    @property
    def is_running(self) -> bool:
        return self._stopped is None and not self._closing

    def close(self) -> None:
        """End the engine thread, after the step it is in. Safe to call twice."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()
        self._grammars.close()

    def _send(self, command: _Add | _Abort) -> None:
        if not self._send_if_running(command):
            raise self._stopped or EngineStopped("The engine was closed.")

    def _send_if_running(self, command: _Add | _Abort) -> bool:
        with self._changed:
            if not self.is_running:
                return False
            self._commands.append(command)
            self._changed.notify()
        return True

    # --- the engine thread

    def _run(self, load_model: Callable[[], LoadedModel], loaded: Future[LoadedModel]) -> None:
        try:
            model = load_model()
        except BaseException as error:
            loaded.set_exception(error)
            return
        self._engine = model.engine
        self._stats = model.engine.stats()
        loaded.set_result(model)
        self._serve()

    def _serve(self) -> None:
        stopped = EngineStopped("The engine was closed.")
        try:
            while self._wait_for_work():
                self._obey_commands()
                self._step()
        except BaseException as error:
            logger.exception("The engine thread failed.")
            stopped = EngineStopped(f"The engine failed: {error!r}.")
            stopped.__cause__ = error
        finally:
            self._fail_everything(stopped)

    def _wait_for_work(self) -> bool:
        """Sleep until there is a command or a step to make; False when the engine is to close."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._commands or self._engine.has_work)
            return not self._closing

    def _obey_commands(self) -> None:
        while self._commands:
            command = self._commands.popleft()
            if isinstance(command, _Add):
                self._add(*command.streams)
                continue
            stream = command.stream
            if self._streams.get(stream.request_id) is stream:  # a finished request's id may be in use again
                del self._streams[stream.request_id]
                self._engine.abort(stream.request_id)

    def _add(self, first: _Stream, *others: _Stream) -> None:
        try:
            self._engine.add(
                first.request_id,
                first.prompt_ids,
                first.params,
                cache_salt=first.cache_salt,
                matcher=first.matcher,
                others=[Choice(other.request_id, other.params, other.matcher) for other in others],
            )
        except EngineError as error:
            self._deliver([(first, error)])
        else:
            self._streams.update((stream.request_id, stream) for stream in (first, *others))

    def _step(self) -> None:
        news: list[tuple[_Stream, Delta | EngineError]] = []
        try:
            outputs = self._engine.step()
        except StepFailed as failure:
            logger.exception("A step of the engine failed.")
            self._fail(failure)
            return
        for output in outputs:
            stream = self._streams[output.request_id]
            if output.finish_reason in ("error", "late"):
                del self._streams[stream.request_id]
                news.append((stream, self._error(output)))
                continue
            delta = stream.take(output)
            news.append((stream, delta))
            if delta.finish_reason:
                del self._streams[stream.request_id]
                if output.finish_reason is None:  # a stop string: the engine knows nothing of text
                    self._engine.abort(stream.request_id)
        self._stats = self._engine.stats()
        self._deliver(news)

    def _error(self, output: StepOutput) -> EngineError:
        if output.finish_reason == "late":
            return TooLate(output.expected_ttft_s, self._engine.targets.ttft_s or 0.0)
        return GrammarFailed(output.failure)

    def _fail(self, failure: StepFailed) -> None:
        """Those who had a part in it: which of them was too much, nobody knows."""
        streams = [self._streams.pop(request_id) for request_id in failure.request_ids if request_id in self._streams]
        for request_id in failure.request_ids:
            self._engine.abort(request_id)
        self._stats = self._engine.stats()
        self._deliver([(stream, failure) for stream in streams])

    def _deliver(self, news: list[tuple[_Stream, Delta | EngineError]]) -> None:
        """One call per event loop and step. A loop that was closed takes its requests with it."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, Delta | EngineError]]] = {}
        for item in news:
            by_loop.setdefault(item[0].loop, []).append(item)
        for loop, items in by_loop.items():
            try:
                loop.call_soon_threadsafe(_put_all, items)
            except RuntimeError:  # the loop is closed: nobody will ever read this
                for stream, _ in items:
                    if self._streams.pop(stream.request_id, None):
                        self._engine.abort(stream.request_id)

    def _fail_everything(self, reason: EngineStopped) -> None:
        with self._changed:
            self._stopped = reason
            pending = [stream for command in self._commands if isinstance(command, _Add) for stream in command.streams]
            self._commands.clear()
        streams = [*self._streams.values(), *pending]
        self._streams.clear()
        self._deliver([(stream, reason) for stream in streams])


def _replay(after: Replay, stream: _Stream) -> None:
    """Brings the text to where it was: half a character and the possible start of a stop string are held back again.
    Only what the tokens alone decide can be gone on with exactly."""
    params = stream.params
    if not params.is_greedy or params.has_penalties or params.grammar is not None or params.bad_words:
        raise InvalidParams("continuation needs a temperature of 0, no penalties, no bad_words and no response_format.")
    if params.logprobs is not None or params.prompt_logprobs is not None:
        raise InvalidParams("continuation does not go with logprobs: those of its beginning are gone.")
    piece = stream.text.feed(after.ids)
    if piece.stop is not None or len(piece.text) != after.num_chars:
        raise InvalidParams("continuation does not fit: its ids give another text here.")
    stream.prompt_ids, stream.params = [*stream.prompt_ids, *after.ids], params.after(len(after.ids))
    stream.num_output_tokens = stream.num_replayed = len(after.ids)


def _put_all(items: list[tuple[_Stream, Delta | EngineError]]) -> None:
    for stream, news in items:
        stream.news.put_nowait((stream.index, news))
