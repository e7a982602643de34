"""A scenario says exactly what it means, or it is refused with a sentence that says what to change."""

import gzip
import re
from pathlib import Path

import pytest

from arena.judging.ladder import SearchSettings
from arena.load.spec import Fixed, ScenarioError, SyntheticWorkload, Uniform
from arena.race.config import load_scenario, scenario_names, text_of
from arena.race.scenario import Scenario
from arena.race.scenario_file import parse

GOOD = """
name: small
model: m
workload: {kind: synthetic, seed: 3, prompt: {kind: uniform, low: 10, high: 20}, output: {kind: fixed, tokens: 8}}
slo: {ttft_ms: 500, tpot_ms: 50}
search: {start_rps: 2, step: 1.5, min_rps: 0.5, max_rps: 40}
quick: {cell: {duration_s: 2}, workload: {output: {kind: fixed, tokens: 4}}}
"""


def test_a_scenario_is_read_with_its_defaults() -> None:
    scenario = parse(GOOD, source="small.yaml")
    assert scenario.slo.percentile == 99
    assert scenario.cell.duration_s == 30
    assert isinstance(scenario.workload, SyntheticWorkload)
    assert scenario.workload.prompt == Uniform(low=10, high=20)
    assert scenario.longest_output == 8


def test_quick_overrides_only_what_it_names() -> None:
    quick = parse(GOOD, source="small.yaml", quick=True)
    assert quick.cell.duration_s == 2
    assert quick.cell.warmup_s == 4
    assert isinstance(quick.workload, SyntheticWorkload)
    assert quick.workload.output == Fixed(tokens=4)
    assert quick.workload.prompt == Uniform(low=10, high=20)


def test_another_kind_of_lengths_replaces_the_old_ones_whole() -> None:
    text = GOOD.replace("quick: {", "quick: {slo: {ttft_ms: 9}, ").replace(
        "output: {kind: fixed, tokens: 4}", "prompt: {kind: fixed, tokens: 5}"
    )
    quick = parse(text, source="x", quick=True)
    assert isinstance(quick.workload, SyntheticWorkload)
    assert quick.workload.prompt == Fixed(tokens=5)
    assert (quick.slo.ttft_ms, quick.slo.tpot_ms) == (9, 50)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("ttft_ms: 500", "ttft: 500", "unknown key `slo.ttft`; did you mean `ttft_ms`?"),
        ("model: m", "modle: m", "unknown key `modle`; did you mean `model`?"),
        ("low: 10", "lowest: 10", "unknown key `workload.prompt.lowest`; did you mean `low`?"),
        ("tokens: 8", "tokens: 8, zzz: 1", "unknown key `workload.output.zzz`; known here: tokens, kind."),
        ("cell: {duration_s: 2}", "cell: {durations: 2}", "with `quick`: unknown key `cell.durations`"),
        ("kind: synthetic", "kind: sintetic", "Invalid value 'sintetic' (in `workload.kind`)."),
        ("ttft_ms: 500", "ttft_ms: -1", "Expected `float` > 0.0 (in `slo.ttft_ms`)."),
        ("low: 10, high: 20", "low: 30, high: 20", "`workload.prompt.low` is above `high` (30 > 20)."),
        ("min_rps: 0.5", "min_rps: 50", "`search.min_rps` is above `search.max_rps`."),
        ("min_rps: 0.5, max_rps: 40", "min_rps: 2.1, max_rps: 2.9", "no rung of the ladder lies between"),
        ("name: small", "name: [", "This is not valid YAML"),
        ("quick: {", "quick: [{", "This is not valid YAML"),
    ],
)
def test_a_corrupt_scenario_is_refused_with_the_place_and_what_to_do(old: str, new: str, told: str) -> None:
    assert old in GOOD
    with pytest.raises(ScenarioError) as caught:
        parse(GOOD.replace(old, new, 1), source="small.yaml")
    assert str(caught.value).startswith("small.yaml")
    assert told in str(caught.value)


