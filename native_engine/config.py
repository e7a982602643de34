"""Frozen settings of the engine.

`EngineConfig` holds what a person chooses. `SchedulerConfig` is what the deciding half needs to know: some of those
choices and three facts of the loaded model.

>>> EngineConfig(max_num_seqs=8).for_scheduler(max_model_len=8192, vocab_size=49152, eos_token_ids=[2]).max_num_seqs
8
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from native_engine.errors import InvalidParams
from native_engine.pacing import Targets, WhenLate

Dtype = Literal["bfloat16", "float32"]
KVCacheDtype = Literal["auto", "int8"]
Preemption = Literal["recompute", "swap", "auto"]
Speculation = Literal["off", "ngram", "draft"]

_COUNTS = (
    *("block_size", "kv_cache_mib", "max_num_seqs", "max_num_batched_tokens"),
    *("num_speculative_tokens", "speculation_max_rows", "ngram_min", "draft_kv_cache_mib"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """A person's choices. `None` means: let the engine decide (context of the model, all cores)."""

    dtype: Dtype = "bfloat16"
    block_size: int = 32  # bf16 keys of one block and one 64-wide head fill one 4 KiB page
    kv_cache_mib: int = 512
    kv_cache_dtype: KVCacheDtype = "auto"  # auto: as `dtype`; int8: half the memory of bf16, for a small error
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 256
    enable_prefix_caching: bool = True
    preemption: Preemption = "recompute"  # what becomes of blocks that are taken back; auto: what costs less
    swap_space_mib: int = 0  # host memory for them, beside `kv_cache_mib`
    num_threads: int | None = None
    ttft_target_ms: float | None = None  # latency targets, see pacing.py
    tpot_target_ms: float | None = None
    when_late: WhenLate = "queue"
    speculation: Speculation = "off"  # who guesses the next tokens: the request's own text, or `draft_model`
    num_speculative_tokens: int = 4  # of a draft
    speculation_max_rows: int = 64  # no drafts for steps that would have more; with AMX fewer cost as much
    ngram_max: int = 4  # ngram: so many last tokens are looked for, or fewer, down to
    ngram_min: int = 2
    draft_model: Path | None = None
    draft_kv_cache_mib: int = 64

    @property
    def targets(self) -> Targets:
        return Targets(
            ttft_s=None if self.ttft_target_ms is None else self.ttft_target_ms / 1000,
            tpot_s=None if self.tpot_target_ms is None else self.tpot_target_ms / 1000,
            when_late=self.when_late,
        )

    def __post_init__(self) -> None:
        if self.dtype not in get_args(Dtype):
            raise InvalidParams(f"dtype must be one of {', '.join(get_args(Dtype))}, not {self.dtype!r}.")
        if self.kv_cache_dtype not in get_args(KVCacheDtype):
            known = ", ".join(get_args(KVCacheDtype))
            raise InvalidParams(f"kv_cache_dtype must be one of {known}, not {self.kv_cache_dtype!r}.")
        if self.preemption not in get_args(Preemption):
            raise InvalidParams(
                f"preemption must be one of {', '.join(get_args(Preemption))}, not {self.preemption!r}."
            )
        if (self.preemption == "recompute") != (self.swap_space_mib == 0):
            raise InvalidParams(
                f"swap_space_mib must be above 0 where preemption is swap or auto, and 0 where it is recompute, "
                f"not {self.swap_space_mib} with {self.preemption}."
            )
        if self.speculation not in get_args(Speculation):
            raise InvalidParams(
                f"speculation must be one of {', '.join(get_args(Speculation))}, not {self.speculation!r}."
            )
        if (self.speculation == "draft") != (self.draft_model is not None):
            raise InvalidParams(
                f"draft_model must be given where speculation is draft, and only there, not {self.draft_model} "
                f"with {self.speculation}."
            )
        if self.ngram_max < self.ngram_min:
            raise InvalidParams(f"ngram_max must be at least ngram_min ({self.ngram_min}), not {self.ngram_max}.")
        for name in _COUNTS:
            _at_least(1, name, getattr(self, name))
        for name in ("max_model_len", "num_threads"):
            if getattr(self, name) is not None:
                _at_least(1, name, getattr(self, name))
        _every_decode_fits(self.max_num_seqs, self.max_num_batched_tokens)
        _ = self.targets  # checks them

    def for_scheduler(
        self, *, max_model_len: int, vocab_size: int, eos_token_ids: Iterable[int], sliding_window: int | None = None
    ) -> SchedulerConfig:
        """The scheduler's settings for a model; its context is cut to `self.max_model_len` where that is shorter.

        `sliding_window`: how many tokens the layer that sees most of them sees, the own one included; None: all.
        """
        return SchedulerConfig(
            max_model_len=min(max_model_len, self.max_model_len or max_model_len),
            vocab_size=vocab_size,
            eos_token_ids=frozenset(eos_token_ids),
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            enable_prefix_caching=self.enable_prefix_caching,
            preemption=self.preemption,
            sliding_window=sliding_window,
            num_speculative_tokens=0 if self.speculation == "off" else self.num_speculative_tokens,
            speculation_max_rows=self.speculation_max_rows,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 256
    enable_prefix_caching: bool = True
    preemption: Preemption = "recompute"
    sliding_window: int | None = None
    num_speculative_tokens: int = 0
    speculation_max_rows: int = 64

    def __post_init__(self) -> None:
        if self.sliding_window is not None:
            _at_least(1, "sliding_window", self.sliding_window)
        for name in ("max_model_len", "vocab_size", "max_num_seqs", "max_num_batched_tokens"):
            _at_least(1, name, getattr(self, name))
        _every_decode_fits(self.max_num_seqs, self.max_num_batched_tokens)


def _at_least(least: int, name: str, value: int) -> None:
    if value < least:
        raise InvalidParams(f"{name} must be at least {least}, not {value}.")


def _every_decode_fits(max_num_seqs: int, max_num_batched_tokens: int) -> None:
    """No step may have to leave a decoding sequence out: the scheduler counts on it."""
    if max_num_batched_tokens < max_num_seqs:
        raise InvalidParams(
            f"max_num_batched_tokens ({max_num_batched_tokens}) must be at least max_num_seqs ({max_num_seqs}), "
            "so that every running sequence can decode in every step."
        )
