"""OpenVINO GenAI, in an environment of its own, behind the thin server of adapters/servers/openvino_server.py.

The library installs in seconds and reads GGUF files directly (Q4_0, Q4_1, Q8_0, F16). It has no server that could be
installed beside it, so ours runs in its environment, with our `adapters` package and nothing else of ours on its path.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta, Struct

import adapters
from adapters.errors import EngineUnavailable
from adapters.launching.knobs import Knob
from adapters.launching.launch import HOST, Installation, LaunchSpec
from adapters.launching.recipes import Environment, Say, num_cores
from adapters.launching.weights import Weights
from adapters.tools.think_text import ReasoningParser
from adapters.tools.tool_calls import ToolParser

if TYPE_CHECKING:
    from adapters.models.model_store import Model

ENGINE = "openvino"
PACKAGES = {
    "openvino-genai": "2026.4.1.0",
    "aiohttp": "3.14.5",
    "jinja2": "3.1.6",
    "msgspec": "0.23.0",
    "uvloop": "0.23.0",
}
SERVER = "adapters.servers.openvino_server"
KNOBS = (
    Knob(option="max_num_seqs", meaning="batch depth", values=(1, 2, 4, 8, 16, 32, 64, 128, 256), default=256),
    Knob(option="max_num_batched_tokens", meaning="chunk size", values=(128, 256, 512, 1024), default=256),
)
OUR_PACKAGE = Path(adapters.__file__).parent


class Options(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What can be set for a launched OpenVINO server; the names are its command line's."""

    threads: Annotated[int, Meta(ge=1)] | None = None  # None: all cores
    kv_cache_gib: Annotated[int, Meta(ge=1)] = 1
    max_model_len: Annotated[int, Meta(ge=1)] = 4096
    max_num_seqs: Annotated[int, Meta(ge=1)] = 256
    max_num_batched_tokens: Annotated[int, Meta(ge=1)] = 256
    prefix_caching: bool = True
    chat_template: str | None = None  # a Jinja file; None: the model's own
    tool_parser: ToolParser = "auto"  # how the model writes tool calls
    reasoning_parser: ReasoningParser = "auto"  # and how it marks what it thinks


def installed(home: Path) -> Installation:
    return Environment(home, ENGINE).installation(PACKAGES)


def install(home: Path, say: Say) -> None:
    env = Environment(home, ENGINE)
    env.create(say)
    say(f"installing OpenVINO GenAI {PACKAGES['openvino-genai']} (about 300 MB on disk)")
    env.pip("install", *(f"{name}=={version}" for name, version in PACKAGES.items()), doing="installing packages")
    say("trying it")
    env.run([str(env.python), "-I", "-c", "import openvino_genai, aiohttp, jinja2, msgspec, uvloop"], "importing it")
    env.finish(PACKAGES, say)


def launch_spec(*, home: Path, model: Model, port: int, options: Mapping[str, Any]) -> LaunchSpec:
    settings = msgspec.convert(dict(options), Options)
    if model.format != "gguf":
        raise EngineUnavailable(
            f"OpenVINO is started on GGUF files only, and {model.name!r} is in Hugging Face layout."
        )
    env = Environment(home, ENGINE)
    path = env.folder / "goodgate"
    argv = [str(env.python), "-P", "-m", SERVER, "--model", str(model.path), "--served-model-name", model.name]
    argv += ["--host", HOST, "--port", str(port), "--threads", str(settings.threads or num_cores())]
    argv += ["--kv-cache-gib", str(settings.kv_cache_gib), "--max-model-len", str(settings.max_model_len)]
    argv += ["--max-num-seqs", str(settings.max_num_seqs)]
    argv += ["--max-num-batched-tokens", str(settings.max_num_batched_tokens)]
    if not settings.prefix_caching:
        argv.append("--no-prefix-caching")
    if settings.chat_template is not None:
        argv += ["--chat-template", settings.chat_template]
    argv += ["--tool-parser", settings.tool_parser, "--reasoning-parser", settings.reasoning_parser]
    return LaunchSpec(
        name=ENGINE,
        argv=tuple(argv),
        env={"PYTHONPATH": str(path)},
        port=port,
        prepare=partial(expose_package, path),
        weights=Weights(source=model.path, served=model.path, precision="as in the GGUF file", relation="same"),
    )


def expose_package(path: Path) -> None:
    """Make a folder that holds our `adapters` package alone, as a link.

    The package's parent folder may be a site-packages, whose other packages would shadow those of the environment.
    """
    path.mkdir(exist_ok=True)
    link = path / OUR_PACKAGE.name
    if link.is_symlink() and link.readlink() == OUR_PACKAGE:
        return
    link.unlink(missing_ok=True)
    with contextlib.suppress(FileExistsError):  # made by another start at this moment
        link.symlink_to(OUR_PACKAGE)
