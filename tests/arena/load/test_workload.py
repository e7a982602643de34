"""Prompts: the same for every engine, never the same twice, and as long as promised."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arena.load.plan import Prompt, Sessions, build_plan
from arena.load.spec import (
    ConversationWorkload,
    DocumentWorkload,
    Empirical,
    FileWorkload,
    Fixed,
    LogNormal,
    ScenarioError,
    StructuredWorkload,
    SyntheticWorkload,
    Uniform,
    Workload,
)
from arena.load.workload import CellKey, prompt_source
from arena.load.workloads.files import read_chats, read_documents
from arena.load.workloads.lengths import draw, read_column
from arena.load.workloads.material import Material
from arena.load.workloads.synthetic import FORM, FORM_TOKENS, QUESTION, QUESTION_TOKENS
from arena.load.workloads.words import WORDS

WORKLOAD = SyntheticWorkload(seed=5, prompt=Uniform(low=80, high=120), output=Fixed(tokens=32))
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
STORY = " ".join(f"sentence {number} of a story." for number in range(2000))

EVERY_KIND: dict[str, Workload] = {
    "synthetic": WORKLOAD,
    "jsonl": FileWorkload(path="p.jsonl", output=Fixed(tokens=16)),
    "documents": DocumentWorkload(path="d.txt", prompt=Uniform(low=200, high=300), output=Fixed(tokens=16)),
    "structured": StructuredWorkload(schema=SCHEMA, prompt=Uniform(low=40, high=60), output=Fixed(tokens=64)),
    "conversation": ConversationWorkload(prompt=Fixed(tokens=20), output=Fixed(tokens=10)),
}
MATERIAL = Material(chats=read_chats('{"prompt": "one"}\n{"prompt": "two"}\n', "p.jsonl"), documents=[STORY])
KEYS = [
    CellKey(run_seed, rung, replicate)
    for run_seed, rung, replicate in itertools.product((1, 2), (None, -7, 0, 1), (0, 1))
]


def text(prompt: Prompt) -> str:
    return str(prompt.fields["messages"][0]["content"])


def num_words(prompt: Prompt) -> int:
    return sum(len(message["content"].split()) for message in prompt.fields["messages"])


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_two_engines_get_the_same_plan_at_the_same_rung_and_replicate(kind: str) -> None:
    key = CellKey(run_seed=1, rung=4, replicate=0)
    plans = [
        build_plan(
            name,
            rate_rps=20,
            duration_s=3,
            warmup_s=1,
            cooldown_s=1,
            prompts=prompt_source(EVERY_KIND[kind], key, MATERIAL),
            seed=key.schedule_seed(),
        )
        for name in ("a", "b")
    ]
    assert plans[0].sha256 == plans[1].sha256
    assert plans[0].requests == plans[1].requests
    assert len(plans[0].requests) > 50


@pytest.mark.replay("R12", "R13")
@pytest.mark.parametrize("kind", EVERY_KIND)
def test_no_prompt_is_sent_twice_in_a_race_nor_in_the_next_one(kind: str) -> None:
    """Between cells, replicates and races: a sweep over one set of prompts measures a prefix cache after its first
    point.
    """
    prompts = [prompt_source(EVERY_KIND[kind], key, MATERIAL)(seq) for key in KEYS for seq in range(50)]
    assert len({prompt.prompt_id for prompt in prompts}) == len(prompts)


@pytest.mark.replay("R13")
@pytest.mark.parametrize("kind", EVERY_KIND)
def test_no_two_prompts_share_a_beginning_that_a_prefix_cache_could_hold(kind: str) -> None:
    source = prompt_source(EVERY_KIND[kind], CellKey(1, 0, 0), MATERIAL)
    beginnings = {" ".join(text(source(seq)).split()[:5]) for seq in range(500)}
    assert len(beginnings) == 500


@pytest.mark.replay("R14")
@pytest.mark.parametrize("kind", EVERY_KIND)
def test_warm_up_and_measured_prompts_are_disjoint(kind: str) -> None:
    """The burst that warms an engine up, the cell's own warm-up and what is measured have nothing in common."""
    key = CellKey(1, 3, 0)
    burst = prompt_source(EVERY_KIND[kind], CellKey(1, None, 0), MATERIAL)
    plan = build_plan(
        "c",
        rate_rps=50,
        duration_s=2,
        warmup_s=2,
        prompts=prompt_source(EVERY_KIND[kind], key, MATERIAL),
        seed=key.schedule_seed(),
    )
    warm = {request.prompt_id for request in plan.requests if request.scheduled_ns < plan.warmup_ns}
    measured = {request.prompt_id for request in plan.measured}
    assert warm
    assert measured
    assert not warm & measured
    assert not {burst(seq).prompt_id for seq in range(60)} & (warm | measured)


