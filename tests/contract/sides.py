"""The side routes of every engine, as its documentation has them: what it answers there, and what has to be sent."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

EMBEDDINGS = "/v1/embeddings"
TWO_VECTORS: dict[str, list[dict[str, Any]]] = {
    "data": [{"index": 1, "embedding": [1, 0]}, {"index": 0, "embedding": [0.6, 0.8]}]
}
OPENAI_VECTORS = {
    "object": "list",
    "model": "small",
    "data": [{"object": "embedding", **each} for each in TWO_VECTORS["data"]],
    "usage": {"prompt_tokens": 3, "total_tokens": 3},
}
MODEL = {"model": "small"}
TURNS = [{"role": "user", "content": "Hi"}]
VLLM_TOKENS = {"count": 2, "max_model_len": 4096, "tokens": [5, 6]}
TGI_TOKENS = [{"id": 5, "text": "Hello", "start": 0, "stop": 5}, {"id": 6, "text": " world", "start": 5, "stop": 11}]
TGI_INFO = {"model_id": "org/small", "max_total_tokens": 4096, "version": "3.3.7"}
LLAMA_TOO_LONG = "input (3001 tokens) is too large to process. increase the physical batch size (current: 1024)"
LLAMA_PROPS = {"default_generation_settings": {"n_ctx": 4096}, "build_info": "b11434-1a2b3c4"}


@dataclass(frozen=True, kw_only=True)
class Side:
    """One engine, or one of its routes: what its side says, and the bodies sent to it, in their order."""

    engine: str
    options: dict[str, Any] = field(default_factory=dict)
    has_template: bool = False
    replies: dict[str, Any] = field(default_factory=dict)
    embeds: bool = False
    takes_dimensions: bool = False
    text_sent: list[dict[str, Any]] | None = None  # for tokenising a text; None: it is not offered, or asks nobody
    chat_sent: list[dict[str, Any]] | None = None
    ids_sent: dict[str, Any] | None = None
    local: bool = False  # token ids come from the tokenizer here
    detokenizes: bool = False
    version: str = ""


def vllm_like(engine: str, **more: Any) -> Side:
    replies = {"/tokenize": VLLM_TOKENS, "/detokenize": {"prompt": "Hello world"}}
    return Side(
        engine=engine,
        replies=replies | more.pop("replies", {}),
        text_sent=[{**MODEL, "prompt": "Hello world", "add_special_tokens": True}],
        chat_sent=[{**MODEL, "messages": TURNS}],
        ids_sent={**MODEL, "tokens": [5, 6]},
        detokenizes=True,
        **more,
    )


def llama(**more: Any) -> Side:
    text = {**MODEL, "content": "Hello world", "add_special": True}
    return Side(
        engine="llama_cpp",
        replies={
            "/tokenize": {"tokens": [5, 6]},
            "/detokenize": {"content": "Hello world"},
            "/apply-template": {"prompt": "[user]Hi"},
            "/props": LLAMA_PROPS,
        },
        text_sent=[text],
        chat_sent=[{**MODEL, "messages": TURNS}, {**text, "content": "[user]Hi"}],
        ids_sent={**MODEL, "tokens": [5, 6]},
        detokenizes=True,
        version="b11434-1a2b3c4",
        **more,
    )


def sglang(**more: Any) -> Side:
    return Side(
        engine="sglang",
        replies={
            "/v1/tokenize": VLLM_TOKENS,
            "/v1/detokenize": {"text": "Hello world"},
            "/server_info": {"model_path": "org/small", "version": "0.5.23"},
        },
        text_sent=[{**MODEL, "prompt": "Hello world", "add_special_tokens": True}],
        ids_sent={**MODEL, "tokens": [5, 6], "skip_special_tokens": False},
        detokenizes=True,
        version="0.5.23",
        **more,
    )


def tgi(**more: Any) -> Side:
    replies = {
        "/tokenize": TGI_TOKENS,
        "/chat_tokenize": {"tokenize_response": TGI_TOKENS, "templated_text": "[user]Hi"},
        "/info": TGI_INFO,
    }
    return Side(engine="tgi", replies=replies, text_sent=[{"inputs": "Hello world"}], version="3.3.7", **more)


VLLM_VERSION = {"replies": {"/version": {"version": "0.32.0"}}, "version": "0.32.0"}
EMBEDS = {"options": {"embeddings": True}, "embeds": True}
OWN_TEXT = "[user]Hi[assistant]"  # the word model's template, without the token that the engine adds again
TGI_CHAT = {"model": "tgi", "messages": TURNS, "stream": True, "stream_options": {"include_usage": True}}

SIDES: dict[str, Side] = {
    "vllm": vllm_like("vllm", **VLLM_VERSION),
    "vllm for embeddings": vllm_like("vllm", **VLLM_VERSION, **EMBEDS, takes_dimensions=True),
    "llama_cpp": llama(),
    "llama_cpp for embeddings": llama(**EMBEDS),
    "sglang": sglang(chat_sent=[{**MODEL, "messages": TURNS}]),
    "sglang for embeddings": sglang(chat_sent=[{**MODEL, "messages": TURNS}], **EMBEDS, takes_dimensions=True),
    "sglang native": sglang(options={"route": "native"}),
    "sglang native with a template": sglang(
        options={"route": "native"},
        has_template=True,
        chat_sent=[{**MODEL, "prompt": OWN_TEXT, "add_special_tokens": True}],
    ),
    "tgi openai": tgi(options={"route": "openai"}, chat_sent=[TGI_CHAT]),
    "tgi generate": tgi(options={"route": "generate"}),
    "tgi generate with a template": tgi(has_template=True, chat_sent=[{"inputs": OWN_TEXT}]),
    "tensorrt_llm": Side(engine="tensorrt_llm", replies={"/version": {"version": "1.2.1"}}, version="1.2.1"),
    "tensorrt_llm with a template": Side(
        engine="tensorrt_llm",
        has_template=True,
        replies={"/version": {"version": "1.2.1"}},
        local=True,
        detokenizes=True,
        version="1.2.1",
    ),
    "triton": Side(engine="triton_server", replies={"/v2": {"name": "triton", "version": "2.60.0"}}, version="2.60.0"),
    "triton with a template": Side(
        engine="triton_server",
        options={"dialect": "ensemble"},
        has_template=True,
        replies={"/v2": {"name": "triton", "version": "2.60.0"}},
        local=True,
        detokenizes=True,
        version="2.60.0",
    ),
    "openvino": vllm_like("openvino", replies={"/version": {"version": "2026.4.1"}}, version="2026.4.1"),
    "goodgate_peer": vllm_like("goodgate_peer", embeds=True, takes_dimensions=True),
    "openai_compatible": Side(engine="openai_compatible"),
    "openai_compatible for embeddings": Side(engine="openai_compatible", **EMBEDS, takes_dimensions=True),
}


def replies_of(engine: str) -> dict[str, Any]:
    """All that the engine's side says, whichever of its routes generates."""
    replies = {path: body for side in SIDES.values() if side.engine == engine for path, body in side.replies.items()}
    embeds = any(side.embeds for side in SIDES.values() if side.engine == engine)
    return replies | {EMBEDDINGS: TWO_VECTORS} if embeds else replies
