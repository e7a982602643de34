"""What the requests say: seeded prompts with stated lengths. Pure: what files hold is given, not read.

    prompts = prompt_source(workload, CellKey(run_seed=7, rung=4, replicate=0))
    prompts(17)            # the 18th request of that cell: the same text on every machine and for every engine

Each kind of workload is a module of `arena.load.workloads`. What they have in common: a request's text is drawn from a
stream of its own, named by the seeds, the cell and the request's number. So prompts of different cells, replicates,
races and the warm-up differ, and nothing is sent twice unless the scenario shares it on purpose.
"""

from __future__ import annotations

from typing import assert_never

from arena.load.arrivals import SECOND_NS
from arena.load.plan import PromptSource, Sessions
from arena.load.spec import (
    Cache,
    ConversationWorkload,
    DocumentWorkload,
    FileWorkload,
    StructuredWorkload,
    SyntheticWorkload,
    TraceWorkload,
    Workload,
)
from arena.load.workloads.files import document_prompt, file_prompt
from arena.load.workloads.material import Material
from arena.load.workloads.replay import trace_prompt
from arena.load.workloads.synthetic import conversation, structured_prompt, synthetic_prompt
from arena.load.workloads.words import CellKey as CellKey

NOTHING = Material()


def prompt_source(
    workload: Workload, cell: CellKey, material: Material = NOTHING, *, cache: Cache = "cold"
) -> PromptSource | Sessions:
    """The prompts of a cell. `material` is what the workload's files hold (`workloads.material.gather`).

    With a warm cache, what requests share is the same in all cells of a race; with a cold one, in a cell only.
    """
    columns = material.columns
    if isinstance(workload, SyntheticWorkload):
        return lambda seq: synthetic_prompt(workload, columns, cache, cell, seq)
    if isinstance(workload, FileWorkload):
        return lambda seq: file_prompt(workload, material.chats, columns, cell, seq)
    if isinstance(workload, DocumentWorkload):
        return lambda seq: document_prompt(workload, material.documents, columns, cell, seq)
    if isinstance(workload, StructuredWorkload):
        return lambda seq: structured_prompt(workload, columns, cell, seq)
    if isinstance(workload, TraceWorkload):
        trace = material.trace
        assert trace is not None, "a workload of kind `trace` comes with its trace"
        return lambda seq: trace_prompt(workload, trace, cache, cell, seq)
    if isinstance(workload, ConversationWorkload):
        return Sessions(
            turns=lambda number: conversation(workload, columns, cache, cell, number),
            mean_turns=workload.mean_turns,
            longest_ns=round(workload.longest_s * SECOND_NS),
        )
    assert_never(workload)
