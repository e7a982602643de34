"""A fuzzer over the codecs: bodies of every route, streams of engines, and bytes on a socket.

    python -m tests.fuzz --seconds 600                    # all targets, in turns of ten seconds
    python -m tests.fuzz --seconds 60 --target chat       # one of them
    python -m tests.fuzz --target chat --seed 17          # one case again, as a report names it

A case is a target and a seed: `Random(seed)` makes all of it, so that every fault can be seen again. tests/test_fuzz.py
gives each target a few seconds of the suite. What has to hold:

    bodies     a request, or a RequestError; nothing else, and within a second
    streams    every encoder makes JSON of them, or says that the engine is at fault; nothing else
    engine     the same through a whole gateway: one end, or one error, and never both
    socket     an answer below 500 or a closed connection, in time; and the next good request is answered
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import re
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from adapters.errors import EngineError, Overloaded, RequestError
from adapters.registry import adapter_class
from adapters.servers.side_answers import decode_detokenize, decode_embedding, decode_tokenize
from adapters.types import ChatRequest, Chunk, CompletionRequest, Message, decode_as, decode_chat
from adapters.wire.openai_wire import StreamReader, request_body
from gateway.app import PARTS, create_app
from gateway.config import parse_config
from gateway.handlers import openai as openai_routes
from gateway.handlers.anthropic_answers import MessageEvents, MessageFold, MessageHead
from gateway.handlers.anthropic_requests import decode_count, decode_messages
from gateway.handlers.openai_wire import AnswerHead, ChatEvents, ChatFold
from gateway.handlers.responses_body import ResponseBody, chat_request, decode_body, input_items
from gateway.handlers.responses_wire import Reply
from gateway.web.body import check_depth
from gateway.web.server import listen, serving
from tests.contract import sglang_transcripts, tgi_transcripts, transcripts
from tests.contract.twin import events
from tests.gateway import bad_input as routes

SLOW_S = 1.0
TURN_S = 10.0


class Fault(Exception):
    """Something that must not happen did."""


# ------------------------------------------------------------------------------------------------------------ mutation

ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 10**40, -0.0, 1e308, 5e-324, "", " ", "\x00", "\u202e", "😀", "a" * 5000,
    "${jndi:x}", "{{ 7 * 7 }}", "<|im_start|>", "../..", [], {}, [[]], [None], {"": None}, {"type": "function"},
    {"type": {}}, {"type": "text", "text": "x"}, [{"type": "text"}], {"$ref": "#"}, {"role": "user", "content": "x"},
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value inside a document, the document's own first."""
    yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inside:
        yield from places(each, (*path, key))


def mutated(random: Random, document: Any) -> Any:
    """The document with one to four values replaced, removed, doubled, moved or wrapped."""
    changed = copy.deepcopy(document)
    for _ in range(random.randint(1, 4)):
        *way, last = random.choice([path for path in places(changed) if path] or [("x",)])
        parent = changed
        for key in way:
            parent = parent[key]
        if not isinstance(parent, dict | list) or (isinstance(parent, dict) and last not in parent):
            return copy.deepcopy(random.choice(ODD))
        _change(random, changed, parent, last)
    return changed


def _change(random: Random, document: Any, parent: Any, key: Any) -> None:
    match random.randrange(7):
        case 0:
            del parent[key]
        case 1:
            times = [0, 1, 2] if isinstance(parent[key], dict | list) else [0, 1, 2, 5000]
            parent[key] = [copy.deepcopy(parent[key]) for _ in range(random.choice(times))]
        case 2:
            parent[key] = {random.choice(["type", "text", "content", "x"]): parent[key]}
        case 3 if isinstance(parent, dict):
            parent[random.choice(["", "type", "nonsense", "\u00e9", key + "x"])] = copy.deepcopy(parent[key])
        case 4:
            *way, last = random.choice([path for path in places(document) if path])
            other = document
            for each in (*way, last):
                other = other[each]
            parent[key] = copy.deepcopy(other)
        case 5:
            for _ in range(random.choice([1, 30, 70])):
                parent[key] = [parent[key]]
        case _:
            parent[key] = copy.deepcopy(random.choice(ODD))


