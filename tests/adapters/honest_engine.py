"""A small engine that honours every capability, and lies about those it is told to lie about.

Its text is drawn by hash: the likeliest word of a step is a function of the text so far, and sampling takes one of
eight. So temperature, filters, seeds, penalties and biases have the effects that they have in a real one.
"""

from __future__ import annotations

import asyncio
import json
import random
import zlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec
from msgspec import Raw

from adapters.base import Capabilities, EngineAdapter, EngineOptions, Health, Load, ModelInfo
from adapters.errors import ContextLengthExceeded, InvalidRequest
from adapters.probing.matrix import request_fields
from adapters.types import (
    ChatRequest,
    Chunk,
    EmbeddingRequest,
    Embeddings,
    GenerateRequest,
    TokenizeRequest,
    Tokens,
    Usage,
    route_of,
)

CONTEXT = 2000
NATURAL_END = 20  # words of an answer that nothing else ends
SHORT_END = 5  # of an answer to a chat that asks for little


class HonestOptions(EngineOptions):
    lies: frozenset[str] = frozenset()
    refuses: frozenset[str] = frozenset()
    lacks: frozenset[str] = frozenset()  # neither declared nor done


class Adapter(EngineAdapter[HonestOptions]):
    engine = "honest"
    Options = HonestOptions

    def __init__(self, options: HonestOptions) -> None:
        super().__init__(options)
        self.capabilities = Capabilities(
            embeddings=True, dimensions=True, tokenize=True, tokenize_chat=True, detokenize=True, token_prompts=True,
            usage_so_far=True,
            parameters=request_fields() - options.lacks,
            cache_salt=frozenset({"chat", "completions"}),
            load=frozenset(Load.__struct_fields__) - options.lacks,
        )  # fmt: skip
        self._words: list[str] = []
        self._seen: set[tuple[str | None, tuple[int, ...]]] = set()  # its prefix cache, of whole prompts
        self._running = 0

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def health(self) -> Health:
        return Health(True)

    async def models(self) -> list[ModelInfo]:
        return [ModelInfo("honest-1", CONTEXT)]

    async def version(self) -> str:
        return "1.0"

    async def load(self) -> Load:
        values = Load(self._running, 0, 0.25, prefix_hit_rate=0.5, draft_tokens=8, accepted_draft_tokens=5)
        return msgspec.structs.replace(values, **dict.fromkeys(self.options.lies & set(Load.__struct_fields__)))

    # ----------------------------------------------------------------------------------------------------- token ids

    def _id(self, word: str) -> int:
        if word not in self._words:
            self._words.append(word)
        return self._words.index(word)

    def _ids(self, text: str) -> list[int]:
        return [self._id(word) for word in text.split()]

    def _text(self, ids: Sequence[int]) -> str:
        return " ".join(self._words[token] if token < len(self._words) else f"word{token}" for token in ids)

    async def tokenize(self, request: TokenizeRequest) -> Tokens:
        ids = self._prompt_ids(request.as_generation())
        return Tokens([*ids, 0] if self._lies("tokenize" if request.prompt else "tokenize_chat") else ids)

    async def detokenize(self, ids: Sequence[int]) -> str:
        return "nonsense" if self._lies("detokenize") else self._text(ids)

    async def embed(self, request: EmbeddingRequest) -> Embeddings:
        size = request.dimensions if isinstance(request.dimensions, int) and not self._lies("dimensions") else 64
        seeds = [
            random.random() if self._lies("embeddings") else zlib.crc32(str(each).encode()) for each in request.input
        ]
        vectors = [[random.Random(seed + number).uniform(-1, 1) for number in range(size)] for seed in seeds]
        return Embeddings(vectors, prompt_tokens=len(request.input))

    def _lies(self, what: str) -> bool:
        return what in self.options.lies

    # ---------------------------------------------------------------------------------------------------- generation

    def _asked(self, request: GenerateRequest, field: str, default: Any) -> Any:
        value = getattr(request, field, None)
        return default if self._lies(field) or value is None or value is msgspec.UNSET else value

    def _prompt_ids(self, request: GenerateRequest) -> list[int]:
        if isinstance(request, ChatRequest):
            return self._ids(" ".join(f"<{each.role}> {each.text()}" for each in request.messages))
        if isinstance(request.prompt, str):
            return self._ids(request.prompt)
        return [0] if self._lies("token_prompts") else list(request.prompt)

    async def generate(self, request: GenerateRequest, *, request_id: str) -> AsyncGenerator[Chunk, None]:
        self.check_parameters(request)
        for field in sorted(self.options.refuses):
            if getattr(request, field, msgspec.UNSET) is not msgspec.UNSET:
                raise InvalidRequest(f"This model has no {field}.", param=field)
        prompt = self._prompt_ids(request)
        if len(prompt) > CONTEXT and not self._lies("context overflow"):
            raise ContextLengthExceeded(f"{len(prompt)} tokens do not fit into {CONTEXT}.")
        num_choices = self._asked(request, "n", 1)
        words = [self._answer(request, prompt, index) for index in range(num_choices)]
        self._running += 1
        try:
            for index, (pieces, reason) in enumerate(words):
                for position, piece in enumerate(pieces):
                    await asyncio.sleep(0)
                    yield Chunk(
                        index=index,
                        text="" if self._calls(request) else piece,
                        tool_calls=self._calls(request) if position == 0 else None,
                        logprobs=self._logprobs(request, piece),
                        usage_so_far=self._so_far(request, prompt, position + 1),
                    )
                yield Chunk(index=index, finish_reason=reason, usage_so_far=self._so_far(request, prompt, len(pieces)))
        finally:
            self._running -= not self._lies("cancellation")
        num_tokens = sum(len(pieces) for pieces, _ in words) * self._asked(request, "best_of", 1)
        yield Chunk(usage=Usage(len(prompt), num_tokens + self._lies("usage"), self._cached(request, prompt)))

    def _so_far(self, request: GenerateRequest, prompt: list[int], num_tokens: int) -> Usage | None:
        if not request.wants_usage_so_far:
            return None
        return Usage(len(prompt), num_tokens // 2 if self._lies("usage_so_far") else num_tokens)

    def _cached(self, request: GenerateRequest, prompt: list[int]) -> int:
        key = (None if self._lies(f"cache_salt.{route_of(request)}") else request.salt, tuple(prompt))
        is_known = key in self._seen
        self._seen.add(key)
        return len(prompt) if is_known else 0

    def _answer(self, request: GenerateRequest, prompt: list[int], index: int) -> tuple[list[str], Any]:
        if self._asked(request, "response_format", None):
            return ['{"sky": "blue",', ' "warm": true}'], "stop"
        seed = self._asked(request, "seed", None)
        draw = random.Random(None if seed is None else seed + index)
        start = self._text(prompt) + str(self._asked(request, "suffix", ""))
        limit = min(self._asked(request, name, 600) for name in ("max_tokens", "max_completion_tokens"))
        pieces: list[str] = []
        while len(pieces) < limit:
            if self._is_over(request, len(pieces)):
                return self._finished(request, pieces, "stop")
            pieces.append(f" {self._next(request, start, pieces, draw)}")
        return self._finished(request, pieces, "length")

    def _is_over(self, request: GenerateRequest, num_words: int) -> bool:
        is_short = isinstance(request, ChatRequest) and request.messages[-1].text() == "Say yes."
        natural = SHORT_END if is_short else NATURAL_END
        wanted = max(natural, self._asked(request, "min_tokens", 0))
        return not self._asked(request, "ignore_eos", False) and num_words >= wanted

    def _next(self, request: GenerateRequest, start: str, pieces: list[str], draw: random.Random) -> str:
        for token, bias in self._asked(request, "logit_bias", {}).items():
            if bias == 100:
                return f"forced{token}"
        penalties = sum(
            abs(self._asked(request, name, neutral) - neutral) * weight
            for name, neutral, weight in (
                ("presence_penalty", 0, 1), ("frequency_penalty", 0, 2), ("repetition_penalty", 1, 4),
            )
        )  # fmt: skip
        is_greedy = (
            self._asked(request, "temperature", 1) == 0
            or self._asked(request, "top_k", 0) == 1
            or self._asked(request, "top_p", 1) < 0.01
            or self._asked(request, "min_p", 0) == 1
        )
        rank = 0 if is_greedy else draw.randrange(8)
        bad_words = self._asked(request, "bad_words", [])
        while (word := self._word(f"{start}/{len(pieces)}/{rank}/{penalties}")) in bad_words:
            rank += 8
        return word

    def _word(self, drawn: str) -> str:
        return f"w{zlib.crc32(drawn.encode()) % 10_000}"

    def _finished(self, request: GenerateRequest, pieces: list[str], reason: str) -> tuple[list[str], Any]:
        for stop in [] if self._lies("stop") else request.stop_strings:
            found = "".join(pieces).find(stop)
            if found >= 0:
                return ["".join(pieces)[:found]], "stop"
        echoed = [getattr(request, "prompt", "")] if self._asked(request, "echo", False) else []
        return [*echoed, *pieces], reason

    def _calls(self, request: GenerateRequest) -> Raw | None:
        if not isinstance(request, ChatRequest) or not self._asked(request, "tools", None):
            return None
        if isinstance(request.tool_choice, dict) and self._lies("tool_choice"):
            return None
        function = {"name": "get_weather", "arguments": '{"city": "Paris"}'}
        return Raw(json.dumps([{"index": 0, "id": "c", "type": "function", "function": function}]).encode())

    def _logprobs(self, request: GenerateRequest, piece: str) -> Raw | None:
        wanted = self._asked(request, "logprobs", None)
        if wanted is None:
            return None
        if not isinstance(request, ChatRequest):
            return Raw(json.dumps({"tokens": [piece], "token_logprobs": [-0.5]}).encode())
        alternatives = [{"token": piece, "logprob": -0.5}] * self._asked(request, "top_logprobs", 0)
        return Raw(json.dumps({"content": [{"token": piece, "logprob": -0.5, "top_logprobs": alternatives}]}).encode())
