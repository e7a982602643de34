"""Which instructions oneDNN may use: those with which a row has the same bits in a batch of any depth.

With AMX tiles (Intel since Sapphire Rapids) its bf16 products add up in another order for 32 rows than for 48: a text
would depend on how many others are computed beside it: of 39 row counts up to 28 gave other bits
(`tests/native_engine/test_kernels.py` tries them all). oneDNN reads its variable when it first computes, so this runs
when the package is imported. Who would rather have the tiles sets `ONEDNN_MAX_CPU_ISA=DEFAULT`, and gives that up.
"""

from __future__ import annotations

import os

VARIABLE = "ONEDNN_MAX_CPU_ISA"
INVARIANT = "AVX512_CORE_BF16"


def hold_bits() -> None:
    os.environ.setdefault(VARIABLE, INVARIANT)


def instructions() -> str:
    """What oneDNN was told: part of what decides how sums are rounded."""
    return os.environ.get(VARIABLE, "")
