"""A decoder-only transformer (Llama, Mistral, Qwen2, Qwen3, Gemma 3): one forward pass over a flat step of rows.

    model = Decoder(checkpoint, torch.bfloat16, backend, max_position=8192)
    logits = model.forward(token_ids, batch, cache, sample_rows)   # [len(sample_rows), vocab]; None without sample rows

What a family has beyond Llama (biases, norms, windows, scales) is data in its layers, or None. Decodes and chunks of
prompts lie side by side in one [rows, hidden] matrix, so each weight is read once a step. The residual stream is fp32.
After the last attention only the rows that are to be sampled go on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from native_engine.attention.base import Backend, KVCache, LayerAttention, RopeTable, StepBatch
from native_engine.layers import Linear, make_linear, padded_rows
from native_engine.models.config import ModelConfig, Rope
from native_engine.weights import Checkpoint


@dataclass(frozen=True, slots=True)
class Layer:
    """Post norms are those of what is about to be added to the residual stream."""

    input_norm: torch.Tensor
    qkv: Linear
    attention: LayerAttention
    out: Linear
    attention_post_norm: torch.Tensor | None
    ffn_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    ffn_post_norm: torch.Tensor | None


class Decoder:
    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, backend: Backend, *, max_position: int) -> None:
        """`max_position`: how many positions the rope tables hold; no row may lie beyond."""
        self.config: ModelConfig = checkpoint.config
        self.dtype = dtype
        self.cache_dtype = backend.cache_dtype
        self.kernels = backend.kernels
        self._backend = backend
        embedding = checkpoint.tensor("model.embed_tokens.weight")
        head = embedding if self.config.tied_embeddings else checkpoint.tensor("lm_head.weight")
        self._embedding = embedding.to(dtype)
        self._head = make_linear(head, dtype)
        self._norm = checkpoint.tensor("model.norm.weight")
        ropes = {self.config.rope_of(layer) for layer in range(self.config.num_layers)}
        tables = {rope: RopeTable.build(rope, self.config.head_dim, max_position) for rope in ropes}
        self._layers = [_load_layer(checkpoint, layer, dtype, tables) for layer in range(self.config.num_layers)]

    def forward(
        self, token_ids: torch.Tensor, batch: StepBatch, cache: KVCache, sample_rows: torch.Tensor
    ) -> torch.Tensor | None:
        """`token_ids` and `sample_rows` are int64. Writes keys and values; returns the logits of `sample_rows`."""
        norm, eps = self._backend.add_rms_norm, self.config.rms_norm_eps
        residual = functional.embedding(_pad(token_ids), self._embedding).float()
        if self.config.embedding_scale != 1.0:
            residual *= self.config.embedding_scale
        delta: torch.Tensor | None = None
        delta_norm: torch.Tensor | None = None
        last = len(self._layers) - 1
        for number, layer in enumerate(self._layers):
            qkv = layer.qkv(norm(residual, delta, layer.input_norm, eps, delta_norm))
            attended = self._backend.attention(qkv, number, layer.attention, cache, batch)
            if number == last:
                if not len(sample_rows):
                    return None
                rows = _pad(sample_rows)
                attended, residual = attended[rows], residual[rows]
            gate_up = layer.gate_up(norm(residual, layer.out(attended), layer.ffn_norm, eps, layer.attention_post_norm))
            delta, delta_norm = layer.down(self._backend.gate(gate_up)), layer.ffn_post_norm
        return self._head(norm(residual, delta, self._norm, eps, delta_norm))[: len(sample_rows)]


def _pad(indices: torch.Tensor) -> torch.Tensor:
    """Zeros at the end, up to a row count that the matrix products take. Rows do not touch, so any index would do."""
    return functional.pad(indices, (0, padded_rows(len(indices)) - len(indices)))


def _load_layer(checkpoint: Checkpoint, number: int, dtype: torch.dtype, ropes: dict[Rope, RopeTable]) -> Layer:
    config = checkpoint.config

    def read(*names: str, kind: str = "weight") -> torch.Tensor:
        tensors = [checkpoint.tensor(f"model.layers.{number}.{name}.{kind}") for name in names]
        return torch.cat(tensors) if len(tensors) > 1 else tensors[0]

    def linear(*names: str, has_bias: bool) -> Linear:
        return make_linear(read(*names), dtype, read(*names, kind="bias") if has_bias else None)

    return Layer(
        input_norm=read("input_layernorm"),
        qkv=linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", has_bias=config.qkv_bias),
        attention=LayerAttention(
            rope=ropes[config.rope_of(number)],
            window=config.window(number),
            query_norm=read("self_attn.q_norm") if config.qk_norm else None,
            key_norm=read("self_attn.k_norm") if config.qk_norm else None,
        ),
        out=linear("self_attn.o_proj", has_bias=config.output_bias),
        attention_post_norm=read("post_attention_layernorm") if config.post_norms else None,
        ffn_norm=read("pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm"),
        gate_up=linear("mlp.gate_proj", "mlp.up_proj", has_bias=config.mlp_bias),
        down=linear("mlp.down_proj", has_bias=config.mlp_bias),
        ffn_post_norm=read("post_feedforward_layernorm") if config.post_norms else None,
    )
