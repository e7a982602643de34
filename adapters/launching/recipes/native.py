"""Our own engine as a process: `goodgate serve` with a configuration made for it.

A race measures it this way, through our own gateway, because that is how its users meet it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import adapters
from adapters.launching.knobs import Knob
from adapters.launching.launch import HOST, Installation, LaunchSpec
from adapters.launching.weights import Weights

if TYPE_CHECKING:
    from adapters.launching.weights import Relation
    from adapters.models.model_store import Model

ENGINE = "native"
ROOT = Path(adapters.__file__).parents[1]
KNOBS = (
    Knob(option="max_num_seqs", meaning="batch depth", values=(1, 2, 4, 8, 16, 32, 64, 128), default=64),
    Knob(option="max_num_batched_tokens", meaning="chunk size", values=(128, 256, 512, 1024), default=256),
)


def installed(home: Path) -> Installation:
    """It comes with Goodgate and needs torch in Goodgate's own environment; `home` plays no part."""
    del home
    if importlib.util.find_spec("torch") is None:
        return Installation(available=False, how="install its packages: `pip install 'goodgate[native]'`.")
    return Installation(available=True, version=importlib.metadata.version("goodgate"))


def launch_spec(*, home: Path, model: Model, port: int, options: Mapping[str, Any]) -> LaunchSpec:
    config = home / "state" / f"native-{port}.yaml"
    return LaunchSpec(
        name=ENGINE,
        argv=(sys.executable, "-m", "goodgate", "serve", "--config", str(config)),
        env={"GOODGATE_HOME": str(home), "PYTHONPATH": str(ROOT)},
        port=port,
        ready_path="/ready",
        prepare=partial(write_config, config, gateway_config(model.name, port, options)),
        temporary=(config,),
        weights=weights_of(model, options),
    )


def weights_of(model: Model, options: Mapping[str, Any]) -> Weights:
    """A GGUF file is unpacked when it is loaded, whatever its own format."""
    relation: Relation = "dequantised" if model.format == "gguf" else "same"
    precision = str(options.get("dtype") or "bfloat16")
    return Weights(source=model.path, served=model.path, precision=precision, relation=relation)


def gateway_config(model: str, port: int, options: Mapping[str, Any]) -> dict[str, Any]:
    replica = {"engine": ENGINE, "options": {**options, "model": model}}
    return {
        "server": {"host": HOST, "port": port},
        "auth": {"required": False},  # the keys beside it are for the gateway in front
        "models": [{"name": model, "replicas": [replica]}],
    }


def write_config(path: Path, config: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(config, indent=2) + "\n")  # JSON is YAML
