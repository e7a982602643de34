"""Published traces: read as they are, refused by line where they are broken, replayed row by row."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from arena.load.arrivals import SECOND_NS, Span, draw, first_row, seed_sequence
from arena.load.plan import Prompt, build_plan
from arena.load.spec import Cache, Fixed, ScenarioError, SyntheticWorkload, TraceArrivals, TraceWorkload
from arena.load.traces import Trace, parse_trace, timestamp_ns
from arena.load.workload import CellKey, prompt_source
from arena.load.workloads.lengths import read_column
from arena.load.workloads.material import Material, gather

PUBLISHED = Path(__file__).resolve().parents[4] / "shared" / "data" / "traces"  # beside the checkout

AZURE_2023 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:15:46.6805900,374,44\r\n"
    "2023-11-16 18:15:50.9951690,396,109\r\n"
    "2023-11-16 18:15:51.2224670,879,55"
)
AZURE_2024 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2024-05-10 00:00:00.009930+00:00,2162,5\n"
    "2024-05-10 00:00:01+00:00,2399,6\n"
    "2024-05-10 02:00:02.017335+02:00,76,15\n"
)
BURSTGPT = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,Conversation log\n"
    "45,ChatGPT,1087,230,1317,Conversation log\n"
    "118,GPT-4,417,0,417,API log\n"
    "118,GPT-4,417,276,693,API log\n"
)
BURSTGPT_2 = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "19440110.0,1722ac82,43,GPT-4,906,446,1352,Conversation log\n"
    "19440161.5,d5983bf9,2,ChatGPT,36,29,65,Conversation log\n"
)
MOONCAKE = (
    '{"timestamp": 0, "input_length": 1100, "output_length": 52, "hash_ids": [0, 1, 2]}\n'
    '{"timestamp": 3000, "input_length": 1300, "output_length": 26, "hash_ids": [0, 1, 3]}\n'
    '{"timestamp": 3500, "input_length": 400, "output_length": 9, "hash_ids": [7]}\n'
)


def published(name: str) -> Trace:
    path = PUBLISHED / name
    if not path.is_file():
        pytest.skip(f"the published trace {name} is not here")
    return parse_trace(path.read_text("utf-8"), name)


@pytest.mark.parametrize(
    ("text", "at_s", "prompt_tokens", "output_tokens"),
    [
        (AZURE_2023, [0, 4.314579, 4.541877], [374, 396, 879], [44, 109, 55]),
        (AZURE_2024, [0, 0.99007, 2.007405], [2162, 2399, 76], [5, 6, 15]),
        (BURSTGPT, [0, 40, 113], [472, 1087, 417], [18, 230, 276]),
        (BURSTGPT_2, [0, 51.5], [906, 36], [446, 29]),
        (MOONCAKE, [0, 3, 3.5], [1100, 1300, 400], [52, 26, 9]),
    ],
    ids=["azure-2023", "azure-2024", "burstgpt", "burstgpt-2", "mooncake"],
)
def test_each_published_format_is_read(
    text: str, at_s: list[float], prompt_tokens: list[int], output_tokens: list[int]
) -> None:
    trace = parse_trace(text, "t")
    assert trace.at_ns.tolist() == [round(at * SECOND_NS) for at in at_s]
    assert trace.prompt_tokens.tolist() == prompt_tokens
    assert trace.output_tokens.tolist() == output_tokens
    assert (trace.hash_ids is not None) == (text is MOONCAKE)


def test_a_timestamp_keeps_all_its_digits() -> None:
    assert timestamp_ns("2023-11-16 18:15:46.6805900") % SECOND_NS == 680_590_000
    assert timestamp_ns("2024-05-10 00:00:00.123456789+00:00") % SECOND_NS == 123_456_789
    assert timestamp_ns("2024-05-10T02:00:00Z") == timestamp_ns("2024-05-10 04:00:00+02:00")


def test_requests_that_failed_are_left_out_and_told() -> None:
    trace = parse_trace(BURSTGPT, "burst.csv")
    assert trace.words() == ["burst.csv: 1 rows without prompt or answer tokens are left out."]


def test_rows_out_of_order_are_put_in_order_and_told() -> None:
    head, first, second, *rest = AZURE_2024.splitlines()
    trace = parse_trace("\n".join([head, second, first, *rest]), "t.csv")
    assert np.all(np.diff(trace.at_ns) >= 0)
    assert trace.prompt_tokens.tolist() == [2162, 2399, 76]
    assert trace.words() == ["t.csv: 1 rows out of order were put in order."]


@pytest.mark.parametrize(
    ("text", "old", "new", "told"),
    [
        (AZURE_2023, "TIMESTAMP", "WHEN", "t.csv, line 1: this is no trace that is known here"),
        (AZURE_2023, ",396,", ",many,", "t.csv, line 3: could not convert"),
        (AZURE_2023, ",396,", ",39.6,", "t.csv, line 3: '39.6' is no whole number of tokens"),
        (AZURE_2023, ",396,", ",-396,", "t.csv, line 3: a number of tokens is below 0"),
        (AZURE_2023, ",396,", ",", "t.csv, line 3: the row has 2 columns, the header 3"),
        (AZURE_2023, "2023-11-16 18:15:51", "yesterday 18:15:51", "t.csv, line 4: 'yesterday"),
        (AZURE_2024, "2024-05-10 00:00:01", "2024-05-40 00:00:01", "t.csv, line 3: day"),
        (BURSTGPT, "45,", "nan,", "t.csv, line 3: cannot convert float NaN"),
        (MOONCAKE, '"input_length": 1300, ', "", "t.csv, line 2: this is no row of a Mooncake trace"),
        (MOONCAKE, "[0, 1, 3]", "[0, 1]", "t.csv, line 2: 1300 tokens are 3 blocks of 512, but there are 2 hash_ids"),
        (MOONCAKE, '{"timestamp": 3500', '{"timestamp": oops', "t.csv, line 3"),
    ],
)
def test_a_broken_row_is_refused_with_file_and_line(text: str, old: str, new: str, told: str) -> None:
    assert old in text
    with pytest.raises(ScenarioError) as caught:
        parse_trace(text.replace(old, new, 1), "t.csv")
    assert str(caught.value).startswith(told)
    assert str(caught.value).count("\n") == 0


@pytest.mark.parametrize("text", ["", "TIMESTAMP,ContextTokens,GeneratedTokens\n", "\n".join(MOONCAKE.split("\n")[:1])])
def test_a_trace_without_two_times_is_refused(text: str) -> None:
    with pytest.raises(ScenarioError, match=r"t\.csv"):
        parse_trace(text, "t.csv")


def test_only_the_first_rows_are_read_where_that_is_asked_for() -> None:
    assert len(parse_trace(AZURE_2023, "t", max_rows=2)) == 2


@pytest.mark.parametrize(
    ("name", "rows", "mean_prompt"),
    [
        ("AzureLLMInferenceTrace_conv.csv", 19366, 1155),
        ("AzureLLMInferenceTrace_code.csv", 8819, 2048),
        ("mooncake_conversation_trace.jsonl", 12031, 12035),
        ("mooncake_synthetic_trace.jsonl", 3993, 15325),
    ],
)
def test_the_published_files_are_read_whole(name: str, rows: int, mean_prompt: int) -> None:
    trace = published(name)
    assert len(trace) + trace.left_out == rows
    assert trace.prompt_tokens.mean() == pytest.approx(mean_prompt, rel=0.01)


def replayed(trace: Trace, *, rate: float = 2.0, seconds: int = 10, run: int = 1) -> tuple[list[int], float, int]:
    seed = seed_sequence(run=run, cell=0, replicate=0)
    drawn, offsets = draw(TraceArrivals(), rate_rps=rate, span=Span(0, seconds * SECOND_NS, 0), seed=seed, trace=trace)
    assert drawn.excerpt is not None
    return offsets.tolist(), drawn.excerpt.speed, drawn.excerpt.first_row


def irregular(rows: int = 400) -> Trace:
    """Gaps that vary tenfold, with requests at the same moment now and then."""
    gaps = np.random.default_rng(3).choice([0, 100, 250, 1000], size=rows)
    lines = [f"{at / 100:.2f},m,{10 + row},5,0,API log" for row, at in enumerate(np.cumsum(gaps))]
    return parse_trace("Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n" + "\n".join(lines), "t")


@pytest.mark.parametrize("rate", [0.3, 2.0, 40.0])
def test_a_replay_has_the_asked_rate_and_the_shape_of_the_trace(rate: float) -> None:
    """Also beyond the trace's end, where it goes round."""
    trace = irregular()
    offsets, speed, first = replayed(trace, rate=rate, seconds=30)
    assert len(offsets) == round(rate * 30)
    recorded = trace.times_from(first, len(offsets) + 1)
    assert np.allclose(offsets, (recorded[:-1] - recorded[0]) / speed, atol=1)
    assert (recorded[-1] - recorded[0]) / speed == pytest.approx(30 * SECOND_NS)


