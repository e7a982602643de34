"""The lab: on the real model, no cache, chunk, batch, preemption or thread count may change a single token.

Every comparison is `==` on token ids, in bf16, against requests that ran alone. Against transformers the engine runs in
fp32, on the same weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from native_engine.attention.base import KVCache, StepBatch
from native_engine.config import EngineConfig
from native_engine.engine import Engine
from native_engine.loading import make_engine, make_model
from native_engine.models.decoder import Decoder
from native_engine.sampling_params import SamplingParams
from native_engine.tokenizer import open_tokenizer
from native_engine.weights import Checkpoint

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(300)]

OUTPUT_TOKENS = 64
CONFIG = EngineConfig(max_model_len=1024, kv_cache_mib=256, max_num_seqs=32)
GREEDY = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, seed=7, max_tokens=32, ignore_eos=True, repetition_penalty=1.1)

STORY = (
    "The lighthouse keeper had counted the ships for forty years. Every evening she climbed the narrow stairs, lit the "
    "lamp and wrote down each sail that passed: its colour, its course, and whether anyone on deck had waved. On the "
    "last night of the year a ship came that she could not describe. "
)
QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "def fibonacci(n):",
    "Explain photosynthesis to a child of seven.",
    "1, 1, 2, 3, 5, 8, 13,",
    "Translate to German: the cat sleeps on the old chair.",
    "List three reasons to learn chess.",
    "Who wrote Hamlet, and when?",
    "A farmer has 17 sheep; all but 9 run away. How many are left?",
    "Once upon a time",
    "Name five rivers of Africa and the countries they flow through.",
    "Why is the sky blue? Answer in two sentences.",
    "¿Dónde está la biblioteca? 😀",
    "SELECT name FROM users WHERE",
)


@pytest.fixture(scope="module")
def prompts(model_path: Path) -> list[list[int]]:
    """Twenty prompts of 5 to about 320 tokens, two of which share a long start."""
    tokenizer = open_tokenizer(model_path)
    chats = [f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n" for question in QUESTIONS]
    longer = [STORY, STORY * 2, STORY * 2 + "Describe it.", STORY * 3, STORY * 4, STORY * 5]
    return [tokenizer.encode(text) for text in (*chats, *longer)]


@pytest.fixture(scope="module")
def model(checkpoint: Checkpoint, kernel_cache: Path) -> Decoder:
    return make_model(checkpoint, CONFIG, kernel_cache=kernel_cache)


@pytest.fixture(scope="module")
def alone(model: Decoder, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy output of every prompt in an engine to itself: no neighbours, no chunks, nothing cached."""
    engine = make_engine(model, with_changes(enable_prefix_caching=False, max_num_batched_tokens=512))
    return [generate(engine, [prompt])[0] for prompt in prompts]


def with_changes(**changes: Any) -> EngineConfig:
    fields = {name: getattr(CONFIG, name) for name in EngineConfig.__slots__}
    return EngineConfig(**(fields | changes))


def generate(
    engine: Engine, prompts: list[list[int]], params: SamplingParams = GREEDY, name: str = "request"
) -> list[list[int]]:
    """All prompts at once, until the engine is idle; its books are checked after every step."""
    outputs: list[list[int]] = [[] for _ in prompts]
    for number, prompt in enumerate(prompts):
        engine.add(f"{name}-{number}", prompt, params)
    while engine.has_work:
        for output in engine.step():
            outputs[int(output.request_id.rpartition("-")[2])] += output.token_ids
        engine.check()
    return outputs


