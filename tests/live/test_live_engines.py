"""What a person does with an engine, done with each real one: start it, ask it, leave it, stop it. In this order."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import openai
import pytest

from tests.live.conftest import Live, keep, loads_of, processes_below

pytestmark = [
    pytest.mark.live,
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(sys.platform != "linux", reason="processes are counted in /proc"),
]

QUESTION = [{"role": "user", "content": "Tell me about the sea."}]
NUM_TOKENS = 24
SEEN_WITHIN_S = 10.0


@pytest.fixture
def client(gateway: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{gateway}/v1", api_key="none", max_retries=0, timeout=60)


def test_nothing_that_is_declared_is_contradicted(live: Live, request: pytest.FixtureRequest) -> None:
    report = live.probe()
    keep(request.config, report)
    assert {each.capability: each.evidence for each in report.contradicted} == {}
    assert report.engine == live.engine, report.recognised_by
    assert report.first_token_s is not None


def test_an_answer_in_one_piece_and_a_streamed_one_count_the_same(live: Live, client: openai.OpenAI) -> None:
    asked = {"model": live.model, "messages": QUESTION, "temperature": 0, "max_tokens": NUM_TOKENS}
    more = {"ignore_eos": True}
    with client:
        whole = client.chat.completions.create(**asked, extra_body=more)
        stream = client.chat.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}, extra_body=more
        )
        chunks = list(stream)
    pieces = [choice for chunk in chunks for choice in chunk.choices]
    text = "".join(choice.delta.content or "" for choice in pieces)
    assert whole.choices[0].message.content
    assert whole.choices[0].finish_reason == pieces[-1].finish_reason == "length"
    assert len([choice for choice in pieces if choice.delta.content]) > 1, "it came in pieces"
    assert text.split()[:3] == whole.choices[0].message.content.split()[:3]
    usages = [whole.usage, chunks[-1].usage]
    assert [usage.completion_tokens for usage in usages] == [NUM_TOKENS] * 2
    assert usages[0].prompt_tokens == usages[1].prompt_tokens > 0


def test_the_engine_falls_idle_when_the_gateways_client_has_left(
    live: Live, gateway: str, client: openai.OpenAI
) -> None:
    with client:
        stream = client.chat.completions.create(
            model=live.model, messages=QUESTION, stream=True, max_tokens=800, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        assert wait_for(lambda: loads_of(gateway)[0]["running"] == 1), f"never busy: {loads_of(gateway)}"
        stream.close()
    assert wait_for(lambda: loads_of(gateway)[0]["running"] == 0), f"still busy: {loads_of(gateway)}"


def wait_for(is_so: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + SEEN_WITHIN_S
    while time.monotonic() < deadline:
        if is_so():
            return True
        time.sleep(0.05)
    return False


def test_ctrl_c_ends_the_engine_and_everything_that_it_has_started(live: Live) -> None:
    before = processes_below(live.up.pid)
    assert before, "an engine is a process of its own"
    assert live.stop() == 0
    assert not {pid for pid in before if is_alive(pid)}


def is_alive(pid: int) -> bool:
    """A process that has ended and waits to be read is none any more."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
