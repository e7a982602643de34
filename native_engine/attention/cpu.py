"""The CPU backend: `cpu_kernels.c`, compiled once for this machine and called through ctypes.

ctypes lets go of the GIL during a call, so the event loop of the same process keeps running. torch is imported before
the library is loaded: both then share torch's OpenMP runtime, and with it one pool of threads.

    backend = make_backend(config, torch.bfloat16, cache_dir=None)    # falls back to torch, with a warning
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path

import torch

from native_engine.attention.base import Backend, KVCache, LayerAttention, StepBatch
from native_engine.attention.torch_reference import TorchReference
from native_engine.models.config import ModelConfig

SOURCE = Path(__file__).with_name("cpu_kernels.c")
LANES, MAX_BLOCK, MAX_HEAD_DIM = 16, 128, 256  # as in cpu_kernels.c
COMPILERS = ("cc", "gcc", "clang")
BUILD_TIMEOUT_S = 120


class KernelsUnavailable(Exception):
    """The C kernels cannot be used here; the message says why."""


class _Attention(ctypes.Structure):
    """`Attention` of cpu_kernels.c, field by field."""

    _fields_ = (
        *[(name, ctypes.c_void_p) for name in ("qkv", "out", "keys", "values", "key_scales", "value_scales")],
        *[(name, ctypes.c_void_p) for name in ("cos", "sin")],
        *[(name, ctypes.c_void_p) for name in ("query_norm", "key_norm")],
        *[(name, ctypes.c_void_p) for name in ("positions", "slots", "tables", "sequences")],
        *[(name, ctypes.c_int64) for name in ("rows", "table_width", "query_heads", "kv_heads")],
        *[(name, ctypes.c_int64) for name in ("head_dim", "block_size", "window")],
        *[(name, ctypes.c_float) for name in ("scale", "eps")],
    )


class CPUBackend:
    name = "cpu"

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        library: ctypes.CDLL,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        """`library`: of `load_library` for these types; `cache_dtype`: None for `dtype`."""
        self.cache_dtype = cache_dtype or dtype
        self.kernels = Path(library._name).stem  # with the source, the flags, the compiler and the processor in it
        self._dtype = dtype
        self._buffers: dict[str, torch.Tensor] = {}
        self._q_size = config.q_size
        self._is_gelu = config.activation == "gelu_tanh"
        self._attention = _Attention(
            query_heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.score_scale,
            eps=config.rms_norm_eps,
        )
        self._attention_reference = ctypes.byref(self._attention)
        pointer, count = ctypes.c_void_p, ctypes.c_int64
        self._add_rms_norm = library.add_rms_norm
        self._add_rms_norm.argtypes = [pointer, pointer, pointer, pointer, pointer, count, count, ctypes.c_float]
        self._gate = library.gate
        self._gate.argtypes = [pointer, pointer, count, count, ctypes.c_int]
        self._paged_attention = library.paged_attention
        self._paged_attention.argtypes = [pointer]
        for function in (self._add_rms_norm, self._gate, self._paged_attention):
            function.restype = None

    def add_rms_norm(
        self,
        residual: torch.Tensor,
        delta: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        delta_weight: torch.Tensor | None = None,
    ) -> torch.Tensor:
        rows, size = residual.shape
        out = self._buffer("norm", rows, size)
        self._add_rms_norm(
            residual.data_ptr(),
            _address(delta),
            _address(delta_weight),
            weight.data_ptr(),
            out.data_ptr(),
            rows,
            size,
            eps,
        )
        return out

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = self._buffer("gate", rows, size)
        self._gate(gate_up.data_ptr(), out.data_ptr(), rows, size, self._is_gelu)
        return out

    def attention(
        self, qkv: torch.Tensor, layer: int, kind: LayerAttention, cache: KVCache, batch: StepBatch
    ) -> torch.Tensor:
        out = self._buffer("attention", qkv.shape[0], self._q_size)
        arguments = self._attention
        arguments.qkv, arguments.out = qkv.data_ptr(), out.data_ptr()
        arguments.keys, arguments.values = cache.keys[layer].data_ptr(), cache.values[layer].data_ptr()
        if cache.key_scales is not None and cache.value_scales is not None:
            arguments.key_scales = cache.key_scales[layer].data_ptr()
            arguments.value_scales = cache.value_scales[layer].data_ptr()
        arguments.cos, arguments.sin = kind.rope.cos.data_ptr(), kind.rope.sin.data_ptr()
        arguments.query_norm, arguments.key_norm = _address(kind.query_norm), _address(kind.key_norm)
        arguments.window = kind.window or 0
        arguments.positions, arguments.slots = batch.positions.data_ptr(), batch.slots.data_ptr()
        arguments.tables, arguments.sequences = batch.block_tables.data_ptr(), batch.sequences.data_ptr()
        arguments.rows, arguments.table_width = batch.num_rows, batch.block_tables.shape[1]
        arguments.block_size = cache.block_size
        self._paged_attention(self._attention_reference)
        return out

    def _buffer(self, name: str, rows: int, size: int) -> torch.Tensor:
        """The output of a kernel, reused by every layer and grown to the largest step seen."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape[0] < rows:
            buffer = self._buffers[name] = torch.zeros(rows, size, dtype=self._dtype)
        return buffer[:rows]


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def make_backend(
    config: ModelConfig,
    dtype: torch.dtype,
    *,
    block_size: int,
    cache_dir: Path | None,
    cache_dtype: torch.dtype | None = None,
) -> Backend:
    """The C kernels where they can run; else the torch reference, and a warning that says why it will be slow."""
    try:
        _check_shapes(config, block_size)
        library = load_library(dtype, cache_dir or default_cache_dir(), cache_dtype)
        return CPUBackend(config, dtype, library, cache_dtype)
    except KernelsUnavailable as reason:
        warnings.warn(f"Generating with slow torch kernels: {reason}", RuntimeWarning, stacklevel=2)
        return TorchReference(config, dtype, cache_dtype)


