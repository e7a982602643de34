"""Secrets, from where the file points: it names a variable or another file, and never holds one itself."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import msgspec

from adapters.base import EngineOptions
from adapters.option_errors import explain, nearest
from gateway.config.schema import (
    AdapterClass,
    Config,
    ConfigError,
    QuotasConfig,
    ReplicaConfig,
    TenantsConfig,
    TracingConfig,
)

MIN_SALT_KEY = 32  # characters

SECRET = re.compile(r"(^|_)(key|token|secret|password)$")


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


def secret_files(config: Config) -> list[Path]:
    """The files that replicas' options name, and that change when a key is rotated."""
    options = [replica.options for model in config.models for replica in model.replicas]
    names = [each[key] for each in options for key in each if key.endswith("_file") and SECRET.search(key[:-5])]
    return sorted({Path(str(name)).expanduser() for name in names})


def read_secret_file(path: Path) -> bytes:
    """The file's content. It is read again with each reload, so only what can be read again will do: a pipe, which
    waits for a writer, would hold up the gateway."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file")
    return path.read_bytes()


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


def _resolve_secrets(options: Mapping[str, Any], adapter: AdapterClass, where: str) -> dict[str, Any]:
    fields = set(adapter.Options.__struct_fields__)
    resolved: dict[str, Any] = {}
    for key, value in options.items():
        base, _, source = key.rpartition("_")
        if SECRET.search(key) and key in fields:
            raise ConfigError(f"Do not write a secret in the file: use `{key}_env` or `{key}_file` ({where}).")
        if base in fields and SECRET.search(base) and source in ("env", "file"):
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
        value = read_secret_file(Path(name).expanduser()).decode().strip()
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: it is in the home of nobody that is known here
        reason = error.strerror if isinstance(error, OSError) else "it is not text, or that is no path"
        raise ConfigError(f"Cannot read the file {name!r} named by `{key}`: {reason} ({where}).") from error
    if not value:
        raise ConfigError(f"The file {name!r} named by `{key}` is empty ({where}).")
    return value


def _check_options(options: Mapping[str, Any], adapter: AdapterClass, where: str) -> None:
    fields = set(adapter.Options.__struct_fields__)
    secrets = {f"{field}_{source}" for field in fields if SECRET.search(field) for source in ("env", "file")}
    for key in options:
        if key not in fields:
            known = {field for field in fields if not SECRET.search(field)} | secrets
            raise ConfigError(f"The engine {adapter.engine!r} has no option `{key}`{nearest(key, known)} ({where}).")
