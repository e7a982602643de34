"""From a path to an engine that can step: checkpoint, kernels, weights, cache, scheduler.

loaded = load(path, EngineConfig())
loaded.engine.add("a", loaded.tokenizer.encode("Once"), SamplingParams(max_tokens=8))
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from pathlib import Path

import torch

from native_engine.attention.base import KVCache
from native_engine.attention.cpu import make_backend
from native_engine.blocks import BlockPool
from native_engine.capacity import MIB, bytes_per_token, num_blocks
from native_engine.config import Dtype, EngineConfig, SchedulerConfig
from native_engine.engine import Drafter, Engine
from native_engine.errors import InvalidParams
from native_engine.identity import identity_of
from native_engine.memory import Costs
from native_engine.models.config import ModelConfig
from native_engine.models.decoder import Decoder
from native_engine.runner import ModelRunner
from native_engine.sampler import Sampler
from native_engine.speculation_model import DraftModel
from native_engine.speculation_ngram import NgramDrafter
from native_engine.tokenizer import TextTokenizer, open_tokenizer
from native_engine.weights import Checkpoint, open_checkpoint

TORCH_DTYPES: dict[Dtype, torch.dtype] = {"bfloat16": torch.bfloat16, "float32": torch.float32}
DRAFT_BLOCK_SIZE = 16
MAX_POSITIONS_BEHIND_WINDOWS = 1 << 18  # where the pool does not bound a text, the rope's table has to be bounded


@dataclass(frozen=True, slots=True)
class LoadedModel:
    engine: Engine
    tokenizer: TextTokenizer
    model_config: ModelConfig
    max_model_len: int  # the most tokens of a request, prompt and output: the context, or the cache where that is less
    identity: str  # equal where the same prompt gives the same tokens


def load(path: Path, config: EngineConfig, *, kernel_cache: Path | None = None) -> LoadedModel:
    """Read the model at `path` and build its engine. Takes seconds; raises an `EngineError` that says what is wrong."""
    checkpoint = open_checkpoint(path)
    tokenizer = open_tokenizer(path)
    if tokenizer.vocab_size > checkpoint.config.vocab_size:
        raise InvalidParams(
            f"{path}: the tokenizer has {tokenizer.vocab_size} tokens, the model {checkpoint.config.vocab_size}."
        )
    small = None if config.draft_model is None else _open_draft_model(config.draft_model, checkpoint, tokenizer)
    model = make_model(checkpoint, config, kernel_cache=kernel_cache)
    draft = None if small is None else make_model(small, _draft_config(config), kernel_cache=kernel_cache)
    engine = make_engine(model, config, draft, token_bytes=tokenizer.token_bytes)
    identity = identity_of(path, config, model, engine.max_len)
    return LoadedModel(engine, tokenizer, checkpoint.config, engine.max_len, identity)


def _open_draft_model(path: Path, checkpoint: Checkpoint, tokenizer: TextTokenizer) -> Checkpoint:
    small = open_checkpoint(path)
    same_size = small.config.vocab_size == checkpoint.config.vocab_size
    if not same_size or open_tokenizer(path).token_bytes != tokenizer.token_bytes:
        raise InvalidParams(f"draft_model must have the vocabulary of the model, token by token; {path} has another.")
    return small


def _draft_config(config: EngineConfig) -> EngineConfig:
    """What a draft goes on from is found in the prefix cache, in whole blocks: small ones leave little to compute."""
    return EngineConfig(
        dtype=config.dtype,
        block_size=DRAFT_BLOCK_SIZE,
        kv_cache_mib=config.draft_kv_cache_mib,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        num_threads=config.num_threads,
    )


def make_model(checkpoint: Checkpoint, config: EngineConfig, *, kernel_cache: Path | None = None) -> Decoder:
    """The weights, laid out for this machine, and the kernels that go with them."""
    model_config, dtype = checkpoint.config, TORCH_DTYPES[config.dtype]
    longest = _scheduler_config(model_config, config).max_model_len
    if model_config.widest_window is None:
        # No position lies beyond the pool: a model that claims a context of billions gets no table of that length.
        longest = min(longest, pool_blocks(model_config, config) * config.block_size)
    backend = make_backend(
        model_config, dtype, block_size=config.block_size, cache_dir=kernel_cache, cache_dtype=cache_dtype(config)
    )
    return Decoder(checkpoint, dtype, backend, max_position=longest)


def make_engine(
    model: Decoder, config: EngineConfig, draft: Decoder | None = None, *, token_bytes: SequenceOf[bytes] = ()
) -> Engine:
    """An engine with a cache of its own around `model`: token ids in, token ids out. `draft`: the loaded
    `config.draft_model`, exactly where there is one. `token_bytes`: what bad words need."""
    if model.cache_dtype != cache_dtype(config):
        raise InvalidParams(f"kv_cache_dtype must be what the model was made for, not {config.kv_cache_dtype!r}.")
    cache = KVCache.allocate(model.config, pool_blocks(model.config, config), config.block_size, model.cache_dtype)
    host = _host_cache(model, config)
    costs = Costs()
    sampler = Sampler(model.config.eos_token_ids, token_bytes)
    runner = ModelRunner(model, cache, sampler, num_threads=config.num_threads, host=host, costs=costs)
    return Engine(
        _scheduler_config(model.config, config),
        BlockPool(cache.num_blocks, cache.block_size),
        runner,
        host_pool=None if host is None else BlockPool(host.num_blocks, host.block_size),
        costs=costs,
        targets=config.targets,
        drafter=_make_drafter(config, draft),
    )


def _make_drafter(config: EngineConfig, draft: Decoder | None) -> Drafter | None:
    if (draft is None) != (config.speculation != "draft"):
        raise InvalidParams("draft_model must be loaded where speculation is draft, and only there.")
    if draft is not None:
        return DraftModel(make_engine(draft, _draft_config(config)))
    if config.speculation == "ngram":
        return NgramDrafter(longest=config.ngram_max, shortest=config.ngram_min)
    return None


def _host_cache(model: Decoder, config: EngineConfig) -> KVCache | None:
    """Where blocks are swapped out to. On a CPU it is a second pool in the same memory."""
    if not config.swap_space_mib:
        return None
    token_bytes = bytes_per_token(model.config, config.dtype, config.kv_cache_dtype)
    blocks = num_blocks(config.swap_space_mib * MIB, token_bytes, config.block_size)
    if blocks < 1:
        raise InvalidParams(f"swap_space_mib ({config.swap_space_mib}) does not hold a block of this model's cache.")
    return KVCache.allocate(model.config, blocks, config.block_size, model.cache_dtype)


def cache_dtype(config: EngineConfig) -> torch.dtype:
    return torch.int8 if config.kv_cache_dtype == "int8" else TORCH_DTYPES[config.dtype]


def _scheduler_config(model_config: ModelConfig, config: EngineConfig) -> SchedulerConfig:
    window = model_config.widest_window
    longest = model_config.max_model_len
    return config.for_scheduler(
        max_model_len=longest if window is None else min(longest, MAX_POSITIONS_BEHIND_WINDOWS),
        sliding_window=window,
        vocab_size=model_config.vocab_size,
        eos_token_ids=model_config.eos_token_ids,
    )


def pool_blocks(model_config: ModelConfig, config: EngineConfig) -> int:
    """How many blocks the configured pool holds; at least one, or there is nothing to run with."""
    token_bytes = bytes_per_token(model_config, config.dtype, config.kv_cache_dtype)
    blocks = num_blocks(config.kv_cache_mib * MIB, token_bytes, config.block_size)
    if blocks < 1:
        raise InvalidParams(f"kv_cache_mib ({config.kv_cache_mib}) does not hold a single block of this model's cache.")
    return blocks
