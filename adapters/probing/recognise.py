"""Which engine answers at a url? A few GETs, and a pure reading of what came back.

    found = await recognise("http://127.0.0.1:8000")
    found.engine, found.why                   # "vllm", "its list of models says owned_by vllm"

Engines say who they are in their list of models, or in a route that no other has. Where nothing tells them apart the
answer is `openai_compatible`, and says so. What lists no models either is no engine at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import aiohttp
import msgspec
from msgspec import Struct

from adapters.errors import EngineUnavailable
from adapters.wire.unreachable import why_unreachable

TIMEOUT_S = 5.0
MAX_BYTES = 4 << 20  # of an answer
PATHS = ("/v1/models", "/info", "/props", "/v2", "/model_info")
UNSURE = "openai_compatible"

# Engines that sign their list of models: vLLM, SGLang, TensorRT-LLM, llama.cpp, and those of ours.
OWNERS = {
    "vllm": "vllm",
    "sglang": "sglang",
    "tensorrt_llm": "tensorrt_llm",
    "llamacpp": "llama_cpp",
    "openvino": "openvino",
    "goodgate": "goodgate_peer",
}
# A route that one engine alone has, and a key of its answer.
LANDMARKS = (
    ("/v2", "extensions", "triton_server"),
    ("/info", "max_total_tokens", "tgi"),
    ("/props", "default_generation_settings", "llama_cpp"),
    ("/model_info", "is_generation", "sglang"),
)


class Recognised(Struct, frozen=True):
    engine: str
    why: str


class Reply(Struct, frozen=True):
    status: int
    told: Any = None  # the JSON of a success; None where there is none
    location: str = ""  # where a redirect leads


async def recognise(url: str, headers: Mapping[str, str] | None = None) -> Recognised:
    """Raises `EngineUnavailable` when nobody answers, or somebody who is no engine."""
    url = url.rstrip("/").removesuffix("/v1")
    replies = await ask_around(url, headers or {})
    found = tell({path: reply.told for path, reply in replies.items() if reply.told is not None})
    if found.engine == UNSURE and (reason := why_no_engine(replies.get("/v1/models"))):
        raise EngineUnavailable(f"What answers at {url} is no engine that can be told: {reason}.")
    return found


def why_no_engine(listing: Reply | None) -> str:
    """What is wrong with a list of models, and what to do; empty where it is one."""
    if listing is None:
        return "it does not answer /v1/models; look at its log, or name the engine with --engine"
    if listing.status in (401, 403):
        return f"it wants a key (HTTP {listing.status}); name the variable that holds it with -o api_key_env=VARIABLE"
    if listing.location:
        return f"it redirects /v1/models to {listing.location}; probe the address where the engine itself listens"
    if listing.status != 200:
        return f"its /v1/models says HTTP {listing.status}; check the address, or name the engine with --engine"
    if not isinstance(listing.told, dict) or not isinstance(listing.told.get("data"), list):
        return "its /v1/models is no list of models; check the address, or name the engine with --engine"
    return ""


def tell(answers: Mapping[str, Any]) -> Recognised:
    """The engine that gave these answers, by path; routes that it lacks are absent."""
    owners = owners_of(answers.get("/v1/models"))
    for owner in owners:
        if owner in OWNERS:
            return Recognised(OWNERS[owner], f"its list of models says owned_by {owner}")
    for path, key, engine in LANDMARKS:
        answer = answers.get(path)
        if isinstance(answer, dict) and key in answer:
            return Recognised(engine, f"its {path} tells {key}")
    seen = f"owned_by {', '.join(owners)}" if owners else "no owner that is known"
    return Recognised(
        UNSURE, f"nothing tells it apart ({seen}), so it is taken as any OpenAI endpoint; --engine names it"
    )


def owners_of(listing: Any) -> list[str]:
    models = listing.get("data") if isinstance(listing, dict) else None
    owners = [model.get("owned_by") for model in models or () if isinstance(model, dict)]
    return sorted({owner for owner in owners if isinstance(owner, str) and owner})


async def ask_around(url: str, headers: Mapping[str, str]) -> dict[str, Reply]:
    """What each path says; one that gives no answer is left out."""
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout, headers=dict(headers)) as client:
        replies = await asyncio.gather(*(_get(client, url + path) for path in PATHS), return_exceptions=True)
    failures = [reply for reply in replies if isinstance(reply, BaseException)]
    if len(failures) == len(replies):
        reason = why_unreachable(failures[0])
        raise EngineUnavailable(f"Nothing answers at {url}: {reason}. Start the engine, or check the address.")
    return {path: reply for path, reply in zip(PATHS, replies, strict=True) if isinstance(reply, Reply)}


async def _get(client: aiohttp.ClientSession, url: str) -> Reply:
    async with client.get(url, allow_redirects=False) as response:
        body = bytearray()
        while len(body) < MAX_BYTES and (piece := await response.content.readany()):
            body += piece
        location = response.headers.get("Location", "") if 300 <= response.status < 400 else ""
    try:
        told = msgspec.json.decode(body) if response.status == 200 else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        told = None
    return Reply(response.status, told, location)
