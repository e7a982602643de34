"""What every dialect's streams have in common: however an answer ends, its client is told.

stream = EventStream(request, limits)
return await tell_how_it_ends(stream, send, open_requests, trace)         # `send` opens the stream, fills and ends it
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import web

from adapters.errors import GoodgateError
from gateway.admission.open_requests import OpenRequests
from gateway.records import logs
from gateway.records.trace import Trace
from gateway.web import envelope
from gateway.web.stream import EventStream

_log = logs.logger("stream")


async def tell_how_it_ends(
    stream: EventStream, send: Callable[[], Awaitable[None]], open_requests: OpenRequests, trace: Trace
) -> web.StreamResponse:
    """The 200 leaves with the first chunk: an earlier failure has its true status, a later one is an event. Only while
    a model is being loaded does it leave before, after the first heartbeat."""
    try:
        await send()
    except GoodgateError as error:
        if not stream.has_begun:
            raise
        trace.code = error.code or error.type
        await stream.fail(error)
    except asyncio.CancelledError:
        if stream.is_whole:
            trace.status = stream.response.status
        if stream.is_whole or not (open_requests.is_cut_off and stream.is_open):
            raise
        error_event = envelope.shutting_down()
        trace.code = error_event.code or ""
        await stream.fail(error_event)
    except Exception as error:
        if not stream.has_begun:
            raise
        trace.code = envelope.InternalError.code
        logs.error(_log, "a stream failed", error=error, request_id=trace.request_id)
        await stream.fail(envelope.InternalError(trace.request_id))
    finally:
        stream.close()
    return stream.response
