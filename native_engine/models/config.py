"""What a decoder-only transformer of our families consists of, as data that decoder.py follows.

    config.window(3), config.rope_of(3)      # what layer 3 attends to, and how it is rotated
    config.shapes()                          # every tensor under Hugging Face's name

A family (Llama, Mistral, Qwen2, Qwen3, Gemma 3) is a choice of these fields; families.py reads them from model files.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from native_engine.errors import EngineError
from native_engine.gguf import BadModelFile

Activation = Literal["silu", "gelu_tanh"]


class UnsupportedModel(EngineError):
    """The model is sound, but it needs something that this engine does not do. The message names it."""


# --- rotary position embedding


class RopeScaling(Protocol):
    """How a rope is stretched beyond the context that it was trained with."""

    @property
    def amplitude(self) -> float:
        """What cos and sin are multiplied by."""
        ...

    def apply(self, inv_freq: torch.Tensor, theta: float) -> torch.Tensor:
        """The stretched frequencies of the plain ones, fp32 [head_dim / 2]."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearRopeScaling:
    """Positions are divided by `factor`."""

    factor: float

    @property
    def amplitude(self) -> float:
        return 1.0

    def apply(self, inv_freq: torch.Tensor, theta: float) -> torch.Tensor:
        return inv_freq / self.factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3RopeScaling:
    """Llama 3.1's: low frequencies are divided by `factor`, high ones kept, a ramp lies between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    @property
    def amplitude(self) -> float:
        return 1.0

    def apply(self, inv_freq: torch.Tensor, theta: float) -> torch.Tensor:
        wavelength = 2 * math.pi / inv_freq
        rotations = self.original_max_position_embeddings / wavelength
        ramp = (rotations - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        keep = ramp.clamp(0.0, 1.0)  # 1 where a frequency is kept, 0 where it is stretched in full
        return inv_freq * (keep + (1 - keep) / self.factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnRopeScaling:
    """YaRN (arXiv 2309.00071): as Llama 3's with a ramp over the pairs of a head, between those that rotate `beta_fast`
    and `beta_slow` times in the original context; and scores grow with the square of `attention_factor`."""

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    @staticmethod
    def usual_attention_factor(factor: float) -> float:
        return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0

    @property
    def amplitude(self) -> float:
        return self.attention_factor

    def apply(self, inv_freq: torch.Tensor, theta: float) -> torch.Tensor:
        pairs = len(inv_freq)
        low, high = (self._pair_that_rotates(times, pairs, theta) for times in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * pairs - 1)
        width = high - low if high != low else 0.001
        stretch = ((torch.arange(pairs, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
        return inv_freq / self.factor * stretch + inv_freq * (1 - stretch)

    def _pair_that_rotates(self, times: float, pairs: int, theta: float) -> float:
        return pairs * math.log(self.original_max_position_embeddings / (times * 2 * math.pi)) / math.log(theta)


@dataclass(frozen=True, slots=True, kw_only=True)
class DivisorRopeScaling:
    """A divisor for each frequency: what GGUF files hold instead of Llama 3's parameters."""

    divisors: tuple[float, ...]

    @property
    def amplitude(self) -> float:
        return 1.0

    def apply(self, inv_freq: torch.Tensor, theta: float) -> torch.Tensor:
        return inv_freq / torch.tensor(self.divisors, dtype=torch.float32)


@dataclass(frozen=True, slots=True)
class Rope:
    theta: float
    scaling: RopeScaling | None = None

    @property
    def amplitude(self) -> float:
        return self.scaling.amplitude if self.scaling else 1.0

    def inv_freq(self, head_dim: int) -> torch.Tensor:
        """Frequencies of the pairs of a head, fp32 [head_dim / 2]."""
        exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        plain = 1.0 / (self.theta**exponent)
        return self.scaling.apply(plain, self.theta) if self.scaling else plain


