"""The C kernels against the torch reference, their promise of row independence, and how they are built."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from native_engine.attention import cpu
from native_engine.attention.base import KVCache, LayerAttention, RopeTable, StepBatch
from native_engine.attention.cpu import CPUBackend, KernelsUnavailable, compile_kernels, load_library, make_backend
from native_engine.attention.torch_reference import TorchReference
from native_engine.layers import ROW_BUCKETS, WITH_TILES, WITHOUT_TILES, make_linear, padded_rows
from native_engine.models.config import Activation, ModelConfig
from tests.native_engine.tiny_llama import tiny_config

SMOLLM2 = {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "hidden_size": 576, "intermediate_size": 1536}
SHAPES: list[tuple[dict[str, Any], int]] = [
    (SMOLLM2, 32),
    ({"num_heads": 4, "num_kv_heads": 4, "head_dim": 64}, 32),
    ({"num_heads": 8, "num_kv_heads": 1, "head_dim": 128}, 16),
    ({"num_heads": 10, "num_kv_heads": 2, "head_dim": 48}, 64),
    ({"num_heads": 6, "num_kv_heads": 3, "head_dim": 256}, 128),
]
WINDOWS: list[tuple[dict[str, Any], int, int]] = [  # of one row, across blocks, of whole blocks, of all
    (SMOLLM2, 32, 1),
    ({"num_heads": 4, "num_kv_heads": 1, "head_dim": 256}, 32, 50),
    ({"num_heads": 10, "num_kv_heads": 2, "head_dim": 48}, 64, 64),
    ({"num_heads": 4, "num_kv_heads": 4, "head_dim": 64}, 16, 500),
]
TOLERANCE: dict[torch.dtype, dict[str, float]] = {
    torch.float32: {"atol": 2e-5, "rtol": 2e-5},
    torch.bfloat16: {"atol": 2e-2, "rtol": 1e-2},  # one rounding of the output, and of rotated queries and keys
}


class Bench:
    """One layer's attention over sequences of given lengths, in a cache whose blocks lie in shuffled order."""

    def __init__(self, config: ModelConfig, block_size: int, dtype: torch.dtype, lengths: list[int], seed: int) -> None:
        self.config, self.dtype, self.lengths = config, dtype, lengths
        self.source = torch.Generator().manual_seed(seed)
        self.width = -(-max(lengths) // block_size)
        self.cache = KVCache.allocate(config, self.width * len(lengths), block_size, dtype)
        self.cache.keys.fill_(torch.nan)  # nothing that was not written may be read
        self.cache.values.fill_(torch.nan)
        shuffled = torch.randperm(self.width * len(lengths), generator=self.source, dtype=torch.int32)
        self.tables = shuffled.view(len(lengths), self.width).contiguous()
        width = config.q_size + 2 * config.kv_size
        self.qkv = [torch.randn(length, width, generator=self.source).to(dtype) for length in lengths]

    def batch(self, chunks: list[tuple[int, int, int]]) -> tuple[torch.Tensor, StepBatch]:
        """Rows and layout of a step of (sequence, start, end) chunks."""
        positions = torch.cat([torch.arange(start, end, dtype=torch.int32) for _, start, end in chunks])
        sequences = torch.cat([torch.full((end - start,), line, dtype=torch.int32) for line, start, end in chunks])
        blocks = self.tables[sequences.long(), (positions // self.cache.block_size).long()]
        slots = (blocks * self.cache.block_size + positions % self.cache.block_size).int()
        rows = torch.cat([self.qkv[line][start:end] for line, start, end in chunks])
        return rows.clone(), StepBatch(positions, slots, sequences, self.tables)

    def whole(self) -> list[tuple[int, int, int]]:
        return [(line, 0, length) for line, length in enumerate(self.lengths)]


def backends(config: ModelConfig, dtype: torch.dtype, kernel_cache: Path) -> tuple[CPUBackend, TorchReference]:
    return CPUBackend(config, dtype, load_library(dtype, kernel_cache)), TorchReference(config, dtype)


def layer_attention(config: ModelConfig, *, window: int | None = None, with_norms: bool = False) -> LayerAttention:
    source = torch.Generator().manual_seed(9)
    query_norm, key_norm = (torch.rand(config.head_dim, generator=source) + 0.5 for _ in range(2))
    rope = RopeTable.build(config.rope, config.head_dim, 512)
    return LayerAttention(rope, window, query_norm if with_norms else None, key_norm if with_norms else None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("shape", "block_size", "window"), [*((*each, None) for each in SHAPES), *WINDOWS])
def test_paged_attention_is_what_the_reference_says(
    kernel_cache: Path, shape: dict[str, Any], block_size: int, window: int | None, dtype: torch.dtype
) -> None:
    config = tiny_config(query_scale=0.1 if window else None, **shape)
    kernels, reference = backends(config, dtype, kernel_cache)
    kind = layer_attention(config, window=window, with_norms=window is not None)
    bench = Bench(config, block_size, dtype, [1, 17, block_size, block_size + 1, 150], seed=3)
    rows, batch = bench.batch(bench.whole())
    result = kernels.attention(rows.clone(), 1, kind, bench.cache, batch).clone()
    keys, values = bench.cache.keys.clone(), bench.cache.values.clone()
    expected = reference.attention(rows.clone(), 1, kind, bench.cache, batch)
    torch.testing.assert_close(result, expected, **TOLERANCE[dtype])
    torch.testing.assert_close(keys, bench.cache.keys, equal_nan=True, **TOLERANCE[dtype])
    assert torch.equal(values.nan_to_num(7.0), bench.cache.values.nan_to_num(7.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_norm_and_activation_are_what_the_reference_says(
    kernel_cache: Path, activation: Activation, dtype: torch.dtype
) -> None:
    kernels, reference = backends(tiny_config(activation=activation), dtype, kernel_cache)
    source = torch.Generator().manual_seed(0)
    residual = torch.randn(9, 96, generator=source) * 5
    delta, weight = torch.randn(9, 96, generator=source).to(dtype), torch.rand(96, generator=source)
    for addend in (delta, None):
        mine, other = residual.clone(), residual.clone()
        result = kernels.add_rms_norm(mine, addend, weight, 1e-5)
        torch.testing.assert_close(result, reference.add_rms_norm(other, addend, weight, 1e-5), **TOLERANCE[dtype])
        assert torch.equal(mine, other)
    delta_weight = torch.rand(96, generator=source)
    mine, other = residual.clone(), residual.clone()
    result = kernels.add_rms_norm(mine, delta, weight, 1e-5, delta_weight)
    expected = reference.add_rms_norm(other, delta, weight, 1e-5, delta_weight)
    torch.testing.assert_close(result, expected, **TOLERANCE[dtype])
    torch.testing.assert_close(mine, other)
    extreme = torch.tensor([-1e30, -200.0, -88.0, -0.0, 0.0, 88.0, 200.0, 1e30]).repeat(12)
    gate_up = torch.cat([extreme.expand(9, -1), torch.randn(9, 96, generator=source)], dim=-1).to(dtype)
    torch.testing.assert_close(kernels.gate(gate_up), reference.gate(gate_up), **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("shape", "block_size", "window"), [*((*each, None) for each in SHAPES[:3]), WINDOWS[1]])
def test_a_row_has_the_same_bits_in_any_chunk_batch_and_thread_count(
    kernel_cache: Path, shape: dict[str, Any], block_size: int, window: int | None, dtype: torch.dtype
) -> None:
    config = tiny_config(**shape)
    kernels, _ = backends(config, dtype, kernel_cache)
    kind = layer_attention(config, window=window, with_norms=window is not None)
    lengths = [100, 33, 64]
    bench = Bench(config, block_size, dtype, lengths, seed=4)
    rows, batch = bench.batch(bench.whole())
    whole = kernels.attention(rows, 0, kind, bench.cache, batch).clone().split(lengths)

    for cuts in ((1,) * 100, (40, 1, 1, 31, 27)):
        bench.cache.keys.fill_(torch.nan)
        bench.cache.values.fill_(torch.nan)
        start, pieces = 0, []
        for length in cuts:
            rows, batch = bench.batch([(0, start, start + length)])
            pieces.append(kernels.attention(rows, 0, kind, bench.cache, batch).clone())
            start += length
        assert torch.equal(torch.cat(pieces), whole[0])

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        rows, batch = bench.batch(bench.whole())
        assert torch.equal(kernels.attention(rows, 0, kind, bench.cache, batch), torch.cat(whole))
    finally:
        torch.set_num_threads(threads)


OF_MODELS = [(576, 960), (576, 576), (576, 3072), (1536, 576)]  # of SmolLM2
OF_OTHERS = [(2048, 640), (4864, 896), (4096, 4096)]  # oneDNN's tiles sum these in several orders


@pytest.mark.parametrize(("inputs", "outputs"), [*OF_MODELS, *OF_OTHERS])
def test_a_linear_gives_a_row_the_same_bits_in_every_bucket_on_this_processor(inputs: int, outputs: int) -> None:
    source = torch.Generator().manual_seed(inputs + outputs)
    linear = make_linear(torch.randn(outputs, inputs, generator=source) * 0.05, torch.bfloat16)
    rows = torch.randn(512, inputs, generator=source).bfloat16()
    with torch.inference_mode():
        expected = linear(rows)
        for count in {*ROW_BUCKETS, padded_rows(300)}:
            assert torch.equal(linear(rows[:count]), expected[:count]), count
            assert torch.equal(linear(rows[-count:]), expected[-count:]), count


@pytest.mark.parametrize(
    ("buckets", "padded"),
    [
        (WITHOUT_TILES, [4, 4, 8, 48, 80, 144, 256, 512, 576]),
        (WITH_TILES, [64, 64, 64, 64, 128, 192, 256, 512, 576]),
    ],
)
def test_steps_are_padded_to_the_next_bucket_and_never_cut(buckets: tuple[int, ...], padded: list[int]) -> None:
    assert [padded_rows(rows, buckets) for rows in (1, 4, 5, 33, 65, 130, 256, 512, 513)] == padded


def test_kernels_share_one_openmp_runtime_with_torch(kernel_cache: Path) -> None:
    load_library(torch.bfloat16, kernel_cache)
    runtimes = {
        line.split()[-1]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "libgomp" in line.split("/")[-1]
    }
    assert len(runtimes) == 1


def test_two_processes_that_build_at_once_both_get_whole_kernels(tmp_path: Path) -> None:
    program = (
        "import sys, torch; from pathlib import Path; from native_engine.attention.cpu import load_library;"
        "load_library(torch.bfloat16, Path(sys.argv[1])).paged_attention"
    )
    racers = [subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "kernels")]) for _ in range(2)]
    assert [racer.wait(timeout=60) for racer in racers] == [0, 0]
    assert len(os.listdir(tmp_path / "kernels")) == 1


def test_compiled_kernels_are_found_again_and_rebuilt_when_the_source_changes(tmp_path: Path) -> None:
    source = tmp_path / "cpu_kernels.c"
    source.write_text("int answer(void) { return 1; }")
    first = compile_kernels(source, [], tmp_path / "kernels")
    built_at = first.stat().st_mtime_ns
    assert compile_kernels(source, [], tmp_path / "kernels") == first
    assert first.stat().st_mtime_ns == built_at
    assert compile_kernels(source, ["-DOTHER"], tmp_path / "kernels") != first
    source.write_text("int answer(void) { return 2; }")
    assert compile_kernels(source, [], tmp_path / "kernels") != first
    source.write_text("this is not C")
    with pytest.raises(KernelsUnavailable, match="error"):
        compile_kernels(source, [], tmp_path / "kernels")


def test_a_cache_folder_that_others_may_write_to_is_not_trusted(tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(KernelsUnavailable, match="others may write"):
        compile_kernels(cpu.SOURCE, [], folder)


def test_without_a_compiler_the_torch_backend_runs_and_says_that_it_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.warns(RuntimeWarning, match="no C compiler"):
        backend = make_backend(config, torch.bfloat16, block_size=16, cache_dir=tmp_path)
    assert isinstance(backend, TorchReference)


def test_shapes_that_the_kernels_do_not_take_fall_back_with_the_reason(kernel_cache: Path) -> None:
    config = tiny_config()
    with pytest.warns(RuntimeWarning, match="block_size is 8; the C kernels take multiples of 16 up to 128"):
        make_backend(config, torch.bfloat16, block_size=8, cache_dir=kernel_cache)
