"""Bad input by route, as tables: a name, what is sent, and what is at fault.

    for route, cases in BODIES.items():              # "/v1/chat/completions": {"A19 n huge": Bad(b"...", "n"), ...}
    num_cases()                                      # how many there are, all tables together

A name begins with the number of the attack (tests/reported.py) where it has one. Nothing here runs; see
tests/gateway/test_bad_input.py.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"
MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
RESPONSES = "/v1/responses"
TOKENIZE = "/tokenize"
DETOKENIZE = "/detokenize"

SAID = [{"role": "user", "content": "Hello"}]
GOOD: dict[str, dict[str, Any]] = {  # a body for each route that is answered with 200
    CHAT: {"model": "m", "messages": SAID},
    COMPLETIONS: {"model": "m", "prompt": "Hello"},
    EMBEDDINGS: {"model": "e", "input": "Hello"},
    MESSAGES: {"model": "m", "messages": SAID, "max_tokens": 5},
    COUNT: {"model": "m", "messages": SAID},
    RESPONSES: {"model": "m", "input": "Hello"},
    TOKENIZE: {"model": "m", "prompt": "Hello"},
    DETOKENIZE: {"model": "m", "tokens": [1]},
}

BIG = "x" * 1_000_000
LEFT_OUT = object()


class Bad(NamedTuple):
    body: bytes
    param: str | None = None  # what the refusal has to name
    status: int = 400


def sent(route: str, **fields: Any) -> bytes:
    """The route's good body with some fields changed."""
    body = {**GOOD[route], **fields}
    return json.dumps({name: value for name, value in body.items() if value is not LEFT_OUT}).encode()


