"""Engines are found by file name, are imported only when they are named, and others may bring their own."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

from adapters import registry
from adapters.registry import UnknownEngine, adapter_class, engine_names


def test_the_engines_are_the_files_that_hold_an_adapter() -> None:
    assert {"fake", "llama_cpp", "native", "openvino", "vllm"} <= set(engine_names())
    assert not {"sse", "base", "openai_http", "launch", "fake_server"} & set(engine_names())


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


def test_another_package_may_bring_an_engine_but_not_replace_one(monkeypatch: pytest.MonkeyPatch) -> None:
    points = {
        "acme": EntryPoint("acme", "adapters.fake:Adapter", registry.GROUP),
        "vllm": EntryPoint("vllm", "adapters.fake:Adapter", registry.GROUP),
        "broken": EntryPoint("broken", "adapters.fake:FakeOptions", registry.GROUP),
    }
    monkeypatch.setattr(registry, "entry_points", lambda *, group: points.values() if group == registry.GROUP else ())
    assert "acme" in engine_names()
    assert adapter_class("acme").engine == "fake"
    assert adapter_class("vllm").engine == "vllm"
    with pytest.raises(UnknownEngine, match="not an EngineAdapter"):
        adapter_class("broken")
