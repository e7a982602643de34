"""A file or plain data in, a checked `Config` out; and back to YAML, for whoever wants to see what holds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import yaml
from msgspec import Struct

from adapters import registry
from adapters.option_errors import explain, nearest
from adapters.yaml_text import YamlError, read_yaml
from gateway.config.checks import check
from gateway.config.environment import SECRET, adapter_options
from gateway.config.schema import AdapterClass, Config, ConfigError, FindAdapter, ReplicaConfig

MAX_CONFIG_BYTES = 1 << 20


def load_config(path: Path, find_adapter: FindAdapter = registry.adapter_class) -> Config:
    """Read, decode and check a configuration file."""
    return config_of(read_config_file(path), path, find_adapter)


def read_config_file(path: Path) -> bytes:
    """Its text, if it is one that can be read."""
    try:
        if path.is_fifo():  # opening it waits for a writer, and what was read once is gone
            raise ConfigError(f"The configuration {path} is a pipe; write a file, and give its path with --config.")
        with path.open("rb") as file:
            text = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"Cannot read the configuration {path}: {reason}; give its path with --config.") from error
    if len(text) > MAX_CONFIG_BYTES:
        raise ConfigError(f"The configuration {path} is larger than {MAX_CONFIG_BYTES} bytes.")
    return text


def config_of(text: bytes, path: Path, find_adapter: FindAdapter = registry.adapter_class) -> Config:
    """What the text says, decoded and checked; an error names the path."""
    try:
        return parse_config(read_yaml(text), find_adapter)
    except YamlError as error:
        raise ConfigError(f"{path}: {error}") from error
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
    check(config, find_adapter)
    return config


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
    hidden = {key for key in resolved if SECRET.search(key)}
    return {**{key: value for key, value in resolved.items() if key not in hidden}, **replica.options}


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
