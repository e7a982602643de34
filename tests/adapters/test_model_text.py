"""A model's chat template and tokenizer, found where people keep them."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from adapters.errors import EngineUnavailable, InvalidRequest
from adapters.models.model_store import ModelMissing
from adapters.models.model_text import ModelText
from adapters.types import TokenizeRequest
from tests.contract.conftest import chat
from tests.contract.word_model import write_word_model


def prompt(where: Path | str, home: Path) -> str:
    return ModelText.load(str(where), home).prompt(chat())


def test_a_folder_gives_template_and_tokenizer(tmp_path: Path) -> None:
    text = ModelText.load(str(write_word_model(tmp_path)), tmp_path)
    assert text.prompt(chat()) == "[user]Hi[assistant]"
    assert (text.count("Hello world"), text.count("Hello world", is_prompt=True)) == (2, 3)


def test_the_token_that_the_engine_adds_again_is_left_out_and_no_other(tmp_path: Path) -> None:
    """Where the tokenizer adds none, the template's own stays."""
    folder = write_word_model(tmp_path)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer | {"post_processor": None}))
    assert prompt(folder, tmp_path) == "<s>[user]Hi[assistant]"


def test_a_jinja_file_alone_has_no_tokens_of_its_own_and_counts_nothing(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{{ bos_token }}{{ messages[0].content }}!")
    text = ModelText.load(str(file), tmp_path)
    assert text.prompt(chat()) == "Hi!"
    assert text.count("Hi") is None


def test_a_jinja_file_beside_a_tokenizer_uses_its_tokens(tmp_path: Path) -> None:
    write_word_model(tmp_path)
    file = tmp_path / "other.jinja"
    file.write_text("{{ messages[0].content }}{{ eos_token }}")
    assert prompt(file, tmp_path) == "Hi</s>"


def test_a_template_file_in_the_folder_wins_over_the_configuration(tmp_path: Path) -> None:
    folder = write_word_model(tmp_path)
    (folder / "chat_template.jinja").write_text("own: {{ messages[0].content }}")
    assert prompt(folder, tmp_path) == "own: Hi"


def test_the_default_of_several_templates_is_taken(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert prompt(tmp_path, tmp_path) == "plain"


def test_a_model_of_the_store_goes_by_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "models/word/hf"
    folder.mkdir(parents=True)
    write_word_model(folder)
    (tmp_path / "models/word/manifest.json").write_text('{"format": "hf", "source": "here", "files": {}}')
    assert prompt("word", tmp_path) == "[user]Hi[assistant]"
    with pytest.raises(ModelMissing):
        prompt("other", tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("tokenizer.json", "{half", "cannot be read"),
        ("tokenizer_config.json", "{half", "cannot be read"),
        ("tokenizer_config.json", "{}", "holds no chat template"),
        ("chat_template.jinja", "{% if %}", "is not valid"),
    ],
)
def test_files_that_are_no_good_are_named(tmp_path: Path, name: str, content: str, complaint: str) -> None:
    folder = write_word_model(tmp_path)
    (folder / name).write_text(content)
    with pytest.raises(EngineUnavailable, match=complaint):
        prompt(folder, tmp_path)


def test_broken_arguments_of_a_tool_call_reach_the_template_as_they_are(tmp_path: Path) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{half"}}
    text = ModelText.load(str(write_word_model(tmp_path)), tmp_path)
    assert text.prompt(chat(messages=[{"role": "assistant", "tool_calls": [call]}])) == '[assistant]"{half"[assistant]'


def test_ids_are_those_that_the_engine_sees(tmp_path: Path) -> None:
    text = ModelText.load(str(write_word_model(tmp_path)), tmp_path)
    plain = TokenizeRequest(model="m", prompt="Hello world")
    assert text.encode(plain) == [1, 2, 3]
    assert text.encode(msgspec.structs.replace(plain, add_special_tokens=False)) == [2, 3]
    turns = TokenizeRequest(model="m", messages=chat().messages, add_special_tokens=False)
    assert text.encode(turns)[0] == 1  # the template writes it, whatever is asked for a text
    with pytest.raises(InvalidRequest, match="no token 77"):
        text.decode([2, 77])


def test_a_template_of_its_own_for_tools_is_taken_where_there_are_any(tmp_path: Path) -> None:
    named = [
        {"name": "tool_use", "template": "{{ tools[0].function.name }}: {{ messages[0].content }} <tool_call>"},
        {"name": "default", "template": "{{ messages[0].content }}"},
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    text = ModelText.load(str(tmp_path), tmp_path)
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert text.prompt(chat(tools=tools)) == "f: Hi <tool_call>"
    assert text.prompt(chat()) == text.prompt(chat(tools=tools, tool_choice="none")) == "Hi"
    assert text.choose_tool_format("auto", hides_special_tokens=True) == "hermes"
