"""Texts held to a grammar: whatever the logits say, what ends by itself is what was asked for."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from llguidance import LLParserLimits

from native_engine.async_engine import AsyncEngine
from native_engine.blocks import BlockPool
from native_engine.config import EngineConfig
from native_engine.engine import Engine
from native_engine.errors import EngineStopped, GrammarFailed, InvalidParams
from native_engine.loading import LoadedModel, load
from native_engine.sampling_params import Grammar, SamplingParams
from native_engine.structured import MAX_GRAMMAR_CHARS, GrammarCompiler
from native_engine.tokenizer import open_tokenizer
from tests.native_engine.tiny_llama import tiny_config, write_tiny_llama

SHORT = {"type": "string", "maxLength": 12}
PERSON = {
    "type": "object",
    "properties": {"name": SHORT, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "object": PERSON,
    "nested": {
        "type": "object",
        "properties": {"who": PERSON, "where": {"type": "object", "properties": {"city": SHORT}, "required": ["city"]}},
        "required": ["who", "where"],
        "additionalProperties": False,
    },
    "enum": {"enum": ["red", 7, None, True, "é", "日本", "😀", 'a "quote" and a \\']},
    "array": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 5},
    "pair": {"type": "array", "prefixItems": [SHORT, {"type": "integer"}], "items": False, "minItems": 2},
    "reference": {
        "$defs": {"tree": {"type": "object", "properties": {"left": {"$ref": "#/$defs/tree"}, "leaf": SHORT}}},
        "$ref": "#/$defs/tree",
    },
    "any of": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 99}, PERSON, {"type": "null"}]},
    "all of": {"allOf": [PERSON, {"properties": {"age": {"minimum": 18}}}]},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
    "nested quantifiers": {"type": "string", "pattern": "^(a+)+b$", "maxLength": 20},
    "date": {"type": "string", "format": "date"},
    "number": {"type": "number", "minimum": -1.5, "maximum": 2.25},
    "multiple": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 1000},
    "const": {"const": {"a": [1, "x"]}},
    "map": {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 3},
}
HOT = SamplingParams(temperature=1.0, max_tokens=400)


def of(schema: Any) -> Grammar:
    return Grammar("json", json.dumps(schema))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"), tiny_config(max_model_len=1024))


class Bench:
    """One loaded model and the grammars of it."""

    def __init__(self, path: Path, kernel_cache: Path, **settings: Any) -> None:
        config = EngineConfig(
            **({"block_size": 16, "kv_cache_mib": 16, "max_num_seqs": 16, "num_threads": 1} | settings)
        )
        self.loaded: LoadedModel = load(path, config, kernel_cache=kernel_cache)
        model = self.loaded.model_config
        self.grammars = GrammarCompiler(self.loaded.tokenizer, model.vocab_size, model.eos_token_ids)
        self.engine = self.loaded.engine

    def generate(self, requests: list[tuple[str, SamplingParams]]) -> list[tuple[list[int], str]]:
        """Tokens and finish reason of each prompt, all at once; the books are checked after every step."""
        answers: list[tuple[list[int], str]] = [([], "")] * len(requests)
        for number, (prompt, params) in enumerate(requests):
            matcher = None if params.grammar is None else self.grammars.matcher(params.grammar).result()
            self.engine.add(str(number), self.loaded.tokenizer.encode(prompt), params, matcher=matcher)
        while self.engine.has_work:
            for output in self.engine.step():
                tokens, _ = answers[int(output.request_id)]
                answers[int(output.request_id)] = ([*tokens, *output.token_ids], output.finish_reason or "")
            self.engine.check()
        return answers

    def texts(self, grammar: Grammar, params: SamplingParams, count: int = 4) -> list[str]:
        """What ended by itself, without its end-of-text token; all of it was sampled without special tokens."""
        requests = [("Tell me.", replace(params, grammar=grammar, seed=seed)) for seed in range(count)]
        answers = self.generate(requests)
        special = self.loaded.tokenizer.special_ids
        for tokens, reason in answers:
            assert special.isdisjoint(tokens[:-1] if reason == "stop" else tokens)
        return [self.loaded.tokenizer.decode(tokens[:-1]) for tokens, reason in answers if reason == "stop"]


@pytest.fixture(scope="module")
def bench(folder: Path, kernel_cache: Path) -> Iterator[Bench]:
    made = Bench(folder, kernel_cache)
    yield made
    made.grammars.close()


@pytest.fixture(scope="module")
def real_bench(model_path: Path, kernel_cache: Path) -> Iterator[Bench]:
    made = Bench(model_path, kernel_cache, block_size=32, kv_cache_mib=64)
    yield made
    made.grammars.close()


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_a_model_of_random_weights_writes_is_valid(bench: Bench, name: str) -> None:
    texts = bench.texts(of(SCHEMAS[name]), HOT)
    assert texts
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMAS[name])


@pytest.mark.model
@pytest.mark.parametrize("name", SCHEMAS)
def test_what_the_real_model_writes_is_valid(real_bench: Bench, name: str) -> None:
    texts = real_bench.texts(of(SCHEMAS[name]), replace(HOT, max_tokens=160), count=2)
    assert texts or name == "number"  # whose digits may have no end
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMAS[name])


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, max_tokens=400),
        replace(HOT, temperature=5.0, top_p=0.5),
        replace(HOT, top_k=1),
        replace(HOT, min_p=0.9),
        replace(HOT, repetition_penalty=10.0),
        replace(HOT, presence_penalty=2.0, frequency_penalty=2.0),
    ],
)
def test_no_way_of_sampling_leads_out_of_the_grammar(bench: Bench, params: SamplingParams) -> None:
    for text in bench.texts(of(PERSON), params):
        jsonschema.validate(json.loads(text), PERSON)


def test_a_regular_expression_is_matched_as_a_whole(bench: Bench) -> None:
    texts = bench.texts(Grammar("regex", "(ab){2,5}(c|d)"), HOT)
    assert len(texts) == 4
    assert all(re.fullmatch("(ab){2,5}(c|d)", text) for text in texts)


def test_a_lark_grammar_is_followed(bench: Bench) -> None:
    texts = bench.texts(Grammar("lark", 'start: "(" inner ")"\ninner: start | /[0-9]{1,3}/'), HOT)
    assert texts
    assert all(re.fullmatch(r"\(+[0-9]{1,3}\)+", text) and text.count("(") == text.count(")") for text in texts)


def test_white_space_ends(bench: Bench) -> None:
    """A model that likes nothing better than white space gets to the end nevertheless."""
    assert bench.texts(of({"type": "array", "maxItems": 0}), HOT, count=8)
    assert all(len(text) < 40 for text in bench.texts(of({"type": "array", "maxItems": 0}), HOT, count=8))


def test_a_text_that_is_cut_says_so(bench: Bench) -> None:
    (tokens, reason) = bench.generate([("Hi", replace(HOT, max_tokens=5, grammar=of(PERSON)))])[0]
    assert (len(tokens), reason) == (5, "length")


def mixed_requests() -> list[tuple[str, SamplingParams]]:
    free = [
        (f"A {'story ' * number}", SamplingParams(seed=number, max_tokens=60, ignore_eos=True)) for number in range(5)
    ]
    held = [
        (f"A {'list ' * number}", replace(HOT, seed=number, max_tokens=80, grammar=of(schema)))
        for number, schema in enumerate(list(SCHEMAS.values())[:7])
    ]
    return [each for pair in zip(held, free, strict=False) for each in pair] + held[5:]


def test_preempted_and_batched_answers_are_those_of_a_request_alone(
    bench: Bench, folder: Path, kernel_cache: Path
) -> None:
    """Free rows beside held ones, and held ones that are computed again in the middle, change no token."""
    requests = mixed_requests()
    alone = [bench.generate([request])[0] for request in requests]
    assert bench.generate(requests) == alone
    tight = Bench(folder, kernel_cache, max_num_batched_tokens=32)
    tight.engine = Engine(tight.engine._config, BlockPool(24, 16), tight.engine._runner)
    try:
        assert tight.generate(requests) == alone
        assert tight.engine.stats().num_preemptions > 0
    finally:
        tight.grammars.close()


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_real_models_free_rows_do_not_notice_held_ones(real_bench: Bench) -> None:
    requests = mixed_requests()[:6]
    alone = [real_bench.generate([request])[0] for request in requests]
    assert real_bench.generate(requests) == alone


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (of({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (of({"not": {"type": "string"}}), "not"),
        (of({"not": {"type": "string"}, "x-guidance": {"lenient": True}}), "not"),
        (of({"type": "string", "pattern": "a(?=b)"}), "look-around"),
        (of({"type": "string", "format": "moon-phase"}), "moon-phase"),
        (of({"$ref": "#/$defs/nowhere"}), "nowhere"),
        (of({"$ref": "http://127.0.0.1:9/schema"}), "127.0.0.1"),
        (of({"type": "integer", "minimum": 5, "maximum": 3}), "minimum"),
        (of(False), "JSON schema"),
        (of({"type": "moon"}), "moon"),
        (Grammar("json", "{"), "JSON schema"),
        (Grammar("json", '{"items":' * 5000 + "{}" + "}" * 5000), "recursion"),
        (Grammar("regex", "("), "unclosed group"),
        (Grammar("regex", "(" * 30_000 + ")" * 30_000), "nested parentheses"),
        (Grammar("lark", "start: " + "(" * 20_000 + '"a"' + ")" * 20_000), "deep"),
        (Grammar("lark", "nonsense"), ""),
        (of({"enum": ["x" * MAX_GRAMMAR_CHARS]}), "at most 65536 characters"),
    ],
)
def test_what_cannot_be_followed_is_refused_with_its_reason(bench: Bench, grammar: Grammar, reason: str) -> None:
    with pytest.raises(InvalidParams, match=f"^grammar .*{re.escape(reason)}"):
        bench.grammars.matcher(grammar).result()
    assert bench.texts(of(PERSON), HOT)  # and nothing is the worse for it


@pytest.mark.parametrize("link", [{"items": {}}, {"anyOf": [{}]}, {}])
def test_a_long_chain_of_references_does_not_overflow_the_stack(bench: Bench, link: dict[str, Any]) -> None:
    """Compiled in a thread of the usual size, this ended the process."""

    def definition(number: int) -> dict[str, Any]:
        target = {"$ref": f"#/a{number + 1}"}
        return {key: [target] if isinstance(value, list) else target for key, value in link.items()} or target

    size = (MAX_GRAMMAR_CHARS - 1000) // len(json.dumps({"a1000": definition(1000)}, separators=(",", ":")))
    chain = {f"a{number}": definition(number) for number in range(size)} | {f"a{size}": {}, "$ref": "#/a0"}
    failure = bench.grammars.matcher(Grammar("json", json.dumps(chain, separators=(",", ":")))).exception()
    assert failure is None or "stack level" in str(failure)
    assert bench.texts(of(PERSON), HOT)


LONG = of({"type": "string", "minLength": 20, "maxLength": 40})
TIGHT = LLParserLimits(max_lexer_states=25, verbose_errors=False)


def test_a_text_beyond_the_limits_ends_with_an_error_and_leaves_the_others_alone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    neighbour = ("Hi", replace(HOT, grammar=of({"const": 5}), seed=3))
    (alone,) = bench.generate([neighbour])
    monkeypatch.setattr(bench.grammars, "_limits", TIGHT)
    for _ in range(2):  # the second time it is compiled anew, and not dead from the beginning
        failed, beside = bench.generate([("Hi", replace(HOT, grammar=LONG, seed=1)), neighbour])
        assert failed[1] == "error"
        assert 1 < len(failed[0]) < 20
        assert beside == alone


@pytest.mark.replay("A25")
def test_ten_thousand_grammars_leave_only_the_last_ones(folder: Path) -> None:
    grammars = GrammarCompiler(open_tokenizer(folder), 320, {1}, max_kept=8)
    try:
        futures = [grammars.matcher(of({"const": f"a{number}"})) for number in range(10_000)]
        assert not any(future.exception() for future in futures)
        assert len(grammars._kept) == 8
        assert next(reversed(grammars._kept)) == of({"const": "a9999"})
    finally:
        grammars.close()


def test_equal_requests_share_one_compilation_and_no_state(bench: Bench) -> None:
    first, second = (bench.grammars.matcher(of({"const": "ab"})).result() for _ in range(2))
    quote = bench.loaded.tokenizer.encode('"')[0]
    first.accept(quote)
    assert not first.allowed[quote]
    assert second.allowed[quote]


def test_min_tokens_and_ignore_eos_do_not_go_with_a_grammar() -> None:
    with pytest.raises(InvalidParams, match="min_tokens must be 0 beside a grammar"):
        SamplingParams(grammar=of({}), min_tokens=3)
    with pytest.raises(InvalidParams, match="ignore_eos must be false beside a grammar"):
        SamplingParams(grammar=of({}), ignore_eos=True)


def test_a_grammar_without_its_matcher_is_not_taken_for_free_text(bench: Bench) -> None:
    with pytest.raises(InvalidParams, match="grammar must come with a matcher"):
        bench.engine.add("x", [5], replace(HOT, grammar=of({})))


async def test_the_asynchronous_face_streams_held_text_and_its_failures(folder: Path, kernel_cache: Path) -> None:
    engine = await asyncio.to_thread(AsyncEngine.load, folder, EngineConfig(kv_cache_mib=4), kernel_cache=kernel_cache)

    async def text(grammar: Grammar) -> str:
        params = replace(HOT, grammar=grammar, seed=1)
        return "".join([each.text async for each in engine.generate([5], params, request_id=str(id(params)))])

    try:
        jsonschema.validate(json.loads(await text(of(PERSON))), PERSON)
        engine._grammars._limits = TIGHT
        with pytest.raises(GrammarFailed, match="cannot follow its grammar any further: lexer error: too many states"):
            await text(LONG)
        with pytest.raises(InvalidParams, match="uniqueItems"):
            await text(of({"uniqueItems": True}))
        assert engine.stats().num_running == 0
        waiting = [asyncio.create_task(text(of({"const": f"c{number}"}))) for number in range(50)]
        await asyncio.sleep(0)
    finally:
        await asyncio.to_thread(engine.close)
    ends = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(each, EngineStopped | str) for each in ends)
    assert isinstance(ends[-1], EngineStopped)
    with pytest.raises(EngineStopped):
        await text(of({}))
