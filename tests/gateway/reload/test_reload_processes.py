"""Serving processes whose configuration changes under load, and that are told to end: nothing is lost."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.records.ledger_files import FOLDER
from gateway.records.ledger_reader import LedgerReader
from gateway.tenants.keys import KeyStore, NewKey
from tests.gateway.rig import HELLO, fake, free_port, model

ROOT = Path(__file__).parents[3]
PATIENCE_S = 30


@dataclass
class Serving:
    process: asyncio.subprocess.Process
    url: str
    config: Path
    log: Path
    client: aiohttp.ClientSession

    def write(self, *models: dict[str, Any], **sections: Any) -> None:
        write(self.config, *models, **sections)

    def hang_up(self) -> None:
        self.process.send_signal(signal.SIGHUP)

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.client.get(self.url + path) as response:
            return response.status, await response.json()

    async def chat(self, **fields: Any) -> int:
        async with self.client.post(f"{self.url}/v1/chat/completions", json={**HELLO, **fields}) as response:
            await response.read()
            return response.status

    async def events(self, **fields: Any) -> list[str]:
        body = {**HELLO, "stream": True, **fields}
        async with self.client.post(f"{self.url}/v1/chat/completions", json=body) as response:
            assert response.status == 200, await response.text()
            text = await response.text()
        return [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]

    async def last_reload(self) -> dict[str, Any]:
        last: dict[str, Any] | None = (await self.get("/admin/status"))[1]["config"]["last_reload"]
        return last or {"at": 0.0}

    async def reloaded(self, tell: Callable[[], None], *, before: float | None = None) -> dict[str, Any]:
        """What came of the next reload."""
        before = (await self.last_reload())["at"] if before is None else before
        tell()
        async with asyncio.timeout(PATIENCE_S):
            while (last := await self.last_reload())["at"] == before:  # noqa: ASYNC110 - another process is watched
                await asyncio.sleep(0.02)
        return last

    def num_files(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))


def write(path: Path, *models: dict[str, Any], **sections: Any) -> None:
    """In the place of the old file, in one step."""
    other = path.with_suffix(".new")
    reload = {"interval_s": 0.05, **sections.pop("reload", {})}
    logs = {"access": False}
    other.write_text(json.dumps({"reload": reload, "logs": logs, "models": list(models), **sections}))
    other.replace(path)


@asynccontextmanager
async def serving(
    home: Path, *models: dict[str, Any], workers: int = 1, within: Sequence[str] = (), **sections: Any
) -> AsyncIterator[Serving]:
    """`within`: a command that becomes the one behind it."""
    config, log, port = home / "goodgate.json", home / "log", free_port()
    write(config, *models, **sections)
    words = ["serve", "--config", str(config), "--port", str(port), "--workers", str(workers)]
    with log.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            *within, sys.executable, "-m", "goodgate", *words,
            cwd=ROOT, env={**os.environ, "GOODGATE_HOME": str(home)}, stdin=subprocess.DEVNULL, stderr=stderr,
        )  # fmt: skip
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        serving = Serving(process, f"http://127.0.0.1:{port}", config, log, client)
        try:
            await ready(serving)
            yield serving
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def test_a_hangup_while_it_starts_does_not_end_it(tmp_path: Path) -> None:
    write(config := tmp_path / "goodgate.json", model(fake()))
    code = (
        "import os, signal, sys, gateway.commands.cli as cli, gateway.web.server as server\n"
        "listen = server.listen\n"
        "def hung_up(*words, **options):\n"
        "    os.kill(os.getpid(), signal.SIGHUP)\n"
        "    return listen(*words, **options)\n"
        "server.listen = hung_up\n"
        f"sys.argv = ['goodgate', 'serve', '--config', {str(config)!r}, '--port', '0']\n"
        "cli.app()"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code,
        cwd=ROOT, env={**os.environ, "GOODGATE_HOME": str(tmp_path)}, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stderr is not None
    try:
        async with asyncio.timeout(PATIENCE_S):
            while b"listens on" not in (line := await process.stderr.readline()):
                assert line, "it has ended"
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        assert await process.wait() == 0


async def ready(serving: Serving) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            assert serving.process.returncode is None, serving.log.read_text()
            with suppress(aiohttp.ClientConnectionError):
                if (await serving.get("/ready"))[0] == 200:
                    return
            await asyncio.sleep(0.05)


def variant(number: int) -> list[dict[str, Any]]:
    """A configuration that differs from the one before in names, weights, rules, and both models' replicas."""
    short = [fake("stays"), *(fake(f"short-{n}") for n in range(number % 3)), fake("changes", tokens=3 + number % 2)]
    return [
        model(*short, aliases=[f"alias-{number}"], routing=["least_load", "round_robin"][number % 2]),
        model(fake("long", itl_ms=50, tokens=60, seed=number // 2), name="long"),
    ]


@pytest.mark.replay("F21", "G37")
@pytest.mark.parametrize("num", [20, pytest.param(100, marks=pytest.mark.slow)])
async def test_f21_reloads_under_load_fail_nothing(tmp_path: Path, num: int) -> None:
    async with serving(tmp_path, *variant(0)) as gateway:
        statuses: list[int] = []
        answers: list[list[str]] = []
        is_over = asyncio.Event()

        async def ask_on(seconds: float) -> None:
            tasks = set()
            while not is_over.is_set():
                tasks.add(asyncio.create_task(gateway.chat()))
                await asyncio.sleep(seconds)
            statuses.extend(await asyncio.gather(*tasks))

        async def stream_on() -> None:
            while not is_over.is_set():
                answers.append(await gateway.events(model="long"))

        load = [asyncio.create_task(ask_on(0.02)), *(asyncio.create_task(stream_on()) for _ in range(20))]
        await asyncio.sleep(0.2)
        is_watched = True
        for number in range(1, num + 1):
            tell = (lambda: None) if is_watched else gateway.hang_up  # by the file's change, or by the signal
            before = (await gateway.last_reload())["at"]
            if number % 10 == 0:
                gateway.write({"name": "m", "replica": []})
                bad = await gateway.reloaded(tell, before=before)
                assert (bad["outcome"], bad["error"] != "") == ("refused", True)
                assert await gateway.chat(model=f"alias-{number - 1}") == 200  # the old one holds
                continue
            is_watched = not is_watched
            gateway.write(*variant(number), reload={"watch": is_watched})
            last = await gateway.reloaded(tell, before=before)
            assert last["outcome"] == "applied", last
            assert await gateway.chat(model=f"alias-{number}") == 200
        is_over.set()
        await asyncio.gather(*load)
        assert set(statuses) == {200}
        assert len(statuses) > num
        assert all(events[-1] == "[DONE]" for events in answers)
        tokens = [sum('"content":"' in event for event in events) for events in answers]
        assert set(tokens) == {61}  # the role, and then each token
        await left_alone(gateway)
        log = gateway.log.read_text()
        assert log.count("configuration refused; the old one holds") == num // 10
        assert "Traceback" not in log


async def left_alone(gateway: Serving) -> None:
    """Replicas that have gone are gone, and nothing is open."""
    async with asyncio.timeout(PATIENCE_S):
        while (status := (await gateway.get("/admin/status"))[1])["leaving"] or status["in_flight"]:  # noqa: ASYNC110 - another process is watched
            await asyncio.sleep(0.05)


async def test_a_file_that_changes_is_seen_and_one_that_is_half_written_is_left_alone(tmp_path: Path) -> None:
    async with serving(tmp_path, model(fake()), reload={"interval_s": 0.15}) as gateway:
        text = gateway.config.read_text().replace('"name": "m"', '"name": "n"')
        assert await gateway.chat() == 200
        with gateway.config.open("w") as file:
            for part in (text[:40], text[40:90], text[90:]):
                file.write(part)
                file.flush()
                await asyncio.sleep(0.05)
        async with asyncio.timeout(PATIENCE_S):
            while await gateway.chat(model="n") != 200:  # noqa: ASYNC110 - another process is watched
                await asyncio.sleep(0.02)
        assert await gateway.chat() == 404
        assert "refused" not in gateway.log.read_text()


async def test_the_swapped_link_of_a_configmap_is_seen(tmp_path: Path) -> None:
    def mounted(version: str, *models: dict[str, Any]) -> None:
        folder = tmp_path / version
        folder.mkdir()
        write(folder / "goodgate.json", *models)
        (tmp_path / "..tmp").symlink_to(folder)
        (tmp_path / "..tmp").replace(tmp_path / "..data")

    async with serving(tmp_path, model(fake())) as gateway:
        mounted("v1", model(fake()))
        gateway.config.unlink()
        gateway.config.symlink_to(tmp_path / "..data" / "goodgate.json")
        await asyncio.sleep(0.2)
        last = await gateway.reloaded(lambda: mounted("v2", model(fake(), aliases=["n"])))
        assert (last["outcome"], last["cause"]) == ("applied", "file")
        assert await gateway.chat(model="n") == 200


async def test_workers_all_take_the_new_configuration_and_refuse_one_that_they_cannot_share(tmp_path: Path) -> None:
    async with serving(tmp_path, model(fake()), workers=2, reload={"watch": False}) as gateway:

        async def asked() -> set[int]:
            statuses = set()
            for _ in range(8):
                async with aiohttp.ClientSession() as client:  # each connection may meet another worker
                    body = {**HELLO, "model": "n"}
                    async with client.post(f"{gateway.url}/v1/chat/completions", json=body) as response:
                        statuses.add(response.status)
            return statuses

        async def until_all(status: int) -> None:
            async with asyncio.timeout(PATIENCE_S):
                while await asked() != {status}:  # noqa: ASYNC110 - another process is watched
                    await asyncio.sleep(0.05)

        await until_all(404)
        gateway.write(model(fake(), aliases=["n"]), reload={"watch": False})
        gateway.hang_up()
        await until_all(200)
        gateway.write(model({"engine": "fake", "launch": True, "model": "x"}), reload={"watch": False})
        refused = await goodgate("reload", "--url", gateway.url)
        assert (refused[0], "is launched by the gateway" in refused[1]) == (1, True)
        gateway.write(model(fake()), reload={"watch": False})
        code, told = await goodgate("reload", "--url", gateway.url)
        # The one that is asked may have been told by the other, so that nothing is left to change.
        assert code == 0
        assert "changed: models.m.aliases" in told or "Nothing has changed." in told
        await until_all(404)
        gateway.process.send_signal(signal.SIGTERM)
        assert await gateway.process.wait() == 0


async def goodgate(*words: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "goodgate", *words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    output, _ = await process.communicate()
    return await process.wait(), output.decode()


@pytest.mark.replay("F19")
async def test_f19_sigterm_under_two_hundred_live_streams_loses_none(tmp_path: Path) -> None:
    long = model(fake(itl_ms=100, tokens=25))
    async with serving(tmp_path, long, server={"drain_delay_s": 0.5, "drain_timeout_s": 30}) as gateway:
        streams = [asyncio.create_task(gateway.events()) for _ in range(200)]
        await in_flight(gateway, 200)
        gateway.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_S):
            while (await gateway.get("/ready"))[0] == 200:  # noqa: ASYNC110 - another process is watched
                await asyncio.sleep(0.01)
        late = await gateway.events()  # load balancers have not looked yet
        gateway.hang_up()  # of no interest any more
        assert late[-1] == "[DONE]"
        assert {events[-1] for events in await asyncio.gather(*streams)} == {"[DONE]"}
        assert await gateway.process.wait() == 0
        assert "configuration" not in gateway.log.read_text()
    usage = json.loads((await goodgate_at(tmp_path, "usage", "--json"))[1])
    assert usage["total"]["requests"] == 201
    assert usage["total"]["failed"] == 0


@pytest.mark.replay("F19")
async def test_f19_streams_that_do_not_end_in_time_get_an_error_event(tmp_path: Path) -> None:
    endless = model(fake(itl_ms=400, tokens=500))
    async with serving(tmp_path, endless, server={"drain_timeout_s": 0.5}) as gateway:
        streams = [asyncio.create_task(gateway.events()) for _ in range(200)]
        await in_flight(gateway, 200)
        gateway.process.send_signal(signal.SIGTERM)
        ends = {events[-1] for events in await asyncio.gather(*streams)}
        assert {json.loads(end)["error"]["code"] for end in ends} == {"overloaded"}
        assert await gateway.process.wait() == 0


async def in_flight(gateway: Serving, num: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while (await gateway.get("/admin/status"))[1]["in_flight"] < num:  # noqa: ASYNC110 - another process is watched
            await asyncio.sleep(0.02)


async def goodgate_at(home: Path, *words: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "goodgate", *words,
        cwd=ROOT, env={**os.environ, "GOODGATE_HOME": str(home)}, stdout=subprocess.PIPE,
    )  # fmt: skip
    output, _ = await process.communicate()
    return await process.wait(), output.decode()


@pytest.mark.replay("F20")
async def test_f20_a_killed_gateway_comes_back_with_its_keys_and_records(tmp_path: Path) -> None:
    key = KeyStore(tmp_path).create(NewKey(name="a", role="admin"))
    recorded: list[str] = []
    for _ in range(2):
        async with serving(tmp_path, model(fake(itl_ms=100, tokens=300))) as gateway:
            gateway.client.headers.update(Authorization=f"Bearer {key}")
            assert await gateway.chat(max_tokens=2) == 200
            open_streams = [asyncio.create_task(gateway.events()) for _ in range(10)]
            await in_flight(gateway, 10)
            recorded.append(await next_record(tmp_path, recorded))
            gateway.process.send_signal(signal.SIGKILL)
            cut_off = await asyncio.gather(*open_streams, return_exceptions=True)
            assert all(isinstance(each, aiohttp.ClientError) for each in cut_off)  # none is told that it is whole
    reader = LedgerReader(tmp_path / FOLDER)
    assert all(reader.find(request_id) for request_id in recorded)


async def next_record(home: Path, known: list[str]) -> str:
    """The id of the newest request in the ledger, once it is another one."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            newest = await asyncio.to_thread(LedgerReader(home / FOLDER).newest)
            if newest is not None and newest.request_id not in known:
                return newest.request_id
            await asyncio.sleep(0.05)


def test_a_gateway_ends_with_the_terminal_that_it_runs_in(tmp_path: Path) -> None:
    config = tmp_path / "goodgate.json"
    write(config, model(fake()))
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.environ["GOODGATE_HOME"] = str(tmp_path)
        os.execv(sys.executable, [sys.executable, "-m", "goodgate", "serve", "--config", str(config), "--port", "0"])
    output = b""
    while not re.search(rb"listens on", output):
        output += os.read(terminal, 4096)
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