@pytest.mark.parametrize("text", ["", "- a\n- b", "just words", "name: x\nquick: 3"])
def test_what_is_no_mapping_is_no_scenario(text: str) -> None:
    with pytest.raises(ScenarioError, match="mapping"):
        parse(text, source="x.yaml")


def test_a_missing_part_is_named() -> None:
    with pytest.raises(ScenarioError, match="missing required field `slo`"):
        parse(GOOD.replace("slo: {ttft_ms: 500, tpot_ms: 50}", ""), source="x.yaml")


def test_the_ladder_stays_between_the_two_rates() -> None:
    settings = parse(GOOD, source="x").settings
    assert settings.rate(settings.min_rung) >= 0.5 > settings.rate(settings.min_rung - 1)
    assert settings.rate(settings.max_rung) <= 40 < settings.rate(settings.max_rung + 1)
    assert [settings.nearest_rung(settings.rate(rung)) for rung in range(-3, 8)] == list(range(-3, 8))


def test_the_deadline_is_when_both_limits_are_used_up() -> None:
    assert parse(GOOD, source="x").slo.deadline_s(8) == pytest.approx(0.5 + 7 * 0.05)


def test_a_slow_cell_is_prolonged_until_it_may_hold_enough_requests() -> None:
    cell = parse(GOOD, source="x").cell
    assert cell.window_s(100) == 30
    assert cell.window_s(0.1) == pytest.approx(cell.min_requests / 0.1)


def test_a_scenario_survives_its_way_through_the_store() -> None:
    scenario = parse(GOOD, source="x")
    assert Scenario.from_json(scenario.to_json()) == scenario


def test_every_shipped_scenario_is_valid_in_both_forms() -> None:
    names = scenario_names()
    assert "chat" in names
    for name in names:
        assert load_scenario(name, quick=False).scenario.name == name
        assert load_scenario(name, quick=True).scenario.name == name


def test_an_unknown_scenario_lists_the_known_ones() -> None:
    with pytest.raises(ScenarioError, match=r"no scenario 'chta'.*chat"):
        load_scenario("chta", quick=False)


def test_a_prompts_file_is_found_beside_its_scenario_and_missed_by_name(tmp_path: Path) -> None:
    text = GOOD.split("workload:")[0] + (
        "workload: {kind: jsonl, path: p.jsonl, output: {kind: fixed, tokens: 8}}\nslo: {ttft_ms: 500, tpot_ms: 50}\n"
    )
    (tmp_path / "s.yaml").write_text(text)
    with pytest.raises(ScenarioError, match=r"p\.jsonl"):
        load_scenario(str(tmp_path / "s.yaml"), quick=False)
    (tmp_path / "p.jsonl").write_text('{"prompt": "hello"}\n')
    assert load_scenario(str(tmp_path / "s.yaml"), quick=False, model="other").scenario.model == "other"
    chats = load_scenario(str(tmp_path / "s.yaml"), quick=False).material.chats
    assert [chat.messages for chat in chats] == [[{"role": "user", "content": "hello"}]]


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("ttft_ms: 500", "ttft_ms: .nan", "(in `slo.ttft_ms`)"),
        ("ttft_ms: 500", "ttft_ms: .inf", "(in `slo.ttft_ms`)"),
        ("max_rps: 40", "max_rps: .inf", "(in `search.max_rps`)"),
        ("max_rps: 40", "max_rps: 1e300", "(in `search.max_rps`)"),
        ("min_rps: 0.5", "min_rps: 1e-9", "(in `search.min_rps`)"),
        ("step: 1.5", "step: 1.0000001", "(in `search.step`)"),
        ("duration_s: 2", "duration_s: .inf", "(in `cell.duration_s`)"),
        ("name: small", "name: ../../outside", "(in `name`)"),
        ("name: small", "name: ''", "(in `name`)"),
        ("name: small", "name: 7", "(in `name`)"),
    ],
)
def test_a_number_or_a_name_that_would_break_the_race_later_is_refused_now(old: str, new: str, told: str) -> None:
    assert old in GOOD
    with pytest.raises(ScenarioError) as caught:
        parse(GOOD.replace(old, new, 1), source="small.yaml")
    assert told in str(caught.value)


