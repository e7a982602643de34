"""The paged engine. See ARCHITECTURE.md."""

from native_engine.environment import hold_bits

hold_bits()
