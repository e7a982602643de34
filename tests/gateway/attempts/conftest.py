"""The fixtures of this folder; what they give is in tests/gateway/rig.py."""

from tests.gateway.rig import start, upstream_of

__all__ = ["start", "upstream_of"]
