"""Acme keeps the contract, and reads its own lines."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from acme_goodgate import AcmeOptions, Adapter, LineReader, speak_body
from acme_goodgate.server import Acme
from aiohttp import web

from adapters.conformance import Conformance, Subject, chat, collect, completion, conforming, wait_for_idle_load
from adapters.errors import EngineFailed, EngineProtocolError, StreamInterrupted
from adapters.types import Chunk, GenerateRequest, Usage


class AcmeSubject(Subject):
    """The engine on a port of its own, and its dials."""

    refused = ("logit_bias", {"5": 1.0})

    async def set_up(self, stack: AsyncExitStack) -> None:
        self.server = Acme()
        runner = web.AppRunner(self.server.app(), handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0]
        self.adapter = Adapter(AcmeOptions(url=f"http://{host}:{port}"))

    def talks_on(self) -> None:
        self.server.token_ms, self.server.num_words = 20, 1000

    def stays_silent(self) -> None:
        self.server.first_token_ms = 60_000

    async def wait_idle(self) -> None:
        await wait_for_idle_load(self.adapter)

    def overflows(self) -> GenerateRequest:
        return chat(messages=[{"role": "user", "content": "word " * 1000}])


@pytest.fixture
async def subject() -> AsyncIterator[AcmeSubject]:
    async with conforming(AcmeSubject("acme")) as made:
        yield made


class TestContract(Conformance):
    """All that every adapter keeps."""


async def test_fields_go_out_in_acmes_words() -> None:
    asked = completion(max_tokens=5, temperature=0.5, seed=7, stop="END", top_k=3)
    assert speak_body(asked, AcmeOptions(url="http://a", loud=True)) == {
        "text": "Once", "loud": True, "at_most": 5, "until": ["END"], "heat": 0.5, "dice": 7, "width": 3,
    }  # fmt: skip


async def test_a_stop_string_ends_the_answer(subject: AcmeSubject) -> None:
    await subject.adapter.start()
    whole, cut = [await collect(subject.adapter, chat(temperature=0, stop=stop)) for stop in ("never", " gamma")]
    text = "".join(chunk.text for chunk in whole)
    assert "".join(chunk.text for chunk in cut) == text.partition(" gamma")[0] != text
    assert [chunk.finish_reason for chunk in cut if chunk.finish_reason] == ["stop"]


STREAM = '{"say": "Hé"}\n{"say": "llo"}\n\n{"over": "limit", "heard": 3, "said": 2}\n{"say": "late"}\n'.encode()


def read(*pieces: bytes) -> list[Chunk]:
    reader = LineReader("acme", chat())
    return [*(chunk for piece in pieces for chunk in reader.feed(piece)), *reader.finish()]


def test_an_answer_reads_the_same_wherever_it_is_cut() -> None:
    whole = [Chunk(text="Hé"), Chunk(text="llo"), Chunk(finish_reason="length"), Chunk(usage=Usage(3, 2))]
    for cut in range(len(STREAM)):
        assert read(STREAM[:cut], STREAM[cut:]) == whole


def test_what_goes_wrong_in_an_answer_is_told_apart() -> None:
    for broken, kind in (
        (b"", StreamInterrupted),
        (b'{"say": "Hel"}\n', StreamInterrupted),
        (b"<html>\n", EngineProtocolError),
        (b'{"say": 5}\n', EngineProtocolError),
        (b'{"say": "' + b"x" * (9 << 20), EngineProtocolError),
        (b'{"say": "Hel"}\n{"error": "It has burnt down."}\n', EngineFailed),
    ):
        with pytest.raises(kind):
            read(broken)