def test_replicates_replay_other_parts_of_a_trace_and_one_seed_the_same() -> None:
    trace = irregular()
    firsts = [replayed(trace, run=run)[2] for run in range(20)]
    assert len(set(firsts)) > 10
    assert replayed(trace, run=5) == replayed(trace, run=5)


def test_a_replay_may_begin_anywhere_but_never_lasts_no_time() -> None:
    """BurstGPT counts in whole seconds: an excerpt within one second could not be stretched."""
    trace = irregular()
    for run in range(300):
        first = first_row(trace, seed_sequence(run=run, cell=0, replicate=0))
        assert np.ptp(trace.times_from(first, 2)) > 0


def test_rows_of_the_workload_arrive_when_their_row_did() -> None:
    """Prompt lengths are those of the rows whose times are replayed, in order."""
    trace = irregular()
    key = CellKey(3, 1, 0)
    workload = TraceWorkload(path="t", max_prompt_tokens=300)
    plan = build_plan(
        "c",
        rate_rps=4,
        duration_s=10,
        warmup_s=2,
        cooldown_s=3,
        prompts=prompt_source(workload, key, Material(trace=trace)),
        seed=key.schedule_seed(),
        arrivals=TraceArrivals(),
        trace=trace,
    )
    assert plan.drawn is not None
    assert plan.drawn.excerpt is not None
    first = plan.drawn.excerpt.first_row
    rows = [(first + index) % len(trace) for index in range(len(plan.requests))]
    assert [request.prompt_tokens for request in plan.requests] == [min(10 + row, 300) for row in rows]
    assert {request.max_tokens for request in plan.requests} == {5}
    assert plan.kind == "trace"


