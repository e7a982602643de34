"""Prompts out of files: chats from JSONL, with tools and response formats where rows bring them, and long documents.
Pure: the text is given, not read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from arena.load.plan import Prompt
from arena.load.spec import DocumentWorkload, FileWorkload, ScenarioError
from arena.load.workloads.lengths import Columns, draw
from arena.load.workloads.words import CellKey, Message, prompt, stream, words

NONCE_WORDS = 8
CARRIED = ("tools", "tool_choice", "parallel_tool_calls", "response_format")  # fields of a row that go to the engine

# English prose in the vocabularies of GPT-2, Llama 3 and SmolLM2 has four to five characters a token.
CHARACTERS_PER_TOKEN = 4.4


@dataclass(frozen=True, slots=True)
class Chat:
    """One line of a prompts file."""

    messages: list[Message]
    fields: Mapping[str, Any] = field(default_factory=dict)


def file_prompt(workload: FileWorkload, chats: list[Chat], columns: Columns, cell: CellKey, seq: int) -> Prompt:
    """A line of the file. Since files are short, a unique line of words goes in front, so that no line meets its own
    cache.
    """
    rng = stream(workload.seed, cell, seq)
    chat = chats[int(rng.integers(len(chats)))]
    messages = [dict(message) for message in chat.messages]
    messages[0]["content"] = f"[{words(NONCE_WORDS, rng)}]\n{messages[0]['content']}"
    fields = dict(chat.fields)
    if workload.tool_choice and "tools" in fields:
        fields.setdefault("tool_choice", workload.tool_choice)
    return prompt(messages, draw(workload.output, rng, columns), None, **fields)


def document_prompt(
    workload: DocumentWorkload, documents: list[str], columns: Columns, cell: CellKey, seq: int
) -> Prompt:
    """A part of a document, from anywhere in it, and the question. The unique words in front keep equal parts from
    meeting in a cache.
    """
    rng = stream(workload.seed, cell, seq)
    tokens = draw(workload.prompt, rng, columns)
    document = documents[int(rng.integers(len(documents)))]
    size = round(tokens * CHARACTERS_PER_TOKEN)
    start = int(rng.integers(max(1, len(document) - size + 1)))
    part = document[start : start + size]
    text = f"[{words(NONCE_WORDS, rng)}]\n{part}\n\n{workload.question}"
    asked = round(len(part) / CHARACTERS_PER_TOKEN)
    return prompt([{"role": "user", "content": text}], draw(workload.output, rng, columns), asked)


def read_chats(text: str, name: str) -> list[Chat]:
    """One JSON object a line: {"messages": [...]}, {"prompt": "..."} or {"question": "..."}."""
    chats = [_chat(row, where) for row, where in _json_lines(text, name)]
    if not chats:
        raise ScenarioError(f"{name} holds no prompts; give it one JSON object a line.")
    return chats


def read_documents(text: str, name: str, column: str) -> list[str]:
    """A JSONL file has a document or a transcript a line, in `column`; any other file is one document."""
    if not name.endswith(".jsonl"):
        documents = [text.removeprefix("\ufeff").strip()]
    else:
        documents = []
        for row, where in _json_lines(text, name):
            document = _text_of(row.get(column) if isinstance(row, dict) else None)
            if document is None:
                raise ScenarioError(f"{where}: expected an object with the document's text in `{column}`.")
            documents.append(document.strip())
    if not documents or not all(documents):
        raise ScenarioError(f"{name} holds no text, or a document without any.")
    return documents


def _text_of(value: object) -> str | None:
    """Text as it is; a transcript, a list of texts or of who said what, line by line; None for anything else."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        return None
    lines = []
    for each in value:
        if isinstance(each, dict) and isinstance(each.get("content"), str):
            lines.append(f"{each['speaker']}: {each['content']}" if each.get("speaker") else each["content"])
        elif isinstance(each, str):
            lines.append(each)
        else:
            return None
    return "\n".join(lines)


def _json_lines(text: str, name: str) -> Iterator[tuple[Any, str]]:
    lines = text.removeprefix("\ufeff").split("\n")  # not splitlines: JSON may hold U+2028 and its kin as they are
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield msgspec.json.decode(line), f"{name}, line {number}"
        except (msgspec.DecodeError, RecursionError) as error:
            raise ScenarioError(f"{name}, line {number}: this is not JSON ({error}).") from error


def _chat(row: object, where: str) -> Chat:
    if isinstance(row, dict):
        fields = {name: row[name] for name in CARRIED if row.get(name) is not None}
        messages = row.get("messages")
        if isinstance(messages, list) and messages and all(map(_is_text_message, messages)):
            _check_tools(fields.get("tools"), where)
            return Chat(messages, fields)
        for key in ("prompt", "question", "instruction"):
            if isinstance(row.get(key), str):
                _check_tools(fields.get("tools"), where)
                return Chat([{"role": "user", "content": row[key]}], fields)
    raise ScenarioError(
        f"{where}: expected an object with `messages` (of `role` and `content`, both text), `prompt`, `question` or "
        "`instruction`."
    )


def _check_tools(tools: object, where: str) -> None:
    if tools is None:
        return
    if not isinstance(tools, list) or not all(isinstance(tool, dict) and "function" in tool for tool in tools):
        raise ScenarioError(f"{where}: `tools` must be a list of OpenAI's tools, each with its `function`.")


def _is_text_message(message: object) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(field), str) for field in ("role", "content"))
