"""Every key of the configuration file, as a field of a frozen struct with its default and its bounds.

configs/gateway.example.yaml shows them all, and a test holds the two together. What depends on more than one key is in
checks.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Struct

from adapters.base import EngineAdapter
from adapters.errors import GoodgateError
from adapters.wire.engine_client import URL
from gateway.shaping import Rules

Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256, pattern=r"^[^\s\x00-\x1f\x7f]+\Z")]

Seconds: TypeAlias = Annotated[float, Meta(gt=0, le=86_400)]

Gib: TypeAlias = Annotated[float, Meta(gt=0, le=1_000_000)]

AdapterClass: TypeAlias = type[EngineAdapter[Any]]

FindAdapter: TypeAlias = Callable[[str], AdapterClass]

Isolation: TypeAlias = Literal["auto", "require", "off"]

RoutingPolicy: TypeAlias = Literal[
    "round_robin", "weighted", "least_load", "power_of_two", "prefix_affinity", "session_affinity", "cost", "goodput"
]


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
    drain_delay_s: Annotated[float, Meta(ge=0, le=3_600)] = 0
    drain_timeout_s: Annotated[float, Meta(ge=0, le=86_400)] = 30
    reasoning_field: Literal["reasoning_content", "reasoning", "both"] = "reasoning_content"


class OverloadConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When the process itself is short of something, and refuses what is new: from which share of its memory and of its
    file descriptors on, and from which delay of its event loop. `auto` is the limit of the container."""

    memory_mib: Literal["auto", "unlimited"] | Annotated[int, Meta(ge=64, le=1 << 30)] = "auto"
    shed_at: Annotated[float, Meta(gt=0, le=1)] = 0.9
    max_loop_lag_ms: Annotated[float, Meta(gt=0, le=3_600_000)] = 1000


class HealthConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How often each replica is asked for its health, how long it may take to answer, and how often it is asked when
    it did not or is in doubt."""

    interval_s: Seconds = 5
    timeout_s: Seconds = 5
    recheck_s: Seconds = 1


class BreakerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a replica whose attempts fail gets no more of them, for how long, and how it is tried again."""

    failures: Annotated[int, Meta(ge=1, le=1000)] = 5
    failure_share: Annotated[float, Meta(gt=0, le=1)] = 0.5
    min_requests: Annotated[int, Meta(ge=1, le=1_000_000)] = 20
    window_s: Seconds = 30
    open_s: Seconds = 30
    max_open_s: Seconds = 300
    probe_s: Seconds = 1


class OutlierConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much slower than its peers a replica may be before it loses traffic, and how many of them failures may
    eject."""

    factor: Annotated[float, Meta(gt=1, le=1000)] = 4
    min_ttft_ms: Annotated[float, Meta(gt=0, le=3_600_000)] = 50
    min_tpot_ms: Annotated[float, Meta(gt=0, le=60_000)] = 10
    floor: Annotated[float, Meta(gt=0, le=1)] = 0.02
    probe_s: Seconds = 5
    max_ejected: Annotated[float, Meta(ge=0, le=1)] = 0.5


class ReloadConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Is the file read again when it changes, and how long may what it no longer names go on: as a stand-in for what
    has to start first, and with the answers that are open on it."""

    watch: bool = True
    interval_s: Annotated[float, Meta(ge=0.01, le=3_600)] = 1
    stand_in_s: Annotated[float, Meta(ge=0, le=86_400)] = 600
    drain_timeout_s: Annotated[float, Meta(ge=0, le=86_400)] = 600


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
    """Are fingerprints of prompts kept, to tell tenants where their prompts destroy the reuse of prefix caches? And how
    much may `routing: prefix_affinity` remember?"""

    advice: bool = True
    index_mib: Annotated[int, Meta(ge=1, le=65_536)] = 32


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
    weight: Annotated[float, Meta(gt=0, le=1_000_000)] = 1
    cost: Annotated[float, Meta(ge=0, le=1e12)] | None = None
    max_in_flight: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    options: dict[str, Any] = {}


class SloConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a model's callers are promised: milliseconds to the first token, and for each one after it."""

    ttft_ms: Annotated[float, Meta(gt=0, le=3_600_000)] | None = None
    tpot_ms: Annotated[float, Meta(gt=0, le=60_000)] | None = None


class AdmissionConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many generations may be open at once, who waits for a turn, and how turns are shared out."""

    max_running: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    min_running: Annotated[int, Meta(ge=1, le=1_000_000)] = 1
    adaptive: bool | None = None
    max_waiting: Annotated[int, Meta(ge=0, le=100_000)] = 256
    max_wait_s: Annotated[float, Meta(gt=0, le=3600)] = 30
    floor_share: Annotated[float, Meta(ge=0, le=0.5)] = 0.05
    weights: dict[Name, Annotated[float, Meta(gt=0, le=1000)]] = {}

    @property
    def is_adaptive(self) -> bool:
        """The limit is found out, by default where none is given."""
        return self.max_running is None if self.adaptive is None else self.adaptive


class RetriesConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much of what fails is tried again, by the whole gateway: a share of its requests, and `floor` in ten seconds
    in any case. A request waits at most `max_wait_s` for that, and for a replica that has told when to come back."""

    budget: Annotated[float, Meta(ge=0, le=1)] = 0.2
    floor: Annotated[int, Meta(ge=0, le=10_000)] = 10
    max_wait_s: Annotated[float, Meta(ge=0, le=120)] = 5


class HedgeConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a second replica is asked though the first has not failed: milliseconds without a first token, or the 95th
    percentile of the last ones; and the share of the requests for which that may happen."""

    after: Literal["p95"] | Annotated[float, Meta(gt=0, le=600_000)] = "p95"
    budget: Annotated[float, Meta(gt=0, le=1)] = 0.05


class NamedConfig(Rules, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What clients can ask for by a name: which names those are, what holds for the requests, and who answers if the
    first choice cannot. Aliases may be patterns."""

    name: Name
    aliases: tuple[Name, ...] = ()
    fallbacks: tuple[Name, ...] = ()
    context_fallbacks: tuple[Name, ...] = ()
    max_attempts: Annotated[int, Meta(ge=1, le=10)] = 3
    total_timeout_s: Seconds | None = None
    hedge: HedgeConfig | None = None
    continuation: bool = False
    slo: SloConfig = SloConfig()
    admission: AdmissionConfig | None = None


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


class GoodputConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far the proven goodput of `evidence` is believed: `routing: goodput` gives a replica `margin` of it."""

    margin: Annotated[float, Meta(gt=0, le=1)] = 0.9
    max_age_days: Annotated[float, Meta(gt=0, le=3660)] = 90


class AutoscaleConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many replicas a model wants: so many that each has `target` of its proven goodput to do; no fewer before so
    many would have been enough for `hold_s`."""

    target: Annotated[float, Meta(gt=0, le=1)] = 0.7
    hold_s: Annotated[float, Meta(ge=0, le=86_400)] = 300


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
    overload: OverloadConfig = OverloadConfig()
    health: HealthConfig = HealthConfig()
    breaker: BreakerConfig = BreakerConfig()
    outliers: OutlierConfig = OutlierConfig()
    reload: ReloadConfig = ReloadConfig()
    auth: AuthConfig = AuthConfig()
    tenants: TenantsConfig = TenantsConfig()
    logs: LogsConfig = LogsConfig()
    tracing: TracingConfig = TracingConfig()
    prefixes: PrefixesConfig = PrefixesConfig()
    responses: ResponsesConfig = ResponsesConfig()
    ledger: LedgerConfig = LedgerConfig()
    quotas: QuotasConfig = QuotasConfig()
    evidence: Annotated[str, Meta(pattern=r"^[^\x00]+\Z")] | None = None
    goodput: GoodputConfig = GoodputConfig()
    autoscale: AutoscaleConfig = AutoscaleConfig()
    retries: RetriesConfig = RetriesConfig()
    residency: ResidencyConfig = ResidencyConfig()
    models: Annotated[tuple[ModelConfig, ...], Meta(min_length=1)]
    groups: tuple[GroupConfig, ...] = ()