def test_caps_are_told_with_the_number_of_rows_that_they_touch() -> None:
    workload = TraceWorkload(path="conv.csv", max_prompt_tokens=390, max_output_tokens=100)
    material = gather(workload, TraceArrivals(), read={"conv.csv": AZURE_2023}.__getitem__)
    assert material.arrivals is material.trace
    assert material.told == (
        "conv.csv: 2 of 3 prompts (66.7%) are cut to 390 tokens.",
        "conv.csv: 1 of 3 answers (33.3%) are cut to 100 tokens.",
    )


def test_arrivals_may_come_from_a_trace_whose_lengths_are_not_used() -> None:
    workload = SyntheticWorkload(prompt=Fixed(tokens=5), output=Fixed(tokens=5))
    material = gather(workload, TraceArrivals(path="b.csv"), read={"b.csv": BURSTGPT}.__getitem__)
    assert material.trace is None
    assert material.arrivals is not None
    assert len(material.arrivals) == 3


def round_of(cache: Cache, key: CellKey, lap: int = 0) -> list[list[str]]:
    """The words of the three prompts of one round through the small Mooncake trace, in a cell that begins with it."""
    trace = parse_trace(MOONCAKE, "m.jsonl")
    assert first_row(trace, key.schedule_seed()) == 0
    source = prompt_source(TraceWorkload(path="m.jsonl"), key, Material(trace=trace), cache=cache)
    prompts: list[Prompt] = [source(3 * lap + row) for row in range(3)]
    texts = [prompt.fields["messages"][0]["content"].split() for prompt in prompts]
    assert [len(text) for text in texts] == [prompt.prompt_tokens for prompt in prompts] == [1100, 1300, 400]
    return texts


