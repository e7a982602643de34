"""After the last cell, the tokens of the kept texts are counted again by the model's own tokenizer.

    why_not = recount(store, {"a": "smollm2-135m-instruct"}, from_store(home))

Nothing is being measured any more then, so it costs nobody anything. The engine's own `/tokenize` is not asked: it
would be its word again. What it finds of each cell is recorded as audits; where a model's files are not here nothing is
counted, and the report says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import TypeAlias

from adapters.errors import GoodgateError
from adapters.models.model_store import ModelStore
from arena.judging.claims import Claim, claim_findings
from arena.load.spool import TOOL_CALL
from arena.records.store import Store

Counter: TypeAlias = Callable[[str], int]
OpenCounter: TypeAlias = Callable[[str], Counter]
"""A model's name -> how many tokens a text has. Raises a `GoodgateError` that says why it cannot be counted."""

# Of a tool call only the arguments are text, so its tokens cannot be counted.
TEXTS = """
SELECT r.cell_id, r.out_tok_usage, r.text
FROM v_measured AS r JOIN cells AS c USING (cell_id) JOIN token_events AS t USING (cell_id, seq)
WHERE c.engine_id = ? AND r.ok AND r.text IS NOT NULL AND r.out_tok_usage IS NOT NULL AND NOT list_contains(t.kind, ?)
ORDER BY r.cell_id, r.seq
"""


def recount(store: Store, models: Mapping[str, str], open_counter: OpenCounter) -> tuple[str, ...]:
    """`models`: which one each engine serves. A sentence for each model that cannot be counted."""
    why_not = []
    for model in sorted(set(models.values())):
        try:
            count = open_counter(model)
        except GoodgateError as error:
            why_not.append(error.message)
            continue
        for engine_id in [engine for engine, served in models.items() if served == model]:
            _recount(store, engine_id, count)
    return tuple(why_not)


def _recount(store: Store, engine_id: str, count: Counter) -> None:
    claims: dict[str, list[Claim]] = {}
    for row in store.query(TEXTS, [engine_id, TOOL_CALL]):
        claims.setdefault(row["cell_id"], []).append(Claim(row["out_tok_usage"], count(row["text"])))
    for cell_id, counted in claims.items():
        for finding in claim_findings(counted):
            store.record_audit(cell_id, finding.check, finding.value, finding.threshold, finding.ok)


def from_store(home: Path) -> OpenCounter:
    """Tokenizers of the models in the model store below `home`."""
    return cache(ModelStore(home).token_counter)
