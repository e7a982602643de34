"""Grammars of tool calls: what they let a model write, token by token, and what not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from adapters.tools.call_grammar import forced_call, forced_format, free_calls
from adapters.tools.tool_calls import CallChunks, offered, whole_calls
from adapters.types import Chunk
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


def test_a_reference_to_the_root_of_parameters_is_not_one_to_the_call(walk: Any) -> None:
    """A function that nests itself was made to nest its own call."""
    nested = {
        "type": "object",
        "properties": {"depth": {"type": "integer"}, "inner": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "required": ["depth", "inner"],
        "additionalProperties": False,
    }
    forced = walk(forced_call(offer_of(tool("nest", nested), tool("now"), tool_choice="required"), "json"))
    assert forced.accepts('{"name": "nest", "arguments": {"depth": 1, "inner": {"depth": 2, "inner": null}}}')
    assert forced.stops_at('{"name": "nest", "arguments": {"depth": 1, "inner": {"name"') == 'name"'


def test_a_reference_to_a_property_of_parameters_is_found(walk: Any) -> None:
    pair = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"$ref": "#/properties/a"}}}
    forced = walk(forced_call(offer_of(tool("add", pair), tool_choice="required"), "json"))
    assert forced.accepts('{"name": "add", "arguments": {"a": 1, "b": 2}}')
    assert forced.stops_at('{"name": "add", "arguments": {"a": 1, "b": "') == '"'


def test_a_property_that_is_called_like_a_keyword_is_a_property(walk: Any) -> None:
    odd = {
        "type": "object",
        "properties": {"enum": {"$ref": "#/$defs/n"}, "$ref": {"const": "#"}, "const": {"enum": [{"$ref": "#"}]}},
        "required": ["enum", "$ref", "const"],
        "$defs": {"n": {"type": "integer"}},
    }
    forced = walk(forced_call(offer_of(tool("odd", odd), tool_choice="required"), "json"))
    assert forced.accepts('{"name": "odd", "arguments": {"enum": 1, "$ref": "#", "const": {"$ref": "#"}}}')


@pytest.mark.parametrize("parameters", [{}, {"anyOf": [{"type": "string"}, CITY]}])
def test_arguments_are_an_object_also_where_their_schema_does_not_say_so(walk: Any, parameters: Any) -> None:
    forced = walk(forced_call(offer_of(tool("f", parameters), tool_choice="required"), "json"))
    assert forced.accepts('{"name": "f", "arguments": {"city": "Rome"}}')
    assert forced.stops_at('{"name": "f", "arguments": "') == '"'


@pytest.mark.parametrize("name", ["files.read", "mcp:files/read", "über-1"])
def test_every_name_that_the_routes_take_can_be_called(walk: Any, name: str) -> None:
    call = f'<tool_call>\n{{"name": "{name}", "arguments": {{"city": "Rome"}}}}\n</tool_call>'
    offer = offer_of(tool(name, CITY), tool_choice="required")
    assert walk(forced_call(offer, "hermes")).accepts(call)
    chunks = list(CallChunks(offer, "hermes", num_choices=1, forced_format="hermes").feed(Chunk(text=call)))
    calls = whole_calls([chunk.tool_calls for chunk in chunks if chunk.tool_calls is not None])
    assert [call["function"] for call in calls] == [{"name": name, "arguments": '{"city": "Rome"}'}]


@pytest.mark.parametrize("end", [{"finish_reason": "length"}, {"finish_reason": "stop", "stop_string": "arg"}])
@pytest.mark.parametrize("piece", ["<tool_", '<tool_call>\n{"name', '<tool_call>\n{"name": "get_weather", "'])
def test_the_beginning_of_a_forced_call_that_was_cut_is_not_told_as_an_answer(piece: str, end: Any) -> None:
    calls = CallChunks(
        offer_of(tool("get_weather", CITY), tool_choice="required"), "hermes", num_choices=1, forced_format="hermes"
    )
    chunks = [*calls.feed(Chunk(text=piece)), *calls.feed(Chunk(**end))]
    assert [chunk for chunk in chunks if chunk.text or chunk.tool_calls] == []
    assert chunks[-1].finish_reason == end["finish_reason"]
    free = CallChunks(offer_of(tool("get_weather", CITY)), "hermes", num_choices=1)
    assert "".join(chunk.text for chunk in free.feed(Chunk(text=piece, **end))) == piece
