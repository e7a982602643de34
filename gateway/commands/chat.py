"""A small client for the commands that ask a running gateway: `goodgate chat` gets its answer piece by piece, others
fetch what an operator wants to know."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any
from urllib.parse import urlsplit

from adapters.errors import EngineUnavailable, GoodgateError, InvalidRequest, StreamInterrupted
from adapters.wire.sse import EventSplitter

CONNECT_TIMEOUT_S = 5.0  # and for the list of models, which no engine is asked for
DEFAULT_TEMPERATURE = 0.2  # small models ramble above 0.3
NO_GATEWAY = "What answers there is no Goodgate; name the gateway's address with --url."
NO_MODEL = "This key may use none of the models here; `goodgate keys list` shows what its patterns are."
SILENCE_TIMEOUT_S = 150.0  # longer than the gateway's own deadline for a first token


class GatewayRefused(GoodgateError):
    """The gateway answered with an error; the message is its own."""


def stream_answer(
    url: str, prompt: str, *, model: str | None, max_tokens: int, temperature: float | None = None, key: str = ""
) -> Iterator[str]:
    """The answer's pieces as they arrive. Raises an error whose message says what to do.

    A temperature that nobody asked for must not keep an engine without one from answering.
    """
    headers = _authorization(key)
    with _connected(url) as connection:
        body = {
            "model": model or _first_model(connection, headers),
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "temperature": DEFAULT_TEMPERATURE if temperature is None else temperature,
            "stream": True,
        }
        connection.timeout = SILENCE_TIMEOUT_S  # of a socket that is opened again
        if connection.sock is not None:
            connection.sock.settimeout(SILENCE_TIMEOUT_S)
        yield from _pieces(_ask(connection, body, headers, may_drop_temperature=temperature is None))


def fetch(url: str, path: str, *, key: str = "", method: str = "GET") -> bytes:
    """The body of an answer that is none to an error. Raises an error whose message says what to do."""
    with _connected(url) as connection:
        connection.request(method, path, headers=_authorization(key))
        return _read(connection.getresponse())


@contextmanager
def _connected(url: str) -> Iterator[http.client.HTTPConnection]:
    """A connection to the gateway. Whatever goes wrong with it meanwhile becomes an error of ours."""
    host, port = _address(url)
    connection = http.client.HTTPConnection(host, port, timeout=CONNECT_TIMEOUT_S)
    with closing(connection):
        try:
            connection.connect()
            yield connection
        except ConnectionRefusedError as error:
            raise EngineUnavailable(f"No gateway listens on {url}; start one with `goodgate serve`.") from error
        except TimeoutError as error:
            raise EngineUnavailable(f"What listens on {url} is silent; is that the gateway's address?") from error
        except (OSError, http.client.HTTPException) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise EngineUnavailable(
                f"The gateway at {url} cannot be reached: {reason}; start it with `goodgate serve`."
            ) from error


def _authorization(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def _address(url: str) -> tuple[str, int]:
    try:
        address = urlsplit(url)
        port = address.port or 80
    except ValueError:  # a port that is no number, brackets that do not close
        address, port = urlsplit(""), 0
    if address.scheme != "http" or not address.hostname:
        raise InvalidRequest(f"{url!r} is no gateway address; write it as http://HOST:PORT.")
    return address.hostname, port


def _first_model(connection: http.client.HTTPConnection, headers: Mapping[str, str]) -> str:
    connection.request("GET", "/v1/models", headers=headers)
    body = _read(connection.getresponse())
    try:
        names = [str(model["id"]) for model in json.loads(body)["data"]]
    except (ValueError, LookupError, TypeError):
        raise GatewayRefused(NO_GATEWAY) from None
    if not names:
        raise GatewayRefused(NO_MODEL)
    return names[0]


def _ask(
    connection: http.client.HTTPConnection,
    body: dict[str, Any],
    headers: Mapping[str, str],
    *,
    may_drop_temperature: bool,
) -> http.client.HTTPResponse:
    """The answer that has begun to stream."""
    connection.request(
        "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json", **headers}
    )
    response = connection.getresponse()
    if response.status == 200:
        return response
    try:
        _read(response)
    except GatewayRefused as refusal:
        if refusal.param != "temperature" or not may_drop_temperature:
            raise
    return _ask(connection, {**body, "temperature": None}, headers, may_drop_temperature=False)


def _pieces(response: http.client.HTTPResponse) -> Iterator[str]:
    splitter = EventSplitter()
    while data := response.read1(65536):
        for event in splitter.feed(data):
            if event.data == b"[DONE]":
                return
            yield _text(event.data)
    raise StreamInterrupted("The answer broke off before its end.")


def _text(data: bytes) -> str:
    try:
        event: dict[str, Any] = json.loads(data)
        if "error" not in event:
            return "".join(choice["delta"].get("content") or "" for choice in event["choices"])
        message = str(event["error"]["message"])
    except (ValueError, LookupError, TypeError, AttributeError):
        message = NO_GATEWAY
    raise GatewayRefused(message)


def _read(response: http.client.HTTPResponse) -> bytes:
    body = response.read()
    if response.status == 200:
        return body
    try:
        error = json.loads(body)["error"]
        message, param = error["message"], error.get("param")
    except (ValueError, LookupError, TypeError, AttributeError):
        message, param = f"{NO_GATEWAY} (It said HTTP {response.status}.)", None
    raise GatewayRefused(str(message), param=param)
