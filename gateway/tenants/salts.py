"""What keeps the prefix caches of tenants apart: a salt for each, which engines mix into the keys of their caches.

    salts = Salts("auto", home)                       # or with a secret that several hosts share
    salts.of(key)                                     # the tenant's salt; None for who has no key
    salts.of(None, "3q2...")                          # the salt of a tenant of the gateway in front of this one

A prompt that is answered faster because somebody has sent its beginning before tells that somebody did. With a salt of
his own a tenant meets his own prompts only. It is an HMAC of his name, so that nobody who knows names can make one, and
its kind is part of what is signed, so that no name of one kind is one of the other.

The key is made once, in GOODGATE_HOME, for all workers. Where it cannot be kept, each process has its own: tenants are
apart just as well, only they do not meet their own prompts in another process.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import os
import secrets
from functools import cached_property, lru_cache
from pathlib import Path

from gateway.config import Isolation
from gateway.records import logs
from gateway.tenants.keys import Key

KEY_BYTES = 32
MAX_REMEMBERED = 4096  # salts that need not be made again for each request
_log = logs.logger("salts")


class Salts:
    def __init__(self, isolation: Isolation, home: Path, secret: bytes | None = None) -> None:
        self.is_required = isolation == "require"
        self._is_on = isolation != "off"
        self._path = home / "state" / "cache_salt"
        self._secret = secret
        self._salt = lru_cache(MAX_REMEMBERED)(self._signed)

    def of(self, caller: Key | None, told: str = "") -> str | None:
        """The salt of the caller's tenant, or of the one that a gateway in front of this one has told of."""
        if not self._is_on or (caller is None and not told):
            return None
        return self._salt("told", told) if told else self._salt("tenant", caller.tenant if caller else "")

    def _signed(self, kind: str, name: str) -> str:
        signed = hmac.digest(self._key, f"{kind}:{name}".encode(), "sha256")
        return base64.urlsafe_b64encode(signed).rstrip(b"=").decode()

    @cached_property
    def _key(self) -> bytes:
        if self._secret is not None:
            return self._secret
        try:
            return kept_key(self._path)
        except OSError as error:
            reason = error.strerror or str(error)
            logs.warning(_log, "the key of the cache salts is not kept", file=str(self._path), reason=reason)
            return secrets.token_bytes(KEY_BYTES)


def kept_key(path: Path) -> bytes:
    """The key in the file, made now if there is none. Of several that make it at once, all get the first one's."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(secrets.token_bytes(KEY_BYTES))
            with contextlib.suppress(FileExistsError):  # another was faster
                os.link(fresh, path)
        finally:
            fresh.unlink()
    key = path.read_bytes()
    if len(key) != KEY_BYTES:
        raise OSError(f"It has {len(key)} bytes instead of {KEY_BYTES}; remove it, and a new one is made.")
    return key
