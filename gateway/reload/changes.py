"""What a changed configuration means for a gateway that runs: what holds at once, and what needs a restart. Pure.

>>> from gateway.config import parse_config
>>> model = {"name": "m", "replicas": [{"engine": "vllm", "options": {"url": "http://a", "model": "x"}}]}
>>> old = parse_config({"models": [model]})
>>> new = parse_config({"models": [{**model, "aliases": ["n"]}], "server": {"port": 9000, "heartbeat_s": 5}})
>>> changes = compare(old, new)
>>> changes.changed, changes.needs_restart
(('server.heartbeat_s', 'models.m.aliases'), ('server.port',))
>>> changes.config.server.port, changes.config.server.heartbeat_s
(8080, 5.0)

A part that is not named here needs a restart: to say so of too much is better than to ignore a change in silence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from gateway.config import Config, GroupConfig, ModelConfig

LIVE = frozenset(
    {
        "server",
        "overload",
        "health",
        "breaker",
        "outliers",
        "logs",
        "goodput",
        "autoscale",
        "residency",
        "retries",
        "reload",
        "models",
        "groups",
    }
)  # parts of the file
FIXED = frozenset(  # but not these keys
    {"server.host", "server.port", "server.max_body_mib", "logs.format", "logs.access", "logs.verbatim"}
)


class Changes(Struct, frozen=True):
    """`config` is what may hold from now on: the new one, with the old values of what needs a restart. The paths say
    what of it is new, and what has to wait."""

    config: Config
    changed: tuple[str, ...]
    needs_restart: tuple[str, ...]


def compare(old: Config, new: Config) -> Changes:
    changed: list[str] = []
    waiting: list[str] = []
    parts: dict[str, Any] = {}
    for part in Config.__struct_fields__:
        before, after = getattr(old, part), getattr(new, part)
        if part in ("models", "groups"):
            changed += _of_named(part, before, after)
            continue
        paths = list(_paths(part, before, after))
        fixed = [path for path in paths if part not in LIVE or path in FIXED]
        waiting += fixed
        changed += [path for path in paths if path not in fixed]
        if fixed:
            parts[part] = _with_old(before, after, fixed) if part in LIVE else before
    return Changes(msgspec.structs.replace(new, **parts), tuple(changed), tuple(waiting))


def _paths(path: str, before: Any, after: Any) -> Iterator[str]:
    """The keys whose values differ, each with its way from the top."""
    if before == after:
        return
    if isinstance(before, Struct) and isinstance(after, Struct):
        for field in after.__struct_fields__:
            yield from _paths(f"{path}.{field}", getattr(before, field), getattr(after, field))
    else:
        yield path


def _with_old(before: Struct, after: Struct, fixed: Sequence[str]) -> Struct:
    keys = [path.split(".")[1] for path in fixed]
    return msgspec.structs.replace(after, **{key: getattr(before, key) for key in keys})


def _of_named(
    part: str, before: Sequence[ModelConfig | GroupConfig], after: Sequence[ModelConfig | GroupConfig]
) -> Iterator[str]:
    """Models and groups are told apart by their names, a model's replicas by theirs."""
    known = {each.name: each for each in before}
    for each in after:
        if (former := known.pop(each.name, None)) is None:
            yield f"{part}.{each.name} (added)"
            continue
        for path in _paths(f"{part}.{each.name}", former, each):
            if path.endswith(".replicas") and isinstance(former, ModelConfig) and isinstance(each, ModelConfig):
                yield from _of_replicas(path, former, each)
            else:
                yield path
    yield from (f"{part}.{name} (removed)" for name in known)


def _of_replicas(path: str, before: ModelConfig, after: ModelConfig) -> Iterator[str]:
    known = {replica.name: replica for replica in before.replicas}
    for replica in after.replicas:
        former = known.pop(replica.name, None)
        if former != replica:
            yield f"{path}.{replica.name}{' (added)' if former is None else ''}"
    yield from (f"{path}.{name} (removed)" for name in known)
    names = [[replica.name for replica in model.replicas] for model in (before, after)]
    if names[0] != names[1] and set(names[0]) == set(names[1]):
        yield f"{path} (order)"  # equals take turns in it
