"""The clients of a soak: they ask, leave, send nonsense, read slowly, and judge what they were given.

    async with Clients(url, key) as clients:
        await clients.offer(rate=50, seconds=1800)        # open loop; clients.outcomes counts what came of each

A client knows every word of the answer that it asked for, so a part is never taken for the whole.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from enum import StrEnum
from typing import Any, Self

import aiohttp
import msgspec

from gateway.commands.bench.engine import BULK_TOKENS, answer_text

PATIENCE_S = 45.0  # the gateway's own deadlines are far below: who waits longer was forgotten
MAX_OPEN = 400  # clients at a time; more would be no steady load any more
SHORT_TOKENS, STREAM_TOKENS, SLOW_TOKENS, STALLED_TOKENS = 12, 30, BULK_TOKENS + 100, BULK_TOKENS * 16
SLOW_READ_BYTES, SLOW_PAUSE_S = 8192, 0.05
STALLED_S = 10.0
ROUTE = "/v1/chat/completions"


class Outcome(StrEnum):
    WHOLE = "whole"
    REFUSED = "refused"  # an error instead of an answer
    TOLD = "told"  # a part, and an event that says so
    LEFT = "left"  # the client went
    REJECTED = "rejected"  # nonsense, and it was said so
    CUT_OFF = "cut off"  # a client that took or sent nothing for too long
    HUNG = "hung"
    TRUNCATED = "truncated"  # a part that was shown as the whole
    BROKEN = "broken"  # a part, and no word about it
    WRONG = "wrong"


def judged(stream: bytes, num_tokens: int) -> Outcome:
    """What a client of a stream has been told, by all of its bytes. Pure."""
    *blocks, _ = stream.split(b"\n\n")  # what is behind the last empty line was cut off
    events = [block[6:] for block in blocks if block.startswith(b"data: ")]
    is_done = bool(events) and events[-1] == b"[DONE]"
    try:
        chunks = [msgspec.json.decode(event) for event in events if event != b"[DONE]"]
    except msgspec.DecodeError:
        return Outcome.WRONG
    choices = [choice for chunk in chunks for choice in chunk.get("choices", ())]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    expected = answer_text(num_tokens)
    if not expected.startswith(text):
        return Outcome.WRONG
    if any("error" in chunk for chunk in chunks):
        return Outcome.WRONG if is_done else Outcome.TOLD
    if not is_done:
        return Outcome.BROKEN
    is_finished = any(choice.get("finish_reason") for choice in choices)
    return Outcome.WHOLE if text == expected and is_finished else Outcome.TRUNCATED


def judged_whole(status: int, body: bytes, num_tokens: int) -> Outcome:
    """The same of an answer in one piece, or of a refusal."""
    try:
        told = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return Outcome.WRONG
    if status == 200:
        text = told["choices"][0]["message"]["content"]
        return Outcome.WHOLE if text == answer_text(num_tokens) else Outcome.TRUNCATED
    says_why = isinstance(told.get("error"), dict) and bool(told["error"].get("message"))
    return Outcome.REFUSED if says_why and (status == 429 or status >= 500) else Outcome.WRONG


class Clients:
    def __init__(self, port: int, key: str, *, seed: int = 1) -> None:
        self.outcomes: Counter[str] = Counter()
        self.by_kind: Counter[tuple[str, str]] = Counter()
        self.refusals: Counter[str] = Counter()
        self.not_sent = 0  # because too many were open
        self._random = random.Random(seed)
        self._port = port
        self._headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        self._session: aiohttp.ClientSession
        self._kinds: Mapping[Callable[[], Awaitable[Outcome]], float] = {
            self.short: 45,
            self.stream: 35,
            self.leaving: 10,
            self.nonsense: 7,
            self.slow: 2,
            self.stalled: 0.5,
            self.half_sent: 0.5,
        }

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            f"http://127.0.0.1:{self._port}",
            headers=self._headers,
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=5),
            timeout=aiohttp.ClientTimeout(total=None),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def offer(self, rate: float, seconds: float) -> None:
        """Poisson arrivals: a slow answer slows nothing that comes after it."""
        kinds, shares = zip(*self._kinds.items(), strict=True)
        running: set[asyncio.Task[None]] = set()
        due = time.monotonic()
        end = due + seconds
        while (due := due + self._random.expovariate(rate)) < end:
            await asyncio.sleep(max(due - time.monotonic(), 0))
            if len(running) >= MAX_OPEN:
                self.not_sent += 1
                continue
            task = asyncio.create_task(self._one(self._random.choices(kinds, shares)[0]))
            running.add(task)
            task.add_done_callback(running.discard)
        await asyncio.gather(*running)

    async def _one(self, kind: Callable[[], Awaitable[Outcome]]) -> None:
        try:
            async with asyncio.timeout(PATIENCE_S):
                outcome = await kind()
        except TimeoutError:
            outcome = Outcome.HUNG
        except (aiohttp.ClientError, ConnectionError):
            outcome = Outcome.BROKEN
        self.outcomes[outcome] += 1
        self.by_kind[kind.__name__, outcome] += 1

    def __str__(self) -> str:
        return ", ".join(f"{outcome} {number}" for outcome, number in sorted(self.outcomes.items()))

    def by_kind_and_outcome(self) -> dict[str, dict[str, int]]:
        told: dict[str, dict[str, int]] = {}
        for (kind, outcome), number in sorted(self.by_kind.items()):
            told.setdefault(kind.replace("_", " "), {})[outcome] = number
        return told

    # -------------------------------------------------------------------------------------------------- the kinds

    async def short(self) -> Outcome:
        async with self._session.post(ROUTE, data=_body(SHORT_TOKENS)) as response:
            body = await response.read()
        self._note_refusal(response.status, body)
        return judged_whole(response.status, body, SHORT_TOKENS)

    async def stream(self) -> Outcome:
        async with self._session.post(ROUTE, data=_body(STREAM_TOKENS, stream=True)) as response:
            body = await response.read()
        if response.status == 200:
            return judged(body, STREAM_TOKENS)
        self._note_refusal(response.status, body)
        return judged_whole(response.status, body, STREAM_TOKENS)

    async def leaving(self) -> Outcome:
        """Goes at some time between the connection and the end of the answer."""
        try:
            async with asyncio.timeout(self._random.uniform(0, 0.4)):
                return await self.stream()
        except TimeoutError:
            return Outcome.LEFT

    async def nonsense(self) -> Outcome:
        """Is told so: what is wrong with the body, the model or the key."""
        body, key, status = self._random.choice(
            [
                (b"{", None, 400),
                (b'{"model":"m","messages":"hello"}', None, 400),
                (b'{"model":"nobody","messages":[{"role":"user","content":"hi"}]}', None, 404),
                (_body(5), "gg-nobody", 401),
            ]
        )
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        async with self._session.post(ROUTE, data=body, headers=headers) as response:
            told = msgspec.json.decode(await response.read())
        return Outcome.REJECTED if response.status == status and told["error"]["message"] else Outcome.WRONG

    async def slow(self) -> Outcome:
        """Takes a large answer in small pieces, fast enough to be borne."""
        return await self._raw(SLOW_TOKENS, pause_s=SLOW_PAUSE_S)

    async def stalled(self) -> Outcome:
        """Takes nothing for longer than the gateway waits, which then stops the engine and lets go."""
        outcome = await self._raw(STALLED_TOKENS, wait_s=STALLED_S)
        return Outcome.CUT_OFF if outcome is Outcome.BROKEN else outcome

    async def half_sent(self) -> Outcome:
        """Sends half of its body and then nothing more."""
        outcome = await self._raw(STREAM_TOKENS, held_back=20)
        return Outcome.CUT_OFF if outcome in (Outcome.BROKEN, Outcome.REFUSED) else Outcome.WRONG

    async def _raw(self, num_tokens: int, *, pause_s: float = 0, wait_s: float = 0, held_back: int = 0) -> Outcome:
        """A client of its own connection with a small receive buffer, so that what it leaves fills the gateway's."""
        loop = asyncio.get_running_loop()
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SLOW_READ_BYTES)
            sock.setblocking(False)
            await loop.sock_connect(sock, ("127.0.0.1", self._port))
            request = self._request(num_tokens)
            await loop.sock_sendall(sock, request[: len(request) - held_back])
            await asyncio.sleep(wait_s)
            answer = bytearray()
            with suppress(ConnectionError):
                while piece := await loop.sock_recv(sock, SLOW_READ_BYTES):
                    answer += piece
                    await asyncio.sleep(pause_s)
        return _judged_raw(bytes(answer), num_tokens)

    def _request(self, num_tokens: int) -> bytes:
        body = _body(num_tokens, stream=True)
        head = [f"POST {ROUTE} HTTP/1.1", "Host: soak", f"Content-Length: {len(body)}", "Connection: close"]
        head += [f"{name}: {value}" for name, value in self._headers.items()]
        return "\r\n".join(head).encode() + b"\r\n\r\n" + body

    def _note_refusal(self, status: int, body: bytes) -> None:
        if status != 200:
            with suppress(msgspec.DecodeError):
                self.refusals[f"{status} {msgspec.json.decode(body)['error'].get('code')}"] += 1


def _judged_raw(answer: bytes, num_tokens: int) -> Outcome:
    """Of the bytes of a whole connection."""
    head, _, body = answer.partition(b"\r\n\r\n")
    if not head:
        return Outcome.BROKEN
    if not head.startswith(b"HTTP/1.1 200"):
        return Outcome.REFUSED
    return judged(_unchunked(body), num_tokens)


def _unchunked(body: bytes) -> bytes:
    """What chunked transfer carries, as far as it came."""
    pieces, at = [], 0
    while (end := body.find(b"\r\n", at)) > at:
        size = int(body[at:end], 16)
        pieces.append(body[end + 2 : end + 2 + size])
        at = end + 2 + size + 2
    return b"".join(pieces)


def _body(num_tokens: int, **fields: Any) -> bytes:
    messages = [{"role": "user", "content": "Count for me, in words that are easy to check."}]
    return json.dumps({"model": "m", "messages": messages, "max_tokens": num_tokens, **fields}).encode()
