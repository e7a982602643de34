"""What requests have in common on purpose: system messages, and the history of a conversation."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from arena.load.arrivals import SECOND_NS
from arena.load.plan import CellPlan, Prompt, Sessions, build_plan
from arena.load.spec import Cache, Constant, ConversationWorkload, Fixed, SharedPrefix, SyntheticWorkload, Uniform
from arena.load.workload import CellKey, prompt_source

CELL = CellKey(1, 0, 0)
CHAT = ConversationWorkload(
    min_turns=2, max_turns=4, min_think_s=1.0, max_think_s=3.0, prompt=Uniform(low=5, high=20), output=Fixed(tokens=7)
)


def assistant(**changes: object) -> SyntheticWorkload:
    prefix = SharedPrefix(**{"groups": 4, "tokens": 60, **changes})  # type: ignore[arg-type]
    return SyntheticWorkload(prompt=Fixed(tokens=20), output=Fixed(tokens=8), prefix=prefix)


def systems(workload: SyntheticWorkload, key: CellKey, count: int, cache: Cache = "warm") -> list[str | None]:
    """The system message of each request, None where there is none."""
    source = prompt_source(workload, key, cache=cache)
    messages = [source(seq).fields["messages"] for seq in range(count)]
    return [each[0]["content"] if each[0]["role"] == "system" else None for each in messages]


def test_requests_share_as_many_beginnings_of_the_length_as_there_are_groups() -> None:
    found = Counter(systems(assistant(), CellKey(1, 0, 0), 800))
    assert len(found) == 4
    assert {len(str(text).split()) for text in found} == {60}
    assert min(found.values()) > 140  # equally popular: 200 each
    firsts = {" ".join(str(text).split()[:4]) for text in found}
    assert len(firsts) == 4


def test_a_share_of_the_requests_has_none() -> None:
    found = systems(assistant(share=0.25), CellKey(1, 0, 0), 2000)
    assert sum(text is not None for text in found) == pytest.approx(500, abs=80)


def test_popularity_follows_zipfs_law() -> None:
    found = Counter(systems(assistant(groups=3, zipf=1.0), CellKey(1, 0, 0), 4400))
    expected = np.array([1, 1 / 2, 1 / 3]) * 4400 / (1 + 1 / 2 + 1 / 3)
    assert sorted(found.values(), reverse=True) == pytest.approx(expected, rel=0.1)


@pytest.mark.replay("R12")
def test_system_messages_are_those_of_other_cells_only_where_caches_are_meant_to_be_warm() -> None:
    def of(key: CellKey, cache: Cache) -> set[str | None]:
        return set(systems(assistant(), key, 100, cache))

    here, there, next_race = CellKey(1, 0, 0), CellKey(1, 3, 1), CellKey(2, 0, 0)
    assert of(here, "warm") == of(there, "warm")
    assert not of(here, "cold") & of(there, "cold")
    assert not of(here, "warm") & of(next_race, "warm")


def test_what_follows_the_system_message_is_nobody_elses() -> None:
    source = prompt_source(assistant(groups=1), CellKey(1, 0, 0), cache="warm")
    questions = {" ".join(source(seq).fields["messages"][1]["content"].split()[:4]) for seq in range(300)}
    assert len(questions) == 300
    assert source(0).prompt_tokens == 80


def sessions(key: CellKey = CELL) -> Sessions:
    source = prompt_source(CHAT, key)
    assert isinstance(source, Sessions)
    return source


def messages(prompt: Prompt) -> list[dict[str, str]]:
    found: list[dict[str, str]] = prompt.fields["messages"]
    return found


def test_each_turn_sends_the_whole_history_and_one_message_more() -> None:
    for number in range(50):
        turns = sessions().turns(number)
        assert 2 <= len(turns) <= 4
        for turn, (before, after) in enumerate(itertools.pairwise(turns)):
            earlier, later = messages(before.prompt), messages(after.prompt)
            assert later[: len(earlier)] == earlier
            assert [message["role"] for message in later] == ["user", *["assistant", "user"] * (turn + 1)]
            assert len(later[-2]["content"].split()) == before.prompt.max_tokens  # the planned answer is as long
            assert 1.0 <= (after.after_ns - before.after_ns) / SECOND_NS <= 3.0
        assert turns[0].after_ns == 0


def test_conversations_share_nothing_with_each_other() -> None:
    firsts = {" ".join(messages(sessions().turns(number)[0].prompt)[0]["content"].split()[:5]) for number in range(300)}
    assert len(firsts) == 300


def plan(*, rate: float = 10.0, run: int = 1, duration_s: float = 20, cooldown_s: float = 2) -> CellPlan:
    key = CellKey(run, 0, 0)
    return build_plan(
        "c",
        rate_rps=rate,
        duration_s=duration_s,
        warmup_s=0,
        cooldown_s=cooldown_s,
        prompts=sessions(key=key),
        seed=key.schedule_seed(),
    )


def test_the_rate_of_requests_is_the_one_asked_for_from_the_first_second_on() -> None:
    """Conversations that began before the cell are under way in it; without them it would begin with first turns
    alone, at a third of the rate.
    """
    counts = np.zeros(22)
    for run in range(60):
        seconds = [request.scheduled_ns // SECOND_NS for request in plan(run=run).requests]
        counts += np.bincount(seconds, minlength=22)
    assert counts.sum() / 60 / 22 == pytest.approx(10, rel=0.05)
    assert counts[0] / 60 == pytest.approx(10, rel=0.25)


def test_turns_keep_their_order_and_their_plan_is_the_same_for_all_engines() -> None:
    planned = plan()
    assert planned.sha256 == plan().sha256
    due = [request.scheduled_ns for request in planned.requests]
    assert due == sorted(due)
    assert [request.seq for request in planned.requests] == list(range(len(due)))
    depth: dict[bytes, int] = {}
    for request in planned.requests:
        conversation = request.body.split(b'"content":"')[1][:60]
        assert request.body.count(b'"role"') > depth.get(conversation, 0)
        depth[conversation] = request.body.count(b'"role"')


def test_keeping_load_up_for_longer_leaves_the_window_as_it_is() -> None:
    short, long = plan(cooldown_s=0), plan(cooldown_s=9)
    assert long.requests[: len(short.requests)] == short.requests


def test_conversations_may_begin_at_equal_gaps() -> None:
    key = CellKey(1, 0, 0)
    planned = build_plan(
        "c",
        rate_rps=6,
        duration_s=10,
        warmup_s=0,
        prompts=sessions(key=key),
        seed=key.schedule_seed(),
        arrivals=Constant(),
    )
    assert planned.drawn is not None
    assert planned.drawn.starts_ns is not None
    assert planned.drawn.rate_rps == pytest.approx(2.0)  # three turns each, on average
    assert np.diff(planned.drawn.starts_ns) == pytest.approx(SECOND_NS / 2, abs=2)
