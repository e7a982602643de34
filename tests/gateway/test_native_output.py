"""The official client asks our own engine, over a socket, for what can be told and steered beside the text:
log-probabilities, biases, bad words, echoes, the best of several. The model has random weights, and each of its tokens
is a byte, so characters and stop strings are always torn apart.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.gateway import openai_schema
from tests.gateway.rig import Gateway, Start, model
from tests.native_engine.tiny_llama import EOS, write_tiny_chat_llama

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 60, "seed": 5}
PLAIN: dict[str, Any] = {"model": "m", "prompt": "Once upon é", "max_tokens": 60, "seed": 5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_chat_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def gateway(start: Start, folder: Path, native_home: Path) -> Gateway:
    options = {"model": str(folder), "home": str(native_home), "kv_cache_mib": 16, "num_threads": 1}
    return await start(model({"engine": "native", "options": options}))


def raw_of(content: Any) -> bytes:
    return b"".join(bytes(token.bytes) for token in content)


async def test_a_chats_log_probabilities_make_its_text_whole_and_streamed(gateway: Gateway) -> None:
    create = gateway.openai.chat.completions.create
    whole = (await create(**CHAT, logprobs=True, top_logprobs=3, n=2)).choices
    for choice in whole:
        assert choice.logprobs is not None
        content = choice.logprobs.content or []
        assert raw_of(content).decode(errors="replace").startswith(choice.message.content or "?")
        assert [len(token.top_logprobs) for token in content] == [3] * len(content)
        for token in content:
            assert token.logprob <= max(each.logprob for each in token.top_logprobs) <= 0
            assert bytes(token.bytes or []).decode(errors="backslashreplace") == token.token
    streamed: list[list[Any]] = [[], []]
    async for event in await create(**CHAT, logprobs=True, top_logprobs=3, n=2, stream=True):
        for piece in event.choices:
            streamed[piece.index] += (piece.logprobs and piece.logprobs.content) or []
    assert streamed == [choice.logprobs.content for choice in whole if choice.logprobs is not None]
    bare = (await create(**CHAT, logprobs=True)).choices[0]
    assert bare.message.content == whole[0].message.content
    assert bare.logprobs is not None
    assert {len(token.top_logprobs) for token in bare.logprobs.content or []} == {0}
    assert (await create(**CHAT)).choices[0].logprobs is None


async def test_a_completions_four_lists_lie_beside_its_text(gateway: Gateway) -> None:
    answer = await gateway.openai.completions.create(**PLAIN, logprobs=2)
    choice = answer.choices[0]
    told = choice.logprobs
    assert told is not None
    assert told.tokens is not None
    assert told.text_offset is not None
    assert told.top_logprobs is not None
    assert answer.usage is not None
    assert len(told.tokens) == len(told.token_logprobs or []) == answer.usage.completion_tokens
    for token, offset, top in zip(told.tokens, told.text_offset, told.top_logprobs, strict=True):
        assert token.startswith("bytes:") or choice.text[offset:].startswith(token) or token == "\ufffd"
        assert token in top
        assert 1 <= len(top) <= 3, "ids that no text uses are all written alike"
    none = (await gateway.openai.completions.create(**PLAIN, logprobs=0)).choices[0].logprobs
    assert none is not None
    assert none.token_logprobs == told.token_logprobs


async def test_a_stop_string_cuts_text_and_log_probabilities_at_one_place(gateway: Gateway) -> None:
    whole = (await gateway.openai.chat.completions.create(**CHAT, logprobs=True)).choices[0].message.content or ""
    stop = next(whole[at : at + 2] for at in range(8, 50) if "\ufffd" not in whole[at : at + 2])
    events = await gateway.openai.chat.completions.create(**CHAT, logprobs=True, stop=[stop], stream=True)
    text, content = "", []
    async for event in events:
        (piece,) = event.choices
        text += piece.delta.content or ""
        content += (piece.logprobs and piece.logprobs.content) or []
    assert text == whole[: whole.index(stop)]
    assert raw_of(content).decode(errors="replace") == text


@pytest.mark.skipif(openai_schema.FILE is None, reason="OpenAI's published schema (openai-openapi.yaml) is not here")
async def test_what_is_told_is_as_openais_schema_says(gateway: Gateway) -> None:
    for path, fields, schema in (
        ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2}, "CreateChatCompletionResponse"),
        ("/v1/completions", {**PLAIN, "logprobs": 2}, "CreateCompletionResponse"),
        ("/v1/completions", {**PLAIN, "best_of": 3, "n": 2}, "CreateCompletionResponse"),
    ):
        status, body, _ = await gateway.post(path, fields)
        assert status == 200
        openai_schema.check(schema, body)


async def test_a_bias_forces_a_token_and_bans_one(gateway: Gateway) -> None:
    create = gateway.openai.completions.create
    forced = (await create(**PLAIN, logit_bias={"70": 100}, logprobs=0)).choices[0]
    assert len(set(forced.text)) == 1
    assert forced.logprobs is not None
    assert max(forced.logprobs.token_logprobs or [0]) < 0, "log-probabilities are the model's, without the bias"
    banned = (await create(**PLAIN, logit_bias={"70": -100})).choices[0].text
    assert forced.text[0] not in banned


async def test_bad_words_never_come_and_other_choices_are_as_they_were(gateway: Gateway) -> None:
    text = (await gateway.openai.completions.create(**PLAIN)).choices[0].text
    words = [text[at : at + 2] for at in range(0, 40, 9) if "\ufffd" not in text[at : at + 2]]
    held = await gateway.openai.completions.create(**PLAIN, n=2, extra_body={"bad_words": words})
    assert words
    assert not any(word in choice.text for word in words for choice in held.choices)


async def test_an_echo_begins_with_the_prompt_and_tells_how_likely_it_was(gateway: Gateway) -> None:
    create = gateway.openai.completions.create
    plain = (await create(**PLAIN, logprobs=1)).choices[0]
    for asked in ({"n": 2}, {"stream": True}):
        if "stream" in asked:
            events = [event.choices[0] async for event in await create(**PLAIN, echo=True, logprobs=1, stream=True)]
            text = "".join(event.text for event in events)
            lists = [event.logprobs for event in events if event.logprobs is not None]
            offsets = [offset for each in lists for offset in each.text_offset or []]
            values = [value for each in lists for value in each.token_logprobs or []]
        else:
            choice = (await create(**PLAIN, echo=True, logprobs=1, n=2)).choices[0]
            assert choice.logprobs is not None
            text, offsets, values = choice.text, choice.logprobs.text_offset, choice.logprobs.token_logprobs
        assert text == PLAIN["prompt"] + plain.text
        assert plain.logprobs is not None
        assert values[0] is None
        assert all(isinstance(value, float) and value < 0 for value in values[1:])
        assert values[12:] == plain.logprobs.token_logprobs, "the prompt has 12 bytes"
        assert offsets[:13] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 10, 11]
        assert offsets[12:] == [11 + offset for offset in plain.logprobs.text_offset or []]
    bare = (await create(**PLAIN, echo=True)).choices[0]
    assert (bare.text, bare.logprobs) == (PLAIN["prompt"] + plain.text, None)
    ids = (await create(**{**PLAIN, "prompt": [72, 0, 73]}, echo=True, logprobs=0)).choices[0]
    assert ids.logprobs is not None
    assert ids.logprobs.text_offset is not None
    assert ids.text[1:].startswith("<|begin|>")
    assert ids.logprobs.text_offset[:4] == [0, 1, 10, 11]


async def test_the_best_of_several_is_the_one_whose_tokens_are_likeliest(gateway: Gateway) -> None:
    create = gateway.openai.completions.create
    fields = {**PLAIN, "temperature": 1.2, "extra_body": {"ignore_eos": True}}
    every = await create(**fields, n=4, logprobs=0)
    best = await create(**fields, n=2, best_of=4)
    means: dict[str, float] = {}
    for choice in every.choices:
        assert choice.logprobs is not None
        values = choice.logprobs.token_logprobs or []
        means[choice.text] = math.fsum(value for value in values if value is not None) / len(values)
    assert [choice.text for choice in best.choices] == sorted(means, key=lambda text: -means[text])[:2]
    assert [choice.index for choice in best.choices] == [0, 1]
    assert best.choices[0].logprobs is None
    assert best.usage is not None
    assert every.usage is not None
    assert best.usage.completion_tokens == every.usage.completion_tokens
    events = [event async for event in await create(**fields, best_of=4, stream=True)]
    assert "".join(event.choices[0].text for event in events) == best.choices[0].text


async def test_a_form_holds_whatever_the_bias_and_the_bad_words_say(gateway: Gateway) -> None:
    schema = {"type": "array", "items": {"enum": ["red", "blue"]}, "minItems": 3, "maxItems": 3}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    fields = {**CHAT, "response_format": wanted, "logprobs": True, "top_logprobs": 1, "temperature": 0}
    for token in (40, 70, 90):
        answer = await gateway.openai.chat.completions.create(**fields, logit_bias={str(token): 100})
        assert set(answer.choices[0].message.content or "") <= set('["red",blu] \n\t\r')
    held = await gateway.openai.chat.completions.create(**fields, extra_body={"bad_words": ["r"]})
    assert "r" not in (held.choices[0].message.content or "")
    both = await gateway.openai.chat.completions.create(**fields, extra_body={"bad_words": ["r", "b"]})
    assert set(both.choices[0].message.content or "") <= set('["red",blu] \n\t\r'), "the form goes before"


BAD_CHATS: dict[str, tuple[dict[str, Any], str, str]] = {
    "top_logprobs without logprobs": ({"top_logprobs": 2}, "top_logprobs", "logprobs: true"),
    "21 alternatives": ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
    "a bias beyond the range": ({"logit_bias": {"5": 100.5}}, "logit_bias", "100"),
    "a bias of a token that there is none of": ({"logit_bias": {"320": 1}}, "logit_bias", "319"),
    "a token twice": ({"logit_bias": {"5": 1, "05": 2}}, "logit_bias", "twice"),
    "an empty bad word": ({"bad_words": [""]}, "bad_words", "1"),
    "bad words that are one text": ({"bad_words": "x"}, "bad_words", "array"),
    "129 bad words": ({"bad_words": ["x"] * 129}, "bad_words", "128"),
    "echo of a chat": ({"echo": True}, "echo", "echo"),
    "best of several chats": ({"best_of": 2}, "best_of", "best_of"),
}
BAD_COMPLETIONS: dict[str, tuple[dict[str, Any], str, str]] = {
    "six alternatives": ({"logprobs": 6}, "logprobs", "5"),
    "a switch for a number": ({"logprobs": True}, "logprobs", "int"),
    "best of fewer than are wanted": ({"best_of": 1, "n": 2}, "best_of", "at least `n` (2)"),
    "best of nine": ({"best_of": 9}, "best_of", "8"),
    "a suffix": ({"suffix": "x"}, "suffix", "suffix"),
    "a switch of a chat": ({"top_logprobs": 2}, "top_logprobs", "top_logprobs"),
}


async def test_what_makes_no_sense_is_refused_by_name_and_nothing_else_suffers(gateway: Gateway) -> None:
    for path, plain, cases in (
        ("/v1/chat/completions", CHAT, BAD_CHATS),
        ("/v1/completions", PLAIN, BAD_COMPLETIONS),
    ):
        for case, (fields, param, words) in cases.items():
            status, body, _ = await gateway.post(path, {**plain, **fields})
            assert status == 400, (case, body)
            assert body["error"]["param"] == param, (case, body)
            assert words in body["error"]["message"], (case, body)
    assert (await gateway.openai.completions.create(**PLAIN)).choices[0].text


async def test_the_end_of_text_is_an_alternative_by_its_name(gateway: Gateway) -> None:
    fields = {**CHAT, "temperature": 0, "logprobs": True, "top_logprobs": 20}
    answer = await gateway.openai.chat.completions.create(**fields)
    assert answer.choices[0].logprobs is not None
    names = {
        each.token: bytes(each.bytes or [])
        for token in answer.choices[0].logprobs.content or []
        for each in token.top_logprobs
    }
    assert names.get(EOS, EOS.encode()) == EOS.encode()
    assert isinstance(answer, openai.types.chat.ChatCompletion)
