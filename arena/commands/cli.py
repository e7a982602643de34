"""goodgate arena: its commands, one module each group."""

from __future__ import annotations

import typer

from arena.commands import (
    burst,
    calibrate,
    evidence,
    folders,
    gateway_cost,
    history,
    preview,
    run,
    truth,
    tune,
    worker,
)

app = typer.Typer(
    help="Race engines on goodput: the highest rate of requests at which the latency targets hold.",
    epilog="Example: goodgate arena run chat --quick",
    no_args_is_help=True,
)
for group in (run, tune, preview, burst, folders, history, evidence, gateway_cost, truth, worker, calibrate):
    app.add_typer(group.app)


if __name__ == "__main__":
    app()