def scratched(random: Random, data: bytes) -> bytes:
    """The bytes with a few of them changed, left out, doubled or put in."""
    out = bytearray(data)
    for _ in range(random.randint(1, 6)):
        at = random.randrange(len(out) + 1)
        match random.randrange(5):
            case 0 if at < len(out):
                out[at] = random.randrange(256)
            case 1:
                del out[at : at + random.choice([1, 1, 2, 20])]
            case 2:
                out[at:at] = out[at : at + random.choice([1, 5, 50])]
            case 3:
                out[at:at] = random.choice(
                    [b"\r\n", b"\n\n", b"\x00", b"\xff", b'"', b"[" * 70, b"9" * 400, b"\\ud800"]
                )
            case _:
                out[at:at] = random.randbytes(random.choice([1, 4]))
    return bytes(out)


# -------------------------------------------------------------------------------------------------------------- bodies

CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
SCHEMA = {"type": "object", "properties": {"x": {"type": ["string", "null"], "pattern": "^[a-z]+$"}}, "required": ["x"]}
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hello"}], "name": "n"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning": "hm"},
    {"role": "tool", "tool_call_id": "a", "content": "ok"},
]
SAMPLING: dict[str, Any] = {"temperature": 0.5, "top_p": 0.9, "stop": ["a", "b"], "stream": False, "user": "u"}
WHOLE: dict[str, dict[str, Any]] = {  # a body for each target that uses most of what there is
    "chat": {
        "model": "m", "messages": TURNS, "max_tokens": 5, "n": 2, "seed": 1, "logit_bias": {"1": 5}, **SAMPLING,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": False}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}}, "metadata": {"a": "b"}, "logprobs": True,
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
    },
    "completions": {"model": "m", "prompt": ["a", "b"], "max_tokens": 5, "logprobs": 2, **SAMPLING},
    "embeddings": {"model": "m", "input": ["a", "b"], "encoding_format": "base64", "dimensions": 8, "user": "u"},
    "messages": {
        "model": "m", "max_tokens": 5, "system": [{"type": "text", "text": "Be brief."}], "temperature": 0.5,
        "messages": [
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "text", "text": "I look"},
                {"type": "tool_use", "id": "a", "name": "f", "input": {"x": [1, {"y": None}]}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "ok"}]},
                {"type": "text", "text": "Go on"},
            ]},
        ],
        "tools": [{"name": "f", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}],
        "tool_choice": {"type": "any"}, "stop_sequences": ["a"], "metadata": {"user_id": "u"},
        "thinking": {"type": "enabled", "budget_tokens": 2000}, "context_management": {"edits": []},
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    },
    "responses": {
        "model": "m", "instructions": "Be brief.", "max_output_tokens": 5, "temperature": 0.5, "store": False,
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": "ok"},
        ],
        "tools": [{"type": "function", "name": "f", "parameters": SCHEMA, "strict": None}],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
        "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}, "reasoning": {"effort": "low"},
        "include": ["message.output_text.logprobs"], "top_logprobs": 2, "metadata": {"a": "b"},
    },
    "tokenize": {"model": "m", "messages": TURNS, "add_special_tokens": True},
    "detokenize": {"model": "m", "tokens": [1, 2, 3]},
}  # fmt: skip
WHOLE["count"] = {name: WHOLE["messages"][name] for name in ("model", "system", "messages", "tools", "tool_choice")}

VLLM = adapter_class("vllm")


def _to_engine(request: ChatRequest | CompletionRequest) -> None:
    """As far as an engine's adapter goes before it sends."""
    if isinstance(request, ChatRequest):
        for message in request.messages:
            message.for_template()
    json.dumps(request_body(request, VLLM.dialect, "m"), default=bytes.decode)  # type: ignore[attr-defined]


def _decode_chat(data: bytes) -> None:
    _to_engine(decode_chat(data))


def _decode_completions(data: bytes) -> None:
    body = decode_as(openai_routes._completion_decoder, data)
    for request in openai_routes.split_prompts(body):
        _to_engine(request)


def _decode_responses(data: bytes) -> None:
    body = decode_body(data)
    _to_engine(chat_request(body, input_items(body)))


