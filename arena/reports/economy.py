"""What a token costs at each engine's goodput: in joules and in money, where they are known. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from arena.judging.economy import Economy
from arena.judging.results import RaceResult
from arena.reports.document import Block, Cell, Paragraph, Section, Table, Text
from arena.reports.wording import figure


def economy_section(result: RaceResult) -> Iterator[Section]:
    """Nothing where no engine delivered a token."""
    known = [(place, engine, engine.economy) for place, engine in enumerate(result.engines) if engine.economy]
    if not known:
        return
    currency = next((economy.currency for _, _, economy in known if economy.currency), None)
    columns: list[tuple[str, Callable[[Economy], str]]] = [("tokens/s", lambda each: figure(each.tokens_per_s))]
    if any(economy.joules_per_token is not None for _, _, economy in known):
        columns.append(("joules/token", lambda each: figure(each.joules_per_token)))
        columns.append(("tokens/joule", lambda each: figure(each.tokens_per_joule)))
    if currency is not None:
        columns.append((f"{currency}/h", lambda each: figure(each.price_per_hour)))
        columns.append((f"tokens per {currency}", lambda each: figure(each.tokens_per_money)))
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (Text(engine.name, engine=place), *(words(economy) for _, words in columns)) for place, engine, economy in known
    )
    head = ("engine", *(name for name, _ in columns))
    blocks: list[Block] = [Table(head, rows, numeric=tuple(range(1, len(head))))]
    sources = sorted({source for _, _, economy in known for source in economy.energy_sources})
    if sources:
        blocks.append(
            Paragraph(f"Read from {', '.join(sources)}: whole packages and cards, idle share included.", "soft")
        )
    elif result.notes.energy_missing:
        blocks.append(Paragraph(f"No energy was measured. {' '.join(result.notes.energy_missing)}", "soft"))
    if currency is None:
        blocks.append(
            Paragraph("No price was given; cost in the scenario, or --price, says what an hour costs.", "soft")
        )
    yield Section(
        "economy",
        "What a token costs",
        tuple(blocks),
        "Output tokens, at each engine's goodput, in the measured windows.",
    )
