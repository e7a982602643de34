"""What no single key can say of itself: names that lead to one model, references that lead somewhere, replicas that
their engines can be asked to be."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from adapters.launching.launch import Launchable
from adapters.option_errors import explain, nearest
from gateway.config.environment import adapter_options, cache_salt_secret, quotas_password, tracing_headers
from gateway.config.schema import (
    AdapterClass,
    BreakerConfig,
    Config,
    ConfigError,
    FindAdapter,
    GroupConfig,
    ModelConfig,
    QuotasConfig,
    ReplicaConfig,
    SloConfig,
)
from gateway.replicas.names import is_pattern
from gateway.shaping import shape_of


def check(config: Config, find_adapter: FindAdapter) -> None:
    """Raises `ConfigError` for the first thing that does not fit."""
    _check_names(config)
    _check_references(config)
    _check_rules(config)
    _check_evidence(config)
    _check_admission(config)
    tracing_headers(config.tracing)
    cache_salt_secret(config.tenants)
    _check_quotas(config.quotas)
    _check_breaker(config.breaker)
    _check_residency(config)
    _check_costs(config)
    for model in config.models:
        for replica in model.replicas:
            _check_replica(replica, model, find_adapter)


def _check_names(config: Config) -> None:
    """Each name a client can send leads to one model or group, and replicas of a model differ."""
    owners: dict[str, str] = {}
    for named in (*config.models, *config.groups):
        if is_pattern(named.name):
            raise ConfigError(f"The name {named.name!r} is a pattern: give a plain name, and the pattern as an alias.")
        for name in (named.name, *named.aliases):
            if name in owners:
                raise ConfigError(f"The name {name!r} leads to two models: {owners[name]!r} and {named.name!r}.")
            if name.count("*") > 1:
                raise ConfigError(f"The alias {name!r} of {named.name!r} has more than one `*`; a pattern has one.")
            owners[name] = named.name
    for model in config.models:
        names = [replica.name for replica in model.replicas]
        for twice in {name for name in names if names.count(name) > 1}:
            raise ConfigError(f"Model {model.name!r} has two replicas named {twice!r}; give each its own `name`.")


def _check_references(config: Config) -> None:
    """Fallbacks and members of groups are models. Nobody follows the fallbacks of a fallback, so they form no rings."""
    known = {model.name for model in config.models}
    for named in (*config.models, *config.groups):
        what = "Group" if isinstance(named, GroupConfig) else "Model"
        members = named.models if isinstance(named, GroupConfig) else ()
        for name in (*named.fallbacks, *named.context_fallbacks):
            if name not in known:
                raise ConfigError(
                    f"{what} {named.name!r} falls back to an unknown model {name!r}{nearest(name, known)}."
                )
            if name == named.name:
                raise ConfigError(f"{what} {named.name!r} falls back to itself.")
            if name in members and name in named.fallbacks:
                raise ConfigError(f"{what} {named.name!r} falls back to {name!r}, which is a model of it.")
        for name in members:
            if name not in known:
                raise ConfigError(f"{what} {named.name!r} holds an unknown model {name!r}{nearest(name, known)}.")
            if members.count(name) > 1:
                raise ConfigError(f"{what} {named.name!r} holds the model {name!r} twice.")


def _check_rules(config: Config) -> None:
    for named in (*config.models, *config.groups):
        try:
            shape_of(named.name, named)
        except ValueError as error:
            raise ConfigError(f"{error} (model {named.name!r}).") from error


def _check_evidence(config: Config) -> None:
    try:
        Path(config.evidence or ".").expanduser()
    except RuntimeError as error:
        raise ConfigError(f"`evidence` lies in the home of nobody that is known here ({config.evidence!r}).") from error
    routings: list[tuple[str, str]] = [(each.name, each.routing) for each in config.models]
    routings += [(each.name, each.routing) for each in config.groups]
    for name, routing in routings:
        if routing == "goodput" and config.evidence is None:
            raise ConfigError(
                f"`routing: goodput` needs `evidence:`, the path of a race's evidence.json, which may come later "
                f"({name!r})."
            )


def _check_admission(config: Config) -> None:
    """A gate's bounds fit each other and those of the gateway, and a limit that is found out has a target to go by."""
    for named in (*config.models, *config.groups):
        if (gate := named.admission) is None:
            continue
        where = f"model {named.name!r}" if isinstance(named, ModelConfig) else f"group {named.name!r}"
        most = config.server.max_in_flight
        if gate.max_running is not None and gate.max_running > most:
            raise ConfigError(
                f"`max_running` is {gate.max_running}, but the whole gateway has at most {most} generations open: "
                f"raise `server.max_in_flight` too ({where})."
            )
        if gate.min_running > (gate.max_running or most):
            raise ConfigError(f"`min_running` is more than `max_running` or `server.max_in_flight` ({where}).")
        if gate.adaptive and named.slo.ttft_ms is None and named.slo.tpot_ms is None:
            raise ConfigError(
                f"`adaptive: true` needs a target to go by: set `slo.ttft_ms` or `slo.tpot_ms` ({where})."
            )
        if gate.adaptive is False and gate.max_running is None:
            raise ConfigError(f"`adaptive: false` needs `max_running`: nobody else says how many ({where}).")


