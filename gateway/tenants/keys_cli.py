"""`goodgate keys`: make, show, revoke and rotate API keys. A running gateway follows within a second.

A new key is the only thing on stdout, so that it can go straight into a file or a secret store.
"""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime
from enum import Enum
from typing import Annotated

import typer

from adapters.config import goodgate_home
from adapters.errors import GoodgateError
from gateway.admission.priority import Priority
from gateway.commands.table import table
from gateway.tenants import budgets, quotas_file
from gateway.tenants.accounts import Account
from gateway.tenants.budgets import NO_BUDGET, Budget, Period
from gateway.tenants.keys import Key, KeysError, KeyStore, NewKey
from gateway.tenants.limits import Limits

HELP = """API keys: who may call the gateway, which models, and how much.

Example: goodgate keys create alice --models 'small*' --requests-per-min 60 --budget-tokens 1M
"""
BOUNDS = ("requests/min", "tokens/min", "at once", "tokens", "GPU-seconds")
TITLES = ("name", "tenant", "role", "models", "priority", *BOUNDS, "made", "state")
TENANT_TITLES = ("tenant", *BOUNDS)
SCALES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}
UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_AMOUNT = re.compile(r"([1-9][0-9]{0,14})([kMG]?)")
_DURATION = re.compile(r"([1-9][0-9]{0,8})([smhd])")


class PeriodName(Enum):
    DAY = "day"
    MONTH = "month"
    LIFE = "life"


class PriorityName(Enum):
    HIGH = "high"
    DEFAULT = "default"
    LOW = "low"


