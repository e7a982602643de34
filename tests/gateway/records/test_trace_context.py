"""A caller's trace goes on through the gateway to the engine, and what is no trace context goes nowhere."""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.records.ledger_files import FOLDER
from gateway.records.ledger_reader import LedgerReader
from gateway.records.trace_context import SAMPLED, Sampling, begin
from gateway.records.why import story
from tests.gateway.rig import HELLO, Reply, Script, Start, Upstream, model, until

UpstreamOf = Callable[[Script], Awaitable[Upstream]]

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN_ID = "00f067aa0ba902b7"
PARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"
OURS = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


def headers(*parents: str, state: tuple[str, ...] = ()) -> CIMultiDictProxy[str]:
    pairs = [*(("traceparent", each) for each in parents), *(("tracestate", each) for each in state)]
    return CIMultiDictProxy(CIMultiDict(pairs))


def state_of(*given: str) -> str:
    context = begin(headers(PARENT, state=given), Sampling())
    assert context is not None
    return context.state


def test_a_callers_trace_goes_on() -> None:
    context = begin(headers(PARENT, state=("vendor=a:b", "other@x=1")), Sampling())
    assert context is not None
    assert (context.trace_id, context.parent_id, context.flags) == (TRACE_ID, SPAN_ID, SAMPLED)
    assert context.state == "vendor=a:b,other@x=1"
    assert not context.is_recorded
    assert context.traceparent("1" * 16) == f"00-{TRACE_ID}-{'1' * 16}-01"


def test_a_later_version_is_read_as_far_as_we_know_it() -> None:
    context = begin(headers(f"cc-{TRACE_ID}-{SPAN_ID}-09-what-the-future-says"), Sampling())
    assert context is not None
    assert context.traceparent(SPAN_ID) == PARENT


@pytest.mark.replay("A53")
@pytest.mark.parametrize(
    "parents",
    [
        ("",),
        ("garbage",),
        ("0" * 10_000,),
        (f"{PARENT}\n{PARENT}",),
        (f"{PARENT}\n",),
        (PARENT.upper(),),
        (f"{PARENT}-more",),
        (f"ff-{TRACE_ID}-{SPAN_ID}-01",),
        (f"01-{TRACE_ID}-{SPAN_ID}-01.more",),
        (f"00-{'0' * 32}-{SPAN_ID}-01",),
        (f"00-{TRACE_ID}-{'0' * 16}-01",),
        (f"00-{TRACE_ID[:-1]}-{SPAN_ID}-01",),
        (f"00-{TRACE_ID}-{SPAN_ID}-1",),
        (f"00-{TRACE_ID}-{SPAN_ID}",),
        (f"００-{TRACE_ID}-{SPAN_ID}-01",),
        (PARENT, PARENT),
    ],
    ids=repr,
)
def test_a53_what_is_no_trace_context_is_replaced_by_a_new_trace(parents: tuple[str, ...]) -> None:
    context = begin(headers(*parents, state=("vendor=1",)), Sampling())
    assert context is not None
    assert re.fullmatch("[0-9a-f]{32}", context.trace_id)
    assert context.trace_id != TRACE_ID
    assert (context.parent_id, context.state, context.flags & SAMPLED) == ("", "", 0)


@pytest.mark.parametrize(
    "state",
    ["no member", "a=1,a=2", "UPPER=1", "a=", "a=b=c", "a=\x00", "a=é", f"a={'x' * 600}", "a=1\r\nx: y"],
    ids=repr,
)
def test_a_state_with_anything_wrong_in_it_is_forgotten_and_the_trace_kept(state: str) -> None:
    assert state_of(state) == ""


def test_empty_members_of_a_state_are_left_out() -> None:
    assert state_of("a=1, ,b=2 , ") == "a=1,b=2"
    assert state_of(",".join(f"k{number}=v" for number in range(32))).count("=") == 32
    assert state_of(",".join(f"k{number}=v" for number in range(33))) == ""


@given(st.lists(st.text(max_size=80), max_size=3), st.lists(st.text(max_size=80), max_size=3))
def test_whatever_comes_in_only_well_formed_headers_go_out(parents: list[str], state: list[str]) -> None:
    context = begin(headers(*parents, state=tuple(state)), Sampling(is_on=True))
    assert context is not None
    assert OURS.fullmatch(context.traceparent(SPAN_ID))
    assert context.state.isascii()
    assert context.state == "" or context.state.isprintable()


def test_without_a_callers_trace_and_without_an_exporter_there_is_none() -> None:
    assert begin(headers(), Sampling()) is None


