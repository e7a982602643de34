"""Who may call which route: one decision for every route and every way to send a key.

    routes = [web.get("/health", public(self.health)), web.get("/metrics", admin(self.metrics)), ...]
    middleware = authenticating(ring, config.auth)

Beside each route stands its access: `public`, `keyed` or `admin`. The middleware reads it off the handler that the
router has chosen, never off the path, so no spelling of a path leads around it. A handler that says nothing is for
admins. What matches no route needs a key like anything else.

`Authorization: Bearer KEY`, `x-api-key: KEY` and `api-key: KEY` mean the same. Whatever is wrong with a key, the answer
is the same 401, to the byte: it tells nobody how near a guess came.
"""

from __future__ import annotations

import ipaddress
import re
import time
from collections.abc import Awaitable, Callable
from enum import Enum
from functools import partial
from typing import TypeAlias

from aiohttp import web
from aiohttp.typedefs import Middleware
from multidict import CIMultiDictProxy

from adapters.errors import InvalidRequest, RequestError, Unauthorized
from adapters.types import SALT_HEADER
from gateway.admission.priority import PRIORITY_HEADER, TTFT_HEADER, wish_of
from gateway.config import AuthConfig, Config, ConfigError
from gateway.records.trace import TRACE
from gateway.routing.ask import SESSION_HEADER
from gateway.tenants.keys import Key, KeyRing

KEY_HEADERS = ("x-api-key", "api-key")
NEEDS_KEY = "Send a valid API key as `Authorization: Bearer KEY`; `goodgate keys create NAME` makes one."
_OF_KEYS = ("Authorization", *KEY_HEADERS)
_OF_PROXIES = ("Forwarded", "X-Forwarded-For", "X-Real-IP", "Via")
_ACCESS = "__access__"
_SALT = re.compile(r"[A-Za-z0-9_-]{1,128}")

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Access(Enum):
    PUBLIC = "public"
    KEYED = "keyed"
    ADMIN = "admin"


class Forbidden(RequestError):
    status = 403
    code = "permission_denied"


def public(handler: Handler) -> Handler:
    """For everybody: what says nothing about models, load or callers."""
    return _declared(Access.PUBLIC, handler)


def keyed(handler: Handler) -> Handler:
    """For every valid key."""
    return _declared(Access.KEYED, handler)


def admin(handler: Handler) -> Handler:
    """For admins' keys, and for this machine where the configuration says so."""
    return _declared(Access.ADMIN, handler)


def declared_access(handler: object) -> Access | None:
    """What was declared beside the route; None where that was forgotten."""
    return getattr(handler, _ACCESS, None)


def authenticating(ring: KeyRing | None, config: AuthConfig) -> Middleware:
    """Lets a request through, with its key in the trace, or raises `Unauthorized` or `Forbidden`."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        access = _access(request)
        if access is not Access.PUBLIC:
            trace = request[TRACE]
            if needs_keys(ring, config):
                trace.caller = _caller(request, access, ring, config)
            trace.is_let_in = access is Access.KEYED
            headers, ceiling = request.headers, None if trace.caller is None else trace.caller.priority
            if PRIORITY_HEADER in headers or TTFT_HEADER in headers:
                trace.priority, trace.ttft_wish_s = wish_of(headers, ceiling)
            elif ceiling is not None:
                trace.priority = ceiling
            trace.session = headers.get(SESSION_HEADER, "")
            if SALT_HEADER in headers:
                trace.cache_salt = _vouched_salt(headers.getall(SALT_HEADER), trace.caller)
        return await handler(request)

    return middleware


def needs_keys(ring: KeyRing | None, config: AuthConfig) -> bool:
    """Must callers have a key? By default: as soon as one was ever made."""
    if config.required == "auto":
        return ring is not None and ring.has_keys
    return config.required


def presented(headers: CIMultiDictProxy[str]) -> str | None:
    """The one key that the headers hold. None where there is none, one header twice, or different keys: whoever guesses
    which of two was meant lets a proxy and its gateway see different callers."""
    given: set[str] = set()
    for name in _OF_KEYS:
        if name in headers:
            values = headers.getall(name)
            if len(values) > 1:
                return None
            given.add(_bearer(values[0]) if name == "Authorization" else values[0])
    return given.pop() if len(given) == 1 else None


def check_exposure(config: Config, *, has_keys: bool) -> None:
    """Refuse to serve everybody who can reach the port, unless that was asked for by name."""
    is_open = not has_keys if config.auth.required == "auto" else not config.auth.required
    if is_open and not config.auth.open and not is_loopback(config.server.host):
        raise ConfigError(
            f"On {config.server.host!r} others could use this gateway without a key: make one with `goodgate keys "
            "create NAME`, set `auth: {required: true}`, or say that this is meant with --open or `auth: {open: true}`."
        )


def is_loopback(host: str | None) -> bool:
    """An address that only this machine reaches. A name other than localhost may lead anywhere."""
    if host is None or host == "localhost":
        return host is not None
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _declared(access: Access, handler: Handler) -> Handler:
    declared = partial(handler)
    setattr(declared, _ACCESS, access)
    return declared


def _access(request: web.Request) -> Access:
    if request.match_info.http_exception is not None:
        return Access.KEYED  # no route, or not with this method
    return declared_access(request.match_info.route.handler) or Access.ADMIN


def _caller(request: web.Request, access: Access, ring: KeyRing | None, config: AuthConfig) -> Key | None:
    if access is Access.ADMIN and config.loopback_is_admin and _comes_from_here(request):
        return None
    secret = presented(request.headers)
    key = None if secret is None or ring is None else ring.find(secret, time.time())
    if key is None:
        raise Unauthorized(NEEDS_KEY)
    if access is Access.ADMIN and not key.is_admin:
        raise Forbidden("This route is for keys with the role `admin`.")
    return key


def _vouched_salt(told: list[str], caller: Key | None) -> str:
    """The salt of a tenant of the gateway in front of this one, whose word counts only if it could do anything here."""
    if caller is not None and not caller.is_admin:
        raise Forbidden(f"The header {SALT_HEADER} is for gateways, which send it with a key of the role `admin`.")
    if len(told) != 1 or not _SALT.fullmatch(told[0]):
        raise InvalidRequest(f"The header {SALT_HEADER} holds one word of up to 128 letters, digits, - and _.")
    return told[0]


def _comes_from_here(request: web.Request) -> bool:
    """The caller himself is on this machine. Behind a proxy on it, everybody would seem to be."""
    return is_loopback(request.remote) and not any(name in request.headers for name in _OF_PROXIES)


def _bearer(value: str) -> str:
    scheme, _, secret = value.partition(" ")
    return secret if scheme.lower() == "bearer" else ""
