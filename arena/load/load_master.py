"""The master of a cell that several load processes share: `python -m arena.load.load_master`, started by the driver.

Locust's own master and workers carry the words (`arena.load.crew_words`) and start one user in each worker; the
schedule is ours, and each worker has its share of it. The start is announced seconds ahead, so that nobody is late.

    gather -> hand_out -> start -> attend -> dismiss

A worker that dies or falls silent ends the cell: this process then ends with one sentence, and the driver accounts for
every request. Input and output are those of `loadgen_process`.
"""

from __future__ import annotations

import locust  # isort: skip  (patches the standard library: before everything else)
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gevent
import gevent.queue
import msgspec
from locust.env import Environment
from locust.runners import STATE_MISSING

from arena.load import crew_words as words
from arena.load import spool
from arena.load.crew_words import Assignment, Enlistment, Epoch, Hello
from arena.load.distributed import limits_of, share_of
from arena.load.loadgen import Crew, Job, Progress
from arena.load.locust_shell import PacedUser, become_a_load_process, end_with_parent
from arena.load.plan import CellPlan

START_IN_NS = 3_000_000_000
LOOK_S = 0.1  # how soon a dead worker is noticed, where it was started here
PROGRESS_S = 0.5


class Master:
    def __init__(self, job: Job, crew: Crew, plan: CellPlan) -> None:
        self._job = job
        self._crew = crew
        self._plan = plan
        self._token = secrets.token_hex(16) if crew.starts_workers else ""
        self._environment = Environment(user_classes=[PacedUser], catch_exceptions=False)
        self._runner = self._environment.create_master_runner(crew.host, crew.port)
        self._inbox: gevent.queue.Queue[Any] = gevent.queue.Queue()
        for word in words.FROM_WORKERS:
            self._runner.register_message(word, lambda environment, msg: self._inbox.put(msg))
        self._children: list[subprocess.Popen[bytes]] = []
        self._workers: list[str] = []  # locust's ids of them; the place is the worker's number
        self._hosts: dict[str, str] = {}
        self._progress: dict[str, Progress] = {}
        self._epoch_ns = 0

    def gather(self) -> None:
        """Start the workers where that is ours, and wait until all have said hello."""
        if self._crew.starts_workers:
            self._children = [self._start_worker() for _ in range(self._crew.workers)]
        for message in self._messages(words.HELLO, self._crew.workers, self._crew.joining_s, "joined"):
            hello = words.content(message.data, Hello)
            if hello.token != self._token:
                sys.exit(
                    f"A load worker on {hello.host} is not one of this cell; stop it, or give the master another port."
                )
            self._workers.append(message.node_id)
            self._hosts[message.node_id] = hello.host

    def hand_out(self) -> None:
        count = self._crew.workers
        for worker, client_id in enumerate(self._workers):
            path = str(self._part(worker)) if self._crew.starts_workers else ""
            job = Job(self._job.target, limits_of(self._job.limits, worker, count), path)
            self._say(words.ASSIGNMENT, Assignment(worker, job, share_of(self._plan, worker, count)), client_id)
        self._expect_all(words.READY, self._crew.joining_s, "got ready")

    def start(self) -> None:
        """Announce the start to all, and have locust start a user in each worker meanwhile."""
        now_ns = time.monotonic_ns()
        self._epoch_ns = now_ns + START_IN_NS
        epoch = Epoch(words.boot_id(), self._epoch_ns, time.time_ns() + START_IN_NS)
        self._say(words.START, epoch)
        self._runner.start(user_count=self._crew.workers, spawn_rate=self._crew.workers)

    def attend(self) -> None:
        """Until the last measured request of the last worker has ended. The driver's time limit bounds it."""
        telling = gevent.spawn(self._tell_progress)
        self._expect_all(words.MEASURED_DONE, None, "ended")
        telling.kill()

    def dismiss(self) -> None:
        """Load goes on until everybody is told to let go; then the spools come in."""
        self._say(words.FINISH, None)
        self._expect_all(words.FINISHED, self._job.limits.request_timeout_s, "closed their spools")
        if not self._crew.starts_workers:
            for worker, client_id in enumerate(self._workers):
                self._fetch(worker, client_id)
        self._runner.quit()
        for child in self._children:
            child.wait()

    def _start_worker(self) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", "arena.load.load_worker"]
        child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        assert child.stdin is not None
        enlistment = Enlistment("127.0.0.1", self._runner.server.port, self._token)
        child.stdin.write(msgspec.json.encode(enlistment) + b"\n")
        child.stdin.flush()  # stays open: its end tells the worker that we are gone
        return child

    def _part(self, worker: int) -> Path:
        return spool.worker_file(Path(self._job.spool), worker)

    def _say(self, word: str, what: Any, client_id: str | None = None) -> None:
        data = {words.CONTENT: msgspec.msgpack.encode(what)}
        for each in [client_id] if client_id else self._workers:
            self._runner.send_message(word, data, each)

    def _expect_all(self, word: str, within_s: float | None, what: str) -> None:
        for _ in self._messages(word, self._crew.workers, within_s, what):
            pass

    def _messages(self, word: str, count: int, within_s: float | None, what: str) -> Iterator[Any]:
        """`count` messages of this kind, one a worker, while progress is noted and the workers' lives are watched."""
        heard: set[str] = set()
        give_up = time.monotonic() + within_s if within_s is not None else float("inf")
        while len(heard) < count:
            self._look_after_workers()
            if time.monotonic() > give_up:
                sys.exit(self._too_few(len(heard), count, within_s or 0.0, what))
            try:
                message = self._inbox.get(timeout=LOOK_S)
            except gevent.queue.Empty:
                continue
            if message.type == words.PROGRESS:
                self._progress[message.node_id] = words.content(message.data, Progress)
            elif message.type == word and message.node_id not in heard:
                heard.add(message.node_id)
                yield message

    def _too_few(self, heard: int, count: int, within_s: float, what: str) -> str:
        hint = "" if self._crew.starts_workers else f"; run `goodgate arena worker` on {count} hosts in all"
        return f"{heard} of {count} load workers had {what} within {within_s:g} s{hint}."

    def _look_after_workers(self) -> None:
        for place, child in enumerate(self._children):
            if (code := child.poll()) is not None:
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
                sys.exit(f"Load worker {place + 1} of {self._crew.workers} {how}.")
        for client_id in self._workers:
            node = self._runner.clients.get(client_id)
            if node is None or node.state == STATE_MISSING:
                sys.exit(f"A load worker on {self._hosts[client_id]} has left, or answers no more.")

    def _tell_progress(self) -> None:
        while True:
            gevent.sleep(PROGRESS_S)
            known = list(self._progress.values())
            progress = Progress(
                pid=os.getpid(),
                elapsed_s=max(0.0, (time.monotonic_ns() - self._epoch_ns) / 1e9),
                sent=sum(each.sent for each in known),
                done=sum(each.done for each in known),
                failed=sum(each.failed for each in known),
                in_flight=sum(each.in_flight for each in known),
                workers=tuple(child.pid for child in self._children),
            )
            os.write(sys.stdout.fileno(), msgspec.json.encode(progress) + b"\n")

    def _fetch(self, worker: int, client_id: str) -> None:
        """A spool from another host, piece by piece, with its done marker last."""
        path = self._part(worker)
        with path.open("wb") as file:
            while True:
                self._say(words.FETCH, file.tell(), client_id)
                (message,) = self._messages(words.CHUNK, 1, self._job.limits.request_timeout_s, "sent their rows")
                data = words.content(message.data, bytes)
                if not data:
                    break
                file.write(data)
        spool.mark_done(path)


def run(job: Job, crew: Crew) -> None:
    become_a_load_process()
    gevent.spawn(end_with_parent)
    master = Master(job, crew, CellPlan.read(spool.plan_file(Path(job.spool))))
    master.gather()
    master.hand_out()
    master.start()
    master.attend()
    master.dismiss()


if __name__ == "__main__":
    assert locust  # imported for what its import does
    asked = msgspec.json.decode(sys.stdin.buffer.readline(), type=Job)
    assert asked.crew is not None
    run(asked, asked.crew)
