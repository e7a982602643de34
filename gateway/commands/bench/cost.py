"""What one request costs, beside other gateways on the same machine, in turn.

    report = cost(rounds=3, seconds=5, peers=home / "peers", folder=..., say=print)

The upstream is nginx with one fixed answer of about 500 bytes; wrk posts one fixed chat of 400 bytes over 1 and 16
connections, from one thread. Each round goes over all gateways, so a machine that is busy for a while is so for all;
medians of the rounds count. CPU time is that of the gateway's processes, as the system has counted it.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from msgspec import Struct

from gateway.commands.bench.peers import PEERS, Target, answers, started
from gateway.commands.bench.processes import (
    BenchError,
    config_text,
    family,
    free_port,
    gateway,
    machine,
    make_key,
    rss_mb,
    running,
    wait_until,
)
from gateway.commands.bench.verdict import Claim
from gateway.commands.bench.wrk import Timing, need, nginx, proxy_conf, upstream_conf, wrk

CONNECTIONS = (1, 16)
RATIOS = {"litellm": 40, "portkey": 3.5, "smg": 0.55}  # of theirs, what ours shall reach
WARM_UP_S = 1.0
PLAIN, FULL = "Goodgate, plain", "Goodgate, all on"
BARE = "aiohttp pass-through, 20 lines"
PLAIN_SECTIONS: Mapping[str, Any] = {"auth": {"required": False}, "ledger": {"keep": "none"}, "logs": {"access": False}}


class Row(Struct, frozen=True):
    """One gateway; `timings` in the order of CONNECTIONS."""

    name: str
    timings: Sequence[Timing]
    rss_mb: float


class Report(Struct, frozen=True):
    date: str
    machine: str
    rows: Sequence[Row]
    missing: Mapping[str, str]  # peers that are not here, with their packages


def cost(*, rounds: int, seconds: float, peers: Path, folder: Path, say: Callable[[str], None] = print) -> Report:
    need("wrk")
    need("nginx")
    with ExitStack() as stack:
        targets = _all_started(stack, peers, folder, say)
        for target in targets:
            wrk(target, max(CONNECTIONS), WARM_UP_S, folder)
        seen: dict[tuple[str, int], list[Timing]] = {}
        for number in range(rounds):
            say(f"round {number + 1} of {rounds}")
            for connections in CONNECTIONS:
                for target in targets:
                    timing = wrk(target, connections, seconds, folder)
                    seen.setdefault((target.name, connections), []).append(timing)
        rows = [
            Row(
                target.name,
                [_median(seen[target.name, each]) for each in CONNECTIONS],
                sum(map(rss_mb, family(target.pid))),
            )
            for target in targets
        ]
    return Report(datetime.now(UTC).date().isoformat(), machine(), rows, not_installed(peers))


def _median(timings: Sequence[Timing]) -> Timing:
    return Timing(*(statistics.median(getattr(each, name) for each in timings) for name in Timing.__struct_fields__))


def _all_started(stack: ExitStack, peers: Path, folder: Path, say: Callable[[str], None]) -> list[Target]:
    upstream = free_port()
    stack.enter_context(nginx(upstream_conf(upstream), folder / "upstream"))
    wait_until(lambda: answers(Target("nginx", upstream, 0)), lambda: "nginx did not start as the upstream.")
    targets = [stack.enter_context(_nginx_proxy(upstream, folder)), stack.enter_context(_bare(upstream))]
    for peer in PEERS:
        if peer.is_installed(peers):
            try:
                targets.append(stack.enter_context(started(peer, peers, upstream, folder)))
            except BenchError as error:
                say(f"{peer.name} is left out. {error.message}")
    targets.append(stack.enter_context(goodgate(PLAIN, upstream, folder / "plain", **PLAIN_SECTIONS)))
    targets.append(stack.enter_context(goodgate(FULL, upstream, folder / "full")))
    return targets


@contextmanager
def goodgate(name: str, upstream: int, home: Path, **sections: Any) -> Iterator[Target]:
    """Ours, with a key that has limits and a budget unless the sections ask for none; metrics are always on."""
    home.mkdir()
    headers = {} if "auth" in sections else {"Authorization": f"Bearer {make_key(home)}"}
    config = home / "gateway.yaml"
    config.write_text(config_text([upstream], **sections))
    with gateway(config, home) as served:
        yield Target(name, served.port, served.pid, headers)


@contextmanager
def _nginx_proxy(upstream: int, folder: Path) -> Iterator[Target]:
    port = free_port()
    with nginx(proxy_conf(port, upstream), folder / "proxy") as process:
        target = Target("nginx `proxy_pass`", port, process.pid)
        wait_until(lambda: answers(target), lambda: "nginx did not start as a proxy.", process)
        yield target


@contextmanager
def _bare(upstream: int) -> Iterator[Target]:
    port = free_port()
    command = [sys.executable, "-m", "gateway.commands.bench.bare", str(port), f"http://127.0.0.1:{upstream}"]
    with running(command) as process:
        target = Target(BARE, port, process.pid)
        wait_until(lambda: answers(target), lambda: "The pass-through did not start.", process)
        yield target


def not_installed(peers: Path) -> dict[str, str]:
    """Each with the package that `--install-peers` installs."""
    return {peer.name: peer.install[-1] for peer in PEERS if not peer.is_installed(peers)}


def claims(report: Report) -> list[Claim]:
    """The targets, each with what was found; those against others only where they were measured. Pure."""
    ours = _row(report, FULL)
    assert ours is not None
    alone, many = ours.timings
    found = [
        Claim("1 connection: p50 of 0.6 ms at most", f"{alone.p50_ms:.2f} ms", alone.p50_ms <= 0.6),
        Claim("16 connections: 4,500 requests a second", f"{many.rps:,.0f}", many.rps >= 4500),
    ]
    for folder, ratio in RATIOS.items():
        peer = next(each for each in PEERS if each.folder == folder)
        if (theirs := _row(report, peer.name)) is not None:
            times = many.rps / theirs.timings[1].rps
            found.append(Claim(f"16 connections: {ratio:g} times {peer.name}", f"{times:.2f} times", times >= ratio))
    return found


def _row(report: Report, name: str) -> Row | None:
    return next((row for row in report.rows if row.name == name), None)
