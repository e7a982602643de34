"""Replies recorded from real servers, read by our adapters' readers.

The recordings are not part of the repository: they are looked for in `shared/data` in or beside it, or in the folder
that the variable GOODGATE_RECORDINGS names. Without them these tests are skipped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from adapters.registry import adapter_class
from adapters.tgi import parse
from adapters.types import Chunk, Usage
from adapters.wire.generate_http import GenerateReader
from adapters.wire.openai_wire import StreamReader
from tests.contract.conftest import chat, completion
from tests.contract.tgi_twin import TGITwin
from tests.contract.tool_formats import told
from tests.contract.twin import event, events

ROOT = Path(__file__).resolve().parents[2]
PLACES = [
    Path(os.environ.get("GOODGATE_RECORDINGS", ROOT / "shared/data")),
    ROOT / "shared/data",
    ROOT.parent / "shared/data",
]
USAGE = {"prompt_tokens": 9, "completion_tokens": 7}
FOLDER = next((place for place in PLACES if (place / "tgi").is_dir()), None)


def recordings(pattern: str, holds: Callable[[Path], object]) -> list[Any]:
    """The files that hold what is wanted, or one parameter that skips and says why."""
    if FOLDER is None:
        return [pytest.param(None, marks=pytest.mark.skip(reason="no folder of recorded replies (shared/data)"))]
    files = [path for path in sorted(FOLDER.glob(pattern)) if holds(path)]
    assert files, f"{FOLDER} holds none of the recordings {pattern}"
    return [pytest.param(path, id=path.relative_to(FOLDER).as_posix()) for path in files]


def read(reader: Any, stream: bytes) -> list[Chunk]:
    """The whole stream, in pieces of an odd size."""
    chunks = [chunk for i in range(0, len(stream), 97) for chunk in reader.feed(stream[i : i + 97])]
    return [*chunks, *reader.finish()]


def text_of(chunks: list[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def reasons_of(chunks: list[Chunk]) -> list[str]:
    return [chunk.finish_reason for chunk in chunks if chunk.finish_reason is not None]


def usage_of(told: dict[str, Any]) -> Usage:
    return Usage(told["prompt_tokens"], told["completion_tokens"])


def native_replies(path: Path) -> list[dict[str, Any]]:
    recorded = json.loads(path.read_text())
    return [each for each in (recorded if isinstance(recorded, list) else [recorded]) if "generated_text" in each]


def as_stream(reply: dict[str, Any]) -> bytes:
    """The events that `/generate_stream` would have sent for a recorded answer of `/generate`."""
    details, tokens = reply["details"], reply["details"]["tokens"]
    end = {key: details[key] for key in ("finish_reason", "generated_tokens", "seed")} | {"input_length": 5}
    last = len(tokens) - 1
    return b"".join(
        event(
            {
                "index": index + 1,
                "token": token,
                "generated_text": reply["generated_text"] if index == last else None,
                "details": end if index == last else None,
            }
        )
        for index, token in enumerate(tokens)
    )


@pytest.mark.parametrize("path", recordings("tgi/**/*.json", native_replies))
def test_the_tokens_of_tgis_own_route_add_up_to_its_text(path: Path) -> None:
    for reply in native_replies(path):
        request = completion(max_tokens=4096)
        chunks = read(GenerateReader("tgi", request, partial(parse, with_logprobs=True)), as_stream(reply))
        whole = reply["generated_text"]
        # Some were asked to repeat the prompt, and a space in front of the first word may be left out of the whole.
        assert whole.endswith(text_of(chunks).lstrip())
        wanted = "length" if reply["details"]["finish_reason"] == "length" else "stop"
        assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == [wanted]
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == reply["details"]["generated_tokens"]
        told = [json.loads(bytes(chunk.logprobs)) for chunk in chunks if chunk.logprobs is not None]
        plain = [token for token in reply["details"]["tokens"] if not token["special"]]
        assert [each["token_logprobs"] for each in told] == [[token["logprob"]] for token in plain]


def chunk_lists(path: Path) -> list[dict[str, Any]]:
    recorded = json.loads(path.read_text())
    is_stream = isinstance(recorded, list) and recorded and "choices" in recorded[0]
    return recorded if is_stream and "message" not in recorded[0]["choices"][0] else []


@pytest.mark.parametrize("path", recordings("tgi/**/*.json", chunk_lists))
def test_the_chunks_of_tgis_openai_route_read_as_what_they_say(path: Path) -> None:
    payloads = chunk_lists(path)
    choices = [choice for payload in payloads for choice in payload["choices"]]
    num_choices = max(choice["index"] for choice in choices) + 1
    is_chat = payloads[0]["object"] == "chat.completion.chunk"
    request = chat(n=num_choices) if is_chat else completion(n=num_choices, max_tokens=64)
    usages = [payload["usage"] for payload in payloads if payload.get("usage")]
    account = [] if usages else [{"choices": [], "usage": USAGE}]  # we always ask for it; whoever recorded did not
    reader = StreamReader("tgi", request, adapter_class("tgi").dialect)  # type: ignore[attr-defined]
    chunks = read(reader, events([*payloads, *account]))
    for index in range(num_choices):
        own = [choice for choice in choices if choice["index"] == index]
        said = "".join(choice.get("text") or (choice.get("delta") or {}).get("content") or "" for choice in own)
        assert text_of([chunk for chunk in chunks if chunk.index == index]) == said
        calls = [call for choice in own for call in (choice.get("delta") or {}).get("tool_calls") or []]
        read_calls = [
            call for chunk in chunks if chunk.tool_calls is not None for call in json.loads(bytes(chunk.tool_calls))
        ]
        assert [call["function"]["arguments"] for call in read_calls] == [
            call["function"]["arguments"] for call in calls
        ]
        assert [bool(call["function"].get("name")) for call in read_calls] == [n == 0 for n in range(len(calls))]
        told = [choice["finish_reason"] for choice in own if choice["finish_reason"]]
        wanted = ["tool_calls"] if calls else [{"length": "length"}.get(reason, "stop") for reason in told]
        assert reasons_of([chunk for chunk in chunks if chunk.index == index]) == wanted
    assert chunks[-1].usage == usage_of(usages[-1] if usages else USAGE)


def whole_replies(path: Path) -> list[dict[str, Any]]:
    recorded = json.loads(path.read_text())
    replies = recorded if isinstance(recorded, list) else [recorded]
    if not all("choices" in each and each.get("usage") for each in replies):  # events of a stream come without usage
        return []
    return [each for each in replies if each["object"] == "text_completion" or "message" in each["choices"][0]]


@pytest.mark.parametrize("path", recordings("tgi/**/*.json", whole_replies))
def test_a_whole_answer_of_tgis_openai_route_streamed_in_one_piece_reads_as_what_it_says(path: Path) -> None:
    for reply in whole_replies(path):
        choices = [{**each, "delta": each.get("message")} for each in reply["choices"]]
        is_chat = reply["object"] == "chat.completion"
        request = chat(n=len(choices)) if is_chat else completion(n=len(choices), max_tokens=512)
        reader = StreamReader("tgi", request, adapter_class("tgi").dialect)  # type: ignore[attr-defined]
        chunks = read(reader, events([{**reply, "choices": choices}]))
        for each in reply["choices"]:
            own = [chunk for chunk in chunks if chunk.index == each["index"]]
            said = each.get("text") if not is_chat else each["message"].get("content")
            assert text_of(own) == (said or "")
            calls = (each.get("message") or {}).get("tool_calls") or []
            read_calls = [
                call for chunk in own if chunk.tool_calls is not None for call in json.loads(bytes(chunk.tool_calls))
            ]
            told = [{key: call["function"][key] for key in ("name", "arguments")} for call in calls]  # null description
            assert [call["function"] for call in read_calls] == told
            own_reason = "length" if each["finish_reason"] == "length" else "stop"
            assert reasons_of(own) == ["tool_calls" if calls else own_reason]
        assert chunks[-1].usage == usage_of(reply["usage"])


SHAPES = {
    "test_flash_grammar_llama/test_flash_llama_grammar_json.json": (
        "/generate",
        {"inputs": "Once", "parameters": {"details": True}},
    ),
    "test_flash_qwen2/test_flash_qwen2.json": (
        "/generate",
        {"inputs": "Once", "parameters": {"details": True, "max_new_tokens": 5}},
    ),
    "test_completion_prompts/test_flash_llama_completion_single_prompt.json": ("/v1/completions", {"prompt": "Once"}),
    "test_tools_llama/test_flash_llama_grammar_tools_choice_nostream.json": (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "Hi"}],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {}}}}}],
            "tool_choice": "required",
        },
    ),
}
# Written down by a client that fills in what was not sent.
FILLED_IN = {"content", "best_of_sequences", "top_tokens"}


def name_of(path: Path) -> str:
    return "/".join(path.parts[-2:])


def first_reply(path: Path) -> dict[str, Any]:
    recorded = json.loads(path.read_text())
    return recorded[0] if isinstance(recorded, list) else recorded


@pytest.mark.parametrize("path", recordings("tgi/**/*.json", lambda path: name_of(path) in SHAPES))
async def test_tgis_twin_answers_in_the_shape_of_the_recorded_replies(path: Path) -> None:
    route, body = SHAPES[name_of(path)]
    async with (
        TGITwin() as tgi,
        aiohttp.ClientSession() as client,
        client.post(tgi.url + route, json=body) as response,
    ):
        answered = await response.json()
    assert keys(answered) - FILLED_IN == keys(first_reply(path)) - FILLED_IN


def keys(value: Any) -> set[str]:
    """Every key, at whatever depth."""
    if isinstance(value, dict):
        return set(value) | {key for each in value.values() for key in keys(each)}
    return {key for each in value for key in keys(each)} if isinstance(value, list) else set()


def is_openai(path: Path) -> bool:
    """Not Anthropic's, nor OpenAI's responses."""
    return b'"chat.completion.chunk"' in path.read_bytes() or b'"text_completion"' in path.read_bytes()


@pytest.mark.parametrize("path", recordings("sse/**/*.sse", is_openai))
def test_streams_of_openai_compatible_endpoints_read_to_their_end(path: Path) -> None:
    stream = path.read_bytes()
    request = chat() if b'"chat.completion.chunk"' in stream else completion(max_tokens=64)
    reader = StreamReader("openai_compatible", request, adapter_class("openai_compatible").dialect)  # type: ignore[attr-defined]
    chunks = read(reader, stream)
    payloads = [
        json.loads(line.removeprefix(b"data:"))
        for line in stream.splitlines()
        if line.startswith(b"data:") and b"[DONE]" not in line
    ]
    choices = [choice for payload in payloads for choice in payload.get("choices") or []]
    said = "".join(choice.get("text") or (choice.get("delta") or {}).get("content") or "" for choice in choices)
    assert text_of(chunks) == said
    assert len([chunk for chunk in chunks if chunk.finish_reason]) == 1
    assert chunks[-1].usage is not None


def tool_stream(path: Path) -> list[dict[str, Any]]:
    """A stream with tool calls: chunks line by line, of a recorded exchange, or an answer in one piece as a chunk."""
    text = path.read_text()
    if path.suffix == ".json":
        exchange = json.loads(text)
        answer = exchange.get("response", exchange)
        body = answer.get("body", answer)
        recorded = [each.get("__data__", each) for each in (body if isinstance(body, list) else [body])]
    else:
        lines = [line.removeprefix("data:").strip() for line in text.splitlines()]
        recorded = [json.loads(line) for line in lines if line.startswith("{")]
    payloads = [_as_chunk(each) for each in recorded if isinstance(each, dict) and "choices" in each]
    return payloads if any(_calls_of(each) for each in payloads) else []


def _as_chunk(payload: dict[str, Any]) -> dict[str, Any]:
    choices = [{**each, "delta": each.get("delta") or each.get("message") or {}} for each in payload["choices"]]
    return {**payload, "choices": choices}


def _calls_of(payload: dict[str, Any]) -> list[dict[str, Any]]:
    return [call for choice in payload["choices"] for call in choice["delta"].get("tool_calls") or []]


@pytest.mark.parametrize("path", recordings("sse/*/*.*", tool_stream))
def test_recorded_tool_calls_come_out_whole(path: Path) -> None:
    """Of OpenAI, Ollama and others; joined as their own clients join them: by id where one is told, else by index."""
    payloads = tool_stream(path)
    wanted: dict[str, list[str]] = {}
    latest: dict[int | None, str] = {}
    for call in (call for payload in payloads for call in _calls_of(payload)):
        key = latest[call.get("index")] = call.get("id") or latest[call.get("index")]
        joined = wanted.setdefault(key, ["", ""])
        joined[0] += call["function"].get("name") or ""
        joined[1] += call["function"].get("arguments") or ""
    reader = StreamReader("openai_compatible", chat(), adapter_class("openai_compatible").dialect)  # type: ignore[attr-defined]
    chunks = read(reader, events(payloads))
    calls, ids = told(chunks)
    assert [list(call) for call in calls] == list(wanted.values())
    assert ids == [mine if theirs.isdecimal() else theirs for mine, theirs in zip(ids, wanted, strict=True)]
    assert reasons_of(chunks) == ["tool_calls"]