def tool(name: Any = "f", **schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", **schema}}}


def image(url: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}


def called(id: str) -> dict[str, Any]:
    """A call in Anthropic's words."""
    return {"type": "tool_use", "id": id, "name": "f", "input": {}}


def result(id: str) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": id, "content": "x"}


# ------------------------------------------------------------------------- bytes that are no body of any route

RAW: dict[str, bytes] = {
    "nothing": b"",
    "blanks": b" \r\n\t",
    "half an object": b"{",
    "a list": b"[]",
    "a text": b'"hello"',
    "a number": b"17",
    "null": b"null",
    "two documents": b'{"model":"m"}{"model":"m"}',
    "a comma too many": b'{"model":"m",}',
    "single quotes": b"{'model':'m'}",
    "a comment": b'{"model":"m" /* x */}',
    "a key that is no text": b'{1:"m"}',
    "a form": b"model=m&prompt=x",
    "XML": b"<?xml version='1.0'?><!DOCTYPE a [<!ENTITY b 'c'>]><a>&b;</a>",
    "YAML": b"model: m\nprompt: x\n",
    "a pickle": b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x8c\x06system\x93.",
    "a PNG": b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR",
    "A15 a million opening brackets": b"[" * 1_000_000,
    "A15 a hundred thousand objects inside each other": b'{"a":' * 100_000,
    "A15 nesting beyond the cap that is closed": b'{"model":' + b"[" * 100 + b"]" * 100 + b"}",
    "A15 brackets deep inside tools": b'{"model":"m","tools":[' + b"[" * 4000 + b"]" * 4000 + b"]}",
    "A15 a million lists beside each other": b"[" + b"[]," * 1_300_000 + b"[]]",
    "A17 invalid UTF-8": b'{"model":"\xff\xfe"}',
    "A17 overlong UTF-8": b'{"model":"\xc0\xaf"}',
    "A17 half a character": b'{"model":"m\xe2\x82"}',
    "A17 a surrogate in UTF-8": b'{"model":"\xed\xa0\x80"}',
    "A17 a surrogate in an escape": b'{"model":"\\ud800"}',
    "A17 a byte order mark": b'\xef\xbb\xbf{"model":"m"}',
    "A17 UTF-16": '{"model":"m"}'.encode("utf-16"),
    "A17 a NUL between fields": b'{"model":"m"\x00}',
    "A17 a line break inside a text": b'{"model":"a\nb"}',
    "A22 NaN": b'{"temperature":NaN}',
    "A22 a number of a million digits": b'{"max_tokens":' + b"9" * 1_000_000 + b"}",
    "A22 an exponent without end": b'{"temperature":1e999999999}',
}

# ---------------------------------------------------------------------------------- fields, by what they are part of

Fields = dict[str, dict[str, Any]]

MODEL: Fields = {
    "the model left out": {"model": LEFT_OUT},
    "the model null": {"model": None},
    "the model a number": {"model": 5},
    "the model a list": {"model": ["m"]},
    "the model empty": {"model": ""},
    "the model a megabyte": {"model": BIG},
}
UNKNOWN: Fields = {
    "an unknown field": {"nonsense": 1},
    "an unknown field of a megabyte": {BIG: 1},
    "A27 a chat template of the caller's": {"chat_template": "{{ 7 * 7 }}"},
    "A27 arguments for the template": {"chat_template_kwargs": {"tokenize": True}},
    "A29 prompt_embeds": {"prompt_embeds": "gASV"},
    "A33 a base_url of the caller's": {"base_url": "http://169.254.169.254/"},
    "A33 an api_base of the caller's": {"api_base": "http://127.0.0.1:1"},
    "A39 a role of the caller's": {"role": "admin"},
    "A39 another tenant's id": {"tenant_id": "other"},
    "A46 a salt of the caller's": {"cache_salt": "another tenant's"},
}
GENERATION: Fields = {
    "A19 n huge": {"n": 10**9},
    "A19 n negative": {"n": -1},
    "A19 n zero": {"n": 0},
    "A19 n true": {"n": True},
    "A19 n a fraction": {"n": 1.5},
    "A19 n a text": {"n": "1"},
    "max_tokens zero": {"max_tokens": 0},
    "max_tokens negative": {"max_tokens": -1},
    "max_tokens beyond 32 bits": {"max_tokens": 2**31},
    "max_tokens a text": {"max_tokens": "5"},
    "min_tokens negative": {"min_tokens": -1},
    "A22 temperature negative": {"temperature": -1},
    "A22 temperature 1e308": {"temperature": 1e308},
    "A22 temperature a text": {"temperature": "hot"},
    "A22 top_p zero": {"top_p": 0},
    "A22 top_p above one": {"top_p": 1.1},
    "A22 top_k beyond its range": {"top_k": -2},
    "A22 min_p beyond its range": {"min_p": 2},
    "A22 presence_penalty beyond its range": {"presence_penalty": 3},
    "A22 frequency_penalty beyond its range": {"frequency_penalty": -1e30},
    "A22 repetition_penalty zero": {"repetition_penalty": 0},
    "A22 a huge seed": {"seed": 10**30},
    "A22 a seed that is a text": {"seed": "7"},
    "A22 logit_bias a list": {"logit_bias": [1]},
    "A22 logit_bias of no use": {"logit_bias": {"1": "x"}},
    "A22 logit_bias beyond its range": {"logit_bias": {"1": 101}},
    "A22 logit_bias of a word": {"logit_bias": {"hello": 1}},
    "A22 logit_bias of a token below zero": {"logit_bias": {"-1": 1}},
    "A22 logit_bias of a token with 400 digits": {"logit_bias": {"9" * 400: 1}},
    "A22 logit_bias of a hundred thousand tokens": {"logit_bias": {str(token): 1 for token in range(100_000)}},
    "A23 100,000 stop strings": {"stop": ["x"] * 100_000},
    "A23 a stop string of a megabyte": {"stop": BIG},
    "A23 an empty stop string": {"stop": ""},
    "A23 a stop string among others that is empty": {"stop": ["a", ""]},
    "A23 a stop string that is a number": {"stop": [1]},
    "ignore_eos a text": {"ignore_eos": "yes"},
    "stream a text": {"stream": "true"},
    "stream_options without stream": {"stream_options": {"include_usage": True}},
    "stream_options a list": {"stream_options": [], "stream": True},
    "an unknown option of a stream": {"nonsense": 1, "stream_options": {"nonsense": 1}, "stream": True},
    "user a number": {"user": 5},
    "user a megabyte": {"user": BIG},
}
TURNS: Fields = {
    "A18 messages left out": {"messages": LEFT_OUT},
    "A18 messages null": {"messages": None},
    "A18 messages empty": {"messages": []},
    "A18 messages a text": {"messages": "hi"},
    "A18 messages an object": {"messages": {"role": "user", "content": "x"}},
    "A18 messages nested": {"messages": [SAID]},
    "A18 a message that is a text": {"messages": ["hi"]},
    "A18 a message without a role": {"messages": [{"content": "x"}]},
    "A18 an unknown role": {"messages": [{"role": "root", "content": "x"}]},
    "A18 a role of a megabyte": {"messages": [{"role": BIG, "content": "x"}]},
    "A18 a role that is a number": {"messages": [{"role": 1, "content": "x"}]},
    "A18 content a number": {"messages": [{"role": "user", "content": 5}]},
    "A18 content an object": {"messages": [{"role": "user", "content": {"text": "x"}}]},
    "A18 a part that is a text": {"messages": [{"role": "user", "content": ["x"]}]},
    "A18 a part without a type": {"messages": [{"role": "user", "content": [{"text": "x"}]}]},
    "A18 a part of a type that is an object": {"messages": [{"role": "user", "content": [{"type": {"a": 1}}]}]},
    "A18 a part of an unknown type": {"messages": [{"role": "user", "content": [{"type": "video"}]}]},
    "A18 a part of a type of a megabyte": {"messages": [{"role": "user", "content": [{"type": BIG}]}]},
    "A18 a part without its text": {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
    "A18 a part whose text is a list": {"messages": [{"role": "user", "content": [{"type": "text", "text": []}]}]},
    "A18 a part with an unknown field": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "x", BIG: 1}]}]
    },
    "A18 ten thousand messages": {"messages": SAID * 10_000},
}
CHAT_TURNS: Fields = {
    "A31 an image at the address of a cloud's metadata": {
        "messages": [image("http://169.254.169.254/latest/meta-data")]
    },
    "A31 an image in a file": {"messages": [image("file:///etc/passwd")]},
    "A31 an image on loopback": {"messages": [image("http://[::1]:8080/admin/status")]},
    "A31 an image on loopback as one number": {"messages": [image("http://2130706433/")]},
    "A31 an image on loopback in hexadecimal": {"messages": [image("http://0x7f.1/")]},
    "A31 an image behind a backslash": {"messages": [image("http:\\\\127.0.0.1\\x")]},
    "A31 an image whose address is an object": {"messages": [image({"a": 1})]},
    "A18 tool_calls a text": {"messages": [{"role": "assistant", "tool_calls": "x"}]},
    "A18 a tool call that is a text": {"messages": [{"role": "assistant", "tool_calls": ["x"]}]},
    "A18 a tool call without a function": {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
    "A18 a tool call of a function without a name": {
        "messages": [{"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": {}}]}]
    },
    "A18 a tool call whose name is a number": {
        "messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": 5}}]}]
    },
    "A18 a tool call whose arguments are a number": {
        "messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": 5}}]}]
    },
    "A18 a tool call whose id is a list": {
        "messages": [{"role": "assistant", "tool_calls": [{"id": [], "function": {"name": "f", "arguments": "{}"}}]}]
    },
    "A18 a name that is a number": {"messages": [{"role": "user", "content": "x", "name": 5}]},
    "A18 reasoning that is a list": {"messages": [{"role": "assistant", "content": "x", "reasoning": []}]},
}
CHAT_FIELDS: Fields = {
    "A21 logprobs a number": {"logprobs": 5},
    "A21 top_logprobs negative": {"top_logprobs": -1},
    "A21 top_logprobs huge": {"top_logprobs": 10**9},
    "A21 top_logprobs the size of a vocabulary": {"top_logprobs": 49_152},
    "A26 tools an object": {"tools": tool()},
    "A26 tools of texts": {"tools": ["f"]},
    "A26 ten thousand tools": {"tools": [tool()] * 10_000},
    "A26 a tool without a type": {"tools": [{"function": {"name": "f"}}]},
    "A26 a tool whose type is a number": {"tools": [{"type": 5, "function": {"name": "f"}}]},
    "A26 a tool without a function": {"tools": [{"type": "function"}]},
    "A26 a tool without a name": {"tools": [{"type": "function", "function": {}}]},
    "A26 a tool whose name ends in a line break": {"tools": [tool("f\n")]},
    "A26 a tool whose name holds a NUL": {"tools": [tool("f\x00")]},
    "A26 a tool whose name is empty": {"tools": [tool("")]},
    "A26 a tool whose name is a megabyte": {"tools": [tool(BIG)]},
    "A26 a tool whose name is a number": {"tools": [tool(5)]},
    "A26 a tool whose parameters are a list": {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]
    },
    "A26 a tool of an unknown type of JSON": {"tools": [tool(type="text")]},
    "A26 a tool whose type of JSON is a number": {"tools": [tool(type=5)]},
    "A26 a tool with an unclosed pattern": {"tools": [tool(properties={"a": {"type": "string", "pattern": "((("}})]},
    "A26 a tool whose pattern is a number": {"tools": [tool(properties={"a": {"pattern": 5}})]},
    "A26 a tool whose pattern is a megabyte": {"tools": [tool(properties={"a": {"pattern": BIG}})]},
    "A26 a tool with a cut escape": {"tools": [tool(properties={"a": {"pattern": "a\\"}})]},
    "A26 a tool whose enum is a text": {"tools": [tool(properties={"a": {"enum": "x"}})]},
    "A26 a tool whose properties are a list": {"tools": [tool(properties=[])]},
    "A26 a tool with a fault deep inside": {"tools": [tool(properties={"a": {"anyOf": [{"items": {"type": 1}}]}})]},
    "A26 a choice that is none": {"tool_choice": "maybe", "tools": [tool()]},
    "A26 a choice of a number": {"tool_choice": 5, "tools": [tool()]},
    "A26 a choice without a type": {"tool_choice": {}, "tools": [tool()]},
    "A26 a choice without a function": {"tool_choice": {"type": "function"}, "tools": [tool()]},
    "A26 a choice of a tool that is not there": {
        "tool_choice": {"type": "function", "function": {"name": "g"}},
        "tools": [tool()],
    },
    "A26 parallel_tool_calls a text": {"parallel_tool_calls": "yes"},
    "functions of the old kind": {"functions": [{"name": "f"}]},
    "a choice of the old kind": {"function_call": "auto"},
    "response_format a text": {"response_format": "json"},
    "response_format empty": {"response_format": {}},
    "response_format of a number": {"response_format": {"type": 5}},
    "response_format without its schema": {"response_format": {"type": "json_schema"}},
    "response_format whose schema is a text": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": "x"}}
    },
    "response_format whose schema has an unknown type": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "text"}}}
    },
    "response_format whose schema has an unclosed pattern": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"pattern": "[a"}}}
    },
    "response_format whose name is a list": {
        "response_format": {"type": "json_schema", "json_schema": {"name": [1], "schema": {}}}
    },
    "modalities of audio": {"modalities": ["audio"]},
    "audio": {"audio": {"voice": "alloy"}},
    "prediction": {"prediction": {"type": "content", "content": "x"}},
    "web_search_options": {"web_search_options": {}},
    "metadata of numbers": {"metadata": {"a": 1}},
    "metadata of seventeen": {"metadata": {str(number): "x" for number in range(17)}},
    "metadata of a megabyte": {"metadata": {"a": BIG}},
    "service_tier a number": {"service_tier": 5},
    "safety_identifier a megabyte": {"safety_identifier": BIG},
    "reasoning_effort a number": {"reasoning_effort": 5},
    "reasoning_effort a megabyte": {"reasoning_effort": BIG},
}
PROMPT: Fields = {
    "the prompt left out": {"prompt": LEFT_OUT},
    "the prompt null": {"prompt": None},
    "the prompt true": {"prompt": True},
    "the prompt an object": {"prompt": {"a": 1}},
    "the prompt an empty list": {"prompt": []},
    "the prompt a list with an empty list": {"prompt": [[]]},
    "the prompt a list of which one is empty": {"prompt": [[1], []]},
    "the prompt of ids and texts": {"prompt": [1, "a"]},
    "the prompt of texts and lists": {"prompt": ["a", [1]]},
    "the prompt of an id below zero": {"prompt": [-1]},
    "the prompt of a list with an id below zero": {"prompt": [[1, -1]]},
    "the prompt of an id beyond 32 bits": {"prompt": [2**31]},
    "the prompt of fractions": {"prompt": [1.5]},
    "a thousand prompts": {"prompt": ["x"] * 1000},
}
COMPLETION_FIELDS: Fields = {
    "A21 logprobs negative": {"logprobs": -1},
    "A21 logprobs huge": {"logprobs": 10**9},
    "A21 logprobs true": {"logprobs": True},
    "best_of zero": {"best_of": 0},
    "best_of huge": {"best_of": 10**9},
    "echo a number": {"echo": 1},
    "suffix a number": {"suffix": 1},
}
INPUTS: Fields = {
    "the input left out": {"input": LEFT_OUT},
    "the input null": {"input": None},
    "the input empty": {"input": ""},
    "the input an empty list": {"input": []},
    "the input a list with an empty text": {"input": ["a", ""]},
    "the input a list with an empty list": {"input": [[]]},
    "the input of ids and texts": {"input": [1, "a"]},
    "the input of lists of texts": {"input": [["a"]]},
    "the input of an id below zero": {"input": [-1]},
    "the input of an id beyond 32 bits": {"input": [[2**31]]},
    "the input a number": {"input": 5},
    "the input an object": {"input": {"text": "x"}},
    "the input of truths": {"input": [True]},
    "three thousand inputs": {"input": ["x"] * 3000},
    "encoding_format of another kind": {"encoding_format": "hex"},
    "encoding_format a number": {"encoding_format": 5},
    "dimensions zero": {"dimensions": 0},
    "dimensions negative": {"dimensions": -1},
    "dimensions beyond 32 bits": {"dimensions": 2**31},
    "dimensions a text": {"dimensions": "5"},
    "user a list": {"user": []},
    "user a megabyte": {"user": BIG},
}
ANTHROPIC_TURNS: Fields = {
    "a turn with an unknown field": {"messages": [{"role": "user", "content": "x", "name": "y"}]},
    "content null": {"messages": [{"role": "user", "content": None}]},
    "content an empty list": {"messages": [{"role": "user", "content": []}]},
    "nothing but an empty system turn": {"messages": [{"role": "system", "content": ""}]},
    "a last turn of the assistant's": {"messages": [*SAID, {"role": "assistant", "content": "x"}]},
    "a result that nobody asked for": {"messages": [{"role": "user", "content": [result("a")]}]},
    "a call in the user's turn": {"messages": [{"role": "user", "content": [called("a")]}]},
    "a result in the assistant's turn": {"messages": [*SAID, {"role": "assistant", "content": [result("a")]}, *SAID]},
    "a call whose input is a text": {
        "messages": [*SAID, {"role": "assistant", "content": [{**called("a"), "input": "x"}]}, *SAID]
    },
    "a call without an id": {"messages": [*SAID, {"role": "assistant", "content": [{**called(""), "id": ""}]}, *SAID]},
    "A31 an image at an address": {
        "messages": [
            {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/"}}]}
        ]
    },
    "A31 an image inside a result": {
        "messages": [
            *SAID,
            {"role": "assistant", "content": [called("a")]},
            {"role": "user", "content": [{**result("a"), "content": [{"type": "image"}]}]},
        ]
    },
    "a document": {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
    "system a number": {"system": 5},
    "system of images": {"system": [{"type": "image"}]},
    "A26 tools a text": {"tools": "f"},
    "A26 a tool without a schema": {"tools": [{"name": "f"}]},
    "A26 a tool without a name": {"tools": [{"input_schema": {}}]},
    "A26 a tool whose name ends in a line break": {"tools": [{"name": "f\n", "input_schema": {}}]},
    "A26 a tool of an unknown type of JSON": {"tools": [{"name": "f", "input_schema": {"type": "text"}}]},
    "A26 a tool with an unclosed pattern": {"tools": [{"name": "f", "input_schema": {"pattern": "("}}]},
    "A26 a tool of Anthropic's own": {"tools": [{"type": "bash_20250124", "name": "bash"}]},
    "A26 a tool whose type is an object": {"tools": [{"type": {}, "name": "f", "input_schema": {}}]},
    "A26 two thousand tools": {"tools": [{"name": "f", "input_schema": {}}] * 2000},
    "A26 a choice of another kind": {"tool_choice": {"type": "maybe"}},
    "A26 a choice without a name": {"tool_choice": {"type": "tool"}},
    "A26 a choice that is a text": {"tool_choice": "auto"},
    "thinking of another kind": {"thinking": {"type": "maybe"}},
    "thinking with a budget of nothing": {"thinking": {"type": "enabled", "budget_tokens": 0}},
    "an effort of another kind": {"output_config": {"effort": "heroic"}},
    "a format of another kind": {"output_config": {"format": {"type": "yaml"}}},
    "an edit of the history": {"context_management": {"edits": [{"type": "compact"}]}},
    "an edit whose type is an object": {"context_management": {"edits": [{"type": {}}]}},
}
MESSAGES_FIELDS: Fields = {
    "max_tokens left out": {"max_tokens": LEFT_OUT},
    "max_tokens null": {"max_tokens": None},
    "max_tokens zero": {"max_tokens": 0},
    "max_tokens a text": {"max_tokens": "5"},
    "A22 temperature above one": {"temperature": 1.5},
    "A22 top_p zero": {"top_p": 0},
    "A22 top_k negative": {"top_k": -1},
    "A23 a hundred stop sequences": {"stop_sequences": ["x"] * 100},
    "A23 an empty stop sequence": {"stop_sequences": [""]},
    "A23 stop_sequences a text": {"stop_sequences": "x"},
    "stream a number": {"stream": 1},
    "metadata with an unknown field": {"tenant": 1, "metadata": {"tenant": 1}},
    "metadata with a megabyte": {"metadata": {"user_id": BIG}},
    "service_tier of another kind": {"service_tier": "gold"},
    "a thread that the server keeps": {"thread": {"id": "t"}},
    "A26 a choice of a tool that is not there": {
        "tool_choice": {"type": "tool", "name": "g"},
        "tools": [{"name": "f", "input_schema": {}}],
    },
    "A26 a choice among no tools": {"tool_choice": {"type": "any"}},
    "a format whose schema has an unknown type": {
        "output_config": {"format": {"type": "json_schema", "schema": {"type": "text"}}}
    },
}
RESPONSES_FIELDS: Fields = {
    "the input left out": {"input": LEFT_OUT},
    "the input null": {"input": None},
    "the input a number": {"input": 5},
    "the input an empty list": {"input": []},
    "the input of texts": {"input": ["x"]},
    "the input of an empty item": {"input": [{}]},
    "an item of a type that is an object": {"input": [{"type": {}}]},
    "an item of an unknown type": {"input": [{"type": "computer_call"}]},
    "an item of a type of a megabyte": {"input": [{"type": BIG}]},
    "an item that is referred to": {"input": [{"type": "item_reference", "id": "msg_1"}]},
    "an item with an id of a megabyte": {"input": [{**SAID[0], "id": BIG}]},
    "an item with an empty id": {"input": [{**SAID[0], "id": ""}]},
    "A18 an unknown role": {"input": [{"role": "root", "content": "x"}]},
    "A18 a role of a megabyte": {"input": [{"role": BIG, "content": "x"}]},
    "A18 content a number": {"input": [{"role": "user", "content": 5}]},
    "A18 a part without a type": {"input": [{"role": "user", "content": [{"text": "x"}]}]},
    "A18 a part without its text": {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
    "A31 an image at an address": {
        "input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://127.0.0.1/"}]}]
    },
    "a file": {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "file_1"}]}]},
    "an output that nobody asked for": {"input": [{"type": "function_call_output", "call_id": "a", "output": "x"}]},
    "a call without its output": {"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": ""}]},
    "a call with an empty id": {"input": [{"type": "function_call", "call_id": "", "name": "f", "arguments": ""}]},
    "a call whose arguments are an object": {
        "input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": {}}]
    },
    "reasoning without a summary": {"input": [{"type": "reasoning"}]},
    "ten thousand items": {"input": SAID * 10_000},
    "instructions a list": {"instructions": ["x"]},
    "max_output_tokens zero": {"max_output_tokens": 0},
    "A22 temperature negative": {"temperature": -1},
    "A22 top_p zero": {"top_p": 0},
    "A21 top_logprobs without asking for any": {"top_logprobs": 5},
    "A21 top_logprobs huge": {"top_logprobs": 10**9},
    "A26 tools of texts": {"tools": ["f"]},
    "A26 a tool without a type": {"tools": [{}]},
    "A26 a tool that OpenAI runs": {"tools": [{"type": "web_search"}]},
    "A26 a tool without a name": {"tools": [{"type": "function"}]},
    "A26 a tool whose name ends in a line break": {"tools": [{"type": "function", "name": "f\n", "parameters": {}}]},
    "A26 a tool of an unknown type of JSON": {
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "text"}}]
    },
    "A26 a choice of a number": {"tool_choice": 5},
    "A26 a choice whose type is an object": {"tool_choice": {"type": {}}},
    "include of a tool's": {"include": ["web_search_call.results"]},
    "include of a megabyte": {"include": [BIG]},
    "background": {"background": True},
    "a conversation": {"conversation": "conv_1"},
    "a prompt of OpenAI's": {"prompt": {"id": "pmpt_1"}},
    "truncation": {"truncation": "auto"},
    "moderation": {"moderation": {"model": "x"}},
    "a summary of another kind": {"reasoning": {"summary": "detailed"}},
    "an unknown way of reasoning": {"nonsense": 1, "reasoning": {"nonsense": 1}},
    "text.format without its schema": {"text": {"format": {"type": "json_schema"}}},
    "text.format of another kind": {"text": {"format": {"type": "xml"}}},
    "metadata of numbers": {"metadata": {"a": 1}},
    "metadata of seventeen": {"metadata": {str(number): "x" for number in range(17)}},
    "user a megabyte": {"user": BIG},
    "stream a text": {"stream": "true"},
    "previous_response_id a number": {"previous_response_id": 5},
}
TOKENIZE_FIELDS: Fields = {
    "the prompt left out": {"prompt": LEFT_OUT},
    "the prompt a list": {"prompt": [1]},
    "the prompt and messages": {"prompt": "x", "messages": SAID},
    "messages empty": {"messages": [], "prompt": LEFT_OUT},
    "messages of texts": {"messages": ["x"], "prompt": LEFT_OUT},
    "an unknown role": {"messages": [{"role": "root", "content": "x"}], "prompt": LEFT_OUT},
    "add_special_tokens a text": {"add_special_tokens": "yes"},
}
DETOKENIZE_FIELDS: Fields = {
    "tokens left out": {"tokens": LEFT_OUT},
    "tokens null": {"tokens": None},
    "tokens a text": {"tokens": "x"},
    "tokens of texts": {"tokens": ["x"]},
    "tokens of lists": {"tokens": [[1]]},
    "tokens of fractions": {"tokens": [1.5]},
    "tokens below zero": {"tokens": [-1]},
    "tokens beyond 32 bits": {"tokens": [2**31]},
}

