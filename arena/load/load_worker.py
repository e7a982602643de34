"""One of several load processes of a cell: `python -m arena.load.load_worker`, started by the master or by
`goodgate arena worker`.

It fires its share of the plan exactly as a lone load process fires the whole (`arena.load.paced_cell`), and writes a
spool of its own. It serves one cell and ends. Input: one JSON line on stdin (`Enlistment`), whose end of file ends it.
"""

from __future__ import annotations

import locust  # isort: skip  (patches the standard library: before everything else)
import logging
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gevent
import gevent.event
import gevent.queue
import msgspec
from locust.env import Environment

from arena.load import crew_words as words
from arena.load.crew_words import Assignment, Enlistment, Epoch, Hello
from arena.load.loadgen import Progress
from arena.load.locust_shell import PacedUser, become_a_load_process, end_with_parent
from arena.load.paced_cell import Cell

LOOK_S = 0.05
SILENCE_S = 10.0  # of a master, after which it is taken for gone


class Worker:
    def __init__(self, enlistment: Enlistment) -> None:
        self._environment = Environment(user_classes=[PacedUser], catch_exceptions=False)
        self._started = gevent.event.Event()
        self._cell: Cell
        PacedUser.pace = self._pace
        self._runner = self._environment.create_worker_runner(enlistment.host, enlistment.port)
        self._inbox: gevent.queue.Queue[Any] = gevent.queue.Queue()
        for word in words.FROM_MASTER:
            self._runner.register_message(word, lambda environment, msg: self._inbox.put(msg))
        self._say(words.HELLO, Hello(enlistment.token, words.host_name(), os.getpid()))

    def serve(self) -> None:
        """One cell, from its assignment to its rows."""
        assignment = self._expect(words.ASSIGNMENT, Assignment)
        with tempfile.TemporaryDirectory(prefix="goodgate-arena-") as folder:
            job = assignment.job
            job.spool = job.spool or str(Path(folder) / "spool.jsonl")
            self._cell = Cell(job, assignment.plan, self._environment, worker=assignment.worker, tell=self._tell)
            self._fire()
            self._hand_over(Path(job.spool))

    def _fire(self) -> None:
        cell = self._cell
        background = [gevent.spawn(cell.watch), gevent.spawn(cell.record)]
        cell.prepare()
        self._say(words.READY)
        epoch = self._expect(words.START, Epoch)
        epoch_ns, clock = words.local_epoch_ns(
            epoch, boot=words.boot_id(), monotonic_ns=time.monotonic_ns(), unix_ns=time.time_ns()
        )
        cell.start(epoch_ns, clock=clock)
        self._started.set()
        (cell.measured_done if cell.plan.measured else cell.plan_done).wait()
        self._say(words.MEASURED_DONE)
        self._expect(words.FINISH, type(None))
        gevent.killall(background)
        cell.finish()

    def _pace(self) -> None:
        """Locust starts its user when it likes; the schedule begins at the epoch."""
        self._started.wait()
        self._cell.pace()

    def _hand_over(self, path: Path) -> None:
        """The master asks for the rows where it cannot read them; its `quit` ends this process, as it ends locust's."""
        self._say(words.FINISHED, path.stat().st_size)
        while len(self._runner.greenlet):
            try:
                message = self._inbox.get(timeout=LOOK_S)
            except gevent.queue.Empty:
                continue
            with path.open("rb") as file:
                file.seek(words.content(message.data, int))
                self._say(words.CHUNK, file.read(words.CHUNK_BYTES))

    def _next_message(self) -> Any:
        """A master that has ended says nothing; the one of the next cell does not know this process."""
        while True:
            try:
                return self._inbox.get(timeout=LOOK_S)
            except gevent.queue.Empty:
                heard_s = self._runner.last_heartbeat_timestamp
                if not len(self._runner.greenlet) or (heard_s is not None and time.time() - heard_s > SILENCE_S):
                    print("The load master has gone.", file=sys.stderr)
                    raise SystemExit(words.MASTER_IS_GONE) from None

    def _tell(self, progress: Progress) -> None:
        self._say(words.PROGRESS, progress)

    def _say(self, word: str, what: Any = None) -> None:
        self._runner.send_message(word, {words.CONTENT: msgspec.msgpack.encode(what)})

    def _expect(self, word: str, kind: Any) -> Any:
        message = self._next_message()
        if message.type != word:
            sys.exit(f"The load master said {message.type} where {word} was due.")
        return words.content(message.data, kind)


def run(enlistment: Enlistment) -> None:
    become_a_load_process()
    gevent.spawn(end_with_parent)
    try:
        worker = Worker(enlistment)
    except ConnectionError:
        print(f"No load master answers at {enlistment.host}:{enlistment.port}.", file=sys.stderr)
        raise SystemExit(words.NO_MASTER) from None
    worker.serve()


if __name__ == "__main__":
    assert locust  # imported for what its import does
    logging.disable(logging.WARNING)  # locust's; what matters ends the process
    run(msgspec.json.decode(sys.stdin.buffer.readline(), type=Enlistment))
