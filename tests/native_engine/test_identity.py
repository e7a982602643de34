"""An engine's identity is equal where the same prompt gives the same tokens, and only there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from native_engine.config import EngineConfig
from native_engine.loading import load
from tests.native_engine.tiny_llama import tiny_config, write_tiny_llama


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path / "model", tiny_config())


def identity(folder: Path, kernel_cache: Path, **changes: object) -> str:
    return load(folder, EngineConfig(kv_cache_mib=4, **changes), kernel_cache=kernel_cache).identity  # type: ignore[arg-type]


def test_a_copy_elsewhere_with_other_threads_is_the_same(folder: Path, tmp_path: Path, kernel_cache: Path) -> None:
    copy = write_tiny_llama(tmp_path / "copy", tiny_config())
    (copy / "README.md").write_text("No token depends on this.")
    one = identity(folder, kernel_cache)
    assert identity(copy, kernel_cache, num_threads=1, max_num_seqs=2, dtype="bfloat16") == one


@pytest.mark.parametrize("changes", [{"dtype": "float32"}, {"max_model_len": 100}, {"block_size": 16}])
def test_other_numbers_and_another_longest_request_are_another(
    folder: Path, kernel_cache: Path, changes: dict[str, object]
) -> None:
    assert identity(folder, kernel_cache, **changes) != identity(folder, kernel_cache)


def test_one_bit_of_the_weights_makes_another_though_name_and_size_stay(folder: Path, kernel_cache: Path) -> None:
    one = identity(folder, kernel_cache)
    weights = folder / "model.safetensors"
    status, content = weights.stat(), bytearray(weights.read_bytes())
    content[-1] ^= 1
    changed = folder / "changed"
    changed.write_bytes(content)
    os.utime(changed, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    changed.replace(weights)
    assert weights.stat().st_size == status.st_size
    assert identity(folder, kernel_cache) != one


def test_without_the_kernels_it_is_another(folder: Path, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = identity(folder, kernel_cache)
    monkeypatch.setattr("native_engine.attention.cpu.COMPILERS", ())
    with pytest.warns(RuntimeWarning, match="slow torch kernels"):
        assert identity(folder, kernel_cache) != one
