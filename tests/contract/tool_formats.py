"""Models that were taught each format of tool calls: how they write calls, and chat templates that render them so. And
what a client makes of calls that come in pieces.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from adapters.tools.call_text import Arguments, CallBegun, Said, Thought
from adapters.tools.formats import ToolFormat
from adapters.tools.tool_text import ToolText
from adapters.types import Chunk
from tests.contract.word_model import write_word_model

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}
TOOLS = [WEATHER, TIME]


class Call(NamedTuple):
    name: str
    arguments: str  # as the model writes them


ROME, NOW = Call("get_weather", '{"city": "Rome"}'), Call("get_time", "{}")


def written(tool_format: ToolFormat, calls: Sequence[Call]) -> str:
    """The calls as a model of this format writes them."""
    if tool_format == "hermes":
        each = (f'<tool_call>\n{{"name": "{name}", "arguments": {args}}}\n</tool_call>' for name, args in calls)
        return "\n".join(each)
    if tool_format == "llama3_json":
        return "; ".join(f'{{"name": "{name}", "parameters": {args}}}' for name, args in calls)
    if tool_format == "mistral":
        return "".join(f"[TOOL_CALLS]{name}[ARGS]{args}" for name, args in calls)
    if tool_format == "deepseek":
        each = (f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{args}<｜tool▁call▁end｜>" for name, args in calls)
        return f"<｜tool▁calls▁begin｜>{''.join(each)}<｜tool▁calls▁end｜>"
    if tool_format == "gpt_oss":
        header = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>"
        return "<|start|>assistant".join(f"{header.format(name)}{args}<|call|>" for name, args in calls)
    return "[" + ", ".join(f'{{"name": "{name}", "arguments": {args}}}' for name, args in calls) + "]"


# Each renders tools as JSON, and a call as its model writes it.
_CALLS = {
    "hermes": '<tool_call>{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}</tool_call>',
    "llama3_json": '<|python_tag|>{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}',
    "mistral": "[TOOL_CALLS]{{ f.name }}[CALL_ID]{{ call.id }}[ARGS]{{ f.arguments | tojson }}",
    "deepseek": (
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ f.name }}\n"
        "```json\n{{ f.arguments | tojson }}\n```<｜tool▁call▁end｜>"
    ),
    "gpt_oss": "<|channel|>commentary to=functions.{{ f.name }}<|message|>{{ f.arguments | tojson }}<|call|>",
}


def template(tool_format: str) -> str:
    return (
        "{% if tools %}{{ tools | tojson }}{% endif %}"
        "{% for message in messages %}[{{ message.role }}]{{ message.content }}"
        f"{{% for call in message.tool_calls or [] %}}{{% set f = call.function %}}{_CALLS[tool_format]}{{% endfor %}}"
        "{% if message.tool_call_id %}#{{ message.tool_call_id }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )


def write_tool_model(folder: Path, tool_format: str, *, special: Sequence[str] = ()) -> Path:
    """A model's text half whose tokenizer has `special` as special tokens."""
    write_word_model(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template(tool_format)}))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    number = max(each["id"] for each in tokenizer["added_tokens"]) + 100
    like = tokenizer["added_tokens"][0]
    tokenizer["added_tokens"] += [{**like, "id": number + at, "content": word} for at, word in enumerate(special)]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


class Answer(NamedTuple):
    said: str
    thought: str
    calls: list[Call]
    num_complete: int


def folded(parser: ToolText, pieces: Sequence[str]) -> Answer:
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    names = [event.name for event in events if isinstance(event, CallBegun)]
    assert [event.index for event in events if isinstance(event, CallBegun)] == list(range(len(names)))
    begun: set[int] = set()
    for event in events:
        if isinstance(event, CallBegun):
            begun.add(event.index)
        elif isinstance(event, Arguments):
            assert event.index == max(begun)  # after its head, before the next
            assert event.text
    texts = ["".join(e.text for e in events if isinstance(e, Arguments) and e.index == at) for at in range(len(names))]
    return Answer(
        "".join(event.text for event in events if isinstance(event, Said)),
        "".join(event.text for event in events if isinstance(event, Thought)),
        [Call(name, text) for name, text in zip(names, texts, strict=True)],
        parser.num_complete,
    )


def read_whole(tool_format: ToolFormat, text: str, names: Sequence[str], cut: int | None = None) -> Answer:
    """Text, thought and calls of an answer, fed in pieces of `cut` characters."""
    parser = ToolText(tool_format, names)
    return folded(parser, [text] if cut is None else [text[at : at + cut] for at in range(0, len(text), cut)])


class Told(NamedTuple):
    """What a client makes of the deltas of one choice."""

    calls: list[Call]
    ids: list[str]


def told(chunks: list[Chunk], index: int = 0) -> Told:
    """Joins the deltas, and checks that each has the form that clients join."""
    calls: list[Call] = []
    ids: list[str] = []
    own = [chunk.tool_calls for chunk in chunks if chunk.index == index and chunk.tool_calls is not None]
    for delta in (delta for raw in own for delta in json.loads(bytes(raw))):
        function = delta["function"]
        if delta["index"] == len(calls):
            assert list(delta) == ["index", "id", "type", "function"]
            assert delta["type"] == "function"
            assert isinstance(function["arguments"], str)
            calls.append(Call(function["name"], function["arguments"]))
            ids.append(delta["id"])
        else:
            assert list(delta) == ["index", "function"]
            assert list(function) == ["arguments"]
            at = delta["index"]
            calls[at] = Call(calls[at].name, calls[at].arguments + function["arguments"])
    assert all(ids)
    assert len(set(ids)) == len(ids)
    return Told(calls, ids)
