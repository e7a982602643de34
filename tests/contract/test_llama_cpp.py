"""llama.cpp alone: defaults that are its own, a seed of 32 bits, log-probabilities in chat's shape."""

from __future__ import annotations

import json
from typing import Any

import pytest

from adapters.errors import EngineFailed, InvalidRequest
from adapters.registry import adapter_class
from adapters.types import ChatRequest, CompletionRequest
from tests.contract.conftest import (
    COMPLETIONS,
    chat,
    collect,
    completion,
)
from tests.contract.replay import engine
from tests.contract.twin import Reply, events


def llama_body(request: ChatRequest | CompletionRequest) -> dict[str, Any]:
    cls = adapter_class("llama_cpp")
    body: dict[str, Any] = cls(cls.Options(url="http://127.0.0.1:1")).body(request, "small")  # type: ignore[attr-defined]
    return body


def test_llama_cpp_never_samples_by_its_own_defaults() -> None:
    body = llama_body(chat())
    assert {name: body[name] for name in ("temperature", "top_p", "top_k", "min_p", "repeat_penalty")} == {
        "temperature": 1, "top_p": 1, "top_k": 0, "min_p": 0, "repeat_penalty": 1,
    }  # fmt: skip
    assert llama_body(chat(temperature=0, top_p=0.5))["temperature"] == 0


def test_llama_cpp_penalties_look_back_over_everything() -> None:
    assert "repeat_last_n" not in llama_body(chat(presence_penalty=0))
    for field in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
        assert llama_body(chat(**{field: 1.5}))["repeat_last_n"] == 131_072
    assert llama_body(chat(repetition_penalty=1.5))["repeat_penalty"] == 1.5


@pytest.mark.parametrize(("seed", "sent"), [(7, 7), (-1, 0), (2**32 - 1, 0), (2**32 + 5, 5), (-(2**63), 0)])
def test_llama_cpp_gets_a_seed_of_32_bits_that_never_means_random(seed: int, sent: int) -> None:
    assert llama_body(chat(seed=seed))["seed"] == sent


def test_llama_cpp_has_top_k_off_at_zero() -> None:
    assert [llama_body(chat(top_k=top_k))["top_k"] for top_k in (-1, 0, 40)] == [0, 0, 40]


def test_llama_cpp_is_asked_for_at_least_one_alternative_so_that_logprobs_come() -> None:
    assert "logprobs" not in llama_body(chat())
    assert llama_body(chat(logprobs=True))["top_logprobs"] == 1
    assert llama_body(chat(logprobs=True, top_logprobs=3))["top_logprobs"] == 3
    assert llama_body(completion(logprobs=0))["logprobs"] == 1
    assert llama_body(completion(logprobs=4))["logprobs"] == 4


@pytest.mark.replay("W15")
async def test_llama_cpp_logprobs_of_completions_come_out_in_the_shape_of_completions() -> None:
    def piece(text: str, reason: str | None, alternatives: Any) -> dict[str, Any]:
        content = [{"token": text, "logprob": -0.5, "bytes": [1], "top_logprobs": alternatives}]
        return {"choices": [{"index": 0, "text": text, "logprobs": {"content": content}, "finish_reason": reason}]}

    async with engine("llama_cpp", model="small") as (adapter, twin):
        stream = [piece("Hel", None, [{"token": "Hel", "logprob": -0.5}]), piece("lo", "stop", None)]
        twin.reply(COMPLETIONS, Reply.stream(events(stream)))
        first, second, _ = await collect(adapter, completion(logprobs=1))
        assert [json.loads(bytes(chunk.logprobs or b"null")) for chunk in (first, second)] == [
            {"tokens": ["Hel"], "token_logprobs": [-0.5], "top_logprobs": [{"Hel": -0.5}], "text_offset": [0]},
            {"tokens": ["lo"], "token_logprobs": [-0.5], "top_logprobs": [{}], "text_offset": [3]},
        ]


@pytest.mark.parametrize(
    "words", ["vector::_M_range_check: __n (which is 50000) >= this->size() (which is 49152)", "vector"]
)
async def test_an_id_that_llama_cpp_stumbles_over_is_the_callers_fault(words: str) -> None:
    async with engine("llama_cpp", model="small") as (adapter, twin):
        reply = Reply.plain(500, {"error": {"code": 500, "message": words, "type": "server_error"}})
        twin.reply("/detokenize", reply, Reply.plain(500, {"error": {"code": 500, "message": "out of luck"}}))
        with pytest.raises(InvalidRequest, match="no token 50000") as caught:
            await adapter.detokenize([5, 50000])
        assert caught.value.param == "tokens"
        with pytest.raises(EngineFailed, match="out of luck"):
            await adapter.detokenize([5])
