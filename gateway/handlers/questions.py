"""What an engine answers in one piece: vectors, token ids, and the text of ids.

POST /v1/embeddings    POST /tokenize    POST /detokenize

The first is OpenAI's, the others are vLLM's. Where one model is configured, theirs may leave out its name.
"""

from __future__ import annotations

import asyncio

from aiohttp import web

from adapters.errors import InvalidRequest
from adapters.servers.side_answers import (
    decode_detokenize,
    decode_embedding,
    decode_tokenize,
    embedding_answer,
    text_answer,
    tokens_answer,
)
from gateway.attempts.answer import Question
from gateway.config import Live
from gateway.dispatch import Dispatcher
from gateway.records.trace import TRACE
from gateway.replicas.directory import Directory
from gateway.tenants import cost
from gateway.tenants.auth import keyed
from gateway.web.body import read_json
from gateway.web.envelope import JSON


class QuestionHandlers:
    def __init__(self, dispatcher: Dispatcher, fleet: Directory, live: Live) -> None:
        self._dispatcher = dispatcher
        self._fleet = fleet
        self._live = live

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/embeddings", keyed(self.embeddings)),
            web.post("/tokenize", keyed(self.tokenize)),
            web.post("/detokenize", keyed(self.detokenize)),
        ]

    async def embeddings(self, request: web.Request) -> web.Response:
        body = decode_embedding(await read_json(request, self._live.server))
        wanted, trace = body.request(), request[TRACE]
        wanted.model = self._fleet.passed_on(body.model)
        question = Question(
            check=lambda adapter: adapter.check_embedding(wanted),
            ask=lambda adapter: adapter.embed(wanted),
            num_tokens=lambda embeddings: embeddings.prompt_tokens,
            expected_tokens=cost.of_embedding(wanted),
        )
        embeddings = await self._dispatcher.ask(question, body.model, trace)
        return _json_response(await asyncio.to_thread(embedding_answer, embeddings, trace.model, body.format))

    async def tokenize(self, request: web.Request) -> web.Response:
        body = decode_tokenize(await read_json(request, self._live.server))
        name = body.model or self._only_model(request)
        wanted = body.request(self._fleet.passed_on(name))
        question = Question(
            check=lambda adapter: adapter.check_tokenize(wanted), ask=lambda adapter: adapter.tokenize(wanted)
        )
        return _json_response(tokens_answer(await self._dispatcher.ask(question, name, request[TRACE])))

    async def detokenize(self, request: web.Request) -> web.Response:
        body = decode_detokenize(await read_json(request, self._live.server))
        name = body.model or self._only_model(request)
        question = Question(
            check=lambda adapter: adapter.check_detokenize(), ask=lambda adapter: adapter.detokenize(body.tokens)
        )
        return _json_response(text_answer(await self._dispatcher.ask(question, name, request[TRACE])))

    def _only_model(self, request: web.Request) -> str:
        names = [model.name for model in self._fleet.served_to(request[TRACE].caller)]
        if len(names) != 1:
            there_is = ", ".join(sorted(names)) or "none for this key"
            raise InvalidRequest(f"Name the `model`; there is: {there_is}.", param="model")
        return names[0]


def _json_response(body: bytes) -> web.Response:
    return web.Response(body=body, content_type=JSON)
