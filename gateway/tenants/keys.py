"""API keys: who may call, what for, and how much. One SQLite file, which a running gateway notices changes of.

    store = KeyStore(home)
    secret = store.create(NewKey(name="alice", models=("small*",)))       # told once, and kept nowhere
    ring = KeyRing(store)                                                 # what a gateway asks, in memory
    key = ring.find(secret, time.time())                                  # None for whatever is not a valid key

A key is `gg-` and 256 random bits. Of it only the SHA-256 is stored: a slow or salted hash protects secrets that people
choose and that can be guessed; nobody guesses 256 random bits, and equal ones do not happen. The hash is found in a
dictionary and compared once more in constant time. The whole of it is hashed, so keys with a common beginning have
nothing in common; and what is stored has not the form of a key, so it is not one.

A revoked key stays in the file. A gateway that has ever had a key therefore never opens by itself.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import re
import secrets
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import Struct

from adapters.errors import GoodgateError
from gateway.admission.priority import Priority
from gateway.records import logs
from gateway.tenants.accounts import Account
from gateway.tenants.budgets import NO_BUDGET, Budget
from gateway.tenants.limits import NO_LIMITS, Limits

PREFIX = "gg-"
MAX_KEYS = 100_000  # ever created in one file: each has its record in the quotas
MAX_LIMIT = 2**31 - 1
MAX_BUDGET = 10**12  # in millionths still an integer of 64 bits
WATCH_INTERVAL_S = 0.25
BUSY_TIMEOUT_S = 5.0

Role: TypeAlias = Literal["user", "admin"]

_SECRET = re.compile(r"gg-[A-Za-z0-9_-]{43}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_PATTERN = re.compile(r"[^\s\x00-\x1f\x7f]{1,256}")
_MIGRATIONS = (  # what makes each version of the file of the one before
    (
        """CREATE TABLE keys (
            id INTEGER PRIMARY KEY AUTOINCREMENT,
            name TEXT NOT NULL,
            tenant TEXT NOT NULL,
            role TEXT NOT NULL CHECK (role IN ('user', 'admin')),
            digest BLOB NOT NULL UNIQUE,
            models TEXT NOT NULL,
            requests_per_min INTEGER,
            tokens_per_min INTEGER,
            concurrent INTEGER,
            created REAL NOT NULL,
            expires REAL,
            revoked REAL
        )""",
        "CREATE UNIQUE INDEX one_live_key_a_name ON keys (name) WHERE revoked IS NULL",
    ),
    (
        "ALTER TABLE keys ADD COLUMN budget_tokens INTEGER",
        "ALTER TABLE keys ADD COLUMN budget_gpu_seconds INTEGER",
        "ALTER TABLE keys ADD COLUMN budget_per TEXT NOT NULL DEFAULT 'month'",
        """CREATE TABLE tenants (
            id INTEGER PRIMARY KEY AUTOINCREMENT,
            name TEXT NOT NULL UNIQUE,
            requests_per_min INTEGER,
            tokens_per_min INTEGER,
            concurrent INTEGER,
            budget_tokens INTEGER,
            budget_gpu_seconds INTEGER,
            budget_per TEXT NOT NULL
        )""",
    ),
    ("ALTER TABLE keys ADD COLUMN priority TEXT NOT NULL DEFAULT 'default'",),
)
SCHEMA_VERSION = len(_MIGRATIONS)
_BOUNDS = "requests_per_min, tokens_per_min, concurrent, budget_tokens, budget_gpu_seconds, budget_per"
_COLUMNS = f"id, name, tenant, role, models, created, expires, revoked, digest, priority, {_BOUNDS}"
_log = logs.logger("keys")


class KeysError(GoodgateError):
    """The keys cannot be read or changed as asked. The message says what to do."""

    code = "keys_error"


class NewKey(Struct, frozen=True, kw_only=True):
    """What a key is made for. `models` are patterns (`*`, `?`, `[...]`) of which one must match a model's name or one
    of its aliases."""

    name: str
    tenant: str = ""  # whose key it is; its name where that is not said
    role: Role = "user"
    models: tuple[str, ...] = ("*",)
    limits: Limits = NO_LIMITS
    budget: Budget = NO_BUDGET
    priority: Priority = Priority.DEFAULT  # of its requests, unless they ask for a lower one
    expires: float | None = None


class Key(NewKey, frozen=True, kw_only=True, dict=True):
    """A key as it stands in the file, without anything that could be used as one."""

    id: int
    created: float = 0.0
    revoked: float | None = None
    pool: Account | None = None  # what it shares with its tenant's other keys, where that is bounded

    @property
    def own(self) -> Account:
        return Account(kind="key", id=self.id, name=self.name, limits=self.limits, budget=self.budget)

    @cached_property
    def accounts(self) -> tuple[Account, ...]:
        """Whose limits and budgets its requests have to meet."""
        return tuple(each for each in (self.own, self.pool) if each is not None and each.is_bounded)

    @property
    def is_admin(self) -> bool:
        return self.role == "admin"

    def is_valid(self, now: float) -> bool:
        return self.revoked is None and (self.expires is None or now < self.expires)

    def may_use(self, names: Iterable[str]) -> bool:
        """May it use the model with these names?"""
        return "*" in self.models or any(fnmatchcase(name, pattern) for name in names for pattern in self.models)


class KeyStore:
    """The file, for those who change it. Each change is one transaction."""

    def __init__(self, home: Path) -> None:
        self.path = home / "state" / "keys.db"

    def create(self, key: NewKey) -> str:
        """A new secret for a new key. It is told here, and nowhere again."""
        _check(key)
        secret = _new_secret()
        tenant = key.tenant or key.name
        models = msgspec.json.encode(key.models).decode()
        row = (
            *(key.name, tenant, key.role, digest(secret), models, time.time(), key.expires),
            key.priority.label,
            *_bounds(key),
        )
        insert = (
            f"INSERT INTO keys (name, tenant, role, digest, models, created, expires, priority, {_BOUNDS}) "
            f"VALUES ({', '.join('?' * len(row))})"
        )
        with self._writing() as connection:
            (num_keys,) = connection.execute("SELECT coalesce(max(id), 0) FROM keys").fetchone()
            if num_keys >= MAX_KEYS:
                raise KeysError(f"{self.path} has had {MAX_KEYS} keys, which is all that it can hold; begin a new one.")
            try:
                connection.execute(insert, row)
            except sqlite3.IntegrityError:
                raise KeysError(f"There is a key {key.name!r} already; choose another name, or rotate it.") from None
        return secret

    def rotate(self, name: str) -> str:
        """A new secret for a key, whose old one is worth nothing from now on."""
        secret = _new_secret()
        self._change(name, "UPDATE keys SET digest = ? WHERE name = ? AND revoked IS NULL", (digest(secret), name))
        return secret

    def revoke(self, name: str) -> None:
        self._change(name, "UPDATE keys SET revoked = ? WHERE name = ? AND revoked IS NULL", (time.time(), name))

    def limit(self, name: str, limits: Limits, budget: Budget) -> None:
        """What a key may use, in place of what was said before. What it has used goes on counting."""
        new = NewKey(name=name, limits=limits, budget=budget)
        _check(new)
        changes = ", ".join(f"{column} = ?" for column in _BOUNDS.split(", "))
        self._change(name, f"UPDATE keys SET {changes} WHERE name = ? AND revoked IS NULL", (*_bounds(new), name))

    def bound(self, tenant: str, limits: Limits, budget: Budget) -> None:
        """What all keys of a tenant may use together, in place of what was said before."""
        shared = Account(kind="tenant", id=0, name=tenant, limits=limits, budget=budget)
        _check_name(tenant)
        _check_bounds(shared)
        row = (tenant, *_bounds(shared))
        changes = ", ".join(f"{column} = excluded.{column}" for column in _BOUNDS.split(", "))
        with self._writing() as connection:
            connection.execute(
                f"INSERT INTO tenants (name, {_BOUNDS}) VALUES ({', '.join('?' * len(row))}) "
                f"ON CONFLICT (name) DO UPDATE SET {changes}",
                row,
            )

    def tenants(self) -> list[Account]:
        """The tenants whose keys share something, by name."""
        if not self.path.exists():
            return []
        with closing(self.connect()) as connection, self._explained():
            return sorted(read_tenants(connection).values(), key=lambda tenant: tenant.name)

    def all(self) -> list[Key]:
        """All keys in the order of their making, revoked ones too."""
        if not self.path.exists():
            return []
        with closing(self.connect()) as connection, self._explained():
            return [key for _, key in read_keys(connection)]

    def connect(self) -> sqlite3.Connection:
        """A connection to the file that is there. Only its owner may read it, so its owner has to ask."""
        with self._explained():
            connection = sqlite3.connect(
                f"{self.path.absolute().as_uri()}?mode=rw",
                uri=True,
                timeout=BUSY_TIMEOUT_S,
                isolation_level=None,
                check_same_thread=False,
            )
            try:
                (version,) = connection.execute("PRAGMA user_version").fetchone()
                if version > SCHEMA_VERSION:
                    raise KeysError(f"{self.path} was written by a newer Goodgate; use that one.")
                connection.execute("PRAGMA journal_mode = WAL")
                if version < SCHEMA_VERSION:
                    _migrate(connection)
            except BaseException:
                connection.close()
                raise
            return connection

    def _change(self, name: str, statement: str, values: tuple[object, ...]) -> None:
        if not self.path.exists():
            raise KeysError(f"There are no keys in {self.path}; `goodgate keys create NAME` makes one.")
        with self._writing() as connection:
            if connection.execute(statement, values).rowcount == 0:
                raise KeysError(f"There is no key {name!r}; `goodgate keys list` shows those that there are.")

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        self._make_file()
        with closing(self.connect()) as connection, self._explained():
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                connection.execute("ROLLBACK")
                raise

    def _make_file(self) -> None:
        """The file is private before the first key is in it. SQLite gives its side files the same permissions."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600))
            self.path.chmod(0o600)
        except OSError as error:
            raise KeysError(f"Cannot write the keys in {self.path}: {error.strerror or error}.") from error

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise KeysError(
                f"The keys in {self.path} cannot be used: {error}; restore the file, or move it away and make new keys."
            ) from error


