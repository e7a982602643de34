"""The gateway's configuration: a YAML file in, frozen structs out, or one sentence that says what is wrong and where.

    config = load_config(Path("configs/local.yaml"))

Every key is a field below, and configs/gateway.example.yaml shows them all. An unknown key is an error with its path
and the nearest spelling. A replica's `options` are the engine's own keys, checked against its adapter's `Options`.
Secrets are never written in the file: `api_key_env: NAME` or `api_key_file: PATH` gives the adapter its `api_key`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias
from urllib.parse import unquote, urlsplit

import msgspec
import yaml
from msgspec import Meta, Struct

from adapters import registry
from adapters.base import EngineAdapter, EngineOptions
from adapters.errors import GoodgateError
from adapters.launching.launch import Launchable
from adapters.option_errors import explain, nearest
from adapters.wire.engine_client import URL
from gateway.replicas.names import is_pattern
from gateway.shaping import Rules, shape_of

Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256, pattern=r"^[^\s\x00-\x1f\x7f]+\Z")]
Seconds: TypeAlias = Annotated[float, Meta(gt=0, le=86_400)]
Gib: TypeAlias = Annotated[float, Meta(gt=0, le=1_000_000)]
AdapterClass: TypeAlias = type[EngineAdapter[Any]]
FindAdapter: TypeAlias = Callable[[str], AdapterClass]
Isolation: TypeAlias = Literal["auto", "require", "off"]
RoutingPolicy: TypeAlias = Literal["round_robin", "least_load"]

MAX_CONFIG_BYTES = 1 << 20
MAX_DEPTH = 32
MIN_SALT_KEY = 32  # characters
_SECRET = re.compile(r"(^|_)(key|token|secret|password)$")


class ConfigError(GoodgateError):
    """The configuration cannot be used. The message names the place and what to write there."""

    code = "config_error"


class ServerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the gateway listens, and the limits that protect it."""

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65_535)] = 8080
    max_body_mib: Annotated[int, Meta(ge=1, le=1024)] = 32
    header_timeout_s: Seconds = 10
    body_timeout_s: Seconds = 30
    write_timeout_s: Seconds = 30
    heartbeat_s: Seconds = 15
    max_in_flight: Annotated[int, Meta(ge=1, le=1_000_000)] = 512
    drain_timeout_s: Annotated[float, Meta(ge=0, le=86_400)] = 30
    reasoning_field: Literal["reasoning_content", "reasoning", "both"] = "reasoning_content"


class HealthConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How often each replica is asked for its health, and how long it may take to answer."""

    interval_s: Seconds = 5
    timeout_s: Seconds = 5


class AuthConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who may call. `required` is by default as soon as a key was ever made."""

    required: Literal["auto"] | bool = "auto"
    open: bool = False
    loopback_is_admin: bool = False


class TenantsConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far tenants are kept apart in engines' prefix caches. The key of their salts is made once in GOODGATE_HOME;
    several hosts need one in common, of 32 characters or more."""

    isolate_prefix_cache: Isolation = "auto"
    cache_salt_env: Name | None = None
    cache_salt_file: Annotated[str, Meta(min_length=1)] | None = None


class LogsConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is logged to stderr: one line an event, never a prompt or a key. `verbatim` lets in what may quote one: the
    words of engines that fail, and the messages of faults that nobody foresaw."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"
    access: bool = True
    verbatim: bool = False


class TracingConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where OpenTelemetry spans go, if anywhere, and for what share of the traces that begin here."""

    exporter: Literal["none", "otlp"] = "none"
    endpoint: URL = "http://127.0.0.1:4318"
    sample: Annotated[float, Meta(ge=0, le=1)] = 1.0
    headers_env: Name | None = None


class PrefixesConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Are fingerprints of prompts kept, to tell tenants where their prompts destroy the reuse of prefix caches?"""

    advice: bool = True


class ResponsesConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is kept of /v1/responses for clients that come back to it: where, how much and how long."""

    keep: Literal["memory", "file", "none"] = "memory"
    max_responses: Annotated[int, Meta(ge=1, le=1_000_000)] = 4096
    max_mib: Annotated[int, Meta(ge=1, le=65_536)] = 256
    ttl_s: Annotated[float, Meta(gt=0, le=366 * 86_400)] = 86_400


class LedgerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is kept of each request, for `goodgate usage` and `goodgate why`: never a prompt, an answer or a key."""

    keep: Literal["file", "none"] = "file"
    keep_days: Annotated[int, Meta(ge=1, le=3660)] = 90
    max_mib: Annotated[int, Meta(ge=8, le=1 << 20)] = 1024


class QuotasConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where is kept what keys have used: in a file of this host, or in a Redis or Valkey that several hosts share."""

    store: Annotated[str, Meta(pattern=r"^(file|(redis|rediss|unix)://[^\s\x00-\x1f\x7f]+)\Z")] = "file"
    username: Name | None = None
    password_env: Name | None = None
    password_file: Name | None = None
    prefix: Name = "goodgate:"
    timeout_s: Annotated[float, Meta(gt=0, le=60)] = 0.25
    lease_s: Annotated[int, Meta(ge=1, le=3600)] = 10
    when_down: Literal["refuse", "allow"] = "refuse"


class ReplicaConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One running instance of an engine, or with `launch` one that the gateway starts and stops."""

    engine: Name
    name: Name | None = None
    launch: bool = False
    model: Name | None = None
    options: dict[str, Any] = {}


class NamedConfig(Rules, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What clients can ask for by a name: which names those are, what holds for the requests, and who answers if the
    first choice cannot. Aliases may be patterns."""

    name: Name
    aliases: tuple[Name, ...] = ()
    fallbacks: tuple[Name, ...] = ()
    context_fallbacks: tuple[Name, ...] = ()
    max_attempts: Annotated[int, Meta(ge=1, le=10)] = 3


class ModelConfig(NamedConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model, and the replicas that serve it."""

    routing: RoutingPolicy = "least_load"
    load: Literal["at_start", "on_demand"] = "at_start"
    unload_after_s: Seconds | None = None
    memory_gib: Gib | None = None
    replicas: Annotated[tuple[ReplicaConfig, ...], Meta(min_length=1)]


class GroupConfig(NamedConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Several models under one name: the first that can answers, or the one with the least to do."""

    routing: Literal["order"] | RoutingPolicy = "order"
    models: Annotated[tuple[Name, ...], Meta(min_length=1)]


class ResidencyConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which of the models that are loaded on demand may be loaded together, and how long a load and a wait may take."""

    max_loaded: Annotated[int, Meta(ge=1)] | None = None
    groups: tuple[Annotated[tuple[Name, ...], Meta(min_length=1)], ...] = ()
    memory_gib: Gib | None = None
    load_timeout_s: Seconds = 600
    wait_timeout_s: Seconds = 600


class Config(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file."""

    server: ServerConfig = ServerConfig()
    health: HealthConfig = HealthConfig()
    auth: AuthConfig = AuthConfig()
    tenants: TenantsConfig = TenantsConfig()
    logs: LogsConfig = LogsConfig()
    tracing: TracingConfig = TracingConfig()
    prefixes: PrefixesConfig = PrefixesConfig()
    responses: ResponsesConfig = ResponsesConfig()
    ledger: LedgerConfig = LedgerConfig()
    quotas: QuotasConfig = QuotasConfig()
    evidence: Annotated[str, Meta(min_length=1)] | None = None
    residency: ResidencyConfig = ResidencyConfig()
    models: Annotated[tuple[ModelConfig, ...], Meta(min_length=1)]
    groups: tuple[GroupConfig, ...] = ()


def load_config(path: Path, find_adapter: FindAdapter = registry.adapter_class) -> Config:
    """Read, decode and check a configuration file."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"Cannot read the configuration {path}: {reason}; give its path with --config.") from error
    if len(text) > MAX_CONFIG_BYTES:
        raise ConfigError(f"The configuration {path} is larger than {MAX_CONFIG_BYTES} bytes.")
    try:
        return parse_config(_read_yaml(text), find_adapter)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}") from error


def parse_config(data: object, find_adapter: FindAdapter = registry.adapter_class) -> Config:
    """Plain data to a checked `Config`, with every replica named."""
    if not isinstance(data, dict):
        raise ConfigError("The configuration must be a mapping with the key `models`.")
    for unknown in _unknown_keys(data, Config, ""):
        raise ConfigError(unknown)
    try:
        config = msgspec.convert(data, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(explain(error, Config)) from error
    config = _with_replica_names(config)
    _check_names(config)
    _check_references(config)
    _check_rules(config)
    tracing_headers(config.tracing)
    cache_salt_secret(config.tenants)
    _check_quotas(config.quotas)
    _check_residency(config)
    for model in config.models:
        for replica in model.replicas:
            _check_replica(replica, model, find_adapter)
    return config


def quotas_password(config: QuotasConfig) -> str | None:
    """The store's password: in the environment, or where that is not set in the file."""
    name = config.password_env
    if name is not None and (name in os.environ or config.password_file is None):
        return _read_secret("env", name, "password_env", "quotas")
    if config.password_file is not None:
        return _read_secret("file", config.password_file, "password_file", "quotas")
    return None


def adapter_options(replica: ReplicaConfig, adapter: AdapterClass) -> EngineOptions:
    """The engine's own keys as its `Options`, with secrets read from where the file points."""
    where = f"options of replica {replica.name!r}"
    options = _resolve_secrets(replica.options, adapter, where)
    _check_options(options, adapter, where)
    try:
        return msgspec.convert(options, adapter.Options)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{explain(error, adapter.Options)} ({where})") from error


def tracing_headers(config: TracingConfig) -> dict[str, str]:
    """Headers for the collector, out of the variable that the file names: `name=value,name=value`, percent-encoded as
    in OTEL_EXPORTER_OTLP_HEADERS."""
    if config.headers_env is None:
        return {}
    pairs = [pair.partition("=") for pair in os.environ.get(config.headers_env, "").split(",")]
    headers = {name.strip(): unquote(value.strip()) for name, equals, value in pairs if name.strip() and equals}
    if len(headers) < len(pairs):
        raise ConfigError(
            f"The environment variable {config.headers_env!r} named by `tracing.headers_env` must hold headers as "
            "`name=value,name=value`."
        )
    return headers


def cache_salt_secret(tenants: TenantsConfig) -> bytes | None:
    """The key of the cache salts, from where the file points; None where it is to be made."""
    sources = {"env": tenants.cache_salt_env, "file": tenants.cache_salt_file}
    given = [(source, name) for source, name in sources.items() if name is not None]
    if not given:
        return None
    if len(given) > 1:
        raise ConfigError("Both `tenants.cache_salt_env` and `tenants.cache_salt_file` are set; write one of them.")
    ((source, name),) = given
    key = f"tenants.cache_salt_{source}"
    secret = _read_secret(source, name, key, "tenants")
    if len(secret) < MIN_SALT_KEY:
        raise ConfigError(
            f"The secret that `{key}` names has {len(secret)} characters, and needs {MIN_SALT_KEY}: "
            "`openssl rand -hex 32` makes one."
        )
    return secret.encode()


def describe(config: Config, find_adapter: FindAdapter = registry.adapter_class) -> str:
    """The resolved configuration as YAML: with defaults and engine options, without the value of any secret."""
    data = msgspec.to_builtins(config)
    for model, shown in zip(config.models, data["models"], strict=True):
        for replica, shown_replica in zip(model.replicas, shown["replicas"], strict=True):
            if not replica.launch:
                shown_replica["options"] = _shown_options(replica, find_adapter(replica.engine))
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True)