# ------------------------------------------------------------------------------------------------------ the tables

FIELDS: dict[str, list[Fields]] = {
    CHAT: [MODEL, UNKNOWN, GENERATION, TURNS, CHAT_TURNS, CHAT_FIELDS],
    COMPLETIONS: [MODEL, UNKNOWN, GENERATION, PROMPT, COMPLETION_FIELDS],
    EMBEDDINGS: [MODEL, UNKNOWN, INPUTS],
    MESSAGES: [MODEL, UNKNOWN, TURNS, ANTHROPIC_TURNS, MESSAGES_FIELDS],
    COUNT: [MODEL, UNKNOWN, TURNS, ANTHROPIC_TURNS],
    RESPONSES: [MODEL, UNKNOWN, RESPONSES_FIELDS],
    TOKENIZE: [UNKNOWN, TOKENIZE_FIELDS],
    DETOKENIZE: [UNKNOWN, DETOKENIZE_FIELDS],
}


def _of_fields(route: str) -> Iterator[tuple[str, Bad]]:
    for table in FIELDS[route]:
        for name, fields in table.items():
            first = next(iter(fields))
            yield name, Bad(sent(route, **fields), None if first == BIG else first)


BODIES: dict[str, dict[str, Bad]] = {
    route: {**{name: Bad(body) for name, body in RAW.items()}, **dict(_of_fields(route))} for route in GOOD
}