app = typer.Typer(help=HELP, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

Name = Annotated[str, typer.Argument(help="The key's name.", metavar="NAME")]
Limit = Annotated[int | None, typer.Option(min=1, help="Default: no limit.")]
AtOnce = Annotated[int | None, typer.Option(min=1, help="Requests at once. Default: no limit.")]
Tokens = Annotated[str | None, typer.Option(help="Tokens in a period: 500k, 1M. Default: no bound.", metavar="AMOUNT")]
GpuSeconds = Annotated[
    str | None,
    typer.Option(help="Seconds of engines' time in a period: 3600, 20k. Default: no bound.", metavar="AMOUNT"),
]
Per = Annotated[
    PeriodName, typer.Option(help="Budgets begin anew each day or month (UTC), or never.", show_default=True)
]


@app.command(epilog="Example: goodgate keys create alice --models 'small*,embed' --tokens-per-min 20000 --expires 30d")
def create(
    name: Name,
    tenant: Annotated[str, typer.Option(help="Whose key it is; default: the key's name.")] = "",
    models: Annotated[
        str, typer.Option(help="Patterns of model names, with commas between; '*' is all of them.", metavar="PATTERNS")
    ] = "*",
    requests_per_min: Limit = None,
    tokens_per_min: Limit = None,
    concurrent: AtOnce = None,
    budget_tokens: Tokens = None,
    budget_gpu_seconds: GpuSeconds = None,
    budget_per: Per = PeriodName.MONTH,
    priority: Annotated[
        PriorityName, typer.Option(help="The class of its requests; they may ask for a lower one, and for no higher.")
    ] = PriorityName.DEFAULT,
    expires: Annotated[
        str | None, typer.Option(help="Valid for so long: 90s, 15m, 12h, 30d. Default: for ever.", metavar="TIME")
    ] = None,
    is_admin: Annotated[
        bool, typer.Option("--admin", help="It may also read /metrics and /admin/..., and load and unload models.")
    ] = False,
) -> None:
    """Make a key and print it, once: only its hash is kept. The first one shuts the gateway to callers without."""
    limits = Limits(requests_per_min=requests_per_min, tokens_per_min=tokens_per_min, concurrent=concurrent)
    try:
        budget = _budget(budget_tokens, budget_gpu_seconds, budget_per)
        new = NewKey(
            name=name,
            tenant=tenant,
            role="admin" if is_admin else "user",
            models=tuple(each.strip() for each in models.split(",")),
            limits=limits,
            budget=budget,
            priority=Priority[priority.name],
            expires=None if expires is None else time.time() + seconds(expires),
        )
        _tell(name, _store().create(new))
    except GoodgateError as error:
        _fail(error)


@app.command("list", epilog="Example: goodgate keys list --all")
def show(
    with_revoked: Annotated[bool, typer.Option("--all", help="Revoked keys too.")] = False,
) -> None:
    """Show the keys, without anything that could be used as one, and what tenants share.

    Of budgets it shows what is spent too, where this machine keeps that."""
    now = time.time()
    try:
        keys = [key for key in _store().all() if with_revoked or key.revoked is None]
        rows = [
            (key.name, key.tenant, key.role, ",".join(key.models), key.priority.label, *_shown_bounds(key.own, now))
            for key in keys
        ]
        tenants = [(tenant.name, *_shown_bounds(tenant, now)) for tenant in _store().tenants()]
    except GoodgateError as error:
        _fail(error)
    if not keys:
        typer.echo("There are no keys; `goodgate keys create NAME` makes one.", err=True)
        return
    states = ((_day(key.created), state_of(key, now)) for key in keys)
    for line in table([TITLES, *((*row, *state) for row, state in zip(rows, states, strict=True))]):
        typer.echo(line)
    if tenants:
        typer.echo()
        for line in table([TENANT_TITLES, *tenants]):
            typer.echo(line)


@app.command(epilog="Example: goodgate keys limit alice --requests-per-min 120 --budget-tokens 2M")
def limit(
    name: Name,
    requests_per_min: Limit = None,
    tokens_per_min: Limit = None,
    concurrent: AtOnce = None,
    budget_tokens: Tokens = None,
    budget_gpu_seconds: GpuSeconds = None,
    budget_per: Per = PeriodName.MONTH,
) -> None:
    """Say anew what a key may use.

    It replaces what was said before; without options nothing is bounded. What the key has used goes on counting."""
    limits = Limits(requests_per_min=requests_per_min, tokens_per_min=tokens_per_min, concurrent=concurrent)
    try:
        _store().limit(name, limits, _budget(budget_tokens, budget_gpu_seconds, budget_per))
    except GoodgateError as error:
        _fail(error)
    typer.echo(f"The key {name!r} is bounded so from now on.", err=True)


@app.command(epilog="Example: goodgate keys tenant acme --budget-tokens 10M --budget-per day --concurrent 50")
def tenant(
    name: Annotated[str, typer.Argument(help="The tenant's name.", metavar="NAME")],
    requests_per_min: Limit = None,
    tokens_per_min: Limit = None,
    concurrent: AtOnce = None,
    budget_tokens: Tokens = None,
    budget_gpu_seconds: GpuSeconds = None,
    budget_per: Per = PeriodName.MONTH,
) -> None:
    """Say what all keys of a tenant may use together, each within its own limits.

    It replaces what was said before; without options nothing is bounded."""
    limits = Limits(requests_per_min=requests_per_min, tokens_per_min=tokens_per_min, concurrent=concurrent)
    try:
        _store().bound(name, limits, _budget(budget_tokens, budget_gpu_seconds, budget_per))
    except GoodgateError as error:
        _fail(error)
    typer.echo(f"The tenant {name!r} is bounded so from now on.", err=True)


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


def amount(text: str) -> int:
    """
    >>> amount("20k")
    20000
    """
    match = _AMOUNT.fullmatch(text)
    if match is None:
        raise KeysError(f"{text!r} is no amount; write 3600, 500k, 1M or 2G.")
    return int(match[1]) * SCALES[match[2]]


def _budget(tokens: str | None, gpu_seconds: str | None, per: PeriodName) -> Budget:
    return Budget(
        tokens=None if tokens is None else amount(tokens),
        gpu_seconds=None if gpu_seconds is None else amount(gpu_seconds),
        per=per.value,
    )


def _shown_bounds(account: Account, now: float) -> tuple[str, ...]:
    """One cell for each of BOUNDS."""
    limits, budget = account.limits, account.budget
    rates = (limits.requests_per_min, limits.tokens_per_min, limits.concurrent)
    spent = None
    if budget != NO_BUDGET and (found := quotas_file.spending(goodgate_home(), [account])) is not None:
        spent = budgets.current(budget, found[0], now)
    return (
        *("-" if rate is None else str(rate) for rate in rates),
        _shown_budget(budget.tokens, None if spent is None else spent.tokens, budget.per),
        _shown_budget(budget.gpu_seconds, None if spent is None else spent.gpu_us // budgets.US, budget.per),
    )


def _shown_budget(bound: int | None, spent: int | None, per: Period) -> str:
    """
    >>> _shown_budget(1_000_000, 1_234, "month")
    '1,234 of 1,000,000 a month'
    """
    if bound is None:
        return "-"
    return f"{'?' if spent is None else f'{spent:,}'} of {bound:,} {budgets.PERIODS[per]}"


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
