"""A scenario from its YAML text. Pure: `arena.race.config` reads the file.

    scenario = parse(text, source="configs/scenarios/chat.yaml", quick=True)

An unknown key is an error that names its path and the nearest spelling. `quick:` holds overrides for `--quick`, merged
key by key over the rest; it is checked in every run, so that a typo in it does not wait for the day someone is in a
hurry.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, get_args

import msgspec

from adapters.yaml_text import YamlError, read_yaml
from arena.load.spec import ScenarioError, contradiction
from arena.race.scenario import Scenario


def parse(text: str, *, source: str, quick: bool = False) -> Scenario:
    """Read a scenario. `source` is what messages call it."""
    try:
        document = read_yaml(text)
    except YamlError as error:
        raise ScenarioError(f"{source}: {error}") from error
    if not isinstance(document, dict):
        raise ScenarioError(f"{source}: a scenario is a mapping with `name`, `model`, `workload` and `slo`.")
    overrides = document.pop("quick", None) or {}
    if not isinstance(overrides, dict):
        raise ScenarioError(f"{source}: `quick` must be a mapping of overrides.")
    full = _convert(document, source)
    short = _convert(_merge(document, overrides), f"{source}, with `quick`")
    return short if quick else full


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Mappings are merged key by key; a mapping of another `kind` replaces the old one whole."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        same = (
            isinstance(old, dict) and isinstance(value, dict) and value.get("kind", old.get("kind")) == old.get("kind")
        )
        merged[key] = _merge(old, value) if same and isinstance(old, dict) else value
    return merged


def _convert(document: Mapping[str, Any], source: str) -> Scenario:
    try:
        scenario = msgspec.convert(document, Scenario)
    except msgspec.ValidationError as error:
        raise ScenarioError(f"{source}: {_explain(str(error), document)}") from error
    closed = scenario.load.kind == "closed"
    fault = scenario.load.contradiction() or contradiction(scenario.workload, scenario.arrivals, closed=closed)
    if fault:
        raise ScenarioError(f"{source}: {fault}")
    if scenario.search.min_rps > scenario.search.max_rps:
        raise ScenarioError(f"{source}: `search.min_rps` is above `search.max_rps`.")
    if scenario.settings.min_rung > scenario.settings.max_rung:
        raise ScenarioError(
            f"{source}: no rung of the ladder lies between `search.min_rps` and `search.max_rps`; move `start_rps`."
        )
    return scenario


def _explain(message: str, document: Mapping[str, Any]) -> str:
    """msgspec's "Object contains unknown field `x` - at `$.a`" as a sentence about the file."""
    problem, _, at = message.partition(" - at `$")
    path = at.rstrip("`").lstrip(".")
    if not problem.startswith("Object contains unknown field"):
        return f"{problem} (in `{path}`)." if path else f"{problem}."
    key = problem.split("`")[1]
    near = difflib.get_close_matches(key, known_keys(document, path), n=1)
    hint = f"did you mean `{near[0]}`?" if near else f"known here: {', '.join(known_keys(document, path))}."
    return f"unknown key `{f'{path}.' if path else ''}{key}`; {hint}"


def known_keys(document: Mapping[str, Any], path: str) -> list[str]:
    """The keys that are legal in the mapping at a dotted path, given the `kind`s that the document has chosen."""
    kind: Any = Scenario
    value: Any = document
    for name in filter(None, path.split(".")):
        kind = next(field.type for field in msgspec.structs.fields(kind) if field.encode_name == name)
        value = value.get(name) if isinstance(value, Mapping) else None
        members = [member for member in get_args(kind) if member is not type(None)]
        if len(members) > 1:  # a union of structs that are told apart by their `kind`
            wanted = value.get("kind") if isinstance(value, Mapping) else None
            kind = next(member for member in members if member.__struct_config__.tag == wanted)
        elif members:
            kind = members[0]
    fields = [field.encode_name for field in msgspec.structs.fields(kind)]
    tag_field = kind.__struct_config__.tag_field
    own = [*fields, tag_field] if tag_field else fields
    return [*own, "quick"] if kind is Scenario else own
