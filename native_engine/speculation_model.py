"""Drafts by a second, smaller model with the same vocabulary: what it finds likeliest.

    drafter = DraftModel(make_engine(small_model, config))

It is an engine like any other, with a cache of its own. Each draft is a request to it, whose text it mostly knows from
the one before: the prefix cache brings back all but the last block, so blocks should be small. Tenants' salts go along.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from native_engine.engine import Engine
from native_engine.sampling_params import SamplingParams
from native_engine.sequence import Sequence
from native_engine.step import Wanted


class DraftModel:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def propose(self, wanted: SequenceOf[Wanted]) -> list[list[int]]:
        """All drafts at once, in as many steps as the longest has tokens. None for a text beyond its own context."""
        drafts: dict[str, list[int]] = {str(number): [] for number in range(len(wanted))}
        try:
            for name, (chunk, count) in zip(drafts, wanted, strict=True):
                sequence = chunk.sequence
                if sequence.num_tokens + count <= self._engine.max_len:
                    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
                    self._engine.add(name, sequence.token_ids, params, cache_salt=_salt(sequence))
            while self._engine.has_work:
                for output in self._engine.step():
                    drafts[output.request_id] += output.token_ids
        finally:
            for name in drafts:  # none is left unless a step failed
                self._engine.abort(name)
        return list(drafts.values())


def _salt(sequence: Sequence) -> str | None:
    return next((key.value for key in sequence.cache_keys if key.kind == "salt"), None)
