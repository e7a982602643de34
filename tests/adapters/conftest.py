"""The fixture of this folder; what it gives is in tests/adapters/engine_twin.py."""

from tests.adapters.engine_twin import twin

__all__ = ["twin"]
