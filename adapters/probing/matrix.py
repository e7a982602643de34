"""The capability matrix: what every engine is declared to do, as its own adapter says it.

    columns = all_columns()                   # one for each engine, and for each route or dialect of it
    print(as_markdown(columns))

An adapter is made for each column, without a connection, and once more for each option that may widen what it offers.
So a cell has three states: offered, offered with an option, not offered. Nothing in the cells is written by hand.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, TypeAlias

import msgspec
from msgspec import Struct
from rich.table import Table
from rich.text import Text

from adapters.base import Capabilities
from adapters.launching.launch import Installable, Launchable
from adapters.registry import AdapterClass, adapter_class, engine_names
from adapters.types import INFORMATIONAL, ChatRequest, CompletionRequest

Options: TypeAlias = Mapping[str, Any]

NOWHERE = "http://127.0.0.1:9"  # the discard port: an adapter is made for a url, and nothing ever connects
A_MODEL = "model"  # likewise: a name, never looked up


# Columns of engines with several routes or dialects: the options that choose one. The others have one column.
VARIANTS: Mapping[str, Mapping[str, Options]] = {
    "sglang": {"openai": {"route": "openai"}, "native": {"route": "native"}},
    "tgi": {"generate": {"route": "generate"}, "openai": {"route": "openai"}},
    "triton_server": {"llmapi": {"dialect": "llmapi"}, "ensemble": {"dialect": "ensemble"}},
}
# What to try of options that are no switch. Switches are found, and tried, by themselves.
TRIED: Options = {
    "chat_template": A_MODEL,
    "metrics_url": NOWHERE,
    "content_parts": ["image_url"],
    "speculation": "ngram",
}


class Offer(StrEnum):
    """A cell. Each word is also its mark, so that the table reads the same without colour."""

    YES = "yes"
    OPTION = "opt"
    NO = "-"


LEGEND = {
    Offer.YES: "offered, and honoured by the engine",
    Offer.OPTION: "offered once an option is given",
    Offer.NO: "not offered: refused by name, never ignored",
}


class Column(Struct, frozen=True, kw_only=True):
    """One engine, or one route of it: what its adapter offers as it comes, and with each option that widens it."""

    engine: str
    variant: str
    start: str  # how one gets a running engine
    plain: Capabilities
    wider: Mapping[str, Capabilities]  # by option

    @property
    def name(self) -> str:
        return f"{self.engine} {self.variant}".rstrip()

    @property
    def words(self) -> str:
        """The name in pieces that a narrow column can break between."""
        return self.name.replace("_", " ")


class Row(Struct, frozen=True):
    """One capability, and how it is read from what an adapter declares. `key` is its name in the code."""

    key: str
    name: str
    is_in: Callable[[Capabilities], bool]


# What is asked of an engine beside its parameters: the field of `Capabilities`, and what it is called in the table.
ROUTES = {
    "chat": "chat",
    "completions": "completions",
    "embeddings": "embeddings",
    "dimensions": "chosen dimensions",
    "tokenize": "tokenise a text",
    "tokenize_chat": "tokenise a chat",
    "detokenize": "detokenise",
    "token_prompts": "prompts of token ids",
    "usage_so_far": "usage in each event",
    "parts": "images or sounds in messages",
}
SALTED = {"chat": "tenants apart in chats", "completions": "tenants apart in completions"}
LOAD = {
    "running": "running requests",
    "waiting": "waiting requests",
    "kv_usage": "KV cache use",
    "prefix_hit_rate": "prefix cache hits",
    "draft_tokens": "draft tokens",
    "accepted_draft_tokens": "accepted draft tokens",
}
# Every request field that an engine may honour or not, in groups; a test sees to it that none is missing.
PARAMETERS = {
    "limits": ("max_tokens", "max_completion_tokens", "min_tokens", "ignore_eos", "stop"),
    "sampling": ("temperature", "top_p", "top_k", "min_p", "seed", "logit_bias", "bad_words"),
    "penalties": ("presence_penalty", "frequency_penalty", "repetition_penalty"),
    "choices and text": ("n", "best_of", "echo", "suffix"),
    "log-probabilities": ("logprobs", "top_logprobs"),
    "tools": ("tools", "tool_choice", "parallel_tool_calls", "functions", "function_call"),
    "structured output": ("response_format",),
    "reasoning": ("reasoning_effort", "prediction"),
    "beyond text": ("modalities", "audio", "web_search_options"),
}


def request_fields() -> frozenset[str]:
    """The fields that a client may ask an engine for something with, prompt and messages aside."""
    fields = {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__}
    return frozenset(fields - INFORMATIONAL - {"messages", "prompt", "continuation"})


def groups() -> Iterator[tuple[str, list[Row]]]:
    """The rows, group by group."""
    yield "routes", [Row(field, label, _has(field)) for field, label in ROUTES.items()]
    for group, fields in PARAMETERS.items():
        yield group, [Row(field, field, _honours(field)) for field in fields]
    yield "prefix cache", [Row(f"cache_salt.{route}", label, _salts(route)) for route, label in SALTED.items()]
    yield "load told", [Row(field, label, _tells(field)) for field, label in LOAD.items()]


def _has(field: str) -> Callable[[Capabilities], bool]:
    return lambda capabilities: bool(getattr(capabilities, field))


def _honours(field: str) -> Callable[[Capabilities], bool]:
    return lambda capabilities: field in capabilities.parameters


def _salts(route: str) -> Callable[[Capabilities], bool]:
    return lambda capabilities: route in capabilities.cache_salt


def _tells(field: str) -> Callable[[Capabilities], bool]:
    return lambda capabilities: field in capabilities.load


def offer(row: Row, column: Column) -> Offer:
    if row.is_in(column.plain):
        return Offer.YES
    return Offer.OPTION if any(map(row.is_in, column.wider.values())) else Offer.NO


# ------------------------------------------------------------------------------------------------------------- columns


def all_columns() -> list[Column]:
    """Engines that are started from here first, then those that are reached where they run; both by name."""
    columns = [each for name in engine_names() for each in columns_of(adapter_class(name), name)]
    return sorted(columns, key=lambda column: (column.start in (BY_URL, ELSEWHERE), column.name))


def columns_of(adapter: AdapterClass, engine: str) -> Iterator[Column]:
    for variant, fixed in VARIANTS.get(engine, {"": {}}).items():
        plain = capabilities(adapter, fixed)
        yield Column(
            engine=engine,
            variant=variant,
            start=how_started(adapter),
            plain=plain,
            wider=dict(wider(adapter, fixed, plain)),
        )


def wider(adapter: AdapterClass, fixed: Options, plain: Capabilities) -> Iterator[tuple[str, Capabilities]]:
    """The options that add something, with what there is then. Some do not go with every route: they add nothing."""
    for option, value in options_to_try(adapter):
        with contextlib.suppress(msgspec.ValidationError):
            offered = capabilities(adapter, {**fixed, option: value})
            if is_more(offered, plain):
                yield option, offered


def options_to_try(adapter: AdapterClass) -> Iterator[tuple[str, Any]]:
    """Every switch that is off, switched on; and the others that may widen an offer."""
    for field in msgspec.structs.fields(adapter.Options):
        if field.default is False:
            yield field.name, True
        elif field.name in TRIED:
            yield field.name, TRIED[field.name]


def is_more(offered: Capabilities, plain: Capabilities) -> bool:
    return any(row.is_in(offered) and not row.is_in(plain) for _, rows in groups() for row in rows)


BY_URL, ELSEWHERE = "by url", "elsewhere"


def how_started(adapter: AdapterClass) -> str:
    if adapter.in_process:
        return "in process"
    if issubclass(adapter, Installable):
        return "installed"
    if issubclass(adapter, Launchable):
        return "built in"
    return BY_URL if "url" in adapter.Options.__struct_fields__ else ELSEWHERE


def capabilities(adapter: AdapterClass, options: Options) -> Capabilities:
    """What an adapter with these options offers. Keys that every engine of its kind requires are filled in."""
    required = {"url": NOWHERE, "model": A_MODEL}
    known = {name: value for name, value in required.items() if name in adapter.Options.__struct_fields__}
    return adapter(msgspec.convert({**known, **options}, adapter.Options)).capabilities


# --------------------------------------------------------------------------------------------------------------- faces


def as_json(columns: Sequence[Column]) -> bytes:
    """For machines: each engine with its offer by group."""
    engines = [
        {
            "engine": column.engine,
            "variant": column.variant,
            "start": column.start,
            "options": list(column.wider),
            "offers": {group: {row.name: offer(row, column) for row in rows} for group, rows in groups()},
        }
        for column in columns
    ]
    return msgspec.json.format(msgspec.json.encode({"legend": LEGEND, "engines": engines}))


def as_markdown(columns: Sequence[Column]) -> str:
    """One table, with the groups as rows of their own."""
    lines = [_markdown_row("", *(column.words for column in columns)), "|---" * (len(columns) + 1) + "|"]
    lines.append(_markdown_row("started", *(column.start for column in columns)))
    for group, rows in groups():
        lines.append(_markdown_row(f"**{group}**", *("" for _ in columns)))
        lines += [_markdown_row(row.name, *(offer(row, column) for column in columns)) for row in rows]
    return "\n".join([*lines, "", *legend(columns)])


def as_fields(columns: Sequence[Column]) -> str:
    """The same by request field: which engines honour it, which with an option, and which refuse it."""
    lines = [_markdown_row("field", "honoured by", "with an option by", "refused by"), "|---" * 4 + "|"]
    parameters = [row for group, rows in groups() if group in PARAMETERS for row in rows]
    for row in parameters:
        found = {mark: [column.name for column in columns if offer(row, column) is mark] for mark in Offer}
        longest = max(found, key=lambda mark: len(found[mark]))
        rest = "all" if len(found[longest]) == len(columns) else "all others"
        cells = [rest if mark is longest else ", ".join(names) or "-" for mark, names in found.items()]
        lines.append(_markdown_row(f"`{row.name}`", *cells))
    return "\n".join(lines)


def _markdown_row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def legend(columns: Sequence[Column]) -> list[str]:
    """What the marks mean, and which options "opt" speaks of."""
    marks = "; ".join(f"`{mark}` {meaning}" for mark, meaning in LEGEND.items())
    options = "; ".join(f"{column.name}: {', '.join(column.wider)}" for column in columns if column.wider)
    return [f"{marks}.", f"Options: {options}."] if options else [f"{marks}."]


_STYLES = {Offer.YES: "green", Offer.OPTION: "yellow", Offer.NO: "dim"}
_PADDING = 2


def as_tables(columns: Sequence[Column], width: int) -> Iterator[Table]:
    """The matrix for a terminal: as many engines side by side as fit, the others in tables below."""
    for block in blocks(columns, width):
        table = Table(box=None, header_style="bold", padding=(0, _PADDING, 0, 0))
        table.add_column("", no_wrap=True)
        for column in block:
            table.add_column(column.words, width=_width(column))
        table.add_row("started", *(Text(column.start) for column in block), end_section=True)
        for group, rows in groups():
            table.add_row(Text(group, style="bold"))
            for row in rows:
                cells = [offer(row, column) for column in block]
                table.add_row(f"  {row.name}", *(Text(cell, style=_STYLES[cell]) for cell in cells))
        yield table


def blocks(columns: Sequence[Column], width: int) -> Iterator[list[Column]]:
    """Columns that fit beside the names of the rows, block after block; at least one in each."""
    room = width - max(len(row.name) + 2 for _, rows in groups() for row in rows) - _PADDING
    block: list[Column] = []
    taken = 0
    for column in columns:
        needed = _width(column) + _PADDING
        if block and taken + needed > room:
            yield block
            block, taken = [], 0
        block.append(column)
        taken += needed
    if block:
        yield block


def _width(column: Column) -> int:
    """Wide enough for the longest word above the marks."""
    return max(map(len, [*column.words.split(), *column.start.split()]))
