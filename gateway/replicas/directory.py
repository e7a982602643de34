"""What is served, and what a client's name for it leads to. Everyone may read it; fleet.py, which is one, changes it.

directory.resolve("default", caller)           # ModelNotFound with the nearest name
directory.parts(group)                         # what is routed within at a time
directory.served_to(caller)                    # what a key may use
"""

from __future__ import annotations

import difflib
import time

from adapters.errors import ModelNotFound
from gateway.config import GroupConfig
from gateway.replicas.names import MAX_LENGTH, Match, Names
from gateway.replicas.replica import Replica, ServedModel
from gateway.tenants.keys import Key


class Directory:
    def __init__(self) -> None:
        self.created = int(time.time())
        self.models: dict[str, ServedModel] = {}
        self.groups: dict[str, ServedModel] = {}
        self._list_names()

    def _list_names(self) -> None:
        """Whoever changes models or groups has them found by their names from now on."""
        self._named = (*self.models.values(), *self.groups.values())
        self._names = Names({name: named for named in self._named for name in (named.name, *named.config.aliases)})

    @property
    def replicas(self) -> list[Replica]:
        """Those of the configuration."""
        return [replica for replica in self.serving if not replica.is_leaving]

    @property
    def serving(self) -> list[Replica]:
        """With those that stand in for some that are not ready yet."""
        return [replica for model in self.models.values() for replica in model.replicas]

    def knows(self, named: ServedModel) -> bool:
        """It is still configured, under its name."""
        return named.name in self.models or named.name in self.groups

    def resolve(self, name: str, caller: Key | None = None) -> ServedModel:
        """The model or group behind a name, an alias or a name that a pattern matches. One that the caller may not use
        is as unknown as one that is not there, and no hint names it."""
        match = self._names.find(name)
        if match is None or not _may_ask(caller, name, match):
            raise self._not_found(name, caller)
        return match.target

    def resolve_one(self, name: str, caller: Key | None = None) -> ServedModel:
        """The same, for what the models of a group would not answer alike: then it is the first of them."""
        named = self.resolve(name, caller)
        return self.models[named.config.models[0]] if isinstance(named.config, GroupConfig) else named

    def passed_on(self, name: str) -> str:
        """What a `*` in a replica's own `model` stands for: what the client wrote, or the part of it that a pattern has
        left open."""
        match = self._names.find(name)
        return name if match is None or match.part is None else match.part

    def parts(self, named: ServedModel) -> list[ServedModel]:
        """What is routed within at a time: the whole, but for a group with models that are loaded on demand. Those are
        tried one after the other, so that none is loaded before it is wanted."""
        if isinstance(named.config, GroupConfig):
            models = [self.models[name] for name in named.config.models if name in self.models]  # not gone meanwhile
            if any(model.is_on_demand for model in models):
                return models
        return [named]

    def served_to(self, caller: Key | None) -> list[ServedModel]:
        return [named for named in self._named if named.is_for(caller)]

    def _not_found(self, name: str, caller: Key | None) -> ModelNotFound:
        shown = name if len(name) <= MAX_LENGTH else f"{name[:64]}..."
        names = [each for each, known in self._names.written_out.items() if known.is_for(caller)]
        nearest = difflib.get_close_matches(shown, names, n=1)
        models = ", ".join(sorted(named.name for named in self.served_to(caller))) or "none for this key"
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"there is: {models}."
        return ModelNotFound(f"There is no model {shown!r}; {hint}", param="model")


def _may_ask(caller: Key | None, name: str, match: Match[ServedModel]) -> bool:
    """Through a pattern a key reaches only what it may ask for by that name too: a key for `small*` does not come by
    `*` to a model of another name."""
    if caller is None or match.part is None:
        return match.target.is_for(caller)
    return match.target.is_for(caller) and caller.may_use([name])
