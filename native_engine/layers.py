"""Matrix products with the weights laid out for the machine, and the row counts they are called with.

oneDNN picks a kernel, and with it an order of summation, by the number of rows. From four rows up its bf16 kernels
give a row the same bits whatever the count; single rows do not, so a step is padded to at least four. Padding to a
fixed set of counts also bounds the number of kernels that oneDNN has to generate, which would otherwise show up as
stalls in the tail latency.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional

# Fine where padding would be a large share, coarse where it is not.
ROW_BUCKETS: tuple[int, ...] = (4, 8, 12, 16, 24, 32, 48, 64, *range(80, 257, 16), *range(288, 513, 32))


def padded_rows(rows: int) -> int:
    """The row count a step of `rows` rows is computed with."""
    for bucket in ROW_BUCKETS:
        if rows <= bucket:
            return bucket
    return -(-rows // 64) * 64


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
        has_bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return PackedLinear(weight, bias) if has_bf16 else WidenedLinear(weight, bias)
    return PlainLinear(weight, dtype, bias)
