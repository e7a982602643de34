"""Checkpoints: a GGUF file or a Hugging Face folder, seen as a `ModelConfig` and tensors under Hugging Face's names.

    checkpoint = open_checkpoint(path)
    checkpoint.config.num_layers
    checkpoint.tensor("model.layers.0.self_attn.q_proj.weight")     # fp32, rows = outputs

Only what we compute exactly is accepted. An architecture, a rope scaling or a tensor that the model code has no place
for is refused by name, because running without it would produce text that is quietly wrong.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from native_engine.errors import EngineError
from native_engine.gguf import BadModelFile, GGUFFile


class UnsupportedModel(EngineError):
    """The model is sound, but it needs something that this engine does not do. The message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3RopeScaling:
    """Llama 3.1's stretch of the rope: low frequencies are divided by `factor`, high ones kept, a ramp lies between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def apply(self, inv_freq: torch.Tensor) -> torch.Tensor:
        wavelength = 2 * math.pi / inv_freq
        rotations = self.original_max_position_embeddings / wavelength
        ramp = (rotations - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        keep = ramp.clamp(0.0, 1.0)  # 1 where a frequency is kept, 0 where it is stretched in full
        return inv_freq * (keep + (1 - keep) / self.factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The numbers of a Llama-family model, in Hugging Face's terms."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_model_len: int
    tied_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None = None
    rope_scaling: Llama3RopeScaling | None = None

    def __post_init__(self) -> None:
        for field in (
            *("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"),
            *("rms_norm_eps", "rope_theta", "max_model_len"),
        ):
            if not 0 < getattr(self, field) < math.inf:
                raise BadModelFile(f"{field} is {getattr(self, field)}; it must be positive and finite.")
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

    def inv_freq(self) -> torch.Tensor:
        """Rope frequencies of the pairs of a head, fp32 [head_dim / 2]."""
        exponent = torch.arange(0, self.head_dim, 2, dtype=torch.int64).float() / self.head_dim
        plain = 1.0 / (self.rope_theta**exponent)
        return self.rope_scaling.apply(plain) if self.rope_scaling else plain

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the model with its shape."""
        hidden, ffn = self.hidden_size, self.intermediate_size
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab_size, hidden),
            "model.norm.weight": (hidden,),
        }
        if not self.tied_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}."
            shapes |= {
                f"{prefix}input_layernorm.weight": (hidden,),
                f"{prefix}self_attn.q_proj.weight": (self.q_size, hidden),
                f"{prefix}self_attn.k_proj.weight": (self.kv_size, hidden),
                f"{prefix}self_attn.v_proj.weight": (self.kv_size, hidden),
                f"{prefix}self_attn.o_proj.weight": (hidden, self.q_size),
                f"{prefix}post_attention_layernorm.weight": (hidden,),
                f"{prefix}mlp.gate_proj.weight": (ffn, hidden),
                f"{prefix}mlp.up_proj.weight": (ffn, hidden),
                f"{prefix}mlp.down_proj.weight": (hidden, ffn),
            }
        return shapes


class Checkpoint(Protocol):
    @property
    def config(self) -> ModelConfig: ...

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor of `config.shapes()`, fp32."""
        ...


def open_checkpoint(path: Path) -> Checkpoint:
    """A `.gguf` file or a Hugging Face folder. Raises `BadModelFile` or `UnsupportedModel`."""
    if path.is_dir():
        return HuggingFaceCheckpoint(path)
    if path.is_file():
        return GGUFCheckpoint(GGUFFile(path))
    raise BadModelFile(f"There is no model at {path}.")


def check_tensors(found: Mapping[str, tuple[int, ...]], config: ModelConfig, source: Path) -> None:
    """The checkpoint holds exactly the tensors of the model, each in its shape."""
    if config.num_layers > len(found):  # a corrupt count may be in the billions, and `shapes` lists them all
        raise BadModelFile(f"{source} claims {config.num_layers} layers and holds {len(found)} tensors.")
    wanted = config.shapes()
    for name, shape in wanted.items():
        if name not in found:
            raise BadModelFile(f"{source} lacks the tensor {name}.")
        if found[name] != shape:
            raise BadModelFile(f"{source}: {name} has shape {found[name]}, the configuration says {shape}.")
    extra = sorted(found.keys() - wanted.keys())
    if extra:
        raise UnsupportedModel(f"{source} has tensors that this Llama has no place for: {', '.join(extra[:5])}.")


# --- GGUF ---

_GGUF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GGUFCheckpoint:
    """A Llama in a GGUF file. Its query and key rows interleave the two halves of each head; we undo that."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.config = _gguf_config(file)
        self._names = {_hugging_face_name(name): name for name in file.tensors}
        found = {name: file.tensors[gguf_name].shape for name, gguf_name in self._names.items()}
        check_tensors(found, self.config, file.path)

    def tensor(self, name: str) -> torch.Tensor:
        value = self.file.tensor(self._names[name])
        if name.endswith("q_proj.weight"):
            return _deinterleave(value, self.config.num_heads)
        if name.endswith("k_proj.weight"):
            return _deinterleave(value, self.config.num_kv_heads)
        return value