def default_cache_dir() -> Path:
    """A folder for compiled kernels that belongs to the user alone: what lies there will be run."""
    return Path(tempfile.gettempdir()) / f"native-engine-kernels-{os.getuid()}"


def load_library(dtype: torch.dtype, cache_dir: Path, cache_dtype: torch.dtype | None = None) -> ctypes.CDLL:
    """Compile the kernels for this machine, or find them compiled. Raises `KernelsUnavailable`."""
    flags = ["-DSCALAR_F32"] if dtype is torch.float32 else []
    flags += ["-DKV_INT8"] if cache_dtype is torch.int8 else []
    try:
        return ctypes.CDLL(str(compile_kernels(SOURCE, flags, cache_dir)))
    except OSError as error:
        raise KernelsUnavailable(f"the compiled kernels cannot be loaded: {error}.") from error


def compile_kernels(source: Path, flags: list[str], cache_dir: Path) -> Path:
    """The shared library for `source`. Its name holds all that its content depends on, so it never goes stale."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise KernelsUnavailable(f"there is no C compiler ({', '.join(COMPILERS)}).")
    command = [compiler, *_flags(), *flags]
    key = hashlib.sha256("\0".join([source.read_text(), *command, _compiler_version(compiler), processor()]).encode())
    target = cache_dir / f"{source.stem}-{key.hexdigest()[:20]}.so"
    _claim(cache_dir)
    if not target.exists():
        _build([*command, str(source), "-lm"], target)
    return target


def _claim(folder: Path) -> None:
    """What lies in the folder will be run, so nobody else may be able to put something there."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise KernelsUnavailable(f"{folder} cannot hold compiled kernels: {error}.") from error
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise KernelsUnavailable(f"others may write to {folder}, so it is not safe for compiled kernels.")


def _build(command: list[str], target: Path) -> None:
    """Build beside the target and rename: another process sees the whole library or none."""
    try:
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            built = Path(folder) / target.name
            done = subprocess.run(
                [*command, "-o", str(built)], capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False
            )
            if done.returncode:
                raise KernelsUnavailable(f"{command[0]} failed: {done.stderr.strip()[:500]}")
            built.replace(target)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelsUnavailable(f"the C kernels cannot be built: {error}.") from error


def _flags() -> list[str]:
    flags = [
        "-O3",
        "-march=native",
        "-fopenmp",
        "-shared",
        "-fPIC",
        "-std=gnu11",
        "-fno-math-errno",
        "-Wall",
        "-Wno-psabi",
    ]
    if platform.machine() in ("x86_64", "AMD64"):
        flags.append("-mprefer-vector-width=512")  # GCC splits 512-bit vectors by default, although the CPU has them
    return flags


@functools.cache
def _compiler_version(compiler: str) -> str:
    try:
        return subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise KernelsUnavailable(f"{compiler} does not run: {error}.") from error


@functools.cache
def processor() -> str:
    """What -march=native depends on. On a shared home folder another machine must not load our instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU implementer", "CPU part")
    first = {line.split(":")[0].strip(): line for line in reversed(lines) if ":" in line}
    return "\n".join(first[key] for key in wanted if key in first)


def _check_shapes(config: ModelConfig, block_size: int) -> None:
    for name, value, most in (
        ("block_size", block_size, MAX_BLOCK),
        ("head_dim", config.head_dim, MAX_HEAD_DIM),
        ("hidden_size", config.hidden_size, None),
        ("intermediate_size", config.intermediate_size, None),
    ):
        if value % LANES or (most is not None and value > most):
            limit = f" up to {most}" if most else ""
            raise KernelsUnavailable(f"{name} is {value}; the C kernels take multiples of {LANES}{limit}.")
