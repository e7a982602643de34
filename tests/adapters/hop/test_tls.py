"""Engines behind TLS: whom we trust, and connections that are kept there as elsewhere."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

from adapters.wire.hop import pool as pools
from adapters.wire.hop.errors import Unreachable
from tests.adapters.hop.engine import CLOSE, HOLD, OK, Engine, request, soon

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """Its file, with its key behind it."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    both = tmp_path / "both.pem"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    words = ["-x509", "-newkey", "rsa:2048", "-nodes", *names, "-keyout", both, "-out", tmp_path / "cert.pem"]
    subprocess.run(["openssl", "req", *words], capture_output=True, check=True)
    both.write_bytes(both.read_bytes() + (tmp_path / "cert.pem").read_bytes())
    return both


@pytest.fixture
def engines_tls(certificate: Path) -> ssl.SSLContext:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate)
    return tls


@pytest.fixture
def trusted(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tls = ssl.create_default_context(cafile=str(certificate))
    monkeypatch.setattr(pools, "_trusted_tls", lambda: tls)


@pytest.mark.usefixtures("trusted")
@pytest.mark.parametrize("loop", LOOPS)
def test_connections_are_kept_and_left_as_without_tls(loop: str, engines_tls: ssl.SSLContext) -> None:
    large = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (4 << 20, b"x" * (4 << 20))
    factory: Callable[[], asyncio.AbstractEventLoop] = LOOPS[loop]

    async def main() -> None:
        async with Engine(OK, large, [OK, CLOSE], OK, [HOLD], tls=engines_tls) as engine:
            pool = engine.pool()
            assert await engine.get(pool) == b"ok"
            assert len(await engine.get(pool)) == 4 << 20
            assert await engine.get(pool) == b"ok"
            assert engine.num_connections == 1
            await asyncio.sleep(0.05)  # the engine has closed it
            assert await engine.get(pool) == b"ok"
            with pytest.raises(TimeoutError):
                await pool.send(*request(engine.url), soon(0.1))
            await asyncio.wait_for(engine.left.wait(), 1)
            assert pool.num_open == 0

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main())


async def test_a_certificate_that_nobody_vouches_for_is_not_trusted(engines_tls: ssl.SSLContext) -> None:
    async with Engine(tls=engines_tls) as engine:
        with pytest.raises(Unreachable, match="its certificate is not trusted"):
            await engine.pool().send(*request(engine.url), soon())


@pytest.mark.usefixtures("trusted")
async def test_tls_where_none_is_spoken_is_told_so() -> None:
    async with Engine([b"SSH-2.0-OpenSSH_9.2\r\n", CLOSE]) as engine:
        engine.url = engine.url.replace("http://127.0.0.1", "https://localhost")
        with pytest.raises(Unreachable):
            await engine.pool(connect_timeout_s=0.3).send(*request(engine.url), soon())