# --- the model


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The numbers of a model, in Hugging Face's terms, and what its layers have beyond Llama's."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope
    max_model_len: int
    tied_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None = None
    family: str = "llama"  # a key of families.FAMILIES
    activation: Activation = "silu"
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm of every query and key head, before the rope
    post_norms: bool = False  # RMS norm of what attention and MLP return, before it is added
    embedding_scale: float = 1.0
    query_scale: float | None = None  # of the scores; None: head_dim ** -0.5
    sliding_window: int | None = None  # how many positions a row of a local layer sees, its own included
    local_layers: tuple[bool, ...] = (False,)  # which layers are local; repeated to the number of layers
    local_rope: Rope | None = None  # of local layers, where it is another one

    def __post_init__(self) -> None:
        for field in (
            *("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"),
            *("rms_norm_eps", "max_model_len", "embedding_scale"),
        ):
            if not 0 < getattr(self, field) < math.inf:
                raise BadModelFile(f"{field} is {getattr(self, field)}; it must be positive and finite.")
        for rope in (self.rope, self.local_rope):
            if rope is not None and not 1 < rope.theta < math.inf:
                raise BadModelFile(f"rope_theta is {rope.theta}; it must be above 1 and finite.")
        for field in ("query_scale", "sliding_window"):
            if (value := getattr(self, field)) is not None and not 0 < value < math.inf:
                raise BadModelFile(f"{field} is {value}; it must be positive and finite.")
        if any(self.local_layers) and self.sliding_window is None:
            raise BadModelFile("Some layers attend to a window, and sliding_window does not say how long it is.")
        for token in (self.bos_token_id, *self.eos_token_ids):
            if token is not None and not (type(token) is int and 0 <= token < self.vocab_size):
                raise BadModelFile(f"{token!r} is named as a special token, but is no id of {self.vocab_size}.")
        if self.num_heads % self.num_kv_heads:
            raise BadModelFile(f"{self.num_heads} query heads cannot share {self.num_kv_heads} KV heads evenly.")
        if self.head_dim < 2 or self.head_dim % 2:
            raise BadModelFile(f"head_dim is {self.head_dim}; rope needs an even number.")

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def score_scale(self) -> float:
        return self.head_dim**-0.5 if self.query_scale is None else self.query_scale

    def is_local(self, layer: int) -> bool:
        return self.local_layers[layer % len(self.local_layers)]

    def window(self, layer: int) -> int | None:
        """How many positions a row of the layer sees, its own included; None for all before it."""
        return self.sliding_window if self.is_local(layer) else None

    @property
    def widest_window(self) -> int | None:
        """What the layer sees that sees most; None for everything."""
        return self.sliding_window if all(self.is_local(layer) for layer in range(len(self.local_layers))) else None

    def rope_of(self, layer: int) -> Rope:
        return self.local_rope if self.local_rope is not None and self.is_local(layer) else self.rope

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the model with its shape."""
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab_size, self.hidden_size),
            "model.norm.weight": (self.hidden_size,),
        }
        if not self.tied_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, self.hidden_size)
        of_a_layer = self._layer_shapes()
        for layer in range(self.num_layers):
            shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in of_a_layer.items()}
        return shapes

    def _layer_shapes(self) -> dict[str, tuple[int, ...]]:
        hidden, ffn = self.hidden_size, self.intermediate_size
        linears = (
            ("self_attn.q_proj", self.q_size, hidden, self.qkv_bias),
            ("self_attn.k_proj", self.kv_size, hidden, self.qkv_bias),
            ("self_attn.v_proj", self.kv_size, hidden, self.qkv_bias),
            ("self_attn.o_proj", hidden, self.q_size, self.output_bias),
            ("mlp.gate_proj", ffn, hidden, self.mlp_bias),
            ("mlp.up_proj", ffn, hidden, self.mlp_bias),
            ("mlp.down_proj", hidden, ffn, self.mlp_bias),
        )
        norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
        if self.post_norms:
            norms |= {"pre_feedforward_layernorm": hidden, "post_feedforward_layernorm": hidden}
        if self.qk_norm:
            norms |= {"self_attn.q_norm": self.head_dim, "self_attn.k_norm": self.head_dim}
        shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (size,) for name, size in norms.items()}
        shapes |= {f"{name}.weight": (outputs, inputs) for name, outputs, inputs, _ in linears}
        return shapes | {f"{name}.bias": (outputs,) for name, outputs, _, has_bias in linears if has_bias}
