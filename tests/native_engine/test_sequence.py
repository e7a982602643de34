"""A sequence answers questions about itself, settings refuse what would stall a step, both without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from native_engine.config import EngineConfig, SchedulerConfig
from native_engine.errors import InvalidParams
from native_engine.sampling_params import SamplingParams
from native_engine.sequence import Sequence, Status


def test_output_is_what_follows_the_prompt_and_the_prompt_stays_as_it_was() -> None:
    sequence = Sequence("a", [5, 6, 7], SamplingParams(), seed=1)
    sequence.token_ids += [8, 9]
    assert sequence.prompt_ids == [5, 6, 7]
    assert sequence.output_ids == [8, 9]
    assert (sequence.num_prompt_tokens, sequence.num_output_tokens, sequence.num_tokens) == (3, 2, 5)
    sequence.num_computed_tokens = 4
    assert sequence.num_uncomputed_tokens == 1


def test_a_sequence_without_output_has_an_empty_output_and_not_its_prompt() -> None:
    assert Sequence("a", [5, 6, 7], SamplingParams(), seed=1).output_ids == []


def test_finish_reasons_exist_for_finished_states_only() -> None:
    assert {status: status.finish_reason for status in Status} == {
        Status.WAITING: None,
        Status.RUNNING: None,
        Status.FINISHED_STOP: "stop",
        Status.FINISHED_LENGTH: "length",
        Status.ABORTED: "abort",
        Status.FAILED: "error",
        Status.LATE: "late",
    }
    assert [status for status in Status if not status.is_finished] == [Status.WAITING, Status.RUNNING]


def test_a_step_too_small_for_every_decode_is_refused_with_the_settings() -> None:
    with pytest.raises(InvalidParams, match=r"max_num_batched_tokens \(8\) must be at least max_num_seqs \(9\)"):
        EngineConfig(max_num_seqs=9, max_num_batched_tokens=8)
    with pytest.raises(InvalidParams, match="must be at least max_num_seqs"):
        SchedulerConfig(
            max_model_len=9, vocab_size=9, eos_token_ids=frozenset(), max_num_seqs=9, max_num_batched_tokens=8
        )


@pytest.mark.parametrize("field", ["block_size", "kv_cache_mib", "max_num_seqs", "max_model_len", "num_threads"])
def test_settings_below_one_are_refused(field: str) -> None:
    with pytest.raises(InvalidParams, match=f"^{field} must be at least 1, not 0"):
        EngineConfig(**{field: 0})


def test_an_unknown_dtype_is_refused_with_the_known_ones_named() -> None:
    with pytest.raises(InvalidParams, match="bfloat16, float32"):
        EngineConfig(dtype="int3")  # type: ignore[arg-type]


@pytest.mark.parametrize(("wanted", "resolved"), [(None, 8192), (100, 100), (10_000, 8192)])
def test_the_context_is_the_shorter_of_the_models_and_the_wanted_one(wanted: int | None, resolved: int) -> None:
    config = EngineConfig(max_model_len=wanted)
    assert config.for_scheduler(max_model_len=8192, vocab_size=9, eos_token_ids=[2]).max_model_len == resolved


def test_the_deciding_half_loads_without_torch_and_numpy() -> None:
    script = "import sys, native_engine.engine; print({'torch', 'numpy', 'aiohttp'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "set()"
