"""A random Llama that fits into a test: a Hugging Face folder written by hand, with a byte-level tokenizer.

`write_tiny_llama` makes any, `write_tiny_chat_llama` one with room for a conversation and a template that writes turns.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from native_engine.config import EngineConfig
from native_engine.models.config import Llama3RopeScaling, ModelConfig, Rope

VOCAB_SIZE = 320  # 3 special tokens, 256 bytes, and numbers that no text uses
EOS = "<|end|>"
ENGINE_CONFIG = EngineConfig(block_size=16, kv_cache_mib=4, max_num_seqs=16, max_num_batched_tokens=64)

CHAT_CONTEXT = 512
CHAT_TEMPLATE = (
    "{% for message in messages %}<|begin|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>assistant\n{% endif %}"
)

LLAMA3 = Rope(
    10000.0,
    Llama3RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
)


def tiny_config(**changes: Any) -> ModelConfig:
    fields: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 96,
        "intermediate_size": 128,
        "num_layers": 2,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope": Rope(10000.0),
        "max_model_len": 256,
        "tied_embeddings": False,
        "bos_token_id": 0,
        "eos_token_ids": (1,),
    }
    return ModelConfig(**(fields | changes))


def random_weights(config: ModelConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights large enough that the output depends on every token of the input."""
    source = torch.Generator().manual_seed(seed)
    return {
        name: torch.rand(shape, generator=source) + 0.5
        if len(shape) == 1
        else torch.randn(shape, generator=source) * (1.5 / shape[1] ** 0.5 if "embed" not in name else 1.0)
        for name, shape in config.shapes().items()
    }


def config_json(config: ModelConfig) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope.theta}
    if isinstance(scaling := config.rope.scaling, Llama3RopeScaling):
        rope |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position_embeddings,
        }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": rope,
        "max_position_embeddings": config.max_model_len,
        "tie_word_embeddings": config.tied_embeddings,
        "bos_token_id": 0,
        "eos_token_id": list(config.eos_token_ids),
    }


def byte_tokenizer() -> Tokenizer:
    """Every byte is a token; no merges."""
    specials = ["<|begin|>", EOS, "<|system|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(specials + alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in specials])
    return tokenizer


def write_tiny_chat_llama(folder: Path) -> Path:
    return write_tiny_llama(folder, tiny_config(max_model_len=CHAT_CONTEXT), chat_template=CHAT_TEMPLATE)


def write_tiny_llama(
    folder: Path, config: ModelConfig | None = None, seed: int = 0, *, chat_template: str | None = "{{ messages }}"
) -> Path:
    config = config or tiny_config()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(random_weights(config, seed), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config_json(config)))
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<|begin|>", "eos_token": {"content": EOS}, "chat_template": chat_template})
    )
    return folder
