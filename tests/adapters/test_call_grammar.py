"""Grammars of tool calls: what they let a model write, token by token, and what not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from adapters.tools.call_grammar import forced_call, forced_format, free_calls
from adapters.tools.tool_calls import offered
from native_engine.errors import InvalidParams
from native_engine.sampling_params import Grammar
from native_engine.structured import GrammarCompiler
from native_engine.tokenizer import TextTokenizer, open_tokenizer
from tests.adapters.test_native import chat
from tests.native_engine.tiny_llama import EOS, write_tiny_llama

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
ROME = '{"name": "get_weather", "arguments": {"city": "Rome"}}'


def tool(name: str, parameters: Any = None, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return open_tokenizer(write_tiny_llama(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def grammars(tokenizer: TextTokenizer) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, {1})
    yield compiler
    compiler.close()


class Walk:
    """Writes texts under a grammar."""

    def __init__(self, grammars: GrammarCompiler, tokenizer: TextTokenizer, source: str | None) -> None:
        assert source is not None
        self._new = lambda: grammars.matcher(Grammar("lark", source)).result()
        self._encode = tokenizer.encode

    def accepts(self, text: str) -> bool:
        """To its end, and there it may end."""
        return self._reaches(text + EOS) == len(self._encode(text + EOS))

    def stops_at(self, text: str) -> str:
        """What of the text cannot come."""
        return text[self._reaches(text) :]

    def _reaches(self, text: str) -> int:
        matcher = self._new()
        tokens = self._encode(text)
        for number, token in enumerate(tokens):
            if not matcher.allowed[token]:
                return number
            if number + 1 < len(tokens):
                matcher.accept(token)
        return len(tokens)


@pytest.fixture
def walk(grammars: GrammarCompiler, tokenizer: TextTokenizer) -> Any:
    return lambda source: Walk(grammars, tokenizer, source)


def offer_of(*tools: dict[str, Any], **fields: Any) -> Any:
    return offered(chat(tools=list(tools), **fields), "native")


def test_a_forced_call_is_written_as_the_model_was_taught_to(walk: Any) -> None:
    offer = offer_of(tool("get_weather", CITY), tool("now"), tool_choice="required")
    hermes, bare = walk(forced_call(offer, "hermes")), walk(forced_call(offer, "llama3_json"))
    assert hermes.accepts(f"<tool_call>\n{ROME}\n</tool_call>")
    assert hermes.accepts('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
    assert bare.accepts(ROME)
    assert hermes.stops_at("Sure") == "Sure"
    assert hermes.stops_at(f"<tool_call>\n{ROME}\n</tool_call>\n") == "\n"
    assert bare.stops_at('{"name": "later"') == 'later"'
    assert bare.stops_at('{"name": "get_weather", "arguments": {"town"') == 'town"'
    assert (forced_format("hermes"), forced_format("mistral")) == ("hermes", "json")


def test_a_named_function_is_the_only_one(walk: Any) -> None:
    named = {"type": "function", "function": {"name": "now"}}
    forced = walk(forced_call(offer_of(tool("get_weather", CITY), tool("now"), tool_choice=named), "json"))
    assert forced.accepts('{"name": "now", "arguments": {}}')
    assert forced.stops_at('{"name": "get') == "get"


def test_keywords_that_no_grammar_holds_are_left_out_unless_a_tool_is_strict(
    walk: Any, grammars: GrammarCompiler
) -> None:
    tags = {"type": "object", "properties": {"tags": {"type": "array", "uniqueItems": True}}, "required": ["tags"]}
    loose = walk(forced_call(offer_of(tool("tag", tags), tool_choice="required"), "json"))
    assert loose.accepts('{"name": "tag", "arguments": {"tags": [1, 1]}}')
    strict = forced_call(offer_of(tool("tag", tags, strict=True), tool_choice="required"), "json")
    with pytest.raises(InvalidParams, match="uniqueItems"):
        grammars.matcher(Grammar("lark", strict)).result()


def test_a_free_answer_may_be_any_text_but_a_call_that_has_begun_is_one(walk: Any) -> None:
    free = walk(free_calls(offer_of(tool("get_weather", CITY, strict=True), tool("now")), "hermes"))
    for text in ("", "It rains. <tool ä 😀", f"Let me see.\n<tool_call>\n{ROME}\n</tool_call>"):
        assert free.accepts(text)
    assert free.accepts(f"<tool_call>\n{ROME}\n</tool_call>\n<tool_call>\n{ROME}\n</tool_call> Done.")
    assert free.accepts('<tool_call>\n{"name": "now", "arguments": {"anything": [1]}}\n</tool_call>')
    assert free.stops_at('<tool_call>\n{"name": "later"') == 'later"'
    assert free.stops_at('<tool_call>\n{"name": "get_weather", "arguments": {"city": 5') == "5"
    assert not free.accepts("<tool_call>\n")


def test_a_free_answer_is_held_only_where_a_tool_is_strict_and_the_format_has_a_mark() -> None:
    assert free_calls(offer_of(tool("now")), "hermes") is None
    assert free_calls(offer_of(tool("now", strict=True)), "json") is None


def test_definitions_of_parameters_are_found(walk: Any) -> None:
    tree = {
        "type": "object",
        "properties": {"root": {"$ref": "#/$defs/node"}},
        "required": ["root"],
        "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}},
    }
    for source in (
        forced_call(offer_of(tool("grow", tree), tool_choice="required"), "json"),
        free_calls(offer_of(tool("grow", tree, strict=True)), "hermes"),
    ):
        call = '{"name": "grow", "arguments": {"root": {"next": {"next": {}}}}}'
        frame = f"<tool_call>\n{call}\n</tool_call>"
        assert walk(source).accepts(call if "TEXT" not in (source or "") else frame)
