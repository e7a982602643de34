"""What models think aloud, on every route that gives text: `<think>` in the text or at the end of the prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from adapters.errors import EngineUnavailable
from adapters.registry import adapter_class
from adapters.types import Chunk
from tests.contract.conftest import chat, collect, completion
from tests.contract.replay import reasons_of, text_of
from tests.contract.test_tools import HIDING, SHOWING, prompt_of, sent_to, start_alone, stream_of, text_engine
from tests.contract.tool_formats import NOW, ROME, TOOLS, template, told, write_tool_model, written
from tests.native_engine.tiny_llama import tiny_config, write_tiny_llama

ENGINES = [*SHOWING, *HIDING]
# As the templates of DeepSeek R1 do: earlier thoughts are left out, and a new one may be begun for the model.
THINKING = template("hermes").replace("message.content", "message.content.split('</think>')[-1]")


def write_thinking_model(folder: Path, *, opens: bool = False, source: str = THINKING, special: Any = ()) -> Path:
    write_tool_model(folder, "hermes", special=special)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    source = source.replace("[assistant]", "[assistant]<think>\n") if opens else source
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": source}))
    return folder


def thought_of(chunks: list[Chunk]) -> str:
    return "".join(chunk.reasoning for chunk in chunks)


@pytest.mark.parametrize("opens", [False, True])
@pytest.mark.parametrize("name", ENGINES)
async def test_thought_and_answer_come_apart_on_every_text_route(name: str, opens: bool, tmp_path: Path) -> None:
    async with text_engine(name, write_thinking_model(tmp_path, opens=opens)) as subject:
        subject.says(stream_of(subject, "<think>\n" * (not opens) + "2 < 4, so\n</think>\n\nFour."))
        chunks = await collect(subject.adapter, chat())
        assert (thought_of(chunks), text_of(chunks), reasons_of(chunks)) == ("2 < 4, so", "Four.", ["stop"])
        assert prompt_of(sent_to(subject)).endswith("<think>\n") is opens
        assert chunks[-1].usage is not None


@pytest.mark.parametrize("name", ENGINES)
async def test_a_call_in_a_thought_is_none_and_one_after_it_is(name: str, tmp_path: Path) -> None:
    async with text_engine(name, write_thinking_model(tmp_path, opens=True)) as subject:
        subject.says(stream_of(subject, f"I could {written('hermes', [ROME])}\n</think>\n{written('hermes', [NOW])}"))
        chunks = await collect(subject.adapter, chat(tools=TOOLS))
        assert thought_of(chunks) == f"I could {written('hermes', [ROME])}"
        assert (told(chunks).calls, text_of(chunks), reasons_of(chunks)) == ([NOW], "", ["tool_calls"])


@pytest.mark.parametrize("name", SHOWING)
async def test_where_a_grammar_holds_the_answer_all_of_it_is_the_answer(name: str, tmp_path: Path) -> None:
    async with text_engine(name, write_thinking_model(tmp_path, opens=True)) as subject:
        subject.says(stream_of(subject, '{"name": "get_weather", "arguments": {"city": "Rome"}}'))
        chunks = await collect(subject.adapter, chat(tools=TOOLS, tool_choice="required"))
        assert (told(chunks).calls, thought_of(chunks)) == ([ROME], "")
        subject.says(stream_of(subject, '{"a": 1}'))
        schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
        chunks = await collect(subject.adapter, chat(response_format=schema))
        assert (text_of(chunks), thought_of(chunks)) == ('{"a": 1}', "")


@pytest.mark.parametrize("name", ENGINES)
async def test_without_a_thinking_template_or_when_switched_off_the_marks_are_text(name: str, tmp_path: Path) -> None:
    text = "<think>hm</think>Four."
    async with text_engine(name, write_thinking_model(tmp_path, source=template("hermes"))) as subject:
        subject.says(stream_of(subject, text))
        assert text_of(await collect(subject.adapter, chat())) == text
    async with text_engine(name, write_thinking_model(tmp_path), reasoning_parser="none") as subject:
        subject.says(stream_of(subject, text))
        assert text_of(await collect(subject.adapter, chat())) == text
    async with text_engine(name, write_thinking_model(tmp_path)) as subject:
        subject.says(stream_of(subject, text))
        assert text_of(await collect(subject.adapter, completion())) == text


async def test_a_parser_that_would_see_no_marks_is_refused_where_the_engine_hides_them(tmp_path: Path) -> None:
    folder = write_thinking_model(tmp_path, special=("<think>", "</think>"))
    with pytest.raises(EngineUnavailable, match="hides the special tokens"):
        await start_alone("triton_server", folder, reasoning_parser="think")
    await start_alone("triton_server", folder)


@pytest.mark.parametrize("name", SHOWING)
async def test_templates_get_the_thoughts_of_earlier_answers(name: str, tmp_path: Path) -> None:
    source = template("hermes").replace(
        "[{{ message.role }}]",
        "[{{ message.role }}]{% if message.reasoning_content %}({{ message.reasoning_content }}){% endif %}",
    )
    history = [{"role": "assistant", "content": "4", "reasoning": "hm"}, {"role": "user", "content": "Sure?"}]
    async with text_engine(name, write_thinking_model(tmp_path, source=source)) as subject:
        await collect(subject.adapter, chat(messages=history))
        assert prompt_of(sent_to(subject)) == "[assistant](hm)4[user]Sure?[assistant]"


@pytest.mark.parametrize(("option", "is_thought"), [("auto", True), ("none", False)])
async def test_our_own_engine_parts_thought_and_answer(
    option: str, is_thought: bool, tmp_path: Path, native_home: Path
) -> None:
    source = "{{ messages[0].content.split('</think>')[-1] }}<think>\n"
    write_tiny_llama(tmp_path, tiny_config(), chat_template=source)
    cls = adapter_class("native")
    options = {"model": str(tmp_path), "home": str(native_home), "kv_cache_mib": 16, "num_threads": 1}
    adapter = cls(msgspec.convert({**options, "reasoning_parser": option}, cls.Options))
    await adapter.start()
    try:
        chunks = await collect(adapter, chat(max_tokens=8, ignore_eos=True))  # random weights: no mark ever ends it
        assert bool(thought_of(chunks)) is is_thought
        assert bool(text_of(chunks)) is not is_thought
        assert reasons_of(chunks) == ["length"]
    finally:
        await adapter.close()
