"""Many streams at once: what the gateway adds to their first tokens, what it takes of their rate, and what it costs.

    report = streams(number=500, rounds=3, folder=..., say=print)

The scripted engine writes 20 tokens a second into each; the same clients ask it directly and through the gateway, in
turn, with everything switched on. They come within a second, as arrivals would, and once more all at the same time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import uvloop
from msgspec import Struct

from gateway.commands.bench.lean import Seen, open_streams
from gateway.commands.bench.processes import Engine, config_text, cpu_s, gateway, machine, make_key, peak_rss_mb
from gateway.commands.bench.verdict import Claim

TOKENS_A_SECOND = 20
TOKENS = 100
SPREADS_S = (1.0, 0.0)
DIRECT, THROUGH = "direct", "through the gateway"


class Row(Struct, frozen=True):
    """One way to the engine with one kind of arrivals: medians of the rounds. CPU is that of the gateway, or of the
    engine where there is none, for each token; `client_share` of one core."""

    way: str
    spread_s: float
    first_p50_ms: float
    first_p99_ms: float
    tokens_per_s: float
    cpu_us: float
    client_share: float


class Report(Struct, frozen=True):
    date: str
    machine: str
    number: int
    rows: Sequence[Row]
    peak_rss_mb: float

    def added_p99_ms(self, spread_s: float) -> float:
        return self._row(THROUGH, spread_s).first_p99_ms - self._row(DIRECT, spread_s).first_p99_ms

    def throughput(self, spread_s: float) -> float:
        return self._row(THROUGH, spread_s).tokens_per_s / self._row(DIRECT, spread_s).tokens_per_s

    def _row(self, way: str, spread_s: float) -> Row:
        return next(row for row in self.rows if (row.way, row.spread_s) == (way, spread_s))


def streams(
    *, number: int, rounds: int, folder: Path, tokens: int = TOKENS, say: Callable[[str], None] = print
) -> Report:
    key = make_key(folder)
    config = folder / "gateway.yaml"
    rows: dict[tuple[str, float], list[Row]] = {}
    with Engine.started(ttft_ms=5, itl_ms=1000 / TOKENS_A_SECOND) as engine:
        config.write_text(config_text([engine.port], server={"port": 0, "max_in_flight": number + 100}))
        with gateway(config, folder) as served:
            ways = {DIRECT: (engine.port, engine.pid), THROUGH: (served.port, served.pid)}
            for port, _ in ways.values():
                uvloop.run(open_streams(port, key, 20, tokens=tokens // 5, spread_s=0))
            for spread_s in SPREADS_S:
                for _ in range(rounds):
                    for way, (port, pid) in ways.items():
                        row = _measured(way, port, pid, key, number, tokens, spread_s)
                        rows.setdefault((way, spread_s), []).append(row)
                        say(f"{way}: first token p99 {row.first_p99_ms:.1f} ms, {row.tokens_per_s:.0f} tokens/s")
            peak = peak_rss_mb(served.pid)
    medians = [_median(each) for each in rows.values()]
    return Report(datetime.now(UTC).date().isoformat(), machine(), number, medians, peak)


def _measured(way: str, port: int, pid: int, key: str, number: int, tokens: int, spread_s: float) -> Row:
    cpu, own = cpu_s(pid), time.process_time()
    seen: Seen = uvloop.run(open_streams(port, key, number, tokens=tokens, spread_s=spread_s))
    return Row(
        way=way,
        spread_s=spread_s,
        first_p50_ms=seen.first_s[number // 2] * 1e3,
        first_p99_ms=seen.first_s[int(number * 0.99)] * 1e3,
        tokens_per_s=seen.tokens / seen.took_s,
        cpu_us=(cpu_s(pid) - cpu) / seen.tokens * 1e6,
        client_share=(time.process_time() - own) / seen.took_s,
    )


def _median(rows: Sequence[Row]) -> Row:
    first = rows[0]
    names = Row.__struct_fields__[2:]
    return Row(first.way, first.spread_s, *(statistics.median(getattr(row, name) for row in rows) for name in names))


def claims(report: Report) -> list[Claim]:
    """The targets, which are for arrivals over a second."""
    added, share = report.added_p99_ms(SPREADS_S[0]), report.throughput(SPREADS_S[0])
    return [
        Claim("added to the first token at p99: 20 ms at most", f"{added:.1f} ms", added <= 20),
        Claim("97 % of the rate of asking the engine itself", f"{share:.1%}", share >= 0.97),
        Claim("less than 200 MB", f"{report.peak_rss_mb:.0f} MB at most", report.peak_rss_mb < 200),
    ]
