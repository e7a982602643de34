"""Lengths in tokens, drawn from what a scenario states."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import islice
from typing import assert_never

import numpy as np
import numpy.typing as npt

from arena.load.spec import Empirical, Fixed, Lengths, LogNormal, ScenarioError, Uniform
from arena.load.traces import MAX_TOKENS, csv_lines

Columns = Mapping[tuple[str, str], npt.NDArray[np.int64]]
"""(path, column) -> the lengths that stand there; for `Empirical`."""

NO_COLUMNS: Columns = {}


def draw(lengths: Lengths, rng: np.random.Generator, columns: Columns = NO_COLUMNS) -> int:
    """One length in tokens."""
    if isinstance(lengths, Fixed):
        return lengths.tokens
    if isinstance(lengths, Uniform):
        return int(rng.integers(lengths.low, lengths.high + 1))
    if isinstance(lengths, LogNormal):
        value = math.exp(math.log(lengths.median) + lengths.sigma * float(rng.standard_normal()))
        return _within(round(value), lengths)
    if isinstance(lengths, Empirical):
        occurred = columns[lengths.path, lengths.column]
        return _within(int(occurred[rng.integers(len(occurred))]), lengths)
    assert_never(lengths)


def read_column(text: str, name: str, column: str) -> npt.NDArray[np.int64]:
    """A column of whole numbers from a CSV file with a header."""
    lines = csv_lines(text.removeprefix("\ufeff"), name)
    header = [cell.strip() for _, cells in islice(lines, 1) for cell in cells]
    if column not in header:
        raise ScenarioError(f"{name} has no column `{column}`; it has {', '.join(header) or 'no header'}.")
    place = header.index(column)
    values = []
    for where, cells in lines:
        try:
            value = float(cells[place])
        except (ValueError, IndexError) as error:
            raise ScenarioError(f"{where}: `{column}` is no number.") from error
        if not value.is_integer() or not 0 <= value <= MAX_TOKENS:
            raise ScenarioError(f"{where}: `{column}` is no number of tokens ({value:g}).")
        values.append(int(value))
    if not values:
        raise ScenarioError(f"{name} has no rows under its header.")
    return np.array(values, dtype=np.int64)


def _within(value: int, bounds: LogNormal | Empirical) -> int:
    return min(max(value, bounds.low), bounds.high)
