"""One plan, or one worker's share of it, on its way through one target. Runs inside a load process.

- pacer: one greenlet that launches requests and never reads (`arena.load.pacers`).
- sockets: callbacks that stamp each read (`arena.load.connection`).
- recorder: a greenlet that parses ended answers in short slices and writes their rows.
- watch: a greenlet that enforces timeouts, refreshes idle connections and samples the health of this process.

    cell.prepare()  ->  cell.start(epoch)  ->  cell.pace() beside record() and watch()  ->  measured_done  ->  finish()
"""

from __future__ import annotations

import gc
import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import gevent
import gevent.event
import locust
from locust.env import Environment

from arena.load.answer_reader import AnswerReader
from arena.load.connection import Address, Exchange, Pool, address_of
from arena.load.cpu_audit import MachineMeter
from arena.load.cpu_slice import ask_for_short_slices
from arena.load.http_requests import exchanges, host_and_port
from arena.load.loadgen import Job, Progress, spool_header
from arena.load.pacers import ClosedPacer, OpenPacer
from arena.load.plan import CellPlan
from arena.load.request_row import CANCELLED, request_row
from arena.load.sleeper import Sleeper
from arena.load.spool import HealthRow, RequestRow, SpoolFooter, SpoolWriter

TICK_S = 0.05  # timeouts and connections are looked at this often
TICKS_PER_SAMPLE = 5
SAMPLES_PER_PROGRESS = 2
READS_PER_SLICE = 24  # about 0.1 ms of parsing; then the sockets have their turn
NOT_YET_NS = 1 << 62
SAMPLED_TEXTS = 16  # answers whose text is kept, for a tokenizer to count