def test_rungs_of_the_finest_ladder_have_rates_of_their_own_down_to_its_lowest_rate() -> None:
    """Two rungs with one rate would share a cell's name, and the second cell would replace the first."""
    settings = SearchSettings(start_rps=0.001, step=1.01)
    rates = [settings.rate(rung) for rung in range(1900)]
    assert len({f"{rate:g}" for rate in rates}) == len(rates)
    assert [settings.nearest_rung(rate) for rate in rates] == list(range(1900))


def test_a_broken_line_of_the_prompts_is_told_before_any_engine_starts(tmp_path: Path) -> None:
    text = GOOD.split("workload:")[0] + (
        "workload: {kind: jsonl, path: p.jsonl, output: {kind: fixed, tokens: 8}}\nslo: {ttft_ms: 500, tpot_ms: 50}\n"
    )
    (tmp_path / "s.yaml").write_text(text)
    for content, told in (("", "holds no prompts"), ('{"prompt": "a"}\n{"x": 1}\n', r"p\.jsonl, line 2")):
        (tmp_path / "p.jsonl").write_text(content)
        with pytest.raises(ScenarioError, match=told):
            load_scenario(str(tmp_path / "s.yaml"), quick=False)


def with_workload(text: str) -> str:
    """The good scenario with other words about what is sent and when."""
    return "\n".join(line for line in GOOD.splitlines() if not line.startswith(("workload", "quick"))) + "\n" + text