def _hugging_face_name(gguf_name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; a name we do not know stays as it is."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", gguf_name)
    if match is None or match[2] not in _GGUF_NAMES:
        return gguf_name
    layer = f"model.layers.{match[1]}." if match[1] else ""
    return f"{layer}{_GGUF_NAMES[match[2]]}.weight"


def _deinterleave(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows (pair 0 a, pair 0 b, pair 1 a, ...) of each head -> (all a, all b), the order of Hugging Face's rope."""
    return rows.view(heads, -1, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)


def _gguf_config(file: GGUFFile) -> ModelConfig:
    fields = file.metadata
    architecture = fields.get("general.architecture")
    if architecture != "llama":
        raise UnsupportedModel(f"{file.path} holds the architecture {architecture!r}; this engine runs 'llama'.")

    def number(key: str, default: float | None = None) -> float:
        value = fields.get(f"llama.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise BadModelFile(f"{file.path}: llama.{key} is {value!r}; a finite number is needed.")
        return value

    scaling = fields.get("llama.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in file.tensors:
        raise UnsupportedModel(f"{file.path} scales its rope ({scaling if scaling != 'none' else 'rope_freqs'}).")
    if number("expert_count", 0):
        raise UnsupportedModel(f"{file.path} is a mixture of experts.")
    hidden, heads = int(number("embedding_length")), int(number("attention.head_count"))
    if heads < 1:
        raise BadModelFile(f"{file.path}: llama.attention.head_count is {heads}.")
    head_dim = int(number("attention.key_length", hidden // heads))
    if int(number("rope.dimension_count", head_dim)) != head_dim:
        raise UnsupportedModel(f"{file.path} rotates only part of each head (rope.dimension_count).")
    vocabulary = fields.get("tokenizer.ggml.tokens")
    return ModelConfig(
        vocab_size=int(number("vocab_size", len(vocabulary) if isinstance(vocabulary, list) else None)),
        hidden_size=hidden,
        intermediate_size=int(number("feed_forward_length")),
        num_layers=int(number("block_count")),
        num_heads=heads,
        num_kv_heads=int(number("attention.head_count_kv", heads)),
        head_dim=head_dim,
        rms_norm_eps=number("attention.layer_norm_rms_epsilon"),
        rope_theta=number("rope.freq_base", 10000.0),
        max_model_len=int(number("context_length")),
        tied_embeddings="output.weight" not in file.tensors,
        bos_token_id=fields.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=tuple(
            dict.fromkeys(
                fields[key] for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id") if key in fields
            )
        ),
        pad_token_id=_padding_id(fields.get("tokenizer.ggml.padding_token_id")),
    )


# --- Hugging Face ---


class HuggingFaceCheckpoint:
    """A folder with `config.json` and `model.safetensors` (or shards and their index)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = _hugging_face_config(folder, read_json(folder / "config.json"))
        self._files: dict[str, Path] = {}
        found: dict[str, tuple[int, ...]] = {}
        for path in _safetensors_files(folder):
            with _open_safetensors(path) as file:
                for name in file.keys():  # noqa: SIM118 - not a dict: the object itself is not iterable
                    if self._is_model_tensor(name):
                        self._files[name] = path
                        found[name] = tuple(file.get_slice(name).get_shape())
        check_tensors(found, self.config, folder)

    def _is_model_tensor(self, name: str) -> bool:
        """Older checkpoints also store the rope's frequencies, and a second copy of a tied head; both are derived."""
        return not name.endswith("rotary_emb.inv_freq") and not (
            self.config.tied_embeddings and name == "lm_head.weight"
        )

    def tensor(self, name: str) -> torch.Tensor:
        with _open_safetensors(self._files[name]) as file:
            value: torch.Tensor = file.get_tensor(name)
        if not value.is_floating_point():
            raise UnsupportedModel(f"{self.folder}: {name} is {value.dtype}; quantised checkpoints are not supported.")
        return value.float()


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a model folder. A file that is missing or broken is a `BadModelFile`."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadModelFile(f"Cannot read {path}: {error}.") from error
    if not isinstance(content, dict):
        raise BadModelFile(f"{path} does not hold a JSON object.")
    return content


def _open_safetensors(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise BadModelFile(f"Cannot read {path}: {error}.") from error


def _safetensors_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return [folder / "model.safetensors"]
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict):
        raise BadModelFile(f"{index} has no weight_map.")
    # Only plain file names: a folder from elsewhere must not make us read outside it.
    return [folder / Path(name).name for name in sorted(set(shards.values()))]


def _hugging_face_config(folder: Path, fields: dict[str, Any]) -> ModelConfig:
    architectures = fields.get("architectures") or []
    if architectures != ["LlamaForCausalLM"]:
        raise UnsupportedModel(
            f"{folder} holds the architecture {', '.join(map(str, architectures)) or 'unknown'}; "
            "this engine runs LlamaForCausalLM."
        )
    _refuse_options(folder, fields)
    try:
        hidden, heads = int(fields["hidden_size"]), int(fields["num_attention_heads"])
        theta, scaling = _rope(folder, fields)
        return ModelConfig(
            vocab_size=int(fields["vocab_size"]),
            hidden_size=hidden,
            intermediate_size=int(fields["intermediate_size"]),
            num_layers=int(fields["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(fields.get("num_key_value_heads") or heads),
            head_dim=int(fields.get("head_dim") or hidden // heads),
            rms_norm_eps=float(fields.get("rms_norm_eps", 1e-6)),
            rope_theta=theta,
            max_model_len=int(fields.get("max_position_embeddings", 2048)),
            tied_embeddings=bool(fields.get("tie_word_embeddings", False)),
            bos_token_id=fields.get("bos_token_id"),
            eos_token_ids=_eos_token_ids(folder, fields),
            pad_token_id=_padding_id(fields.get("pad_token_id")),
            rope_scaling=scaling,
        )
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise BadModelFile(f"{folder / 'config.json'} is incomplete or wrong: {error!r}.") from error


def _refuse_options(folder: Path, fields: dict[str, Any]) -> None:
    """Options of LlamaConfig that change the computation and that we do not implement."""
    expected = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "quantization_config": None}
    for option, value in expected.items():
        if fields.get(option, value) != value:
            raise UnsupportedModel(f"{folder}: {option} = {fields[option]!r} is not supported.")


def _rope(folder: Path, fields: dict[str, Any]) -> tuple[float, Llama3RopeScaling | None]:
    """Base and scaling, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta") or fields.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default" and rope.get("partial_rotary_factor", 1.0) == 1.0:
        return theta, None
    if kind == "llama3":
        return theta, Llama3RopeScaling(
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_max_position_embeddings=int(rope["original_max_position_embeddings"]),
        )
    raise UnsupportedModel(f"{folder}: rope scaling {kind!r} is not supported ('default' and 'llama3' are).")


def _padding_id(declared: object) -> int | None:
    """We never pad; the id is kept for exports alone. Some checkpoints write -1 for none."""
    return declared if isinstance(declared, int) and declared >= 0 else None


def _eos_token_ids(folder: Path, fields: dict[str, Any]) -> tuple[int, ...]:
    """The generation config's list where there is one: it is what the model's makers generate with."""
    generation = folder / "generation_config.json"
    declared = read_json(generation).get("eos_token_id") if generation.exists() else None
    declared = fields.get("eos_token_id") if declared is None else declared
    if declared is None:
        return ()
    return tuple(declared) if isinstance(declared, list) else (int(declared),)
