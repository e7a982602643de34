"""The arrows between the packages, checked on every import statement, those inside functions too, and once at run time.

R1 native_engine imports nothing of ours and no web library; its deciding half imports no torch. Its lab stands above
   it: two modules of that draw with the arena and find models, and nothing of the engine imports it.
R2 only adapters/native.py and adapters/models/model_files.py import native_engine, and only inside a function.
R3 engine modules in adapters/ never import each other.
R4 gateway imports no concrete engine, no torch, no litellm.
R5 arena reaches engines over HTTP; only its load-generator processes import locust or gevent.
R7 the environment is read in cli, config, environment and __main__ modules only.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("gateway", "adapters", "native_engine", "arena")
ENGINES = {
    "native", "vllm", "llama_cpp", "openvino", "fake", "goodgate_peer", "sglang", "tgi", "tensorrt_llm",
    "triton_server", "openai_compatible", "litellm_cloud",
}  # fmt: skip
WEB = {"aiohttp", "httpx", "requests", "flask", "fastapi", "uvicorn", "starlette"}
TORCH_FREE = {"config", "sampling_params", "sequence", "step", "blocks", "scheduler", "errors", "engine", "capacity"}
# Programs of their own, run by path: supervise.py hands its environment on to the engine that it starts, and
# litellm_worker.py writes the switches there that litellm reads.
READS_ENVIRONMENT = {"cli", "config", "environment", "__main__", "supervise", "litellm_worker"}
LOAD_PROCESSES = {
    f"arena/load/{module}.py"
    for module in (
        "loadgen_process", "load_master", "load_worker", "locust_shell", "paced_cell", "pacers", "sleeper", "web_view",
    )
}  # fmt: skip
MEETS_NATIVE_ENGINE = ("adapters/native.py", "adapters/models/model_files.py")
LAB = "native_engine/lab/"
LAB_MAY = {
    f"{LAB}cli.py": ("adapters.config", "adapters.models", "arena.race.config"),
    f"{LAB}picture.py": ("arena.reports",),
}
ARENA_MAY = {
    "launching.launch", "launching.knobs", "wire.sse", "wire.unreachable", "models.model_store", "models.model_files",
    "registry", "config", "errors", "base", "types", "probing.matrix", "marked_page", "yaml_text",
    "option_errors",
}  # fmt: skip


class Import(NamedTuple):
    file: str  # relative to the repository, as in "gateway/app.py"
    line: int
    target: str
    inside_function: bool

    @property
    def package(self) -> str:
        return self.file.split("/")[0]

    @property
    def module(self) -> str:
        return Path(self.file).stem


def read(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def sources() -> Iterator[Path]:
    for package in PACKAGES:
        yield from sorted((ROOT / package).rglob("*.py"))


def imports(path: Path) -> Iterator[Import]:
    tree = read(path)
    deferred = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
    }
    only_for_types = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    file = path.relative_to(ROOT).as_posix()
    for node in ast.walk(tree):
        if id(node) in only_for_types:
            continue
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, (
                f"{file}:{node.lineno} uses a relative import; the arrows are easier to see absolute"
            )
            targets = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for target in targets:
            yield Import(file, node.lineno, target, id(node) in deferred)


def faults_of(each: Import) -> Iterator[str]:
    top, _, rest = each.target.partition(".")
    inner = rest.split(".")[0]
    if each.package == "native_engine":
        if top in PACKAGES and top != "native_engine" and not of_the_lab(each):
            yield "R1: native_engine imports nothing of ours, but for two modules of its lab"
        if each.target.startswith("native_engine.lab") and not each.file.startswith(LAB):
            yield "R1: nothing of the engine imports its lab"
        if top in WEB:
            yield "R1: native_engine imports no web library"
        if top == "torch" and each.module in TORCH_FREE and each.file.count("/") == 1:
            yield "R1: the deciding half of native_engine imports no torch"
    elif top == "native_engine" and (each.file not in MEETS_NATIVE_ENGINE or not each.inside_function):
        yield f"R2: only {' and '.join(MEETS_NATIVE_ENGINE)} import native_engine, inside a function"
    if each.package == "adapters" and each.module in ENGINES and top == "adapters" and inner in ENGINES - {each.module}:
        yield "R3: engine modules never import each other"
    if each.package == "gateway":
        if top == "adapters" and inner in ENGINES:
            yield "R4: gateway imports no concrete engine"
        if top in {"torch", "litellm", "arena"}:
            yield f"R4: gateway never imports {top}"
    if each.package == "arena":
        if top == "adapters" and not any(f"{rest}.".startswith(f"{room}.") for room in ARENA_MAY):
            yield "R5: arena meets every engine over HTTP"
        if top == "gateway":
            yield "R5: arena meets the gateway over HTTP"
    if top in {"locust", "gevent", "geventhttpclient"} and each.file not in LOAD_PROCESSES:
        yield "R5: only load-generator processes import locust or gevent"
    if top == "litellm" and (each.file != "adapters/servers/litellm_worker.py" or not each.inside_function):
        yield "only adapters/servers/litellm_worker.py, a process of its own, imports litellm, inside a function"
    if top == "adapters" and each.package not in {"adapters", "gateway", "arena"} and not of_the_lab(each):
        yield "nothing below adapters imports it"
    if top in {"gateway", "arena"} and each.package == "adapters":
        yield "adapters never import the rooms above them"
    if top == "tests":
        yield "nothing imports tests"


def of_the_lab(each: Import) -> bool:
    return any(f"{each.target}.".startswith(f"{room}.") for room in LAB_MAY.get(each.file, ()))


def test_every_import_follows_the_arrows() -> None:
    faults = [
        f"{i.file}:{i.line} imports {i.target} ({why})"
        for path in sources()
        for i in imports(path)
        for why in faults_of(i)
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    "forbidden",
    [
        Import("native_engine/runner.py", 1, "adapters.types", False),
        Import("native_engine/lab/prefix.py", 1, "arena.reports.svg", False),
        Import("native_engine/lab/picture.py", 1, "arena.race.bakeoff", True),
        Import("native_engine/engine.py", 1, "native_engine.lab.catalogue", True),
        Import("native_engine/blocks.py", 1, "torch", False),
        Import("adapters/native.py", 1, "native_engine.engine", False),
        Import("adapters/vllm.py", 1, "adapters.llama_cpp", False),
        Import("gateway/replicas/fleet.py", 1, "adapters.vllm", True),
        Import("arena/race/bakeoff.py", 1, "locust", True),
        Import("arena/race/bakeoff.py", 1, "gateway.app", True),
        Import("adapters/launching/launch.py", 1, "gateway.config", True),
        Import("adapters/litellm_cloud.py", 1, "litellm", True),
        Import("adapters/servers/litellm_worker.py", 1, "litellm", False),
    ],
)
def test_a_forbidden_arrow_is_seen(forbidden: Import) -> None:
    assert list(faults_of(forbidden))


def test_only_cli_and_config_modules_read_the_environment() -> None:
    faults = []
    for path in sources():
        if path.stem in READS_ENVIRONMENT or path.stem.endswith("_cli"):
            continue
        for node in ast.walk(read(path)):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in {"os.environ", "os.getenv"}:
                faults.append(f"{path.relative_to(ROOT)}:{node.lineno} reads the environment (R7)")
    assert not faults, "\n".join(faults)


def test_importing_the_gateway_leaves_the_heavy_libraries_out() -> None:
    heavy = ("torch", "gevent", "locust", "litellm", "duckdb", "native_engine", "arena")
    code = (
        f"import sys, gateway.app, adapters.litellm_cloud; print([name for name in {heavy!r} if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
