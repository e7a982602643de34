"""The load process: `python -m arena.load.loadgen_process`, started by `arena.load.loadgen`, never by hand.

The only module that imports locust and gevent, because importing locust patches the whole process. Locust is the shell:
one user hosts the pacer, and each ended request goes to its request event, so that its statistics and listeners work.
What decides the measurement is ours:

- pacer: one greenlet over the precomputed schedule: sleep to the absolute deadline, launch, never wait for an answer.
- sockets: callbacks that stamp each read (`arena.load.connection`).
- recorder: a greenlet that parses ended answers in short slices and writes their rows.
- watch: a greenlet that enforces timeouts, refreshes idle connections and samples the health of this process.

Input: one JSON line on stdin (`Job`); an end of file there means that the driver is gone, and ends the process. Output:
the spool, and progress as JSON lines on stdout.
"""

from __future__ import annotations

import locust  # isort: skip  (patches the standard library: before everything else)
import gc
import os
import resource
import socket
import sys
import time
from collections import deque
from pathlib import Path
from urllib.parse import urlsplit

import gevent
import gevent.event
import msgspec
from locust.env import Environment
from locust.exception import StopUser

from arena.load import spool
from arena.load.connection import Address, Exchange, Pool
from arena.load.cpu_slice import ask_for_short_slices
from arena.load.deadline_timer import DeadlineTimer
from arena.load.loadgen import Job, Progress, spool_header
from arena.load.plan import CellPlan, PlannedRequest, Target, request_body
from arena.load.spool import HealthRow, RequestRow, SpoolFooter, SpoolWriter, Status
from arena.load.stream_reader import Answer, AnswerReader

TICK_S = 0.05  # timeouts and connections are looked at this often
TICKS_PER_SAMPLE = 5
SAMPLES_PER_PROGRESS = 2
START_IN_NS = 50_000_000
READS_PER_SLICE = 24  # about 0.1 ms of parsing; then the sockets have their turn
LATE_ROWS_PER_SLICE = 8
CANCELLED = "cell_ended"
CLIENT_TIMEOUTS = ("request_timeout", "connect_timeout")


class Sleeper:
    """Wait until an absolute CLOCK_MONOTONIC time. Never spins: that would spoil the stamps of concurrent reads."""

    def __init__(self) -> None:
        self._timer = DeadlineTimer() if DeadlineTimer.available else None
        self._watcher = gevent.get_hub().loop.io(self._timer.fileno, 1) if self._timer else None

    @property
    def kind(self) -> str:
        return "timerfd" if self._timer else "poll"

    def sleep_until(self, deadline_ns: int) -> None:
        if self._timer is None:
            while (left_ns := deadline_ns - time.monotonic_ns()) > 0:
                gevent.sleep(min(left_ns / 1e9, 0.001))
        elif time.monotonic_ns() < deadline_ns:
            self._timer.arm(deadline_ns)
            gevent.get_hub().wait(self._watcher)
            self._timer.clear()


