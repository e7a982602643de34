"""How much each key and tenant has used, for all processes that serve them.

    quotas = Quotas(FileStore(home))
    async with quotas.reserved(key, Claim(1, Amount(300, 500_000))) as reservation:    # RateLimited, InsufficientQuota
        reservation.spent = Amount(120, 210_000)

What is decided stands in gateway/tenants/accounts.py, and is pure. A store keeps the states and makes each decision one
step that nothing comes between: in a file that the processes of one host share (quotas_file.py), or in a Redis or
Valkey that several hosts share (quotas_redis.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from adapters.errors import GoodgateError, InvalidRequest
from gateway.tenants import accounts
from gateway.tenants.accounts import NO_RETRY, Account, Claim, InsufficientQuota, Now, State
from gateway.tenants.budgets import Amount
from gateway.tenants.keys import Key
from gateway.tenants.limits import RateLimited

NOTHING = Amount(0, 0)
NO_CLAIM = Claim(0, NOTHING)


class QuotasUnavailable(GoodgateError):
    """Nobody can say what is left to the caller."""

    status = 503
    type = "overloaded_error"
    code = "quotas_unavailable"


class Outcome(NamedTuple):
    """The states after a decision, what is held by it now, and the refusal if it was one. There are no states where a
    store that could not be asked was told to let requests in."""

    states: Sequence[State]
    now: Now
    held: Claim = NO_CLAIM
    refusal: RateLimited | InsufficientQuota | None = None


class Store(Protocol):
    """Keeps the states of accounts for all processes that share them. Raises `QuotasUnavailable` where it cannot."""

    async def reserve(self, wanted: Sequence[Account], claim: Claim) -> Outcome:
        """Decide and keep what was decided. One that is cancelled holds nothing."""

    async def settle(self, held: Sequence[Account], claim: Claim, spent: Amount) -> None:
        """Give back what `reserve` says is held, and charge what was spent. It happens even if it is cancelled."""

    async def states(self, wanted: Sequence[Account]) -> Outcome:
        """What they have used by now."""

    async def tend(self) -> None:
        """Until cancelled: show that this process lives, and give back what others held that do not."""

    async def close(self) -> None: ...


Tell: TypeAlias = Callable[[dict[str, str]], None]


class Reservation:
    """A request's share of what its key and its tenant may use, held for as long as the block. `spent` is told before
    it ends. Each request passes here: a class of its own costs a third of what a generator would."""

    __slots__ = ("_bounded", "_claim", "_held", "_quotas", "_tell", "spent")

    def __init__(self, quotas: Quotas, bounded: Sequence[Account], claim: Claim, tell: Tell) -> None:
        self.spent = NOTHING
        self._quotas = quotas
        self._bounded = bounded
        self._claim = claim
        self._tell = tell
        self._held = NO_CLAIM

    async def __aenter__(self) -> Reservation:
        if self._bounded:
            self._held = await self._quotas.hold(self._bounded, self._claim, self._tell)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._bounded:
            await self._quotas.store.settle(self._bounded, self._held, self.spent)


class Quotas:
    """`unmetered` counts the requests that came while the store could not be asked, by what became of them."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.unmetered = {"refused": 0, "allowed": 0}

    def reserved(self, key: Key, claim: Claim, tell: Tell = lambda _: None) -> Reservation:
        """To be entered by the request. `tell` gets the headers of its answer, of a refusal too."""
        return Reservation(self, key.accounts, claim, tell)

    async def hold(self, bounded: Sequence[Account], claim: Claim, tell: Tell) -> Claim:
        """What is held from now on; the refusal is raised."""
        if claim.requests > 1 and (bound := accounts.too_many_at_once(bounded, claim.requests)) is not None:
            raise InvalidRequest(f"With this key one request may hold at most {bound} prompts.", param="prompt")
        try:
            outcome = await self.store.reserve(bounded, claim)
        except QuotasUnavailable:
            self.unmetered["refused"] += 1
            raise
        if outcome.states:
            tell(accounts.headers(bounded, outcome.states, outcome.now))
        else:
            self.unmetered["allowed"] += 1
        if outcome.refusal is not None:
            if isinstance(outcome.refusal, InsufficientQuota) and outcome.refusal.is_final:
                tell(NO_RETRY)
            raise outcome.refusal
        return outcome.held
