"""Another Goodgate, or any server that speaks OpenAI as ours does.

It is also how the gateway talks to an engine that it has launched and whose own adapter works in process only.

Every field and every question is passed on. What the engine behind the peer cannot honour, the peer refuses, naming it.
"""

from __future__ import annotations

from typing import get_args

import msgspec

from adapters.types import INFORMATIONAL, ChatRequest, CompletionRequest, PartKind
from adapters.wire.openai_http import VLLM_ROUTES, HTTPOptions, OpenAIHTTPAdapter
from adapters.wire.openai_wire import Dialect

FIELDS = {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__}


class Adapter(OpenAIHTTPAdapter[HTTPOptions]):
    engine = "goodgate_peer"
    Options = HTTPOptions
    token_prompts = True
    side_routes = msgspec.structs.replace(VLLM_ROUTES, version="")  # a gateway has engines, and no version of one
    dialect = Dialect(
        parameters=frozenset(FIELDS - INFORMATIONAL - {"messages", "prompt"}), thought_field="reasoning_content"
    )

    def __init__(self, options: HTTPOptions) -> None:
        super().__init__(options)
        self.capabilities = msgspec.structs.replace(
            self.capabilities, embeddings=True, dimensions=True, parts=frozenset(get_args(PartKind))
        )
