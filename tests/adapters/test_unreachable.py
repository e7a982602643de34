"""Real sockets that give no answer, and the clause that a person reads about each."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec
import pytest

from adapters.registry import adapter_class
from adapters.wire.unreachable import why_unreachable
from tests.contract.twin import Reply, Twin


@asynccontextmanager
async def greeter(tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """A server that speaks first, and not HTTP; its address."""
    writers = []

    def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        writer.write(b"SSH-2.0-OpenSSH_9.2\r\n")
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0, ssl=tls)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await asyncio.gather(*(writer.wait_closed() for writer in writers), return_exceptions=True)


async def reason_at(url: str) -> str:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=0.5)) as client:
        try:
            await client.get(url)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return why_unreachable(error)
    return "it answered"


@pytest.mark.parametrize(
    ("scheme", "reason"),
    [
        ("http", "what answers does not speak HTTP as it should"),
        ("https", "it does not speak TLS there; write http:// instead of https://"),
    ],
)
async def test_a_server_of_another_kind_is_told_in_one_line(scheme: str, reason: str) -> None:
    async with greeter() as address:
        assert await reason_at(f"{scheme}://{address}/") == reason


@pytest.mark.parametrize(
    ("reply", "reason"),
    [(Reply.dropped(), "the connection is closed without an answer"), (Reply.silent(), "it is silent")],
)
async def test_a_server_without_an_answer_is_told_in_one_line(reply: Reply, reason: str) -> None:
    async with Twin() as twin:
        twin.reply("/", reply)
        assert await reason_at(f"{twin.url}/") == reason


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://127.0.0.1:9/", "the connection is refused"),
        ("http://engine.invalid/", "there is no host 'engine.invalid'"),
        ("http://127.0.0.1:http/", "that is no address; write it as http://HOST:PORT"),
    ],
)
async def test_an_address_that_leads_nowhere_is_told_in_one_line(url: str, reason: str) -> None:
    assert await reason_at(url) == reason


@pytest.fixture
def self_signed(tmp_path: Path) -> ssl.SSLContext:
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    words = ["-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-keyout", key, "-out", certificate]
    subprocess.run(["openssl", "req", *words], capture_output=True, check=True)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    return tls


async def test_a_certificate_that_is_not_trusted_is_not_told_as_a_refused_connection(
    self_signed: ssl.SSLContext,
) -> None:
    cls = adapter_class("vllm")
    async with greeter(self_signed) as address:
        adapter = cls(msgspec.convert({"url": f"https://{address}", "model": "m"}, cls.Options))
        await adapter.start()
        health = await adapter.health()
        await adapter.close()
    assert not health.ready
    assert "its certificate is not trusted (self-signed certificate); SSL_CERT_FILE" in health.reason
