"""goodgate arena evidence: what several races have proven, in one file for a gateway or a plan."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from arena.commands.common import Failure, Misuse, errors

if TYPE_CHECKING:
    from arena.evidence.document import Entry

app = typer.Typer()


@app.command()
def evidence(
    races: Annotated[
        list[Path],
        typer.Argument(metavar="DIR...", help="Folders of races, or their evidence.json.", show_default=False),
    ],
    out: Annotated[Path, typer.Option(help="The file to write. One that is evidence already is replaced.")],
) -> None:
    """Merge the evidence of several races. Of two that answer the same question the newest stays, and a whole race goes
    before a quick or a broken-off one; what has expired is left out, and told.

    Example: goodgate arena evidence runs/monday runs/tuesday --out evidence.json
    """
    from arena.evidence.document import EvidenceError, document
    from arena.evidence.files import read, write
    from arena.evidence.merge import merge

    with errors():
        try:
            merged = merge([read(race) for race in races], now=datetime.now(UTC))
            for sentence in merged.told:
                typer.echo(sentence, err=True)
            if not merged.evidence.entries:
                raise Failure("Nothing is left that could be believed; race the engines anew.")
            write(document(merged.evidence.entries, merged.evidence.hosts), out)
        except EvidenceError as error:
            raise Misuse(str(error)) from error
    typer.echo(f"{out}: {len(merged.evidence.entries)} entries of {_races(merged.evidence.entries)} races.")


def _races(entries: tuple[Entry, ...]) -> int:
    return len({entry.run_id for entry in entries})
