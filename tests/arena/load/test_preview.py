"""`goodgate arena preview`: what it says is what the plan holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from arena.commands.cli import app
from arena.commands.preview import bars
from arena.load.plan import CellPlan
from arena.load.preview import BLOCK_WORDS, preview
from arena.load.workload import CellKey
from arena.race.config import load_scenario
from arena.race.planned import plan_cell

SCENARIO = """
name: previewed
model: m
cache: warm
workload:
  kind: synthetic
  prefix: {groups: 1, tokens: 160}
  prompt: {kind: fixed, tokens: 40}
  output: {kind: uniform, low: 4, high: 8}
slo: {ttft_ms: 500, tpot_ms: 50}
cell: {warmup_s: 2, duration_s: 20, min_requests: 1}
"""


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "previewed.yaml"
    path.write_text(SCENARIO)
    return path


def plan_of(path: Path, rate_rps: float = 5.0) -> CellPlan:
    loaded = load_scenario(str(path), quick=False)
    key = CellKey(0, loaded.scenario.settings.nearest_rung(rate_rps), 0)
    return plan_cell(loaded.scenario, loaded.material, key, cell_id="c", rate_rps=rate_rps)


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["preview", *arguments])
    return result.exit_code, result.output


def test_the_figures_are_those_of_the_plan(scenario: Path) -> None:
    plan, (code, output) = plan_of(scenario), run(str(scenario), "--rate", "5", "--json")
    seen = json.loads(output)
    assert code == 0
    assert seen["sha256"] == plan.sha256
    assert seen["measured"] == len(plan.measured)
    assert seen["warmup"] + seen["measured"] + seen["cooldown"] == len(plan.requests) == sum(seen["per_second"])
    assert seen["window_rps"] == pytest.approx(len(plan.measured) / 20)
    assert seen["prompt_tokens"] == {"mean": 200.0, "p50": 200, "p95": 200, "most": 200}
    assert seen["output_tokens"]["most"] <= 8


def test_what_prompts_share_is_counted_in_whole_blocks(scenario: Path) -> None:
    """161 words with the role in front, so ten blocks of 16, of about 210 in each prompt but the first."""
    plan = plan_of(scenario)
    words = sum(len(request.body.split()) for request in plan.requests) / len(plan.requests)
    expected = 10 * BLOCK_WORDS / words * (1 - 1 / len(plan.requests))
    assert preview(plan).shared == pytest.approx(expected, rel=0.03)


def test_a_person_reads_arrivals_lengths_and_what_is_shared(scenario: Path) -> None:
    code, output = run(str(scenario), "--rate", "5")
    assert code == 0
    for words in ("Poisson, open loop", "mean 200 tokens", "caches warm", "5 a second asked for"):
        assert words in " ".join(output.split())


def test_the_speed_of_a_replay_is_told() -> None:
    code, output = run("trace", "--rate", "4")
    assert code == 0
    assert "times as fast as it was recorded" in " ".join(output.split())
    assert "are cut to 512 tokens" in output


def test_one_request_is_printed_as_it_would_be_sent(scenario: Path) -> None:
    code, output = run(str(scenario), "--rate", "5", "--request", "3")
    assert code == 0
    assert json.loads(output) == json.loads(plan_of(scenario).requests[3].body)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--request", "100000"], "this cell has"),
        (["--rate", "0"], "--rate"),
        (["--rate", "nan"], "--rate"),
    ],
)
def test_misuse_is_refused_in_a_sentence(scenario: Path, arguments: list[str], told: str) -> None:
    code, output = run(str(scenario), *arguments)
    assert code == 2
    assert told in output
    assert run("no-such-scenario")[0] == 2


def test_a_closed_loop_has_no_times_to_show(scenario: Path) -> None:
    scenario.write_text(SCENARIO + "load: {kind: closed, concurrency: 4}\n")
    code, output = run(str(scenario))
    assert code == 2
    assert "is a closed loop" in output
    assert run(str(scenario), "--request", "0")[0] == 0


def test_bars_are_as_high_as_seconds_are_busy() -> None:
    assert bars((0, 7, 14)) == "▁▄█  (a bar is 1 s, the highest 14)"
    assert bars((0,)) == "▁  (a bar is 1 s, the highest 1)"
    assert bars((1,) * 90) == "█" * 45 + "  (a bar is 2 s, the highest 2)"
