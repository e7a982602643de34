"""What shows that an engine honours a capability. One small coroutine each: it asks, and a pure rule reads the answers.

    observation = await PROOFS["seed"](lab)

A proof shows an effect wherever there is one to see: `stop` has to cut a text that went on without it, `top_k` 1 has to
make a hot sample greedy, a schema has to bind. Where only the model could show it (a small one may never call a tool),
the proof says `unclear`. Requests are refused by raising, as ever; `probe` turns that into an observation.
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeAlias

from adapters.errors import InvalidRequest
from adapters.probing.answers import Answer, Choice, Lab
from adapters.probing.verdicts import Observation, honoured, honoured_if, ignored, unclear
from adapters.types import CacheSalt, Chunk, EmbeddingRequest, TokenizeRequest

Proof: TypeAlias = Callable[[Lab], Awaitable[Observation]]

STORY = "Once upon a time, in a small village by the sea, there lived a"
QUESTION = "Tell me about the sea."
REPEATING = "one two one two one two one two one two one two one two"
SHORT_QUESTIONS = ("Say yes.", "Hi", "What is the capital of France? Answer in one word.", "What is 2 + 2?")
SHORT_LIMIT = 48
BRIEF: Mapping[str, Any] = {"temperature": 0, "max_tokens": 12}
HOT: Mapping[str, Any] = {"temperature": 1.5, "max_tokens": 12}
DIMENSIONS = 32
SEEDS = (12, 13, 14)

PROOFS: dict[str, Proof] = {}


def proves(capability: str) -> Callable[[Proof], Proof]:
    def register(proof: Proof) -> Proof:
        PROOFS[capability] = proof
        return proof

    return register


def shown(text: str, limit: int = 40) -> str:
    """A text as evidence: on one line, and not much of it."""
    line = text.replace("\n", "\\n")
    return repr(line if len(line) <= limit else line[: limit - 1] + "…")


# -------------------------------------------------------------------------------------------------------------- routes


@proves("chat")
async def chat(lab: Lab) -> Observation:
    return whole_answer(await lab.chat(QUESTION, **BRIEF))


@proves("completions")
async def completions(lab: Lab) -> Observation:
    return whole_answer(await lab.complete(STORY, **BRIEF))


def whole_answer(answer: Answer) -> Observation:
    text = answer.text or answer.choices[0].reasoning
    is_whole = bool(text) and answer.finish_reason is not None and answer.usage is not None
    return honoured_if(is_whole, f"{shown(text)}, finish {answer.finish_reason}")


@proves("token_prompts")
async def token_prompts(lab: Lab) -> Observation:
    ids = await lab.token_ids(STORY)
    if ids is None:
        ids = list(range(300, 308))
        return counted(await lab.complete(ids, **BRIEF), len(ids))
    return same_continuation(await lab.complete(STORY, **BRIEF), await lab.complete(ids, **BRIEF), len(ids))


def counted(answer: Answer, num_ids: int) -> Observation:
    evidence = f"{num_ids} ids counted as {answer.num_prompt_tokens} tokens"
    return honoured_if(answer.num_prompt_tokens == num_ids, evidence)


def same_continuation(of_text: Answer, of_ids: Answer, num_ids: int) -> Observation:
    if of_text.text == of_ids.text:
        return honoured(f"{num_ids} ids and their text go on alike: {shown(of_ids.text)}")
    return ignored(f"the text goes on {shown(of_text.text)}, its {num_ids} ids {shown(of_ids.text)}")


@proves("usage_so_far")
async def usage_so_far(lab: Lab) -> Observation:
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with lab.stream(lab.chat_request(QUESTION, stream=True, stream_options=options, **BRIEF)) as chunks:
        return runs_up([chunk async for chunk in chunks])


def runs_up(chunks: Sequence[Chunk]) -> Observation:
    total = sum(chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None)
    pieces = [chunk.usage_so_far for chunk in chunks if chunk.usage is None]
    counts = [usage.completion_tokens for usage in pieces if usage is not None]
    if len(counts) < len(pieces):
        return ignored(f"{len(counts)} of {len(pieces)} events have a count")
    steps = " ".join(map(str, counts))
    return honoured_if(counts == sorted(counts) and counts[-1:] == [total], f"{steps}; the account says {total}")


@proves("tokenize")
async def tokenize(lab: Lab) -> Observation:
    request = TokenizeRequest(model=lab.model, prompt=STORY)
    ids = (await lab.adapter.tokenize(request)).ids
    return equal_counts(len(ids), (await lab.complete(STORY, **BRIEF)).num_prompt_tokens)


@proves("tokenize_chat")
async def tokenize_chat(lab: Lab) -> Observation:
    request = lab.chat_request(QUESTION, **BRIEF)
    ids = (await lab.adapter.tokenize(TokenizeRequest(model=lab.model, messages=request.messages))).ids
    return equal_counts(len(ids), (await lab.ask(request)).num_prompt_tokens)


def equal_counts(num_ids: int, num_prompt_tokens: int) -> Observation:
    return honoured_if(
        num_ids == num_prompt_tokens > 0, f"{num_ids} ids; the usage of the same prompt says {num_prompt_tokens}"
    )


@proves("detokenize")
async def detokenize(lab: Lab) -> Observation:
    ids = await lab.token_ids(STORY, add_special_tokens=False)
    if ids is None:
        text = await lab.adapter.detokenize(list(range(300, 308)))
        return honoured_if(bool(text), f"8 ids became {shown(text)}")
    text = await lab.adapter.detokenize(ids)
    return honoured_if(text.strip() == STORY, f"there and back: {shown(text)}")


@proves("embeddings")
async def embeddings(lab: Lab) -> Observation:
    request = EmbeddingRequest(model=lab.model, input=[STORY, REPEATING, STORY])
    answer = await lab.adapter.embed(request)
    return meaningful_vectors(answer.vectors, answer.prompt_tokens)


@proves("dimensions")
async def dimensions(lab: Lab) -> Observation:
    try:
        answer = await lab.adapter.embed(EmbeddingRequest(model=lab.model, input=[STORY], dimensions=DIMENSIONS))
    except InvalidRequest as error:
        if "dimension" not in error.message:
            raise
        return unclear(f"this model's size is fixed: {error.message}")
    return honoured_if(len(answer.vectors[0]) == DIMENSIONS, f"{len(answer.vectors[0])} numbers of {DIMENSIONS}")


def meaningful_vectors(vectors: Sequence[Sequence[float]], num_tokens: int) -> Observation:
    """Of a text, another one, and the first again."""
    if len(vectors) != 3 or not vectors[0] or len({len(vector) for vector in vectors}) != 1:
        return ignored(f"{len(vectors)} vectors for 3 texts, of {sorted({len(vector) for vector in vectors})} numbers")
    one, other, again = vectors
    alike, apart = _cosine(one, again), _cosine(one, other)
    evidence = f"{len(one)} numbers, {num_tokens} tokens; equal texts {alike:.4f}, different ones {apart:.4f}"
    return honoured_if(alike > 0.9999 and apart < 0.9999 and num_tokens > 0, evidence)


def _cosine(one: Sequence[float], other: Sequence[float]) -> float:
    length = math.hypot(*one) * math.hypot(*other)
    return sum(a * b for a, b in zip(one, other, strict=True)) / length if length else 0.0


# -------------------------------------------------------------------------------------------------------------- limits


@proves("max_tokens")
async def max_tokens(lab: Lab) -> Observation:
    routes = [ask for ask, is_offered in _routes(lab) if is_offered]
    return within_limit([await ask(STORY, temperature=0, max_tokens=3) for ask in routes], 3)


def _routes(lab: Lab) -> list[tuple[Callable[..., Awaitable[Answer]], bool]]:
    capabilities = lab.adapter.capabilities
    return [(lab.complete, capabilities.completions), (lab.chat, capabilities.chat)]


@proves("max_completion_tokens")
async def max_completion_tokens(lab: Lab) -> Observation:
    return within_limit([await lab.chat(STORY, temperature=0, max_tokens=9, max_completion_tokens=3)], 3)


def within_limit(answers: Sequence[Answer], limit: int) -> Observation:
    evidence = "; ".join(f"{answer.num_tokens} tokens, finish {answer.finish_reason}" for answer in answers)
    if any(answer.num_tokens > limit or len(answer.text) > 64 * limit for answer in answers):
        return ignored(evidence)
    if all(answer.finish_reason == "length" for answer in answers):
        return honoured(evidence)
    return unclear(f"{evidence}: the model ended first")


async def _short_answer(lab: Lab) -> tuple[str, Answer] | None:
    """A question that this model answers shortly, of its own accord."""
    for question in SHORT_QUESTIONS:
        answer = await lab.chat(question, temperature=0, max_tokens=SHORT_LIMIT)
        if answer.finish_reason == "stop" and 0 < answer.num_tokens < SHORT_LIMIT:
            return question, answer
    return None


NO_SHORT_ANSWER = "the model ended none of its answers by itself, so there is no end to go beyond"


@proves("min_tokens")
async def min_tokens(lab: Lab) -> Observation:
    short = await lab.once("short", lambda: _short_answer(lab))
    if short is None:
        return unclear(NO_SHORT_ANSWER)
    question, plain = short
    wanted = plain.num_tokens + 8
    answer = await lab.chat(question, temperature=0, min_tokens=wanted, max_tokens=wanted + SHORT_LIMIT)
    return honoured_if(
        answer.num_tokens >= wanted, f"at least {wanted} wanted: {plain.num_tokens} → {answer.num_tokens}"
    )


@proves("ignore_eos")
async def ignore_eos(lab: Lab) -> Observation:
    short = await lab.once("short", lambda: _short_answer(lab))
    if short is None:
        return unclear(NO_SHORT_ANSWER)
    question, plain = short
    wanted = plain.num_tokens + 8
    answer = await lab.chat(question, temperature=0, ignore_eos=True, max_tokens=wanted)
    is_exact = (answer.num_tokens, answer.finish_reason) == (wanted, "length")
    return honoured_if(is_exact, f"{wanted} wanted: {plain.num_tokens} → {answer.num_tokens}, {answer.finish_reason}")


@proves("stop")
async def stop(lab: Lab) -> Observation:
    limits = {**BRIEF, "max_tokens": 32}
    plain = await lab.say(STORY, **limits)
    if (word := stop_word(plain.text)) is None:
        return unclear(f"{shown(plain.text)} holds no word to stop at")
    return cut_at(word, plain, await lab.say(STORY, **limits, stop=[word]))


def stop_word(text: str) -> str | None:
    """A word from the middle of the text, with the space before it."""
    words = text.split(" ")[2:-2]
    candidates = [f" {word}" for word in words if len(word) > 2 and text.find(f" {word}") > 0]
    return candidates[len(candidates) // 3] if candidates else None


def cut_at(word: str, plain: Answer, stopped: Answer) -> Observation:
    evidence = f"at {word!r}: {shown(stopped.text)}, finish {stopped.finish_reason}"
    is_cut = word not in stopped.text and stopped.finish_reason == "stop" and len(stopped.text) < len(plain.text)
    return honoured_if(is_cut, evidence)


# ------------------------------------------------------------------------------------------------------------ sampling


async def _greedy(lab: Lab) -> Answer:
    return await lab.once("greedy", lambda: lab.say(STORY, **BRIEF))


async def _hot(lab: Lab) -> list[Answer]:
    return await lab.once("hot", lambda: _several(lab, 3))


async def _together(*answers: Awaitable[Answer]) -> list[Answer]:
    """Side by side, which engines answer almost as fast as one. All are over when this ends, whatever one raises."""
    ended = await asyncio.gather(*answers, return_exceptions=True)
    for answer in ended:
        if isinstance(answer, BaseException):
            raise answer
    return [answer for answer in ended if isinstance(answer, Answer)]


async def _several(lab: Lab, number: int, **fields: Any) -> list[Answer]:
    return await _together(*(lab.say(STORY, **HOT, **fields) for _ in range(number)))


def _texts(answers: Sequence[Answer]) -> set[str]:
    return {answer.text for answer in answers}


@proves("temperature")
async def temperature(lab: Lab) -> Observation:
    cold = [await _greedy(lab), *await _together(*(lab.say(STORY, **BRIEF) for _ in range(2)))]
    return cold_and_hot(cold, await _hot(lab))


def cold_and_hot(cold: Sequence[Answer], hot: Sequence[Answer]) -> Observation:
    """Two of three cold answers must agree: kernels may round the same sum differently for a cached prompt."""
    num_cold, num_hot = len(_texts(cold)), len(_texts(hot))
    evidence = f"{num_cold} different answers of {len(cold)} at 0, {num_hot} of {len(hot)} at {HOT['temperature']}"
    return honoured_if(num_cold < len(cold) and num_hot > 1, evidence)


@proves("top_p")
async def top_p(lab: Lab) -> Observation:
    return await _made_greedy(lab, top_p=0.001)


@proves("top_k")
async def top_k(lab: Lab) -> Observation:
    return await _made_greedy(lab, top_k=1)


@proves("min_p")
async def min_p(lab: Lab) -> Observation:
    return await _made_greedy(lab, min_p=1.0)


async def _made_greedy(lab: Lab, **fields: Any) -> Observation:
    return tamed(await _greedy(lab), await _hot(lab), await _several(lab, 2, **fields))


def tamed(greedy: Answer, hot: Sequence[Answer], filtered: Sequence[Answer]) -> Observation:
    """Hot answers that a filter leaves one token to choose from are alike: like the greedy one, or like each other
    where kernels round the same sum differently and a near tie falls the other way."""
    if len(_texts(hot)) < len(hot):
        return unclear("hot answers are alike anyway")
    num_alike = max(Counter(answer.text for answer in [greedy, *filtered]).values())
    evidence = f"{num_alike} of {len(filtered) + 1} answers alike, the greedy one and {len(filtered)} hot ones"
    return honoured_if(num_alike > 1, evidence)


@proves("seed")
async def seed(lab: Lab) -> Observation:
    """The pair one after the other: beside other requests kernels may round differently, and hot samples with them."""
    pair = [await lab.say(STORY, **HOT, seed=11) for _ in range(2)]
    return repeatable(pair, await _together(*(lab.say(STORY, **HOT, seed=number) for number in SEEDS)))


def repeatable(pair: Sequence[Answer], others: Sequence[Answer]) -> Observation:
    num_different = len(_texts([*pair, *others]))
    if len(_texts(pair)) > 1:
        return ignored("equal seeds gave different answers")
    return honoured_if(num_different > 1, f"equal seeds agree; {len(others) + 1} seeds gave {num_different} answers")


BIASED_IDS = (500, 600)


@proves("logit_bias")
async def logit_bias(lab: Lab) -> Observation:
    forced = await _together(*(lab.say(STORY, **BRIEF, logit_bias={str(token): 100}) for token in BIASED_IDS))
    return forced_apart(await _greedy(lab), forced)


def forced_apart(greedy: Answer, forced: Sequence[Answer]) -> Observation:
    """The answers that each of the ids is forced on differ from the greedy one and from one another."""
    different = len(_texts([greedy, *forced])) == len(forced) + 1
    return honoured_if(different, f"forced ids {', '.join(map(str, BIASED_IDS))} give {shown(forced[0].text, 24)}")


@proves("bad_words")
async def bad_words(lab: Lab) -> Observation:
    greedy = await _greedy(lab)
    word = max(greedy.text.split(), key=len, default="")
    if not word:
        return unclear("the greedy answer has no word to leave out")
    return left_out(word, await lab.say(STORY, **BRIEF, bad_words=[word]))


def left_out(word: str, answer: Answer) -> Observation:
    return honoured_if(word not in answer.text, f"without {shown(word)}: {shown(answer.text)}")


async def _repeated(lab: Lab, **fields: Any) -> Answer:
    return await lab.say(REPEATING, temperature=0, max_tokens=24, **fields)


async def _penalised(lab: Lab, **penalty: Any) -> Observation:
    plain = await lab.once("repeated", lambda: _repeated(lab))
    return less_repetitive(plain, await _repeated(lab, **penalty))


@proves("presence_penalty")
async def presence_penalty(lab: Lab) -> Observation:
    return await _penalised(lab, presence_penalty=2)


@proves("frequency_penalty")
async def frequency_penalty(lab: Lab) -> Observation:
    return await _penalised(lab, frequency_penalty=2)


@proves("repetition_penalty")
async def repetition_penalty(lab: Lab) -> Observation:
    return await _penalised(lab, repetition_penalty=2)


def less_repetitive(plain: Answer, penalised: Answer) -> Observation:
    evidence = f"{shown(plain.text, 24)} became {shown(penalised.text, 24)}"
    return honoured_if(penalised.text != plain.text, evidence)


# ----------------------------------------------------------------------------------------------------- choices and text


@proves("n")
async def n(lab: Lab) -> Observation:
    return separate_choices(await lab.say(STORY, **HOT, n=2), 2)


def separate_choices(answer: Answer, wanted: int) -> Observation:
    finished = sum(choice.finish_reason is not None for choice in answer.choices)
    texts = len({choice.text for choice in answer.choices})
    return honoured_if(finished == len(answer.choices) == wanted, f"{finished} choices, {texts} different texts")


@proves("best_of")
async def best_of(lab: Lab) -> Observation:
    answer = await lab.complete(STORY, **HOT, best_of=2)
    if len(answer.choices) == 1 and answer.num_tokens > HOT["max_tokens"]:
        return honoured(f"one choice, and {answer.num_tokens} tokens generated for it")
    return unclear("accepted; one answer does not show what it was chosen from")


@proves("echo")
async def echo(lab: Lab) -> Observation:
    answer = await lab.complete(STORY, **BRIEF, echo=True)
    return honoured_if(STORY in answer.text, f"the answer begins {shown(answer.text, 24)}")


@proves("suffix")
async def suffix(lab: Lab) -> Observation:
    plain = await lab.complete(STORY, **BRIEF)
    filled = await lab.complete(STORY, **BRIEF, suffix=" and they all went home.")
    return honoured_if(filled.text != plain.text, f"{shown(plain.text, 24)} became {shown(filled.text, 24)}")


# ---------------------------------------------------------------------------------------------------- log-probabilities


@proves("logprobs")
async def logprobs(lab: Lab) -> Observation:
    found = []
    capabilities = lab.adapter.capabilities
    if capabilities.completions:
        answer = await lab.complete(STORY, **BRIEF, logprobs=2)
        found.append((completion_logprobs(answer.choices[0]), answer.num_tokens))
    if capabilities.chat:
        answer = await lab.chat(QUESTION, **BRIEF, logprobs=True)
        found.append((chat_logprobs(answer.choices[0]), answer.num_tokens))
    return one_for_each_token(found)


def completion_logprobs(choice: Choice) -> list[float]:
    return [value for piece in choice.logprobs for value in piece.get("token_logprobs") or () if value is not None]


def chat_logprobs(choice: Choice) -> list[float]:
    return [token["logprob"] for piece in choice.logprobs for token in piece.get("content") or ()]


def one_for_each_token(found: Sequence[tuple[Sequence[float], int]]) -> Observation:
    evidence = "; ".join(f"{len(values)} for {num_tokens} tokens" for values, num_tokens in found)
    if any(not values or max(values) > 0 for values, _ in found):
        return ignored(evidence)
    # The token that ends an answer is counted by some, and has no text to stand beside.
    is_complete = all(len(values) in (num_tokens, num_tokens - 1) for values, num_tokens in found)
    return honoured(evidence) if is_complete else unclear(evidence)


@proves("top_logprobs")
async def top_logprobs(lab: Lab) -> Observation:
    answer = await lab.chat(QUESTION, **BRIEF, logprobs=True, top_logprobs=2)
    tokens = [token for piece in answer.choices[0].logprobs for token in piece.get("content") or ()]
    counts = sorted({len(token.get("top_logprobs") or ()) for token in tokens})
    return honoured_if(bool(counts) and counts[0] >= 2, f"alternatives a token: {counts or 'none'}")


# --------------------------------------------------------------------------------------------- tools, structured output

_WEATHER = {"city": {"type": "string", "enum": ["Paris", "Rome"]}}
TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "strict": True,  # vLLM binds arguments to their schema only then
        "parameters": {"type": "object", "properties": _WEATHER, "required": ["city"], "additionalProperties": False},
    },
}
NAMED_TOOL = {"type": "function", "function": {"name": "get_weather"}}
TOOL_QUESTION = "What is the weather in Paris? Use the tool."


@proves("tools")
async def tools(lab: Lab) -> Observation:
    """Forced where that is offered: whether a model calls by itself is the model's affair."""
    choice = {"tool_choice": "required"} if lab.offers("tool_choice") else {}
    return called(await lab.chat(TOOL_QUESTION, temperature=0, max_tokens=96, tools=[TOOL], **choice), is_forced=False)


