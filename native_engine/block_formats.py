"""How ggml packs the values of a tensor: plain floats, blocks of 32, and the K-quants' super-blocks of 256.

    FORMATS[12].dequantise(blocks)       # Q4_K: uint8 [blocks, 144] -> fp32 [blocks, 256]

A block is a few bits for each value, and scales. Sums and products are those of ggml in its order, so that the values
are the same to the bit. Layouts as in ggml's `ggml-common.h` (`block_q4_K` and its kin).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Bytes: TypeAlias = npt.NDArray[np.uint8]
Floats: TypeAlias = npt.NDArray[np.float32]

SUPER_BLOCK = 256


class BlockFormat(NamedTuple):
    """How one tensor type is laid out: `block_bytes` bytes hold `block_size` values."""

    name: str
    block_size: int
    block_bytes: int
    dequantise: Callable[[Bytes], Floats]  # uint8 [blocks, block_bytes] -> fp32 [blocks, block_size]


def _f32(blocks: Bytes) -> Floats:
    return blocks.view(np.float32)


def _f16(blocks: Bytes) -> Floats:
    return blocks.view(np.float16).astype(np.float32)


def _bf16(blocks: Bytes) -> Floats:
    return (blocks.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


def _scale(blocks: Bytes, offset: int = 0) -> Floats:
    """The fp16 at `offset` of every block, as an fp32 column."""
    return np.ascontiguousarray(blocks[:, offset : offset + 2]).view(np.float16).astype(np.float32)


def _signed(raw: Bytes) -> Floats:
    return np.ascontiguousarray(raw).view(np.int8).astype(np.float32)


def _unpack(packed: Bytes, bits: int, run: int) -> Bytes:
    """Values of `bits` bits. Of `run` bytes the lowest bits are the first `run` values, the next bits the next ones."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    values = (packed.reshape(len(packed), -1, 1, run) >> shifts) & np.uint8(2**bits - 1)
    return values.reshape(len(packed), -1)


def _by_group(values: Floats, scales: Floats, minima: Floats | None = None) -> Floats:
    """`values` [blocks, n] times the scale of their group, less its minimum; scales and minima [blocks, groups]."""
    grouped = scales[:, :, None] * values.reshape(*scales.shape, -1)
    if minima is not None:
        grouped = grouped - minima[:, :, None]
    return grouped.reshape(values.shape)


# --- blocks of 32: an fp16 scale, in some an fp16 minimum


def _q8_0(blocks: Bytes) -> Floats:
    return _scale(blocks) * _signed(blocks[:, 2:])


def _q4_0(blocks: Bytes) -> Floats:
    return _scale(blocks) * (_unpack(blocks[:, 2:], 4, 16).astype(np.float32) - np.float32(8))


def _q4_1(blocks: Bytes) -> Floats:
    return _scale(blocks) * _unpack(blocks[:, 4:], 4, 16).astype(np.float32) + _scale(blocks, 2)


def _five_bits(high: Bytes, low: Bytes) -> Floats:
    return (_unpack(low, 4, 16) | (_unpack(high, 1, 1) << np.uint8(4))).astype(np.float32)


def _q5_0(blocks: Bytes) -> Floats:
    return _scale(blocks) * (_five_bits(blocks[:, 2:6], blocks[:, 6:]) - np.float32(16))


def _q5_1(blocks: Bytes) -> Floats:
    return _scale(blocks) * _five_bits(blocks[:, 4:8], blocks[:, 8:]) + _scale(blocks, 2)


_IQ4_LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)


def _iq4_nl(blocks: Bytes) -> Floats:
    return _scale(blocks) * _IQ4_LEVELS[_unpack(blocks[:, 2:], 4, 16)]


# --- super-blocks of 256: groups of 16 or 32 with small scales of their own, which an fp16 scales in turn


def _q2_k(blocks: Bytes) -> Floats:
    scales = blocks[:, :16]
    return _by_group(
        _unpack(blocks[:, 16:80], 2, 32).astype(np.float32),
        _scale(blocks, 80) * (scales & np.uint8(15)).astype(np.float32),
        _scale(blocks, 82) * (scales >> np.uint8(4)).astype(np.float32),
    )


def _q3_k(blocks: Bytes) -> Floats:
    """A set high bit means that 4 is not taken off. Sixteen scales of 6 bits: 4 in 8 bytes, 2 in 4."""
    high = _unpack(blocks[:, :32], 1, 32).astype(np.float32)
    low = _unpack(blocks[:, 32:96], 2, 32).astype(np.float32)
    scales = _unpack(blocks[:, 96:104], 4, 8) | (_unpack(blocks[:, 104:108], 2, 4) << np.uint8(4))
    return _by_group(low + 4 * high - 4, _scale(blocks, 108) * (scales.astype(np.float32) - 32))


def _scales_and_minima(packed: Bytes) -> tuple[Floats, Floats]:
    """Eight scales and eight minima of 6 bits in 12 bytes; the last four of each are split in 4 bits and 2."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    six, four, two = np.uint8(63), np.uint8(15), np.uint8(48)
    scales = [first & six, (third & four) | ((first >> np.uint8(2)) & two)]
    minima = [second & six, (third >> np.uint8(4)) | ((second >> np.uint8(2)) & two)]
    return np.concatenate(scales, axis=1).astype(np.float32), np.concatenate(minima, axis=1).astype(np.float32)


def _q4_k(blocks: Bytes) -> Floats:
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    values = _unpack(blocks[:, 16:], 4, 32).astype(np.float32)
    return _by_group(values, _scale(blocks) * scales, _scale(blocks, 2) * minima)


def _q5_k(blocks: Bytes) -> Floats:
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    values = _unpack(blocks[:, 48:], 4, 32) | (_unpack(blocks[:, 16:48], 1, 32) << np.uint8(4))
    return _by_group(values.astype(np.float32), _scale(blocks) * scales, _scale(blocks, 2) * minima)


def _q6_k(blocks: Bytes) -> Floats:
    values = _unpack(blocks[:, :128], 4, 64) | (_unpack(blocks[:, 128:192], 2, 32) << np.uint8(4))
    return _by_group(values.astype(np.float32) - 32, _scale(blocks, 208) * _signed(blocks[:, 192:208]))


# Keyed by ggml's type number.
FORMATS: dict[int, BlockFormat] = {
    0: BlockFormat("F32", 1, 4, _f32),
    1: BlockFormat("F16", 1, 2, _f16),
    2: BlockFormat("Q4_0", 32, 18, _q4_0),
    3: BlockFormat("Q4_1", 32, 20, _q4_1),
    6: BlockFormat("Q5_0", 32, 22, _q5_0),
    7: BlockFormat("Q5_1", 32, 24, _q5_1),
    8: BlockFormat("Q8_0", 32, 34, _q8_0),
    10: BlockFormat("Q2_K", SUPER_BLOCK, 84, _q2_k),
    11: BlockFormat("Q3_K", SUPER_BLOCK, 110, _q3_k),
    12: BlockFormat("Q4_K", SUPER_BLOCK, 144, _q4_k),
    13: BlockFormat("Q5_K", SUPER_BLOCK, 176, _q5_k),
    14: BlockFormat("Q6_K", SUPER_BLOCK, 210, _q6_k),
    20: BlockFormat("IQ4_NL", 32, 18, _iq4_nl),
    30: BlockFormat("BF16", 1, 2, _bf16),
}
