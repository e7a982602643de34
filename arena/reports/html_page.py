"""A document as one HTML file: no script, no network, all styles inside. Pure.

A content security policy in its head says so to the browser: nothing may be loaded and nothing may run. Every text is
escaped here and nowhere else. On narrow screens tables become lists, each value beside the name of its column.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from importlib.resources import files
from itertools import groupby

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
    Standing,
    Table,
)
from arena.reports.svg import draw, mark, place

FEW = 4  # columns that have room on every screen
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page(document: Document) -> str:
    style = "".join(files("arena.reports").joinpath(name).read_text("utf-8") for name in ("charts.css", "report.css"))
    body = "".join(
        [
            _head(document),
            *(f"<section class='note'><p>{esc(notice)}</p></section>" for notice in document.notices),
            *_sections(document.sections),
        ]
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{esc(document.title)}</title><style>{style}</style></head><body>"
        f'<a class="skip" href="#ranking">Skip to the ranking</a><main>{body}</main>'
        f"<footer>{esc(document.footer)}</footer></body></html>\n"
    )


def _head(document: Document) -> str:
    lead = "".join(f'<p class="lead">{esc(words)}</p>' for words in document.plain_words)
    links = "".join(f'<a href="#{esc(anchor)}">{esc(title)}</a>' for anchor, title in document.links)
    kicker = " &middot; ".join(map(esc, document.kicker))
    return (
        f'<header><div class="kicker">{kicker}</div><h1>{esc(document.title)}</h1>{lead}'
        f'<nav aria-label="Sections">{links}</nav></header>'
    )


def _sections(sections: Sequence[Section]) -> Iterator[str]:
    for is_half, group in groupby(sections, key=lambda section: section.is_half):
        parts = "".join(map(_section, group))
        yield f'<div class="two">{parts}</div>' if is_half else parts


def _section(section: Section) -> str:
    why = f'<p class="why">{esc(section.why)}</p>' if section.why else ""
    anchor, blocks = esc(section.anchor), "".join(map(_block, section.blocks))
    head = f'<h2 id="h-{anchor}">{esc(section.title)}</h2>'
    return f'<section id="{anchor}" aria-labelledby="h-{anchor}">{head}{why}{blocks}</section>'


def _block(block: Block) -> str:
    match block:
        case Paragraph():
            return f'<p class="{block.tone}">{esc(block.words)}</p>'
        case Facts():
            return f"<dl>{''.join(f'<dt>{esc(name)}</dt><dd>{_cell(value)}</dd>' for name, value in block.rows)}</dl>"
        case Table():
            return _table(block)
        case Code():
            return f'<pre tabindex="0"><code>{esc(chr(10).join(block.lines))}</code></pre>'
        case Ranking():
            return _ranking(block)
        case Charts():
            return _charts(block)
        case Fold():
            state = " open" if block.is_open else ""
            inside = "".join(map(_block, block.blocks))
            return f"<details{state}><summary>{esc(block.summary)}</summary>{inside}</details>"


def _cell(cell: Cell) -> str:
    if isinstance(cell, str):
        return esc(cell)
    words = f"<code>{esc(cell.words)}</code>" if cell.is_code else esc(cell.words)
    symbol = mark(cell.engine) if cell.engine is not None else ""
    hint = f' title="{esc(cell.hint)}"' if cell.hint else ""
    kind = f' class="{cell.tone}"' if cell.tone else ""
    return f"{symbol}<span{kind}{hint}>{words}</span>" if symbol or kind or hint else words


def _table(table: Table) -> str:
    kinds = [' class="num"' if index in table.numeric else "" for index in range(len(table.head))]
    top = "".join(f'<th scope="col"{kind}>{esc(name)}</th>' for kind, name in zip(kinds, table.head, strict=True))
    body = "".join(f"<tr>{_row(table.head, kinds, row)}</tr>" for row in table.rows)
    size = "many" if len(table.head) > FEW else "few"
    return f'<table class="{size}"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>'


def _row(head: Sequence[str], kinds: Sequence[str], row: Sequence[Cell]) -> str:
    """`data-name` stands before the value where the table has become a list."""
    return "".join(
        f'<td{kind} data-name="{esc(name)}"><span>{_cell(cell)}</span></td>'
        for name, kind, cell in zip(head, kinds, row, strict=True)
    )


def _ranking(ranking: Ranking) -> str:
    ticks = "".join(f'<span style="left:{at:.2f}%">{esc(words)}</span>' for at, words in ranking.ticks)
    head = (
        '<li class="row head" aria-hidden="true"><div>Rank</div><div>Engine</div><div>Goodput</div>'
        f'<div>{esc(ranking.interval_name)}<div class="axis">{ticks}</div></div>'
        f"<div>{esc(ranking.latency_name)}</div></li>"
    )
    return f'<ol class="standing">{head}{"".join(map(_standing, ranking.rows))}</ol>'


def _standing(row: Standing) -> str:
    unranked = f'<div class="out">{esc(row.unranked)}</div>' if row.unranked else ""
    unit = f"requests/s, {row.proof}" if row.proof else ""
    latency = "".join(f"<div>{esc(words)}</div>" for words in row.latency)
    return (
        f'<li class="row"><div class="rank"><span class="hidden">rank </span>{esc(row.rank)}</div>'
        f'<div><span class="engine">{mark(row.engine)}{esc(row.name)}</span>'
        f'<span class="small">{esc(row.version)}</span></div>'
        f'<div><span class="rate">{esc(row.rate)}</span><span class="small">{esc(unit)}</span></div>'
        f'<div class="interval">{_bar(row)}{unranked}</div>'
        f'<div class="latency">{latency}<span class="small">{esc(row.in_time)}</span></div></li>'
    )


def _bar(row: Standing) -> str:
    if row.span is None or row.point is None:
        return ""
    left, right = row.span
    colour = f"e{place(row.engine)}"
    kind = f"span {colour}{' open' if row.open_above else ''}"
    return (
        '<div class="track" aria-hidden="true">'
        f'<div class="{kind}" style="left:{left:.2f}%;width:{right - left:.2f}%"></div>'
        f'<div class="point {colour}" style="left:{row.point:.2f}%"></div></div>'
        f'<span class="small">{esc(row.interval)}</span>'
    )


def _charts(charts: Charts) -> str:
    names = "".join(f"<li>{mark(engine)}{esc(name)}</li>" for engine, name in charts.legend)
    legend = f'<ul class="legend">{names}</ul>' if names else ""
    kind = "charts four" if len(charts.charts) % 4 == 0 else "charts"
    return f'{legend}<div class="{kind}">{"".join(map(_figure, charts.charts))}</div>'


def _figure(chart: Chart) -> str:
    figures = ""
    if chart.table is not None:
        name = esc(f"The figures: {chart.title}")
        figures = f'<details><summary aria-label="{name}">The figures</summary>{_table(chart.table)}</details>'
    return f"<figure><figcaption>{esc(chart.title)}</figcaption>{draw(chart)}{figures}</figure>"


def esc(text: str) -> str:
    return html.escape(text)
