"""Checkpoints: the same Llama from a folder, from shards, from a GGUF file; and refusals that name their reason."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from native_engine.attention.base import KVCache, StepBatch
from native_engine.errors import EngineError
from native_engine.gguf import BadModelFile
from native_engine.loading import load, make_model
from native_engine.models.config import UnsupportedModel
from native_engine.sampling_params import SamplingParams
from native_engine.tokenizer import open_tokenizer
from native_engine.weights import open_checkpoint
from tests.native_engine.gguf_files import write_gguf
from tests.native_engine.test_exactness import with_changes
from tests.native_engine.tiny_llama import (
    ENGINE_CONFIG,
    LLAMA3,
    VOCAB_SIZE,
    byte_tokenizer,
    config_json,
    random_weights,
    tiny_config,
    write_tiny_llama,
)


def logits(path: Path, token_ids: list[int], kernel_cache: Path) -> torch.Tensor:
    config = with_changes(dtype="float32", block_size=16, max_model_len=256)
    model = make_model(open_checkpoint(path), config, kernel_cache=kernel_cache)
    cache = KVCache.allocate(model.config, 16, 16, torch.float32)
    positions = torch.arange(len(token_ids), dtype=torch.int32)
    table = torch.arange(16, dtype=torch.int32)[None]
    batch = StepBatch(positions, positions.clone(), torch.zeros_like(positions), table)
    with torch.inference_mode():
        result = model.forward(torch.tensor(token_ids), batch, cache, torch.arange(len(token_ids)))
    assert result is not None
    return result


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tied_embeddings": True},
        {"rope": LLAMA3},
        {"num_heads": 6, "num_kv_heads": 1, "head_dim": 32},  # more heads than one pass takes, heads wider than hidden
    ],
    ids=["plain", "tied", "llama3-rope", "one-kv-head"],
)
def test_a_folder_computes_what_transformers_computes(
    tmp_path: Path, kernel_cache: Path, changes: dict[str, Any]
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = tiny_config(**changes)
    folder = write_tiny_llama(tmp_path / "tiny", config)
    token_ids = torch.randint(0, VOCAB_SIZE, (150,), generator=torch.Generator().manual_seed(1)).tolist()
    oracle = LlamaForCausalLM(LlamaConfig(**config_json(config))).eval()
    oracle.load_state_dict(random_weights(config), strict=not config.tied_embeddings)
    oracle.tie_weights()
    with torch.inference_mode():
        expected = oracle(torch.tensor([token_ids])).logits[0]
    torch.testing.assert_close(logits(folder, token_ids, kernel_cache), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("tied", [False, True])
def test_a_gguf_file_holds_the_same_tensors_as_the_folder(tmp_path: Path, tied: bool) -> None:
    config = tiny_config(tied_embeddings=tied)
    weights = random_weights(config)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", config, weights))
    assert checkpoint.config.tied_embeddings == tied
    assert checkpoint.config.head_dim == config.head_dim
    for name, value in weights.items():
        assert torch.equal(checkpoint.tensor(name), value), name


def test_shards_are_found_through_their_index(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "tiny")
    weights = random_weights(tiny_config())
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for part, members in parts.items():
        save_file({name: weights[name] for name in members}, folder / part)
    index = {"weight_map": {name: part for part, members in parts.items() for name in members}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    checkpoint = open_checkpoint(folder)
    assert all(torch.equal(checkpoint.tensor(name), weights[name]) for name in names)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"architectures": None}, "unknown"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 4.0}}, "'longrope' is not supported; linear, llama3"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7}}, "without mscale"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        (
            {"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "'dynamic' turns all keys anew as a text grows",
        ),
    ],
)
def test_what_we_do_not_compute_is_refused_by_name(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    folder = write_tiny_llama(tmp_path / "tiny")
    (folder / "config.json").write_text(json.dumps(config_json(tiny_config()) | change))
    with pytest.raises(UnsupportedModel, match=reason):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden_size": None}, "incomplete or wrong"),
        ({"hidden_size": 128}, r"embed_tokens.weight has shape \(320, 96\)"),
        ({"num_hidden_layers": 3}, r"lacks the tensor model.layers.2"),
        ({"num_key_value_heads": 4}, "share 4 KV heads"),
        ({"num_attention_heads": 0, "head_dim": 16}, "num_heads is 0"),
        ({"num_hidden_layers": 2**40}, "claims 1099511627776 layers and holds 21 tensors"),
        ({"num_hidden_layers": math.inf}, "incomplete or wrong"),
        ({"attention_bias": True}, r"lacks the tensor model.layers.0.self_attn.q_proj.bias"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0.0}}, "factor is 0.0"),
        ({"rope_parameters": {"rope_theta": 1.0}}, "rope_theta is 1.0"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps is nan"),
        ({"max_position_embeddings": -1}, "max_model_len is -1"),
        ({"bos_token_id": 320}, "320 is named as a special token"),
        ({"eos_token_id": ["</s>"]}, "'</s>' is named as a special token"),
    ],
)
def test_a_folder_that_contradicts_itself_is_refused(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    folder = write_tiny_llama(tmp_path / "tiny")
    (folder / "config.json").write_text(json.dumps(config_json(tiny_config()) | change))
    with pytest.raises(BadModelFile, match=reason):
        open_checkpoint(folder)


def test_a_tensor_without_a_place_is_refused(tmp_path: Path) -> None:
    config = tiny_config()
    extra = random_weights(config) | {"model.layers.0.self_attn.q_norm.weight": torch.ones(config.head_dim)}
    folder = write_tiny_llama(tmp_path / "tiny")
    save_file(extra, folder / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=r"llama has no place for: .*q_norm\.weight"):
        open_checkpoint(folder)
    with pytest.raises(UnsupportedModel, match=r"q_norm\.weight"):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", config, extra))


def test_broken_and_missing_files_are_bad_model_files(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "tiny")
    (folder / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(BadModelFile, match=r"model\.safetensors"):
        open_checkpoint(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(BadModelFile, match=r"config\.json"):
        open_checkpoint(folder)
    with pytest.raises(BadModelFile, match="no model at"):
        open_checkpoint(tmp_path / "nothing")


def test_a_gguf_of_another_architecture_is_refused(tmp_path: Path) -> None:
    config = tiny_config()
    weights = random_weights(config)
    with pytest.raises(UnsupportedModel, match="'mamba'; this engine runs llama, qwen2, qwen3, gemma3"):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", config, weights, architecture="mamba"))
    with pytest.raises(UnsupportedModel, match="mixture of experts"):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", config, weights, expert_count=8))
    with pytest.raises(UnsupportedModel, match=r"rope\.dimension_count"):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", config, weights, **{"rope.dimension_count": 8}))


def test_a_context_of_billions_costs_no_more_memory_than_the_cache_can_use(tmp_path: Path, kernel_cache: Path) -> None:
    """One flipped bit in `context_length` would ask for a rope table of half a terabyte."""
    folder = write_tiny_llama(tmp_path / "tiny", tiny_config(max_model_len=2**40))
    loaded = load(folder, ENGINE_CONFIG, kernel_cache=kernel_cache)
    tokens_of_the_cache = loaded.engine.stats().kv_blocks_total * ENGINE_CONFIG.block_size
    assert loaded.max_model_len == tokens_of_the_cache == 16384
    loaded.engine.add("a", [5] * 300, SamplingParams(max_tokens=3, temperature=0))
    while loaded.engine.has_work:
        loaded.engine.step()


@pytest.fixture(scope="module")
def whole_gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A model with all that a real file has, tokenizer and chat template too."""
    config = tiny_config(num_layers=1)
    vocabulary = sorted(byte_tokenizer().get_vocab().items(), key=lambda entry: entry[1])
    tokenizer = {
        "ggml.model": "gpt2",
        "ggml.pre": "smollm",
        "ggml.tokens": [token for token, _ in vocabulary],
        "ggml.token_type": [3 if number < 3 else 1 for _, number in vocabulary],
        "chat_template": "{{ messages }}",
    }
    path = tmp_path_factory.mktemp("gguf") / "whole.gguf"
    return write_gguf(path, config, random_weights(config), tokenizer=tokenizer).read_bytes()


@pytest.mark.replay("A49")
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_model_file_is_refused_in_words_or_runs_and_never_crashes_the_loader(
    tmp_path: Path, whole_gguf: bytes, data: st.DataObject
) -> None:
    content = bytearray(whole_gguf)
    header = content.index(b"output_norm.weight") + 400
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(4, header))
        content[at] = data.draw(st.integers(0, 255)) if data.draw(st.booleans()) else content[at] ^ (1 << at % 8)
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content)
    try:
        checkpoint = open_checkpoint(path)
        tokenizer = open_tokenizer(path)
        assert tokenizer.vocab_size
        tokenizer.decode(tokenizer.encode("a b 1"))
        tokenizer.token_text(tokenizer.eos_token_id)
        for name in checkpoint.config.shapes():
            checkpoint.tensor(name)
    except EngineError as error:
        assert str(error)  # noqa: PT017 - most damage is refused, some does not matter