def _decode_tokenize(data: bytes) -> None:
    body = decode_tokenize(data)
    body.request(body.model or "m").as_generation()


DECODERS: dict[str, Callable[[bytes], Any]] = {
    "chat": _decode_chat,
    "completions": _decode_completions,
    "embeddings": lambda data: decode_embedding(data).request(),
    "messages": lambda data: _to_engine(decode_messages(data).chat()),
    "count": lambda data: decode_count(data).question().as_generation(),
    "responses": _decode_responses,
    "tokenize": _decode_tokenize,
    "detokenize": decode_detokenize,
}


def body_of(target: str, random: Random) -> bytes:
    data = json.dumps(mutated(random, WHOLE[target])).encode()
    if random.random() < 0.3:
        data = scratched(random, data)
    if random.random() < 0.1:  # a key that comes twice
        data = data[:-1] + b"," + data[1:]
    return data


def try_body(target: str, seed: int) -> None:
    data = body_of(target, Random(seed))
    begun = time.process_time()
    try:
        check_depth(data)
        DECODERS[target](data)
    except RequestError as refusal:
        if not 400 <= refusal.status < 500 or len(refusal.message) > 1000:
            raise Fault(f"a refusal with {refusal.status} and {len(refusal.message)} characters") from refusal
    if (took := time.process_time() - begun) > SLOW_S:
        raise Fault(f"it took {took:.1f} s")


# ------------------------------------------------------------------------------------------------------------- streams

TOOL_STREAM = events(
    [
        {"choices": [{"index": 0, "delta": {"role": "assistant", "reasoning": "hm"}, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {"content": "I look"}, "logprobs": {"content": []}, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, **CALL}]}, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 1, **CALL, "id": "b"}]}, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]},
        {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}},
    ]
)
STREAMS = [
    ("vllm", transcripts.VLLM_CHAT),
    ("vllm", TOOL_STREAM),
    ("llama_cpp", transcripts.LLAMA_CHAT),
    ("tgi", tgi_transcripts.CHAT),
    ("sglang", sglang_transcripts.CHAT),
]


def hostile_stream(random: Random) -> tuple[str, list[bytes]]:
    """An engine, and what it sends in pieces that end anywhere."""
    engine, stream = random.choice(STREAMS)
    blocks = stream.split(b"\n\n")
    for _ in range(random.randint(0, 3)):
        at = random.randrange(len(blocks))
        head, _, data = blocks[at].partition(b"data: ")
        if data.startswith(b"{"):
            blocks[at] = head + b"data: " + json.dumps(mutated(random, json.loads(data))).encode()
        elif random.random() < 0.3:
            blocks.insert(
                at, random.choice([b'data: {"error": {"message": "x", "code": 500}}', b"data: [DONE]", b": hi"])
            )
    stream = b"\n\n".join(blocks)
    if random.random() < 0.5:
        stream = scratched(random, stream)
    cuts = sorted(random.randrange(len(stream) + 1) for _ in range(random.choice([0, 1, 5, 50])))
    return engine, [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]


def try_stream(seed: int) -> None:
    engine, pieces = hostile_stream(Random(seed))
    request = ChatRequest(model="m", messages=[Message(role="user", content="Hello")])
    reader = StreamReader(engine, request, adapter_class(engine).dialect)  # type: ignore[attr-defined]
    chunks: list[Chunk] = []
    try:
        for piece in pieces:
            chunks.extend(reader.feed(piece))
        chunks.extend(reader.finish())
    except (EngineError, Overloaded, RequestError):
        pass  # what came before it has been read, and is encoded
    for encode in ENCODERS:
        try:
            out = encode(chunks)
        except EngineError:
            continue
        for line in out.split(b"\n"):
            if line.startswith(b"data: "):
                json.loads(line[6:])


def _as_chat_events(chunks: list[Chunk]) -> bytes:
    told = ChatEvents(AnswerHead.new("x", "m"), num_choices=1, with_usage=True)
    out = told.opening() + b"".join(map(told.event, chunks))
    told.check_whole()
    return out


def _as_chat(chunks: list[Chunk]) -> bytes:
    fold = ChatFold(AnswerHead.new("x", "m"), num_choices=1)
    for chunk in chunks:
        fold.add(chunk)
    return b"data: " + fold.body()