class Cell:
    """One plan on its way through one target."""

    def __init__(self, job: Job, plan: CellPlan, environment: Environment) -> None:
        self.job = job
        self.plan = plan
        self.environment = environment
        self.exchanges = deque(_exchanges(plan, job.target))
        self.pool = Pool(gevent.get_hub().loop, _address(job.target.url), self._on_end)
        self.in_flight: deque[Exchange] = deque()  # in the order they were sent, ended ones are dropped at the front
        self.num_in_flight = 0
        self.max_in_flight = 0
        self.num_sent = self.num_done = self.num_failed = 0
        self.measured_left = len(plan.measured)
        self.measured_done = gevent.event.Event()
        self.plan_done = gevent.event.Event()
        self.epoch_ns = 0
        self.ended: deque[Exchange] = deque()
        self.something_ended = gevent.event.Event()
        self.sleeper = Sleeper()
        self.writer = SpoolWriter(Path(job.spool))

    def start_clock(self) -> None:
        """Warm connections, freeze the heap, fix the time zero of all stamps, open the spool."""
        self.pool.warm(self.job.limits.warm_connections)
        give_up_ns = time.monotonic_ns() + int(self.job.limits.connect_timeout_s * 1e9)
        while self.pool.num_connecting and time.monotonic_ns() < give_up_ns:
            gevent.sleep(0.005)
        gc.collect()
        gc.freeze()
        gc.disable()  # a collection would show as lag; the process lives for one cell
        self.epoch_ns = time.monotonic_ns() + START_IN_NS
        header = spool_header(self.job.target, self.plan)
        header.epoch_monotonic_ns = self.epoch_ns
        header.epoch_unix_ns = time.time_ns() + self.epoch_ns - time.monotonic_ns()
        header.gc_frozen = not gc.isenabled()
        header.timer = self.sleeper.kind
        header.cpu_slice_ns = ask_for_short_slices()
        header.locust_version = locust.__version__
        self.writer.write(header)

    def pace(self) -> None:
        """Fire every request at its time. Late ones leave at once, and their rows keep the time they were due."""
        late_rows = 0
        while self.exchanges:
            deadline_ns = self.epoch_ns + self.exchanges[0].request.scheduled_ns
            if time.monotonic_ns() < deadline_ns:
                self.sleeper.sleep_until(deadline_ns)
                late_rows = 0
            elif (late_rows := late_rows + 1) % LATE_ROWS_PER_SLICE == 0:
                gevent.sleep(0)
            self._launch(self.exchanges.popleft())
        self.plan_done.set()

    def _launch(self, exchange: Exchange) -> None:
        if self.num_in_flight >= self.job.limits.max_in_flight:
            self._unsent(exchange, "max_in_flight")
            return
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

    def _unsent(self, exchange: Exchange, reason: str) -> None:
        exchange.fault = reason
        self._queue(exchange)

    def _on_end(self, exchange: Exchange) -> None:
        self.num_in_flight -= 1
        self._queue(exchange)

    def _queue(self, exchange: Exchange) -> None:
        self.ended.append(exchange)
        self.something_ended.set()
        if exchange.measured:
            self.measured_left -= 1
            if self.measured_left == 0:
                self.measured_done.set()

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
            reader = AnswerReader()
            for index, (t_ns, body) in enumerate(exchange.response.reads, 1):
                reader.feed(t_ns - self.epoch_ns, body)
                if gives_way and index % READS_PER_SLICE == 0:
                    gevent.sleep(0)
            row = self._row(exchange, reader.answer(exchange.response))
            self.writer.write(row)
            self.ended.popleft()
            self._report(row, sum(len(body) for _, body in exchange.response.reads))
            if gives_way:
                gevent.sleep(0)

    def _row(self, exchange: Exchange, answer: Answer) -> RequestRow:
        status, err_class = _outcome(exchange, answer)
        request = exchange.request
        return RequestRow(
            seq=request.seq,
            measured=exchange.measured,
            prompt_id=request.prompt_id,
            max_tokens=request.max_tokens,
            scheduled_ns=request.scheduled_ns,
            sent_ns=self._relative(exchange.sent_ns),
            connected_ns=self._relative(exchange.connected_ns),
            wrote_ns=self._relative(exchange.wrote_ns),
            first_byte_ns=self._relative(answer.first_byte_ns),
            role_ns=answer.role_ns,
            first_reason_ns=answer.first_reason_ns,
            first_text_ns=answer.first_text_ns,
            first_gen_ns=answer.first_gen_ns,
            last_gen_ns=answer.last_gen_ns,
            usage_ns=answer.usage_ns,
            done_ns=self._relative(exchange.done_ns),
            status=status,
            http=answer.http,
            err_class=err_class,
            err_message=answer.err_message,
            finish_reason=answer.finish_reason,
            in_tok_usage=answer.in_tok_usage,
            out_tok_usage=answer.out_tok_usage,
            reason_tok_usage=answer.reason_tok_usage,
            cached_tok=answer.cached_tok,
            out_tok_counted=answer.out_tok_counted,
            tokens_known=answer.tokens_known,
            n_chunks=answer.n_chunks,
            n_recvs=answer.n_recvs,
            reused=exchange.reused,
            token_ns=answer.token_ns,
            token_n=answer.token_n,
            token_kind=answer.token_kind,
        )

    def _relative(self, t_ns: int | None) -> int | None:
        return None if t_ns is None else t_ns - self.epoch_ns

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
                self._sample(now_ns, spent_s / ((now_ns - sampled_ns) / 1e9), worst_lag_ns)
                cpu_s, sampled_ns, worst_lag_ns = cpu_s + spent_s, now_ns, 0
            if tick % (TICKS_PER_SAMPLE * SAMPLES_PER_PROGRESS) == 0:
                self._tell_progress(now_ns)

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

    def _sample(self, now_ns: int, cpu: float, lag_ns: int) -> None:
        if now_ns < self.epoch_ns:
            return
        self.writer.write(
            HealthRow(
                t_ns=now_ns - self.epoch_ns,
                cpu=round(cpu, 4),
                loop_lag_ns=lag_ns,
                in_flight=self.num_in_flight,
                sockets=len(self.pool),
            )
        )

    def _tell_progress(self, now_ns: int) -> None:
        progress = Progress(
            pid=os.getpid(),
            elapsed_s=(now_ns - self.epoch_ns) / 1e9,
            sent=self.num_sent,
            done=self.num_done,
            failed=self.num_failed,
            in_flight=self.num_in_flight,
        )
        os.write(sys.stdout.fileno(), msgspec.json.encode(progress) + b"\n")

    def finish(self) -> None:
        """The last measured request has ended: let go of what is still in flight, and close the spool."""
        cooldown_exhausted = self.plan_done.is_set() and bool(self.plan.measured)
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
            )
        )


