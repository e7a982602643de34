"""The gateway's configuration: a YAML file in, frozen structs out, or one sentence that says what is wrong and where.

    config = load_config(Path("configs/local.yaml"))

Every key is a field in schema.py, and configs/gateway.example.yaml shows them all. An unknown key is an error with its
path and the nearest spelling. A replica's `options` are the engine's own keys, checked against its adapter's `Options`.
Secrets are never written in the file: `api_key_env: NAME` or `api_key_file: PATH` gives the adapter its `api_key`.
"""

from gateway.config.environment import (
    adapter_options,
    cache_salt_secret,
    quotas_password,
    secret_files,
    tracing_headers,
)
from gateway.config.live import Live
from gateway.config.loading import config_of, describe, load_config, parse_config, read_config_file
from gateway.config.schema import (
    AdapterClass,
    AdmissionConfig,
    AuthConfig,
    AutoscaleConfig,
    BreakerConfig,
    Config,
    ConfigError,
    FindAdapter,
    GoodputConfig,
    GroupConfig,
    HealthConfig,
    HedgeConfig,
    Isolation,
    LedgerConfig,
    LogsConfig,
    ModelConfig,
    NamedConfig,
    OutlierConfig,
    PrefixesConfig,
    QuotasConfig,
    ReloadConfig,
    ReplicaConfig,
    ResidencyConfig,
    ResponsesConfig,
    RetriesConfig,
    RoutingPolicy,
    ServerConfig,
    SloConfig,
    TenantsConfig,
    TracingConfig,
)

__all__ = [
    "AdapterClass",
    "AdmissionConfig",
    "AuthConfig",
    "AutoscaleConfig",
    "BreakerConfig",
    "Config",
    "ConfigError",
    "FindAdapter",
    "GoodputConfig",
    "GroupConfig",
    "HealthConfig",
    "HedgeConfig",
    "Isolation",
    "LedgerConfig",
    "Live",
    "LogsConfig",
    "ModelConfig",
    "NamedConfig",
    "OutlierConfig",
    "PrefixesConfig",
    "QuotasConfig",
    "ReloadConfig",
    "ReplicaConfig",
    "ResidencyConfig",
    "ResponsesConfig",
    "RetriesConfig",
    "RoutingPolicy",
    "ServerConfig",
    "SloConfig",
    "TenantsConfig",
    "TracingConfig",
    "adapter_options",
    "cache_salt_secret",
    "config_of",
    "describe",
    "load_config",
    "parse_config",
    "quotas_password",
    "read_config_file",
    "secret_files",
    "tracing_headers",
]
