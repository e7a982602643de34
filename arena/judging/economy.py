"""What an engine's tokens cost at its goodput: in joules, where a counter could be read, and in money, where a price is
given.

    price = price_of("vllm", scenario.cost)
    economy = economy_of(store, cell_ids, price)        # cells at the headline rate

Tokens and joules are those of the same window: what was delivered and what the counters advanced from the end of the
warm-up to the end of the measured part, whoever's request it was. Joules are of whole packages and cards, their idle
share included, since a machine that serves one engine takes that too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from arena.race.scenario import Cost
from arena.records.store import Store

HOUR_S = 3600


class Price(Struct, frozen=True):
    per_hour: float
    currency: str


class Economy(Struct, frozen=True, kw_only=True):
    """None: not readable, or not given. Output tokens count."""

    tokens_per_s: float
    joules_per_token: float | None = None
    tokens_per_joule: float | None = None
    energy_sources: tuple[str, ...] = ()
    price_per_hour: float | None = None
    currency: str | None = None
    tokens_per_money: float | None = None


def economy_of(store: Store, cell_ids: Sequence[str], price: Price | None) -> Economy | None:
    """None where the cells delivered nothing in their windows."""
    windows = [_window(store, cell_id) for cell_id in cell_ids]
    tokens, seconds = sum(window["tokens"] for window in windows), sum(window["seconds"] for window in windows)
    if not tokens:
        return None
    joules = [joules_in(store, window) for window in windows]
    known = [(window["tokens"], sum(each.values())) for window, each in zip(windows, joules, strict=True) if each]
    spent, bought = sum(j for _, j in known), sum(t for t, _ in known)
    tokens_per_s = tokens / seconds
    return Economy(
        tokens_per_s=round(tokens_per_s, 2),
        joules_per_token=round(spent / bought, 4) if spent and bought else None,
        tokens_per_joule=round(bought / spent, 4) if spent and bought else None,
        energy_sources=tuple(sorted({source for each in joules for source in each})),
        price_per_hour=price.per_hour if price else None,
        currency=price.currency if price else None,
        tokens_per_money=round(tokens_per_s * HOUR_S / price.per_hour, 1) if price and price.per_hour else None,
    )


def joules_in(store: Store, window: Mapping[str, Any]) -> dict[str, float]:
    """By source: how far each counter advanced in the window; empty where one of them does not cover it."""
    if not store.query("SELECT 1 AS one FROM duckdb_tables() WHERE table_name = 'energy'"):
        return {}  # a race from before energy was noted
    rows = store.query(
        "SELECT source, t_unix_ns, joules FROM energy WHERE cell_id = ? ORDER BY t_unix_ns", [window["cell_id"]]
    )
    found = {}
    for source in sorted({row["source"] for row in rows}):
        times = np.array([row["t_unix_ns"] for row in rows if row["source"] == source], dtype=np.int64)
        values = [row["joules"] for row in rows if row["source"] == source]
        edges = np.array([window["from_ns"], window["to_ns"]], dtype=np.int64)
        if times[0] > edges[0] or times[-1] < edges[1]:
            return {}
        # From the first sample on: 2^63 nanoseconds are more than a double can tell apart.
        low, high = np.interp((edges - times[0]).astype(float), (times - times[0]).astype(float), values)
        found[source] = float(high - low)
    return found


def price_of(engine: str, cost: Cost | None) -> Price | None:
    """`cost` is the scenario's: one price for all, or one for each engine by name."""
    if cost is None:
        return None
    per_hour = cost.per_hour.get(engine) if isinstance(cost.per_hour, dict) else cost.per_hour
    return None if per_hour is None else Price(float(per_hour), cost.currency)


def _window(store: Store, cell_id: str) -> dict[str, Any]:
    """A request's tokens are spread over its events, as engines do that send several an event and do not say so."""
    rows = store.query(
        """
        WITH w AS (
            SELECT cell_id, p.warmup_ns AS lo, p.horizon_ns AS hi, epoch_unix_ns AS epoch
            FROM cells JOIN plans AS p USING (plan_sha256) WHERE cell_id = ?
        ),
        e AS (
            SELECT seq, count(*) FILTER (WHERE t >= lo AND t < hi) / count(*) AS inside
            FROM (SELECT seq, unnest(t_ns) AS t, lo, hi FROM token_events JOIN w USING (cell_id)) GROUP BY seq
        )
        SELECT any_value(w.cell_id) AS cell_id, coalesce(sum(r.n_out * e.inside), 0) AS tokens,
            any_value(hi - lo) / 1e9 AS seconds, any_value(epoch + lo) AS from_ns, any_value(epoch + hi) AS to_ns
        FROM w LEFT JOIN v_requests AS r USING (cell_id) LEFT JOIN e USING (seq)
        """,
        [cell_id],
    )
    return rows[0]