@proves("tool_choice")
async def tool_choice(lab: Lab) -> Observation:
    answer = await lab.chat(TOOL_QUESTION, temperature=0, max_tokens=96, tools=[TOOL], tool_choice=NAMED_TOOL)
    return called(answer, is_forced=True)


def called(answer: Answer, *, is_forced: bool) -> Observation:
    calls = list(answer.choices[0].calls.values())
    if not calls:
        evidence = f"no call: {shown(answer.text)}, finish {answer.finish_reason}"
        return ignored(evidence) if is_forced and answer.finish_reason == "stop" else unclear(evidence)
    name, arguments = calls[0]["name"], calls[0]["arguments"]
    evidence = f"{name}({shown(arguments, 32)}), finish {answer.finish_reason}"
    if not _is_object(arguments):
        return unclear(f"{evidence}: the arguments are no JSON object")
    return honoured_if(name == "get_weather", evidence)


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


@proves("parallel_tool_calls")
async def parallel_tool_calls(lab: Lab) -> Observation:
    answer = await lab.chat(
        f"{TOOL_QUESTION} Then the weather in Rome.", temperature=0, max_tokens=96, tools=[TOOL],
        tool_choice="required", parallel_tool_calls=False,
    )  # fmt: skip
    num_calls = len(answer.choices[0].calls)
    return (
        ignored(f"{num_calls} calls") if num_calls > 1 else unclear(f"accepted; {num_calls} call, as it may be anyway")
    )


