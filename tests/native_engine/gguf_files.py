"""GGUF files of small models, written as llama.cpp's converter does it: its names, and Llama's interleaved rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import torch

from native_engine.models.config import ModelConfig

_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.": "blk.",
}
_NORMS = {"post_attention_layernorm": "ffn_norm"}
_NORMS_OF_GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def write_gguf(path: Path, config: ModelConfig, weights: dict[str, torch.Tensor], **fields: Any) -> Path:
    """`weights` under Hugging Face's names; `fields` of the architecture beside, or instead of, those of `config`."""
    architecture = fields.pop("architecture", "llama")
    writer = gguf.GGUFWriter(path, architecture)
    fields_of_tokenizer = fields.pop("tokenizer", {})
    numbers = {
        "block_count": config.num_layers,
        "context_length": config.max_model_len,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope.theta,
        "vocab_size": config.vocab_size,
    }
    for key, value in (numbers | fields).items():
        add = {float: writer.add_float32, int: writer.add_uint32, str: writer.add_string, list: writer.add_array}
        add[type(value)](f"{architecture}.{key}", value)
    for key, value in fields_of_tokenizer.items():
        (writer.add_array if isinstance(value, list) else writer.add_string)(f"tokenizer.{key}", value)
    names = _NAMES | (_NORMS_OF_GEMMA if config.post_norms else _NORMS)
    for name, value in weights.items():
        heads = config.num_heads if "q_proj" in name else config.num_kv_heads if "k_proj" in name else 0
        if heads and architecture == "llama":
            value = value.view(heads, 2, config.head_dim // 2, -1).transpose(1, 2).reshape(value.shape)
        for old, new in names.items():
            name = name.replace(old, new)
        writer.add_tensor(name, value.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