class RequestFailed(Exception):
    """What locust is told of a row that is not ok."""


def _outcome(exchange: Exchange, answer: Answer) -> tuple[Status, str | None]:
    """What became of a request: the client's own reasons first, then the transport's, then the answer's."""
    fault = exchange.fault
    if exchange.sent_ns is None:
        return "unsent", fault
    if fault == CANCELLED:
        return "cancelled", None
    if fault in CLIENT_TIMEOUTS:
        return "timeout", fault
    if answer.http is None and fault is not None:
        return "error", fault
    if answer.status == "truncated" and fault is not None:
        return "truncated", fault
    return answer.status, answer.err_class


def _exchanges(plan: CellPlan, target: Target) -> list[Exchange]:
    """Every request of the plan as the bytes that will leave."""
    head = _request_head(target)
    return [
        Exchange(request, plan.is_measured(request), _payload(head, plan.cell_id, request, target))
        for request in plan.requests
    ]


def _request_head(target: Target) -> str:
    url = urlsplit(target.url)
    headers = {
        "Host": url.netloc,
        "Content-Type": "application/json",
        "Accept": "text/event-stream",
        "Accept-Encoding": "identity",  # a compressed stream cannot be stamped event by event
        "User-Agent": "goodgate-arena",
        **target.headers,
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"POST {url.path.rstrip('/')}{target.path} HTTP/1.1\r\n{lines}"


def _payload(head: str, cell_id: str, request: PlannedRequest, target: Target) -> bytes:
    body = request_body(request, target)
    own = f"X-Request-Id: {cell_id}-{request.seq}\r\nContent-Length: {len(body)}\r\n\r\n"
    return (head + own).encode("latin-1") + body


def _address(url: str) -> Address:
    parts = urlsplit(url)
    if parts.scheme != "http" or parts.hostname is None:
        raise SystemExit(f"The arena measures plain http:// targets, not {url!r}.")
    family, _, _, _, sockaddr = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_STREAM)[0]
    return Address(family, sockaddr)


def run(job: Job) -> None:
    """One cell from its first connection to its done marker."""
    hub = gevent.get_hub()
    # A fault in any callback or greenlet ends the process: no silent cell.
    hub.SYSTEM_ERROR = (*hub.SYSTEM_ERROR, Exception)
    _raise_file_limit()
    plan = CellPlan.read(spool.plan_file(Path(job.spool)))
    environment = Environment(user_classes=[PacedUser], catch_exceptions=False)
    cell = Cell(job, plan, environment)
    PacedUser.cell = cell
    cell.start_clock()
    background = [gevent.spawn(cell.record), gevent.spawn(cell.watch), gevent.spawn(_end_with_driver)]
    runner = environment.create_local_runner()
    runner.start(user_count=1, spawn_rate=1)
    (cell.measured_done if plan.measured else cell.plan_done).wait()
    runner.quit()
    gevent.killall(background)
    cell.finish()


class PacedUser(locust.User):
    """Locust's one user. It does not simulate anybody: it hosts the pacer."""

    cell: Cell

    @locust.task
    def fire_the_plan(self) -> None:
        self.cell.pace()
        raise StopUser


def _end_with_driver() -> None:
    """The driver holds our stdin open for as long as it lives."""
    hub = gevent.get_hub()
    hub.wait(hub.loop.io(sys.stdin.fileno(), 1))
    os._exit(3)


def _raise_file_limit() -> None:
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    run(msgspec.json.decode(sys.stdin.buffer.readline(), type=Job))