class Cell:
    def __init__(
        self, job: Job, plan: CellPlan, environment: Environment, *, worker: int = 0, tell: Callable[[Progress], None]
    ) -> None:
        self.job = job
        self.plan = plan
        self.worker = worker
        self.environment = environment
        self.exchanges = deque(exchanges(plan, job.target))
        self.pool = Pool(gevent.get_hub().loop, _address(job), self._on_end)
        self.pacer = ClosedPacer(self, job.closed) if job.closed else OpenPacer(self)
        self.sleeper = Sleeper()
        self.writer = SpoolWriter(Path(job.spool))
        self.epoch_ns = NOT_YET_NS
        self.in_flight: deque[Exchange] = deque()  # in the order they were sent, ended ones are dropped at the front
        self.waiting: deque[Exchange] = deque()  # for room, where a limit makes requests wait
        self.num_in_flight = 0
        self.max_in_flight = 0
        self.num_sent = self.num_done = self.num_failed = self.num_texts = 0
        self.measured_left = len(plan.measured)
        self.measured_done = gevent.event.Event()
        self.plan_done = gevent.event.Event()
        self.ended: deque[Exchange] = deque()
        self.something_ended = gevent.event.Event()
        self._tell = tell
        self._window_is_closed = False
        self._dry: str | None = None

    def prepare(self) -> None:
        """Warm connections and freeze the heap."""
        self.pool.warm(self.job.limits.warm_connections)
        give_up_ns = time.monotonic_ns() + int(self.job.limits.connect_timeout_s * 1e9)
        while self.pool.num_connecting and time.monotonic_ns() < give_up_ns:
            gevent.sleep(0.005)
        gc.collect()
        gc.freeze()
        gc.disable()  # a collection would show as lag; the process lives for one cell

    def start(self, epoch_ns: int, *, clock: Literal["monotonic", "wall"] = "monotonic") -> None:
        """Fix the time zero of all stamps, and open the spool."""
        self.epoch_ns = epoch_ns
        header = spool_header(self.job.target, self.plan)
        header.epoch_monotonic_ns = epoch_ns
        header.epoch_unix_ns = time.time_ns() + epoch_ns - time.monotonic_ns()
        header.gc_frozen = not gc.isenabled()
        header.clock = clock
        header.timer = self.sleeper.kind
        header.cpu_slice_ns = ask_for_short_slices()
        header.locust_version = locust.__version__
        self.writer.write(header)

    def pace(self) -> None:
        """Send the plan to its end."""
        self.pacer.run()
        self.plan_done.set()

    def launch(self, exchange: Exchange) -> None:
        if self.job.closed and exchange.measured:
            self.measured_left += 1
        if self.num_in_flight < self.job.limits.max_in_flight:
            self._send(exchange)
        elif self.job.limits.beyond == "wait":
            self.waiting.append(exchange)
        else:
            self._unsent(exchange, "max_in_flight")

    def _send(self, exchange: Exchange) -> None:
        self.num_in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.num_in_flight)
        self.num_sent += 1
        self.in_flight.append(exchange)
        try:
            self.pool.launch(exchange)
        except OSError as error:  # no socket left on this machine
            self.num_in_flight -= 1
            self.num_sent -= 1
            self.in_flight.pop()
            self._unsent(exchange, f"no_socket: {error.strerror}")

    def close_window(self, *, ran_dry: bool = False) -> None:
        """No measured request will come beyond those that are known."""
        if ran_dry and not self._window_is_closed:
            self._dry = f"The {len(self.plan.requests)} prompts of the cell ran out before its window ended."
        self._window_is_closed = True
        self._look_for_the_end()

    def _look_for_the_end(self) -> None:
        if self._window_is_closed and self.measured_left == 0:
            self.measured_done.set()

    def _unsent(self, exchange: Exchange, reason: str) -> None:
        exchange.fault = reason
        self._queue(exchange)

    def _on_end(self, exchange: Exchange) -> None:
        self.num_in_flight -= 1
        self._queue(exchange)
        if self.waiting:
            self._send(self.waiting.popleft())

    def _queue(self, exchange: Exchange) -> None:
        self.ended.append(exchange)
        self.something_ended.set()
        self.pacer.has_ended(exchange)
        if exchange.measured:
            self.measured_left -= 1
            self._look_for_the_end()

    def record(self) -> None:
        """Write the row of each ended request, for ever. Parsing gives way to the sockets after every slice."""
        while True:
            self.something_ended.wait()
            self.something_ended.clear()
            self.drain()

    def drain(self, *, gives_way: bool = True) -> None:
        """An exchange leaves the queue when its row is written: the end of the cell may kill the recorder in
        mid-answer, and what it had not finished is then written by `finish`.
        """
        while self.ended:
            exchange = self.ended[0]
            keeps_text = exchange.measured and self.num_texts < SAMPLED_TEXTS
            reader = AnswerReader(keeps_text=keeps_text)
            for index, (t_ns, body) in enumerate(exchange.response.reads, 1):
                reader.feed(t_ns - self.epoch_ns, body)
                if gives_way and index % READS_PER_SLICE == 0:
                    gevent.sleep(0)
            response = exchange.response
            answer = reader.answer(http=response.http, fault=response.fault, is_event_stream=response.is_event_stream)
            row = request_row(exchange, answer, epoch_ns=self.epoch_ns, worker=self.worker)
            self.num_texts += row.text is not None
            self.writer.write(row)
            self.ended.popleft()
            self._report(row, sum(len(body) for _, body in exchange.response.reads))
            if gives_way:
                gevent.sleep(0)

    def _report(self, row: RequestRow, num_bytes: int) -> None:
        """Tell locust. Its figures are for a live view; verdicts come from the rows."""
        self.num_done += 1
        self.num_failed += row.status != "ok"
        end_ns = row.last_gen_ns or row.done_ns or row.scheduled_ns
        self.environment.events.request.fire(  # type: ignore[no-untyped-call]  # locust's hooks are untyped
            request_type="POST",
            name=self.plan.cell_id,
            response_time=(end_ns - row.scheduled_ns) / 1e6,
            response_length=num_bytes,
            exception=None if row.status == "ok" else RequestFailed(f"{row.status}: {row.err_class}"),
            context={"seq": row.seq},
        )

    def watch(self) -> None:
        """Timeouts, connections, health and progress, for ever."""
        sleeper = Sleeper()
        machine = MachineMeter()
        deadline_ns, tick, worst_lag_ns = time.monotonic_ns(), 0, 0
        cpu_s, sampled_ns = time.process_time(), deadline_ns
        while True:
            deadline_ns += int(TICK_S * 1e9)
            sleeper.sleep_until(deadline_ns)
            now_ns = time.monotonic_ns()
            worst_lag_ns = max(worst_lag_ns, now_ns - deadline_ns)
            deadline_ns = max(deadline_ns, now_ns - int(TICK_S * 1e9))  # after a stall: go on, do not catch up
            self._enforce_timeouts(now_ns)
            tick += 1
            if tick % TICKS_PER_SAMPLE == 0:
                self._tend_connections(now_ns)
                spent_s = time.process_time() - cpu_s
                self._sample(now_ns, spent_s / ((now_ns - sampled_ns) / 1e9), worst_lag_ns, machine.busy_share())
                cpu_s, sampled_ns, worst_lag_ns = cpu_s + spent_s, now_ns, 0
            if tick % (TICKS_PER_SAMPLE * SAMPLES_PER_PROGRESS) == 0:
                self._tell(self.progress(now_ns))

    def _enforce_timeouts(self, now_ns: int) -> None:
        self.pool.give_up_connecting(now_ns - int(self.job.limits.connect_timeout_s * 1e9))
        oldest_ns = now_ns - int(self.job.limits.request_timeout_s * 1e9)
        while self.in_flight:
            exchange = self.in_flight[0]
            if exchange.has_ended:
                self.in_flight.popleft()
            elif exchange.sent_ns is not None and exchange.sent_ns < oldest_ns and exchange.connection is not None:
                exchange.connection.abandon("request_timeout")
            else:
                return

    def _tend_connections(self, now_ns: int) -> None:
        self.pool.refresh(now_ns)
        self.pool.warm(min(self.job.limits.warm_connections, self.job.limits.max_in_flight - self.num_in_flight))

    def _sample(self, now_ns: int, cpu: float, lag_ns: int, machine_cpu: float | None) -> None:
        if now_ns < self.epoch_ns:
            return
        self.writer.write(
            HealthRow(
                t_ns=now_ns - self.epoch_ns,
                worker=self.worker,
                cpu=round(cpu, 4),
                machine_cpu=None if machine_cpu is None else round(machine_cpu, 4),
                loop_lag_ns=lag_ns,
                in_flight=self.num_in_flight,
                sockets=len(self.pool),
            )
        )

    def progress(self, now_ns: int) -> Progress:
        return Progress(
            pid=os.getpid(),
            elapsed_s=max(0.0, (now_ns - self.epoch_ns) / 1e9),
            sent=self.num_sent,
            done=self.num_done,
            failed=self.num_failed,
            in_flight=self.num_in_flight,
        )

    def finish(self, *, foreign_cpu: float | None = None) -> None:
        """The last measured request has ended: let go of what is still in flight, and close the spool."""
        cooldown_exhausted = self.plan_done.is_set() and bool(self.plan.measured)
        self.waiting.clear()  # none of them is measured
        for exchange in self.in_flight:
            if exchange.connection is not None:
                exchange.connection.abandon(CANCELLED)
        self.drain(gives_way=False)
        self.pool.close()
        self.writer.finish(
            SpoolFooter(
                requests=self.writer.num_requests,
                max_in_flight=self.max_in_flight,
                connections_opened=self.pool.num_opened,
                cooldown_exhausted=cooldown_exhausted,
                foreign_cpu=foreign_cpu,
                aborted=self._dry,
            )
        )


class RequestFailed(Exception):
    """What locust is told of a row that is not ok."""


def _address(job: Job) -> Address:
    try:
        host, port = host_and_port(job.target.url)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    return address_of(host, port, timeout_s=job.limits.connect_timeout_s)
