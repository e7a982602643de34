"""A configuration is checked whole before anything starts, and its faults name the place and what was meant."""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from adapters import registry
from gateway.config import Config, ConfigError, adapter_options, describe, load_config, parse_config
from tests.gateway.rig import fake, fake_model, model

ROOT = Path(__file__).parents[2]
BAD_URLS = ("http://", "http://:80", "http://10.0.0.5:http", "http://[::1", "10.0.0.5:8000", "http://a b", "")
ON_DEMAND = model({"engine": "fake", "launch": True, "model": "x"}, load="on_demand")
VLLM = {"engine": "vllm", "options": {"url": "http://127.0.0.1:1"}}


@pytest.mark.replay("G39")
@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"modles": []}, r"Unknown key `modles`; did you mean `models`\?"),
        ({"server": {"prot": 1}, "models": [fake_model()]}, r"`server.prot`; did you mean `port`\?"),
        ({"models": [{**fake_model(), "alias": []}]}, r"`models\[0\].alias`; did you mean `aliases`\?"),
        (
            {"models": [model({"engine": "fake", "option": {}})]},
            r"`models\[0\].replicas\[0\].option`; did you mean `options`\?",
        ),
        ({"models": [model(fake(tokns=3))]}, r"'fake' has no option `tokns`; did you mean `tokens`\?"),
        ({"models": [model({"engine": "vlm", "options": {}})]}, r"no engine 'vlm'. Did you mean 'vllm'\?"),
        ({"models": [model(fake(tokens="many"))]}, r"`tokens`.*replica 'fake-0'"),
        ({"models": []}, r"length >= 1 at `models`"),
        ({"models": [model()]}, r"at `models\[0\].replicas`|at `models\[...\].replicas`"),
        ({"server": {"port": 70000}, "models": [fake_model()]}, r"at `server.port`"),
        ({"models": [fake_model(), fake_model()]}, r"'m' leads to two models"),
        ({"models": [{**fake_model(), "fallbacks": ["n"]}]}, r"unknown model 'n'"),
        ({"models": [{**fake_model(), "fallbacks": ["m"]}]}, r"falls back to itself"),
        ({"models": [model(fake("a"), fake("a"))]}, r"two replicas named 'a'"),
        ({"models": [model({"engine": "fake", "launch": True})]}, r"`launch: true` needs `model:`"),
        ({"models": [model({"engine": "fake", "model": "x"})]}, r"`model:` belongs to `launch: true`"),
        ({"models": [model({**VLLM, "options": {"url": "http://x", "api_key": "s3cret"}})]}, r"use `api_key_env`"),
        (
            {"models": [model({"engine": "fake", "launch": True, "model": "x", "options": {"tokns": 3}})]},
            r"'fake' has no launch option `tokns`; did you mean `tokens`\?",
        ),
        (
            {"models": [model({"engine": "native", "launch": True, "model": "x", "options": {"num_threads": 0}})]},
            r">= 1 at `num_threads`. \(launch options of replica",
        ),
        (
            {"models": [model({"engine": "goodgate_peer", "launch": True, "model": "x"})]},
            r"'goodgate_peer' cannot be launched from here",
        ),
        (
            {"models": [{**fake_model(), "load": "on_demand"}]},
            r"`load: on_demand` needs `launch: true` at every replica",
        ),
        ({"models": [{**fake_model(), "unload_after_s": 5}]}, r"`unload_after_s` belongs to `load: on_demand`"),
        (
            {"models": [fake_model()], "residency": {"groups": [["m"]]}},
            r"`residency.groups` names 'm', which is no model",
        ),
        ({"models": [ON_DEMAND], "residency": {"groups": [["n"]]}}, r"names 'n', .* \(known: m\)"),
        ({"models": [ON_DEMAND], "residency": {"memory_gib": 8}}, r"needs `memory_gib` too \(model 'm'\)"),
        ({"models": [{**ON_DEMAND, "memory_gib": 8}]}, r"needs `residency.memory_gib`, the memory for all"),
        (
            {"models": [{**ON_DEMAND, "memory_gib": 9}], "residency": {"memory_gib": 8}},
            r"It can never be loaded: it takes 9 GiB of the 8 that `residency.memory_gib` allows \(model 'm'\)",
        ),
        (
            {"models": [ON_DEMAND], "groups": [{"name": "g", "models": ["m"], "routing": "least_load"}]},
            r"'g' holds a model that is loaded on demand, so it needs `routing: order`",
        ),
        (
            {"models": [ON_DEMAND], "groups": [{"name": "g", "models": ["m"], "slo": {"ttft_ms": 500}}]},
            r"'g' holds a model that is loaded on demand, so requests pass the gates of its models: write `slo` there",
        ),
        (
            {"models": [ON_DEMAND], "groups": [{"name": "g", "models": ["m"], "admission": {"max_running": 2}}]},
            r"the gates of its models: write `admission` there, and not in the group",
        ),
        (
            {"models": [model({"engine": "fake", "cost": 1}, {"engine": "fake"}, routing="cost")]},
            r"`routing: cost` needs a `cost` at every replica, in any unit; replica 'fake-1' of model 'm' has none",
        ),
        (
            {"models": [fake_model()], "groups": [{"name": "g", "models": ["m"], "routing": "cost"}]},
            r"replica 'fake-0' of model 'm' has none",
        ),
        ({"models": [model({"engine": "fake", "weight": 0})]}, r"`models\[0\]\.replicas\[0\]\.weight`"),
        *(
            ({"models": [model({"engine": "vllm", "options": {"url": url}})]}, r"`url` has to look like http://")
            for url in BAD_URLS
        ),
        (
            {"models": [model({"engine": "sglang", "options": {"url": "http://x", "route": "nativ"}})]},
            r"'nativ' at `route`; choose one of: openai, native\.",
        ),
        ({"models": [{**fake_model(), "name": "m\n"}]}, r"`models\[0\]\.name`"),
        ({"models": [{**fake_model(), "aliases": ["a\n"]}]}, r"`models\[0\]\.aliases\[0\]`"),
        ({"models": [fake_model()], "quotas": {"store": "redis://x\n"}}, r"`quotas\.store`"),
        ({"models": [model({"engine": "vllm", "options": {"url": "http://x\n"}})]}, r"`url` has to look like http://"),
        ({"models": [fake_model()], "quotas": {"store": "redis://["}}, r"`quotas\.store` is no address: "),
        ({"models": [fake_model()], "evidence": "a\0b"}, r"`evidence`"),
        ({"models": [fake_model()], "evidence": "~nobody-at-all/e.json"}, r"`evidence` lies in the home of nobody"),
        *(
            (
                {"models": [model({"engine": "vllm", "options": {"url": "http://x", "api_key_file": path}})]},
                r"named by `api_key_file`: it is not text, or that is no path",
            )
            for path in ("a\0b", "~nobody-at-all/key")
        ),
        ([], r"must be a mapping"),
        (None, r"must be a mapping"),
    ],
)
def test_a_faulty_configuration_is_explained(data: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as failure:
        parse_config(data)
    assert "s3cret" not in failure.value.message


@pytest.mark.parametrize("url", ["http://x", "HTTPS://u:p@x.example:8443/v1/", "http://[::1]:8000", "http://10.0.0.5"])
def test_an_address_in_any_usual_form_is_taken(url: str) -> None:
    parse_config({"models": [model({"engine": "vllm", "options": {"url": url}})]})


@pytest.mark.replay("A50")
@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("models: [", "not valid YAML"),
        ("models: !!python/object/apply:os.system ['true']", "tags"),
        ("models: !!timestamp x", "tags"),
        ("models: !!bool x", "tags"),
        ("a: &a [x]\nb: *a", "aliases"),
        ("x" * (2 << 20), "larger than"),
        ("\x00", "not valid YAML"),
        ("models: [{name: m, name: n}]", "`name` is written twice"),
        ("models: 2026-02-31", "not valid YAML"),
        ("[" * 100_000, "nested more than 32 levels deep"),
        ("".join(f"{' ' * level}k:\n" for level in range(40)), "nested more than 32 levels deep"),
    ],
)
def test_a50_a_hostile_file_is_refused_with_its_path(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=sentence) as failure:
        load_config(path)
    assert str(path) in failure.value.message


