"""Other load generators are told the same and read under their own words; ours is one of them, over real sockets."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from arena.load import scripted_engine as scripted
from arena.outside.comparison import CASES, OURS, Bench, against_engine, against_truth
from arena.outside.definitions import DEFINITIONS
from arena.outside.tools import AIPERF, GUIDELLM, TOOLS, VLLM_BENCH, Claims, Load, Tool, ToolFailed

LOAD = Load(
    url="http://127.0.0.1:1",
    model="m",
    tokenizer=Path("/models/m"),
    prompts=["one", "two"],
    rate_rps=5.0,
    output_tokens=16,
)
SAYS = {"requests": 2, "ttft_p50_ms": 1.0, "ttft_p99_ms": 2.0, "tpot_p50_ms": 3.0, "itl_p50_ms": 4.0}


def left(name: str, folder: Path) -> None:
    """The parts that are read of what each tool left of a run."""
    percentiles = {"median": 1.0, "mean": 1.5, "percentiles": {"p99": 2.0}}
    row = {"avg": 1.5, "p50": 1.0, "p99": 2.0}
    vllm = {f"{kind}_{metric}_ms": 1.0 for kind in ("median", "p99", "mean") for metric in ("ttft", "tpot", "itl")}
    metrics = {
        "request_totals": {"successful": 2},
        **{f"{name}_ms": {"successful": percentiles} for name in ("time_to_first_token", "time_per_output_token")},
        "inter_token_latency_ms": {"successful": percentiles},
        "output_tokens_per_second": {"successful": {"mean": 9.0}},
    }
    aiperf = {
        "request_count": {"avg": 2.0},
        **dict.fromkeys(("time_to_first_token", "inter_token_latency", "inter_chunk_latency"), row),
        "output_token_throughput": {"avg": 9.0},
    }
    files = {
        "vLLM bench": ("result.json", {"completed": 2, "output_throughput": 9.0, **vllm}),
        "GuideLLM": ("result.json", {"benchmarks": [{"metrics": metrics}]}),
        "AIPerf": ("profile_export_aiperf.json", aiperf),
    }
    file, content = files[name]
    (folder / file).write_text(json.dumps(content))


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.name)
def test_what_a_tool_left_is_read_under_its_own_words(tool: Tool, tmp_path: Path) -> None:
    left(tool.name, tmp_path)
    claims = tool.read(tmp_path)
    assert (claims.requests, claims.ttft_p50_ms, claims.tpot_p50_ms, claims.output_tokens_per_s) == (2, 1.0, 1.0, 9.0)
    assert tool.name in DEFINITIONS


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.name)
def test_every_tool_is_told_the_same(tool: Tool, tmp_path: Path) -> None:
    command = [str(word) for word in tool.command(Path("/env/bin/python"), LOAD, tmp_path)]
    told = " ".join(command) + "".join(path.read_text() for path in tmp_path.iterdir())
    assert command[0] == "/env/bin/python"
    for word in ("http://127.0.0.1:1", "/models/m", "5.0", "16", "ignore" if tool is not GUIDELLM else "output_tokens"):
        assert word in told
    lines = (tmp_path / "prompts.jsonl").read_text().splitlines()
    assert [json.loads(line).get("prompt") or json.loads(line)["text"] for line in lines] == ["one", "two"]
    constant = {VLLM_BENCH.name: "--burstiness inf", GUIDELLM.name: '"kind": "constant"', AIPERF.name: "constant"}
    assert constant[tool.name] in told


def stand_in(
    code: str, read: Callable[[Path], Claims] = lambda folder: Claims(**json.loads((folder / "r").read_text()))
) -> Tool:
    """A tool that is this Python with a line of code."""

    def command(python: Path, load: Load, folder: Path) -> Sequence[str]:
        return [str(python), "-c", code]

    return Tool(name="vLLM bench", version="0", python=sys.executable, packages=(), command=command, read=read)


def test_a_tool_that_fails_is_told_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(ToolFailed, match=r"status 3: no such model"):
        stand_in("import sys; sys.stderr.write('no such model'); sys.exit(3)").measure(tmp_path, LOAD, tmp_path / "a")
    with pytest.raises(ToolFailed, match="left no result that can be read"):
        stand_in("pass").measure(tmp_path, LOAD, tmp_path / "b")
    claims = {**SAYS, "requests": 1, "itl_mean_ms": 4.0, "output_tokens_per_s": 5.0}
    with pytest.raises(ToolFailed, match="got 1 of 2 answers"):
        stand_in(f"import json; json.dump({claims!r}, open('r', 'w'))").measure(tmp_path, LOAD, tmp_path / "c")


def test_a_tool_runs_without_a_network_and_without_our_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    code = "import os, json; json.dump([os.environ.get('PYTHONPATH'), os.environ['HF_HUB_OFFLINE']], open('r', 'w'))"
    seen: list[object] = []

    def read(folder: Path) -> Claims:
        seen.extend(json.loads((folder / "r").read_text()))
        return Claims(**SAYS, itl_mean_ms=None, output_tokens_per_s=None)

    stand_in(code, read).measure(tmp_path, LOAD, tmp_path / "a")
    assert seen == [None, "1"]


def test_a_tool_that_is_part_of_an_engine_is_named_with_the_command_that_installs_it(tmp_path: Path) -> None:
    with pytest.raises(ToolFailed, match="run `goodgate engines install vllm` first"):
        VLLM_BENCH.install(tmp_path, print)
    replace(VLLM_BENCH, python=sys.executable).install(tmp_path, print)  # it is there: nothing to do


def bench(folder: Path, told: list[str]) -> Bench:
    return Bench(home=folder, folder=folder / "runs", tokenizer=folder, rounds=2, requests=8, say=told.append)


def test_our_figures_are_the_truth_in_every_case_and_tools_take_turns(tmp_path: Path) -> None:
    """The stand-in says 1 to everything: what is true does not depend on what a tool claims."""
    (tmp_path / "runs").mkdir()
    told: list[str] = []
    claims = {**SAYS, "requests": 8, "itl_mean_ms": 4.0, "output_tokens_per_s": 5.0}
    code = f"import json; json.dump({claims!r}, open('r', 'w'))"
    with scripted.running() as engine:
        for case in CASES:
            ours = against_truth(engine, case, [], bench(tmp_path, told))[OURS]
            for run in ours:
                assert run.claims.requests == len(run.answers) == 8
                assert run.claims.tpot_p50_ms == pytest.approx(10 if case.tokens == 32 else 20, abs=1.5)
                assert run.claims.ttft_p50_ms == pytest.approx(200, abs=20)
                assert run.claims.output_tokens_per_s == pytest.approx(8 * case.tokens / 1.2, rel=0.15)
        runs = against_engine(
            engine.url, "scripted", [stand_in(code)], bench(tmp_path, told), rate_rps=10, tokens=CASES[-1].tokens
        )
    assert [line.split(": ")[-1].split(",")[0] for line in told[-4:]] == [OURS, "vLLM bench", "vLLM bench", OURS]
    assert [run.claims.ttft_p50_ms for run in runs["vLLM bench"]] == [1.0, 1.0]
    assert len(runs["vLLM bench"][0].answers) == 16, "ours of both rounds stand for the truth"