def test_a_prompt_has_as_many_words_as_it_was_drawn_tokens() -> None:
    source = prompt_source(WORKLOAD, CellKey(1, 0, 0))
    lengths = [len(text(source(seq)).split("\n\n")[0].split()) + QUESTION_TOKENS for seq in range(300)]
    assert (min(lengths), max(lengths)) == (80, 120)
    assert np.mean(lengths) == pytest.approx(100, abs=2.5)


@pytest.mark.replay("R35")
@pytest.mark.parametrize("tokens", [1, 2, QUESTION_TOKENS, QUESTION_TOKENS + 1])
def test_the_shortest_prompts_are_as_short_as_asked_and_not_empty(tokens: int) -> None:
    workload = SyntheticWorkload(prompt=Fixed(tokens=tokens), output=Fixed(tokens=4))
    prompt = prompt_source(workload, CellKey(1, 0, 0))(0)
    without_question = text(prompt).removesuffix("\n\n" + QUESTION)
    asked = QUESTION_TOKENS if QUESTION in text(prompt) else 0
    assert len(without_question.split()) + asked == tokens
    assert prompt.prompt_tokens == tokens


@given(tokens=st.integers(1, 400), seq=st.integers(0, 10_000), run=st.integers(0, 2**32))
@settings(max_examples=40)
def test_the_length_that_is_noted_is_the_length_of_the_text(tokens: int, seq: int, run: int) -> None:
    workload = SyntheticWorkload(prompt=Fixed(tokens=tokens), output=Fixed(tokens=4))
    prompt = prompt_source(workload, CellKey(run, 0, 0))(seq)
    if QUESTION in text(prompt):
        assert num_words(prompt) - len(QUESTION.split()) + QUESTION_TOKENS == tokens == prompt.prompt_tokens
    else:
        assert num_words(prompt) == tokens == prompt.prompt_tokens


def test_words_are_plain_distinct_and_lower_case() -> None:
    assert len(set(WORDS)) == len(WORDS) > 800
    assert all(word.isalpha() and word.islower() and word.isascii() for word in WORDS)


def test_drawn_lengths_keep_to_their_distribution_and_its_bounds() -> None:
    rng = np.random.default_rng(0)
    lognormal = [draw(LogNormal(median=100, sigma=0.6, low=20, high=400), rng) for _ in range(4000)]
    assert np.median(lognormal) == pytest.approx(100, rel=0.06)
    assert min(lognormal) >= 20
    assert max(lognormal) <= 400
    assert {draw(Fixed(tokens=7), rng) for _ in range(5)} == {7}