@pytest.mark.parametrize(("share", "few", "many"), [(0.0, 0, 0), (0.25, 180, 320), (1.0, 1000, 1000)])
def test_of_traces_that_begin_here_a_share_is_recorded(share: float, few: int, many: int) -> None:
    contexts = [begin(headers(), Sampling(is_on=True, share=share)) for _ in range(1000)]
    recorded = [each for each in contexts if each is not None and each.is_recorded]
    assert few <= len(recorded) <= many
    assert all(each is not None and bool(each.flags & SAMPLED) == each.is_recorded for each in contexts)


@pytest.mark.parametrize(("flags", "is_recorded"), [("00", False), ("01", True), ("02", False), ("ff", True)])
def test_a_caller_decides_for_its_own_trace(flags: str, is_recorded: bool) -> None:
    context = begin(headers(f"00-{TRACE_ID}-{SPAN_ID}-{flags}"), Sampling(is_on=True, share=0.5))
    assert context is not None
    assert context.is_recorded == is_recorded


# ----------------------------------------------------------------------------------------------- through a real gateway


async def whole(reply: Reply) -> None:
    if reply.request.path.endswith("/embeddings"):
        body = b'{"data":[{"index":0,"embedding":[1.0]}],"usage":{"prompt_tokens":1}}'
        return await reply.status(200, body)
    return await reply.answer("a")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", HELLO),
        ("/v1/chat/completions", {**HELLO, "stream": True}),
        ("/v1/completions", {"model": "m", "prompt": "Hello"}),
        ("/v1/messages", {**HELLO, "max_tokens": 5}),
        ("/v1/responses", {"model": "m", "input": "Hello"}),
        ("/v1/embeddings", {"model": "m", "input": "Hello"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "stream" if value.get("stream") else "whole",
)
async def test_the_trace_reaches_the_engine(
    start: Start, upstream_of: UpstreamOf, path: str, body: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    engine = await upstream_of(whole)
    gateway = await start(model(engine.replica(embeddings=path.endswith("/embeddings"))))
    caplog.set_level(logging.INFO, "goodgate.access")
    sent = {"traceparent": PARENT, "tracestate": "vendor=1"}
    async with gateway.client.post(gateway.url + path, json=body, headers=sent) as response:
        await response.read()
    assert response.status == 200, await response.text()
    [request] = engine.requests
    assert request.headers["traceparent"] == PARENT  # no span of ours is recorded that could stand between the two
    assert request.headers["tracestate"] == "vendor=1"
    [line] = [vars(record)["fields"] for record in caplog.records if record.message == "request"]
    assert line["trace_id"] == TRACE_ID


async def test_an_engine_is_told_of_no_trace_where_there_is_none_even_on_a_kept_connection(
    start: Start, upstream_of: UpstreamOf
) -> None:
    engine = await upstream_of(whole)
    gateway = await start(model(engine.replica()))
    await gateway.post("/v1/chat/completions", HELLO, traceparent=PARENT)
    await gateway.chat()
    await gateway.post("/v1/chat/completions", HELLO, traceparent="garbage")
    told = [request.headers.get("traceparent") for request in engine.requests]
    assert told[:2] == [PARENT, None]
    fresh = OURS.fullmatch(told[2] or "")
    assert fresh is not None
    assert fresh[1] != TRACE_ID


async def test_the_ledger_knows_the_trace_of_a_request(start: Start, upstream_of: UpstreamOf, tmp_path: Path) -> None:
    engine = await upstream_of(whole)
    gateway = await start(model(engine.replica()))
    _, _, told = await gateway.post("/v1/chat/completions", HELLO, traceparent=PARENT)
    _, _, untold = await gateway.chat()
    reader = LedgerReader(tmp_path / FOLDER)
    await until(lambda: reader.find(untold["x-request-id"]) is not None)
    stories = []
    for headers_of_answer in (told, untold):
        found = reader.find(headers_of_answer["x-request-id"])
        assert found is not None
        stories.append(list(story(found.record, reader.usual(found.record))))
    assert f"trace {TRACE_ID}" in stories[0]
    assert not any(line.startswith("trace ") for line in stories[1])


async def test_several_prompts_go_on_in_the_same_trace(start: Start, upstream_of: UpstreamOf) -> None:
    engine = await upstream_of(whole)
    gateway = await start(model(engine.replica()))
    body = {"model": "m", "prompt": ["a", "b", "c"]}
    await gateway.post("/v1/completions", body, traceparent=PARENT)
    assert [request.headers["traceparent"] for request in engine.requests] == [PARENT] * 3
