"""What a token costs at each engine's goodput: in joules and in money, where they are known. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from arena.judging.results import RaceResult
from arena.reports.document import Block, Cell, Paragraph, Section, Table, Text
from arena.reports.wording import figure


def economy_section(result: RaceResult) -> Iterator[Section]:
    """Nothing where no engine delivered a token."""
    known = [(place, engine, engine.economy) for place, engine in enumerate(result.engines) if engine.economy]
    if not known:
        return
    currency = next((economy.currency for _, _, economy in known if economy.currency), None)
    head = (
        "engine",
        "tokens/s",
        "joules/token",
        "tokens/joule",
        "price/h",
        f"tokens per {currency or 'unit of money'}",
    )
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (
            Text(engine.name, engine=place),
            figure(economy.tokens_per_s),
            figure(economy.joules_per_token),
            figure(economy.tokens_per_joule),
            f"{economy.price_per_hour:g} {economy.currency}" if economy.price_per_hour is not None else "-",
            figure(economy.tokens_per_money),
        )
        for place, engine, economy in known
    )
    blocks: list[Block] = [Table(head, rows, numeric=(1, 2, 3, 4, 5))]
    sources = sorted({source for _, _, economy in known for source in economy.energy_sources})
    if sources:
        blocks.append(
            Paragraph(f"Read from {', '.join(sources)}: whole packages and cards, idle share included.", "soft")
        )
    elif result.notes.energy_missing:
        blocks.append(Paragraph(f"No energy was measured. {' '.join(result.notes.energy_missing)}", "soft"))
    if currency is None:
        blocks.append(
            Paragraph("No price was given; `cost` in the scenario or --price says what an hour costs.", "soft")
        )
    yield Section(
        "economy",
        "What a token costs",
        tuple(blocks),
        "Output tokens, at each engine's goodput, in the measured windows.",
    )