def test_a_missing_file_says_which(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: No such file.*--config"):
        load_config(tmp_path / "none.yaml")


def test_a_secret_comes_from_the_environment_or_a_file_and_is_never_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key_file = tmp_path / "key"
    key_file.write_text("from-file\n")
    monkeypatch.setenv("SOME_KEY", "from-env")
    adapter = registry.adapter_class("vllm")
    for source, secret in (({"api_key_env": "SOME_KEY"}, "from-env"), ({"api_key_file": str(key_file)}, "from-file")):
        config = parse_config({"models": [model({"engine": "vllm", "options": {"url": "http://x", **source}})]})
        options: Any = adapter_options(config.models[0].replicas[0], adapter)
        assert options.api_key == secret
        shown = describe(config)
        assert secret not in shown
        assert next(iter(source.values())) in shown
    monkeypatch.delenv("SOME_KEY")
    with pytest.raises(ConfigError, match=r"'SOME_KEY'.*is not set"):
        parse_config({"models": [model({"engine": "vllm", "options": {"url": "http://x", "api_key_env": "SOME_KEY"}})]})


def test_what_is_printed_is_a_configuration_that_means_the_same() -> None:
    config = parse_config({"models": [{**fake_model(), "aliases": ["default"]}]})
    printed = yaml.safe_load(describe(config))
    assert printed["models"][0]["replicas"][0]["options"]["max_model_len"] == 32_768  # the engine's defaults too
    assert msgspec.structs.asdict(parse_config(printed))["server"] == msgspec.structs.asdict(config)["server"]


def keys_of(kind: type[msgspec.Struct]) -> set[str]:
    """Every key that a configuration may hold, as `Struct.key`."""
    keys: set[str] = set()
    for field in msgspec.structs.fields(kind):
        keys.add(f"{kind.__name__}.{field.name}")
        for nested in structs_within(field.type):
            keys |= keys_of(nested)
    return keys


def structs_within(kind: Any) -> list[type[msgspec.Struct]]:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return [kind]
    return [struct for argument in typing.get_args(kind) for struct in structs_within(argument)]


def keys_in(data: Any, kind: Any) -> set[str]:
    keys: set[str] = set()
    for struct in structs_within(kind):
        for item in data if isinstance(data, list) else [data]:
            for field in msgspec.structs.fields(struct):
                if field.name in item:
                    keys.add(f"{struct.__name__}.{field.name}")
                    keys |= keys_in(item[field.name], field.type)
    return keys


def test_the_example_names_every_option_and_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMOTE_API_KEY", "x")
    monkeypatch.setenv("QUOTAS_PASSWORD", "x")
    path = ROOT / "configs/gateway.example.yaml"
    assert keys_in(yaml.safe_load(path.read_text()), Config) == keys_of(Config)
    load_config(path)


def test_the_example_shows_the_true_defaults() -> None:
    example = yaml.safe_load((ROOT / "configs/gateway.example.yaml").read_text())
    defaults = msgspec.to_builtins(parse_config({"models": [fake_model()]}))
    for section in ("server", "health", "auth", "logs"):
        assert example[section] == defaults[section]


def test_every_comment_free_line_of_the_example_has_a_key_that_exists() -> None:
    with pytest.raises(ConfigError, match="Unknown key"):
        parse_config({**yaml.safe_load((ROOT / "configs/gateway.example.yaml").read_text()), "extra": 1})


def test_the_default_configuration_serves_the_default_model_on_this_machine_only() -> None:
    config = load_config(ROOT / "configs/local.yaml")
    assert (config.server.host, config.server.port) == ("127.0.0.1", 8080)
    assert [each.name for each in config.models] == ["smollm2-135m-instruct"]
    assert config.models[0].replicas[0].engine == "native"
