"""Facts about engines, as their adapters declare them; the capability matrix is the same table.

facts_of("vllm").offers["response_format"]       # "yes", "opt" (with one of `options`) or "-"
"""

from __future__ import annotations

import difflib
from functools import lru_cache

from adapters.probing.matrix import columns_of, groups, offer
from adapters.registry import UnknownEngine, adapter_class
from arena.planning.needs import ALIASES, EngineFacts


@lru_cache
def facts_of(engine: str) -> EngineFacts | None:
    """None for a name that no adapter has. Of an engine with several routes the best one counts."""
    try:
        adapter = adapter_class(engine)
    except UnknownEngine:
        return None
    columns = list(columns_of(adapter, engine))
    order = ("yes", "opt", "-")
    return EngineFacts(
        engine=engine,
        licence=adapter.licence,
        hardware=adapter.hardware,
        hosted=adapter.hosted,
        offers={
            row.key: min((str(offer(row, column)) for column in columns), key=order.index)
            for _, rows in groups()
            for row in rows
        },
        options=tuple(sorted({option for column in columns for option in column.wider})),
    )


def capability(name: str) -> str:
    """Its name in the matrix. Raises ValueError with the nearest spelling."""
    known = {row.key for _, rows in groups() for row in rows}
    wanted = ALIASES.get(name, name)
    if wanted not in known:
        near = difflib.get_close_matches(name, [*known, *ALIASES], n=1)
        hint = f"did you mean {near[0]!r}?" if near else "`goodgate engines --matrix` lists them all."
        raise ValueError(f"There is no capability {name!r}; {hint}")
    return wanted
