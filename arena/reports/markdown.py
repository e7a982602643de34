"""A document as Markdown, for chats, issues and diffs. Pure. Charts are told by their sentence and their table."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from arena.reports.document import (
    Block,
    Cell,
    Chart,
    Charts,
    Code,
    Document,
    Facts,
    Fold,
    Paragraph,
    Ranking,
    Section,
    Table,
    plain,
)


def markdown(document: Document) -> str:
    parts = [f"# {esc(document.title)}", esc(" · ".join(document.kicker)), *map(esc, document.plain_words)]
    parts += [f"> {esc(notice)}" for notice in document.notices]
    for section in document.sections:
        parts += _section(section)
    return "\n\n".join([*parts, esc(document.footer)]) + "\n"


def _section(section: Section) -> Iterator[str]:
    yield f"## {esc(section.title)}"
    if section.why:
        yield esc(section.why)
    for block in section.blocks:
        yield from _block(block)


def _block(block: Block) -> Iterator[str]:
    match block:
        case Paragraph():
            yield esc(block.words)
        case Facts():
            yield "\n".join(f"- **{esc(name)}**: {_cell(value)}" for name, value in block.rows)
        case Table():
            yield _table(block)
        case Code():
            text = "\n".join(block.lines)
            fence = "`" * max([3, *(len(run) + 1 for run in re.findall("`+", text))])
            yield f"{fence}\n{text}\n{fence}"
        case Ranking():
            yield _ranking(block)
        case Charts():
            for chart in block.charts:
                yield from _chart(chart)
        case Fold():
            yield f"<details><summary>{esc(block.summary)}</summary>"
            for inside in block.blocks:
                yield from _block(inside)
            yield "</details>"


def _chart(chart: Chart) -> Iterator[str]:
    yield f"**{esc(chart.title)}.** {esc(chart.alt)}"
    if chart.table is not None:
        yield _table(chart.table)


def _ranking(ranking: Ranking) -> str:
    latency = ranking.latency_name
    head = ("rank", "engine", "version", "requests/s", "interval", f"TTFT {latency}", f"TPOT {latency}", "in time")
    rows = tuple(
        (
            row.rank,
            row.name,
            row.version,
            f"{row.rate} {row.proof}".strip(),
            row.interval or "-",
            *(words.partition(" ")[2] for words in row.latency or (" -", " -")),
            " ".join(filter(None, (row.in_time, row.unranked))) or "-",
        )
        for row in ranking.rows
    )
    return _table(Table(head, rows, numeric=(0, 3, 4)))


def _table(table: Table) -> str:
    rule = ["---:" if index in table.numeric else "---" for index in range(len(table.head))]
    lines = [_line(esc(name) for name in table.head), _line(rule)]
    return "\n".join([*lines, *(_line(map(_cell, row)) for row in table.rows)])


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(cell: Cell) -> str:
    words = plain(cell)
    is_code = (
        not isinstance(cell, str) and cell.is_code and "`" not in words and "|" not in words and words.isprintable()
    )
    return f"`{words}`" if is_code else esc(words)


def esc(text: str) -> str:
    """No character of a foreign text may become markup, and none may end a line of a table."""
    return re.sub(r"([\\`*_\[\]<>|#~])", r"\\\1", " ".join(text.split()))
