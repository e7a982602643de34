"""A serving process whose ledger's disk is full, or fails: its clients notice nothing, and no record is lost unseen.

Both disks are real. The full one is a small file system that only this process sees; the one that fails refuses each
write beyond a size, as the kernel does for a process with a limit on its files.
"""

from __future__ import annotations

import asyncio
import re
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

import pytest

from gateway.records.ledger_files import FOLDER
from tests.gateway.reload.test_reload_processes import PATIENCE_S, Serving, serving
from tests.gateway.rig import fake, model

NUM_STREAMS, NUM_CHATS = 50, 10
Mend: TypeAlias = Callable[[], None]
Spoil: TypeAlias = Callable[[Serving, Path], Mend]

SMALL_DISK_BYTES = 1 << 20
SMALL_DISK = f'mount -t tmpfs -o size={SMALL_DISK_BYTES} tmpfs "$0" && exec "$@"'
UNSHARE = ("unshare", "--map-root-user", "--mount")


def can_mount() -> bool:
    return shutil.which("unshare") is not None and subprocess.run([*UNSHARE, "true"], check=False).returncode == 0


def fill(gateway: Serving, folder: Path) -> Mend:
    ballast = Path(f"/proc/{gateway.process.pid}/root{folder}/ballast")
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    assert 0 < ballast.stat().st_size < SMALL_DISK_BYTES  # it is full, and not of this alone
    return ballast.unlink


def refuse_writes(gateway: Serving, folder: Path) -> Mend:
    def limit(size: int) -> None:
        resource.prlimit(gateway.process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    limit(max(path.stat().st_size for path in folder.iterdir()))
    return lambda: limit(resource.RLIM_INFINITY)


@pytest.mark.replay("F23")
@pytest.mark.skipif(not can_mount(), reason="to mount a small disk needs user namespaces (unshare)")
async def test_f23_where_the_disk_is_full_answers_go_on_and_records_wait_for_room(tmp_path: Path) -> None:
    folder = tmp_path / FOLDER
    folder.mkdir(parents=True)
    await answers_go_on(tmp_path, fill, (*UNSHARE, "sh", "-c", SMALL_DISK, str(folder)))


@pytest.mark.replay("F24")
async def test_f24_where_the_disk_fails_answers_go_on_and_records_wait_for_it(tmp_path: Path) -> None:
    await answers_go_on(tmp_path, refuse_writes)


async def answers_go_on(home: Path, spoil: Spoil, within: tuple[str, ...] = ()) -> None:
    async with serving(home, model(fake(itl_ms=20)), within=within) as gateway:
        assert await gateway.chat() == 200
        await recorded(gateway, 1)
        mend = spoil(gateway, home / FOLDER)
        await ask(gateway)
        assert await ledger(gateway) == (1, 0)
        mend()
        await recorded(gateway, 1 + NUM_STREAMS + NUM_CHATS)
        assert (await ledger(gateway))[1] == 0

        spoil(gateway, home / FOLDER)
        await ask(gateway)
        gateway.process.send_signal(signal.SIGTERM)
        assert await gateway.process.wait() == 0
    log = gateway.log.read_text()
    assert log.count("the ledger cannot be written") == 2
    assert log.count("the ledger is written again") == 1
    assert re.search(rf"records of requests are lost\b.*\b{NUM_STREAMS + NUM_CHATS}\b", log)


async def ask(gateway: Serving) -> None:
    """All are answered, and the ledger has been tried meanwhile."""
    num_told = gateway.log.read_text().count("the ledger cannot be written")
    streams = asyncio.gather(*(gateway.events() for _ in range(NUM_STREAMS)))
    assert {await gateway.chat() for _ in range(NUM_CHATS)} == {200}
    assert {events[-1] for events in await streams} == {"[DONE]"}
    async with asyncio.timeout(PATIENCE_S):
        while gateway.log.read_text().count("the ledger cannot be written") == num_told:  # noqa: ASYNC110 - a process is watched
            await asyncio.sleep(0.02)


async def recorded(gateway: Serving, number: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while (await ledger(gateway))[0] != number:  # noqa: ASYNC110 - another process is watched
            await asyncio.sleep(0.02)


async def ledger(gateway: Serving) -> tuple[int, int]:
    """How many records are written, and dropped."""
    async with gateway.client.get(f"{gateway.url}/metrics") as response:
        text = await response.text()
    found = re.findall(r"^goodgate_ledger_(records|dropped)_total (\S+)$", text, re.MULTILINE)
    counts = {name: int(float(value)) for name, value in found}
    return counts["records"], counts["dropped"]
