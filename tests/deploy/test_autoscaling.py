"""The examples for autoscalers are whole, and ask a gateway for what it really tells."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from gateway.config import load_config
from tests.deploy import manifests
from tests.deploy.compose_file import ROOT
from tests.deploy.test_observability import EXPOSED
from tests.gateway.rig import Start, fake, model, start
from tests.gateway.routing.test_goodput import evidence

KEDA = sorted((ROOT / "deploy" / "keda").glob("*.yaml"))
PAGE = (ROOT / "docs" / "autoscaling.md").read_text()

__all__ = ["start"]  # the fixture

each_file = pytest.mark.parametrize("path", KEDA, ids=lambda path: path.name)


def documents(path: Path) -> dict[str, dict[str, Any]]:
    return {each["kind"]: each for each in yaml.safe_load_all(path.read_text())}


def trigger(path: Path) -> dict[str, Any]:
    [found] = documents(path)["ScaledObject"]["spec"]["triggers"]
    assert all(isinstance(value, str) for value in found["metadata"].values()), "KEDA takes strings only"
    return found


def located(body: Any, location: str) -> Any:
    """What KEDA finds there: keys joined by dots, in GJSON's notation."""
    for key in location.split("."):
        body = body[key]
    return body


@each_file
def test_the_page_shows_each_example_whole(path: Path) -> None:
    code = "".join(line for line in path.read_text().splitlines(keepends=True) if not line.startswith("#"))
    assert f"```yml\n{code}```" in PAGE


@each_file
def test_it_scales_a_deployment_that_is_there_and_not_below_what_serves(path: Path) -> None:
    spec = documents(path)["ScaledObject"]["spec"]
    name = spec["scaleTargetRef"]["name"]
    assert name in manifests.of_kind("Deployment")
    assert 1 <= spec["minReplicaCount"] < spec["maxReplicaCount"]
    assert spec["fallback"]["behavior"] == "currentReplicas"


async def test_keda_finds_a_number_where_it_looks(start: Start, tmp_path: Path) -> None:
    found = trigger(ROOT / "deploy/keda/metrics-api.yaml")["metadata"]
    url = urlsplit(found["url"])
    service = manifests.of_kind("Service")["gateway"]["spec"]
    assert (url.hostname, url.port) == ("gateway", service["ports"][0]["port"])
    name = load_config(manifests.BASE / "config.yaml").models[0].name
    path = evidence(tmp_path / "evidence.json", ("llama-cpp", 0.5), engines_of=name)
    gateway = await start(model(fake("llama-cpp"), name=name), evidence=path)
    for _ in range(30):
        assert (await gateway.chat(model=name))[0] == 200
    status, body = await gateway.get(url.path)
    assert status == 200
    needed = located(body, found["valueLocation"])
    assert needed == pytest.approx(30 / 30 / (0.5 * 0.7), rel=0.2)
    for path_of_page in re.findall(r"valueLocation: ([\w.-]+)", PAGE):
        assert isinstance(located(body, path_of_page), int | float), path_of_page


def test_the_token_comes_from_the_secret_that_is_made() -> None:
    path = ROOT / "deploy/keda/metrics-api.yaml"
    authentication = documents(path)["TriggerAuthentication"]
    assert trigger(path)["authenticationRef"]["name"] == authentication["metadata"]["name"]
    [reference] = authentication["spec"]["secretTargetRef"]
    assert reference["parameter"] == "token", "which KEDA sends as `Authorization: Bearer`"
    assert f"secret generic {reference['name']} --from-literal={reference['key']}=" in path.read_text()


def test_what_prometheus_is_asked_for_is_a_metric_with_these_labels() -> None:
    found = trigger(ROOT / "deploy/keda/prometheus.yaml")["metadata"]
    [(name, labels)] = re.findall(r"^sum\((\w+)\{(.*)\}\)$", found["query"])
    assert set(re.findall(r"(\w+)=", labels)) <= EXPOSED[name]
    assert found["ignoreNullValues"] == "false", "or what nobody knows would be taken for no load"


def test_the_page_shows_the_rule_and_the_autoscaler_that_are_there() -> None:
    blocks = [
        yaml.safe_load(block)
        for block in re.findall(r"^```yml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
        if "\n---\n" not in block
    ]
    assert yaml.safe_load((ROOT / "deploy/prometheus/adapter.yaml").read_text()) in blocks
    assert manifests.of_kind("HorizontalPodAutoscaler")["llama-cpp"] in blocks