# ------------------------------------------------------------------------------------------- what is said of a body


class BadHead(NamedTuple):
    headers: bytes  # lines, each with its end
    status: int
    body: bytes | None = None  # None: the route's good one


JSON = b"Content-Type: application/json\r\n"
GZIP = JSON + b"Content-Encoding: gzip\r\n"
PACKED = gzip.compress(b'{"model":"m"}')
HEADS: dict[str, BadHead] = {
    "no type": BadHead(b"", 415),
    "A13 a plain text": BadHead(b"Content-Type: text/plain\r\n", 415),
    "A13 a form": BadHead(b"Content-Type: application/x-www-form-urlencoded\r\n", 415),
    "A13 a form of many parts": BadHead(b"Content-Type: multipart/form-data; boundary=x\r\n", 415),
    "A13 XML": BadHead(b"Content-Type: application/xml\r\n", 415),
    "A13 two types in one": BadHead(b"Content-Type: application/json, text/plain\r\n", 415),
    "A13 a type that is none": BadHead(b"Content-Type: ;;;\r\n", 415),
    "A13 a million fields of a form": BadHead(
        b"Content-Type: multipart/form-data; boundary=x\r\n",
        415,
        b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n\r\n' * 20_000,
    ),
    "an encoding that is none": BadHead(JSON + b"Content-Encoding: banana\r\n", 415),
    "an encoding of another package": BadHead(JSON + b"Content-Encoding: br\r\n", 415),
    "an encoding twice": BadHead(JSON + b"Content-Encoding: gzip, gzip\r\n", 415),
    "gzip that is none": BadHead(GZIP, 400),
    "gzip that is cut": BadHead(GZIP, 400, PACKED[:-9]),
    "gzip with something behind it": BadHead(GZIP, 400, PACKED + b"{}"),
    "gzip of nothing": BadHead(GZIP, 400, b""),
    "gzip that becomes a thousand times as much": BadHead(GZIP, 413, gzip.compress(b" " * 40_000_000)),
    "gzip inside gzip": BadHead(GZIP, 400, gzip.compress(PACKED)),
    "deflate that is none": BadHead(JSON + b"Content-Encoding: deflate\r\n", 400),
    "an expectation that nobody can meet": BadHead(JSON + b"Expect: a-miracle\r\n", 417),
    "A14 ten gigabytes announced": BadHead(JSON + b"Content-Length: 10000000000\r\n", 413, b"{"),
}

