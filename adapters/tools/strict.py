"""Tools with `strict: true`: a call of one reaches the client only if its arguments fit the tool's schema.

    strict = await strict_tools(request)                 # None where no tool is strict: then nothing below is needed
    async for chunk in held_to_schema(chunks, strict):   # raises `ToolCallInvalid` for a call that does not fit
        ...

Engines keep that promise in part: some constrain what their model writes, some a part of the schema, some read the
field and do nothing. So it is kept here, once, for all of them. What it costs: where a tool is strict, the calls of a
choice wait for its end, so that none has gone out when the next one turns out to be bad; text and thoughts go out as
they come.

A call that does not fit is a failure of the engine, not text: a client that waits for a call would take text for the
answer. The failure comes before the first byte wherever the model said nothing beside its calls, so another replica is
tried; and clients repeat a 502 by themselves. A call that the limit of tokens has cut is left out, and the finish
reason says why it is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping
from typing import Any, TypeAlias

import msgspec
from msgspec import Raw

from adapters.errors import InvalidRequest, ToolCallInvalid
from adapters.tools.arguments_schema import ArgumentsSchema, BadSchema, compiled
from adapters.tools.tool_calls import whole_calls
from adapters.types import ChatRequest, Chunk, FinishReason, GenerateRequest

StrictTools: TypeAlias = Mapping[str, ArgumentsSchema | None]  # all that may be called, by name; None: not strict

MAX_STRICT_TOOLS = 128


async def strict_tools(request: GenerateRequest) -> StrictTools | None:
    """The schemas to hold calls to. Raises `InvalidRequest`, by name, for one that nothing can be held to."""
    if not isinstance(request, ChatRequest) or not isinstance(request.tools, list):
        return None
    functions = [_function(tool) for tool in request.tools]
    num_strict = sum(function.get("strict") is True for function in functions)
    if not num_strict:
        return None
    if num_strict > MAX_STRICT_TOOLS:
        raise InvalidRequest(f"At most {MAX_STRICT_TOOLS} tools may be strict.", param="tools")
    return await asyncio.to_thread(_schemas, functions)  # a schema that is new takes some milliseconds


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    return function if isinstance(function, dict) else {}


def _schemas(functions: list[dict[str, Any]]) -> StrictTools:
    schemas: dict[str, ArgumentsSchema | None] = {}
    for number, function in enumerate(functions):
        schema = None
        if function.get("strict") is True:
            parameters = function.get("parameters")
            try:
                schema = compiled(msgspec.json.encode({"type": "object"} if parameters is None else parameters))
            except BadSchema as error:
                place = f"tools[{number}].function.parameters"
                raise InvalidRequest(
                    f"`strict` cannot be kept with the schema in {place}: {error}.", param="tools"
                ) from error
        schemas[str(function.get("name"))] = schema
    return schemas


async def held_to_schema(chunks: AsyncGenerator[Chunk, None], strict: StrictTools) -> AsyncGenerator[Chunk, None]:
    """The stream, with the calls of each choice in one chunk before its last. Closing it closes `chunks`."""
    waiting: dict[int, list[Raw]] = {}
    async with contextlib.aclosing(chunks):
        async for chunk in chunks:
            if chunk.tool_calls is not None:
                waiting.setdefault(chunk.index, []).append(chunk.tool_calls)
                chunk = msgspec.structs.replace(chunk, tool_calls=None)
            if chunk.finish_reason is not None and (deltas := waiting.pop(chunk.index, None)):
                calls = await asyncio.to_thread(_fitting, whole_calls(deltas), strict, chunk.finish_reason)
                if calls:
                    told = Raw(msgspec.json.encode(calls))
                    yield Chunk(index=chunk.index, tool_calls=told, usage_so_far=chunk.usage_so_far)
            if _says_something(chunk):
                yield chunk


def _says_something(chunk: Chunk) -> bool:
    told = (chunk.text, chunk.reasoning, chunk.logprobs, chunk.finish_reason, chunk.usage)
    return any(told)


def _fitting(calls: list[dict[str, Any]], strict: StrictTools, reason: FinishReason) -> list[dict[str, Any]]:
    """The calls of one choice as deltas of their own. Raises `ToolCallInvalid` for one that does not fit."""
    whole = [call for call in calls if reason != "length" or _is_json(call["function"]["arguments"])]
    for call in whole:
        _check(call["function"], strict)
    return [{"index": number, **call} for number, call in enumerate(whole)]


def _is_json(arguments: str) -> bool:
    try:
        msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def _check(function: dict[str, Any], strict: StrictTools) -> None:
    if function["name"] not in strict:
        raise ToolCallInvalid("The model called a function that is none of the tools; ask again.")
    schema = strict[function["name"]]
    if schema is None:
        return
    if (fault := schema.fault(function["arguments"])) is not None:
        raise ToolCallInvalid(
            f"The model called {function['name']!r} with arguments that do not fit its strict schema: {fault}; ask "
            "again, force the call with tool_choice, or leave out `strict`."
        )
    function["arguments"] = function["arguments"].strip() or "{}"
