"""Another Goodgate, or any server that speaks OpenAI as ours does.

It is also how the gateway talks to an engine that it has launched and whose own adapter works in process only.

Every field and every question is passed on. What the engine behind the peer cannot honour, the peer refuses, naming it.

- A peer that asks for keys sees one tenant in us, whoever our own are. With `tells_tenants` it learns which of them a
  request is for, by a header with his cache salt, and keeps them apart as far as its engines do. It takes that from
  callers with an admin's key, or where it asks for none; from anyone else it refuses it.
- A peer whose engines are native ones can go on with an answer that another has begun (`continues: true`).
"""

from __future__ import annotations

from typing import ClassVar, get_args

import msgspec

from adapters.types import (
    INFORMATIONAL,
    SALT_HEADER,
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    PartKind,
    Route,
)
from adapters.wire.engine_client import Exchange
from adapters.wire.openai_http import VLLM_ROUTES, HTTPOptions, OpenAIHTTPAdapter
from adapters.wire.openai_wire import Dialect

FIELDS = {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__}


class PeerOptions(HTTPOptions):
    tells_tenants: bool = False  # the peer is told by their cache salts which requests are of one tenant
    continues: bool = False  # its engines tell token ids, and go on with what others have begun


class Adapter(OpenAIHTTPAdapter[PeerOptions]):
    engine = "goodgate_peer"
    hosted = None
    Options: ClassVar[type[PeerOptions]] = PeerOptions
    token_prompts = True
    side_routes = msgspec.structs.replace(VLLM_ROUTES, version="")  # a gateway has engines, and no version of one
    dialect = Dialect(
        parameters=frozenset(FIELDS - INFORMATIONAL - {"messages", "prompt", "continuation"}),
        thought_field="reasoning_content",
        usage_so_far=True,
    )

    def __init__(self, options: PeerOptions) -> None:
        if options.continues:
            with_ids = self.dialect.parameters | {"continuation"}
            self.dialect = msgspec.structs.replace(self.dialect, parameters=with_ids)
        super().__init__(options)
        self.capabilities = msgspec.structs.replace(
            self.capabilities,
            embeddings=True,
            dimensions=True,
            parts=frozenset(get_args(PartKind)),
            cache_salt=frozenset(get_args(Route) if options.tells_tenants else ()),
        )

    async def exchange(self, request: GenerateRequest, request_id: str) -> Exchange:
        exchange = await super().exchange(request, request_id)
        if request.salt is None or not self.options.tells_tenants:
            return exchange
        return msgspec.structs.replace(exchange, headers={SALT_HEADER: request.salt})
