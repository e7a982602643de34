"""Knobs: the launch options of an engine that decide how much it carries, with the values that are worth trying.

A recipe declares its own (`KNOBS`), in the order in which they matter; whoever tunes the engine turns these and no
others. What each engine calls them is its own affair, so `meaning` is the field's word: "batch depth" is how many
sequences are decoded together, "chunk size" how many tokens one step may work on.
"""

from __future__ import annotations

from msgspec import Struct


class Knob(Struct, frozen=True, kw_only=True):
    """`values` ascend. `default` is what the engine has without the option; None where it decides by itself."""

    option: str
    meaning: str
    values: tuple[int, ...]
    default: int | None = None
