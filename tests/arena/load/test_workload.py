"""Prompts: the same for every engine, never the same twice, and as long as promised."""

import itertools

import numpy as np
import pytest

from arena.load.plan import Prompt, build_plan
from arena.load.workload import QUESTION_TOKENS, WORDS, CellKey, draw, prompt_source, read_prompts
from arena.race.scenario import FileWorkload, Fixed, LogNormal, ScenarioError, SyntheticWorkload, Uniform

WORKLOAD = SyntheticWorkload(seed=5, prompt=Uniform(low=80, high=120), output=Fixed(tokens=32))


def text(prompt: Prompt) -> str:
    return str(prompt.fields["messages"][0]["content"])


def test_two_engines_get_the_same_plan_at_the_same_rung_and_replicate() -> None:
    key = CellKey(run_seed=1, rung=4, replicate=0)
    plans = [
        build_plan(
            name, rate_rps=20, duration_s=3, warmup_s=1, prompts=prompt_source(WORKLOAD, key), seed=key.schedule_seed()
        )
        for name in ("a", "b")
    ]
    assert plans[0].sha256 == plans[1].sha256
    assert plans[0].requests == plans[1].requests


@pytest.mark.replay("R12")
def test_no_prompt_is_sent_twice_in_a_race_nor_in_the_next_one() -> None:
    keys = [
        CellKey(run_seed, rung, replicate)
        for run_seed, rung, replicate in itertools.product((1, 2), (None, -7, 0, 1), (0, 1))
    ]
    prompts = [prompt_source(WORKLOAD, key)(seq) for key in keys for seq in range(50)]
    assert len({prompt.prompt_id for prompt in prompts}) == len(prompts)


@pytest.mark.replay("R12", "R13")
def test_no_two_prompts_share_a_beginning_that_a_prefix_cache_could_hold() -> None:
    source = prompt_source(WORKLOAD, CellKey(1, 0, 0))
    beginnings = {" ".join(text(source(seq)).split()[:4]) for seq in range(500)}
    assert len(beginnings) == 500


@pytest.mark.replay("R14")
def test_warm_up_and_measured_prompts_are_disjoint_because_one_numbering_covers_both() -> None:
    key = CellKey(1, 3, 0)
    plan = build_plan(
        "c", rate_rps=50, duration_s=2, warmup_s=2, prompts=prompt_source(WORKLOAD, key), seed=key.schedule_seed()
    )
    warm = {request.prompt_id for request in plan.requests if request.scheduled_ns < plan.warmup_ns}
    assert warm
    assert not warm & {request.prompt_id for request in plan.measured}


def test_a_prompt_has_as_many_words_as_it_was_drawn_tokens() -> None:
    source = prompt_source(WORKLOAD, CellKey(1, 0, 0))
    lengths = [len(text(source(seq)).split("\n\n")[0].split()) + QUESTION_TOKENS for seq in range(300)]
    assert (min(lengths), max(lengths)) == (80, 120)
    assert np.mean(lengths) == pytest.approx(100, abs=2.5)


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


def test_lines_of_a_file_are_made_unique_and_keep_their_shape() -> None:
    workload = FileWorkload(path="p.jsonl", output=Fixed(tokens=16))
    turns = '[{"role": "system", "content": "be brief"}, {"role": "user", "content": "two"}]'
    lines = '{"prompt": "one"}\n\n{"messages": ' + turns + "}\n"
    source = prompt_source(workload, CellKey(1, 0, 0), prompts_text=lines)
    prompts = [source(seq) for seq in range(40)]
    assert len({prompt.prompt_id for prompt in prompts}) == 40
    assert {len(prompt.fields["messages"]) for prompt in prompts} == {1, 2}
    assert all(text(prompt).endswith(("one", "be brief")) for prompt in prompts)
    assert text(source(0)) == text(source(0))


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ("", "holds no prompts"),
        ("{", "line 1: this is not JSON"),
        ('{"prompt": "a"}\n{"text": 1}', "line 2: expected an object with"),
        ('["a"]', "line 1: expected an object"),
        ('{"messages": []}', "line 1: expected an object"),
        ('{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}', "both text"),
        ('{"messages": [{"content": "a"}]}', "both text"),
        ('{"messages": [{"role": "user", "content": null}]}', "both text"),
    ],
)
def test_a_broken_prompts_file_is_refused_with_its_line(lines: str, told: str) -> None:
    workload = FileWorkload(path="p.jsonl", output=Fixed(tokens=16))
    with pytest.raises(ScenarioError, match=told):
        prompt_source(workload, CellKey(1, 0, 0), prompts_text=lines)


def test_a_prompt_with_a_line_separator_or_a_byte_order_mark_is_one_line() -> None:
    """JSON may hold U+2028 as it is; Python's own idea of lines would cut the object in two."""
    rows = '\ufeff{"prompt": "one\u2028two\u0085three"}\r\n{"prompt": "four"}\n'
    assert [row[0]["content"] for row in read_prompts(rows, "p.jsonl")] == ["one\u2028two\u0085three", "four"]