def _as_message_events(chunks: list[Chunk]) -> bytes:
    told = MessageEvents(MessageHead.new("m"), ["x"])
    return told.opening() + b"".join(map(told.event, chunks)) + told.closing()


def _as_message(chunks: list[Chunk]) -> bytes:
    fold = MessageFold(MessageHead.new("m"), ["x"])
    for chunk in chunks:
        fold.add(chunk)
    return b"data: " + fold.body()


def _as_response(chunks: list[Chunk]) -> bytes:
    reply = Reply(ResponseBody(model="m", input="x"), id="resp_1", model="m", is_kept=False)
    out = reply.opening() + b"".join(map(reply.read, chunks))
    reply.check_whole()
    return out + reply.ending()


ENCODERS = (_as_chat_events, _as_chat, _as_message_events, _as_message, _as_response)

# -------------------------------------------------------------------------------------------------------------- socket


class HostileEngine:
    """Speaks vLLM's dialect, in the pieces that it was given last."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            if (length := re.search(rb"(?i)content-length: (\d+)", head)) is not None:
                await reader.readexactly(int(length[1]))
            if head.startswith(b"GET"):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            else:
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
                for piece in self.pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the gateway has heard enough
        finally:
            writer.close()


class Rig(NamedTuple):
    """A gateway in front of a fake engine ("m" and "e") and of a hostile one ("hostile")."""

    port: int
    engine: HostileEngine


@asynccontextmanager
async def a_rig() -> AsyncIterator[Rig]:
    engine = HostileEngine()
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    fake = {"engine": "fake", "options": {"ttft_ms": 0, "itl_ms": 0, "tokens": 3}}
    hostile = {"engine": "vllm", "options": {"url": url, "model": "x"}}
    engines = {"m": fake, "e": fake, "hostile": hostile}
    models = [{"name": name, "replicas": [replica]} for name, replica in engines.items()]
    limits = {"port": 0, "drain_timeout_s": 0.1, "header_timeout_s": 0.5, "body_timeout_s": 0.3}
    config = parse_config({"server": limits, "logs": {"access": False}, "models": models})
    with tempfile.TemporaryDirectory() as home:
        app, sock = create_app(config, home=Path(home)), listen("127.0.0.1", 0)
        port: int = sock.getsockname()[1]
        async with server, serving(app, sock):
            while not all(replica.is_ready for replica in app[PARTS].fleet.replicas):  # noqa: ASYNC110 - nothing tells it
                await asyncio.sleep(0.005)
            yield Rig(port, engine)


def post(route: str, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n" % route.encode()
    return head + b"Content-Length: %d\r\n\r\n%b" % (len(data), data)


# How a stream of each route says that the answer is whole, and that it is not.
ENDS = {
    routes.CHAT: (b"data: [DONE]", b'data: {"error"'),
    routes.MESSAGES: (b"event: message_stop", b"event: error"),
    routes.RESPONSES: (b"event: response.completed", b"event: response.failed"),
}


async def try_engine(rig: Rig, seed: int) -> None:
    """Through the whole gateway: an answer has one end, and it is the right one."""
    random = Random(seed)
    _, rig.engine.pieces = hostile_stream(random)
    route = random.choice(list(ENDS))
    answer = await exchange(rig.port, post(route, {**routes.GOOD[route], "model": "hostile", "stream": True}))
    status = int(answer.split()[1])
    if not answer.startswith(b"HTTP/1.1 200"):
        if status == 500 or b'"error"' not in answer:
            raise Fault(f"an answer like {answer[:300]!r}")
        return
    lines = answer.split(b"\n")
    is_whole, has_failed = (sum(line.startswith(mark) for line in lines) for mark in ENDS[route])
    is_incomplete = any(line.startswith(b"event: response.incomplete") for line in lines)
    if (is_whole + is_incomplete, has_failed) not in ((1, 0), (0, 1)):
        raise Fault(f"{is_whole} ends and {has_failed} errors in {answer[-500:]!r}")
    if b"internal_error" in answer:
        raise Fault(f"a fault of ours: {answer[-500:]!r}")


def request_of(random: Random) -> bytes:
    route = random.choice(list(routes.GOOD))
    body = json.dumps(routes.GOOD[route]).encode()
    if random.random() < 0.3:
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        length = b"Transfer-Encoding: chunked"
    else:
        length = b"Content-Length: %d" % len(body)
    head = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n%b\r\n" % (route.encode(), length)
    return head + random.choice([b"", b"x-request-id: a\r\n", b"Authorization: Bearer x\r\n"]) + b"\r\n" + body


async def exchange(port: int, data: bytes) -> bytes:
    """The first answer to these bytes, or nothing where the gateway closes instead."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = b""
    try:
        async with asyncio.timeout(10):
            writer.write(data)
            while not is_whole(answer) and (piece := await reader.read(65536)):
                answer += piece
    except ConnectionError:
        pass  # it closes where it does not want to read on
    finally:
        writer.close()
    return answer


