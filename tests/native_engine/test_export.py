"""An export is read by transformers, and by ourselves, as the model that it came from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from native_engine.export import ExportError, export_hf
from native_engine.tokenizer import open_tokenizer
from native_engine.weights import open_checkpoint
from tests.native_engine.tiny_llama import EOS, LLAMA3, tiny_config, write_tiny_llama


def test_transformers_reads_the_weights_the_tokenizer_and_the_template(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = tiny_config(tied_embeddings=True, rope=LLAMA3)
    source = write_tiny_llama(tmp_path / "tiny", config)
    export_hf(source, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16
    torch.testing.assert_close(model.model.rotary_emb.inv_freq, config.rope.inv_freq(config.head_dim))
    checkpoint = open_checkpoint(source)
    for name, value in model.state_dict().items():
        if name in config.shapes():
            assert torch.equal(value, checkpoint.tensor(name).to(torch.bfloat16)), name
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.encode("héllo", add_special_tokens=False) == open_tokenizer(source).encode("héllo")
    assert tokenizer.eos_token == EOS
    assert tokenizer.chat_template == "{{ messages }}"


@pytest.mark.model
def test_the_default_model_survives_the_way_out_and_back_in(model_path: Path, tmp_path: Path) -> None:
    export_hf(model_path, tmp_path / "out")
    before, after = open_checkpoint(model_path), open_checkpoint(tmp_path / "out")
    assert after.config == before.config
    for name in ("model.layers.7.self_attn.q_proj.weight", "model.embed_tokens.weight", "model.norm.weight"):
        assert torch.equal(after.tensor(name), before.tensor(name).to(torch.bfloat16).float())
    ours, exported = open_tokenizer(model_path), open_tokenizer(tmp_path / "out")
    text = "<|im_start|>user\nIt's 42 °C 😀<|im_end|>"
    assert exported.encode(text) == ours.encode(text)
    assert exported.token_bytes == ours.token_bytes
    assert exported.chat_template == ours.chat_template
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == 2


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    source = write_tiny_llama(tmp_path / "tiny")
    target = tmp_path / "out"
    target.mkdir()
    (target / "mine.txt").write_text("precious")
    with pytest.raises(ExportError, match="not an empty folder"):
        export_hf(source, target)
    assert [path.name for path in target.iterdir()] == ["mine.txt"]


def test_a_failed_export_leaves_nothing_behind(tmp_path: Path) -> None:
    source = write_tiny_llama(tmp_path / "tiny")
    (tmp_path / "file").write_text("")
    with pytest.raises(ExportError, match="Cannot write"):
        export_hf(source, tmp_path / "file" / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "tiny"]
