"""OpenAI's published schema as a judge of what the gateway answers: required fields, enums, nulls, and no field that it
does not know.

    check("CreateChatCompletionResponse", body)

The schema (openai-openapi.yaml, version 2.3.0 of OpenAI's API description) is not part of the repository: it is looked
for in `shared/data` in or beside it, or in the folder that the variable GOODGATE_RECORDINGS names.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import yaml

ROOT = Path(__file__).resolve().parents[2]
PLACES = [Path(os.environ.get("GOODGATE_RECORDINGS", ROOT / "shared/data")), ROOT.parent / "shared/data"]
FILE = next((file for place in PLACES if (file := place / "openai-openapi.yaml").is_file()), None)

# Fields of ours: OpenAI has no name for what its models think.
OURS = {"ChatCompletionResponseMessage", "ChatCompletionStreamResponseDelta"}
REASONING = {"reasoning": {"type": "string"}, "reasoning_content": {"type": "string"}}

# Where the schema denies what the reference says in words and OpenAI's servers do: events of a completion have the
# shape of the whole answer, but until the last one no reason, and null for the usage that was asked for.
COMPLETION_EVENT = "CompletionEvent"


def check(name: str, instance: object) -> None:
    """Raises where `instance` is not as the schema `name` says."""
    error = next(iter(_validator(name).iter_errors(instance)), None)
    assert error is None, f"{name}: {error.message} at {error.json_path} of {instance}"


@cache
def _validator(name: str) -> Any:
    root = {"$ref": f"#/components/schemas/{name}", "components": {"schemas": _schemas()}}
    return jsonschema.Draft202012Validator(root)


@cache
def _schemas() -> dict[str, Any]:
    """The schemas that matter here, in the words of JSON Schema."""
    assert FILE is not None
    everything = yaml.load(FILE.read_bytes(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    published = everything["components"]["schemas"]
    kept: dict[str, Any] = {}
    wanted = [
        "CreateChatCompletionResponse",
        "CreateChatCompletionStreamResponse",
        "CreateCompletionResponse",
        "CreateEmbeddingResponse",
        "ListModelsResponse",
        "Model",
        "ErrorResponse",
    ]
    while wanted:
        if (name := wanted.pop()) not in kept:
            kept[name] = _strict(published[name])
            wanted += _references(published[name])
    for name in OURS:
        kept[name]["properties"] |= REASONING
    whole = kept["CreateCompletionResponse"]
    choice = whole["properties"]["choices"]["items"]
    properties = {**choice["properties"], "finish_reason": _or_null(choice["properties"]["finish_reason"])}
    kept[COMPLETION_EVENT] = {
        **whole,
        "properties": {
            **whole["properties"],
            "choices": {"type": "array", "items": {**choice, "properties": properties}},
            "usage": _or_null(whole["properties"]["usage"]),
        },
    }
    return kept


def _strict(schema: Any) -> Any:
    """`nullable` as JSON Schema has it, and no properties but those that are named."""
    if isinstance(schema, list):
        return [_strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {key: _strict(value) for key, value in schema.items() if key not in ("nullable", "example", "x-oaiMeta")}
    if isinstance(strict.get("properties"), dict) and strict.get("type") == "object":
        strict.setdefault("additionalProperties", False)
    return _or_null(strict) if schema.get("nullable") is True else strict


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


def _references(schema: Any) -> list[str]:
    if isinstance(schema, list):
        return [name for each in schema for name in _references(each)]
    if not isinstance(schema, dict):
        return []
    own = [schema["$ref"].rpartition("/")[2]] if isinstance(schema.get("$ref"), str) else []
    return own + [name for value in schema.values() for name in _references(value)]