# --------------------------------------------------------------------------------------------------- paths and methods


class BadTarget(NamedTuple):
    method: str
    target: str  # as it stands in the request line
    status: int


ITEMS = "/v1/responses/resp_1/input_items"
TARGETS: dict[str, BadTarget] = {
    "a route that is not there": BadTarget("GET", "/v1/nothing", 404),
    "A41 two slashes": BadTarget("GET", "//v1/models", 404),
    "A41 upper case": BadTarget("GET", "/V1/models", 404),
    "A41 a slash at the end": BadTarget("GET", "/v1/models/", 404),
    "A41 a point at the end": BadTarget("GET", "/v1/models.", 404),
    "A41 a parameter of a path": BadTarget("GET", "/admin/status;a=b", 404),
    "A41 a way up": BadTarget("GET", "/v1/../v1/nothing", 404),
    "A41 a way up in code": BadTarget("GET", "/%2e%2e/v1/nothing", 404),
    "A41 a slash in code": BadTarget("GET", "/v1%2fmodels", 404),
    "A41 a NUL in code": BadTarget("GET", "/v1/models%00", 404),
    "A41 a line break in code": BadTarget("GET", "/v1/models%0d%0aX:%20y", 404),
    "A41 half a code": BadTarget("GET", "/v1/models%", 404),
    "A41 a code that is none": BadTarget("GET", "/v1/models%zz", 404),
    "A41 a method that the route has not": BadTarget("GET", "/v1/chat/completions", 405),
    "A41 a method that a list has not": BadTarget("POST", "/v1/models", 405),
    "A41 TRACE": BadTarget("TRACE", "/health", 405),
    "A41 OPTIONS": BadTarget("OPTIONS", "/v1/models", 405),
    "A41 QUERY": BadTarget("QUERY", "/v1/messages", 405),
    "A41 PUT": BadTarget("PUT", "/v1/responses/resp_1", 405),
    "A41 PATCH": BadTarget("PATCH", "/admin/status", 405),
    "A41 DELETE of a model": BadTarget("DELETE", "/v1/models/m", 405),
    "A41 POST to the metrics": BadTarget("POST", "/metrics", 405),
    "A41 POST to health": BadTarget("POST", "/health", 405),
    "A41 CONNECT": BadTarget("CONNECT", "127.0.0.1:80", 404),
    "A41 a star": BadTarget("OPTIONS", "*", 404),
    "a model that is not there": BadTarget("GET", "/v1/models/nothing", 404),
    "a model of bytes that are no text": BadTarget("GET", "/v1/models/%ff%fe", 404),
    "a model that is half a surrogate": BadTarget("GET", "/v1/models/%ed%a0%80", 404),
    "a model that is a NUL": BadTarget("GET", "/v1/models/%00", 404),
    "a model of eight kilobytes": BadTarget("GET", "/v1/models/" + "x" * 8000, 404),
    "a model that is a way up": BadTarget("GET", "/v1/models/..%2f..%2fadmin%2fstatus", 404),
    **{
        f"{method} of a response {name}": BadTarget(method, f"/v1/responses/{id}", 404)
        for method in ("GET", "DELETE")
        for name, id in {
            "that is not there": "resp_1",
            "of bytes that are no text": "%ff%fe",
            "that is half a surrogate": "%ed%a0%80",
            "that is a NUL": "%00",
            "with a quote": "'%20OR%201=1%20--",
            "with a line break": "%0d%0a",
            "of eight kilobytes": "x" * 8000,
            "of another key's": "1:resp_1",
        }.items()
    },
    "a response as a stream": BadTarget("GET", "/v1/responses/resp_1?stream=true", 400),
    "the items of a response that is not there": BadTarget("GET", ITEMS, 404),
    "the items of a response of bytes that are no text": BadTarget("GET", "/v1/responses/%ff/input_items", 404),
    "items with something else included": BadTarget("GET", f"{ITEMS}?include[]=x", 400),
    "items with a megabyte included": BadTarget("GET", f"{ITEMS}?include={'x' * 8000}", 400),
    "more under the items": BadTarget("GET", f"{ITEMS}/1", 404),
}

