"""Write a model as a Hugging Face folder that transformers, vLLM and others read: bf16 weights, tokenizer, template.

    export_hf(Path("model.gguf"), Path("model-hf"))

Rivals in a race get the same weights as we run: what a quantised file holds, dequantised and rounded to bf16 once.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from native_engine.errors import EngineError
from native_engine.models.config import ModelConfig
from native_engine.models.families import FAMILIES, to_hugging_face
from native_engine.tokenizer import TextTokenizer, open_tokenizer
from native_engine.weights import Checkpoint, open_checkpoint


class ExportError(EngineError):
    """The export could not be written; the message says where and why."""


def export_hf(source: Path, target: Path) -> None:
    """Export the model at `source` to the folder `target`, which must be new or empty. All of it appears, or none."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ExportError(f"{target} exists and is not an empty folder.")
    checkpoint, tokenizer = open_checkpoint(source), open_tokenizer(source)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
            folder = Path(scratch) / "export"
            folder.mkdir()
            _write(folder, checkpoint, tokenizer)
            if target.exists():
                target.rmdir()
            shutil.move(folder, target)
    except OSError as error:
        raise ExportError(f"Cannot write {target}: {error}.") from error


def _write(folder: Path, checkpoint: Checkpoint, tokenizer: TextTokenizer) -> None:
    config = checkpoint.config
    tensors = {name: _stored(checkpoint, name) for name in config.shapes()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "config.json", to_hugging_face(config) | {"torch_dtype": "bfloat16"} | _special_token_ids(config)
    )
    _write_json(folder / "generation_config.json", _without_none(_special_token_ids(config)))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(config, tokenizer))
    if tokenizer.chat_template is not None:
        (folder / "chat_template.jinja").write_text(tokenizer.chat_template, encoding="utf-8")


def _stored(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    value = checkpoint.tensor(name)
    if name.endswith("norm.weight"):
        value = value - FAMILIES[checkpoint.config.family].norm_offset
    return value.to(torch.bfloat16).contiguous()


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _without_none(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value is not None}


def _special_token_ids(config: ModelConfig) -> dict[str, Any]:
    eos = config.eos_token_ids
    return {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else (list(eos) or None),
        "pad_token_id": config.pad_token_id,
    }


def _tokenizer_config(config: ModelConfig, tokenizer: TextTokenizer) -> dict[str, Any]:
    return _without_none(
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokenizer.token_text(tokenizer.bos_token_id) or None,
            "eos_token": tokenizer.token_text(tokenizer.eos_token_id) or None,
            "pad_token": tokenizer.token_text(config.pad_token_id) or None,
            "model_max_length": config.max_model_len,
            "clean_up_tokenization_spaces": False,
            "add_bos_token": tokenizer.adds_bos,
            "chat_template": tokenizer.chat_template,
        }
    )
