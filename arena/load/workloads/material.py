"""What a scenario's files hold, parsed once for a race. Pure, but for the `read` that is given.

material = gather(workload, arrivals, read=lambda path: (folder / path).read_text())
material.told        # sentences about what had to be cut or left out
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from arena.load.spec import (
    Arrivals,
    DocumentWorkload,
    Empirical,
    FileWorkload,
    TraceArrivals,
    TraceWorkload,
    Workload,
    lengths_of,
)
from arena.load.traces import Trace, parse_trace
from arena.load.workloads.files import Chat, read_chats, read_documents
from arena.load.workloads.lengths import Columns, read_column
from arena.load.workloads.replay import clipped


@dataclass(frozen=True, slots=True)
class Material:
    chats: list[Chat] = field(default_factory=list)
    documents: list[str] = field(default_factory=list)
    columns: Columns = field(default_factory=dict)
    trace: Trace | None = None  # of the workload
    arrivals: Trace | None = None  # of the arrivals
    told: tuple[str, ...] = ()


def gather(workload: Workload, arrivals: Arrivals, read: Callable[[str], str]) -> Material:
    """Raises `ScenarioError` with file and line where a file is not what it should be."""
    trace = arrival_trace = None
    told: list[str] = []
    if isinstance(workload, TraceWorkload):
        trace = parse_trace(read(workload.path), workload.path, max_rows=workload.max_rows)
        told += [*trace.words(), *clipped(workload, trace)]
    if isinstance(arrivals, TraceArrivals):
        if trace is None or arrivals.path not in ("", trace.name):
            arrival_trace = parse_trace(read(arrivals.path), arrivals.path, max_rows=arrivals.max_rows)
            told += arrival_trace.words()
        else:
            arrival_trace = trace
    return Material(
        chats=read_chats(read(workload.path), workload.path) if isinstance(workload, FileWorkload) else [],
        documents=(
            read_documents(read(workload.path), workload.path, workload.field)
            if isinstance(workload, DocumentWorkload)
            else []
        ),
        columns={
            (lengths.path, lengths.column): read_column(read(lengths.path), lengths.path, lengths.column)
            for lengths in lengths_of(workload).values()
            if isinstance(lengths, Empirical)
        },
        trace=trace,
        arrivals=arrival_trace,
        told=tuple(told),
    )