def _shown_options(replica: ReplicaConfig, adapter: AdapterClass) -> dict[str, Any]:
    resolved: dict[str, Any] = msgspec.to_builtins(adapter_options(replica, adapter))
    hidden = {key for key in resolved if _SECRET.search(key)}
    return {**{key: value for key, value in resolved.items() if key not in hidden}, **replica.options}


def _read_yaml(text: bytes) -> object:
    try:
        _check_tokens(yaml.scan(text, Loader=yaml.SafeLoader))
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: the 31st of February
        raise ConfigError(f"This is not valid YAML: {' '.join(str(error).split())}.") from error


def _check_tokens(tokens: Iterable[yaml.Token]) -> None:
    """Aliases can grow a small file into gigabytes, and PyYAML takes the square of the depth to read brackets in
    brackets: a configuration needs neither."""
    depth = 0
    for token in tokens:
        if isinstance(token, yaml.AliasToken):
            raise ConfigError("YAML aliases (`*name`) are not allowed in a configuration.")
        depth += isinstance(token, _OPENINGS) - isinstance(token, _CLOSINGS)
        if depth > MAX_DEPTH:
            raise ConfigError(f"It is nested more than {MAX_DEPTH} levels deep, which no configuration is.")


_OPENINGS = (
    yaml.BlockMappingStartToken, yaml.BlockSequenceStartToken, yaml.FlowMappingStartToken, yaml.FlowSequenceStartToken,
)  # fmt: skip
_CLOSINGS = (yaml.BlockEndToken, yaml.FlowMappingEndToken, yaml.FlowSequenceEndToken)


