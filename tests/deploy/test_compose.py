"""docker-compose.yml fits the gateway's configurations, the engines and itself, and keeps everything shut that it can.

There need be no Docker engine for this; where there is one with Compose, the last tests run the file for real.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import typer
import yaml

from adapters import registry
from gateway.config import Config, load_config
from tests.deploy.compose_file import (
    ROOT,
    address,
    command,
    document,
    documented,
    engine_of,
    engine_services,
    flags,
    listening_ports,
    services,
    variables,
)

CONFIGS = {"cpu": "configs/compose.yaml", "gpu": "configs/compose.gpu.yaml"}
ENDS = {"model", "arena"}  # they do their work and stop
MAY_BE_ROOT = {"tgi"}  # its image keeps its Python under /root

each_service = pytest.mark.parametrize("name", services())


def config_of(profile: str) -> Config:
    return load_config(ROOT / CONFIGS[profile])


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/compose*.yaml")), ids=lambda path: path.name)
def test_every_gateway_configuration_is_valid_and_waits_for_nobody(path: Path) -> None:
    config = load_config(path)
    assert config.server.host == "0.0.0.0"
    assert not any(replica.launch for model in config.models for replica in model.replicas)
    assert path.relative_to(ROOT).as_posix() in CONFIGS.values()


@pytest.mark.parametrize("profile", CONFIGS)
def test_the_replicas_of_a_profile_are_its_engine_services(profile: str) -> None:
    replicas = [replica for model in config_of(profile).models for replica in model.replicas]
    reached = {replica.name: replica for replica in replicas if "url" in replica.options}
    assert set(reached) == set(engine_services(profile))
    for name, replica in reached.items():
        for url in (replica.options["url"], replica.options.get("metrics_url")):
            if url is not None:
                host, port = address(url)
                assert host == name
                assert port in listening_ports(services()[host]), f"{name} does not listen on {port}"
        assert replica.engine == engine_of(name)


@pytest.mark.parametrize("profile", CONFIGS)
def test_engines_serve_the_model_that_the_gateway_names(profile: str) -> None:
    names = {name for model in config_of(profile).models for name in (model.name, *model.aliases)}
    for service in engine_services(profile).values():
        given = flags(command(service))
        served = given.get("--served-model-name") or given.get("--alias")
        assert served is None or served in names
    assert documented()["MODEL"] in names


@each_service
def test_a_service_is_shut_in(name: str) -> None:
    service = services()[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "cap_add" not in service
    assert "privileged" not in service
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["tmpfs"]
    assert (service["user"].split(":")[0] == "0") == (name in MAY_BE_ROOT)
    assert set(service["logging"]["options"]) == {"max-size", "max-file"}
    assert service["pids_limit"] > 0


@each_service
def test_ports_are_published_on_this_machine_only(name: str) -> None:
    for port in services()[name].get("ports", []):
        assert re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port)


def test_engines_have_no_way_out_and_no_published_port() -> None:
    assert document()["networks"]["engines"] == {"internal": True}
    for name in [*engine_services("cpu"), *engine_services("gpu")]:
        service = services()[name]
        assert service["networks"] == ["engines"]
        assert "ports" not in service
        switches = service["environment"]
        assert switches["HF_HUB_OFFLINE"] == switches["TRANSFORMERS_OFFLINE"] == "1"
        assert switches["DO_NOT_TRACK"] == switches["VLLM_NO_USAGE_STATS"] == "1"
    assert flags(command(services()["tgi"]))["--usage-stats"] == "off"
    grafana = services()["grafana"]["environment"]
    assert grafana["GF_ANALYTICS_REPORTING_ENABLED"] == grafana["GF_ANALYTICS_CHECK_FOR_UPDATES"] == "false"


@each_service
def test_a_service_says_whether_it_is_well(name: str) -> None:
    service = services()[name]
    if name in ENDS:
        assert service["healthcheck"] == {"disable": True}
        assert service["restart"] == "no"
        return
    check = service["healthcheck"]
    assert {"test", "interval", "timeout", "retries", "start_period"} <= set(check)
    url = re.search(r"http://127\.0\.0\.1:(\d+)(/[\w/-]*)", check["test"][-1])
    assert url, check["test"]
    ports = listening_ports(service) or {8080 if name == "gateway" else 3000}
    assert int(url[1]) in ports
    signals = {"prometheus": "/-/ready", "grafana": "/api/health", "triton": "/v2/health/ready"}
    assert url[2] == signals.get(name, "/health")


@each_service
def test_whoever_is_waited_for_can_come(name: str) -> None:
    """A service waits for the health of those that have one, for the end of those that end, and never for a stranger
    whose profile may be off, unless it says so."""
    service = services()[name]
    for other, condition in service.get("depends_on", {}).items():
        wanted = "service_completed_successfully" if other in ENDS else "service_healthy"
        assert condition["condition"] == wanted
        mine, others = (set(services()[each].get("profiles", [])) for each in (name, other))
        if others and not (mine and mine <= others):
            assert condition["required"] is False, f"{name} waits for {other}, whose profile may be off"


@each_service
def test_an_image_is_pinned(name: str) -> None:
    image = services()[name]["image"]
    tag = image.rpartition("/")[2].partition(":")[2]
    assert re.search(r"\d", tag), f"{image} has no version"
    assert not re.search(r"latest|nightly|main", image)


def test_every_variable_is_documented_with_its_default() -> None:
    assert {name: defaults.pop() for name, defaults in variables().items() if len(defaults) == 1} == documented()
    assert len(variables()) == len(documented()), "a variable has two defaults"


@each_service
def test_every_path_of_this_repository_that_is_mounted_exists(name: str) -> None:
    for volume in services()[name].get("volumes", []):
        source = volume.split(":")[0]
        if source.startswith("."):
            assert (ROOT / source).exists(), volume
            assert volume.endswith(":ro")
        else:
            assert source in document()["volumes"]


def test_the_gateway_has_time_to_drain() -> None:
    for profile in CONFIGS:
        grace = int(services()["gateway"]["stop_grace_period"].removesuffix("s"))
        assert grace > config_of(profile).server.drain_timeout_s


def parsed(words: list[str]) -> tuple[str, dict[str, Any]]:
    """A command line of ours, taken apart by the command that it calls. An option that does not exist is an error."""
    import arena.commands.cli
    import gateway.commands.cli

    assert words[0] == "goodgate"
    app, words = (arena.commands.cli.app, words[2:]) if words[1] == "arena" else (gateway.commands.cli.app, words[1:])
    group = typer.main.get_command(app)
    assert isinstance(group, click.Group | typer.core.TyperGroup)
    sub_command = group.commands[words[0]]
    return words[0], sub_command.make_context(words[0], words[1:]).params


def test_the_gateway_is_started_with_a_configuration_of_this_repository() -> None:
    name, options = parsed(command(services()["gateway"]))
    assert name == "serve"
    assert str(options["config_path"]) in CONFIGS.values()


def test_a_race_meets_engines_of_the_profile_at_their_ports() -> None:
    name, options = parsed(command(services()["arena"]))
    assert name == "run"
    assert (ROOT / "configs/scenarios" / f"{options['scenario']}.yaml").exists()
    assert options["engines"] == "native"
    for target in ",".join(options["targets"]).split(","):
        label, _, url = target.partition("=")
        host, port = address(url)
        assert port in listening_ports(services()[host])
        assert label == engine_of(host), "the gateway finds proven goodput by the engine's name"
        assert host in services()["arena"]["depends_on"]


def scrape_jobs() -> list[dict[str, Any]]:
    loaded: list[dict[str, Any]] = yaml.safe_load((ROOT / "configs/prometheus.yml").read_text())["scrape_configs"]
    return loaded


def test_prometheus_asks_every_engine_where_its_metrics_are() -> None:
    seen = set()
    for job in scrape_jobs():
        for target in (target for group in job["static_configs"] for target in group["targets"]):
            host, _, port = target.partition(":")
            seen.add(host)
            ports = {config_of("cpu").server.port} if host == "gateway" else listening_ports(services()[host])
            assert int(port) in ports
            if host != "gateway":
                assert job["job_name"] == engine_of(host)
                load_metrics = getattr(registry.adapter_class(engine_of(host)), "load_metrics", None)
                path = "/metrics" if load_metrics is None else load_metrics.path
                assert job.get("metrics_path", "/metrics") == path
    assert seen == {"gateway", *engine_services("cpu"), *engine_services("gpu")}


def test_prometheus_finds_the_rules_that_are_mounted() -> None:
    loaded = yaml.safe_load((ROOT / "configs/prometheus.yml").read_text())
    [pattern] = loaded["rule_files"]
    mounts = dict(volume.split(":")[:2] for volume in services()["prometheus"]["volumes"])
    folder = next(source for source, target in mounts.items() if pattern.startswith(target))
    assert list((ROOT / folder).glob(Path(pattern).name))


@pytest.fixture(scope="module")
def docker() -> str:
    """The docker command, where it has Compose."""
    program = shutil.which("docker")
    if program is None:
        pytest.skip("there is no docker here")
    if subprocess.run([program, "compose", "version"], capture_output=True, check=False).returncode:
        pytest.skip("this docker has no compose plugin")
    return program


def test_compose_reads_it_as_we_do(docker: str) -> None:
    done = subprocess.run(
        [docker, "compose", "--env-file", ".env.example", "--profile", "*", "config", "--format", "json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    read = json.loads(done.stdout)["services"]
    assert set(read) == set(services())
    assert {name: each.get("command") for name, each in read.items()} == {
        name: command(each) if "command" in each else None for name, each in services().items()
    }


@pytest.fixture
def running_cpu_profile(docker: str) -> Iterator[str]:
    if subprocess.run([docker, "info"], capture_output=True, check=False).returncode:
        pytest.skip("no Docker engine answers")
    compose = [docker, "compose", "--project-name", "goodgate-test", "--profile", "cpu"]
    try:
        subprocess.run([*compose, "up", "--build", "--detach", "--wait"], cwd=ROOT, check=True, timeout=3000)
        yield "http://127.0.0.1:8080"
    finally:
        subprocess.run([*compose, "down", "--volumes"], cwd=ROOT, check=False, timeout=300)


@pytest.mark.docker
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_cpu_profile_serves_for_real(running_cpu_profile: str) -> None:
    deadline = time.monotonic() + 600
    while True:
        with urllib.request.urlopen(f"{running_cpu_profile}/admin/status", timeout=5) as response:
            replicas = {each["name"]: each for each in json.load(response)["models"][0]["replicas"]}
        if all(each["state"] == "ready" for each in replicas.values()):
            break
        assert time.monotonic() < deadline, replicas
        time.sleep(2)
    assert set(replicas) == {"native", *engine_services("cpu")}
