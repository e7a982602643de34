"""Engines are found by file name, are imported only when they are named, and others may bring their own."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest
from typer.testing import CliRunner

from adapters import registry
from adapters.cli import app
from adapters.registry import UnknownEngine, adapter_class, engine_names


def test_the_engines_are_the_files_that_hold_an_adapter() -> None:
    assert {"fake", "llama_cpp", "native", "openvino", "vllm"} <= set(engine_names())
    assert not {"base", "config", "registry", "conformance", "wire", "servers"} & set(engine_names())


def test_every_engine_names_itself_as_its_file_does_and_has_options() -> None:
    for name in engine_names():
        cls = adapter_class(name)
        assert cls.engine == name
        assert cls.Options.__struct_config__.forbid_unknown_fields


@pytest.mark.parametrize(("typed", "meant"), [("vlm", "vllm"), ("llama.cpp", "llama_cpp"), ("Native", "native")])
def test_an_unknown_engine_is_answered_with_the_nearest_spelling(typed: str, meant: str) -> None:
    with pytest.raises(UnknownEngine, match=f"Did you mean '{meant}'"):
        adapter_class(typed)


@pytest.mark.parametrize("name", ["", "sse", "adapters.vllm", "../vllm", "os", "zzzz"])
def test_what_is_no_engine_is_not_imported_as_one(name: str) -> None:
    with pytest.raises(UnknownEngine, match="Known engines: fake"):
        adapter_class(name)


def test_naming_one_engine_loads_no_other_and_nothing_heavy() -> None:
    code = (
        "import sys; from adapters.registry import adapter_class, engine_names; engine_names(); adapter_class('fake')\n"
        "print({'adapters.vllm', 'adapters.native', 'torch', 'aiohttp', 'jinja2'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


def plug_in(monkeypatch: pytest.MonkeyPatch, **engines: str) -> None:
    """Have other packages offer these engines."""
    points = [EntryPoint(name, where, registry.GROUP) for name, where in engines.items()]
    monkeypatch.setattr(registry, "entry_points", lambda *, group: points if group == registry.GROUP else [])


def test_another_package_may_bring_an_engine_but_not_replace_one(monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(monkeypatch, acme="adapters.fake:Adapter", vllm="adapters.fake:Adapter", broken="adapters.fake:FakeOptions")
    assert "acme" in engine_names()
    assert adapter_class("acme").engine == "fake"
    assert adapter_class("vllm").engine == "vllm"
    with pytest.raises(UnknownEngine, match="not an EngineAdapter"):
        adapter_class("broken")


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        ("no_such_package:Adapter", "raises ModuleNotFoundError"),
        ("adapters.fake:NoSuchClass", "raises AttributeError"),
        ("tests.adapters.engine_that_fails_to_import:Adapter", "raises ZeroDivisionError"),
    ],
)
def test_a_plug_in_that_cannot_be_loaded_hides_no_other_engine(
    monkeypatch: pytest.MonkeyPatch, where: str, reason: str
) -> None:
    plug_in(monkeypatch, acme=where)
    with pytest.raises(UnknownEngine, match=f"'acme' cannot be loaded: {where} {reason}"):
        adapter_class("acme")
    listed = CliRunner().invoke(app, ["--json"])
    rows = {row["engine"]: row for row in json.loads(listed.stdout)}
    assert reason in rows["acme"]["how"]
    assert rows["fake"]["local"] is True
    matrix = CliRunner().invoke(app, ["--matrix"])
    assert (matrix.exit_code, reason in matrix.stderr) == (2, True)
