"""Matrix products with the weights laid out for the machine, and the row counts they are called with.

oneDNN picks a kernel, and with it an order of summation, by the number of rows. From four rows up its bf16 kernels
give a row the same bits whatever the count; single rows do not, so a step is padded to at least four. Padding to a
fixed set of counts also bounds the number of kernels that oneDNN has to generate, which would otherwise show up as
stalls in the tail latency.

With AMX tiles it has more kernels to pick from, and they differ by the shape of the weights too. There a step has 64,
128, 192 or 256 rows, which the tiles take nearly as fast as four, and a product whose bits would depend on which of
them it is (found out when it is loaded) is computed 64 rows at a time.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional

HAS_TILES: bool = torch.cpu._is_amx_tile_supported()
SLICE = 64
MOST_ROWS_WITH_TILES = 256  # beyond, oneDNN sums in yet another order
# Fine where padding would be a large share, coarse where it is not.
WITHOUT_TILES: tuple[int, ...] = (4, 8, 12, 16, 24, 32, 48, 64, *range(80, 257, 16), *range(288, 513, 32))
WITH_TILES: tuple[int, ...] = (64, 128, 192, 256)
ROW_BUCKETS = WITH_TILES if HAS_TILES else WITHOUT_TILES


def padded_rows(rows: int, buckets: tuple[int, ...] = ROW_BUCKETS) -> int:
    """The row count a step of `rows` rows is computed with."""
    for bucket in buckets:
        if rows <= bucket:
            return bucket
    return -(-rows // SLICE) * SLICE


class Linear(Protocol):
    """y = x W^T + b for a row count from `padded_rows`."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class PackedLinear:
    """bf16 weights in oneDNN's own layout: no reordering per call, and two dispatches instead of eight."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.to(torch.bfloat16).contiguous())
        self._bias = None if bias is None else bias.to(torch.bfloat16)
        self._multiply = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._multiply(x, self._weight, self._bias, "none", [], "")
        return out


class TiledLinear:
    """`PackedLinear` on a processor with AMX: in calls of so many rows that each row gets the same bits in all."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._multiply = PackedLinear(weight, bias)
        outputs, inputs = weight.shape
        self._most_rows = MOST_ROWS_WITH_TILES if _sums_alike(self._multiply, inputs, outputs) else SLICE

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] <= self._most_rows:
            return self._multiply(x)
        return torch.cat([self._multiply(part) for part in torch.split(x, self._most_rows)])


_alike: dict[tuple[int, int], bool] = {}  # by inputs and outputs, which decide what oneDNN picks


@torch.inference_mode()
def _sums_alike(linear: PackedLinear, inputs: int, outputs: int) -> bool:
    """A row has the same bits in a call of any of `WITH_TILES` rows. Shown on random data: another order of summation
    shows in some of so many sums."""
    if (inputs, outputs) not in _alike:
        rows = torch.randn(MOST_ROWS_WITH_TILES, inputs, generator=torch.Generator().manual_seed(0)).bfloat16()
        whole = linear(rows)
        _alike[inputs, outputs] = all(torch.equal(linear(rows[-count:]), whole[-count:]) for count in WITH_TILES)
    return _alike[inputs, outputs]


class WidenedLinear:
    """bf16 on processors without instructions for it (before AVX-512): the weights are held in fp32, which takes twice
    the memory, and so are the products. torch's own bf16 product is five times as slow there."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.to(torch.float32).contiguous())
        self._bias = None if bias is None else bias.to(torch.float32)
        self._multiply = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._multiply(x.to(torch.float32), self._weight, self._bias, "none", [], "")
        return out.to(torch.bfloat16)


class PlainLinear:
    """fp32, or bf16 where torch was built without oneDNN."""

    def __init__(self, weight: torch.Tensor, dtype: torch.dtype, bias: torch.Tensor | None = None) -> None:
        self._weight = weight.to(dtype).contiguous()
        self._bias = None if bias is None else bias.to(dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self._weight, self._bias)


def make_linear(weight: torch.Tensor, dtype: torch.dtype, bias: torch.Tensor | None = None) -> Linear:
    if dtype is torch.bfloat16 and torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return WidenedLinear(weight, bias)
        return TiledLinear(weight, bias) if HAS_TILES else PackedLinear(weight, bias)
    return PlainLinear(weight, dtype, bias)
