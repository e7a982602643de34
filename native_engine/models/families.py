"""The families of models: what each has beyond Llama, and how it is read from GGUF metadata and from `config.json`.

    config_of_gguf(file)                  # by `general.architecture`
    config_of_folder(folder, fields)      # by `architectures`
    to_hugging_face(config)               # the fields of a `config.json` again

Only what we compute exactly is accepted. What the forward pass has no place for is refused by name, because running
without it would produce text that is quietly wrong.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from native_engine.gguf import BadModelFile, GGUFFile
from native_engine.models.config import (
    Activation,
    DivisorRopeScaling,
    LinearRopeScaling,
    Llama3RopeScaling,
    ModelConfig,
    Rope,
    RopeScaling,
    UnsupportedModel,
    YarnRopeScaling,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What all models of a family share, and what their files leave unsaid."""

    architecture: str  # in `config.json`
    model_type: str
    activation: Activation = "silu"
    qkv_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    scales_embeddings: bool = False  # by the square root of the hidden size
    norm_offset: float = 0.0  # Hugging Face files hold norm weights less this
    local_layers: tuple[bool, ...] = (False,)  # where a window is given and nothing says whose it is
    local_theta: float | None = None
    default_theta: float = 10000.0
    tied_embeddings: bool = False


FAMILIES: dict[str, Family] = {
    "llama": Family(architecture="LlamaForCausalLM", model_type="llama"),
    "mistral": Family(architecture="MistralForCausalLM", model_type="mistral", local_layers=(True,)),
    "qwen2": Family(architecture="Qwen2ForCausalLM", model_type="qwen2", qkv_bias=True),
    "qwen3": Family(architecture="Qwen3ForCausalLM", model_type="qwen3", qk_norm=True),
    "gemma3": Family(
        architecture="Gemma3ForCausalLM",
        model_type="gemma3_text",
        activation="gelu_tanh",
        qk_norm=True,
        post_norms=True,
        scales_embeddings=True,
        norm_offset=1.0,
        local_layers=(True, True, True, True, True, False),
        local_theta=10000.0,
        default_theta=1e6,
        tied_embeddings=True,
    ),
}
GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")  # Mistral's are named 'llama'
LOCAL, GLOBAL = "sliding_attention", "full_attention"  # kinds of layers in `config.json`
_GEMMA3_27B_LAYERS = 62  # the one size whose query scale is not that of its heads; its GGUF files do not say so
# A model's end of turn where GGUF metadata name only its end of text.
_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>")


def _of_family(name: str, hidden_size: int) -> dict[str, Any]:
    family = FAMILIES[name]
    return {
        "family": name,
        "qk_norm": family.qk_norm,
        "post_norms": family.post_norms,
        "embedding_scale": hidden_size**0.5 if family.scales_embeddings and hidden_size > 0 else 1.0,
    }


# --- GGUF


