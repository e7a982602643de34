"""Engines that mean harm: each request gets its row, the store takes it, others keep their results, nobody waits."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from adapters.errors import EngineProtocolError
from arena.load import spool as spools
from arena.load.connection import address_of
from arena.load.loadgen import Limits, run_cell
from arena.load.plan import CellPlan, PlannedRequest, Prompt, Target
from arena.load.response_reader import MAX_BODY_BYTES
from arena.load.spool import RequestRow
from arena.race import probe as probing
from arena.race.engine_metrics import MOST_LINES, metric_rows, watched
from arena.race.own_report import own_report
from arena.records.rows import CellRecord
from arena.records.store import Store

OK = b"HTTP/1.1 200 OK\r\nConnection: close\r\n"
STREAM = OK + b"Content-Type: text/event-stream\r\n\r\n"
DEEP = b"[" * 100_000
MIB = 1 << 20

Act = Callable[[socket.socket], None]


def says(*pieces: bytes, every_s: float = 0.0) -> Act:
    def act(client: socket.socket) -> None:
        for piece in pieces:
            client.sendall(piece)
            time.sleep(every_s)

    return act


def says_for_ever(head: bytes, piece: bytes, *, every_s: float = 0.0) -> Act:
    def act(client: socket.socket) -> None:
        client.sendall(head)
        while True:
            client.sendall(piece)
            time.sleep(every_s)

    return act


def event(**payload: object) -> bytes:
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


def text(words: str) -> bytes:
    return event(choices=[{"delta": {"content": words}}])


def answer(*events: bytes) -> Act:
    return says(STREAM + b"".join(events) + b"data: [DONE]\n\n")


ACTS: dict[str, tuple[Act, tuple[str, str | None]]] = {
    "never answers": (lambda client: time.sleep(30), ("timeout", "request_timeout")),
    "drips": (says_for_ever(STREAM, b"d", every_s=0.1), ("timeout", "request_timeout")),
    "drips its head": (says_for_ever(b"HTTP/1.1 200 ", b"O", every_s=0.1), ("timeout", "request_timeout")),
    "headers without an end": (says_for_ever(OK, b"X-More: and more\r\n" * 500), ("error", "bad_http")),
    "a page": (says(OK + b"Content-Type: text/html\r\n\r\n<html>Welcome</html>"), ("error", "not_a_stream")),
    "another type": (says(OK + b"Content-Type: text/html\r\n\r\n", text("a"), b"data: [DONE]\n\n"), ("ok", None)),
    "sends elsewhere": (says(b"HTTP/1.1 307 No\r\nLocation: /x\r\nContent-Length: 0\r\n\r\n"), ("error", "http_307")),
    "goes away": (lambda client: None, ("error", "connection_closed")),
    "goes away in mid-answer": (says(STREAM, text("a")), ("truncated", "no_end")),
    "text without an end": (says_for_ever(STREAM, text("a") * 1000), ("error", "too_long")),
    "noise without an end": (says_for_ever(STREAM, b"x" * MIB), ("error", "too_long")),
    "a trillion tokens": (answer(text("a"), event(usage={"completion_tokens": 10**12})), ("error", "bad_event")),
    "minus one token": (answer(text("a"), event(usage={"completion_tokens": -1})), ("error", "bad_event")),
    "a number beyond numbers": (answer(text("a"), event(usage={"prompt_tokens": 10**400})), ("error", "bad_event")),
    "nested without an end": (answer(b'data: {"x":' + DEEP + b"\n\n"), ("error", "bad_event")),
    "an error without an end": (answer(b'data: {"error":' + DEEP + b"\n\n"), ("error", "bad_event")),
    "no text": (answer(b'data: {"choices":[{"delta":{"content":"\xff"}}]}\n\n'), ("error", "bad_event")),
    "half a character": (answer(b'data: {"choices":[{"delta":{"content":"\\ud800"}}]}\n\n'), ("error", "bad_event")),
    "zeros": (answer(text("a\0b"), event(choices=[{"delta": {}, "finish_reason": "\0"}])), ("ok", None)),
    "a long reason": (answer(text("a"), event(choices=[{"delta": {}, "finish_reason": "z" * MIB}])), ("ok", None)),
    "clears the screen": (
        answer(event(error={"message": "x"}), b"event: error\ndata: \x1b[2J\n\n"),
        ("error", "error_event"),
    ),
    "events of a MiB": (answer(*[text("m" * MIB)] * 8), ("ok", None)),
    "an event of nine MiB": (answer(text("n" * 9 * MIB)), ("error", "bad_event")),
}


@contextmanager
def hostile(act_of: Callable[[str, bytes], Act]) -> Iterator[str]:
    """A server that does what `act_of` says for the request line and the body; its url."""
    server = socket.create_server(("127.0.0.1", 0), backlog=256)

    def serve(client: socket.socket) -> None:
        with client, suppress(OSError):
            request = b""
            while b"\r\n\r\n" not in request:
                if not (data := client.recv(65536)):
                    return
                request += data
            head, _, body = request.partition(b"\r\n\r\n")
            length = next(
                (int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")), 0
            )
            while len(body) < length:
                body += client.recv(65536)
            act_of(head.split(b"\r\n")[0].decode(), body)(client)

    def accept() -> None:
        with suppress(OSError):
            while True:
                client, _ = server.accept()
                threading.Thread(target=serve, args=(client,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    with server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)


@pytest.fixture(scope="module")
def met(tmp_path_factory: pytest.TempPathFactory) -> tuple[CellPlan, Path, dict[str, RequestRow], str | None]:
    """One cell, in which every request meets another act: the plan, the spool, the rows by act, why it was aborted."""
    names = list(ACTS)
    planned = tuple(
        PlannedRequest(seq, seq * 20_000_000, name, json.dumps({"act": name}).encode(), 8)
        for seq, name in enumerate(names)
    )
    plan = CellPlan("cell", "constant", 50.0, 0, len(names) * 20_000_000, planned)
    spool = tmp_path_factory.mktemp("hostile") / "cell.jsonl"
    with hostile(lambda line, body: ACTS[json.loads(body)["act"]][0]) as url:
        target, limits = Target(url, "m", "hostile"), Limits(request_timeout_s=2, warm_connections=0)
        run = asyncio.run(run_cell(plan, target, spool, limits=limits))
    rows = {names[row.seq]: row for row in spools.read_rows(spool) if isinstance(row, RequestRow)}
    return plan, spool, rows, run.aborted


@pytest.mark.parametrize("name", ACTS)
def test_whatever_an_engine_does_its_request_gets_a_row_that_says_so(
    met: tuple[CellPlan, Path, dict[str, RequestRow], str | None], name: str
) -> None:
    _, _, rows, aborted = met
    assert aborted is None
    assert (rows[name].status, rows[name].err_class) == ACTS[name][1], rows[name].err_message
    assert (rows[name].err_message or "").isprintable()


def test_what_hostile_engines_say_can_be_stored(
    met: tuple[CellPlan, Path, dict[str, RequestRow], str | None], tmp_path: Path
) -> None:
    """A count that the column cannot hold, or a row that is too long, would end the race of all the others."""
    plan, spool, rows, _ = met
    with Store(tmp_path / "arena.duckdb") as store:
        store.record_cell(CellRecord(cell_id="cell", run_id="r", engine_id="e", replicate=0, slot=1, rate_rps=50), plan)
        store.ingest("cell", spool)
        stored = store.query("SELECT count(*) AS n, max(length(text)) AS longest FROM requests")[0]
    assert stored["n"] == len(ACTS)
    assert stored["longest"] == MIB
    assert rows["events of a MiB"].n_chunks == 8


def test_an_answer_of_many_small_events_as_long_as_is_read_can_be_stored(tmp_path: Path) -> None:
    """Its row has three lists of half a million numbers; DuckDB reads lines of up to 16 MiB."""
    smallest = b'data:{"choices":[{"text":"a"}]}\n\n'
    flood = smallest * (MAX_BODY_BYTES // len(smallest) - 1)
    planned = (PlannedRequest(0, 0, "p", b"{}", 8),)
    plan, spool = CellPlan("cell", "constant", 1.0, 0, 1, planned), tmp_path / "cell.jsonl"
    with hostile(lambda line, body: says(STREAM, flood, b"data:[DONE]\n\n")) as url:
        run = asyncio.run(run_cell(plan, Target(url, "m", "hostile"), spool, limits=Limits(warm_connections=0)))
    assert (run.aborted, run.ok) == (None, 1)
    with Store(tmp_path / "arena.duckdb") as store:
        store.record_cell(CellRecord(cell_id="cell", run_id="r", engine_id="e", replicate=0, slot=1, rate_rps=1), plan)
        store.ingest("cell", spool)
        assert store.query("SELECT n_chunks AS n FROM requests")[0]["n"] == len(flood) // len(smallest)


LISTING = OK + b"Content-Type: application/json\r\n\r\n"


@pytest.mark.parametrize(
    ("models", "told"),
    [
        (says(LISTING, b'{"data":', DEEP), "is not an OpenAI list of models"),
        (says(LISTING, b'{"data": [{"id": "\xff"}]}'), "is not an OpenAI list of models"),
        (says(LISTING, b'{"data": {"id": "x"}}'), "is not an OpenAI list of models"),
        (says(b"HTTP/1.1 302 No\r\nLocation: http://other/v1/models\r\nContent-Length: 0\r\n\r\n"), "sends elsewhere"),
        (says_for_ever(OK, b"X-More: and more\r\n" * 500), "does not speak HTTP as it should"),
        (says_for_ever(LISTING, b"d", every_s=0.1), "it is silent"),
        (lambda client: time.sleep(30), "it is silent"),
    ],
)
def test_a_list_of_models_that_is_none_is_told_and_does_not_end_the_race(
    models: Act, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probing, "PROBE_TIMEOUT_S", 2.0)
    prompt = Prompt("p", {"messages": [{"role": "user", "content": "hi"}]}, 8)
    with hostile(lambda line, body: models) as url, pytest.raises(probing.EngineError) as caught:
        asyncio.run(probing.probe(url, model=None, prompt=prompt))
    assert told in caught.value.message
    assert len(caught.value.message) < 1000


def test_a_list_of_a_thousand_models_is_not_read_out() -> None:
    body = json.dumps({"data": [{"id": f"model-{number}\x1b[2J"} for number in range(1000)]}).encode()
    with hostile(lambda line, _: says(LISTING, body)) as url, pytest.raises(probing.EngineUnavailable) as caught:
        asyncio.run(probing.served_model(url))
    assert len(caught.value.message) < 600
    assert caught.value.message.isprintable()


@pytest.mark.parametrize(
    ("act", "told"),
    [
        (says(b"HTTP/1.1 308 No\r\nLocation: http://other/\r\nContent-Length: 0\r\n\r\n"), "sends elsewhere"),
        (says(OK + b"Content-Type: text/html\r\n\r\n<html>Welcome</html>"), "<html>Welcome</html>"),
        (says_for_ever(STREAM, text("a") * 1000), f"more than {MAX_BODY_BYTES} bytes"),
        (answer(b'data: {"x":' + DEEP + b"\n\n"), "is not OpenAI's"),
    ],
)
def test_a_probe_meets_what_the_cells_would_meet(act: Act, told: str) -> None:
    """One that follows to another address finds an engine there, and then every request of the race fails."""
    prompt = Prompt("p", {"messages": [{"role": "user", "content": "hi"}]}, 8)
    with hostile(lambda line, body: act) as url, pytest.raises(EngineProtocolError) as caught:
        asyncio.run(probing.probe(url, model="m", prompt=prompt))
    assert told in caught.value.message


def test_an_engines_own_report_may_be_anything() -> None:
    async def report(url: str) -> dict[str, object]:
        async with probing.aiohttp.ClientSession() as client:
            return await own_report(client, url)

    for body in (b'{"x":' + DEEP, b'{"x": "\xff"}', b"{"):
        with hostile(lambda line, _, body=body: says(LISTING, body)) as url:
            assert asyncio.run(report(url)) == {}


def test_endless_metrics_do_not_become_endless_rows() -> None:
    """A line of 16 MiB is one that the store cannot read, and parsing a million of them holds the race up."""
    page = b"long{x=" + b"y" * MIB + b"} 1\n" + b"".join(b"m%d 1\n" % number for number in range(3 * MOST_LINES))

    async def watch(url: str) -> int:
        async with watched(Target(url, "m", "t")) as pages:
            while not pages:  # noqa: ASYNC110  (the list has no event)
                await asyncio.sleep(0.01)
        return len(metric_rows(pages, 0))

    with hostile(lambda line, _: says(OK + b"Content-Type: text/plain\r\n\r\n", page)) as url:
        assert asyncio.run(watch(url)) == MOST_LINES - 1


def test_localhost_is_two_addresses_and_the_one_that_answers_is_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the probe finds the engine at the second, and every request of the race is refused at the first."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        both = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port)) for host in ("127.0.0.2", "127.0.0.1")]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *asked, **kwargs: both)
        assert address_of("localhost", port, timeout_s=1).sockaddr == ("127.0.0.1", port)
    assert address_of("localhost", port, timeout_s=1).sockaddr == ("127.0.0.2", port)  # nobody there: the first