def test_lengths_of_a_file_are_drawn_as_often_as_they_stand_there_and_are_clipped() -> None:
    column = read_column("a,tokens\r\n1,10\r\n2,10.0\r\n3,30\r\n4,900\r\n", "l.csv", "tokens")
    lengths = Empirical(path="l.csv", column="tokens", low=1, high=500)
    rng = np.random.default_rng(0)
    drawn = [draw(lengths, rng, {("l.csv", "tokens"): column}) for _ in range(2000)]
    assert set(drawn) == {10, 30, 500}
    assert drawn.count(10) == pytest.approx(1000, abs=120)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("a,b\n1,2\n", "l.csv has no column `tokens`; it has a, b."),
        ("", "it has no header"),
        ("tokens\n", "no rows"),
        ("tokens\n5\nx\n", "l.csv, line 3: `tokens` is no number."),
        ("a,tokens\n5\n", "line 2: `tokens` is no number."),
        ("tokens\n1.5\n", "line 2: `tokens` is no number of tokens"),
        ("tokens\n-1\n", "line 2: `tokens` is no number of tokens"),
        ("tokens\nnan\n", "line 2: `tokens` is no number of tokens"),
    ],
)
def test_a_broken_file_of_lengths_is_refused_with_its_line(content: str, told: str) -> None:
    with pytest.raises(ScenarioError, match=told):
        read_column(content, "l.csv", "tokens")


def test_lines_of_a_file_are_made_unique_and_keep_their_shape() -> None:
    workload = FileWorkload(path="p.jsonl", output=Fixed(tokens=16))
    turns = '[{"role": "system", "content": "be brief"}, {"role": "user", "content": "two"}]'
    chats = read_chats('{"prompt": "one"}\n\n{"messages": ' + turns + "}\n", "p.jsonl")
    source = prompt_source(workload, CellKey(1, 0, 0), Material(chats=chats))
    prompts = [source(seq) for seq in range(40)]
    assert len({prompt.prompt_id for prompt in prompts}) == 40
    assert {len(prompt.fields["messages"]) for prompt in prompts} == {1, 2}
    assert all(text(prompt).endswith(("one", "be brief")) for prompt in prompts)
    assert text(source(0)) == text(source(0))


TOOL = '{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}'


def test_tools_of_a_row_reach_the_engine_with_the_scenarios_choice_unless_the_row_has_its_own() -> None:
    rows = (
        f'{{"messages": [{{"role": "user", "content": "a"}}], "tools": [{TOOL}], "subset": "x"}}\n'
        f'{{"prompt": "b", "tools": [{TOOL}], "tool_choice": "none"}}\n'
        '{"prompt": "c", "response_format": {"type": "json_object"}}\n'
    )
    workload = FileWorkload(path="p.jsonl", output=Fixed(tokens=16), tool_choice="required", natural_end=True)
    source = prompt_source(workload, CellKey(1, 0, 0), Material(chats=read_chats(rows, "p.jsonl")))
    fields = {text(prompt)[-1]: prompt.fields for prompt in map(source, range(40))}
    assert fields["a"]["tool_choice"] == "required"
    assert fields["a"]["tools"][0]["function"]["name"] == "look_up"
    assert "subset" not in fields["a"]
    assert fields["b"]["tool_choice"] == "none"
    assert "tool_choice" not in fields["c"]
    assert fields["c"]["response_format"] == {"type": "json_object"}


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ("", "holds no prompts"),
        ("{", "line 1: this is not JSON"),
        ('{"a": ' + "[" * 100_000, "line 1: this is not JSON"),
        ('{"prompt": "a"}\n{"text": 1}', "line 2: expected an object with"),
        ('["a"]', "line 1: expected an object"),
        ('{"messages": []}', "line 1: expected an object"),
        ('{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}', "both text"),
        ('{"messages": [{"content": "a"}]}', "both text"),
        ('{"messages": [{"role": "user", "content": null}]}', "both text"),
        ('{"prompt": "a", "tools": {}}', "line 1: `tools` must be a list"),
        ('{"prompt": "a", "tools": [{"name": "x"}]}', "line 1: `tools` must be a list"),
    ],
)
def test_a_broken_prompts_file_is_refused_with_its_line(lines: str, told: str) -> None:
    with pytest.raises(ScenarioError, match=told):
        read_chats(lines, "p.jsonl")


