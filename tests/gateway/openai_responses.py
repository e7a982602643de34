"""/v1/responses as its clients see it: each event and each object held to OpenAI's published description.

    events = await events_of(gateway, input="Hi")        # decoded, in order, every one of them checked
    check("Response", body)

The description (openai-openapi.yaml, 2.3.0) is not part of the repository: it is looked for in `shared/data` in or
beside it, or in the folder that the variable GOODGATE_RECORDINGS names. Without it only the order, the numbers and the
names of events are checked.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from tests.gateway.rig import Gateway

ROOT = Path(__file__).resolve().parents[2]
PLACES = [Path(os.environ.get("GOODGATE_RECORDINGS", ROOT / "shared/data")), ROOT.parent / "shared/data"]
FOLDER = next((place for place in PLACES if (place / "openai-openapi.yaml").is_file()), None)
ASK = {"model": "m", "input": "Hello"}


async def events_of(gateway: Gateway, **fields: Any) -> list[dict[str, Any]]:
    async with gateway.client.post(f"{gateway.url}/v1/responses", json={**ASK, "stream": True, **fields}) as response:
        assert response.status == 200, await response.text()
        return read_events(await response.text())


def read_events(text: str) -> list[dict[str, Any]]:
    """The events of a stream, each with its `event:` line, its number and the form that the description has for it."""
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == len(events)
        check_event(event)
        events.append(event)
    return events


def types_of(events: list[dict[str, Any]]) -> list[str]:
    """The types, repetitions of one (deltas) told once."""
    types = [event["type"].removeprefix("response.") for event in events]
    return [each for number, each in enumerate(types) if number == 0 or types[number - 1] != each]


async def answer(gateway: Gateway, **fields: Any) -> dict[str, Any]:
    """The whole response, checked."""
    status, body, _ = await gateway.post("/v1/responses", {**ASK, **fields})
    assert status == 200, body
    check("Response", body)
    return dict(body)


def check_event(event: dict[str, Any]) -> None:
    if FOLDER is not None:
        check(_events()[event["type"]], event)


def check(name: str, instance: object) -> None:
    """Raises where `instance` is not as the schema `name` says."""
    if FOLDER is None:
        return
    error = jsonschema.exceptions.best_match(_validator(name).iter_errors(instance))
    assert error is None, f"{name}: {error.message} at {error.json_path} of {instance}"


def properties(name: str) -> set[str]:
    """The fields that the schema `name` has, with those of its parts."""
    schema = _schemas()[name]
    own = set(schema.get("properties", ()))
    for part in schema.get("allOf", ()):
        own |= properties(part["$ref"].rpartition("/")[2]) if "$ref" in part else set(part.get("properties", ()))
    return own


@cache
def _events() -> dict[str, str]:
    """The schema of each type of event."""
    names = [each["$ref"].rpartition("/")[2] for each in _schemas()["ResponseStreamEvent"]["anyOf"]]
    return {_schemas()[name]["properties"]["type"]["enum"][0]: name for name in names}


@cache
def _validator(name: str) -> Any:
    root = {"$ref": f"#/components/schemas/{name}", "components": {"schemas": _schemas()}}
    return jsonschema.Draft202012Validator(root)


@cache
def _schemas() -> dict[str, Any]:
    assert FOLDER is not None
    text = (FOLDER / "openai-openapi.yaml").read_bytes()
    schemas: dict[str, Any] = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))["components"][
        "schemas"
    ]
    return schemas
