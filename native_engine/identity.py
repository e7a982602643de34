"""What decides a greedy token, as one word: equal where the same prompt ids give the same tokens.

    identity_of(path, config, model, max_len)     # "9f86d081884c7d65..."

The bytes of the model's files, the precision, the longest request, this package's code, torch, the kernels and the
processor, whose kind chooses how sums are rounded. Not in it is what changes no token: how many requests are computed
at once, in how many threads, and what lies in the cache (see layers.py).
"""

from __future__ import annotations

import functools
import hashlib
import platform
from pathlib import Path

import torch

from native_engine.attention.cpu import processor
from native_engine.config import EngineConfig
from native_engine.models.decoder import Decoder

MODEL_FILES = frozenset({".gguf", ".safetensors", ".json", ".model", ".jinja"})


def identity_of(path: Path, config: EngineConfig, model: Decoder, max_len: int) -> str:
    parts = [
        *_digests(path),
        f"{config.dtype} {config.kv_cache_dtype} {config.block_size} {max_len}",
        _code(),
        f"{torch.__version__} {torch.backends.cpu.get_cpu_capability()} {model.kernels}",
        f"{platform.machine()} {processor()}",
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _digests(path: Path) -> list[str]:
    """Of a folder with the files' names, as they say what is what; a single file may be called anything."""
    if path.is_file():
        return [_digest(path)]
    files = sorted(each for each in path.iterdir() if each.is_file() and each.suffix in MODEL_FILES)
    return [f"{each.name} {_digest(each)}" for each in files]


def _digest(file: Path) -> str:
    status = file.stat()
    return _digest_of(file.resolve(), status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=256)
def _digest_of(file: Path, _size: int, _changed_ns: int) -> str:
    """Once for all replicas of this process."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@functools.cache
def _code() -> str:
    """Of the package: a version number may stay while the sums change."""
    folder = Path(__file__).parent
    sources = sorted(each for each in folder.rglob("*") if each.suffix in (".py", ".c"))
    return hashlib.sha256(b"\0".join(each.read_bytes() for each in sources)).hexdigest()
