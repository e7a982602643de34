"""The server's half of wire/side_routes.py: bodies as clients send them, answers in OpenAI's and vLLM's shapes.

body = decode_embedding(data)                        # `InvalidRequest` names the field at fault
answer = embedding_answer(await adapter.embed(body.request()), body.model, body.format)

body = decode_tokenize(data)
answer = tokens_answer(await adapter.tokenize(body.request(body.model or "the-only-one")))
"""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Sequence
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from adapters.errors import InvalidRequest
from adapters.types import (
    Count,
    EmbeddingRequest,
    Embeddings,
    Label,
    Message,
    Positive,
    Text,
    TokenizeRequest,
    Tokens,
    decode_as,
    one_or_several,
)

MAX_INPUTS = 2048  # OpenAI's limit

Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256)]
EncodingFormat: TypeAlias = Literal["float", "base64"]

_encode = msgspec.json.Encoder().encode


class EmbeddingBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """`input` is a text, a list of token ids, or a list of either."""

    model: Name
    input: Text | Annotated[list[Count | Text | list[Count]], Meta(min_length=1)]
    encoding_format: EncodingFormat | UnsetType | None = UNSET
    dimensions: Positive | UnsetType | None = UNSET
    user: Label | UnsetType | None = UNSET

    @property
    def format(self) -> EncodingFormat:
        return "base64" if self.encoding_format == "base64" else "float"

    def request(self) -> EmbeddingRequest:
        inputs = one_or_several(self.input, "input", at_most=MAX_INPUTS)
        if not all(inputs):
            raise InvalidRequest("An input of an embedding must not be empty.", param="input")
        return EmbeddingRequest(model=self.model, input=inputs, dimensions=self.dimensions, user=self.user)


class TokenizeBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's `/tokenize`. Where one model is served its name may be left out."""

    model: Name | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=4096)] | None = None
    add_special_tokens: bool | None = None

    def request(self, model: str) -> TokenizeRequest:
        try:
            return TokenizeRequest(
                model=model,
                prompt=self.prompt,
                messages=self.messages,
                add_special_tokens=self.add_special_tokens is not False,
            )
        except ValueError as error:
            raise InvalidRequest(f"{error}.", param="prompt") from error


class DetokenizeBody(Struct, kw_only=True, forbid_unknown_fields=True):
    model: Name | None = None
    tokens: list[Count]


_embeddings = msgspec.json.Decoder(EmbeddingBody)
_tokenize = msgspec.json.Decoder(TokenizeBody)
_detokenize = msgspec.json.Decoder(DetokenizeBody)


def decode_embedding(data: bytes) -> EmbeddingBody:
    return decode_as(_embeddings, data)


def decode_tokenize(data: bytes) -> TokenizeBody:
    return decode_as(_tokenize, data)


def decode_detokenize(data: bytes) -> DetokenizeBody:
    return decode_as(_detokenize, data)


def embedding_answer(embeddings: Embeddings, model: str, encoding_format: EncodingFormat) -> bytes:
    data = [
        {"object": "embedding", "index": index, "embedding": _base64(vector) if encoding_format == "base64" else vector}
        for index, vector in enumerate(embeddings.vectors)
    ]
    usage = {"prompt_tokens": embeddings.prompt_tokens, "total_tokens": embeddings.prompt_tokens}
    return _encode({"object": "list", "data": data, "model": model, "usage": usage})


def _base64(vector: Sequence[float]) -> str:
    """float32, little-endian."""
    numbers = array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode()


def tokens_answer(tokens: Tokens) -> bytes:
    return _encode({"count": len(tokens.ids), "max_model_len": tokens.max_model_len, "tokens": tokens.ids})


def text_answer(text: str) -> bytes:
    return _encode({"prompt": text})
