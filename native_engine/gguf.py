"""GGUF files: a bounds-checked reader of metadata and tensors.

In: the path of a `.gguf` file (versions 2 and 3, little-endian). Out: its metadata as plain Python values and its
tensors as fp32, unpacked by block_formats.py. Nothing in the file is trusted: every count, length and offset is checked
against the size of the file before it is used.

    file = GGUFFile(path)
    file.metadata["general.architecture"]     # "llama"
    file.tensor("token_embd.weight")          # torch.float32, shape as PyTorch writes it (rows first)
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from native_engine.block_formats import FORMATS, BlockFormat
from native_engine.errors import EngineError

MAGIC = b"GGUF"
MAX_DIMENSIONS = 4
MAX_NESTING = 4  # arrays of arrays; real files never nest at all
MAX_ARRAY_ITEMS = 1 << 22  # vocabularies are far shorter; as a Python list an array takes many times its bytes


class BadModelFile(EngineError):
    """The file is not what it claims to be: truncated, corrupt, or of a format that we do not read."""


_STRING, _ARRAY = 8, 9
# Keyed by GGUF's metadata type number: (struct code, size in bytes).
_SCALARS: dict[int, tuple[str, int]] = {
    0: ("<B", 1),
    1: ("<b", 1),
    2: ("<H", 2),
    3: ("<h", 2),
    4: ("<I", 4),
    5: ("<i", 4),
    6: ("<f", 4),
    7: ("<?", 1),
    10: ("<Q", 8),
    11: ("<q", 8),
    12: ("<d", 8),
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. `shape` is rows first, the reverse of the file's order; `offset` is from its start."""

    name: str
    shape: tuple[int, ...]
    format: BlockFormat
    offset: int
    nbytes: int


class GGUFFile:
    """An open GGUF file; the data stays memory-mapped and is read tensor by tensor."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise BadModelFile(f"Cannot read {path}: {error}.") from error
        reader = _Reader(self._data, path)
        self.metadata, self.tensors = _read_header(reader)

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor as fp32, a copy that does not depend on the file."""
        info = self.tensors.get(name)
        if info is None:
            raise BadModelFile(f"{self.path} has no tensor {name!r}.")
        raw = np.frombuffer(self._data, np.uint8, info.nbytes, info.offset)
        values = info.format.dequantise(raw.reshape(-1, info.format.block_bytes))
        return torch.from_numpy(np.array(values, dtype=np.float32).reshape(info.shape))


def _read_header(reader: _Reader) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    if reader.take(4) != MAGIC:
        raise reader.error("it does not start with the GGUF magic")
    version = reader.scalar("<I", 4)
    if version not in (2, 3):
        raise reader.error(f"GGUF version {version} is not supported (2 and 3 are; big-endian files are not)")
    tensor_count, field_count = reader.count("tensors"), reader.count("metadata fields")
    metadata: dict[str, Any] = {}
    for _ in range(field_count):
        key = reader.string()
        metadata[key] = reader.value(reader.scalar("<I", 4))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise reader.error(f"alignment {alignment!r} is not a power of two")
    headers = [_read_tensor_header(reader) for _ in range(tensor_count)]
    data_start = -(-reader.position // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for name, shape, block_format, offset in headers:
        info = _place(reader, name, shape, block_format, data_start + offset)
        if name in tensors:
            raise reader.error(f"tensor {name!r} is listed twice")
        tensors[name] = info
    return metadata, tensors


def _read_tensor_header(reader: _Reader) -> tuple[str, tuple[int, ...], BlockFormat, int]:
    name = reader.string()
    dimensions = reader.scalar("<I", 4)
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise reader.error(f"tensor {name!r} has {dimensions} dimensions")
    shape = tuple(reader.scalar("<Q", 8) for _ in range(dimensions))[::-1]
    type_number = reader.scalar("<I", 4)
    if type_number not in FORMATS:
        known = ", ".join(sorted(block_format.name for block_format in FORMATS.values()))
        raise reader.error(f"tensor {name!r} has ggml type {type_number}; the types we read are {known}")
    return name, shape, FORMATS[type_number], reader.scalar("<Q", 8)


def _place(reader: _Reader, name: str, shape: tuple[int, ...], block_format: BlockFormat, offset: int) -> TensorInfo:
    """The tensor's extent, once it is sure that it lies inside the file."""
    if shape[-1] % block_format.block_size:
        raise reader.error(f"rows of tensor {name!r} ({shape[-1]}) are not whole {block_format.name} blocks")
    nbytes = prod(shape) // block_format.block_size * block_format.block_bytes
    if nbytes == 0 or offset + nbytes > reader.size:
        raise reader.error(f"tensor {name!r} ends at byte {offset + nbytes} of a file of {reader.size}")
    return TensorInfo(name, shape, block_format, offset, nbytes)


class _Reader:
    """A cursor over the mapped file that refuses to leave it."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self.size = len(data)
        self.position = 0

    def error(self, reason: str) -> BadModelFile:
        return BadModelFile(f"{self._path} is not a readable GGUF file: {reason}.")

    def take(self, length: int) -> bytes:
        end = self.position + length
        if end > self.size:
            raise self.error(f"it ends at byte {self.size}, {end - self.size} bytes too early")
        chunk = self._data[self.position : end]
        self.position = end
        return chunk

    def scalar(self, code: str, size: int) -> Any:
        return struct.unpack(code, self.take(size))[0]

    def count(self, what: str) -> int:
        """A number of things of at least one byte each, so a corrupt count is caught before anything is reserved."""
        value: int = self.scalar("<Q", 8)
        if value > self.size - self.position:
            raise self.error(f"it claims {value} {what}")
        return value

    def string(self) -> str:
        raw = self.take(self.count("bytes of text"))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"a text at byte {self.position - len(raw)} is not UTF-8") from error

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.scalar(*_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY and depth < MAX_NESTING:
            return self._array(depth)
        raise self.error(f"metadata type {kind} at byte {self.position} is unknown or nested too deep")

    def _array(self, depth: int) -> list[Any]:
        kind = self.scalar("<I", 4)
        length = self.count("array items")
        if length > MAX_ARRAY_ITEMS:
            raise self.error(f"it claims an array of {length} items; {MAX_ARRAY_ITEMS} is the most we read")
        if kind in _SCALARS:  # one unpack for the whole array: token types have one item per vocabulary entry
            code, size = _SCALARS[kind]
            return list(struct.unpack(f"<{length}{code[1]}", self.take(length * size)))
        return [self.value(kind, depth + 1) for _ in range(length)]
