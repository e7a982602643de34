"""Why a url gives no answer, in words for a person. aiohttp's own name the address twice and may fill several lines.

except (aiohttp.ClientError, OSError, TimeoutError) as error:
    raise EngineUnavailable(f"Nothing answers at {url}: {why_unreachable(error)}.") from error
"""

from __future__ import annotations

import os

import aiohttp


def why_unreachable(error: BaseException) -> str:
    """One clause, the most specific reason first."""
    if isinstance(error, aiohttp.InvalidURL):
        return "that is no address; write it as http://HOST:PORT"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        reason = getattr(error.certificate_error, "verify_message", "") or "it does not verify"
        return f"its certificate is not trusted ({reason}); SSL_CERT_FILE names the authorities that are"
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return f"there is no host {error.host!r}"
    if isinstance(error, aiohttp.ClientSSLError):
        return "it does not speak TLS there; write http:// instead of https://"
    if (
        isinstance(error, ConnectionRefusedError)
        or getattr(error, "os_error", None).__class__ is ConnectionRefusedError
    ):
        return "the connection is refused"
    if isinstance(error, TimeoutError):
        return "it is silent"
    if isinstance(error, aiohttp.ServerDisconnectedError | ConnectionResetError):
        return "the connection is closed without an answer"
    if isinstance(error, aiohttp.ClientResponseError | aiohttp.ClientPayloadError):
        return "what answers does not speak HTTP as it should"
    if isinstance(error, OSError) and error.errno and error.errno > 0:
        return os.strerror(error.errno).lower()
    return type(error).__name__