SKY = {
    "type": "object",
    "properties": {"sky": {"type": "string", "enum": ["blue", "grey"]}, "warm": {"type": "boolean"}},
    "required": ["sky", "warm"],
    "additionalProperties": False,
}


@proves("response_format")
async def response_format(lab: Lab) -> Observation:
    wanted = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SKY, "strict": True}}
    return bound_by_schema(await lab.chat(QUESTION, temperature=0, max_tokens=96, response_format=wanted))


def bound_by_schema(answer: Answer) -> Observation:
    evidence = f"{shown(answer.text, 48)}, finish {answer.finish_reason}"
    try:
        found = json.loads(answer.text)
    except ValueError:
        starts_well = answer.text.lstrip().startswith("{") and answer.finish_reason == "length"
        return unclear(evidence) if starts_well else ignored(evidence)
    fits = (
        isinstance(found, dict)
        and set(found) == {"sky", "warm"}
        and found["sky"] in ("blue", "grey")
        and isinstance(found["warm"], bool)
    )
    return honoured_if(fits, evidence)


@proves("reasoning_effort")
async def reasoning_effort(lab: Lab) -> Observation:
    plain = await lab.chat(QUESTION, **BRIEF)
    answer = await lab.chat(QUESTION, **BRIEF, reasoning_effort="low")
    if plain.choices[0].reasoning != answer.choices[0].reasoning:
        return honoured("the reasoning changed")
    return unclear("accepted; this model does not reason")


@proves("cache_salt.chat")
async def cache_salt_of_chats(lab: Lab) -> Observation:
    return await _kept_apart(lab.chat)


@proves("cache_salt.completions")
async def cache_salt_of_completions(lab: Lab) -> Observation:
    return await _kept_apart(lab.complete)


async def _kept_apart(ask: Callable[..., Awaitable[Answer]]) -> Observation:
    """A prompt that is new to the engine, twice with one salt and then with another: both are new as well."""
    prompt = f"{secrets.token_hex(8)} {STORY} {QUESTION} " * 8
    one, other = (CacheSalt(secrets.token_hex(16)) for _ in range(2))
    await ask(prompt, **BRIEF, cache_salt=one)
    again = await ask(prompt, **BRIEF, cache_salt=one)
    return kept_apart(again, await ask(prompt, **BRIEF, cache_salt=other))


def kept_apart(again: Answer, other: Answer) -> Observation:
    if not again.num_cached_tokens:
        return unclear("no token of a repeated prompt came from the cache, or the engine does not tell")
    evidence = f"{again.num_cached_tokens} cached tokens with the same salt, {other.num_cached_tokens} with another"
    return honoured_if(not other.num_cached_tokens, evidence)
