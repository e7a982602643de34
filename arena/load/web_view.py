"""Locust's own web page over a race: `python -m arena.load.web_view`, started by `arena.race.web`, never by hand.

A process of its own, so that whoever looks disturbs no send and no stamp. It follows the spools as they grow, and each
request that has ended goes to locust's request event once: its response time runs from the moment it was due to its
last token, and it failed if it was not answered whole. Requests of warm-up and cool-down are among them. The figures
are for watching: rates are locust's, by when a row arrives here (a quarter of a second late), percentiles have four
digits. Verdicts come from the rows. The page's buttons start nothing, for there are no users behind it.

Input: one JSON line on stdin (`Order`); its end ends this process. Output: one line, once the page is served.
"""

from __future__ import annotations

import locust  # isort: skip  (patches the standard library: before everything else)
import sys
from pathlib import Path

import gevent
import locust.stats
import msgspec
from locust.env import Environment
from locust.runners import STATE_RUNNING

from arena.load.locust_shell import end_with_parent
from arena.load.spool_follower import Follower

LOOK_S = 0.25


class Order(msgspec.Struct, frozen=True):
    spools: str
    port: int


class RequestFailed(Exception):
    """What locust is told of a row that is not ok."""


def show(order: Order) -> None:
    locust.stats.bucket_response_time = four_digits
    environment = Environment(user_classes=[])
    runner = environment.create_local_runner()
    runner.state = STATE_RUNNING  # else the page waits for somebody to start it
    page = environment.create_web_ui("127.0.0.1", order.port)
    background = [gevent.spawn(end_with_parent), gevent.spawn(locust.stats.stats_history, runner)]
    while page.server is None or not page.server.started:
        if page.greenlet is not None and page.greenlet.ready():
            sys.exit(f"{page.greenlet.exception}")
        gevent.sleep(0.01)
    print(f"http://127.0.0.1:{page.server.server_port}", flush=True)
    follow(environment, Follower(Path(order.spools)))
    gevent.joinall(background)


def follow(environment: Environment, follower: Follower) -> None:
    while True:
        for cell, row in follower.rows():
            if row.status == "cancelled":
                continue  # it was only there to keep the load up
            end_ns = row.last_gen_ns or row.done_ns or row.scheduled_ns
            environment.events.request.fire(  # type: ignore[no-untyped-call]  # locust's hooks are untyped
                request_type="E2E",
                name=cell,
                response_time=(end_ns - row.scheduled_ns) / 1e6,
                response_length=row.out_tok_usage or row.out_tok_counted,
                exception=None if row.status == "ok" else RequestFailed(f"{row.status}: {row.err_class}"),
                context={},
            )
        gevent.sleep(LOOK_S)


def four_digits(response_time: float) -> int:
    """Locust's own buckets have two digits: 147 ms would be 150."""
    return int(float(f"{response_time:.4g}"))


if __name__ == "__main__":
    show(msgspec.json.decode(sys.stdin.buffer.readline(), type=Order))
