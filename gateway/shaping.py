"""What an operator decides about the requests for a model: what is added to them, and what is not taken.

    rules = Rules(defaults={"temperature": 0.2}, limits=Limits(max_tokens=1024), refused_parameters=("logprobs",))
    shape = shape_of("small", rules)          # ValueError says what is wrong; None where there are no rules
    request = shaped(request, shape)          # a copy with the defaults, or `InvalidRequest` with the field's name

A default counts as if the client had written it: an engine that cannot honour it refuses it. The rules of the model
that was asked for hold for whatever answers in its place. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from adapters.base import is_default
from adapters.errors import InvalidRequest
from adapters.option_errors import nearest
from adapters.types import INFORMATIONAL, ChatRequest, CompletionRequest, GenerateRequest, Positive, set_fields

_PROMPT = frozenset({"messages", "prompt"})
_FIELDS = {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__}
LENGTH = frozenset({"max_tokens", "max_completion_tokens"})  # one thing with two names; here it has the first
PARAMETERS = frozenset(_FIELDS - INFORMATIONAL - _PROMPT - {"max_completion_tokens"})
# How many choices come back decides the form of the answer, which only the client can know.
DEFAULTABLE = PARAMETERS - {"n", "best_of"}


class Limits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The most that a request may ask of a model. A choice may have `max_tokens`, thoughts included."""

    max_tokens: Positive | None = None


class Rules(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the configuration may say about the requests for a model or a group."""

    defaults: dict[str, Any] = {}
    limits: Limits = Limits()
    allowed_parameters: tuple[str, ...] | None = None
    refused_parameters: tuple[str, ...] = ()


class ParameterNotAllowed(InvalidRequest):
    code = "parameter_not_allowed"


class Shape(Struct, frozen=True, kw_only=True):
    """Rules made ready. Defaults are kept for each kind of request that has such a field."""

    model: str
    defaults: Mapping[type, Mapping[str, Any]]
    max_tokens: int | None
    allowed: frozenset[str]  # `PARAMETERS` where nothing is said


def shaped(request: GenerateRequest, shape: Shape | None) -> GenerateRequest:
    if shape is None:
        return request
    given = set_fields(request)
    _check_parameters(request, given, shape)
    _check_length(request, shape)
    added = {field: value for field, value in shape.defaults[type(request)].items() if field not in given}
    if given & LENGTH:
        added.pop("max_tokens", None)
    elif shape.max_tokens is not None and "max_tokens" not in added:
        added["max_tokens"] = min(shape.max_tokens, request.token_limit or shape.max_tokens)
    return msgspec.structs.replace(request, **added) if added else request


def _check_parameters(request: GenerateRequest, given: frozenset[str], shape: Shape) -> None:
    for field in sorted(given - shape.allowed - INFORMATIONAL - _PROMPT - LENGTH):
        if not is_default(field, getattr(request, field)):
            raise ParameterNotAllowed(
                f"The model {shape.model!r} does not allow the parameter {field!r} here; leave it out.", param=field
            )


def _check_length(request: GenerateRequest, shape: Shape) -> None:
    for field in ("max_completion_tokens", "max_tokens"):
        wanted = getattr(request, field, None)
        if shape.max_tokens is not None and isinstance(wanted, int) and wanted > shape.max_tokens:
            raise InvalidRequest(
                f"The model {shape.model!r} writes at most {shape.max_tokens} tokens here; lower {field!r}, "
                f"which asks for {wanted}, or leave it out.",
                param=field,
            )


# ------------------------------------------------------------------------------------------------------ configuration


def shape_of(model: str, rules: Rules) -> Shape | None:
    """The rules made ready; None where there are none. Raises `ValueError` with what is wrong and where."""
    _check_names(rules)
    length, most = rules.defaults.get("max_tokens"), rules.limits.max_tokens
    defaults = _defaults(rules)
    if length is not None and most is not None and length > most:
        raise ValueError(f"`defaults.max_tokens` ({length}) is more than `limits.max_tokens` ({most})")
    allowed = PARAMETERS if rules.allowed_parameters is None else frozenset(rules.allowed_parameters)
    allowed = (allowed | {"max_tokens"}) - set(rules.refused_parameters)
    if not rules.defaults and most is None and allowed == PARAMETERS:
        return None
    return Shape(model=model, defaults=defaults, max_tokens=most, allowed=allowed)


def _check_names(rules: Rules) -> None:
    if rules.allowed_parameters is not None and rules.refused_parameters:
        raise ValueError("`allowed_parameters` refuses all others; leave out `refused_parameters`")
    for key in ("allowed_parameters", "refused_parameters"):
        for field in getattr(rules, key) or ():
            if field in LENGTH:
                raise ValueError(f"`{key}` cannot hold {field!r}; write `limits: {{max_tokens: N}}`")
            if field not in PARAMETERS:
                raise ValueError(f"`{key}` holds {field!r}{nearest(field, PARAMETERS)}, which is no parameter")
    for field in rules.defaults:
        if field == "max_completion_tokens":
            raise ValueError("write `defaults.max_tokens`, which holds for `max_completion_tokens` too")
        if field not in DEFAULTABLE:
            raise ValueError(f"`defaults.{field}` cannot be set{nearest(field, DEFAULTABLE)}")


def _defaults(rules: Rules) -> dict[type, dict[str, Any]]:
    """For each kind of request those that it could have, as it would have them: `logprobs` is a switch in chats, and a
    number elsewhere."""
    defaults: dict[type, dict[str, Any]] = {kind: {} for kind in _SMALLEST}
    for field, value in rules.defaults.items():
        fault = ""
        for kind, smallest in _SMALLEST.items():
            if field in kind.__struct_fields__:
                try:
                    defaults[kind][field] = getattr(msgspec.convert({**smallest, field: value}, kind), field)
                except msgspec.ValidationError as error:
                    fault = str(error).partition(" - at")[0]
        if not any(field in known for known in defaults.values()):
            raise ValueError(f"`defaults.{field}` cannot be {value!r}: {fault}")
    return defaults


_SMALLEST: Mapping[type[ChatRequest | CompletionRequest], Mapping[str, Any]] = {
    ChatRequest: {"model": "m", "messages": [{"role": "user"}]},
    CompletionRequest: {"model": "m", "prompt": ""},
}
