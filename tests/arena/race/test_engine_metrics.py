"""The engine's own metrics: kept while they change, and never in a cell's way."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from arena.load.plan import Target
from arena.race.engine_metrics import Page, metric_rows, watched

TEXT = """# HELP running how many
# TYPE running gauge
running{model="m",note="a \\"b\\", c"} %d
tokens_total 7
latency_bucket{le="1"} 3
latency_count 3
broken line here
idle NaN
"""


async def watch(answers: list[web.Response], *, seconds: float = 0.35) -> tuple[list[Page], int]:
    """Pages that were seen, and how often the engine was asked. Its last answer is given for ever."""
    asked = 0

    async def metrics(request: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        answer = answers[min(asked, len(answers)) - 1]
        return web.Response(status=answer.status, text=answer.text, content_type=answer.content_type)

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        async with watched(Target(f"http://127.0.0.1:{port}", "m", "e"), every_s=0.05) as pages:
            await asyncio.sleep(seconds)
    finally:
        await runner.cleanup()
    return pages, asked


async def test_a_series_has_a_row_when_its_value_is_another_one() -> None:
    pages, asked = await watch([web.Response(text=TEXT % 1), web.Response(text=TEXT % 2)])
    assert asked >= 2
    rows = metric_rows(pages, pages[0].t_unix_ns)
    assert [(row.metric, row.value) for row in rows] == [
        ('running{model="m",note="a "b", c"}', 1),
        ("tokens_total", 7),
        ("latency_count", 3),
        ('running{model="m",note="a "b", c"}', 2),
    ]
    assert rows[0].t_ns == 0 < rows[-1].t_ns


@pytest.mark.parametrize(
    "answer",
    [web.Response(status=404), web.Response(status=401), web.Response(text="{}", content_type="application/json")],
)
async def test_an_engine_without_metrics_is_asked_once(answer: web.Response) -> None:
    assert await watch([answer]) == ([], 1)


async def test_nobody_at_the_address_is_no_error() -> None:
    async with watched(Target("http://127.0.0.1:1", "m", "e")) as pages:
        await asyncio.sleep(0.1)
    assert pages == []


async def test_a_page_that_fails_once_is_a_gap() -> None:
    pages, asked = await watch([web.Response(text=TEXT % 1), web.Response(status=500), web.Response(text=TEXT % 3)])
    assert asked >= 3
    values = [row.value for row in metric_rows(pages, 0) if row.metric.startswith("running")]
    assert values == [1, 3]


def test_a_cell_that_never_started_its_clock_has_no_rows() -> None:
    assert metric_rows([Page(1, ["running 1"])], None) == []