SYNTHETIC = "workload: {kind: synthetic, prompt: {kind: fixed, tokens: 5}, output: {kind: fixed, tokens: 5}"
TALK = "workload: {kind: conversation, prompt: {kind: fixed, tokens: 5}, output: {kind: fixed, tokens: 5}"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (SYNTHETIC + "}\narrivals: {kind: gama}", "Invalid value 'gama' (in `arrivals.kind`)."),
        (SYNTHETIC + "}\narrivals: {kind: gamma}", "missing required field `cv`"),
        (SYNTHETIC + "}\narrivals: {kind: gamma, cv: 0}", "(in `arrivals.cv`)"),
        (SYNTHETIC + "}\narrivals: {kind: ramp, form: 1, to: 2}", "unknown key `arrivals.form`; did you mean `from`?"),
        (SYNTHETIC + "}\narrivals: {kind: ramp, from: 0, to: 0}", "nothing would ever arrive"),
        (SYNTHETIC + "}\narrivals: {kind: steps, levels: [0, 0]}", "nothing would ever arrive"),
        (SYNTHETIC + "}\narrivals: {kind: steps, levels: []}", "(in `arrivals.levels`)"),
        (SYNTHETIC + "}\narrivals: {kind: steps, levels: [1, 2], lengths: [1]}", "has 1 entries and `levels` 2"),
        (SYNTHETIC + "}\narrivals: {kind: steps, levels: [1, 2], lengths: [1, 0]}", "a step of no length"),
        (SYNTHETIC + "}\narrivals: {kind: trace}", "`arrivals.path` is missing"),
        (SYNTHETIC + ", prefix: {tokens: 9, group: 2}}", "unknown key `workload.prefix.group`; did you mean `groups`?"),
        (SYNTHETIC + ", prefix: {tokens: 9, share: 0}}", "(in `workload.prefix.share`)"),
        (SYNTHETIC + "}\ncache: hot", "(in `cache`)"),
        (
            SYNTHETIC + "}\narrivals: {kind: constant}\nload: {kind: closed, concurrency: 2}",
            "`arrivals` say nothing of a closed loop",
        ),
        (TALK + ", min_turns: 5}", "`workload.min_turns` is above `max_turns` (5 > 4)."),
        (TALK + ", min_think_s: 7}", "`workload.min_think_s` is above `max_think_s`"),
        (
            "workload: {kind: structured, schema: {properties: {}}, prompt: {kind: fixed, tokens: 5}, "
            "output: {kind: fixed, tokens: 5}}",
            "`workload.schema` is no JSON schema",
        ),
        ("workload: {kind: trace, path: ''}", "(in `workload.path`)"),
        (SYNTHETIC.replace("kind: fixed, tokens: 5", "kind: empirical, path: l.csv, column: n", 1) + "}", "`high`"),
    ],
)
def test_what_cannot_be_meant_of_arrivals_and_workloads_is_refused(text: str, told: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        parse(with_workload(text), source="small.yaml")
    assert str(caught.value).startswith("small.yaml")
    assert told in str(caught.value)


def test_a_broken_row_of_a_trace_and_a_missing_file_are_told_before_any_engine_starts(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(with_workload("workload: {kind: trace, path: t.csv}\narrivals: {kind: trace}"))
    with pytest.raises(ScenarioError, match=r"t\.csv cannot be read"):
        load_scenario(str(tmp_path / "s.yaml"), quick=False)
    (tmp_path / "t.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,12,oops\n")
    with pytest.raises(ScenarioError, match=r"t\.csv, line 2: could not convert"):
        load_scenario(str(tmp_path / "s.yaml"), quick=False)


def test_an_answer_may_be_as_long_as_its_longest_length_or_cap() -> None:
    lengths = "output: {kind: uniform, low: 3, high: 9}"
    jsonl = f"workload: {{kind: jsonl, path: p, natural_end: true, {lengths}}}"
    assert parse(with_workload(jsonl), source="x").longest_output == 9
    assert not parse(with_workload(jsonl), source="x").exact_output
    trace = parse(with_workload("workload: {kind: trace, path: t, max_output_tokens: 77}"), source="x")
    assert trace.longest_output == 77
    assert trace.exact_output


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("options: &all {vllm: *all}", "aliases"),
        ("options: {vllm: {a: &a [x, x]}, tgi: {a: *a}}", "aliases"),
        ("title: " + "[" * 20_000, "nested more than 32 levels"),
        ("rounds: " + "9" * 5_000, "is not valid YAML"),
        ("title: 2020-13-45", "is not valid YAML"),
        ('title: "\\ud800"', "line 8 has a NUL or half of a surrogate pair"),
        ('title: "a\\0b"', "line 8 has a NUL or half of a surrogate pair"),
        ("title: !!python/object/apply:os.getcwd []", "tags"),
        ("model: other", "The key `model` is written twice"),
    ],
)
def test_yaml_that_would_end_in_a_traceback_or_fill_the_memory_is_refused_with_a_sentence(line: str, told: str) -> None:
    with pytest.raises(ScenarioError, match=r"^small\.yaml: ") as caught:
        parse(f"{GOOD}{line}\n", source="small.yaml")
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("packed.csv", gzip.compress(b"TIMESTAMP,ContextTokens,GeneratedTokens"), "is not text in UTF-8; unpack it"),
        ("latin.csv", b"caf\xe9", "is not text in UTF-8"),
        ("folder.csv", None, "Is a directory"),
    ],
)
def test_a_packed_file_of_a_scenario_is_named_with_what_to_do(
    name: str, content: bytes | None, told: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(ScenarioError, match=re.escape(str(path))) as caught:
        text_of(path)
    assert told in str(caught.value)


def test_a_device_without_an_end_is_not_read() -> None:
    with pytest.raises(ScenarioError, match="is a device; name a file"):
        text_of(Path("/dev/zero"))
