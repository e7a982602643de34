"""What engines are asked beside generation: vectors, token ids, the text of ids, their version. No I/O.

    body = embedding_body(request, "served-name", as_base64=True)
    embeddings = read_embeddings("acme", answer, request)      # raises for an answer that is not what was asked for

Most engines have such routes and differ in paths and names only: `SideRoutes` holds those. Embeddings are OpenAI's
everywhere, in floats or in base64 (little-endian float32), whichever the engine sends. How our own servers answer such
questions is in adapters/servers/side_answers.py.
"""

from __future__ import annotations

import base64
import binascii
import math
import sys
from array import array
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from adapters.errors import EngineProtocolError, GoodgateError
from adapters.types import EmbeddingRequest, Embeddings, TokenizeRequest, Tokens
from adapters.wire.vocabulary import token_count
from adapters.wire.wire_errors import error_from_event, tells_error

EMBEDDINGS = "/v1/embeddings"
MAX_CONTEXT = 2**31 - 1  # what tokenizers without a limit write instead of one is far larger

T = TypeVar("T")


class SideRoutes(Struct, frozen=True, kw_only=True):
    """Where an engine answers, and in which words; an empty path is a route that it does not have."""

    version: str = ""
    version_field: str = "version"
    tokenize: str = ""
    tokenizes_chats: bool = False  # the same route takes `messages`
    text_field: str = "prompt"  # of a text to tokenise
    special_field: str = "add_special_tokens"
    detokenize: str = ""
    detokenize_options: dict[str, Any] = {}
    detokenized_field: str = "prompt"  # of the answer
    embeds_as_base64: bool = False  # known to send vectors as base64 when asked: a fifth of the bytes


VLLM_ROUTES = SideRoutes(
    version="/version", tokenize="/tokenize", tokenizes_chats=True, detokenize="/detokenize", embeds_as_base64=True
)


# --------------------------------------------------------------------------------------------------------- embeddings


class _Vector(Struct):
    embedding: list[float] | str
    index: int | None = None


class _Vectors(Struct):
    data: list[_Vector]
    usage: Any = None


_vectors = msgspec.json.Decoder(_Vectors)


def embedding_body(request: EmbeddingRequest, model: str, *, as_base64: bool = False) -> dict[str, Any]:
    body = {"model": model, "input": request.input, "encoding_format": "base64" if as_base64 else "float"}
    return body | {"dimensions": request.dimensions} if isinstance(request.dimensions, int) else body


def read_embeddings(engine: str, answer: bytes, request: EmbeddingRequest) -> Embeddings:
    """The vectors in the inputs' order, each finite and all of one length."""
    told = decode_answer(engine, answer, _vectors)
    vectors = [_floats(engine, each.embedding) for each in _in_order(engine, told.data, len(request.input))]
    check_vectors(engine, vectors, request)
    usage = told.usage if isinstance(told.usage, dict) else {}
    return Embeddings(vectors, token_count(usage.get("prompt_tokens")) or 0)


def check_vectors(engine: str, vectors: list[list[float]], request: EmbeddingRequest) -> None:
    """Each finite, and all of one length: the one that was asked for, if one was."""
    length = request.dimensions if isinstance(request.dimensions, int) else len(vectors[0])
    if not length or any(len(vector) != length for vector in vectors):
        raise EngineProtocolError(f"The engine {engine!r} answered vectors that are not of the length asked for.")
    if not all(math.isfinite(sum(vector)) for vector in vectors):
        raise EngineProtocolError(f"The engine {engine!r} answered a vector that holds no numbers.")


def _in_order(engine: str, data: list[_Vector], num_inputs: int) -> list[_Vector]:
    """By index, or as they come where none has one."""
    has_indices = any(each.index is not None for each in data)
    by_index = {each.index if has_indices else place: each for place, each in enumerate(data)}
    if len(data) != num_inputs or set(by_index) != set(range(num_inputs)):
        raise EngineProtocolError(f"The engine {engine!r} did not answer one vector for each of {num_inputs} inputs.")
    return [by_index[place] for place in range(num_inputs)]


def _floats(engine: str, vector: list[float] | str) -> list[float]:
    if isinstance(vector, list):
        return vector
    try:
        numbers = array("f", base64.b64decode(vector, validate=True))
    except (binascii.Error, ValueError) as error:
        raise EngineProtocolError(f"The engine {engine!r} answered a vector that is no base64 of float32.") from error
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()


# ------------------------------------------------------------------------------------------------------------- tokens


class _Tokens(Struct):
    tokens: list[Annotated[int, Meta(ge=0)]]
    max_model_len: Any = None


_tokens = msgspec.json.Decoder(_Tokens)
_fields = msgspec.json.Decoder(dict[str, Any])


def text_body(request: TokenizeRequest, routes: SideRoutes, model: str) -> dict[str, Any]:
    return {"model": model, routes.text_field: request.prompt, routes.special_field: request.add_special_tokens}


def read_tokens(engine: str, answer: bytes) -> Tokens:
    told = decode_answer(engine, answer, _tokens)
    length = told.max_model_len
    is_limit = isinstance(length, int) and 0 < length <= MAX_CONTEXT
    return Tokens(told.tokens, length if is_limit else None)


def read_text(engine: str, answer: bytes, field: str) -> str:
    """One text of an answer: what ids spell, or a version."""
    text = decode_answer(engine, answer, _fields).get(field)
    if not isinstance(text, str):
        raise _misfit(engine, answer, f"answered without {field!r}")
    return text


def decode_answer(engine: str, answer: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    try:
        return decoder.decode(answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _misfit(engine, answer, "answered something unexpected") from error


def _misfit(engine: str, answer: bytes, reason: str) -> GoodgateError:
    """The error for an answer of another shape than asked for; under a success status it may be an error itself."""
    if tells_error(answer):
        return error_from_event(engine, answer)
    return EngineProtocolError(f"The engine {engine!r} {reason}.")