def _check_quotas(config: QuotasConfig) -> None:
    try:
        has_secret = "@" in urlsplit(config.store).netloc
    except ValueError as error:
        raise ConfigError(f"`quotas.store` is no address: {error}.") from error
    if has_secret:
        raise ConfigError("Do not write a secret in the file: use `password_env` or `password_file` (quotas).")
    secret = (config.username, config.password_env, config.password_file)
    if config.store == "file" and secret != (None, None, None):
        raise ConfigError("`store: file` takes no user and no password; leave them out, or name a Redis (quotas).")
    quotas_password(config)


def _check_breaker(config: BreakerConfig) -> None:
    if config.max_open_s < config.open_s:
        raise ConfigError(
            f"`max_open_s` ({config.max_open_s:g}) is less than `open_s` ({config.open_s:g}), which is for how long a "
            "replica is left out the first time; raise the one or lower the other (breaker)."
        )


def _check_residency(config: Config) -> None:
    """Each model that is loaded on demand can be loaded, and what is said of such models is said of no others."""
    on_demand = {model.name for model in config.models if model.load == "on_demand"}
    budget_gib = config.residency.memory_gib
    for model in config.models:
        where = f"model {model.name!r}"
        for key in ("unload_after_s", "memory_gib"):
            if model.name not in on_demand and getattr(model, key) is not None:
                raise ConfigError(f"`{key}` belongs to `load: on_demand` ({where}).")
        if model.name in on_demand:
            _check_on_demand(model, budget_gib, where)
    for group in config.groups:
        if not on_demand.isdisjoint(group.models):
            _check_group_on_demand(group)
    for name in (name for group in config.residency.groups for name in group):
        if name not in on_demand:
            hint = nearest(name, on_demand)
            raise ConfigError(f"`residency.groups` names {name!r}, which is no model with `load: on_demand`{hint}.")


def _check_costs(config: Config) -> None:
    """Who is routed to by cost has one, at every replica."""
    by_name = {model.name: model for model in config.models}
    by_cost = {model.name for model in config.models if model.routing == "cost"}
    for group in config.groups:
        if group.routing == "cost":
            by_cost.update(group.models)
    for name in sorted(by_cost):
        for replica in by_name[name].replicas:
            if replica.cost is None:
                raise ConfigError(
                    f"`routing: cost` needs a `cost` at every replica, in any unit; replica {replica.name!r} of model "
                    f"{name!r} has none."
                )


def _check_group_on_demand(group: GroupConfig) -> None:
    """Its models are tried one after the other, so what is for all of them at a time has no place in it."""
    if group.routing != "order":
        raise ConfigError(
            f"Group {group.name!r} holds a model that is loaded on demand, so it needs `routing: order`: to choose by "
            "load, all its models would have to be loaded."
        )
    for key, is_set in (("slo", group.slo != SloConfig()), ("admission", group.admission is not None)):
        if is_set:
            raise ConfigError(
                f"Group {group.name!r} holds a model that is loaded on demand, so requests pass the gates of its "
                f"models: write `{key}` there, and not in the group."
            )


def _check_on_demand(model: ModelConfig, budget_gib: float | None, where: str) -> None:
    if not all(replica.launch for replica in model.replicas):
        raise ConfigError(
            f"`load: on_demand` needs `launch: true` at every replica: only a process of its own gives its memory back "
            f"({where})."
        )
    if (budget_gib is None) != (model.memory_gib is None):
        missing = "`residency.memory_gib`, the memory for all such models" if budget_gib is None else "`memory_gib` too"
        raise ConfigError(f"A limit on memory needs {missing} ({where}).")
    if budget_gib is not None and model.memory_gib is not None and model.memory_gib > budget_gib:
        raise ConfigError(
            f"It can never be loaded: it takes {model.memory_gib:g} GiB of the {budget_gib:g} that "
            f"`residency.memory_gib` allows ({where})."
        )


def _check_replica(replica: ReplicaConfig, model: ModelConfig, find_adapter: FindAdapter) -> None:
    where = f"replica {replica.name!r} of model {model.name!r}"
    try:
        adapter = find_adapter(replica.engine)
    except ValueError as error:
        raise ConfigError(f"{error} ({where})") from error
    if replica.launch and replica.model is None:
        raise ConfigError(f"`launch: true` needs `model:`, the model to start the engine with ({where}).")
    if not replica.launch and replica.model is not None:
        raise ConfigError(f"`model:` belongs to `launch: true`; without it, write `options: {{model: ...}}` ({where}).")
    if replica.launch:
        _check_launch(replica, adapter, where)
    else:
        adapter_options(replica, adapter)


def _check_launch(replica: ReplicaConfig, adapter: AdapterClass, where: str) -> None:
    """A launched engine's options are its launcher's, not its adapter's."""
    if not issubclass(adapter, Launchable):
        raise ConfigError(f"The engine {replica.engine!r} cannot be launched from here; give its `url` ({where}).")
    kind = adapter.launch_options()
    for key in replica.options:
        if key not in kind.__struct_fields__:
            hint = nearest(key, kind.__struct_fields__)
            raise ConfigError(f"The engine {replica.engine!r} has no launch option `{key}`{hint} ({where}).")
    try:
        msgspec.convert(replica.options, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{explain(error, kind)} (launch options of {where})") from error
