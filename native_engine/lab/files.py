"""What an experiment leaves: NAME.svg, NAME.md and NAME.json, and a page of all that lie in the folder.

write(out, Ran("kv-cache", facts, found))
write_index(out)
read(out, "kv-cache")           # the same again, from its JSON
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from native_engine.lab.catalogue import QUESTIONS, load
from native_engine.lab.picture import Charts, Document, Facts, Section, Shown, legend, markdown, sheet

INTRODUCTION = """# Experiments on the native engine

Each runs one classic experiment on the engine that serves, with a real model, and leaves a figure, tables, and all that
was measured. `goodgate lab list` names them, `goodgate lab all` runs them, `--quick` in a smaller form of less than
half a minute each. `goodgate lab draw --out docs/labs` wrote this page, and its figures out of what was measured."""
WHISKERS = "Points are medians of repeats in alternation, their whiskers the least and the most."


@dataclass(frozen=True, slots=True)
class Ran:
    """`facts`: what was measured on, by name. `found`: the experiment's own dataclass."""

    name: str
    facts: Mapping[str, str]
    found: Any

    @property
    def title(self) -> str:
        return load(self.name).TITLE

    @property
    def shown(self) -> Shown:
        return load(self.name).show(self.found)


def write(out: Path, ran: Ran) -> None:
    (out / f"{ran.name}.svg").write_text(figure(ran), "utf-8")
    (out / f"{ran.name}.md").write_text(page(ran), "utf-8")
    data = {"experiment": ran.name, "facts": dict(ran.facts), "found": asdict(ran.found)}
    (out / f"{ran.name}.json").write_text(json.dumps(data, indent=1) + "\n", "utf-8")


def write_index(out: Path) -> None:
    (out / "README.md").write_text(index(list(left_in(out))), "utf-8")


def left_in(out: Path) -> Iterator[Ran]:
    """Every experiment that has left its JSON there, in the order of the catalogue."""
    return (read(out, name) for name in QUESTIONS if (out / f"{name}.json").is_file())


def read(out: Path, name: str) -> Ran:
    """`ValueError`: the file was not written by this experiment as it is now."""
    try:
        data = msgspec.json.decode((out / f"{name}.json").read_bytes())
        return Ran(name, data["facts"], msgspec.convert(data["found"], load(name).Found))
    except (msgspec.MsgspecError, KeyError, TypeError) as error:
        raise ValueError(f"{out / name}.json is not what {name} leaves; run `goodgate lab {name}` again.") from error


def figure(ran: Ran) -> str:
    shown = ran.shown
    facts = [" · ".join(f"{name}: {words}" for name, words in ran.facts.items()), WHISKERS]
    return sheet(ran.title, shown.says, Charts(shown.charts, legend(shown.charts)), facts)


def page(ran: Ran) -> str:
    shown = ran.shown
    document = Document(
        title=ran.title,
        kicker=(QUESTIONS[ran.name],),
        plain_words=(shown.says,),
        notices=(),
        sections=(
            *(Section("", title, (table,)) for title, table in shown.tables),
            Section("", "Measured on", (Facts(tuple(ran.facts.items())),)),
        ),
        footer=f"{WHISKERS} In tables they stand in brackets.",
    )
    heading, rest = markdown(document).split("\n\n", 1)
    return f"{heading}\n\n![{ran.title}]({ran.name}.svg)\n\n{rest}"


def index(every: Sequence[Ran]) -> str:
    """The page of a folder."""
    return "\n".join([INTRODUCTION, *(line for ran in every for line in _entry(ran)), ""])


def _entry(ran: Ran) -> Iterator[str]:
    yield from ("", f"## {ran.title}", "", QUESTIONS[ran.name], "", f"![{ran.title}]({ran.name}.svg)", "")
    facts = "; ".join(f"{fact}: {words}" for fact, words in ran.facts.items() if fact != "command")
    yield from (ran.shown.says, "")
    yield f"`{ran.facts['command']}`: [tables]({ran.name}.md), [all figures as JSON]({ran.name}.json). {facts}."
