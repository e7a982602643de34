"""Which tests `make test` runs alone, after all the others have run two at a time."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent

# They measure time, or compute with every core: a neighbour would change what they find, or they what it finds.
ALONE = (
    "adapters/test_arguments_schema.py",
    "adapters/test_chat_template.py",
    "adapters/test_sse.py",
    "adapters/test_tool_text.py",
    "arena/judging/test_claims.py",
    "arena/load",
    "arena/outside",
    "arena/race",
    "arena/records/test_crash.py",
    "arena/test_arena_cli.py",
    "arena/test_faults_of_pauses.py",
    "e2e/test_goodput_routing.py",
    "gateway/attempts/test_killed_engines.py",
    "gateway/commands/test_bench.py",
    "gateway/records/test_prefixes.py",
    "gateway/records/test_spans.py",
    "gateway/replicas/test_failing_engines.py",
    "gateway/test_native_aborts.py",
    "gateway/test_native_failures.py",
    "gateway/test_native_output.py",
    "gateway/test_native_tools.py",
    "gateway/test_overload.py",
    "gateway/test_reported_faults.py",
    "gateway/test_scorecard.py",
    "gateway/test_slow_clients.py",
    "live",
    "native_engine/test_async_engine.py",
    "native_engine/test_differential.py",
    "native_engine/test_exactness.py",
    "native_engine/test_families.py",
    "native_engine/test_forks.py",
    "native_engine/test_int8_cache.py",
    "native_engine/test_kernels.py",
    "native_engine/test_memory.py",
    "native_engine/test_sampler.py",
    "native_engine/test_structured.py",
    "native_engine/test_weights.py",
    "test_agent_loop.py",
)

if gone := [name for name in ALONE if not (HERE / name).exists()]:
    raise pytest.UsageError(f"ALONE in tests/conftest.py names what is not there: {', '.join(gone)}")


def pytest_itemcollected(item: pytest.Item) -> None:
    if any(item.path.is_relative_to(HERE / name) for name in ALONE):
        item.add_marker(pytest.mark.alone)