class _Metadata:
    """The fields of one architecture in a GGUF file."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self._file = file
        self._architecture = architecture

    def get(self, key: str, default: Any = None) -> Any:
        return self._file.metadata.get(f"{self._architecture}.{key}", default)

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise BadModelFile(
                f"{self._file.path}: {self._architecture}.{key} is {value!r}; a finite number is needed."
            )
        return value


def config_of_gguf(file: GGUFFile) -> ModelConfig:
    """Raises `BadModelFile` or `UnsupportedModel`."""
    architecture = file.metadata.get("general.architecture")
    if architecture not in GGUF_ARCHITECTURES:
        known = ", ".join(GGUF_ARCHITECTURES)
        raise UnsupportedModel(f"{file.path} holds the architecture {architecture!r}; this engine runs {known}.")
    fields = _Metadata(file, architecture)
    window = int(fields.number("attention.sliding_window", 0)) or None
    name = "mistral" if architecture == "llama" and window else architecture
    family = FAMILIES[name]
    hidden, heads = int(fields.number("embedding_length")), int(fields.number("attention.head_count"))
    if heads < 1:
        raise BadModelFile(f"{file.path}: {architecture}.attention.head_count is {heads}.")
    head_dim = int(fields.number("attention.key_length", hidden // heads))
    _refuse_gguf_options(file, fields, head_dim)
    layers = int(fields.number("block_count"))
    vocabulary = file.metadata.get("tokenizer.ggml.tokens")
    return ModelConfig(
        **_of_family(name, hidden),
        vocab_size=int(fields.number("vocab_size", len(vocabulary) if isinstance(vocabulary, list) else None)),
        hidden_size=hidden,
        intermediate_size=int(fields.number("feed_forward_length")),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=int(fields.number("attention.head_count_kv", heads)),
        head_dim=head_dim,
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        rope=Rope(fields.number("rope.freq_base", family.default_theta), _gguf_rope_scaling(file, fields, head_dim)),
        max_model_len=int(fields.number("context_length")),
        tied_embeddings="output.weight" not in file.tensors,
        bos_token_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=_gguf_eos_token_ids(file),
        pad_token_id=_padding_id(file.metadata.get("tokenizer.ggml.padding_token_id")),
        activation=family.activation,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        query_scale=(hidden / heads) ** -0.5 if name == "gemma3" and layers == _GEMMA3_27B_LAYERS else None,
        sliding_window=window,
        local_layers=_gguf_local_layers(file, fields, family) if window else (False,),
        local_rope=Rope(fields.number("rope.freq_base_swa", family.local_theta)) if family.local_theta else None,
    )


def _refuse_gguf_options(file: GGUFFile, fields: _Metadata, head_dim: int) -> None:
    if fields.number("expert_count", 0):
        raise UnsupportedModel(f"{file.path} is a mixture of experts.")
    if int(fields.number("rope.dimension_count", head_dim)) != head_dim:
        raise UnsupportedModel(f"{file.path} rotates only part of each head (rope.dimension_count).")
    if int(fields.number("attention.value_length", head_dim)) != head_dim:
        raise UnsupportedModel(f"{file.path} has values of another length than keys (attention.value_length).")
    for key in ("final_logit_softcapping", "attn_logit_softcapping"):
        if fields.number(key, 0):
            raise UnsupportedModel(f"{file.path} caps its logits ({key}).")


def _gguf_rope_scaling(file: GGUFFile, fields: _Metadata, head_dim: int) -> RopeScaling | None:
    kind = fields.get("rope.scaling.type", "none")
    if "rope_freqs.weight" in file.tensors:
        divisors = tuple(file.tensor("rope_freqs.weight").flatten().tolist())
        if kind != "none" or len(divisors) != head_dim // 2 or not all(0 < each < math.inf for each in divisors):
            raise BadModelFile(f"{file.path}: rope_freqs.weight does not fit a head of {head_dim} that is not scaled.")
        return DivisorRopeScaling(divisors=divisors)
    if kind == "none":
        return None
    if kind not in ("linear", "yarn") or fields.number("rope.scaling.yarn_log_multiplier", 0):
        raise UnsupportedModel(f"{file.path} scales its rope in a way that is not supported ({kind!r}).")
    factor = _positive(file.path, "rope.scaling.factor", fields.number("rope.scaling.factor"))
    if kind == "linear":
        return LinearRopeScaling(factor=factor)
    usual = YarnRopeScaling.usual_attention_factor(factor)
    original = fields.number("rope.scaling.original_context_length", fields.number("context_length"))
    return YarnRopeScaling(
        factor=factor,
        original_max_position_embeddings=int(_positive(file.path, "original_context_length", original)),
        attention_factor=usual * fields.number("rope.scaling.attn_factor", 1.0),
        beta_fast=_positive(file.path, "yarn_beta_fast", fields.number("rope.scaling.yarn_beta_fast", 32.0)),
        beta_slow=_positive(file.path, "yarn_beta_slow", fields.number("rope.scaling.yarn_beta_slow", 1.0)),
    )


def _gguf_local_layers(file: GGUFFile, fields: _Metadata, family: Family) -> tuple[bool, ...]:
    """`sliding_window_pattern` is a period, of which the last layer is global, or says it for every layer."""
    pattern = fields.get("attention.sliding_window_pattern")
    if pattern is None:
        return family.local_layers
    if isinstance(pattern, list) and pattern and all(isinstance(each, bool) for each in pattern):
        return tuple(pattern)
    if type(pattern) is int and 1 <= pattern <= len(file.tensors):
        return (*[True] * (pattern - 1), False)
    raise BadModelFile(f"{file.path}: attention.sliding_window_pattern is {pattern!r}.")


def _gguf_eos_token_ids(file: GGUFFile) -> tuple[int, ...]:
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    declared = [file.metadata[key] for key in keys if key in file.metadata]
    vocabulary, kinds = (file.metadata.get(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type"))
    if isinstance(vocabulary, list) and isinstance(kinds, list):
        control = 3  # as text such a spelling ends nothing
        places = [vocabulary.index(text) for text in _TURN_ENDS if text in vocabulary]
        declared += [place for place in places if place < len(kinds) and kinds[place] == control]
    return tuple(dict.fromkeys(declared))


# --- Hugging Face


def config_of_folder(folder: Path, fields: dict[str, Any], generation: dict[str, Any]) -> ModelConfig:
    """Of `config.json` and what there is of `generation_config.json`. Raises `BadModelFile` or `UnsupportedModel`."""
    declared = fields.get("architectures") or []
    names = [name for name, family in FAMILIES.items() if declared == [family.architecture]]
    if not names:
        known = ", ".join(family.architecture for family in FAMILIES.values())
        raise UnsupportedModel(
            f"{folder} holds the architecture {', '.join(map(str, declared)) or 'unknown'}; this engine runs {known}."
        )
    (name,) = names
    family = FAMILIES[name]
    _refuse_options(folder, fields)
    try:
        hidden, heads = int(fields["hidden_size"]), int(fields["num_attention_heads"])
        head_dim = int(fields.get("head_dim") or (256 if name == "gemma3" else hidden // heads))
        window, local_layers = _windows(folder, name, fields)
        rope, local_rope = _ropes(folder, family, fields)
        has_bias = bool(fields.get("attention_bias", False))
        query_scalar = fields.get("query_pre_attn_scalar")
        return ModelConfig(
            **_of_family(name, hidden),
            vocab_size=int(fields["vocab_size"]),
            hidden_size=hidden,
            intermediate_size=int(fields["intermediate_size"]),
            num_layers=int(fields["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(fields.get("num_key_value_heads") or heads),
            head_dim=head_dim,
            rms_norm_eps=float(fields.get("rms_norm_eps", 1e-6)),
            rope=rope,
            max_model_len=int(fields.get("max_position_embeddings", 2048)),
            tied_embeddings=bool(fields.get("tie_word_embeddings", family.tied_embeddings)),
            bos_token_id=fields.get("bos_token_id"),
            eos_token_ids=_eos_token_ids(fields, generation),
            pad_token_id=_padding_id(fields.get("pad_token_id")),
            activation=_activation(folder, fields, family),
            qkv_bias=family.qkv_bias or has_bias,
            output_bias=has_bias and not family.qkv_bias,
            mlp_bias=bool(fields.get("mlp_bias", False)),
            query_scale=float(query_scalar) ** -0.5 if query_scalar is not None else None,
            sliding_window=window,
            local_layers=local_layers,
            local_rope=local_rope,
        )
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise BadModelFile(f"{folder / 'config.json'} is incomplete or wrong: {error!r}.") from error


_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def _activation(folder: Path, fields: dict[str, Any], family: Family) -> Activation:
    for option in ("hidden_activation", "hidden_act"):
        if (name := fields.get(option)) is not None:
            if name not in _ACTIVATIONS:
                raise UnsupportedModel(f"{folder}: {option} = {name!r} is not supported.")
            return _ACTIVATIONS[name]
    return family.activation


def _refuse_options(folder: Path, fields: dict[str, Any]) -> None:
    """Options that change the computation and that we do not implement."""
    for option in (
        *("quantization_config", "attn_logit_softcapping", "final_logit_softcapping"),
        "use_bidirectional_attention",
    ):
        if fields.get(option):
            raise UnsupportedModel(f"{folder}: {option} = {fields[option]!r} is not supported.")


def _windows(folder: Path, name: str, fields: dict[str, Any]) -> tuple[int | None, tuple[bool, ...]]:
    """The window and the layers that have it: listed in `layer_types`, or as the family has them."""
    window = fields.get("sliding_window")
    if window is None or (name.startswith("qwen") and not fields.get("use_sliding_window")) or name == "llama":
        return None, (False,)
    kinds = fields.get("layer_types") if name != "mistral" else None
    if kinds is not None:
        known = {LOCAL: True, GLOBAL: False}
        unknown = sorted({str(kind) for kind in kinds} - known.keys())
        if unknown or len(kinds) != int(fields["num_hidden_layers"]):
            raise UnsupportedModel(f"{folder}: layer_types lists {len(kinds)} layers of {unknown or list(known)}.")
        return int(window), tuple(known[kind] for kind in kinds)
    if name.startswith("qwen"):
        raise UnsupportedModel(f"{folder}: use_sliding_window needs layer_types, which say whose window it is.")
    period = fields.get("sliding_window_pattern")
    if period is not None and not 1 <= int(period) <= 1024:
        raise BadModelFile(f"{folder}: sliding_window_pattern is {period!r}.")
    return int(window), FAMILIES[name].local_layers if period is None else (*[True] * (int(period) - 1), False)


def _ropes(folder: Path, family: Family, fields: dict[str, Any]) -> tuple[Rope, Rope | None]:
    """From `rope_parameters` (transformers 5; one for each kind of layer where kinds differ), or `rope_theta`,
    `rope_local_base_freq` and `rope_scaling` (before)."""
    described = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    by_kind = GLOBAL in described
    wide = described[GLOBAL] if by_kind else described
    theta = wide.get("rope_theta") or fields.get("rope_theta") or family.default_theta
    rope = Rope(float(theta), _rope_scaling(folder, wide, fields))
    if family.local_theta is None:
        return rope, None
    near = described.get(LOCAL, {}) if by_kind else {}
    local_theta = near.get("rope_theta") or fields.get("rope_local_base_freq") or family.local_theta
    return rope, Rope(float(local_theta), _rope_scaling(folder, near, fields))


def _rope_scaling(folder: Path, rope: dict[str, Any], fields: dict[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel(f"{folder}: partial_rotary_factor = {rope['partial_rotary_factor']} is not supported.")
    if kind == "default":
        return None
    if kind == "dynamic":
        raise UnsupportedModel(
            f"{folder}: rope scaling 'dynamic' turns all keys anew as a text grows, and a cache cannot; "
            "remove rope_scaling from config.json to run the model within its trained context."
        )
    if kind not in ("linear", "llama3", "yarn") or rope.get("mscale") or rope.get("mscale_all_dim"):
        raise UnsupportedModel(
            f"{folder}: rope scaling {kind!r} is not supported; linear, llama3 and yarn (without mscale) are."
        )
    factor = _positive(folder, "rope scaling's factor", float(rope["factor"]))
    if kind == "linear":
        return LinearRopeScaling(factor=factor)
    original = rope.get("original_max_position_embeddings") or fields.get("max_position_embeddings")
    original = int(_positive(folder, "original_max_position_embeddings", float(original or 0)))
    if kind == "llama3":
        return Llama3RopeScaling(
            factor=factor,
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_max_position_embeddings=original,
        )
    return YarnRopeScaling(
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=float(rope.get("attention_factor") or YarnRopeScaling.usual_attention_factor(factor)),
        beta_fast=_positive(folder, "beta_fast", float(rope.get("beta_fast") or 32.0)),
        beta_slow=_positive(folder, "beta_slow", float(rope.get("beta_slow") or 1.0)),
        truncate=bool(rope.get("truncate", True)),
    )


def _positive(source: Path, name: str, value: float) -> float:
    if not 0 < value < math.inf:
        raise BadModelFile(f"{source}: {name} is {value}; it must be positive and finite.")
    return value


def _padding_id(declared: object) -> int | None:
    """We never pad; the id is kept for exports alone. Some checkpoints write -1 for none."""
    return declared if isinstance(declared, int) and declared >= 0 else None


def _eos_token_ids(fields: dict[str, Any], generation: dict[str, Any]) -> tuple[int, ...]:
    """The generation config's list where there is one: it is what the model's makers generate with."""
    declared = generation.get("eos_token_id")
    declared = fields.get("eos_token_id") if declared is None else declared
    if declared is None:
        return ()
    return tuple(declared) if isinstance(declared, list) else (int(declared),)


# --- and back


def to_hugging_face(config: ModelConfig) -> dict[str, Any]:
    """The fields of `config.json` but for token ids and precision. Raises `UnsupportedModel` where it has no words."""
    family = FAMILIES[config.family]
    fields: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "attention_bias": config.output_bias,
        "mlp_bias": config.mlp_bias,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_model_len,
        "tie_word_embeddings": config.tied_embeddings,
        **_rope_fields(config),
    }
    spelling = {ours: theirs for theirs, ours in _ACTIVATIONS.items()}[config.activation]
    fields["hidden_activation" if config.family == "gemma3" else "hidden_act"] = spelling
    if config.family != "llama":
        fields["sliding_window"] = config.sliding_window
    if config.family.startswith("qwen"):
        fields["use_sliding_window"] = config.sliding_window is not None
        fields["max_window_layers"] = config.num_layers
    if config.family not in ("llama", "mistral"):  # Mistral's window is every layer's
        fields["layer_types"] = [LOCAL if config.is_local(layer) else GLOBAL for layer in range(config.num_layers)]
    if config.family == "gemma3":
        fields["query_pre_attn_scalar"] = round(config.score_scale**-2)
    return fields


def _rope_fields(config: ModelConfig) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` are what versions before transformers 5 read, `rope_parameters` what it reads."""
    scaling = _scaling_fields(config.rope.scaling)
    wide = {**(scaling or {"rope_type": "default"}), "rope_theta": config.rope.theta}
    fields = {"rope_theta": config.rope.theta, "rope_scaling": scaling, "rope_parameters": wide}
    if config.local_rope is not None:
        local = _scaling_fields(config.local_rope.scaling) or {"rope_type": "default"}
        near = {**local, "rope_theta": config.local_rope.theta}
        fields["rope_local_base_freq"] = config.local_rope.theta
        fields["rope_parameters"] = {GLOBAL: wide, LOCAL: near}
    return fields


def _scaling_fields(scaling: RopeScaling | None) -> dict[str, Any] | None:
    match scaling:
        case None:
            return None
        case LinearRopeScaling():
            return {"rope_type": "linear", **dataclasses.asdict(scaling)}
        case Llama3RopeScaling():
            return {"rope_type": "llama3", **dataclasses.asdict(scaling)}
        case YarnRopeScaling():
            return {"rope_type": "yarn", **dataclasses.asdict(scaling)}
    raise UnsupportedModel("A rope with a divisor for each frequency (rope_freqs) has no form in config.json.")
