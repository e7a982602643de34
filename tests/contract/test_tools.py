"""Tool calls on every wire: deltas in each engine's accent, and calls that a text engine's model writes as text."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from adapters.base import EngineAdapter
from adapters.conformance import conforming
from adapters.errors import EngineProtocolError, EngineUnavailable, InvalidRequest, UnsupportedParameter
from adapters.registry import adapter_class
from adapters.tools.tool_calls import TOOL_FIELDS, CallChunks, offered, with_tool_calls
from adapters.types import Chunk, Usage
from tests.contract.conftest import CHAT, HTTP_ENGINES, GenerateSubject, HTTPSubject, chat, collect
from tests.contract.replay import answer, engine, reasons_of, text_of
from tests.contract.sglang_transcripts import native
from tests.contract.tgi_transcripts import details, token
from tests.contract.tool_formats import NOW, ROME, TIME, TOOLS, WEATHER, Call, template, told, write_tool_model, written
from tests.contract.twin import Reply, Twin, events
from tests.gateway.rig import Start, fake_model, model, start  # `start` is a fixture
from tests.native_engine.tiny_llama import tiny_config, write_tiny_llama

__all__ = ["start"]

NAMED = {"type": "function", "function": {"name": "get_weather"}}


# ------------------------------ engines that speak OpenAI


def delta(*calls: dict[str, Any], reason: str | None = None, **more: Any) -> dict[str, Any]:
    content = {"tool_calls": list(calls)} if calls else {}
    return {"choices": [{"index": 0, "delta": {**content, **more}, "finish_reason": reason}]}


def part(index: int | None = None, call_id: Any = None, name: str | None = None, arguments: Any = None) -> Any:
    """A delta that leaves out what is None."""
    function = {"name": name, "arguments": arguments}
    fields = {"index": index, "id": call_id, "type": "function" if call_id else None}
    kept = {key: value for key, value in fields.items() if value is not None}
    return {**kept, "function": {key: value for key, value in function.items() if value is not None}}


def with_nulls(index: int, call_id: str | None, name: str | None, arguments: str) -> dict[str, Any]:
    return {"index": index, "id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


ACCOUNT = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 7}}

ACCENTS: dict[str, tuple[str, list[Any]]] = {
    "vllm": (
        "vllm",
        [
            delta(part(0, "call-1", "get_weather", "")),
            delta(part(0, arguments='{"city"')),
            delta(part(0, arguments=': "Rome"}')),
            delta(part(1, "call-2", "get_time", "{}")),
            delta(reason="tool_calls", content=""),
        ],
    ),
    "sglang": (
        "sglang",
        [
            delta(with_nulls(0, "call_a", "get_weather", ""), content=None, reasoning_content=None),
            delta(with_nulls(0, None, None, '{"city": "Rome"}'), content=None, reasoning_content=None),
            delta(with_nulls(1, "call_b", "get_time", "")),
            delta(with_nulls(1, None, None, "{}")),
            delta(reason="tool_calls", content=None, tool_calls=None),
        ],
    ),
    "llama.cpp, whose names grow": (
        "llama_cpp",
        [
            delta(part(0, "X1", "get", "")),
            delta(part(0, "X1", "get_weather", "")),
            delta(part(0, arguments='{"city": "Rome"}')),
            delta(part(1, "X2", "get_time", "{")),
            delta(part(1, arguments="}")),
            delta(reason="tool_calls"),
        ],
    ),
    "TensorRT-LLM, with the reason in the last delta": (
        "tensorrt_llm",
        [
            delta(part(0, "chatcmpl-tool-1", "get_weather", '{"city": "Rome"}')),
            delta(part(1, "chatcmpl-tool-2", "get_time", "{}"), reason="tool_calls"),
        ],
    ),
    "TGI, which repeats heads": (
        "tgi",
        [
            delta(with_nulls(0, "0", "get_weather", '{"city"'), role="assistant", content=None),
            delta(with_nulls(0, "0", None, ': "Rome"}'), role="assistant", content=None),
            delta(with_nulls(1, "1", "get_time", "{}"), role="assistant", content=None),
            delta(reason="stop", content=""),
        ],
    ),
    "Ollama, where every call has index 0": (
        "openai_compatible",
        [
            delta(part(0, "call_a", "get_weather", '{"city": "Rome"}')),
            delta(part(0, "call_b", "get_time", "{}")),
            delta(reason="stop", content=""),
        ],
    ),
    "no index, no id, arguments as objects": (
        "openai_compatible",
        [
            delta(part(None, None, "get_weather", {"city": "Rome"}), part(None, None, "get_time", {})),
            delta(reason="tool_calls"),
        ],
    ),
    "no index, arguments in pieces": (
        "openai_compatible",
        [
            delta(part(None, "a", "get_weather")),
            delta(part(None, None, None, '{"city": ')),
            delta(part(None, None, "", '"Rome"}')),
            delta(part(None, "b", "get_time", "{}")),
            delta(reason="tool_calls"),
        ],
    ),
    "an index in the heads alone": (
        "openai_compatible",
        [
            delta(part(0, "a", "get_weather", "")),
            delta(part(None, None, None, '{"city": "Rome"}')),
            delta(part(1, "b", "get_time", "")),
            delta(part(None, None, None, "{}")),
            delta(reason="tool_calls"),
        ],
    ),
    "gaps between the indices, and one id twice": (
        "openai_compatible",
        [
            delta(part(1, "same", "get_weather", "")),
            delta(part(1, None, None, '{"city": "Rome"}')),
            delta(part(5, "same", "get_time", "{}")),
            delta(reason="tool_calls"),
        ],
    ),
    "both calls in one delta, pieces in turns": (
        "goodgate_peer",
        [
            delta(part(0, "a", "get_weather", ""), part(1, "b", "get_time", "")),
            delta(part(1, None, None, "{"), part(0, None, None, '{"city":')),
            delta(part(0, None, None, ' "Rome"}'), part(1, None, None, "}")),
            delta(reason="tool_calls"),
        ],
    ),
}


def _as_object(call: Call) -> tuple[str, Any]:
    return call.name, json.loads(call.arguments)


@pytest.mark.parametrize("accent", ACCENTS)
async def test_calls_in_every_accent_leave_in_the_form_that_clients_join(accent: str) -> None:
    name, payloads = ACCENTS[accent]
    async with engine(name, model="small") as (adapter, twin):
        twin.reply(CHAT, Reply.stream(events([*payloads, ACCOUNT])))
        chunks = await collect(adapter, chat(tools=TOOLS))
    calls, _ = told(chunks)
    assert list(map(_as_object, calls)) == list(map(_as_object, [ROME, NOW]))
    assert reasons_of(chunks) == ["tool_calls"]
    assert text_of(chunks) == ""
    assert chunks[-1].usage == Usage(9, 7)


@pytest.fixture(params=[name for name in HTTP_ENGINES if "tools" in adapter_class(name).dialect.parameters])  # type: ignore[attr-defined]
async def tool_subject(request: pytest.FixtureRequest) -> AsyncIterator[HTTPSubject]:
    subject = HTTPSubject(request.param)
    async with conforming(subject):
        await subject.adapter.start()
        yield subject


def can_force(subject: HTTPSubject) -> bool:
    return "tool_choice" in subject.adapter.capabilities.parameters


async def test_ids_that_name_one_call_are_kept_and_those_that_do_not_are_replaced(tool_subject: HTTPSubject) -> None:
    stream = [
        delta(part(0, "call_x", "get_time", "{}"), part(1, "call_x", "get_time", "{}"), part(2, "2", "get_time", "{}")),
        delta(part(3, 7, "get_time", "{}"), part(4, "", "get_time", "{}")),
        delta(reason="tool_calls"),
    ]
    _, ids = told(await answer(tool_subject, events([*stream, ACCOUNT]), tools=TOOLS))
    assert ids[0] == "call_x"
    assert all(each.startswith("call_") and len(each) > 20 for each in ids[1:])


@pytest.mark.parametrize(("told_reason", "reason"), [("stop", "tool_calls"), ("length", "length")])
async def test_a_choice_that_called_says_so_unless_its_limit_cut_it(
    tool_subject: HTTPSubject, told_reason: str, reason: str
) -> None:
    stream = [delta(part(0, "a", "get_weather", '{"ci')), delta(reason=told_reason), ACCOUNT]
    assert reasons_of(await answer(tool_subject, events(stream), tools=TOOLS)) == [reason]


@pytest.mark.parametrize("told_reason", ["stop", "tool_calls"])
async def test_after_a_named_function_the_reason_is_stop_as_openai_answers(
    tool_subject: HTTPSubject, told_reason: str
) -> None:
    stream = [delta(part(0, "a", "get_weather", "{}")), delta(reason=told_reason), ACCOUNT]
    if not can_force(tool_subject):
        with pytest.raises(UnsupportedParameter, match="tool_choice"):
            await answer(tool_subject, events(stream), tools=TOOLS, tool_choice=NAMED)
        return
    chunks = await answer(tool_subject, events(stream), tools=TOOLS, tool_choice=NAMED)
    assert reasons_of(chunks) == ["stop"]


@pytest.mark.parametrize(
    "nonsense",
    [
        [{"index": 0, "function": {"arguments": "{}"}}],  # of no function
        [{"index": "first"}],
        [3],
        {"index": 0},
        "call",
    ],
)
async def test_calls_that_make_no_sense_are_the_engines_fault(tool_subject: HTTPSubject, nonsense: Any) -> None:
    stream = [{"choices": [{"index": 0, "delta": {"tool_calls": nonsense}}]}, delta(reason="tool_calls")]
    with pytest.raises(EngineProtocolError, match="not OpenAI's"):
        await answer(tool_subject, events(stream))


async def test_earlier_calls_go_out_whole_whatever_the_client_kept_of_them(tool_subject: HTTPSubject) -> None:
    """W10, W11: an index from a stream, arguments as an object or left out."""
    calls = [
        {"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}},
        {"id": "c2", "function": {"name": "g"}},
    ]
    for content in ({"content": None}, {}, {"content": ""}, {"content": []}):
        await collect(tool_subject.adapter, chat(messages=[{"role": "assistant", **content, "tool_calls": calls}]))
        sent = tool_subject.twin.bodies[-1]["messages"][0]["tool_calls"]
        assert sent == [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}},
            {"id": "c2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
        ]


async def test_tools_go_out_as_they_came_strictness_and_choice_included(tool_subject: HTTPSubject) -> None:
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
    for choice in ("none", "auto", *(("required", NAMED) if can_force(tool_subject) else ())):
        await collect(tool_subject.adapter, chat(tools=[strict, TIME], tool_choice=choice))
        sent = tool_subject.twin.bodies[-1]
        if tool_subject.engine == "llama_cpp" and choice is NAMED:  # it drops an object
            assert (sent["tools"], sent["tool_choice"]) == ([strict], "required")
        else:
            assert (sent["tools"], sent["tool_choice"]) == ([strict, TIME], choice)


async def test_tools_whose_calls_would_be_lost_are_refused(tool_subject: HTTPSubject) -> None:
    with pytest.raises(InvalidRequest, match="function") as caught:
        await collect(tool_subject.adapter, chat(tools=[{"type": "custom", "custom": {"name": "f"}}]))
    assert caught.value.param == "tools"


async def test_vllm_without_a_parser_says_what_to_do_in_our_words_and_names_the_field() -> None:
    theirs = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
    async with engine("vllm", model="small") as (adapter, twin):
        twin.reply(CHAT, Reply.plain(400, {"error": {"message": theirs, "type": "BadRequestError", "code": 400}}))
        with pytest.raises(InvalidRequest, match="tool_call_parser") as caught:
            await collect(adapter, chat(tools=TOOLS))
        assert caught.value.param == "tools"


# ------------------------------ engines that give text

# Those whose text has the special tokens that mark calls, and those whose text has not.
SHOWING, HIDING = ("sglang-native", "tgi-generate"), ("triton-llmapi", "triton-ensemble")
PLAIN = ("hermes", "llama3_json")
MARKED = ("mistral", "deepseek", "gpt_oss")
ROUTES = [
    *((name, each) for name in (*SHOWING, *HIDING) for each in PLAIN),
    *((name, each) for name in SHOWING for each in MARKED),
]


@contextlib.asynccontextmanager
async def text_engine(name: str, folder: Path, **options: Any) -> AsyncIterator[GenerateSubject]:
    subject = GenerateSubject(name, folder)
    subject._options = {**subject._options, **options}
    async with conforming(subject):
        await subject.adapter.start()
        yield subject


def stream_of(subject: GenerateSubject, text: str, size: int = 5, reason: str = "stop") -> bytes:
    return subject.stream(*(text[at : at + size] for at in range(0, len(text), size)), reason=reason)


def sent_to(subject: GenerateSubject) -> dict[str, Any]:
    """The last generation that was asked for."""
    return [body for body in subject.twin.bodies if "rid" not in body or len(body) > 1][-1]


def prompt_of(body: dict[str, Any]) -> str:
    prompt: str = body.get("text") or body.get("inputs") or body.get("text_input") or ""
    return prompt


@pytest.mark.parametrize(("name", "tool_format"), ROUTES)
async def test_calls_are_read_out_of_the_text_of_every_route(name: str, tool_format: Any, tmp_path: Path) -> None:
    async with text_engine(name, write_tool_model(tmp_path, tool_format)) as subject:
        fields = {"tools", "parallel_tool_calls"} | ({"tool_choice"} if name in SHOWING else set())
        assert fields == subject.adapter.capabilities.parameters & TOOL_FIELDS
        has_text = tool_format != "gpt_oss"
        subject.says(stream_of(subject, "Let me see.\n" * has_text + written(tool_format, [ROME, NOW])))
        chunks = await collect(subject.adapter, chat(tools=TOOLS))
        assert told(chunks).calls == [ROME, NOW]
        assert text_of(chunks) == "Let me see." * has_text
        assert reasons_of(chunks) == ["tool_calls"]
        assert chunks[-1].usage is not None
        assert '"name": "get_weather"' in prompt_of(sent_to(subject))
        assert prompt_of(sent_to(subject)).endswith("[user]Hi[assistant]")


@pytest.mark.parametrize(("name", "tool_format"), ROUTES)
async def test_an_answer_without_a_call_and_one_cut_by_its_limit_are_what_they_are(
    name: str, tool_format: Any, tmp_path: Path
) -> None:
    async with text_engine(name, write_tool_model(tmp_path, tool_format)) as subject:
        subject.says(stream_of(subject, "It is < 20 degrees [in] {Rome}."))
        chunks = await collect(subject.adapter, chat(tools=TOOLS))
        assert (text_of(chunks), reasons_of(chunks)) == ("It is < 20 degrees [in] {Rome}.", ["stop"])
        if subject.is_ensemble:
            return  # it tells no reason
        whole = written(tool_format, [ROME])
        subject.says(stream_of(subject, whole[: whole.index("Rome") + 2], reason="length"))
        chunks = await collect(subject.adapter, chat(tools=TOOLS, max_tokens=40))
        assert told(chunks).calls == [Call("get_weather", '{"city": "Ro')]
        assert reasons_of(chunks) == ["length"]


@pytest.mark.parametrize(("name", "tool_format"), ROUTES)
async def test_earlier_calls_and_their_results_go_through_the_template(
    name: str, tool_format: Any, tmp_path: Path
) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Rome"}'}}
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "sunny", "tool_call_id": "call_1"},
    ]
    async with text_engine(name, write_tool_model(tmp_path, tool_format)) as subject:
        await collect(subject.adapter, chat(messages=messages, tools=TOOLS))
        prompt = prompt_of(sent_to(subject))
        assert '{"city": "Rome"}' in prompt  # an object to the template, not a string in a string
        result = prompt.partition("[tool]sunny#")[2].removesuffix("[assistant]")
        assert (result == "call_1") == (tool_format != "mistral")
        if tool_format == "mistral":  # its templates refuse any other id
            assert (len(result), result.isalnum()) == (9, True)
            assert f"[CALL_ID]{result}[ARGS]" in prompt


@pytest.mark.parametrize("name", [*SHOWING, *HIDING])
async def test_with_the_choice_none_the_model_sees_no_tools_and_its_text_stays_text(name: str, tmp_path: Path) -> None:
    async with text_engine(name, write_tool_model(tmp_path, "hermes")) as subject:
        text = written("hermes", [ROME])
        subject.says(stream_of(subject, text))
        chunks = await collect(subject.adapter, chat(tools=TOOLS, tool_choice="none"))
        assert (text_of(chunks), reasons_of(chunks)) == (text, ["stop"])
        assert "get_weather" not in prompt_of(sent_to(subject))


def grammar_of(body: dict[str, Any]) -> dict[str, Any]:
    if "parameters" in body:
        grammar: dict[str, Any] = body["parameters"]["grammar"]
        assert grammar["type"] == "json"
        constrained: dict[str, Any] = grammar["value"]
    else:
        constrained = json.loads(body["sampling_params"]["json_schema"])
    return constrained


def call_of(name: str, arguments: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"type": "string", "const": name}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


@pytest.mark.parametrize("name", SHOWING)
@pytest.mark.parametrize("tool_format", ["hermes", "mistral"])
async def test_a_forced_call_is_forced_by_the_engines_grammar(name: str, tool_format: Any, tmp_path: Path) -> None:
    arguments = [tool["function"]["parameters"] for tool in TOOLS]  # type: ignore[index]
    calls = [call_of("get_weather", arguments[0]), call_of("get_time", arguments[1])]
    strict = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]  # type: ignore[dict-item]
    async with text_engine(name, write_tool_model(tmp_path, tool_format)) as subject:
        for choice, schema, reason in (("required", {"anyOf": calls}, "tool_calls"), (NAMED, calls[0], "stop")):
            subject.says(stream_of(subject, '{"name": "get_weather", "arguments": {"city": "Rome"}}'))
            chunks = await collect(subject.adapter, chat(tools=strict, tool_choice=choice))
            assert told(chunks).calls == [ROME]
            assert reasons_of(chunks) == [reason]
            assert grammar_of(sent_to(subject)) == schema
            assert "get_time" in prompt_of(sent_to(subject))


@pytest.mark.parametrize("name", SHOWING)
async def test_references_inside_parameters_begin_where_the_parameters_lie(name: str, tmp_path: Path) -> None:
    place = {"type": "object", "properties": {"at": {"$ref": "#/$defs/Place"}}, "$defs": {"Place": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "go", "parameters": place}}
    other = {"type": "function", "function": {"name": "be", "parameters": {"$defs": {"Place": {"type": "integer"}}}}}
    async with text_engine(name, write_tool_model(tmp_path, "hermes")) as subject:
        await collect(subject.adapter, chat(tools=[tool], tool_choice="required"))
        schema = grammar_of(sent_to(subject))
        assert schema["properties"]["arguments"] == {"$ref": "#/$defs/0"}
        assert schema["$defs"]["0"]["properties"]["at"] == {"$ref": "#/$defs/0/$defs/Place"}
        assert schema["$defs"]["0"]["$defs"] == place["$defs"]
        await collect(subject.adapter, chat(tools=[other, tool], tool_choice="required"))
        schema = grammar_of(sent_to(subject))  # both call it Place, and each means its own
        assert schema["$defs"]["1"]["properties"]["at"] == {"$ref": "#/$defs/1/$defs/Place"}
        assert schema["anyOf"][0]["properties"]["arguments"]["$defs"]["Place"] == {"type": "integer"}


@pytest.mark.parametrize("name", SHOWING)
@pytest.mark.parametrize("parameters", [{"type": "string"}, {"type": ["object", "null"]}])
async def test_parameters_that_are_no_object_are_refused(name: str, parameters: Any, tmp_path: Path) -> None:
    """A call of them was written, and then read as text."""
    tool = {"type": "function", "function": {"name": "say", "parameters": parameters}}
    async with text_engine(name, write_tool_model(tmp_path, "hermes")) as subject:
        with pytest.raises(InvalidRequest, match="parameters of 'say' must be of type object"):
            await collect(subject.adapter, chat(tools=[tool], tool_choice="required"))
        assert subject.twin.bodies == []


@pytest.mark.parametrize("name", HIDING)
@pytest.mark.parametrize("choice", ["required", NAMED])
async def test_an_engine_without_a_grammar_cannot_force_a_call(name: str, choice: Any, tmp_path: Path) -> None:
    async with text_engine(name, write_tool_model(tmp_path, "hermes")) as subject:
        with pytest.raises(UnsupportedParameter, match=r"triton_server.*tool_choice"):
            await collect(subject.adapter, chat(tools=TOOLS, tool_choice=choice))
        assert subject.twin.bodies == []


@pytest.mark.parametrize(("name", "tool_format"), ROUTES)
async def test_where_one_call_is_wanted_the_engine_is_left_after_it(
    name: str, tool_format: Any, tmp_path: Path
) -> None:
    async with text_engine(name, write_tool_model(tmp_path, tool_format)) as subject:
        text = written(tool_format, [ROME, NOW])
        pieces = [text[at : at + 5] for at in range(0, len(text), 5)]
        stream = b"".join(subject.event(pieces[: number + 1]) for number in range(len(pieces)))
        subject.says(stream, "hold")
        chunks = await collect(subject.adapter, chat(tools=TOOLS, parallel_tool_calls=False))
        assert told(chunks).calls == [ROME]
        assert reasons_of(chunks) == ["tool_calls"]
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens > 0
        await subject.twin.client_left(within_s=1)


async def test_choices_of_one_stream_have_calls_of_their_own(tmp_path: Path) -> None:
    end = {"type": "stop"}
    first, second = written("hermes", [ROME]), "No call. " + written("hermes", [NOW])
    async with text_engine("sglang-native", write_tool_model(tmp_path, "hermes")) as subject:
        subject.says(
            events(
                [
                    native(first[:30], 3, index=0), native(second[:12], 2, index=1), native(first, 9, end, index=0),
                    native(second, 9, end, index=1),
                ]
            )
        )  # fmt: skip
        chunks = await collect(subject.adapter, chat(tools=TOOLS, n=2))
        calls = [told(chunks, index) for index in (0, 1)]
        assert [each.calls for each in calls] == [[ROME], [NOW]]
        assert not set(calls[0].ids) & set(calls[1].ids)
        assert text_of(chunks) == "No call."
        assert sent_to(subject)["sampling_params"]["skip_special_tokens"] is False


@pytest.mark.parametrize("cut_first", [False, True])
async def test_of_several_choices_the_engine_is_left_when_each_has_called_or_ended(
    cut_first: bool, tmp_path: Path
) -> None:
    called, ended = native(written("hermes", [ROME, NOW]), 9), native("No.", 2, {"type": "stop"}, index=1)
    async with text_engine("sglang-native", write_tool_model(tmp_path, "hermes")) as subject:
        subject.says(events([called, ended] if cut_first else [ended, called], done=False), "hold")
        chunks = await collect(subject.adapter, chat(tools=TOOLS, n=2, parallel_tool_calls=False))
        assert told(chunks).calls == [ROME]
        assert text_of(chunks) == "No."
        assert sorted(reasons_of(chunks)) == ["stop", "tool_calls"]
        assert chunks[-1].usage is not None
        await subject.twin.client_left(within_s=1)


async def test_tgis_special_tokens_are_text_only_where_they_mark_a_call(tmp_path: Path) -> None:
    pieces = [("Hm", False), ("[TOOL_CALLS]", True), ("get_time", False), ("[ARGS]", True), ("{}", False)]
    stream = [token(text, at + 1, special=special) for at, (text, special) in enumerate(pieces)]
    stream.append(token("</s>", 6, special=True, details=details("eos_token", 6)))
    marks = ("[TOOL_CALLS]", "[ARGS]")
    async with text_engine("tgi-generate", write_tool_model(tmp_path, "mistral", special=marks)) as subject:
        subject.says(events(stream, done=False))
        chunks = await collect(subject.adapter, chat(tools=TOOLS, logprobs=True))
        assert (text_of(chunks), told(chunks).calls, reasons_of(chunks)) == ("Hm", [NOW], ["tool_calls"])
        logprobs = [json.loads(bytes(chunk.logprobs)) for chunk in chunks if chunk.logprobs is not None]
        assert [each["content"][0]["token"] for each in logprobs] == [text for text, _ in pieces]
        assert text_of(await collect(subject.adapter, chat())) == "Hmget_time{}"


# ------------------------------ what is refused


@pytest.mark.parametrize("name", [*SHOWING, *HIDING])
async def test_a_model_whose_template_has_no_tools_gets_none(name: str, text_model: Path) -> None:
    async with text_engine(name, text_model) as subject:
        assert "tools" not in subject.adapter.capabilities.parameters
        with pytest.raises(UnsupportedParameter, match="tools"):
            await collect(subject.adapter, chat(tools=TOOLS))


@pytest.mark.parametrize("name", HIDING)
async def test_marks_that_the_engine_hides_mean_no_tools(name: str, tmp_path: Path) -> None:
    for number, (tool_format, special, has_tools) in enumerate(
        [
            ("mistral", ("[TOOL_CALLS]",), False),
            ("hermes", ("<tool_call>",), False),
            ("hermes", (), True),
            ("llama3_json", ("<|python_tag|>",), True),  # its calls do without
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        async with text_engine(name, write_tool_model(folder, tool_format, special=special)) as subject:
            assert ("tools" in subject.adapter.capabilities.parameters) is has_tools
    file = tmp_path / "mistral.jinja"  # without a tokenizer they are taken for what they are in Mistral's own
    file.write_text(template("mistral"))
    async with text_engine(name, file) as subject:
        assert "tools" not in subject.adapter.capabilities.parameters


async def start_alone(name: str, folder: Path, **options: Any) -> EngineAdapter[Any]:
    cls = adapter_class(name)
    adapter = cls(msgspec.convert({"url": "http://127.0.0.1:1", "chat_template": str(folder), **options}, cls.Options))
    try:
        await adapter.start()
    finally:
        await adapter.close()
    return adapter


async def test_a_parser_can_be_chosen_or_switched_off_and_one_that_cannot_work_says_why(
    text_model: Path, tmp_path: Path
) -> None:
    for name, options in (("tgi", {}), ("sglang", {"route": "native"}), ("triton_server", {})):
        with pytest.raises(EngineUnavailable, match=r"renders them, or one of .* \(hermes, json\)"):
            await start_alone(name, text_model, tool_parser="llama3_json", **options)
        taught = await start_alone(name, text_model, tool_parser="hermes", **options)
        assert "tools" in taught.capabilities.parameters
        untaught = await start_alone(name, text_model, **options)
        assert "tools" not in untaught.capabilities.parameters
        folder = tmp_path / name
        folder.mkdir()
        write_tool_model(folder, "mistral", special=("[TOOL_CALLS]",))
        off = await start_alone(name, folder, tool_parser="none", **options)
        assert "tools" not in off.capabilities.parameters
        chosen = await start_alone(name, folder, tool_parser="json", **options)
        assert "tools" in chosen.capabilities.parameters
    with pytest.raises(EngineUnavailable, match="hides the special tokens"):
        await start_alone("triton_server", tmp_path / "triton_server", tool_parser="mistral")


BAD_TOOLS: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "two words"}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools"),
    ({"tools": [WEATHER, WEATHER]}, "tools"),
    ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "unknown"}}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": TOOLS, "response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "response_format"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_TOOLS)
@pytest.mark.parametrize("name", [*SHOWING, *HIDING])
async def test_what_makes_no_sense_or_cannot_be_kept_is_refused_by_name(
    name: str, fields: dict[str, Any], param: str, tmp_path: Path
) -> None:
    async with text_engine(name, write_tool_model(tmp_path, "hermes")) as subject:
        with pytest.raises((InvalidRequest, UnsupportedParameter)) as caught:
            await collect(subject.adapter, chat(**fields))
        assert (caught.value.status, caught.value.param) == (400, param)
        assert subject.twin.bodies == []


# ------------------------------ our own engine


async def own_engine(folder: Path, tool_format: str, home: Path) -> EngineAdapter[Any]:
    write_tiny_llama(folder, tiny_config(max_model_len=2048), chat_template=template(tool_format))
    cls = adapter_class("native")
    options = {"model": str(folder), "home": str(home), "kv_cache_mib": 16, "num_threads": 1}
    return cls(msgspec.convert(options, cls.Options))


async def test_our_own_engine_takes_tools_where_its_models_template_does(tmp_path: Path, native_home: Path) -> None:
    adapter = await own_engine(tmp_path, "hermes", native_home)
    await adapter.start()
    try:
        assert {"tools", "tool_choice"} <= adapter.capabilities.parameters
        fields: dict[str, Any] = {"max_tokens": 3, "ignore_eos": True}
        plain = await collect(adapter, chat(**fields))
        with_tools = await collect(adapter, chat(tools=TOOLS, **fields))
        assert plain[-1].usage is not None
        assert with_tools[-1].usage is not None
        more = with_tools[-1].usage.prompt_tokens - plain[-1].usage.prompt_tokens
        assert more > len(json.dumps(TOOLS))  # a byte is a token there
        assert with_tools[-1].usage.completion_tokens == 3
    finally:
        await adapter.close()


async def scripted(pieces: list[str], closed: list[bool]) -> AsyncGenerator[Chunk, None]:
    try:
        for piece in pieces:
            yield Chunk(text=piece)
        yield Chunk(finish_reason="stop")
        yield Chunk(usage=Usage(9, len(pieces)))
    finally:
        closed.append(True)


@pytest.mark.parametrize("only_one", [False, True])
async def test_any_stream_of_chunks_can_have_its_calls_taken_out(only_one: bool) -> None:
    text = "Hm. " + written("hermes", [ROME, NOW])
    closed: list[bool] = []
    offer = offered(chat(tools=TOOLS, parallel_tool_calls=not only_one), "native")
    assert offer is not None
    calls = CallChunks(offer, "hermes", num_choices=1)
    stream = with_tool_calls(scripted(list(text), closed), calls, lambda: Usage(9, 5))
    chunks = [chunk async for chunk in stream]
    assert (text_of(chunks), told(chunks).calls) == ("Hm.", [ROME] if only_one else [ROME, NOW])
    assert reasons_of(chunks) == ["tool_calls"]
    assert chunks[-1].usage == Usage(9, 5 if only_one else len(text))
    assert closed == [True]


# ------------------------------ the whole way


async def test_the_official_client_reads_the_calls_of_a_text_engine_streamed_and_whole(
    start: Start, tmp_path: Path
) -> None:
    async with Twin() as twin:
        twin.reply("/health", Reply.plain(200, b""))
        text = "Let me see.\n" + written("hermes", [ROME, NOW])
        pieces = [token(text[at : at + 4], at) for at in range(0, len(text), 4)]
        pieces.append(token("</s>", 99, special=True, details=details("eos_token", 50)))
        twin.reply("/generate_stream", Reply.stream(events(pieces, done=False)))
        options = {"url": twin.url, "chat_template": str(write_tool_model(tmp_path, "hermes"))}
        gateway = await start(model({"engine": "tgi", "options": options}))
        await check_with_client(gateway, "Let me see.")


async def test_the_official_client_reads_the_calls_of_an_engine_that_speaks_openai(start: Start) -> None:
    async with Twin() as twin:
        twin.reply("/health", Reply.plain(200, b""))
        twin.reply(CHAT, Reply.stream(events([*ACCENTS["vllm"][1], ACCOUNT])))
        gateway = await start(model({"engine": "vllm", "options": {"url": twin.url, "model": "small"}}))
        await check_with_client(gateway, None)


async def check_with_client(gateway: Any, content: str | None) -> None:
    asked: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Weather?"}], "tools": TOOLS}
    whole = await gateway.openai.chat.completions.create(**asked)
    async with gateway.openai.chat.completions.stream(**asked) as stream:
        streamed = await stream.get_final_completion()
    for completion in (whole, streamed):
        choice = completion.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert (choice.message.content or None) == content
        calls = [Call(call.function.name, call.function.arguments) for call in choice.message.tool_calls]
        assert calls == [ROME, NOW]
        assert len({call.id for call in choice.message.tool_calls}) == 2


async def test_tools_that_an_engine_cannot_take_are_a_400_with_the_field(start: Start) -> None:
    gateway = await start(fake_model())
    status, body, _ = await gateway.chat(tools=TOOLS)
    assert (status, body["error"]["code"], body["error"]["param"]) == (400, "unsupported_parameter", "tools")
