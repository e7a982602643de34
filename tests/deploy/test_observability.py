"""Dashboard, rules and autoscalers ask for metrics that a gateway really has."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.records.metric_table import METRICS
from tests.deploy import manifests
from tests.deploy.compose_file import ROOT, services

GRAFANA = ROOT / "deploy" / "grafana"
DASHBOARD = json.loads((GRAFANA / "dashboards" / "goodgate.json").read_text())
RULES = yaml.safe_load((ROOT / "deploy/prometheus/goodgate.rules.yml").read_text())
ADAPTER = yaml.safe_load((ROOT / "deploy/prometheus/adapter.yaml").read_text())
METRIC = re.compile(r"\bgoodgate[_:][a-zA-Z0-9_:]+")
LABELLED = re.compile(r"\bby \(([^)]+)\)")


def recorded() -> set[str]:
    return {rule["record"] for group in RULES["groups"] for rule in group["rules"] if "record" in rule}


def expressions() -> Iterator[tuple[str, str]]:
    """Every PromQL expression with the place where it stands."""
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            yield f"panel {panel['title']}", target["expr"]
    for variable in DASHBOARD["templating"]["list"]:
        yield f"variable {variable['name']}", variable["query"]["query"]
    for group in RULES["groups"]:
        for rule in group["rules"]:
            yield f"rule {rule.get('record') or rule['alert']}", rule["expr"]
    for rule in ADAPTER["externalRules"]:
        yield "adapter", rule["seriesQuery"]


def exposed() -> dict[str, set[str]]:
    """The names that a gateway's metrics have in Prometheus, each with its labels. That a gateway has just these is
    shown in tests/gateway/records/test_metrics.py."""
    found = {}
    for metric in METRICS:
        if metric.kind == "histogram":
            found[f"{metric.name}_bucket"] = {*metric.labels, "le"}
            found[f"{metric.name}_count"] = found[f"{metric.name}_sum"] = set(metric.labels)
        else:
            found[metric.exposed_name] = set(metric.labels)
    return found


EXPOSED = exposed()


def test_every_metric_that_is_asked_for_exists() -> None:
    for where, expression in expressions():
        asked = set(METRIC.findall(expression))
        assert asked, f"{where} asks for nothing of ours"
        assert asked <= set(EXPOSED) | recorded(), f"{where} asks for {asked - set(EXPOSED) - recorded()}"


def test_what_is_summed_by_is_a_label() -> None:
    for where, expression in expressions():
        metrics = [name for name in METRIC.findall(expression) if name in EXPOSED]
        wanted = {label.strip() for labels in LABELLED.findall(expression) for label in labels.split(",")}
        if metrics:
            has = set().union(*(EXPOSED[name] for name in metrics))
            assert wanted <= has, f"{where} sums by {wanted - has}"


def test_every_metric_of_the_gateway_is_shown_or_ruled_on() -> None:
    asked = {name for _, expression in expressions() for name in METRIC.findall(expression)}
    unseen = {metric.name for metric in METRICS if not any(name.startswith(metric.name) for name in asked)}
    assert not unseen


def test_every_recorded_series_is_used() -> None:
    used = {name for where, expression in expressions() for name in METRIC.findall(expression)}
    assert recorded() <= used


def test_autoscalers_ask_for_what_the_adapter_gives() -> None:
    given = {rule["name"]["as"] for rule in ADAPTER["externalRules"]}
    asked = {
        metric["external"]["metric"]["name"]
        for scaler in manifests.of_kind("HorizontalPodAutoscaler").values()
        for metric in scaler["spec"]["metrics"]
    }
    assert asked == given
    for rule in ADAPTER["externalRules"]:
        assert re.fullmatch(rule["name"]["matches"], next(iter(METRIC.findall(rule["seriesQuery"]))))
        assert "by (replica)" in rule["metricsQuery"], "autoscalers choose by the label `replica`"


def test_the_dashboard_asks_the_data_source_that_is_provisioned() -> None:
    provisioned = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yaml").read_text())["datasources"]
    uids = {source["uid"] for source in provisioned}
    assert set(datasources(DASHBOARD)) == uids
    [source] = provisioned
    assert source["url"] == "http://prometheus:9090"
    assert source["url"].split("/")[2].split(":")[0] in services()


def datasources(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if "datasource" in node:
            yield node["datasource"]["uid"]
        for value in node.values():
            yield from datasources(value)
    elif isinstance(node, list):
        for value in node:
            yield from datasources(value)


def test_grafana_finds_its_files_where_they_are_mounted() -> None:
    mounts = dict(volume.split(":")[:2] for volume in services()["grafana"]["volumes"])
    providers = yaml.safe_load((GRAFANA / "provisioning/dashboards/goodgate.yaml").read_text())["providers"]
    inside = {target: ROOT / source for source, target in mounts.items()}
    assert inside["/etc/grafana/provisioning"] == GRAFANA / "provisioning"
    assert [inside[provider["options"]["path"]] for provider in providers] == [GRAFANA / "dashboards"]
    home = Path(services()["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (inside[str(home.parent)] / home.name).is_file()


def test_panels_have_their_own_ids_and_do_not_overlap() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, f"{panel['title']} lies over another panel"
        taken |= cells


@pytest.mark.parametrize("arguments", [["check", "rules"], ["test", "rules"], ["check", "config"]], ids=" ".join)
def test_promtool_accepts_it(arguments: list[str], tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("there is no promtool on the path")
    files = {
        "check rules": ROOT / "deploy/prometheus/goodgate.rules.yml",
        "test rules": ROOT / "tests/deploy/rules_test.yml",
        "check config": tmp_path / "prometheus.yml",
    }
    config = (ROOT / "configs/prometheus.yml").read_text()
    files["check config"].write_text(config.replace("/etc/prometheus/rules", str(ROOT / "deploy/prometheus")))
    command = [promtool, *arguments, str(files[" ".join(arguments)])]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TZ": "UTC"}, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
