"""The spool: one JSONL file per cell, written while it runs, and the truth until the store has ingested it.

A file is a `SpoolHeader`, then `RequestRow`s in the order they ended and `HealthRow`s between them, then a `SpoolFooter`. It is
complete when `<name>.done` stands beside it: that marker is renamed into place after the file was synced to disk, and holds
its digest. A spool without marker belongs to a load process that died; `account_for_missing` closes it, so that no planned
request ever vanishes.

All times are nanoseconds from the cell's start (`SpoolHeader.epoch_monotonic_ns`), NULL where the thing never happened.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Literal, TypeAlias

import msgspec

from arena.plan import CellPlan

Status: TypeAlias = Literal["ok", "error", "timeout", "truncated", "unsent", "cancelled"]
"""ok: a complete answer. error: refused, broken or ended in an error event. timeout: the client's limit passed.
truncated: the stream ended without saying so. unsent: never left (cap reached, or the load process died).
cancelled: a cool-down request in flight when the cell ended; never a measured one."""

TEXT, REASONING, TOOL_CALL = 0, 1, 2
"""Values of `RequestRow.token_kind`."""


class SpoolHeader(msgspec.Struct, tag_field="row", tag="header", kw_only=True):
    cell_id: str
    plan_sha256: str
    target: str
    url: str
    model: str
    epoch_monotonic_ns: int
    epoch_unix_ns: int
    gc_frozen: bool
    timer: str  # what paced the sends: "timerfd" or "poll"
    locust_version: str


class RequestRow(msgspec.Struct, tag_field="row", tag="request", kw_only=True):
    seq: int
    measured: bool
    prompt_id: str
    max_tokens: int
    scheduled_ns: int
    sent_ns: int | None = None  # just before the first write (or connect, where no warm connection was left)
    connected_ns: int | None = None  # only where the request had to open its connection
    wrote_ns: int | None = None  # the last byte of the request was handed to the kernel
    first_byte_ns: int | None = None
    role_ns: int | None = None
    first_reason_ns: int | None = None
    first_text_ns: int | None = None
    first_gen_ns: int | None = None  # first text, reasoning or tool-call argument: the end of TTFT
    last_gen_ns: int | None = None
    usage_ns: int | None = None
    done_ns: int | None = None
    status: Status
    http: int | None = None
    err_class: str | None = None
    err_message: str | None = None
    finish_reason: str | None = None
    in_tok_usage: int | None = None
    out_tok_usage: int | None = None
    reason_tok_usage: int | None = None
    cached_tok: int | None = None
    out_tok_counted: int = 0  # tokens seen in events: from usage per chunk where offered, else one an event
    tokens_known: bool = False  # whether the counts below came from the engine's usage per chunk
    n_chunks: int = 0
    n_recvs: int = 0
    reused: bool | None = None  # NULL when nothing was sent
    token_ns: list[int] = []
    token_n: list[int] = []
    token_kind: list[int] = []


class HealthRow(msgspec.Struct, tag_field="row", tag="health", kw_only=True):
    """The load process watching itself, several times a second."""

    t_ns: int
    cpu: float  # share of one core since the last sample
    loop_lag_ns: int  # worst delay of a timer in the event loop since the last sample
    in_flight: int
    sockets: int


class SpoolFooter(msgspec.Struct, tag_field="row", tag="footer", kw_only=True):
    """`requests` counts the request rows before it. `cooldown_exhausted`: load ceased before the last measured answer."""

    requests: int
    max_in_flight: int
    connections_opened: int
    cooldown_exhausted: bool
    aborted: str | None = None  # why the cell is incomplete, or NULL


SpoolRow: TypeAlias = SpoolHeader | RequestRow | HealthRow | SpoolFooter
