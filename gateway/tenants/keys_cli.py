"""`goodgate keys`: make, show, revoke and rotate API keys. A running gateway follows within a second.

A new key is the only thing on stdout, so that it can go straight into a file or a secret store.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Annotated

import typer

from adapters.config import goodgate_home
from adapters.errors import GoodgateError
from gateway.tenants.keys import Key, KeysError, KeyStore, NewKey
from gateway.tenants.limits import Limits

HELP = """API keys: who may call the gateway, which models, and how much.

Example: goodgate keys create alice --models 'small*' --requests-per-min 60
"""
TITLES = ("name", "tenant", "role", "models", "requests/min", "tokens/min", "at once", "made", "state")
UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_DURATION = re.compile(r"([1-9][0-9]{0,8})([smhd])")

app = typer.Typer(help=HELP, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

Name = Annotated[str, typer.Argument(help="The key's name.", metavar="NAME")]
Limit = Annotated[int | None, typer.Option(min=1, help="Default: no limit.")]


@app.command(epilog="Example: goodgate keys create alice --models 'small*,embed' --tokens-per-min 20000 --expires 30d")
def create(
    name: Name,
    tenant: Annotated[str, typer.Option(help="Whose key it is; default: the key's name.")] = "",
    models: Annotated[
        str, typer.Option(help="Patterns of model names, with commas between; '*' is all of them.", metavar="PATTERNS")
    ] = "*",
    requests_per_min: Limit = None,
    tokens_per_min: Limit = None,
    concurrent: Annotated[int | None, typer.Option(min=1, help="Requests at once. Default: no limit.")] = None,
    expires: Annotated[
        str | None, typer.Option(help="Valid for so long: 90s, 15m, 12h, 30d. Default: for ever.", metavar="TIME")
    ] = None,
    is_admin: Annotated[bool, typer.Option("--admin", help="It may also read /metrics and /admin/status.")] = False,
) -> None:
    """Make a key and print it, once: only its hash is kept. The first one shuts the gateway to callers without."""
    limits = Limits(requests_per_min=requests_per_min, tokens_per_min=tokens_per_min, concurrent=concurrent)
    try:
        new = NewKey(
            name=name,
            tenant=tenant,
            role="admin" if is_admin else "user",
            models=tuple(each.strip() for each in models.split(",")),
            limits=limits,
            expires=None if expires is None else time.time() + seconds(expires),
        )
        _tell(name, _store().create(new))
    except GoodgateError as error:
        _fail(error)


@app.command("list", epilog="Example: goodgate keys list --all")
def show(
    with_revoked: Annotated[bool, typer.Option("--all", help="Revoked keys too.")] = False,
) -> None:
    """Show the keys, without anything that could be used as one."""
    try:
        keys = [key for key in _store().all() if with_revoked or key.revoked is None]
    except GoodgateError as error:
        _fail(error)
    if not keys:
        typer.echo("There are no keys; `goodgate keys create NAME` makes one.", err=True)
        return
    now = time.time()
    for line in table([TITLES, *(row_of(key, now) for key in keys)]):
        typer.echo(line)


@app.command(epilog="Example: goodgate keys revoke alice")
def revoke(name: Name) -> None:
    """Make a key worthless, for good. What it has open goes on to its end."""
    try:
        _store().revoke(name)
    except GoodgateError as error:
        _fail(error)
    typer.echo(f"The key {name!r} is revoked.", err=True)


@app.command(epilog="Example: goodgate keys rotate alice > alice.key")
def rotate(name: Name) -> None:
    """Replace a key by a new one with the same name and limits. The old one is worth nothing from now on."""
    try:
        _tell(name, _store().rotate(name))
    except GoodgateError as error:
        _fail(error)


def seconds(duration: str) -> int:
    """
    >>> seconds("12h")
    43200
    """
    match = _DURATION.fullmatch(duration)
    if match is None:
        raise KeysError(f"{duration!r} is no time; write 90s, 15m, 12h or 30d.")
    return int(match[1]) * UNITS_S[match[2]]


def row_of(key: Key, now: float) -> tuple[str, ...]:
    bounds = (key.limits.requests_per_min, key.limits.tokens_per_min, key.limits.concurrent)
    shown = ("-" if bound is None else str(bound) for bound in bounds)
    return (key.name, key.tenant, key.role, ",".join(key.models), *shown, _day(key.created), state_of(key, now))


def table(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Columns as wide as they need: a name that was cut could not be revoked."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def state_of(key: Key, now: float) -> str:
    if key.revoked is not None:
        return f"revoked {_day(key.revoked)}"
    if key.expires is None:
        return "valid"
    return f"{'valid until' if key.is_valid(now) else 'expired'} {_day(key.expires)}"


def _day(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M}Z"


def _store() -> KeyStore:
    return KeyStore(goodgate_home())


def _tell(name: str, secret: str) -> None:
    typer.echo(f"The key {name!r}; it is not kept, and cannot be shown again:", err=True)
    typer.echo(secret)


def _fail(error: GoodgateError) -> None:
    typer.echo(error.message, err=True)
    raise typer.Exit(1)