class FromScratch:
    """The model on a whole text at once, with a cache that holds nothing else."""

    def __init__(self, model: Decoder, longest: int = 512) -> None:
        self._model = model
        self._cache = KVCache.allocate(model.config, longest // 32, 32, model.dtype)
        self._table = torch.arange(longest // 32, dtype=torch.int32).flip(0)[None].contiguous()

    @torch.inference_mode()
    def logits(self, token_ids: list[int], rows: range) -> torch.Tensor:
        positions = torch.arange(len(token_ids), dtype=torch.int32)
        slots = (self._table[0][positions // 32] * 32 + positions % 32).int()
        batch = StepBatch(positions, slots, torch.zeros_like(positions), self._table)
        result = self._model.forward(torch.tensor(token_ids), batch, self._cache, torch.tensor(rows))
        assert result is not None
        return result.float()


def test_every_token_is_what_a_full_recomputation_would_choose(
    model: Decoder, prompts: list[list[int]], alone: list[list[int]]
) -> None:
    """One pass over prompt and output computes each position anew; its choice must be the token that came next."""
    scratch = FromScratch(model)
    for prompt, output in zip(prompts, alone, strict=True):
        rows = range(len(prompt) - 1, len(prompt) + OUTPUT_TOKENS - 1)
        assert scratch.logits(prompt + output, rows).argmax(-1).tolist() == output


def test_generating_with_no_cache_at_all_gives_the_same_text(
    model: Decoder, prompts: list[list[int]], alone: list[list[int]]
) -> None:
    """The literal loop, prompt and output computed from the start for every token, on three of the prompts."""
    scratch = FromScratch(model)
    for number in (0, 4, 12):
        tokens = list(prompts[number])
        for _ in range(OUTPUT_TOKENS):
            tokens.append(int(scratch.logits(tokens, range(len(tokens) - 1, len(tokens))).argmax()))
        assert tokens[len(prompts[number]) :] == alone[number]


def test_a_batch_answers_as_its_requests_do_alone(
    model: Decoder, prompts: list[list[int]], alone: list[list[int]]
) -> None:
    engine = make_engine(model, with_changes(enable_prefix_caching=False))
    assert generate(engine, prompts) == alone


def test_a_cached_prefix_changes_no_token(model: Decoder, prompts: list[list[int]], alone: list[list[int]]) -> None:
    engine = make_engine(model, CONFIG)
    assert generate(engine, prompts, name="cold") == alone
    hits_of_cold_run = engine.stats().prefix_hits
    assert generate(engine, prompts, name="warm") == alone
    assert engine.stats().prefix_hits - hits_of_cold_run > sum(map(len, prompts)) // 2


@pytest.mark.parametrize("budget", [32, 50, 100])
def test_prompts_in_chunks_answer_as_whole_prompts_do(
    model: Decoder, prompts: list[list[int]], alone: list[list[int]], budget: int
) -> None:
    """Budgets that cut prompts inside, at, and across blocks; long prompts only, the others fit anyway."""
    engine = make_engine(
        model, with_changes(enable_prefix_caching=False, max_num_batched_tokens=budget, max_num_seqs=8)
    )
    assert generate(engine, prompts[-4:]) == alone[-4:]


@pytest.mark.parametrize("caching", [False, True])
def test_preempted_requests_end_with_the_same_text(
    model: Decoder, prompts: list[list[int]], alone: list[list[int]], caching: bool
) -> None:
    engine = make_engine(model, with_changes(kv_cache_mib=16, enable_prefix_caching=caching))
    assert generate(engine, prompts) == alone
    assert engine.stats().num_preemptions > 3


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_the_number_of_threads_changes_no_token(
    model: Decoder, prompts: list[list[int]], alone: list[list[int]]
) -> None:
    engine = make_engine(model, with_changes(num_threads=1))
    assert generate(engine, prompts[:8]) == alone[:8]
    assert torch.get_num_threads() == 1


def test_a_seeded_request_samples_the_same_text_alone_batched_and_preempted(
    model: Decoder, prompts: list[list[int]]
) -> None:
    solo = make_engine(model, CONFIG)
    expected = [generate(solo, [prompt], SEEDED)[0] for prompt in prompts[:4]]
    assert generate(make_engine(model, CONFIG), prompts[:4], SEEDED) == expected
    tiny = make_engine(model, with_changes(kv_cache_mib=5))
    assert generate(tiny, prompts[:4], SEEDED) == expected
    assert tiny.stats().num_preemptions > 0


# --- against transformers


@pytest.fixture(scope="module")
def oracle(checkpoint: Checkpoint) -> Any:
    """transformers' Llama in fp32 with the weights of our file."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = checkpoint.config
    reference = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            rms_norm_eps=config.rms_norm_eps,
            max_position_embeddings=config.max_model_len,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
            tie_word_embeddings=config.tied_embeddings,
        )
    )
    weights = {name: checkpoint.tensor(name) for name in config.shapes()}
    missing = reference.load_state_dict(weights, strict=False)
    assert missing.missing_keys in ([], ["lm_head.weight"])
    assert not missing.unexpected_keys
    return reference.eval()


def test_fp32_generates_what_transformers_generates(
    checkpoint: Checkpoint, kernel_cache: Path, prompts: list[list[int]], oracle: Any
) -> None:
    """All twenty prompts in one batch of ours; transformers must choose each of our tokens at its position."""
    config = with_changes(dtype="float32")
    engine = make_engine(make_model(checkpoint, config, kernel_cache=kernel_cache), config)
    for prompt, output in zip(prompts, generate(engine, prompts), strict=True):
        with torch.inference_mode():
            logits = oracle(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == output


def test_fp32_logits_are_those_of_transformers(
    checkpoint: Checkpoint, kernel_cache: Path, prompts: list[list[int]], oracle: Any
) -> None:
    scratch = FromScratch(make_model(checkpoint, with_changes(dtype="float32"), kernel_cache=kernel_cache))
    prompt = prompts[-1]
    with torch.inference_mode():
        expected = oracle(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(scratch.logits(prompt, range(len(prompt))), expected, atol=2e-3, rtol=1e-4)
