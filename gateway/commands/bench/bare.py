"""A pass-through in aiohttp on uvloop that knows nothing: what a gateway in Python cannot be cheaper than by much.

python -m gateway.commands.bench.bare PORT http://127.0.0.1:UPSTREAM
"""

from __future__ import annotations

import asyncio
import sys

import aiohttp
import uvloop
from aiohttp import web


async def main(port: int, upstream: str) -> None:
    async with aiohttp.ClientSession(upstream) as session:

        async def pass_through(request: web.Request) -> web.Response:
            body = await request.read()
            async with session.post(request.path, data=body, headers={"Content-Type": "application/json"}) as answer:
                return web.Response(status=answer.status, body=await answer.read(), content_type="application/json")

        app = web.Application()
        app.add_routes([web.post("/v1/chat/completions", pass_through)])
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), sys.argv[2]))