# ----------------------------------------------------------------------------------------------- bytes that are no HTTP


def _post(*lines: bytes, then: bytes = b"") -> bytes:
    head = [b"POST /v1/chat/completions HTTP/1.1", b"Host: x", b"Content-Type: application/json", *lines]
    return b"\r\n".join(head) + b"\r\n\r\n" + then


def _get(*lines: bytes, first: bytes = b"GET /health HTTP/1.1", host: bytes = b"Host: x") -> bytes:
    return b"\r\n".join([first, host, *lines]) + b"\r\n\r\n"


CHUNKED = b"Transfer-Encoding: chunked"
HTTP: dict[str, bytes] = {
    "A01 a length beside chunks": _post(b"Content-Length: 5", CHUNKED, then=b"0\r\n\r\n"),
    "A02 two lengths": _post(b"Content-Length: 5", b"Content-Length: 6", then=b"hello"),
    "A02 a length with a plus": _post(b"Content-Length: +5", then=b"hello"),
    "A02 a length below zero": _post(b"Content-Length: -1"),
    "A02 a length with an underscore": _post(b"Content-Length: 1_0", then=b"0123456789"),
    "A02 a length in fullwidth digits": _post("Content-Length: \uff15".encode(), then=b"hello"),
    "A02 a length in hexadecimal": _post(b"Content-Length: 0x5", then=b"hello"),
    "A02 a length that is a list": _post(b"Content-Length: 5, 5", then=b"hello"),
    "A02 a length of 30 digits": _post(b"Content-Length: " + b"9" * 30, then=b"{"),
    "A03 an encoding that is nearly chunked": _post(b"Transfer-Encoding: xchunked", then=b"0\r\n\r\n"),
    "A03 chunked and then not": _post(b"Transfer-Encoding: chunked, identity", then=b"0\r\n\r\n"),
    "A03 chunked twice": _post(b"Transfer-Encoding: chunked, chunked", then=b"0\r\n\r\n"),
    "A03 chunked in two lines": _post(CHUNKED, CHUNKED, then=b"0\r\n\r\n"),
    "A03 a blank before the colon": _post(b"Transfer-Encoding : chunked", then=b"0\r\n\r\n"),
    "A03 a vertical tab": _post(b"Transfer-Encoding:\x0bchunked", then=b"0\r\n\r\n"),
    "A03 a chunk below zero": _post(CHUNKED, then=b"-5\r\nhello\r\n0\r\n\r\n"),
    "A03 a chunk of more than 64 bits": _post(CHUNKED, then=b"f" * 20 + b"\r\nhello"),
    "A03 a chunk in C's hexadecimal": _post(CHUNKED, then=b"0x5\r\nhello\r\n0\r\n\r\n"),
    "A03 a chunk with an underscore": _post(CHUNKED, then=b"1_0\r\n0123456789012345\r\n0\r\n\r\n"),
    "A03 a chunk longer than it says": _post(CHUNKED, then=b"3\r\nhello\r\n0\r\n\r\n"),
    "A03 chunks with bare line feeds": _post(CHUNKED, then=b"5\nhello\n0\n\n"),
    "A03 a chunk without its size": _post(CHUNKED, then=b"\r\nhello\r\n0\r\n\r\n"),
    "A03 headers without end behind the chunks": _post(CHUNKED, then=b"2\r\n{}\r\n0\r\n" + b"X: y\r\n" * 20_000),
    "A05 two hosts": _get(b"Host: y"),
    "A05 no host": _get(host=b"X: y"),
    "A05 a host with a NUL": _get(host=b"Host: \x00"),
    "A05 a target whose host is none": _get(first=b"GET http://[::1/health HTTP/1.1"),
    "A05 a target whose port is a word": _get(first=b"GET http://y:abc/health HTTP/1.1"),
    "A05 a target whose port is too large": _get(first=b"GET http://y:99999999/health HTTP/1.1"),
    "A05 a target without its scheme": _get(first=b"GET ://y/health HTTP/1.1"),
    "A06 a line of 20 kB": _get(first=b"GET /" + b"a" * 20_000 + b" HTTP/1.1"),
    "A06 a line of 10 MB without end": b"GET /" + b"a" * 10_000_000,
    "A06 a method of 10 kB": _get(first=b"A" * 10_000 + b" /health HTTP/1.1"),
    "A07 a header of 9 kB": _get(b"X: " + b"a" * 9000),
    "A07 a header of 20 MB without end": b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 20_000_000,
    "A07 two hundred headers": _get(*(b"X-%d: a" % number for number in range(200))),
    "A07 ten thousand headers": _get(*(b"X-%d: a" % number for number in range(10_000))),
    "A07 a header's name of 9 kB": _get(b"X" * 9000 + b": a"),
    "A07 a header on two lines": _get(b"X: a", b" b"),
    "A07 a header without a colon": _get(b"nonsense"),
    "A07 a header without a name": _get(b": z"),
    "A07 a header with a blank in its name": _get(b"X Y: z"),
    "A07 a NUL in a header": _get(b"X: a\x00b"),
    "A07 a bare CR in a header": _get(b"X: a\rb"),
    "A13 two types of content": _post(b"Content-Type: text/plain", b"Content-Length: 2", then=b"{}"),
    "bare line feeds": b"GET /health HTTP/1.1\nHost: x\n\n",
    "bare carriage returns": b"GET /health HTTP/1.1\rHost: x\r\r",
    "a target that is empty": _get(first=b"GET  HTTP/1.1"),
    "a target that is no ASCII": _get(first=b"GET /\xff\xfe HTTP/1.1"),
    "a target with a NUL": _get(first=b"GET /\x00 HTTP/1.1"),
    "a version of the future": _get(first=b"GET /health HTTP/3.0"),
    "a version that never was": _get(first=b"GET /health HTTP/1.9"),
    "a version that is none": _get(first=b"GET /health HTTP/x"),
    "another protocol's line": _get(first=b"GET /health SIP/2.0"),
    "a method in lower case": _get(first=b"get /health HTTP/1.1"),
    "a method with a NUL": _get(first=b"G\x00T /health HTTP/1.1"),
    "a method of signs": _get(first=b"!#$ /health HTTP/1.1"),
    "A51 a TLS hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "A51 the preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "A51 a PROXY header": b"PROXY TCP4 1.1.1.1 2.2.2.2 1 2\r\n" + _get(),
    "A51 SOCKS": b"\x05\x01\x00\r\n\r\n",
    "A51 SSH": b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
    "A51 Redis": b"*1\r\n$4\r\nPING\r\n",
    "A51 mail": b"EHLO x\r\n\r\n",
}


def num_cases() -> int:
    """How many cases have a name, each counted once for each route that it is sent to."""
    return sum(map(len, BODIES.values())) + len(HEADS) * len(GOOD) + len(TARGETS) + len(HTTP)
