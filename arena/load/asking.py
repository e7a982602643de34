"""An engine asked outside the measured path: which models it serves, and one streamed request, read to its end.

    names = await model_names(client, url)
    asked = await ask(client, url + route, body)

Probes, warm-ups and bursts use it. What counts as an answer is what counts in a cell (`arena.load.answer_reader`);
stamps are taken after the read, which is exact enough to see how an answer comes, and no more.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from adapters.errors import EngineFailed, EngineProtocolError, EngineUnavailable
from adapters.wire.unreachable import why_unreachable
from arena.load.answer_reader import Answer, AnswerReader, shown
from arena.load.response_reader import MAX_BODY_BYTES
from arena.load.spool import TOOL_CALL, UNREADABLE

MOST_BYTES_OF_MODELS = 8 << 20


@dataclass(frozen=True, slots=True)
class Asked:
    """A whole answer. `sent_ns` and its stamps are of one clock, CLOCK_MONOTONIC."""

    sent_ns: int
    answer: Answer
    served_by: str  # our gateway's header, where one is in between

    @property
    def first_s(self) -> float | None:
        """Seconds from the send to the first generated event; None where nothing was generated."""
        return None if self.answer.first_gen_ns is None else (self.answer.first_gen_ns - self.sent_ns) / 1e9

    @property
    def last_s(self) -> float | None:
        """Seconds from the send to the last generated event."""
        return None if self.answer.last_gen_ns is None else (self.answer.last_gen_ns - self.sent_ns) / 1e9

    @property
    def has_reasoning(self) -> bool:
        return self.answer.first_reason_ns is not None

    @property
    def has_tool_calls(self) -> bool:
        return TOOL_CALL in self.answer.token_kind


class Refused(Exception):
    """The engine answered a 4xx status."""


async def ask(client: aiohttp.ClientSession, url: str, body: Mapping[str, Any]) -> Asked:
    """Post `body` to a route. Raises `Refused`, or an `EngineError` with a sentence, where no whole answer comes."""
    reader = AnswerReader()
    num_bytes = 0
    sent_ns = time.monotonic_ns()
    try:
        async with client.post(url, json=body, allow_redirects=False) as response:
            _refuse_redirect(response)
            if response.status >= 400:
                text = start_of(await response.content.read(4096))
                if response.status < 500:
                    raise Refused(f"HTTP {response.status} {text}")
                raise EngineFailed(f"{url} answered HTTP {response.status}: {text}")
            served_by = response.headers.get("x-goodgate-engine", "")
            async for data in response.content.iter_any():
                reader.feed(time.monotonic_ns(), data)
                num_bytes += len(data)
                if num_bytes > MAX_BODY_BYTES:
                    raise EngineProtocolError(f"{url} answered with more than {MAX_BODY_BYTES} bytes.")
                if reader.has_failed:
                    break  # an engine may keep the connection open after its error
            answer = reader.answer(
                http=response.status, fault=None, is_event_stream=response.content_type == "text/event-stream"
            )
    except TimeoutError as error:
        waited_s = (time.monotonic_ns() - sent_ns) / 1e9
        raise EngineUnavailable(f"{url} did not answer within {waited_s:.1f} s.") from error
    except (aiohttp.ClientError, OSError) as error:
        raise EngineUnavailable(f"{url} broke off: {str(error) or type(error).__name__}.") from error
    if answer.status != "ok":
        raise _failure(url, answer)
    return Asked(sent_ns, answer, served_by)


def _failure(url: str, answer: Answer) -> EngineFailed | EngineProtocolError:
    if answer.err_class == "error_event":
        return EngineFailed(f"{url} reported an error in its stream: {answer.err_message}")
    if answer.err_class == "bad_event":
        return EngineProtocolError(f"{url} sent an event that is not OpenAI's: {answer.err_message}.")
    if answer.status == "truncated":
        return EngineProtocolError(f"{url} ended an answer without a finish reason and without [DONE].")
    return EngineProtocolError(f"{url} gave no answer ({answer.err_class}): {answer.err_message}")


async def model_names(client: aiohttp.ClientSession, url: str) -> list[str]:
    """The models that the engine at `url` lists. Raises an `EngineError` where it has no such list."""
    try:
        async with client.get(url + "/v1/models", allow_redirects=False) as response:
            _refuse_redirect(response)
            body = await whole(response, MOST_BYTES_OF_MODELS)
            if response.status >= 400:
                raise EngineUnavailable(f"{url}/v1/models answered HTTP {response.status}: {start_of(body)}")
            return [str(entry["id"]) for entry in msgspec.json.decode(body)["data"]]
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise EngineUnavailable(f"Nothing answers at {url}: {why_unreachable(error)}.") from error
    except (*UNREADABLE, KeyError, TypeError) as error:
        raise EngineProtocolError(
            f"{url}/v1/models is not an OpenAI list of models; name it with {url}@MODEL."
        ) from error


def _refuse_redirect(response: aiohttp.ClientResponse) -> None:
    """The load follows none, so a probe that did would find an engine where the cells find nothing."""
    if 300 <= response.status < 400:
        there = shown(response.headers.get("Location", "nowhere"))
        raise EngineProtocolError(f"{response.url} sends elsewhere (HTTP {response.status}, to {there}); race that.")


async def whole(response: aiohttp.ClientResponse, most: int) -> bytes:
    """A body that is no stream. `EngineProtocolError` as soon as it is longer than `most` bytes: it may have no end."""
    body = bytearray()
    async for data in response.content.iter_any():
        body += data
        if len(body) > most:
            raise EngineProtocolError(f"{response.url} answered with more than {most} bytes.")
    return bytes(body)


def start_of(body: bytes) -> str:
    """The first words of a body, in one line."""
    return " ".join(shown(body.decode("utf-8", "replace")).split())
