"""Recorded traces of LLM traffic, in the formats in which they are published. Pure: text in, arrays out.

    trace = parse_trace(text, "conv.csv")
    trace.at_ns, trace.prompt_tokens, trace.output_tokens      # one entry a request

The format is told by the first line:

- Azure LLM inference 2023 and 2024 (Azure/AzurePublicDataset): CSV with TIMESTAMP, ContextTokens, GeneratedTokens. 2023
  has seven fractional digits and no time zone, 2024 up to six and "+00:00".
- BurstGPT (HPMLL/BurstGPT): CSV with Timestamp in seconds, Request tokens, Response tokens; later releases have more
  columns. A failed request has 0 response tokens.
- Mooncake (kvcache-ai/Mooncake): JSON lines with timestamp in ms, input_length, output_length, hash_ids. Each id stands
  for a block of 512 tokens and all that came before it: equal ids, equal beginnings.

Requests without prompt or answer tokens cannot be sent again; they are left out and counted. Rows out of order are put
in order and counted.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from arena.load.spec import ScenarioError

BLOCK_TOKENS = 512  # of Mooncake's hashes
Ints = npt.NDArray[np.int64]

_SECOND_NS = 1_000_000_000
MAX_TOKENS = 10**9  # of one request
MAX_SPAN_NS = 10 * 366 * 86_400 * _SECOND_NS  # from the first request to the last one
LAST_NS = 2**63 - 1
_TIMESTAMP = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:?\d\d)?")


class Row(NamedTuple):
    at_ns: int  # from any origin, the same for all rows
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests in the order of their arrival, the first one at 0."""

    name: str
    at_ns: Ints
    prompt_tokens: Ints
    output_tokens: Ints
    hash_ids: tuple[tuple[int, ...], ...] | None  # None: the format has none
    left_out: int = 0
    out_of_order: int = 0

    def __len__(self) -> int:
        return len(self.at_ns)

    @property
    def period_ns(self) -> int:
        """One round of the trace when it is repeated: its length and a mean gap, so that rounds do not touch."""
        span = int(self.at_ns[-1])
        return span + max(1, span // (len(self) - 1))

    def times_from(self, first: int, count: int) -> Ints:
        """Recorded times of `count` rows from row `first` on, in rounds where the trace is shorter."""
        if (first + count) // len(self) * self.period_ns > LAST_NS - self.period_ns:
            raise ScenarioError(
                f"{self.name}: {count} requests would take its {len(self)} rows round for more than 290 years of its "
                "own time; give it more rows, or rows that are nearer to each other."
            )
        rows = first + np.arange(count)
        times: Ints = self.at_ns[rows % len(self)] + rows // len(self) * self.period_ns
        return times

    def words(self) -> list[str]:
        """What had to be done to the file, for its user."""
        told = []
        if self.left_out:
            told.append(f"{self.name}: {self.left_out} rows without prompt or answer tokens are left out.")
        if self.out_of_order:
            told.append(f"{self.name}: {self.out_of_order} rows out of order were put in order.")
        return told


def parse_trace(text: str, name: str, *, max_rows: int = 200_000) -> Trace:
    """Raises `ScenarioError` with file and line at the first row that is not of the format."""
    rows = list(islice(_rows(text.removeprefix("\ufeff"), name), max_rows))
    kept = [row for row in rows if row.prompt_tokens and row.output_tokens]
    earliest, latest = (choose((row.at_ns for row in kept), default=0) for choose in (min, max))
    if len(kept) < 2 or earliest == latest:
        raise ScenarioError(f"{name} holds no trace: it needs at least two requests at different times.")
    if latest - earliest > MAX_SPAN_NS:
        raise ScenarioError(
            f"{name}: its first and last request are {(latest - earliest) / _SECOND_NS / 86_400:.0f} days apart, and "
            f"more than {MAX_SPAN_NS // _SECOND_NS // 86_400} are no trace of traffic; is a time of it mistyped?"
        )
    at_ns = np.array([row.at_ns - earliest for row in kept], dtype=np.int64)
    order = np.argsort(at_ns, kind="stable")
    has_hashes = any(row.hash_ids for row in kept)
    return Trace(
        name=name,
        at_ns=at_ns[order],
        prompt_tokens=np.array([row.prompt_tokens for row in kept], dtype=np.int64)[order],
        output_tokens=np.array([row.output_tokens for row in kept], dtype=np.int64)[order],
        hash_ids=tuple(kept[index].hash_ids for index in order) if has_hashes else None,
        left_out=len(rows) - len(kept),
        out_of_order=int((np.diff(at_ns) < 0).sum()),
    )


def _rows(text: str, name: str) -> Iterator[Row]:
    first_line = text.lstrip().partition("\n")[0].strip()
    if first_line.startswith("{"):
        return _mooncake(text, name)
    try:
        columns = [column.strip() for column in next(csv.reader([first_line]), [])]
    except csv.Error:  # a first field of more than 128 KiB is no heading
        columns = []
    for needed, read in _CSV_FORMATS.items():
        if set(needed) <= set(columns):
            return _csv_rows(text, name, columns, read)
    raise ScenarioError(
        f"{name}, line 1: this is no trace that is known here; expected the header of Azure (TIMESTAMP, ContextTokens, "
        "GeneratedTokens), that of BurstGPT (Timestamp, Request tokens, Response tokens), or Mooncake's JSON lines."
    )


def _csv_rows(text: str, name: str, columns: list[str], read: Callable[[Mapping[str, str]], Row]) -> Iterator[Row]:
    for where, cells in islice(csv_lines(text.lstrip(), name), 1, None):
        try:
            row = read(dict(zip(columns, cells, strict=True)))
        except (ValueError, OverflowError) as error:
            raise ScenarioError(f"{where}: {_why(error, cells, columns)}") from error
        yield _checked(row, where)


def csv_lines(text: str, name: str) -> Iterator[tuple[str, list[str]]]:
    """Each row of a CSV file that is not empty, and where it stands, for messages."""
    reader = csv.reader(text.splitlines())
    try:
        for cells in reader:
            if any(cell.strip() for cell in cells):
                yield f"{name}, line {reader.line_num}", cells
    except csv.Error as error:
        raise ScenarioError(f"{name}, line {reader.line_num}: this is no row of a CSV file ({error}).") from error


def _why(error: Exception, cells: list[str], columns: list[str]) -> str:
    if len(cells) != len(columns):
        return f"the row has {len(cells)} columns, the header {len(columns)}."
    return f"{str(error)[:120].rstrip('.')}."


def _azure(cells: Mapping[str, str]) -> Row:
    return Row(timestamp_ns(cells["TIMESTAMP"]), _count(cells["ContextTokens"]), _count(cells["GeneratedTokens"]))


def _burstgpt(cells: Mapping[str, str]) -> Row:
    seconds = float(cells["Timestamp"])
    return Row(round(seconds * _SECOND_NS), _count(cells["Request tokens"]), _count(cells["Response tokens"]))


_CSV_FORMATS: Mapping[tuple[str, ...], Callable[[Mapping[str, str]], Row]] = {
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"): _azure,
    ("Timestamp", "Request tokens", "Response tokens"): _burstgpt,
}


class _MooncakeRow(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


def _mooncake(text: str, name: str) -> Iterator[Row]:
    decoder = msgspec.json.Decoder(_MooncakeRow)
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{name}, line {number}"
        try:
            row = decoder.decode(line)
            at_ns = round(row.timestamp * 1_000_000)
        except (msgspec.DecodeError, RecursionError, OverflowError) as error:
            raise ScenarioError(f"{where}: this is no row of a Mooncake trace ({error}).") from error
        if min(row.hash_ids, default=0) < 0:
            raise ScenarioError(f"{where}: a hash id is below 0.")
        blocks = -(-row.input_length // BLOCK_TOKENS)
        if row.hash_ids and len(row.hash_ids) != blocks:
            raise ScenarioError(
                f"{where}: {row.input_length} tokens are {blocks} blocks of {BLOCK_TOKENS}, but there are "
                f"{len(row.hash_ids)} hash_ids."
            )
        yield _checked(Row(at_ns, row.input_length, row.output_length, row.hash_ids), where)


def _checked(row: Row, where: str) -> Row:
    if row.prompt_tokens < 0 or row.output_tokens < 0:
        raise ScenarioError(f"{where}: a number of tokens is below 0.")
    if max(row.prompt_tokens, row.output_tokens) > MAX_TOKENS:
        raise ScenarioError(f"{where}: no request has more than {MAX_TOKENS:,} tokens.")
    return row


def _count(cell: str) -> int:
    """A whole number, in files that pandas wrote also as `374.0`."""
    number = float(cell)
    if not number.is_integer():
        raise ValueError(f"{cell!r} is no whole number of tokens")
    return int(number)


def timestamp_ns(text: str) -> int:
    """Nanoseconds since 1970 of an ISO time with up to nine fractional digits; without a time zone it is UTC's."""
    match = _TIMESTAMP.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no time such as 2023-11-16 18:15:46.6805900")
    moment = datetime.fromisoformat(match[1] + (match[3] or ""))
    seconds = round((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp())
    return seconds * _SECOND_NS + int((match[2] or "").ljust(9, "0"))
