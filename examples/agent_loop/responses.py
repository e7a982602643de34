"""An agent's loop through /v1/responses with OpenAI's own client: each turn builds on the one before by its id.

    goodgate serve                 # and beside it, with `pip install openai`:
    python examples/agent_loop/responses.py "What is the weather in Oslo?"

The first turn has to call a tool, the later ones may: a model as small as the default one decides badly.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import openai

URL = "http://127.0.0.1:8080"
MAX_TURNS = 5
WEATHER = {"Bergen": "rain, 11 degrees", "Oslo": "sun, 17 degrees", "Rome": "sun, 27 degrees"}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": list(WEATHER)}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "get_weather", "description": "The weather in a city, now.", "parameters": SCHEMA, "strict": True}
TOOLS: list[Any] = [{"type": "function", **FUNCTION}]


def main(question: str, url: str = URL) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    asked: Any = {"input": question, "tool_choice": "required"}
    print(f"user: {question}")
    for _ in range(MAX_TURNS):
        response = client.responses.create(model="default", max_output_tokens=100, temperature=0, tools=TOOLS, **asked)
        results = []
        for item in response.output:
            if item.type == "message":
                print(f"assistant: {response.output_text}")
            elif item.type == "function_call":
                print(f"call: {item.name}({item.arguments})")
                result = WEATHER[json.loads(item.arguments)["city"]]
                print(f"result: {result}")
                results.append({"type": "function_call_output", "call_id": item.call_id, "output": result})
        if not results:
            return
        asked = {"input": results, "previous_response_id": response.id}


if __name__ == "__main__":
    main(*sys.argv[1:] or ["What is the weather in Oslo?"])
