"""What routing may know of one prompt: how much work it is, and what it has in common with others. Never the text.

ask = Ask(prompt_tokens=812, completion_tokens=256)
ask = Ask(prompt_tokens=812, session=session_key("acme", "chat-17"), lot=lots.getrandbits(32))
"""

from __future__ import annotations

import re
from hashlib import blake2b

from msgspec import Struct

from adapters.errors import InvalidRequest
from adapters.types import ChatRequest, GenerateRequest

SESSION_HEADER = "X-Goodgate-Session"
_SESSION = re.compile(r"[\x21-\x7e]{1,256}")


class Ask(Struct, frozen=True, kw_only=True):
    """The tokens are estimates from before the request is sent (gateway/tenants/cost.py), the completion's the most
    that it may get. The rest is there only where a policy reads it (policies.py): the session's key, the hashes of the
    prompt's blocks from its beginning on (prefix_index.py), and a random number for policies that draw lots."""

    prompt_tokens: int
    completion_tokens: int = 0
    session: int | None = None
    prefix: tuple[int, ...] = ()
    lot: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


def session_of(told: str, request: GenerateRequest | None, tenant: str) -> int | None:
    """The session that the caller's header names, or else his `prompt_cache_key`, or else his `user`."""
    if told and not _SESSION.fullmatch(told):
        raise InvalidRequest(f"The header {SESSION_HEADER} holds one word of up to 256 visible ASCII characters.")
    key = isinstance(request, ChatRequest) and request.prompt_cache_key
    name = told or key or (request is not None and request.user)
    return session_key(tenant, name) if isinstance(name, str) and name else None


def session_key(tenant: str, name: str) -> int:
    """The same in every process and after every start, and another one for every tenant."""
    domain = blake2b(tenant.encode("utf-8", "replace"), digest_size=16).digest()
    return int.from_bytes(blake2b(name.encode("utf-8", "replace"), digest_size=8, key=domain).digest())