class _Loader(yaml.SafeLoader):
    """YAML's plain types. A key that is written twice is an error, where PyYAML keeps the last and says nothing."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        mapping = super().construct_mapping(node, deep)
        if len(mapping) != len(node.value):
            names = [key.value for key, _ in node.value]
            twice = next((name for name in names if names.count(name) > 1), names[-1])
            raise ConfigError(f"The key `{twice}` is written twice in the part that begins on line {_line(node)}.")
        return mapping


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _unknown_keys(data: object, kind: Any, path: str) -> Iterator[str]:
    """Sentences about keys that no field has. msgspec refuses them too, but cannot say which name was meant."""
    if isinstance(kind, type) and issubclass(kind, Struct):
        if isinstance(data, dict):
            types = msgspec.structs.fields(kind)
            fields = {field.name: field.type for field in types}
            for key, value in data.items():
                if key not in fields:
                    yield f"Unknown key `{path}{key}`{nearest(str(key), fields)}."
                else:
                    yield from _unknown_keys(value, fields[key], f"{path}{key}.")
    elif isinstance(data, list):
        for item_kind in _structs_within(kind):
            for index, item in enumerate(data):
                yield from _unknown_keys(item, item_kind, f"{path.removesuffix('.')}[{index}].")


def _structs_within(kind: Any) -> Iterator[type[Struct]]:
    for argument in getattr(kind, "__args__", ()):
        if isinstance(argument, type) and issubclass(argument, Struct):
            yield argument
        else:
            yield from _structs_within(argument)


def _with_replica_names(config: Config) -> Config:
    models = [
        msgspec.structs.replace(
            model,
            replicas=tuple(
                msgspec.structs.replace(replica, name=replica.name or f"{replica.engine}-{index}")
                for index, replica in enumerate(model.replicas)
            ),
        )
        for model in config.models
    ]
    return msgspec.structs.replace(config, models=tuple(models))


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


def _check_quotas(config: QuotasConfig) -> None:
    if "@" in urlsplit(config.store).netloc:
        raise ConfigError("Do not write a secret in the file: use `password_env` or `password_file` (quotas).")
    secret = (config.username, config.password_env, config.password_file)
    if config.store == "file" and secret != (None, None, None):
        raise ConfigError("`store: file` takes no user and no password; leave them out, or name a Redis (quotas).")
    quotas_password(config)


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
        if group.routing != "order" and not on_demand.isdisjoint(group.models):
            raise ConfigError(
                f"Group {group.name!r} holds a model that is loaded on demand, so it needs `routing: order`: to choose "
                "by load, all its models would have to be loaded."
            )
    for name in (name for group in config.residency.groups for name in group):
        if name not in on_demand:
            hint = nearest(name, on_demand)
            raise ConfigError(f"`residency.groups` names {name!r}, which is no model with `load: on_demand`{hint}.")


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


def _resolve_secrets(options: Mapping[str, Any], adapter: AdapterClass, where: str) -> dict[str, Any]:
    fields = set(adapter.Options.__struct_fields__)
    resolved: dict[str, Any] = {}
    for key, value in options.items():
        base, _, source = key.rpartition("_")
        if _SECRET.search(key) and key in fields:
            raise ConfigError(f"Do not write a secret in the file: use `{key}_env` or `{key}_file` ({where}).")
        if base in fields and _SECRET.search(base) and source in ("env", "file"):
            resolved[base] = _read_secret(source, str(value), key, where)
        else:
            resolved[key] = value
    return resolved


def _read_secret(source: str, name: str, key: str, where: str) -> str:
    if source == "env":
        value = os.environ.get(name, "")
        if not value:
            raise ConfigError(f"The environment variable {name!r} named by `{key}` is not set ({where}).")
        return value
    try:
        value = Path(name).expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"Cannot read the file {name!r} named by `{key}`: {reason} ({where}).") from error
    if not value:
        raise ConfigError(f"The file {name!r} named by `{key}` is empty ({where}).")
    return value


def _check_options(options: Mapping[str, Any], adapter: AdapterClass, where: str) -> None:
    fields = set(adapter.Options.__struct_fields__)
    secrets = {f"{field}_{source}" for field in fields if _SECRET.search(field) for source in ("env", "file")}
    for key in options:
        if key not in fields:
            known = {field for field in fields if not _SECRET.search(field)} | secrets
            raise ConfigError(f"The engine {adapter.engine!r} has no option `{key}`{nearest(key, known)} ({where}).")