class KeyRing:
    """The valid keys in memory, as a gateway asks for them: no lookup touches the file."""

    def __init__(self, store: KeyStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._seen: tuple[int, int] | None = None
        self._keys: dict[bytes, tuple[bytes, Key]] = {}
        self.has_keys = False  # some key was made once, and be it revoked: it never turns back
        try:
            self.refresh()
        except BaseException:
            self.close()
            raise

    def find(self, secret: str, now: float) -> Key | None:
        """The valid key with this secret."""
        if not _SECRET.fullmatch(secret):
            return None
        wanted = digest(secret)
        stored, key = self._keys.get(wanted, (b"", None))
        if key is None or not hmac.compare_digest(stored, wanted) or not key.is_valid(now):
            return None
        return key

    async def watch(self) -> None:
        """Take over changes of the file until cancelled. While it cannot be read, what was known holds."""
        is_readable = True
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            try:
                await asyncio.to_thread(self.refresh)
                is_readable = True
            except KeysError as error:
                if is_readable:
                    logs.warning(_log, "the keys cannot be read", reason=error.message)
                is_readable = False

    def refresh(self) -> None:
        """Read the file if it has changed since."""
        with self._lock:
            try:
                inode = self._store.path.stat().st_ino
            except FileNotFoundError:
                return  # none made yet; or taken away, which opens nothing
            except OSError as error:
                raise KeysError(f"The keys in {self._store.path} cannot be read: {error.strerror}.") from error
            if self._seen is None or self._seen[0] != inode or self._connection is None:
                self._close()
                self._connection = self._store.connect()
            try:
                (version,) = self._connection.execute("PRAGMA data_version").fetchone()
                if self._seen == (inode, version):
                    return
                keys = list(read_keys(self._connection))
            except sqlite3.Error as error:
                self._close()
                raise KeysError(f"The keys in {self._store.path} cannot be read: {error}.") from error
            self._keys = {stored: (stored, key) for stored, key in keys}
            self.has_keys = self.has_keys or bool(keys)
            self._seen = (inode, version)

    def close(self) -> None:
        with self._lock:
            self._close()

    def _close(self) -> None:
        self._seen = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


def read_keys(connection: sqlite3.Connection) -> Iterator[tuple[bytes, Key]]:
    tenants = read_tenants(connection)
    for row in connection.execute(f"SELECT {_COLUMNS} FROM keys ORDER BY id"):
        number, name, tenant, role, models, created, expires, revoked, stored, priority, *bounds = row
        yield (
            bytes(stored),
            Key(
                id=number,
                name=name,
                tenant=tenant,
                role=role,
                models=msgspec.json.decode(models, type=tuple[str, ...]),
                limits=_limits(bounds),
                budget=_budget(bounds),
                priority=Priority.named(priority) or Priority.DEFAULT,
                created=created,
                expires=expires,
                revoked=revoked,
                pool=tenants.get(tenant),
            ),
        )


def read_tenants(connection: sqlite3.Connection) -> dict[str, Account]:
    return {
        name: Account(kind="tenant", id=number, name=name, limits=_limits(bounds), budget=_budget(bounds))
        for number, name, *bounds in connection.execute(f"SELECT id, name, {_BOUNDS} FROM tenants")
    }


def _limits(bounds: Sequence[Any]) -> Limits:
    return Limits(requests_per_min=bounds[0], tokens_per_min=bounds[1], concurrent=bounds[2])


def _budget(bounds: Sequence[Any]) -> Budget:
    return Budget(tokens=bounds[3], gpu_seconds=bounds[4], per=bounds[5])


def _bounds(bounded: NewKey | Account) -> tuple[int | str | None, ...]:
    limits, budget = bounded.limits, bounded.budget
    return (
        limits.requests_per_min,
        limits.tokens_per_min,
        limits.concurrent,
        budget.tokens,
        budget.gpu_seconds,
        budget.per,
    )


def _migrate(connection: sqlite3.Connection) -> None:
    """To this version, from whichever the file has once nobody else writes."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        for statement in chain.from_iterable(_MIGRATIONS[version:]):
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise


def _new_secret() -> str:
    return PREFIX + secrets.token_urlsafe(32)


def _check(key: NewKey) -> None:
    for name in (key.name, *([key.tenant] if key.tenant else [])):
        _check_name(name)
    if not key.models or not all(map(_PATTERN.fullmatch, key.models)):
        raise KeysError("A key needs patterns of the models that it may use, without blanks; '*' is all of them.")
    _check_bounds(key)


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise KeysError(f"{name!r} is no name for a key or a tenant: use up to 64 letters, digits and . _ @ -")


def _check_bounds(bounded: NewKey | Account) -> None:
    limits, budget = bounded.limits, bounded.budget
    for bound in (limits.requests_per_min, limits.tokens_per_min, limits.concurrent):
        if bound is not None and not 1 <= bound <= MAX_LIMIT:
            raise KeysError("A limit is 1 or more; leave it out for none.")
    for bound in (budget.tokens, budget.gpu_seconds):
        if bound is not None and not 1 <= bound <= MAX_BUDGET:
            raise KeysError(f"A budget is between 1 and {MAX_BUDGET:,}; leave it out for none.")