def beginnings(texts: list[list[str]]) -> set[str]:
    return {" ".join(text[:5]) for text in texts}


def cells_that_begin_with_the_trace(count: int) -> list[CellKey]:
    trace = parse_trace(MOONCAKE, "m.jsonl")
    keys = (CellKey(1, 0, replicate) for replicate in range(100))
    return [key for key in keys if first_row(trace, key.schedule_seed()) == 0][:count]


def test_blocks_of_one_hash_have_one_text_and_all_others_their_own() -> None:
    first, second, third = round_of("warm", cells_that_begin_with_the_trace(1)[0])
    assert first[:1024] == second[:1024]  # hashes 0 and 1
    assert first[1024:1030] != second[1024:1030]  # 2 and 3
    assert third[:5] != first[:5]


def test_blocks_are_shared_over_cells_only_where_the_cache_is_meant_to_be_warm() -> None:
    one, other = cells_that_begin_with_the_trace(2)
    assert round_of("warm", one) == round_of("warm", other)
    assert not beginnings(round_of("cold", one)) & beginnings(round_of("cold", other))


def test_a_trace_that_goes_round_shares_nothing_with_its_first_round() -> None:
    key = cells_that_begin_with_the_trace(1)[0]
    assert not beginnings(round_of("warm", key)) & beginnings(round_of("warm", key, lap=1))


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (AZURE + "2023-11-16 18:15:50,1e300,1\n", "line 2: no request has more than 1,000,000,000 tokens"),
        (AZURE + f"2023-11-16 18:15:50,1,{10**18}\n", "line 2: no request has more than"),
        (AZURE + f"2023-11-16 18:15:50,{'1' * 200_000},1\n", "line 2: this is no row of a CSV file"),
        (AZURE + f"2023-11-16 18:15:50,{'x' * 5_000},1\n", "line 2: could not convert"),
        (AZURE + "0001-01-01 00:00:00,1,1\n9999-12-31 23:59:59,1,1\n", "are no trace of traffic"),
        (BURST + "1e12,m,4,4,8,x\n1,m,4,4,8,x\n", "are no trace of traffic"),
        (
            '{"timestamp": 1e300, "input_length": 1, "output_length": 1}\n' * 2,
            "needs at least two requests at different",
        ),
        ('{"timestamp": 0, "input_length": 1' + "0" * 30 + ', "output_length": 1}', "no request has more than"),
        ('{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [-1]}', "a hash id is below 0"),
        ('{"a": ' + "[" * 100_000, "this is no row of a Mooncake trace"),
        ('{"timestamp": 1e305, "input_length": 1, "output_length": 1}', "this is no row of a Mooncake trace"),
        ('"' + "x" * 200_000 + '"', "this is no trace that is known here"),
    ],
)
def test_numbers_that_overflow_are_told_with_their_line_and_not_traced(text: str, told: str) -> None:
    with pytest.raises(ScenarioError, match=r"^x\.csv") as caught:
        parse_trace(text, "x.csv")
    assert told in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_replay_of_more_rounds_than_nanoseconds_can_count_is_refused() -> None:
    trace = parse_trace(AZURE + "2020-01-01 00:00:00,1,1\n2023-11-16 18:15:50,1,1\n", "x.csv")
    assert trace.times_from(0, 40)[-1] > 0
    with pytest.raises(ScenarioError, match="290 years of its own time; give it more rows"):
        trace.times_from(0, 1_000)


def test_a_column_with_a_number_beyond_counting_is_refused() -> None:
    with pytest.raises(ScenarioError, match="line 2: `n` is no number of tokens"):
        read_column("n\n1e300\n", "x.csv", "n")
