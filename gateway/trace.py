"""What is noted about one request on its way, for its headers, its log line and its metrics. Never holds the prompt."""

from __future__ import annotations

import secrets
import time

from aiohttp import web
from msgspec import Struct, field

from gateway.keys import Key


class Trace(Struct, kw_only=True):
    """`caller` is None where no key is asked for. `model` stays empty until the name is known to be a configured one.
    Times are seconds on the monotonic clock."""

    request_id: str
    route: str
    started: float = field(default_factory=time.perf_counter)
    model: str = ""
    engine: str = ""
    replica: str = ""
    num_attempts: int = 0
    ttft_s: float | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    code: str = ""
    caller: Key | None = None
    num_pieces: int = 0  # of text that engines have given, for answers that end without a count of tokens
    limits: dict[str, str] = field(default_factory=dict)  # headers that tell the caller what is left to him

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self.started


TRACE = web.RequestKey("trace", Trace)


def new_request_id() -> str:
    return f"req-{secrets.token_hex(12)}"
