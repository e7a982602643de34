"""Another Goodgate, or any server that speaks OpenAI as ours does.

It is also how the gateway talks to an engine that it has launched and whose own adapter works in process only.

Every field is passed on. What the engine behind the peer cannot honour, the peer refuses, naming it.
"""

from __future__ import annotations

from adapters.openai_http import HTTPOptions, OpenAIHTTPAdapter
from adapters.openai_wire import Dialect
from adapters.types import INFORMATIONAL, ChatRequest, CompletionRequest

FIELDS = {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__}


class Adapter(OpenAIHTTPAdapter[HTTPOptions]):
    engine = "goodgate_peer"
    Options = HTTPOptions
    token_prompts = True
    dialect = Dialect(parameters=frozenset(FIELDS - INFORMATIONAL - {"messages", "prompt"}))
