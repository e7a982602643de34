"""The manifests fit the published schemas of Kubernetes, the restricted Pod Security Standard, and one another."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from gateway.config import load_config
from tests.deploy import compose_file
from tests.deploy.compose_file import address, flags
from tests.deploy.manifests import BASE, KUBERNETES, KUSTOMIZATION, containers, documents, kustomization, of_kind

OLDEST, NEWEST = "1.30", "1.37"  # the versions of the schemas that the manifests are held against
OVERLAYS = sorted(path.parent for path in KUBERNETES.glob("overlays/*/kustomization.yaml"))
DEPLOYMENTS = of_kind("Deployment")
ENGINES = [name for name in DEPLOYMENTS if name != "gateway"]

each_deployment = pytest.mark.parametrize("name", DEPLOYMENTS)


def pod(name: str) -> dict[str, Any]:
    spec: dict[str, Any] = DEPLOYMENTS[name]["spec"]["template"]["spec"]
    return spec


def container(name: str) -> dict[str, Any]:
    found: dict[str, Any] = pod(name)["containers"][0]
    return found


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize(
    "document",
    [document for _, document in documents()],
    ids=[f"{document['kind']}-{document['metadata']['name']}" for _, document in documents()],
)
def test_every_object_fits_its_schema(document: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(document, version, strict=True)


def test_a_misspelt_field_would_be_seen() -> None:
    broken = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "x"}, "spec": {"prots": []}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, NEWEST, strict=True)


@pytest.mark.parametrize("folder", [BASE, *OVERLAYS], ids=lambda folder: folder.name)
def test_a_kustomization_lists_every_file_beside_it_and_no_other(folder: Path) -> None:
    listed = kustomization(folder)
    resources = {name for name in listed["resources"] if (folder / name).is_file()}
    generated = {name for each in listed["configMapGenerator"] for name in each["files"]}
    assert resources | generated | {KUSTOMIZATION} == {path.name for path in folder.iterdir()}
    for name in set(listed["resources"]) - resources:
        assert (folder / name / KUSTOMIZATION).is_file()


@pytest.mark.parametrize("folder", [BASE, *OVERLAYS], ids=lambda folder: folder.name)
def test_kustomize_builds_it(folder: Path) -> None:
    kubectl, kustomize = shutil.which("kubectl"), shutil.which("kustomize")
    if not (kubectl or kustomize):
        pytest.skip("there is no kubectl and no kustomize here")
    command = [kustomize, "build", str(folder)] if kustomize else [str(kubectl), "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    built = list(yaml.safe_load_all(done.stdout))
    for document in built:
        kubernetes_validate.validate(document, NEWEST, strict=True)
    [config] = [each for each in built if each["kind"] == "ConfigMap"]
    gateway = next(each for each in built if each["kind"] == "Deployment" and each["metadata"]["name"] == "gateway")
    mounted = {volume["configMap"]["name"] for volume in pod_of(gateway)["volumes"] if "configMap" in volume}
    assert mounted == {config["metadata"]["name"], "goodgate-evidence"}
    assert config["data"]["config.yaml"] == (folder / "config.yaml").read_text()
    running = {each["metadata"]["name"] for each in built if each["kind"] == "Deployment"}
    assert replicas_of(folder) == running - {"gateway"}
    scaled = {each["spec"]["scaleTargetRef"]["name"] for each in built if each["kind"] == "HorizontalPodAutoscaler"}
    assert scaled == running


def pod_of(deployment: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = deployment["spec"]["template"]["spec"]
    return spec


def replicas_of(folder: Path) -> set[str | None]:
    """The names of the replicas that a configuration reaches by url."""
    config = load_config(folder / "config.yaml")
    return {each.name for model in config.models for each in model.replicas if "url" in each.options}


def test_no_object_names_a_namespace() -> None:
    assert not [document for _, document in documents() if "namespace" in document["metadata"]]


@each_deployment
def test_a_pod_fits_the_restricted_standard(name: str) -> None:
    spec = pod(name)
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] > 0
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
    assert all(set(volume) - {"name"} <= {"configMap", "emptyDir"} for volume in spec["volumes"])
    for each in [*spec["containers"], *spec.get("initContainers", [])]:
        context = each["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["readOnlyRootFilesystem"] is True
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert not any("hostPort" in port for port in each.get("ports", []))
        assert each["resources"]["requests"]
        assert "memory" in each["resources"]["limits"]


@each_deployment
def test_a_pod_has_no_token_and_no_environment_of_its_neighbours(name: str) -> None:
    spec = pod(name)
    assert spec["automountServiceAccountToken"] is spec["enableServiceLinks"] is False
    assert of_kind("ServiceAccount")[spec["serviceAccountName"]]["automountServiceAccountToken"] is False


@each_deployment
def test_a_service_leads_to_the_pods_and_their_probed_port(name: str) -> None:
    template = DEPLOYMENTS[name]["spec"]["template"]
    service = of_kind("Service")[name]["spec"]
    assert service["selector"].items() <= template["metadata"]["labels"].items()
    assert DEPLOYMENTS[name]["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    [port] = container(name)["ports"]
    assert service["ports"] == [{"name": port["name"], "port": port["containerPort"], "targetPort": port["name"]}]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container(name)[probe]["httpGet"]["port"] == port["name"]
    annotations = template["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(port["containerPort"])


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_listens_where_the_gateway_looks_for_it(name: str) -> None:
    config = load_config(BASE / "config.yaml")
    [replica] = [each for model in config.models for each in model.replicas if each.name == name]
    assert address(replica.options["url"]) == (name, container(name)["ports"][0]["containerPort"])
    assert replica.engine == compose_file.engine_of(name)
    given = flags(container(name)["args"])
    assert int(given["--port"]) == container(name)["ports"][0]["containerPort"]
    assert (given.get("--served-model-name") or given.get("--alias")) in {model.name for model in config.models}


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_is_the_image_that_compose_runs(name: str) -> None:
    assert container(name)["image"] == compose_file.services()[name]["image"]


def test_the_gateways_image_is_named_once() -> None:
    images = {each["image"] for name in DEPLOYMENTS for each in pod(name).get("initContainers", [])}
    assert images | {container("gateway")["image"]} == {"goodgate"}
    [pin] = kustomization(BASE)["images"]
    assert f"{pin['name']}:{pin['newTag']}" == compose_file.services()["gateway"]["image"]


def test_the_gateway_has_time_to_pause_and_to_drain() -> None:
    spec = pod("gateway")
    pause_s = int(container("gateway")["lifecycle"]["preStop"]["exec"]["command"][1])
    drain_s = load_config(BASE / "config.yaml").server.drain_timeout_s
    assert spec["terminationGracePeriodSeconds"] >= pause_s + drain_s + 5


def test_the_gateway_is_asked_for_what_its_probes_mean() -> None:
    paths = {name: each["httpGet"]["path"] for name, each in container("gateway").items() if name.endswith("Probe")}
    assert paths == {"startupProbe": "/health", "livenessProbe": "/health", "readinessProbe": "/ready"}


def test_the_gateways_files_are_where_its_configuration_looks() -> None:
    mounts = {each["name"]: each["mountPath"] for each in container("gateway")["volumeMounts"]}
    assert container("gateway")["args"][-1] == f"{mounts['config']}/config.yaml"
    assert load_config(BASE / "config.yaml").evidence == f"{mounts['evidence']}/evidence.json"


def test_one_gateway_stays_while_nodes_are_drained() -> None:
    budget = of_kind("PodDisruptionBudget")["gateway"]["spec"]
    assert budget["selector"] == DEPLOYMENTS["gateway"]["spec"]["selector"]
    assert of_kind("HorizontalPodAutoscaler")["gateway"]["spec"]["minReplicas"] > budget["minAvailable"]


@each_deployment
def test_pods_are_scaled_by_the_goodput_of_the_replica_that_they_are(name: str) -> None:
    scaler = of_kind("HorizontalPodAutoscaler")[name]["spec"]
    assert scaler["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": name}
    [metric] = scaler["metrics"]
    replica = metric["external"]["metric"]["selector"]["matchLabels"]["replica"]
    config = load_config(BASE / "config.yaml")
    [found] = [each for model in config.models for each in model.replicas if each.name == replica]
    assert name == ("gateway" if "url" not in found.options else replica)
    assert "replicas" not in DEPLOYMENTS[name]["spec"], "two would decide how many pods there are"


def test_engines_are_reached_by_the_gateway_and_reach_nobody() -> None:
    engines = of_kind("NetworkPolicy")["engines"]["spec"]
    for name in ENGINES:
        assert engines["podSelector"]["matchLabels"].items() <= labels(name).items()
    assert not engines["podSelector"]["matchLabels"].items() <= labels("gateway").items()
    assert engines["egress"] == []
    assert set(engines["policyTypes"]) == {"Ingress", "Egress"}
    assert {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "gateway"}}} in engines["ingress"][0]["from"]


def labels(name: str) -> dict[str, str]:
    found: dict[str, str] = DEPLOYMENTS[name]["spec"]["template"]["metadata"]["labels"]
    return found


def test_every_mount_has_its_volume() -> None:
    for name, _ in containers():
        spec = pod(name)
        volumes = {volume["name"] for volume in spec["volumes"]}
        for each in [*spec["containers"], *spec.get("initContainers", [])]:
            assert {mount["name"] for mount in each["volumeMounts"]} <= volumes
