"""The fixtures of this folder; what most of them give is in tests/gateway/rig.py."""

from pathlib import Path

import pytest

from tests.gateway.rig import start, upstream_of

__all__ = ["start", "upstream_of"]


@pytest.fixture(scope="session")
def native_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For native engines: what one has compiled, which takes seconds, the next ones find."""
    return tmp_path_factory.mktemp("native")
