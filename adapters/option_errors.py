"""What is wrong with somebody's options, and what may stand there instead.

    options = read_options({"ulr": "http://10.0.0.5:8000"}, Adapter.Options, "vllm")
    # InvalidRequest: The engine 'vllm' has no option `ulr`; did you mean `url`?

msgspec's own messages name neither the fields that there are, nor the values that one may have.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal, TypeVar, get_args, get_origin

import msgspec
from msgspec import Meta, Struct

from adapters.errors import InvalidRequest

S = TypeVar("S", bound=Struct)


def read_options(options: Mapping[str, Any], kind: type[S], engine: str, what: str = "option") -> S:
    """The options as their struct. Raises `InvalidRequest`."""
    for key in options:
        if key not in kind.__struct_fields__:
            hint = nearest(key, kind.__struct_fields__)
            raise InvalidRequest(f"The engine {engine!r} has no {what} `{key}`{hint}{'' if hint[-1] == '?' else '.'}")
    try:
        return msgspec.convert(dict(options), kind)
    except msgspec.ValidationError as error:
        article = "An" if what[0] in "aeiou" else "A"
        raise InvalidRequest(f"{article} {what} of {engine} is wrong: {explain(error, kind)}") from error


def nearest(name: str, known: Collection[str]) -> str:
    """
    >>> nearest("ulr", ["url", "model"]), nearest("colour", ["url", "model"]), nearest("x", [])
    ('; did you mean `url`?', ' (known: model, url)', '; it has none')
    """
    if not known:
        return "; it has none"
    matches = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean `{matches[0]}`?" if matches else f" (known: {', '.join(sorted(known))})"


def explain(error: msgspec.ValidationError, kind: type[Struct]) -> str:
    """msgspec's sentence with its place; for a choice or a pattern, with what may stand there."""
    reason, _, path = str(error).partition(" - at `$")
    place = path.strip("`.")
    if not place:
        return f"{reason}."
    name = re.split(r"[.\[]", place)[0]
    of_field = [field.type for field in msgspec.structs.fields(kind) if field.name == name]
    if "matching regex" in reason and (examples := list(_examples(of_field))):
        return f"`{place}` has to look like {examples[0]}."
    if reason.startswith("Invalid enum value") and (choices := list(_choices(of_field))):
        return f"{reason} at `{place}`; choose one of: {', '.join(choices)}."
    return f"{reason} at `{place}`."


def _examples(hints: Collection[Any]) -> Iterator[str]:
    for hint in hints:
        if isinstance(hint, Meta):
            yield from map(str, hint.examples or ())
        yield from _examples((*get_args(hint), *getattr(hint, "__metadata__", ())))


def _choices(hints: Collection[Any]) -> Iterator[str]:
    for hint in hints:
        if get_origin(hint) is Literal:
            yield from map(str, get_args(hint))
        else:
            yield from _choices(get_args(hint))
