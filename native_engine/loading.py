"""From a path to an engine that can step: checkpoint, kernels, weights, cache, scheduler.

loaded = load(path, EngineConfig())
loaded.engine.add("a", loaded.tokenizer.encode("Once"), SamplingParams(max_tokens=8))
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from native_engine.attention.base import KVCache, RopeTable
from native_engine.attention.cpu import make_backend
from native_engine.blocks import BlockPool
from native_engine.capacity import MIB, bytes_per_token, num_blocks
from native_engine.config import Dtype, EngineConfig, SchedulerConfig
from native_engine.engine import Engine
from native_engine.errors import InvalidParams
from native_engine.models.llama import Llama
from native_engine.runner import ModelRunner
from native_engine.sampler import Sampler
from native_engine.tokenizer import TextTokenizer, open_tokenizer
from native_engine.weights import Checkpoint, ModelConfig, open_checkpoint

TORCH_DTYPES: dict[Dtype, torch.dtype] = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    engine: Engine
    tokenizer: TextTokenizer
    model_config: ModelConfig
    max_model_len: int


def load(path: Path, config: EngineConfig, *, kernel_cache: Path | None = None) -> LoadedModel:
    """Read the model at `path` and build its engine. Takes seconds; raises an `EngineError` that says what is wrong."""
    checkpoint = open_checkpoint(path)
    tokenizer = open_tokenizer(path)
    if tokenizer.vocab_size > checkpoint.config.vocab_size:
        raise InvalidParams(
            f"{path}: the tokenizer has {tokenizer.vocab_size} tokens, the model {checkpoint.config.vocab_size}."
        )
    engine, scheduler_config = build_engine(checkpoint, config, kernel_cache=kernel_cache)
    return LoadedModel(engine, tokenizer, checkpoint.config, scheduler_config.max_model_len)


def build_engine(
    checkpoint: Checkpoint, config: EngineConfig, *, kernel_cache: Path | None = None
) -> tuple[Engine, SchedulerConfig]:
    """The engine without its tokenizer: token ids in, token ids out."""
    model_config, dtype = checkpoint.config, TORCH_DTYPES[config.dtype]
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    scheduler_config = config.for_scheduler(
        max_model_len=model_config.max_model_len,
        vocab_size=model_config.vocab_size,
        eos_token_ids=model_config.eos_token_ids,
    )
    rope = RopeTable.build(model_config, scheduler_config.max_model_len)
    backend = make_backend(model_config, rope, dtype, block_size=config.block_size, cache_dir=kernel_cache)
    model = Llama(checkpoint, dtype, backend)
    cache = KVCache.allocate(model_config, pool_blocks(model_config, config), config.block_size, dtype)
    runner = ModelRunner(model, cache, Sampler(model_config.eos_token_ids))
    return Engine(scheduler_config, BlockPool(cache.num_blocks, cache.block_size), runner), scheduler_config


def pool_blocks(model_config: ModelConfig, config: EngineConfig) -> int:
    """How many blocks the configured pool holds; at least one, or there is nothing to run with."""
    blocks = num_blocks(config.kv_cache_mib * MIB, bytes_per_token(model_config, config.dtype), config.block_size)
    if blocks < 1:
        raise InvalidParams(f"kv_cache_mib ({config.kv_cache_mib}) does not hold a single block of this model's cache.")
    return blocks