def is_whole(answer: bytes) -> bool:
    head, end, body = answer.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)content-length: (\d+)", head)
    return bool(end) and length is not None and len(body) >= int(length[1])


async def try_socket(rig: Rig, seed: int) -> None:
    random = Random(seed)
    try:
        answer = await exchange(rig.port, scratched(random, request_of(random)))
    except TimeoutError as error:
        raise Fault("neither an answer nor an end within ten seconds") from error
    is_old = answer.startswith(b"{")  # HTTP/0.9: a body without a head
    if answer and not is_old and re.match(rb"HTTP/(0\.9|1\.[01]) [124]", answer) is None:
        raise Fault(f"an answer like {answer[:200]!r}")
    if seed % 20 == 0:
        answer = await exchange(rig.port, post(routes.CHAT, routes.GOOD[routes.CHAT]))
        if not answer.startswith(b"HTTP/1.1 200"):
            raise Fault(f"a good request afterwards got {answer[:200]!r}")


# ------------------------------------------------------------------------------------------------------------- running

TARGETS = (*DECODERS, "streams", "engine", "socket")


async def run(target: str, seeds: Iterable[int]) -> int:
    """Try the seeds until they end, or raise `Fault` with how to see it again. The number of cases."""
    num_cases = 0
    async with a_rig() as rig:
        for seed in seeds:
            try:
                await _try(target, rig, seed)
            except Exception as error:
                again = f"python -m tests.fuzz --target {target} --seed {seed}"
                raise Fault(f"{type(error).__name__}: {str(error)[:600]}\nsee it again: {again}") from error
            num_cases += 1
    return num_cases


async def _try(target: str, rig: Rig, seed: int) -> None:
    match target:
        case "socket":
            await try_socket(rig, seed)
        case "engine":
            await try_engine(rig, seed)
        case "streams":
            try_stream(seed)
        case _:
            try_body(target, seed)


def seeds_for(seconds: float, first: int = 0) -> Iterator[int]:
    ends = time.monotonic() + seconds
    seed = first
    while time.monotonic() < ends:
        yield seed
        seed += 1


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz",
        description="Try codecs with what nobody would send.",
        epilog="Example: python -m tests.fuzz --seconds 600",
    )
    parser.add_argument("--seconds", type=float, default=60, help="how long, all targets together (60)")
    parser.add_argument("--target", choices=TARGETS, help="only this one")
    parser.add_argument("--first", type=int, default=0, help="the seed to begin with (0)")
    parser.add_argument("--seed", type=int, help="only this case")
    wanted = parser.parse_args(argv)
    targets = [wanted.target] if wanted.target else TARGETS
    if wanted.seed is not None:
        return _tell(targets[0], [wanted.seed])
    ends, first, status = time.monotonic() + wanted.seconds, wanted.first, 0
    while time.monotonic() < ends:
        for target in targets:
            turn_s = min(TURN_S, wanted.seconds / len(targets))
            status |= _tell(target, seeds_for(turn_s, first))
        first += 1_000_000
    return status


def _tell(target: str, seeds: Iterable[int]) -> int:
    try:
        told, status = f"{asyncio.run(run(target, seeds))} cases, no fault", 0
    except Fault as fault:
        told, status = str(fault), 1
    sys.stdout.write(f"{target}: {told}\n")
    sys.stdout.flush()
    return status


if __name__ == "__main__":
    sys.exit(main())
