"""Each family beside transformers, on small random models; and no cache, chunk or batch changes a token of any.

The folders are written by transformers itself: the reader meets its `config.json` and its tensors. Windows are much
shorter than the prompts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from native_engine.blocks import BlockPool
from native_engine.config import Dtype, EngineConfig
from native_engine.engine import Engine
from native_engine.export import export_hf
from native_engine.loading import make_engine, make_model
from native_engine.models.config import ModelConfig, UnsupportedModel
from native_engine.models.families import FAMILIES, to_hugging_face
from native_engine.sampling_params import SamplingParams
from native_engine.weights import open_checkpoint
from tests.native_engine.gguf_files import write_gguf
from tests.native_engine.test_exactness import FromScratch, generate
from tests.native_engine.tiny_llama import EOS, VOCAB_SIZE, byte_tokenizer

WINDOW = 24
LONG = 130
SIZES = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None,
}  # fmt: skip
LOCAL, GLOBAL = "sliding_attention", "full_attention"
GEMMA = {
    "num_hidden_layers": 4,
    "layer_types": [LOCAL, LOCAL, GLOBAL, LOCAL],
    "sliding_window": WINDOW,
    "query_pre_attn_scalar": 20,
    "num_key_value_heads": 1,
}


def gemma_ropes(**wide: Any) -> dict[str, Any]:
    return {
        GLOBAL: {"rope_type": "default", "rope_theta": 1e6, **wide},
        LOCAL: {"rope_type": "default", "rope_theta": 1e4},
    }


def rope(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **fields}}


FAMILY_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-with-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "mistral-without-a-window": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-with-windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 48}),
    "gemma3": ("Gemma3Text", GEMMA | {"rope_parameters": gemma_ropes()}),
}
ROPE_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("Llama", rope("linear", factor=4.0)),
    "llama3": (
        "Llama",
        rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
    ),
    "yarn": ("Llama", rope("yarn", factor=4.0, original_max_position_embeddings=128)),
    "yarn-with-all-fields": (
        "Qwen3",
        rope(
            "yarn",
            factor=3.0,
            original_max_position_embeddings=64,
            attention_factor=0.8,
            beta_fast=16.0,
            beta_slow=2.0,
            truncate=False,
        ),
    ),
    "gemma3-linear": ("Gemma3Text", GEMMA | {"rope_parameters": gemma_ropes(rope_type="linear", factor=8.0)}),
}
CASES = FAMILY_CASES | ROPE_CASES


def write_model(folder: Path, case: str) -> Any:
    """A random model of transformers, saved with a tokenizer. Weights are large: every token of the input matters."""
    import transformers

    name, changes = CASES[case]
    config = getattr(transformers, f"{name}Config")(**(SIZES | changes))
    model = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config).eval()
    source = torch.Generator().manual_seed(len(case))
    with torch.no_grad():
        for key, value in model.named_parameters():
            if key.endswith("norm.weight"):
                value.copy_(torch.rand(value.shape, generator=source) + (-0.5 if name == "Gemma3Text" else 0.5))
            else:
                scale = 0.3 if value.dim() == 1 else 1.5 / value.shape[1] ** 0.5 if "embed" not in key else 0.5
                value.copy_(torch.randn(value.shape, generator=source) * scale)
    model.save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS}))
    return model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """transformers' models by case, made when they are asked for."""
    return {}


@pytest.fixture
def made(models: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    def make(case: str) -> tuple[Path, Any]:
        if case not in models:
            folder = tmp_path_factory.mktemp(case)
            models[case] = folder, write_model(folder, case)
        found: tuple[Path, Any] = models[case]
        return found

    return make


def prompt(length: int, seed: int = 1) -> list[int]:
    ids: list[int] = torch.randint(3, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


def engine_config(dtype: Dtype, **changes: Any) -> EngineConfig:
    fields: dict[str, Any] = {"dtype": dtype, "block_size": 16, "kv_cache_mib": 4, "max_model_len": 400}
    return EngineConfig(**(fields | changes))


@pytest.mark.parametrize("case", CASES)
def test_a_family_computes_what_transformers_computes(made: Any, kernel_cache: Path, case: str) -> None:
    folder, oracle = made(case)
    config = engine_config("float32")
    model = make_model(open_checkpoint(folder), config, kernel_cache=kernel_cache)
    text = prompt(LONG)
    with torch.inference_mode():
        expected = oracle(torch.tensor([text])).logits[0]
    block_32 = make_model(open_checkpoint(folder), engine_config("float32", block_size=32), kernel_cache=kernel_cache)
    logits = FromScratch(block_32, 256).logits(text, range(LONG))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)

    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    (output,) = generate(make_engine(model, config), [text], params)
    with torch.inference_mode():
        choices = oracle(torch.tensor([text + output])).logits[0, LONG - 1 : -1].argmax(-1)
    assert choices.tolist() == output


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("case", FAMILY_CASES)
def test_a_family_answers_alike_cached_chunked_batched_and_preempted(
    made: Any, kernel_cache: Path, case: str, dtype: Dtype
) -> None:
    """Token for token as its requests do alone, each prompt in one piece and with nothing cached."""
    folder, _ = made(case)
    model = make_model(open_checkpoint(folder), engine_config(dtype), kernel_cache=kernel_cache)
    stem = prompt(70, seed=2)
    prompts = [prompt(LONG), prompt(5, seed=3), stem, stem + prompt(40, seed=4), prompt(33, seed=5)]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)

    def engine(**changes: Any) -> Engine:
        return make_engine(model, engine_config(dtype, **changes))

    lone = [generate(engine(enable_prefix_caching=False), [each], params)[0] for each in prompts]
    assert len({tuple(each) for each in lone}) == len(prompts)
    assert generate(engine(enable_prefix_caching=False), prompts, params) == lone, "batched"
    assert generate(engine(max_num_seqs=8, max_num_batched_tokens=17), prompts, params) == lone, "chunked"
    warm = engine()
    assert generate(warm, prompts, params, name="cold") == lone
    assert generate(warm, prompts, params, name="warm") == lone, "cached"
    holds_all = model.config.widest_window is None  # else what lies behind the window of every layer is given back
    assert warm.stats().prefix_hits > (200 if holds_all else 0)
    crowded = engine()
    crowded = Engine(crowded._config, BlockPool(18, 16), crowded._runner)
    assert generate(crowded, prompts, params) == lone, "preempted"
    assert crowded.stats().num_preemptions > 0 or not holds_all


