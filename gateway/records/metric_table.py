"""Every metric of the gateway, in one table. What is not declared here cannot be counted.

To add one, write its row below and count it where it happens:

    Metric("goodgate_errors", "counter", "Requests that failed.", ("model", "code"))
    metrics.add("goodgate_errors", "m", "engine_timeout")

A label's name means the same in every metric, so `LABELS` says once where its values come from, and how many of them a
gateway may have: whatever comes later is counted as "other". Nothing that a client, an engine or a key's name chooses
can make a series too many. `scripts/metrics_page.py` writes docs/metrics.md out of this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

from msgspec import Struct

Kind: TypeAlias = Literal["counter", "gauge", "histogram"]

OTHER = "other"  # the value of a label that has too many, or that nobody has configured
MAX_SERIES = 5000  # of one metric, whatever its labels: combinations beyond them are "other" in every label

LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
LAG_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
LOAD_S = (0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600)
TOKEN_TIME_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1)


class Label(Struct, frozen=True):
    """Where a label's values come from, and how many there may be."""

    source: str
    cap: int


class Metric(Struct, frozen=True):
    """One row. `name` is written without the ending `_total`, which Prometheus' text gives to counters. `buckets` are
    a histogram's upper bounds, in the unit that the name ends with."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def exposed_name(self) -> str:
        """The name to ask Prometheus for."""
        return f"{self.name}_total" if self.kind == "counter" else self.name


LABELS: Mapping[str, Label] = {
    "model": Label("the names of `models` in the configuration; `other` for any name that is not there", 1000),
    "engine": Label("`engine` of the configured replicas", 100),
    "replica": Label("the names of the configured replicas", 1000),
    "route": Label("the patterns of the gateway's routes, and `unmatched`", 100),
    "status": Label("the HTTP statuses of the gateway's answers; 499 where the client left first", 60),
    "code": Label("the codes of the gateway's errors ([docs/api.md](api.md)); an engine's own never get here", 100),
    "decision": Label("`refused` or `allowed`", 2),
    "outcome": Label("`ok`, `cancelled`, `lost` (to a hedge), or the code of the error that ended the attempt", 100),
    "winner": Label("`first`, or `hedge`: the second replica", 2),
    "tenant": Label("the tenants of the API keys; `anonymous` where no key is asked for", 200),
    "verdict": Label("`applied`, `unchanged` or `refused`", 3),
    "result": Label("`sent`, `failed` (the collector took them not) or `dropped` (too many waited)", 3),
    "reason": Label("`idle`, `evicted` (its place was wanted), `asked` (by an admin), `failed` or `changed`", 5),
    "priority": Label("`high`, `default` or `low`", 3),
    "cause": Label(
        "`late` (its turn would come too late), `full` (too many wait), `displaced` (a higher class took its place) or "
        "`expired` (its turn did not come in time)",
        4,
    ),
    "resource": Label("`memory`, `files` or `loop`: what the process was short of", 3),
    "kind": Label("`prompt` or `completion`", 2),
    "state": Label("`unloaded`, `starting`, `ready`, `unhealthy` or `failed`", 5),
    "reuse": Label("`hit`: read from the engine's prefix cache; `miss`: computed", 2),
}

_REPLICA = ("model", "engine", "replica")

METRICS: tuple[Metric, ...] = (
    Metric("goodgate_requests", "counter", "Requests answered.", ("model", "route", "status")),
    Metric("goodgate_errors", "counter", "Requests that failed.", ("model", "code")),
    Metric(
        "goodgate_request_duration_seconds",
        "histogram",
        "From the request to the end of its answer.",
        ("model", "route"),
        LATENCY_S,
    ),
    Metric(
        "goodgate_wait_seconds",
        "histogram",
        "From the request to its first attempt: reading and checking it, and waiting for a replica.",
        ("model",),
        LATENCY_S,
    ),
    Metric("goodgate_attempts", "counter", "Tries on one replica.", (*_REPLICA, "outcome")),
    Metric(
        "goodgate_retries", "counter", "Attempts beside a request's first, by the failure before.", ("model", "code")
    ),
    Metric(
        "goodgate_retries_refused",
        "counter",
        "Retries that were not made because the budget for them was spent.",
        ("model",),
    ),
    Metric(
        "goodgate_hedges",
        "counter",
        "Requests for which a second replica was asked, by who answered.",
        ("model", "winner"),
    ),
    Metric(
        "goodgate_continuations",
        "counter",
        "Streams that broke off and could be continued: `ok`, or why another replica did not go on.",
        ("model", "outcome"),
    ),
    Metric(
        "goodgate_time_to_first_token_seconds",
        "histogram",
        "From the request to the first chunk of the attempt that answered.",
        _REPLICA,
        LATENCY_S,
    ),
    Metric(
        "goodgate_time_per_output_token_seconds",
        "histogram",
        "Of whole answers, the time after the first chunk by the tokens after the first one of each choice.",
        _REPLICA,
        TOKEN_TIME_S,
    ),
    Metric("goodgate_prompt_tokens", "counter", "Tokens read.", _REPLICA),
    Metric("goodgate_cached_prompt_tokens", "counter", "Of these, tokens read from a prefix cache.", _REPLICA),
    Metric("goodgate_completion_tokens", "counter", "Tokens written.", _REPLICA),
    Metric(
        "goodgate_tenant_tokens",
        "counter",
        "Tokens that budgets and the ledger charge to a tenant: estimates where no engine has counted.",
        ("tenant", "model", "kind"),
    ),
    Metric(
        "goodgate_prefix_tokens",
        "counter",
        "Prompt tokens of engines that tell how many came from their prefix cache.",
        ("tenant", "model", "reuse"),
    ),
    Metric(
        "goodgate_config_reloads", "counter", "Readings of the configuration while requests are served.", ("verdict",)
    ),
    Metric("goodgate_config_timestamp_seconds", "gauge", "When the configuration came that is in force."),
    Metric(
        "goodgate_prefix_index_bytes", "gauge", "What routing by prefix remembers of prompts, in memory, as hashes."
    ),
    Metric("goodgate_prefix_index_evictions", "counter", "Blocks of prompts that routing by prefix had to forget."),
    Metric(
        "goodgate_unmetered_requests",
        "counter",
        "Requests of keys with limits or budgets that came while the store of quotas did not answer.",
        ("decision",),
    ),
    Metric("goodgate_admission_open", "gauge", "Generations that the model's gate has let in.", ("model",)),
    Metric("goodgate_admission_limit", "gauge", "Generations that it lets in at once, as of now.", ("model",)),
    Metric("goodgate_admission_waiting", "gauge", "Requests that wait for their turn there.", ("model", "priority")),
    Metric(
        "goodgate_admission_wait_seconds",
        "histogram",
        "Waits of those that were let in after one.",
        ("model", "priority"),
        LATENCY_S,
    ),
    Metric(
        "goodgate_admission_shed",
        "counter",
        "Requests that a model's gate sent away with 503.",
        ("model", "priority", "cause"),
    ),
    Metric("goodgate_in_flight", "gauge", "Open generations.", _REPLICA),
    Metric(
        "goodgate_tasks", "gauge", "Tasks of the process: connections, requests, and what the gateway does by itself."
    ),
    Metric("goodgate_replica_ready", "gauge", "1 if the replica can serve, be it after a load on demand.", _REPLICA),
    Metric("goodgate_replica_state", "gauge", "1 for the state that the replica is in.", (*_REPLICA, "state")),
    Metric(
        "goodgate_replica_trust",
        "gauge",
        "How much of its traffic a replica keeps that is slower than its peers: 1 is all.",
        _REPLICA,
    ),
    Metric("goodgate_replica_breaker", "gauge", "The replica's breaker: 0 closed, 1 half open, 2 open.", _REPLICA),
    Metric("goodgate_replica_ejections", "counter", "Times that failures have ejected the replica.", _REPLICA),
    Metric(
        "goodgate_replica_restarts",
        "counter",
        "Ends of a launched engine after which it was started again.",
        _REPLICA,
    ),
    Metric("goodgate_model_loaded", "gauge", "Of models loaded on demand: 1 while it is loaded.", ("model",)),
    Metric("goodgate_model_waiting", "gauge", "Requests that wait for the model to be loaded.", ("model",)),
    Metric(
        "goodgate_model_load_seconds",
        "histogram",
        "From the start of a model's engines until one of them could serve.",
        ("model",),
        LOAD_S,
    ),
    Metric(
        "goodgate_model_load_failures",
        "counter",
        "Loads that came to nothing, and loaded models that were given up.",
        ("model",),
    ),
    Metric("goodgate_model_unloads", "counter", "Unloads of models that are loaded on demand.", ("model", "reason")),
    Metric("goodgate_engine_running", "gauge", "Requests that the engine says it is working on.", _REPLICA),
    Metric("goodgate_engine_waiting", "gauge", "Requests that the engine says wait in its queue.", _REPLICA),
    Metric("goodgate_engine_kv_usage_ratio", "gauge", "Share of the engine's KV cache in use, by its word.", _REPLICA),
    Metric(
        "goodgate_engine_prefix_hit_ratio",
        "gauge",
        "Share of prompt tokens that the engine found in its prefix cache since it started, by its word.",
        _REPLICA,
    ),
    Metric(
        "goodgate_engine_draft_tokens",
        "counter",
        "Tokens that speculation has guessed since the engine started, by its word.",
        _REPLICA,
    ),
    Metric(
        "goodgate_engine_accepted_draft_tokens",
        "counter",
        "Of these, tokens that turned out right, each of which saved a step.",
        _REPLICA,
    ),
    Metric("goodgate_spans", "counter", "OpenTelemetry spans, where they are exported.", ("result",)),
    Metric(
        "goodgate_goodput_proven_rps",
        "gauge",
        "Requests a second that a race has proven one such replica to carry within its latency limits.",
        _REPLICA,
    ),
    Metric(
        "goodgate_evidence_trusted",
        "gauge",
        "Of replicas that the race speaks of: 1 if it is trusted, 0 if it is stale, contradicted or of other limits.",
        _REPLICA,
    ),
    Metric(
        "goodgate_offered_rps",
        "gauge",
        "Generations a second that the model is asked for, with those that were turned away for lack of capacity.",
        ("model",),
    ),
    Metric(
        "goodgate_goodput_capacity_rps",
        "gauge",
        "Generations a second that the model's ready replicas are trusted to carry within its limits.",
        ("model",),
    ),
    Metric(
        "goodgate_goodput_headroom_rps",
        "gauge",
        "Capacity less what is offered; below 0 where more is asked for.",
        ("model",),
    ),
    Metric("goodgate_goodput_utilisation_ratio", "gauge", "What is offered by the capacity.", ("model",)),
    Metric(
        "goodgate_replicas_needed",
        "gauge",
        "Replicas that what is offered needs at `autoscale.target`, in fractions: the sum over gateways counts.",
        ("model",),
    ),
    Metric(
        "goodgate_replicas_wanted",
        "gauge",
        "The same in whole replicas, which goes down only after `autoscale.hold_s`.",
        ("model",),
    ),
    Metric(
        "goodgate_instances_needed",
        "gauge",
        "Of a replica that stands for several instances: so many it needs at `autoscale.target`, in fractions.",
        _REPLICA,
    ),
    Metric(
        "goodgate_loop_lag_seconds",
        "histogram",
        "How late the event loop came to what was due, four times a second.",
        buckets=LAG_S,
    ),
    Metric("goodgate_resident_bytes", "gauge", "The process's resident memory."),
    Metric("goodgate_memory_limit_bytes", "gauge", "What it may have of that, where that is limited."),
    Metric("goodgate_open_files", "gauge", "The process's open file descriptors, connections among them."),
    Metric("goodgate_open_files_limit", "gauge", "How many it may have."),
    Metric(
        "goodgate_overload_shed",
        "counter",
        "Requests and connections refused because the process itself was short of something.",
        ("resource",),
    ),
    Metric("goodgate_ledger_records", "counter", "Requests written to the ledger."),
    Metric("goodgate_ledger_dropped", "counter", "Requests that the ledger could not keep."),
    Metric("goodgate_evidence_timestamp_seconds", "gauge", "When the race behind the proven goodput began."),
)


def as_markdown() -> str:
    """The table and its labels, for docs/metrics.md."""
    rows = [
        f"| `{metric.exposed_name}` | {metric.kind} | {_labels(metric)} | {metric.help} |" for metric in METRICS
    ]  # fmt: skip
    labels = [f"| `{name}` | {label.cap} | {label.source} |" for name, label in LABELS.items()]
    return "\n".join(
        [
            "| metric | kind | labels | what it counts |",
            "|---|---|---|---|",
            *rows,
            "",
            "| label | values at most | where they come from |",
            "|---|---|---|",
            *labels,
            "",
            f'A value beyond a label\'s cap is counted as `"{OTHER}"`, and one metric has at most {MAX_SERIES} series.',
        ]
    )


def _labels(metric: Metric) -> str:
    return ", ".join(f"`{label}`" for label in metric.labels) or "-"
