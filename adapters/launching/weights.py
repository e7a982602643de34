"""What numbers an engine works with: the file it reads, and how these numbers relate to the model that was asked for.

A model comes as one file. An engine serves it as it is (`same`), unpacks it into a wider format (`dequantised`: the
same numbers, up to that format's rounding), or packs it a second time (`requantised`: other numbers, and a model that
is a little worse). Who compares engines has to know which.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Literal, TypeAlias

from msgspec import Struct

Relation: TypeAlias = Literal["same", "dequantised", "requantised"]


class Weights(Struct, frozen=True, kw_only=True):
    """Paths are files, or folders of `*.safetensors`."""

    source: Path  # the model as it is in the store
    served: Path  # what the engine reads
    precision: str  # the format of the numbers it computes with, in words
    relation: Relation

    def told(self) -> dict[str, Any]:
        """With digests: reads both files, so it takes a second a gigabyte, and only when they are there."""
        source = digest(self.source)
        return {
            "source_sha256": source,
            "served_sha256": source if self.served == self.source else digest(self.served),
            "precision": self.precision,
            "relation": self.relation,
        }


def digest(path: Path) -> str:
    """SHA-256 of a file; of a folder, that of the names and digests of its weight files, in order of name."""
    if path.is_dir():
        whole = hashlib.sha256()
        for file in sorted(path.glob("*.safetensors")):
            whole.update(f"{file.name} {digest(file)}\n".encode())
        return whole.hexdigest()
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
