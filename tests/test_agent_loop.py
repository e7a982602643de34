"""Agents' loops against the default model, as `goodgate serve` brings it: the examples, and two kits' own runners.

The model is far too small to be asked for good answers. What is asserted is the loop: the first turn calls a tool with
arguments that fit, its result goes back, and a text ends it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import agents
import anthropic
import openai
import pytest
from anthropic import beta_tool

from adapters.config import goodgate_home
from adapters.models.model_store import DEFAULT_MODEL, ModelStore
from tests.gateway.commands.test_commands import await_ready, running

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/agents.md"
STEP = re.compile(r"^(user|call|result|assistant): ", re.MULTILINE)
TRANSCRIPT = re.compile(r'^\$ python (examples/agent_loop/\w+\.py) "([^"\n]*)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)
WEATHER = {"Bergen": "rain, 11 degrees", "Oslo": "sun, 17 degrees", "Rome": "sun, 27 degrees"}
QUESTION = "What is the weather in Oslo?"
EXAMPLES = sorted(path.name for path in (ROOT / "examples/agent_loop").glob("*.py"))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The default configuration, on a port of its own."""
    store = ModelStore(goodgate_home())
    if DEFAULT_MODEL not in [each.name for each in store.list()]:
        store.pull(DEFAULT_MODEL)
    with running(ROOT / "configs/local.yaml", "--port", "0", home=goodgate_home()) as (_, url):
        await_ready(url)
        yield url


def check_transcript(text: str, question: str) -> None:
    """One loop: the question, calls with their results, and the answer."""
    parts = STEP.split(text)[1:]
    steps = [(kind, said.strip()) for kind, said in zip(parts[::2], parts[1::2], strict=True)]
    kinds = [kind for kind, _ in steps]
    assert steps[0] == ("user", question)
    assert kinds[1:3] == ["call", "result"], text
    assert kinds[-1] == "assistant", text
    assert steps[-1][1], "the answer is empty"
    for (kind, said), (_, result) in pairwise(steps):
        if kind == "call":
            called = re.fullmatch(r"get_weather\((.*)\)", said)
            assert called is not None, said
            arguments = json.loads(called[1])
            assert set(arguments) == {"city"}
            assert result == WEATHER[arguments["city"]]


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_its_loop_against_the_default_model(url: str, name: str) -> None:
    command = [sys.executable, f"examples/agent_loop/{name}", QUESTION, url]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stderr
    check_transcript(ended.stdout, QUESTION)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_page_shows_a_transcript_of_each_example(name: str) -> None:
    shown = {file: (question, text) for file, question, text in TRANSCRIPT.findall(PAGE.read_text())}
    question, text = shown[f"examples/agent_loop/{name}"]
    check_transcript(text, question)


@pytest.mark.model
@pytest.mark.slow
def test_anthropics_tool_runner_goes_round_with_the_default_model(url: str) -> None:
    asked_for = []

    @beta_tool
    def get_weather(city: Literal["Bergen", "Oslo", "Rome"]) -> str:
        """The weather in a city."""
        asked_for.append(city)
        return WEATHER[city]

    with anthropic.Anthropic(base_url=url, api_key="none") as client:
        runner = client.beta.messages.tool_runner(
            model="default",
            max_tokens=100,
            tools=[get_weather],
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
            messages=[{"role": "user", "content": QUESTION}],
            max_iterations=2,  # every turn has to call here
            stream=True,
            extra_body={"temperature": 0},
        )
        turns = [stream.get_final_message() for stream in runner]
    assert [turn.stop_reason for turn in turns] == ["tool_use", "tool_use"]
    assert len(asked_for) >= 1
    assert set(asked_for) <= set(WEATHER)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize(
    ("face", "is_stream"), [(agents.OpenAIResponsesModel, True), (agents.OpenAIChatCompletionsModel, False)]
)
async def test_the_agents_kit_goes_round_with_the_default_model(url: str, face: Any, is_stream: bool) -> None:
    asked_for = []

    @agents.function_tool
    def get_weather(city: str) -> str:
        """The weather in a city."""
        asked_for.append(city)
        return "sun, 17 degrees"

    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        agent = agents.Agent(
            name="Forecaster",
            instructions="Answer with the weather.",
            model=face(model="default", openai_client=client),
            tools=[get_weather],
            model_settings=agents.ModelSettings(tool_choice="required", temperature=0, max_tokens=60),
        )  # the kit forces the first call only
        config = agents.RunConfig(tracing_disabled=True)
        if is_stream:
            result: Any = agents.Runner.run_streamed(agent, QUESTION, run_config=config, max_turns=4)
            kinds = [event.type async for event in result.stream_events()]
            assert "raw_response_event" in kinds
        else:
            result = await agents.Runner.run(agent, QUESTION, run_config=config, max_turns=4)
    assert [item.type for item in result.new_items][:2] == ["tool_call_item", "tool_call_output_item"]
    assert len(asked_for) >= 1
    assert result.final_output
