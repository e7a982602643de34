"""Tool calls in a model's text: every format, every way to cut it, and everything that is no call."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.models.chat_template import ChatTemplate
from adapters.tools.call_text import CallBegun, Said
from adapters.tools.formats import FORMATS, MARKERS, ToolFormat, format_of, mistral_id
from adapters.tools.tool_text import ToolText
from tests.contract.test_recordings import FOLDER
from tests.contract.tool_formats import NOW, ROME, Answer, Call, folded, read_whole, template, written

NAMES = ("get_weather", "get_time")
CUTS = (None, 1, 2, 3, 7)


def read(tool_format: ToolFormat, text: str) -> Answer:
    """The answer, which is the same however it is cut."""
    answers = [read_whole(tool_format, text, NAMES, cut) for cut in CUTS]
    assert all(answer == answers[0] for answer in answers)
    return answers[0]


@pytest.mark.parametrize("tool_format", FORMATS)
def test_calls_are_taken_out_and_their_arguments_stay_as_they_are_written(tool_format: ToolFormat) -> None:
    spaced = Call("get_weather", '{ "city" : "R\\u00f6m\\n", "days": [1, -2.5e3, {}], "x": null}')
    assert read(tool_format, written(tool_format, [spaced, NOW, ROME])) == Answer("", "", [spaced, NOW, ROME], 3)


@pytest.mark.parametrize("tool_format", ["hermes", "llama3_json", "mistral", "deepseek"])
def test_text_beside_calls_is_kept_and_white_space_between_them_is_not(tool_format: ToolFormat) -> None:
    text = f"Let me  see.\n\n{written(tool_format, [ROME])}\n{written(tool_format, [NOW])}\n"
    assert read(tool_format, text) == Answer("Let me  see.", "", [ROME, NOW], 2)
    assert read(tool_format, text + "Done. \n") == Answer("Let me  see.\nDone. \n", "", [ROME, NOW], 2)


@pytest.mark.parametrize("tool_format", FORMATS)
def test_an_answer_without_calls_is_text_to_the_last_blank(tool_format: ToolFormat) -> None:
    text = "  A < b, [1] and {x}.\n\n"
    assert read(tool_format, text) == Answer(text, "", [], 0)


FORMS: list[tuple[ToolFormat, str, list[Call]]] = [
    ("hermes", '<tool_call>{"name":"get_time"}</tool_call>', [NOW]),
    ("hermes", '<tool_call>{"name":"get_time","arguments":null}</tool_call>', [NOW]),
    ("hermes", '<tool_call>{"arguments": {"city": "Rome"}, "name": "get_weather"}</tool_call>', [ROME]),
    ("hermes", '<tool_call>{"name": "get_weather", "parameters": {"city": "Rome"}}</tool_call>', [ROME]),
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Rome\\"}"}</tool_call>', [ROME]),
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}', [ROME]),  # ended by its last token
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}</tool_call>', [ROME]),
    ("hermes", f"<tool_call>{written('json', [ROME, NOW])}</tool_call>", [ROME, NOW]),
    ("llama3_json", '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Rome"}}', [ROME]),
    ("llama3_json", '{"type": "function", "name": "get_weather", "parameters": {"city": "Rome"}}', [ROME]),
    ("llama3_json", '{"name": "get_time", "parameters": {}}\n{"name": "get_time", "parameters": {}}', [NOW, NOW]),
    ("mistral", f"[TOOL_CALLS] {written('json', [ROME, NOW])}", [ROME, NOW]),
    ("mistral", '[TOOL_CALLS][{"name": "get_time", "arguments": {}, "id": "9Ae3bDc2F"}]', [NOW]),
    ("mistral", "[TOOL_CALLS]get_time[CALL_ID]9Ae3bDc2F[ARGS]{}", [NOW]),
    (
        "deepseek",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Rome"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_time\n```json\n'
        "{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [ROME, NOW],
    ),
    ("deepseek", "<｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{}<｜tool▁call▁end｜>", [NOW]),
    ("gpt_oss", " to=functions.get_time<|channel|>commentary json<|message|>{}<|call|>", [NOW]),
    ("json", '{"name": "get_weather", "arguments": {"city": "Rome"}}', [ROME]),
]


@pytest.mark.parametrize(("tool_format", "text", "calls"), FORMS)
def test_every_form_that_models_write_is_understood(tool_format: ToolFormat, text: str, calls: list[Call]) -> None:
    assert read(tool_format, text) == Answer("", "", calls, len(calls))


def test_harmony_tells_thought_from_text_and_hides_its_frame() -> None:
    text = (
        "<|channel|>analysis<|message|>They ask.<|end|><|start|>assistant<|channel|>commentary<|message|>One moment."
        f"<|end|><|start|>assistant{written('gpt_oss', [ROME])}"
    )
    assert read("gpt_oss", text) == Answer("One moment.", "They ask.", [ROME], 1)
    final = "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>Sunny.<|return|>"
    assert read("gpt_oss", final) == Answer("Sunny.", "Hm", [], 0)


NO_CALLS: list[tuple[ToolFormat, str]] = [
    ("hermes", '<tool_call>{"name": "unknown", "arguments": {"city": "Rome"}}</tool_call>'),
    ("hermes", '<tool_call>{"name": get_weather, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": 5}</tool_call>'),
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": "no JSON"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": "[1]"}</tool_call>'),
    (
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"\\ud800\\"}"}</tool_call>',
    ),  # no UTF-8
    ("hermes", '<tool_call>{"name": "get_weather", "argumen'),
    ("hermes", '<tool_call>{"name": "get_weather", "name": "get_time", "arguments": {}}</tool_call>'),
    ("hermes", "<tool_call><tool_call>\nnothing\n</tool_call> <tool"),
    ("llama3_json", '{"name": "get_weather"}'),  # some object with a name, and no call
    ("llama3_json", 'In JSON: {"city": "Rome", "name": "get_weather", "parameters": {}}'),
    ("llama3_json", '<|python_tag|>brave_search.call(query="weather in Rome")'),
    ("mistral", "[TOOL_CALLS]unknown[ARGS]{}"),
    ("mistral", "[TOOL_CALLS]get_weather{}"),
    ("deepseek", "<｜tool▁calls▁begin｜>none<｜tool▁calls▁end｜>"),
    ("deepseek", "<｜tool▁call▁begin｜>unknown<｜tool▁sep｜>{}<｜tool▁call▁end｜>"),
    ("json", f"Sure: {written('json', [ROME])}"),
]


@pytest.mark.parametrize(("tool_format", "text"), NO_CALLS)
def test_what_is_no_call_is_text_with_all_its_marks(tool_format: ToolFormat, text: str) -> None:
    assert read(tool_format, text) == Answer(text, "", [], 0)


def test_a_call_that_breaks_after_it_was_told_stays_incomplete_and_the_rest_is_text() -> None:
    text = '<tool_call>{"name": "get_weather", "arguments": {"city": Rome}}</tool_call>'
    assert read("hermes", text) == Answer("Rome}}</tool_call>", "", [Call("get_weather", '{"city": ')], 0)
    assert read("hermes", text + written("hermes", [NOW])).calls[1:] == [NOW]


@pytest.mark.parametrize("arguments", ['{"city": "Ro', '{"city": "Rome\\', '{"days": 12', '{"city"', "{"])
def test_a_call_that_the_limit_cuts_keeps_what_was_written(arguments: str) -> None:
    text = f'<tool_call>{{"name": "get_weather", "arguments": {arguments}'
    assert read("hermes", text) == Answer("", "", [Call("get_weather", arguments)], 0)


@pytest.mark.parametrize("bad", ['"\n"', '"\\x"', '"\\u12g4"', "01", "1.", "+1", ".5", "NaN", "tru", "'a'", "1 2", "]"])
def test_arguments_are_valid_json_as_far_as_they_go_out(bad: str) -> None:
    answer = read("hermes", f'<tool_call>{{"name": "get_weather", "arguments": {{"a": [{bad}]}}}}</tool_call>')
    assert answer.num_complete == 0
    assert '{"a": [1, 2'.startswith(answer.calls[0].arguments[:7])
    assert answer.calls[0].arguments + answer.said == f'{{"a": [{bad}]}}}}</tool_call>'


def test_the_name_goes_out_when_its_arguments_begin_and_they_follow_piece_by_piece() -> None:
    parser = ToolText("hermes", NAMES, new_id=lambda: "call_1")
    seen = [
        parser.feed(piece) for piece in ("Hm <tool", '_call>{"name": "get_weather"', ', "arguments": {"ci', 'ty": 1')
    ]
    assert seen[:2] == [[Said("Hm")], []]
    assert seen[2][0] == CallBegun(0, "call_1", "get_weather")
    assert [getattr(event, "text", None) for event in [*seen[2], *seen[3]]] == [None, '{"ci', 'ty": ']


def test_ids_are_fresh_and_mistrals_are_nine_letters_or_digits() -> None:
    for tool_format in FORMATS:
        parser = ToolText(tool_format, NAMES)
        text = written(tool_format, [ROME] * 20)
        ids = [event.id for event in parser.feed(text) + parser.finish() if isinstance(event, CallBegun)]
        assert len(set(ids)) == 20
        if tool_format == "mistral":
            assert all(len(each) == 9 and each.isalnum() and each.isascii() for each in ids)
    assert mistral_id("9Ae3bDc2F") == "9Ae3bDc2F"
    assert mistral_id("call_1") == mistral_id("call_1") != mistral_id("call_2")


@pytest.mark.parametrize("tool_format", FORMATS)
def test_the_answer_may_be_over_with_its_first_call(tool_format: ToolFormat) -> None:
    for cut in (1, 1000):
        text = written(tool_format, [ROME, NOW])
        parser = ToolText(tool_format, NAMES, only_first=True)
        answer = folded(parser, [text[at : at + cut] for at in range(0, len(text), cut)])
        assert answer == Answer("", "", [ROME], 1)
        assert parser.is_over


# ------------------------------ properties

_pieces = st.sampled_from(
    [
        *(mark for marks in MARKERS.values() for mark in marks),
        "<|python_tag|>", '{"name": "get_weather", ',
        '"arguments": ', '"parameters": ', '{"city": "Rome"}', '{"a": [1, "\\u00e9", {}]}', "get_time", '{"name":',
        '"get_time"', "}", "{", "[", "]", ",", ";", '"', "\\", "\n", " ", "function", "```json\n", "\n```", "null",
        "-1.5e", "assistant", "analysis", "commentary to=functions.get_time ", "<", "<tool", "[TOOL", "Hi", "é漢",
        *(written(tool_format, [ROME, NOW]) for tool_format in FORMATS),
    ]
)  # fmt: skip
_texts = st.lists(_pieces | st.text(max_size=4), max_size=14).map("".join)
_formats = st.sampled_from(FORMATS)


@given(_formats, _texts, st.data())
def test_the_same_text_gives_the_same_answer_however_it_is_cut(
    tool_format: ToolFormat, text: str, data: st.DataObject
) -> None:
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]
    whole = read_whole(tool_format, text, NAMES)
    assert folded(ToolText(tool_format, NAMES), pieces) == whole
    assert read_whole(tool_format, text, NAMES, 1) == whole


@given(st.sampled_from([each for each in FORMATS if each != "gpt_oss"]), _texts)
def test_where_no_function_is_offered_everything_is_text(tool_format: ToolFormat, text: str) -> None:
    assert read_whole(tool_format, text, ()) == Answer(text, "", [], 0)


@given(_formats, _texts)
def test_what_goes_out_was_written_and_complete_arguments_are_objects(tool_format: ToolFormat, text: str) -> None:
    answer = read_whole(tool_format, text, NAMES)
    assert sum(_is_object(call.arguments) for call in answer.calls) >= answer.num_complete
    for call in answer.calls:
        assert call.name in NAMES
        assert call.arguments in text or call.arguments == "{}" or "\\" in text  # left out, or a string with escapes


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


_words = st.text(st.characters(exclude_characters="<{[|", exclude_categories=("Cs",)), max_size=20)
_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
_arguments = st.builds(
    lambda value, indent, ascii_only: json.dumps(value, indent=indent, ensure_ascii=ascii_only),
    st.dictionaries(st.text(max_size=6), _json | st.sampled_from(["</tool_call>", "<|call|>", "[TOOL_CALLS]", "}"])),
    st.none() | st.integers(0, 2),
    st.booleans(),
)
_calls = st.lists(st.builds(Call, st.sampled_from(NAMES), _arguments), min_size=1, max_size=3)


@given(_formats, _calls, _words, _words, st.none() | st.integers(1, 9))
def test_generated_calls_come_back_whole(
    tool_format: ToolFormat, calls: list[Call], before: str, after: str, cut: int | None
) -> None:
    has_text = tool_format in {"hermes", "llama3_json", "mistral", "deepseek"}
    if tool_format in {"llama3_json", "json"}:
        after = after.lstrip(" \t\r\n,;")  # else it is taken for what separates calls
    text = (before if has_text else "") + written(tool_format, calls) + (after if has_text else "")
    answer = read_whole(tool_format, text, NAMES, cut)
    assert (answer.calls, answer.num_complete) == (calls, len(calls))
    assert answer.said == ((before.rstrip() + after) if after.strip() else before.rstrip()) * has_text


# ------------------------------ speed


@pytest.mark.parametrize("tool_format", FORMATS)
def test_a_long_answer_takes_time_in_proportion_to_its_length(tool_format: ToolFormat) -> None:
    def seconds(size: int, cut: int) -> float:
        long = Call("get_weather", json.dumps({"code": 'print("x")\n' * (size // 16)}))
        text = written(tool_format, [long]) + "word { [ < " * (size // 20)
        started = time.perf_counter()
        assert read_whole(tool_format, text, NAMES, cut).calls[0] == long
        return time.perf_counter() - started

    assert seconds(200_000, 200_000) < 1  # 10 to 60 ms on one Zen 4 core
    short, four_times = (min(seconds(size, 4) for _ in range(3)) for size in (40_000, 160_000))
    assert four_times < 10 * short  # 16 times, were it quadratic


def test_many_calls_without_their_end_marker_in_one_piece_take_time_in_proportion_to_their_number() -> None:
    def seconds(num_calls: int) -> float:
        parser = ToolText("hermes", NAMES)
        text = '<tool_call>{"name": "get_weather"} ' * num_calls
        started = time.perf_counter()
        parser.feed(text)
        parser.finish()
        assert parser.num_complete == num_calls
        return time.perf_counter() - started

    short, many_times = (min(seconds(number) for _ in range(2)) for number in (8_000, 128_000))
    assert many_times < 32 * short  # 16 times; 80 times, when what follows was copied at each


# ------------------------------ templates


@pytest.mark.parametrize("tool_format", [each for each in FORMATS if each != "json"])
def test_the_format_is_known_from_the_template(tool_format: ToolFormat) -> None:
    assert format_of(template(tool_format)) == tool_format


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content }}",
        "<tool_call>\n<function={{ call.name }}>",
        "<tool_call>{{ call.name }}<arg_key>",
        'ns<tool_call><invoke name="f">',
    ],
)
def test_a_format_that_is_none_of_ours_is_not_taken_for_one(source: str) -> None:
    assert format_of(source) is None


def sample_value(schema: dict[str, Any], dice: random.Random) -> Any:
    """Some value that fits, as awkward as the schema allows."""
    kinds = schema.get("type", "string")
    kind = kinds[0] if isinstance(kinds, list) else kinds
    if "enum" in schema:
        return dice.choice(schema["enum"])
    if kind in {"object", "dict"}:
        return {name: sample_value(each, dice) for name, each in schema.get("properties", {}).items()}
    if kind == "array":
        return [sample_value(schema.get("items", {}), dice) for _ in range(dice.randint(0, 3))]
    simple = {
        "integer": dice.randint(-5, 10**6), "number": dice.choice([0.5, -1e-7, 1e22]), "float": 2.5,
        "boolean": dice.random() < 0.5,
    }  # fmt: skip
    awkward = ['a "quoted" \\ path', "line\nbreak", "日本 😀", "</tool_call><|call|>", '[TOOL_CALLS]{"x": 1}', ""]
    return simple.get(kind, dice.choice(awkward))


@pytest.mark.skipif(FOLDER is None, reason="no folder of recorded prompts (shared/data)")
@pytest.mark.parametrize("tool_format", [each for each in FORMATS if each != "json"])
def test_calls_to_a_hundred_real_schemas_come_back_as_their_template_wrote_them(tool_format: ToolFormat) -> None:
    """Schemas of the Berkeley Function Calling Leaderboard, through a template and back."""
    assert FOLDER is not None
    dice = random.Random(7)
    rows = [json.loads(line) for line in (FOLDER / "prompts/bfcl_calib.jsonl").read_text().splitlines()]
    chat = ChatTemplate(template(tool_format))
    for row in dice.sample([row for row in rows if row["tools"]], 100):
        functions = [tool["function"] for tool in row["tools"]]
        wanted = [(f["name"], sample_value(f["parameters"], dice)) for f in dice.choices(functions, k=2)]
        if tool_format == "gpt_oss":
            wanted = wanted[:1]
        calls = [{"id": "c", "function": {"name": name, "arguments": value}} for name, value in wanted]
        asked = [{"role": "user", "content": "Hi"}]
        prompt = chat.render(asked, tools=row["tools"])
        assert all(function["name"] in prompt for function in functions)
        whole = chat.render(
            [*asked, {"role": "assistant", "content": "", "tool_calls": calls}],
            tools=row["tools"],
            add_generation_prompt=False,
        )
        answer = read_whole(tool_format, whole.removeprefix(prompt), [f["name"] for f in functions], dice.randint(1, 9))
        assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == wanted
        assert (answer.said, answer.num_complete) == ("", len(wanted))
