"""What an experiment leaves: NAME.svg, NAME.md and NAME.json, and a page of all that lie in the folder.

write(out, Ran("kv-cache", TITLE, question, shown, facts, found))
(out / "README.md").write_text(index(out))
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from native_engine.lab.catalogue import QUESTIONS
from native_engine.lab.picture import Charts, Document, Facts, Section, Shown, legend, markdown, sheet

INDEX = "README.md"
WHISKERS = "Points are medians of repeats in alternation, their whiskers the least and the most."


@dataclass(frozen=True, slots=True)
class Ran:
    """`facts`: what was measured on, by name. `found`: the experiment's dataclass."""

    name: str
    title: str
    shown: Shown
    facts: Mapping[str, str]
    found: Any


def write(out: Path, ran: Ran) -> None:
    (out / f"{ran.name}.svg").write_text(figure(ran), "utf-8")
    (out / f"{ran.name}.md").write_text(page(ran), "utf-8")
    data = {
        "experiment": ran.name,
        "title": ran.title,
        "says": ran.shown.says,
        "facts": dict(ran.facts),
        "found": asdict(ran.found),
    }
    (out / f"{ran.name}.json").write_text(json.dumps(data, indent=1) + "\n", "utf-8")


def figure(ran: Ran) -> str:
    charts = Charts(ran.shown.charts, legend(ran.shown.charts))
    facts = [" · ".join(f"{name}: {words}" for name, words in ran.facts.items()), WHISKERS]
    return sheet(ran.title, ran.shown.says, charts, facts)


def page(ran: Ran) -> str:
    document = Document(
        title=ran.title,
        kicker=(QUESTIONS[ran.name],),
        plain_words=(ran.shown.says,),
        notices=(),
        sections=(
            *(Section("", title, (table,)) for title, table in ran.shown.tables),
            Section("", "Measured on", (Facts(tuple(ran.facts.items())),)),
        ),
        footer=f"{WHISKERS} In tables they stand in brackets.",
    )
    heading, rest = markdown(document).split("\n\n", 1)
    return f"{heading}\n\n![{ran.title}]({ran.name}.svg)\n\n{rest}"


def index(out: Path) -> str:
    """The page of a folder: every experiment that has left its JSON there, in the order of the catalogue."""
    return "\n".join([*_index_lines(out)])


def _index_lines(out: Path) -> Iterator[str]:
    yield "# Experiments on the native engine"
    yield ""
    yield (
        "Each runs one classic experiment on the engine that serves, with a real model, and leaves a figure, tables, "
        "and all that was measured. `goodgate lab list` names them, `goodgate lab all --out docs/labs` writes it, "
        "`--quick` is a smaller form of less than half a minute each."
    )
    for name, question in QUESTIONS.items():
        if not (out / f"{name}.json").is_file():
            continue
        left = json.loads((out / f"{name}.json").read_text("utf-8"))
        yield from ("", f"## {left['title']}", "", question, "", f"![{left['title']}]({name}.svg)", "", left["says"])
        yield ""
        facts = "; ".join(f"{fact}: {words}" for fact, words in left["facts"].items() if fact != "command")
        yield f"`{left['facts']['command']}`: [tables]({name}.md), [all figures as JSON]({name}.json). {facts}."
    yield ""
