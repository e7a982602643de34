"""The form that a request wants its answer in, as one JSON schema for engines whose grammars take one.

wanted_schema(request, "sglang")      # None where any text will do
"""

from __future__ import annotations

from typing import Any

from adapters.errors import UnsupportedParameter
from adapters.types import GenerateRequest

ANY_OBJECT = {"type": "object"}


def wanted_schema(request: GenerateRequest, engine: str) -> dict[str, Any] | None:
    """Raises `UnsupportedParameter` for a form that is neither any JSON object nor a JSON schema."""
    wanted = getattr(request, "response_format", None)
    if not isinstance(wanted, dict) or wanted.get("type") == "text":
        return None
    if wanted.get("type") == "json_object":
        return ANY_OBJECT
    named = wanted.get("json_schema")
    if wanted.get("type") != "json_schema" or not isinstance(named, dict) or not isinstance(named.get("schema"), dict):
        raise UnsupportedParameter("response_format", engine)
    schema: dict[str, Any] = named["schema"]
    return schema
