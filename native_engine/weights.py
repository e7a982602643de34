"""Checkpoints: a GGUF file or a Hugging Face folder, seen as a `ModelConfig` and tensors under Hugging Face's names.

    checkpoint = open_checkpoint(path)
    checkpoint.config.num_layers
    checkpoint.tensor("model.layers.0.self_attn.q_proj.weight")     # fp32, rows = outputs

What the configuration says and what the files hold must agree, tensor by tensor: one that the model code has no place
for is refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from native_engine.gguf import BadModelFile, GGUFFile
from native_engine.models.config import ModelConfig, UnsupportedModel
from native_engine.models.families import FAMILIES, config_of_folder, config_of_gguf


class Checkpoint(Protocol):
    @property
    def config(self) -> ModelConfig: ...

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor of `config.shapes()`, fp32; a norm's weight is what is multiplied by."""
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
        raise UnsupportedModel(
            f"{source} has tensors that this {config.family} has no place for: {', '.join(extra[:5])}."
        )


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
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_NAMES_OF_POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_NOT_OF_THE_MODEL = {"rope_freqs.weight"}  # part of the configuration


class GGUFCheckpoint:
    """A model in a GGUF file. Llama's query and key rows interleave the two halves of each head; we undo that."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.config = config_of_gguf(file)
        self._interleaves = file.metadata["general.architecture"] == "llama"
        known = _GGUF_NAMES | (_GGUF_NAMES_OF_POST_NORMS if self.config.post_norms else {})
        self._names = {_hugging_face_name(name, known): name for name in file.tensors.keys() - _NOT_OF_THE_MODEL}
        found = {name: file.tensors[gguf_name].shape for name, gguf_name in self._names.items()}
        check_tensors(found, self.config, file.path)

    def tensor(self, name: str) -> torch.Tensor:
        value = self.file.tensor(self._names[name])
        if self._interleaves and ".q_proj." in name:
            return _deinterleave(value, self.config.num_heads)
        if self._interleaves and ".k_proj." in name:
            return _deinterleave(value, self.config.num_kv_heads)
        return value


def _hugging_face_name(gguf_name: str, known: Mapping[str, str]) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; a name we do not know stays as it is."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", gguf_name)
    if match is None or match[2] not in known:
        return gguf_name
    layer = f"model.layers.{match[1]}." if match[1] else ""
    return f"{layer}{known[match[2]]}.{match[3]}"


def _deinterleave(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows (pair 0 a, pair 0 b, pair 1 a, ...) of each head -> (all a, all b), the order of Hugging Face's rope."""
    return rows.view(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


# --- Hugging Face ---


class HuggingFaceCheckpoint:
    """A folder with `config.json` and `model.safetensors` (or shards and their index)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        generation = folder / "generation_config.json"
        self.config = config_of_folder(
            folder, read_json(folder / "config.json"), read_json(generation) if generation.exists() else {}
        )
        self._norm_offset = FAMILIES[self.config.family].norm_offset
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
        value = value.float()
        return value + self._norm_offset if name.endswith("norm.weight") else value


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
