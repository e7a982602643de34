"""The Kubernetes manifests as plain data, base and overlays.

for path, document in documents(): ...      # every object, with the file that it stands in
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.compose_file import ROOT

KUBERNETES = ROOT / "deploy" / "kubernetes"
BASE = KUBERNETES / "base"
KUSTOMIZATION = "kustomization.yaml"


def kustomization(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((folder / KUSTOMIZATION).read_text())
    return loaded


def documents(folder: Path = BASE) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The objects of the files that the kustomization lists."""
    for name in kustomization(folder).get("resources", []):
        path = folder / name
        if path.is_file():
            for document in yaml.safe_load_all(path.read_text()):
                yield path, document


def of_kind(kind: str) -> dict[str, dict[str, Any]]:
    return {each["metadata"]["name"]: each for _, each in documents() if each["kind"] == kind}


def containers() -> Iterator[tuple[str, dict[str, Any]]]:
    """The container that each Deployment is about, by the Deployment's name."""
    for name, deployment in of_kind("Deployment").items():
        yield name, deployment["spec"]["template"]["spec"]["containers"][0]
