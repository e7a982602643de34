"""goodgate arena worker: load processes for a race that runs on another host."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Annotated

import msgspec
import typer

from arena.commands.common import Failure, Misuse, errors

app = typer.Typer()


@app.command()
def worker(
    master: Annotated[
        str,
        typer.Option(metavar="HOST:PORT", help="Where `goodgate arena run --master` listens.", show_default=False),
    ],
    cells: Annotated[int, typer.Option(min=0, help="End after so many cells; 0: as long as a master answers.")] = 0,
) -> None:
    """Send part of the load of a race that runs on another host, cell after cell, until Ctrl-C.

    Start as many as the race has --workers, before or after the race. Each is given its share of every plan, and the
    target's address, by the master; run it in networks that you trust. The wall clocks of the hosts have to agree.

    Example: goodgate arena worker --master 10.0.0.5:5557
    """
    with errors():
        host, port = host_and_port(master, "--master")
        done = 0
        while not cells or done < cells:
            if _serve_one_cell(host, port):
                done += 1
                typer.echo(f"Cells served: {done}.", err=True)


def host_and_port(text: str, option: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not (colon and host and re.fullmatch(r"[0-9]{1,5}", port) and 0 < int(port) < 65536):
        raise Misuse(f"{option} {text!r} is not of the form host:port.")
    return host, int(port)


def _serve_one_cell(host: str, port: int) -> bool:
    """False where the master ended without it: the cell was aborted, or over when this worker came."""
    from arena.load.crew_words import MASTER_IS_GONE, Enlistment

    argv = [sys.executable, "-m", "arena.load.load_worker"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        try:
            process.stdin.write(msgspec.json.encode(Enlistment(host, port)) + b"\n")
            process.stdin.flush()  # stays open: its end would end the worker
            said = process.stderr.read().decode("utf-8", "replace").strip()
            code = process.wait()
        finally:
            process.kill()
    if code == MASTER_IS_GONE:
        return False
    if code:
        raise Failure(said.splitlines()[-1] if said else f"The load worker exited with status {code}.")
    return True
