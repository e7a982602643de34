"""Acme, as far as there is one: a server that speaks its wire and says words, to try the adapter on.

    python -m acme_goodgate.server --port 9000 --token-ms 20

It stops on SIGINT and SIGTERM.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from aiohttp import web

CONTEXT = 512
WORDS = ("alpha", "beta", "gamma", "delta")


@dataclass
class Acme:
    """The engine. Its dials may be turned while it runs."""

    model: str = "small"
    token_ms: float = 0.0
    first_token_ms: float = 0.0
    num_words: int = 12  # of an answer that nothing ends earlier
    num_speaking: int = 0

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/status", self.status)
        app.router.add_post("/speak", self.speak)
        return app

    async def status(self, _: web.Request) -> web.StreamResponse:
        told = {"state": "ready", "model": self.model, "context": CONTEXT, "build": "4.2"}
        return web.json_response({**told, "speaking": self.num_speaking, "queued": 0})

    async def speak(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        heard = len(_prompt(asked).split()) + 1
        if heard + asked.get("at_most", 1) > CONTEXT:
            return web.json_response({"error": f"The prompt is longer than the context length, {CONTEXT}."}, status=400)
        self.num_speaking += 1
        try:
            return await self._answer(request, asked, heard)
        finally:
            self.num_speaking -= 1

    async def _answer(self, request: web.Request, asked: dict[str, Any], heard: int) -> web.StreamResponse:
        await asyncio.sleep(self.first_token_ms / 1000)
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        said, over = 0, "end"
        for said, piece in enumerate(self._pieces(asked), 1):
            await response.write(json.dumps({"say": piece}).encode() + b"\n")
            await asyncio.sleep(self.token_ms / 1000)
            if said == asked.get("at_most"):
                over = "limit"
                break
        await response.write(json.dumps({"over": over, "heard": heard, "said": said}).encode() + b"\n")
        return response

    def _pieces(self, asked: dict[str, Any]) -> Iterator[str]:
        """The words of the answer, up to a stop string. Chance has a say in them unless it is ruled out."""
        is_greedy = asked.get("heat") == 0 or asked.get("width") == 1
        draw = random.Random(0 if is_greedy else asked.get("dice"))
        text = ""
        for number in range(self.num_words):
            word = draw.choice(WORDS)
            piece = f" {word}" if number else word
            text += piece
            if any(stop in text for stop in asked.get("until", ())):
                return
            yield piece.upper() if asked.get("loud") else piece


def _prompt(asked: dict[str, Any]) -> str:
    return asked["text"] if "text" in asked else " ".join(turn["says"] for turn in asked["turns"])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m acme_goodgate.server", description="Acme, to try its adapter on.")
    parser.add_argument("--port", type=int, default=9000)
    parser.add_argument("--model", default="small")
    parser.add_argument("--token-ms", type=float, default=5.0)
    given = parser.parse_args()
    engine = Acme(model=given.model, token_ms=given.token_ms)
    web.run_app(engine.app(), host="127.0.0.1", port=given.port, access_log=None, handler_cancellation=True)


if __name__ == "__main__":
    main()