def test_a_row_sees_its_window_and_nothing_before_it(made: Any, kernel_cache: Path) -> None:
    """Three layers of 24: the last logits follow what lies up to 69 positions back, and nothing further."""
    folder, _ = made("mistral")
    model = make_model(open_checkpoint(folder), engine_config("float32", block_size=32), kernel_cache=kernel_cache)
    text = prompt(LONG)

    def last(changed: int | None) -> torch.Tensor:
        tokens = [(token + 1) % VOCAB_SIZE if at == changed else token for at, token in enumerate(text)]
        return FromScratch(model, 256).logits(tokens, range(LONG - 1, LONG))

    reach = 3 * (WINDOW - 1)
    assert torch.equal(last(LONG - 2 - reach), last(None))
    assert not torch.equal(last(LONG - 1 - reach), last(None))


@pytest.mark.parametrize("case", CASES)
def test_an_export_of_a_family_is_the_same_model_again(made: Any, tmp_path: Path, case: str) -> None:
    folder, oracle = made(case)
    export_hf(folder, tmp_path / "out")
    before, after = open_checkpoint(folder), open_checkpoint(tmp_path / "out")
    assert after.config == before.config

    from transformers import AutoModelForCausalLM

    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(again) is type(oracle)
    for name, value in oracle.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name].float(), value, atol=1e-3, rtol=1e-2)


GGUF_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-with-biases": ("llama", {}),
    "linear": ("llama", {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
    "yarn": (
        "llama",
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128},
    ),
    "mistral": ("llama", {"attention.sliding_window": WINDOW}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "gemma3": ("gemma3", {"attention.sliding_window": WINDOW, "attention.sliding_window_pattern": 3}),
}


@pytest.mark.parametrize("case", GGUF_CASES)
def test_a_gguf_file_of_a_family_is_the_model_of_the_folder(made: Any, tmp_path: Path, case: str) -> None:
    folder, _ = made(case)
    of_folder = open_checkpoint(folder)
    weights = {name: of_folder.tensor(name) for name in of_folder.config.shapes()}
    architecture, fields = GGUF_CASES[case]
    tokens = {"ggml.tokens": [f"t{number}" for number in range(VOCAB_SIZE)]}
    path = write_gguf(
        tmp_path / "m.gguf", of_folder.config, weights, architecture=architecture, tokenizer=tokens, **fields
    )
    of_file = open_checkpoint(path)
    for name, value in weights.items():
        assert torch.equal(of_file.tensor(name), value), name
    # GGUF has no key for the scale of the scores: it is that of the family
    differing = ("rms_norm_eps", "bos_token_id", "eos_token_ids", "query_scale", "local_layers")
    for field in ModelConfig.__slots__:
        if field not in differing:
            assert getattr(of_file.config, field) == getattr(of_folder.config, field), field
    layers = range(of_folder.config.num_layers)
    assert [of_file.config.window(layer) for layer in layers] == [of_folder.config.window(layer) for layer in layers]


def test_a_gguf_file_brings_llama_3_s_rope_as_divisors(made: Any, tmp_path: Path) -> None:
    folder, _ = made("llama3")
    of_folder = open_checkpoint(folder)
    config = of_folder.config
    plain = 1.0 / config.rope.theta ** (torch.arange(0, config.head_dim, 2).float() / config.head_dim)
    weights = {name: of_folder.tensor(name) for name in config.shapes()}
    divisors = {"rope_freqs.weight": plain / config.rope.inv_freq(config.head_dim)}
    path = write_gguf(tmp_path / "m.gguf", config, weights | divisors)
    of_file = open_checkpoint(path)
    torch.testing.assert_close(of_file.config.rope.inv_freq(32), config.rope.inv_freq(32), rtol=1e-6, atol=0)
    with pytest.raises(UnsupportedModel, match=r"no form in config\.json"):
        to_hugging_face(of_file.config)


def test_every_family_is_in_the_cases() -> None:
    tried = {name.removesuffix("Text").lower() for name, _ in FAMILY_CASES.values()}
    assert tried == FAMILIES.keys()
