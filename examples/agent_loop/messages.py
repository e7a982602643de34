"""An agent's loop through /v1/messages with Anthropic's own client: the model calls a tool, and gets what it answers.

    goodgate serve                 # and beside it, with `pip install anthropic`:
    python examples/agent_loop/messages.py "What is the weather in Oslo?"

The first turn has to call a tool, the later ones may: a model as small as the default one decides badly.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import anthropic

URL = "http://127.0.0.1:8080"
MAX_TURNS = 5
WEATHER = {"Bergen": "rain, 11 degrees", "Oslo": "sun, 17 degrees", "Rome": "sun, 27 degrees"}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": list(WEATHER)}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"name": "get_weather", "description": "The weather in a city, now.", "input_schema": SCHEMA, "strict": True}
]


def main(question: str, url: str = URL) -> None:
    client = anthropic.Anthropic(base_url=url, api_key="none")
    history: list[Any] = [{"role": "user", "content": question}]
    print(f"user: {question}")
    choices: list[Any] = [{"type": "any"}, *[{"type": "auto"}] * (MAX_TURNS - 1)]
    for choice in choices:
        asked: Any = {"messages": history, "tools": TOOLS, "tool_choice": choice}
        message = client.messages.create(model="default", max_tokens=100, extra_body={"temperature": 0}, **asked)
        results = []
        for block in message.content:
            if block.type == "text":
                print(f"assistant: {block.text}")
            elif block.type == "tool_use":
                print(f"call: {block.name}({json.dumps(block.input)})")
                result = WEATHER[block.input["city"]]
                print(f"result: {result}")
                results.append({"type": "tool_result", "tool_use_id": block.id, "content": result})
        if not results:
            return
        history += [{"role": "assistant", "content": message.content}, {"role": "user", "content": results}]


if __name__ == "__main__":
    main(*sys.argv[1:] or ["What is the weather in Oslo?"])
