"""The fixtures of this folder; what most of them give is in tests/gateway/rig.py."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.records.logs import ROOT
from tests.gateway.rig import start, upstream_of

__all__ = ["start", "upstream_of"]


@pytest.fixture(autouse=True)
def _log_as_it_was() -> Iterator[None]:
    """A reload, or a command, sets how the whole process logs; the next test shall not see that."""
    log = logging.getLogger(ROOT)
    before = log.level, log.propagate, log.handlers
    yield
    level, log.propagate, log.handlers = before
    log.setLevel(level)


@pytest.fixture(scope="session")
def native_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For native engines: what one has compiled, which takes seconds, the next ones find."""
    return tmp_path_factory.mktemp("native")