def test_a_prompt_with_a_line_separator_or_a_byte_order_mark_is_one_line() -> None:
    """JSON may hold U+2028 as it is; Python's own idea of lines would cut the object in two."""
    rows = '\ufeff{"prompt": "one\u2028two\u0085three"}\r\n{"prompt": "four"}\n'
    chats = read_chats(rows, "p.jsonl")
    assert [chat.messages[0]["content"] for chat in chats] == ["one\u2028two\u0085three", "four"]


def test_excerpts_of_documents_come_from_all_over_them_and_end_with_the_question() -> None:
    workload = DocumentWorkload(
        path="d.txt", question="What happened?", prompt=Fixed(tokens=100), output=Fixed(tokens=8)
    )
    source = prompt_source(workload, CellKey(1, 0, 0), Material(documents=[STORY]))
    prompts = [source(seq) for seq in range(200)]
    bodies = [text(prompt).split("\n", 1)[1] for prompt in prompts]
    assert all(body.endswith("\n\nWhat happened?") for body in bodies)
    places = [STORY.index(body.removesuffix("\n\nWhat happened?")) / len(STORY) for body in bodies]
    assert min(places) < 0.1
    assert max(places) > 0.85
    assert {len(body) for body in bodies} == {440 + len("\n\nWhat happened?")}
    assert {prompt.prompt_tokens for prompt in prompts} == {100}


def test_a_document_shorter_than_asked_is_sent_whole_and_its_length_is_noted() -> None:
    workload = DocumentWorkload(path="d.txt", prompt=Fixed(tokens=1000), output=Fixed(tokens=8))
    prompt = prompt_source(workload, CellKey(1, 0, 0), Material(documents=["short " * 22]))(0)
    assert prompt.prompt_tokens == 30


@pytest.mark.parametrize(
    ("content", "name", "told"),
    [
        ("", "d.txt", "d.txt holds no text"),
        ('{"text": "a"}\n{"body": "b"}', "d.jsonl", "d.jsonl, line 2: expected an object with the document's text"),
        ('{"text": "  "}', "d.jsonl", "without any"),
    ],
)
def test_a_file_without_documents_is_refused(content: str, name: str, told: str) -> None:
    with pytest.raises(ScenarioError, match=told):
        read_documents(content, name, "text")


def test_a_transcript_is_a_document() -> None:
    rows = (
        '{"said": [{"speaker": "Ann", "content": "Hello."}, {"speaker": "Bo", "content": "Well."}]}\n'
        '{"said": ["One.", "Two."]}'
    )
    assert read_documents(rows, "d.jsonl", "said") == ["Ann: Hello.\nBo: Well.", "One.\nTwo."]
    with pytest.raises(ScenarioError, match="line 1"):
        read_documents('{"said": [1]}', "d.jsonl", "said")


def test_a_structured_prompt_asks_for_the_schema() -> None:
    prompt = prompt_source(EVERY_KIND["structured"], CellKey(1, 0, 0))(3)
    form = prompt.fields["response_format"]
    assert form["type"] == "json_schema"
    assert form["json_schema"]["schema"] == SCHEMA
    assert len(text(prompt).removesuffix("\n\n" + FORM).split()) + FORM_TOKENS == prompt.prompt_tokens


def test_prompts_that_differ_in_their_schema_alone_have_other_names() -> None:
    other = StructuredWorkload(schema={"type": "string"}, prompt=Uniform(low=40, high=60), output=Fixed(tokens=64))
    sources = [prompt_source(workload, CellKey(1, 0, 0)) for workload in (EVERY_KIND["structured"], other)]
    assert sources[0](0).fields["messages"] == sources[1](0).fields["messages"]
    assert sources[0](0).prompt_id != sources[1](0).prompt_id


def test_a_source_of_conversations_is_one_of_single_prompts_for_the_warm_up() -> None:
    source = prompt_source(EVERY_KIND["conversation"], CellKey(1, None, 0))
    assert isinstance(source, Sessions)
    assert source(3).prompt_id == source.turns(3)[-1].prompt.prompt_id
