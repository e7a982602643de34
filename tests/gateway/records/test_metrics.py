"""What is counted: every metric stands in the one table, every label is bounded, and the numbers are those of the
requests."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from adapters.base import Load
from adapters.fake import Adapter as FakeAdapter
from adapters.marked_page import placed
from gateway.config import Live, parse_config
from gateway.records.metric_table import LABELS, MAX_SERIES, METRICS, OTHER, Label, as_markdown
from gateway.records.metrics import Bounded, Metrics
from gateway.records.trace import Trace
from gateway.replicas.fleet import Fleet
from gateway.replicas.health import probe
from gateway.tenants.keys import KeyStore, NewKey
from gateway.web.guard import GUARD
from scripts.metrics_page import PAGE
from tests.gateway.rig import Gateway, Reply, Script, Start, Upstream, fake, fake_model, model, until
from tests.gateway.routing.test_evidence import NATIVE, document, write


class TellingEngine(FakeAdapter):
    """A fake that tells all of its load."""

    async def load(self) -> Load:
        return Load(3, 2, 0.25, prefix_hit_rate=0.5, draft_tokens=8, accepted_draft_tokens=5)


async def scrape(gateway: Gateway, **headers: str) -> str:
    async with gateway.client.get(f"{gateway.url}/metrics", headers=headers) as response:
        assert response.status == 200
        return await response.text()


def value(text: str, series: str) -> float:
    [found] = re.findall(rf"^{re.escape(series)} (\S+)$", text, re.MULTILINE)
    return float(found)


def a_fleet() -> Fleet:
    return Fleet(Live(parse_config({"models": [fake_model()]})), find_adapter=lambda _: FakeAdapter, home=Path())


def metrics_of() -> Metrics:
    return Metrics(a_fleet())


async def test_a_gateway_has_the_metrics_of_the_table_and_no_others(start: Start, tmp_path: Path) -> None:
    raced = datetime.now(UTC).isoformat()
    write(tmp_path / "evidence.json", document({**NATIVE, "version": None}, measured_utc=raced))
    launched = {"engine": "fake", "launch": True, "model": "any"}
    gateway = await start(
        model({**fake(), "engine": "telling"}, fake("native")),
        model(launched, name="n"),
        model(fake(ttft_ms=50), name="narrow", admission={"max_running": 1, "max_waiting": 1}),
        model(launched, name="seldom", load="on_demand"),
        model({**launched, "engine": "native", "model": "absent"}, name="never", load="on_demand"),
        model(fake(fail_rate=1), name="broken"),
        model(fake("one", ttft_ms=60), fake("two", ttft_ms=60), name="late", hedge={"after": 1}),
        engines={"telling": TellingEngine},
        evidence=str(tmp_path / "evidence.json"),
        tracing={"exporter": "otlp", "sample": 0.0},  # so that nothing is sent
        retries={"floor": 1},
        is_ready=False,
    )
    await until(lambda: gateway.fleet.models["m"].is_ready)
    assert (await gateway.chat())[0] == 200
    assert await gateway.events()
    assert (await gateway.chat(model="nobody's"))[0] == 404
    narrow = await asyncio.gather(*(gateway.chat(model="narrow") for _ in range(3)))
    assert sorted(status for status, _, _ in narrow) == [200, 200, 503]
    assert (await gateway.chat(model="seldom"))[0] == 200
    assert (await gateway.chat(model="never"))[0] == 503
    assert (await gateway.post("/admin/reload", b""))[0] == 200
    assert (await gateway.chat(model="broken"))[0] == 502
    assert (await gateway.chat(model="late"))[0] == 200
    gateway.source.data["overload"] = {"memory_mib": 64}  # it has more already
    assert (await gateway.post("/admin/reload", b""))[0] == 200
    await until(lambda: gateway.app[GUARD].resource == "memory")
    assert (await gateway.chat())[0] == 503
    for replica in gateway.fleet.replicas:
        await probe(gateway.fleet, replica, 5)
    families = {family.name: family for family in text_string_to_metric_families(await scrape(gateway))}
    families = {name: family for name, family in families.items() if not name.endswith("_created")}
    assert set(families) == {metric.name for metric in METRICS}
    for metric in METRICS:
        family = families[metric.name]
        assert (family.type, family.documentation) == (metric.kind, metric.help)
        # What breaks off and can be continued needs native engines: tests/gateway/attempts/test_continuation.py.
        assert family.samples or metric.name == "goodgate_continuations", f"{metric.name} is counted by nothing"
        labels = {*metric.labels, *(["le"] if metric.kind == "histogram" else [])}
        assert all(set(sample.labels) <= labels for sample in family.samples)


def test_the_page_is_the_table() -> None:
    assert PAGE.read_text() == placed(PAGE.read_text(), "metrics", as_markdown()), "run `make matrix`"


def test_rows_are_written_as_prometheus_wants_them() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    assert {label for metric in METRICS for label in metric.labels} == set(LABELS), "a label without a row, or unused"
    for metric in METRICS:
        assert re.fullmatch(r"goodgate_[a-z_]+(?<!_total)", metric.name)
        assert metric.help.endswith("."), metric.name
        assert bool(metric.buckets) == (metric.kind == "histogram")
        assert list(metric.buckets) == sorted(metric.buckets)
        assert metric.kind != "histogram" or metric.name.endswith("_seconds")


def test_a_metric_that_is_not_in_the_table_cannot_be_counted() -> None:
    metrics = metrics_of()
    with pytest.raises(KeyError):
        metrics.add("goodgate_invented")
    with pytest.raises(ValueError):
        metrics.add("goodgate_errors", "m")  # a label is missing


@pytest.mark.replay("G38")
def test_g38_ten_thousand_invented_names_of_every_kind_stay_within_the_caps() -> None:
    metrics = metrics_of()
    for number in range(10_000):
        metrics.answered(
            Trace(
                request_id="r", route=f"/{number}", status=number, code=f"code-{number}", model=f"model-{number}",
                prompt_tokens=1, cached_tokens=0,
            )
        )  # fmt: skip
        metrics.add("goodgate_tenant_tokens", f"tenant-{number}", "m", "prompt")
    families = {family.name: family for family in text_string_to_metric_families(metrics.render().decode())}
    for metric in METRICS:
        series = {
            tuple(sorted((label, value) for label, value in sample.labels.items() if label != "le"))
            for sample in families[metric.name].samples
        }
        assert len(series) <= MAX_SERIES + 1
        for label in metric.labels:
            assert len({dict(each)[label] for each in series}) <= LABELS[label].cap + 1
    tenants = [
        sample.value for sample in families["goodgate_tenant_tokens"].samples if sample.labels["tenant"] == OTHER
    ]
    num_known = LABELS["tenant"].cap - 1  # "anonymous" has come first
    assert sum(tenants) == 10_000 - num_known  # nothing is lost: the rest is counted as one


def test_the_first_values_are_kept_and_the_rest_is_other() -> None:
    bound = Bounded(Label("anywhere", cap=2))
    assert [bound(value) for value in ("a", "b", "c", "a", "d", OTHER)] == ["a", "b", OTHER, "a", OTHER, OTHER]


@pytest.mark.replay("G38")
async def test_g38_an_engine_that_names_its_own_error_codes_makes_no_series(
    start: Start, upstream_of: Callable[[Script], Awaitable[Upstream]]
) -> None:
    async def script(reply: Reply) -> None:
        error = {"message": "no", "type": f"type-{reply.number}", "code": f"code-{reply.number}"}
        await reply.status(500 + reply.number, json.dumps({"error": error}).encode())

    upstream = await upstream_of(script)
    gateway = await start(model(upstream.replica()))
    for _ in range(20):
        await gateway.chat()
    text = await scrape(gateway)
    assert upstream.num_generations >= 20
    assert "code-" not in text
    assert "type-" not in text
    assert len(set(re.findall(r'code="([^"]+)"', text))) <= 6


async def test_time_per_output_token_leaves_the_first_token_out(start: Start) -> None:
    gateway = await start(fake_model(ttft_ms=100, itl_ms=20, tokens=6))
    await gateway.events()
    await gateway.chat(n=2)
    await gateway.chat(max_tokens=1)  # has no token after the first
    text = await scrape(gateway)
    labels = '{engine="fake",model="m",replica="fake-0"}'
    assert value(text, f"goodgate_time_per_output_token_seconds_count{labels}") == 2
    mean_s = value(text, f"goodgate_time_per_output_token_seconds_sum{labels}") / 2
    assert 0.018 <= mean_s < 0.1
    assert value(text, 'goodgate_wait_seconds_count{model="m"}') == 3


async def test_tokens_are_counted_by_tenant(start: Start, tmp_path: Path) -> None:
    secret = KeyStore(tmp_path).create(NewKey(name="alice", tenant="blue"))
    admin = KeyStore(tmp_path).create(NewKey(name="root", role="admin"))
    gateway = await start(fake_model(tokens=4))
    status, body, _ = await gateway.post(
        "/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}, **{"x-api-key": secret}
    )
    assert status == 200
    text = await scrape(gateway, **{"x-api-key": admin})
    prompt_tokens = body["usage"]["prompt_tokens"]
    assert value(text, 'goodgate_tenant_tokens_total{kind="prompt",model="m",tenant="blue"}') == prompt_tokens
    assert value(text, 'goodgate_tenant_tokens_total{kind="completion",model="m",tenant="blue"}') == 4
    assert value(text, 'goodgate_prefix_tokens_total{model="m",reuse="miss",tenant="blue"}') == prompt_tokens
