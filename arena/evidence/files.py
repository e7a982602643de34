"""Evidence on disk: the files of races are read, the merged one is written in one step."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from arena.evidence.document import Evidence, EvidenceError, parse

NAME = "evidence.json"
MAX_BYTES = 1 << 20  # what the gateway reads at most


def read(path: Path) -> Evidence:
    """`path` is an evidence file, or the folder of a race. Raises `EvidenceError` with a sentence."""
    file = path / NAME if path.is_dir() else path
    try:
        with file.open("rb") as opened:
            text = opened.read(MAX_BYTES + 1)
    except FileNotFoundError as error:
        hint = f"`goodgate arena report {path}` writes it" if path.is_dir() else "give a race's folder or its file"
        raise EvidenceError(f"There is no {file}; {hint}.") from error
    except OSError as error:
        raise EvidenceError(f"{file} cannot be read: {error.strerror}.") from error
    if len(text) > MAX_BYTES:
        raise EvidenceError(f"{file} is larger than {MAX_BYTES} bytes, so it is no evidence; give a race's folder.")
    return parse(text, str(file))


def write(document: Mapping[str, Any], path: Path) -> None:
    """A gateway that follows the file sees the old one or the new one, whole. Another kind of file is not replaced."""
    text = json.dumps(document, indent=2) + "\n"
    if len(text.encode()) > MAX_BYTES:
        raise EvidenceError(f"It would be larger than {MAX_BYTES} bytes, which no gateway reads; merge fewer races.")
    if path.is_dir():
        raise EvidenceError(f"{path} is a folder; name the file in it.")
    if path.exists():
        read(path)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, "utf-8")
        beside.replace(path)
    except OSError as error:
        raise EvidenceError(f"{path} cannot be written: {error.strerror}; choose another --out.") from error
    finally:
        beside.unlink(missing_ok=True)
