"""What coding agents send, field for field: Claude Code to /v1/messages, Codex to /v1/responses.

Both come with fields that no engine has a use for. They are taken where they change no answer, and refused by the name
that the client wrote where they would.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.gateway.rig import Reply, Script, Start, Upstream, fake_model, model

UpstreamOf = Callable[[Script], Awaitable[Upstream]]
CACHED = {"type": "ephemeral"}
BASH = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
DRAFT_07 = "http://json-schema.org/draft-07/schema#"
ONLY_OBJECT = {"type": "object"}

# Claude Code, `POST /v1/messages?beta=true`.
CLAUDE_CODE: dict[str, Any] = {
    "model": "m",
    "max_tokens": 32000,
    "stream": True,
    "temperature": 1,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.148; cc_entrypoint=cli;"},
        {"type": "text", "text": "You are a coding agent.", "cache_control": CACHED},
        {"type": "text", "text": "Here is your environment.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
    ],
    "metadata": {"user_id": "user_0_account__session_1"},
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "tools": [
        {"name": "Bash", "description": "Run a command.", "input_schema": {"$schema": DRAFT_07, **BASH}},
        {"name": "Read", "description": "Read a file.", "input_schema": ONLY_OBJECT, "cache_control": CACHED},
    ],
    "messages": [
        {"role": "user", "content": [
            {"type": "text", "text": "<system-reminder>Today is Monday.</system-reminder>"},
            {"type": "text", "text": "Run the tests.", "cache_control": CACHED},
        ]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "I shall run them.", "signature": ""},
            {"type": "text", "text": "Running."},
            {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "make test"}},
            {"type": "tool_use", "id": "toolu_2", "name": "Read", "input": {}},
        ]},
        {"role": "user", "content": [
            {
                "type": "tool_result",
                "tool_use_id": "toolu_1",
                "content": [{"type": "text", "text": "no such file"}],
                "is_error": True,
            },
            {"type": "tool_result", "tool_use_id": "toolu_2", "content": "all of it", "cache_control": CACHED},
        ]},
    ],
}  # fmt: skip
CLAUDE_HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27",
    "User-Agent": "claude-cli/2.1.148 (external, cli)",
    "x-app": "cli",
    "x-stainless-lang": "js",
}

# Codex, `POST /v1/responses`.
CODEX: dict[str, Any] = {
    "model": "m",
    "instructions": "You are a coding agent.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandboxed."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<environment_context/>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Run the tests."}]},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
        {"type": "function_call", "name": "exec_command", "arguments": '{"command": "make test"}', "call_id": "call_1"},
        {"type": "function_call_output", "call_id": "call_1", "output": "Exit code: 0\nOutput:\nall passed"},
    ],
    "tools": [
        {"type": "function", "name": "exec_command", "description": "Run it.", "strict": False, "parameters": BASH},
        {"type": "function", "name": "update_plan", "description": "Plan.", "strict": False, "parameters": ONLY_OBJECT},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "019a-0",
    "text": {"verbosity": "medium"},
    "client_metadata": {"x-codex-installation-id": "1"},
}  # fmt: skip


async def agent_engine(reply: Reply) -> None:
    head = {"index": 0, "id": "call_9", "type": "function", "function": {"name": "Bash", "arguments": '{"command":'}}
    rest = {"index": 0, "function": {"arguments": ' "ls"}'}}
    await reply.begin()
    await reply.piece("Once more.")
    for delta in (head, rest):
        choice = {"index": 0, "delta": {"tool_calls": [delta]}, "finish_reason": None}
        await reply.event(json.dumps({"choices": [choice]}).encode())
    await reply.finish("tool_calls")
    await reply.usage(100, 12)
    await reply.done()


def sent(upstream: Upstream) -> dict[str, Any]:
    return dict(json.loads(upstream.requests[-1].body))


def event_types(text: str) -> list[str]:
    return [line.removeprefix("event: ") for line in text.split("\n") if line.startswith("event: ")]


async def test_claude_codes_request_is_answered_with_its_events(start: Start, upstream_of: UpstreamOf) -> None:
    upstream = await upstream_of(agent_engine)
    gateway = await start(model(upstream.replica()))
    url = f"{gateway.url}/v1/messages?beta=true"
    async with gateway.client.post(url, json=CLAUDE_CODE, headers=CLAUDE_HEADERS) as response:
        assert response.status == 200, await response.text()
        text = await response.text()
    assert event_types(text) == [
        "message_start",
        *("content_block_start", "content_block_delta", "content_block_stop"),
        *("content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"),
        "message_delta", "message_stop",
    ]  # fmt: skip
    turns = sent(upstream)["messages"]
    assert [turn["role"] for turn in turns] == ["system", "user", "assistant", "tool", "tool"]
    assert turns[0]["content"].endswith("You are a coding agent.\nHere is your environment.")
    assert turns[1]["content"].endswith("\nRun the tests.")
    assert (turns[3]["content"], turns[4]["content"]) == ("Error: no such file", "all of it")
    assert "cache_control" not in json.dumps(sent(upstream))


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        (lambda body: body["tools"].append({"type": "web_search_20250305", "name": "x"}), "tools", "web_search"),
        (lambda body: body["tools"].append({"type": "bash_20250124", "name": "x"}), "tools", "bash_20250124"),
        (
            lambda body: body["messages"][2]["content"][1].update(content=[{"type": "image", "source": {}}]),
            "messages",
            "'image'",
        ),
        (
            lambda body: body.update(context_management={"edits": [{"type": "compact_1"}]}),
            "context_management",
            "compact_1",
        ),
        (lambda body: body.update(mcp_servers=[]), "mcp_servers", "mcp_servers"),
    ],
)  # fmt: skip
async def test_what_claude_code_may_send_and_nobody_here_can_do_is_refused_by_its_name(
    start: Start, change: Callable[[Any], object], param: str, words: str
) -> None:
    gateway = await start(fake_model())
    body = copy.deepcopy(CLAUDE_CODE)
    change(body)
    status, answer, _ = await gateway.post("/v1/messages?beta=true", body, **CLAUDE_HEADERS)
    assert (status, answer["type"], answer["error"]["type"]) == (400, "error", "invalid_request_error")
    assert words in answer["error"]["message"]
    assert param in answer["error"]["message"]


async def test_an_effort_that_the_engine_cannot_be_told_is_refused_as_thinking(start: Start) -> None:
    gateway = await start(fake_model())
    body = {**CLAUDE_CODE, "tools": [], "thinking": {"type": "enabled", "budget_tokens": 31999}}
    status, answer, _ = await gateway.post("/v1/messages", body, **CLAUDE_HEADERS)
    assert (status, "'thinking'" in answer["error"]["message"]) == (400, True)


async def test_codexs_request_is_answered_with_its_events(start: Start, upstream_of: UpstreamOf) -> None:
    upstream = await upstream_of(agent_engine)
    gateway = await start(model(upstream.replica()))
    headers = {"User-Agent": "codex_cli_rs/0.154.0", "originator": "codex_cli_rs", "session_id": "019a-0"}
    async with gateway.client.post(f"{gateway.url}/v1/responses", json=CODEX, headers=headers) as response:
        assert response.status == 200, await response.text()
        text = await response.text()
    types = event_types(text)
    assert types[:2] == ["response.created", "response.in_progress"]
    assert types[-1] == "response.completed"
    assert types.count("response.output_item.done") == 2
    turns = sent(upstream)["messages"]
    assert [turn["role"] for turn in turns] == ["system", "system", "user", "user", "assistant", "tool"]
    assert turns[-1] == {"role": "tool", "content": "Exit code: 0\nOutput:\nall passed", "tool_call_id": "call_1"}
    assert (sent(upstream)["reasoning_effort"], sent(upstream)["parallel_tool_calls"]) == ("medium", True)
    assert "client_metadata" not in sent(upstream)


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        ({"type": "web_search", "external_web_access": False}, "'web_search'"),
        ({"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}}, "'custom'"),
        ({"type": "local_shell"}, "'local_shell'"),
        ({"type": "namespace", "name": "multi_agent", "tools": []}, "'namespace'"),
    ],
)
async def test_a_tool_of_codexs_that_is_no_function_is_refused_by_its_place(
    start: Start, tool: dict[str, Any], words: str
) -> None:
    gateway = await start(fake_model())
    status, answer, _ = await gateway.post("/v1/responses", {**CODEX, "tools": [*CODEX["tools"], tool]})
    assert (status, answer["error"]["param"]) == (400, "tools[2]")
    assert words in answer["error"]["message"]
