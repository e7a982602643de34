"""SGLang alone: its own route, on which text comes as all so far."""

from __future__ import annotations

from pathlib import Path

import pytest

from adapters.errors import (
    Overloaded,
    UnsupportedParameter,
)
from tests.contract import sglang_transcripts
from tests.contract.conftest import (
    chat,
    collect,
    completion,
)
from tests.contract.replay import engine, reasons_of, text_of
from tests.contract.twin import Reply, event, events


async def test_sglang_tells_only_what_is_new_where_it_was_started_so() -> None:
    async with engine("sglang", model="small", route="native", incremental_output=True) as (adapter, twin):
        new = [sglang_transcripts.native("a", 1), sglang_transcripts.native("b", 2, {"type": "stop", "matched": 2})]
        twin.reply("/generate", Reply.stream(events(new)))
        assert text_of(await collect(adapter, completion())) == "ab"


async def test_sglang_takes_token_ids_and_a_schema_on_its_own_route(text_model: Path) -> None:
    options = {"model": "small", "route": "native", "chat_template": str(text_model)}
    async with engine("sglang", **options) as (adapter, twin):
        twin.reply("/generate", Reply.stream(sglang_transcripts.NATIVE))
        await collect(adapter, completion(prompt=[5, 6], top_k=0))
        schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}
        await collect(adapter, chat(response_format=schema))
        await collect(adapter, chat(response_format={"type": "json_object"}))
        ids, with_schema, with_object = twin.bodies
        assert (ids["input_ids"], ids["sampling_params"]["top_k"]) == ([5, 6], -1)
        assert with_schema["sampling_params"]["json_schema"] == '{"type":"integer"}'
        assert with_object["sampling_params"]["json_schema"] == '{"type":"object"}'
        with pytest.raises(UnsupportedParameter, match="response_format"):
            await collect(adapter, chat(response_format={"type": "grammar"}))


async def test_sglang_gives_up_with_the_status_that_it_names() -> None:
    async with engine("sglang", model="small", route="native") as (adapter, twin):
        full = {"type": "abort", "message": "The request queue is full.", "status_code": 503}
        twin.reply("/generate", Reply.stream(event(sglang_transcripts.native("", 0, full))))
        with pytest.raises(Overloaded, match="queue is full"):
            await collect(adapter, completion())


@pytest.mark.replay("W05", "W26")
async def test_a_text_that_loses_its_stop_string_at_the_end_never_showed_it() -> None:
    """SGLang streams what may become a stop string, and trims it from the last event."""
    async with engine("sglang", model="small", route="native") as (adapter, twin):
        grown = [sglang_transcripts.native(text, n) for n, text in enumerate(("see", "see E", "see EN"), 1)]
        last = sglang_transcripts.native("see ", 4, {"type": "stop", "matched": "END"})
        twin.reply("/generate", Reply.stream(events([*grown, last])))
        chunks = await collect(adapter, completion(stop="END"))
        assert (text_of(chunks), reasons_of(chunks)) == ("see ", ["stop"])
