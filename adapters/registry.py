"""Which engines there are: `engine: acme` in a config file is `adapters/acme.py`, or an entry point of another package.

    adapter_class("vllm")                       # imports adapters.vllm now, and nothing else

An engine module holds one `EngineAdapter` subclass called `Adapter`; being such a file is all there is to registering.
Other packages offer theirs as `[project.entry-points."goodgate.engines"]  acme = "acme_goodgate:Adapter"`. A built-in
name wins over an entry point, so that installing a package cannot change what an existing config means.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
import re
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, TypeAlias

import adapters
from adapters.base import EngineAdapter

GROUP = "goodgate.engines"

AdapterClass: TypeAlias = type[EngineAdapter[Any]]


class UnknownEngine(ValueError):
    """No engine of that name, with the nearest spelling, or one of another package that cannot be loaded."""


def engine_names() -> list[str]:
    """Every engine that a config file may name, sorted. Imports none of them."""
    return sorted({*_built_in(), *_plugged_in()})


def adapter_class(engine: str) -> AdapterClass:
    """The adapter class of `engine`. Raises `UnknownEngine`."""
    if engine in _built_in():
        found: object = importlib.import_module(f"adapters.{engine}").Adapter
    elif engine in (plugged_in := _plugged_in()):
        try:
            found = plugged_in[engine].load()
        except Exception as error:  # another package's import may raise anything
            reason = f"{plugged_in[engine].value} raises {type(error).__name__}: {error}"
            raise UnknownEngine(f"The engine {engine!r} cannot be loaded: {reason}") from error
    else:
        raise UnknownEngine(_no_such(engine))
    if not (isinstance(found, type) and issubclass(found, EngineAdapter)):
        raise UnknownEngine(f"The engine {engine!r} is not an EngineAdapter class: {found!r}.")
    return found


@cache
def _built_in() -> frozenset[str]:
    """Modules of this package that define an `Adapter`, told by their text: importing all would load every engine."""
    files = {module.name: Path(folder) / f"{module.name}.py" for folder, module in _modules()}
    defines_adapter = re.compile(r"^class Adapter\(", re.MULTILINE)
    return frozenset(name for name, path in files.items() if defines_adapter.search(path.read_text("utf-8")))


def _modules() -> list[tuple[str, pkgutil.ModuleInfo]]:
    return [
        (folder, module)
        for folder in adapters.__path__
        for module in pkgutil.iter_modules([folder])
        if not module.ispkg
    ]


def _plugged_in() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def _no_such(engine: str) -> str:
    names = engine_names()
    near = difflib.get_close_matches(engine.lower().replace("-", "_").replace(".", "_"), names, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"There is no engine {engine!r}.{hint} Known engines: {', '.join(names)}."
