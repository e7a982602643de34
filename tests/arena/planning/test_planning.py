"""Plans: what a queue needs, whom the evidence speaks for, and whether a plan holds on arrivals not seen before."""

from __future__ import annotations

import json
import math
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from arena.commands.plan import app
from arena.evidence.document import Entry, Limits
from arena.judging.economy import Economy
from arena.judging.shape import Bucket, Shape
from arena.load.traces import parse_trace
from arena.planning.backtest import backtest
from arena.planning.catalogue import capability, facts_of
from arena.planning.load import burstiness, recorded, repeated_share, steady
from arena.planning.needs import EngineFacts, Needs
from arena.planning.queue import attainment, replicas_needed, service_rate
from arena.planning.tables import answer, backtest_markdown, interval, refusals, why
from arena.planning.traffic import Plan, plan
from tests.arena.evidence.test_evidence import HOSTS, NOW, entry, put

TRACES = Path(__file__).parents[4] / "shared" / "data" / "traces"
LIMITS = Limits(ttft_ms=1000, tpot_ms=60, percentile=99)
P99 = {"patience_s": 1.0, "allowed": 0.01}

# ------------------------------------------------------------------------------------------------------- the queue


@pytest.mark.parametrize(("goodput_rps", "patience_s"), [(0.5, 1.0), (4.0, 1.0), (30.0, 0.2)])
def test_a_simulated_replica_has_just_the_goodput_that_was_raced(goodput_rps: float, patience_s: float) -> None:
    rate = service_rate(goodput_rps=goodput_rps, patience_s=patience_s, allowed=0.01)
    missed = goodput_rps / rate * math.exp(-(rate - goodput_rps) * patience_s)
    assert missed == pytest.approx(0.01)
    arrivals = steady(rate_rps=goodput_rps).arrivals_s
    assert attainment(arrivals, replicas=1, service_rps=rate, patience_s=patience_s) == pytest.approx(0.99, abs=0.004)
    beyond = steady(rate_rps=goodput_rps * 3).arrivals_s
    assert attainment(beyond, replicas=1, service_rps=rate, patience_s=patience_s) < 0.97


@pytest.mark.parametrize(("rate_rps", "fewest"), [(2.0, 1), (7.9, 2), (8.1, 3), (40.0, 10)])
def test_a_replica_is_never_planned_to_do_more_than_was_raced(rate_rps: float, fewest: int) -> None:
    """Many replicas that share a queue could be filled further before anyone waits: nobody has raced what they do
    then.
    """
    needed = replicas_needed(steady(rate_rps=rate_rps).arrivals_s, goodput_rps=4.0, **P99)
    assert needed is not None
    assert fewest <= needed <= fewest + 1


def test_bursts_need_more_replicas_than_the_mean_rate_says() -> None:
    even, bursty = (
        replicas_needed(steady(rate_rps=16, cv=cv).arrivals_s, goodput_rps=4.0, **P99) or 0 for cv in (1.0, 6.0)
    )
    assert even <= 5
    assert bursty >= 2 * even


def test_a_rush_hour_counts_though_the_day_as_a_whole_would_hold() -> None:
    calm, rush = np.arange(0, 900, 1.0), np.arange(900, 1000, 0.02)
    arrivals = np.concatenate([calm, rush])
    day = replicas_needed(arrivals[: len(calm)], goodput_rps=4.0, **P99)
    hours = replicas_needed(arrivals, goodput_rps=4.0, periods=10, **P99)
    assert (day, hours) == (1, pytest.approx(8, abs=3))


def test_requests_that_all_come_at_once_are_no_endless_search() -> None:
    bunched = np.repeat([0.0, 1.0], 20_000)
    assert replicas_needed(bunched, goodput_rps=0.01, **P99) is None


def test_burstiness_is_told_by_the_fullest_window_and_the_dispersion_of_counts() -> None:
    poisson, bursty = (burstiness(steady(rate_rps=50, cv=cv), 1.0) for cv in (1.0, 4.0))
    assert poisson.dispersion == pytest.approx(1.0, abs=0.25)
    assert 1.2 < poisson.peak_over_mean < 2
    assert bursty.dispersion > 5
    assert bursty.peak_over_mean > 2 * poisson.peak_over_mean / 1.5


def test_a_load_of_a_year_in_windows_of_a_millisecond_needs_no_memory_for_the_empty_ones() -> None:
    found = burstiness(steady(rate_rps=0.001), 0.001)  # 2 * 10^10 windows
    assert found.peak_over_mean == pytest.approx(1e6, rel=0.05)
    assert found.dispersion == pytest.approx(1.0, abs=0.01)


def test_a_trace_tells_its_lengths_its_rate_and_what_its_prompts_share() -> None:
    lines = [
        '{"timestamp": 0, "input_length": 1024, "output_length": 10, "hash_ids": [1, 2]}',
        '{"timestamp": 1000, "input_length": 1024, "output_length": 30, "hash_ids": [1, 3]}',
        '{"timestamp": 4000, "input_length": 512, "output_length": 20, "hash_ids": [9]}',
    ]
    load = recorded(parse_trace("\n".join(lines), "small"))
    assert load.rate_rps == pytest.approx(0.5)
    assert load.shape == Shape(prompt_tokens=853.3, output_tokens=20.0, cached_share=0.2)
    assert recorded(parse_trace("\n".join(lines), "small"), rate_rps=5).arrivals_s[-1] == pytest.approx(0.4)
    assert load.faster(0.25).rate_rps == pytest.approx(0.625)
    assert repeated_share(((1, 2), (3, 2), (1, 2))) == pytest.approx(2 / 6, abs=1e-3)  # a block says all before it too


# -------------------------------------------------------------------------------------------------------- the plan


def facts(engine: str, **known: Any) -> EngineFacts:
    all_known: dict[str, Any] = {
        "licence": "MIT",
        "hardware": frozenset({"cpu", "cuda"}),
        "hosted": False,
        "offers": {"response_format": "yes", "tools": "opt", "logprobs": "-"},
        "options": ("tool_call_parser",),
    }
    return EngineFacts(**{"engine": engine, **all_known, **known})


def planned(*entries: Entry, needs: Needs | None = None, rate_rps: float = 12.0, **changes: Any) -> Plan:
    known = {each.engine: facts(each.engine) for each in entries} | changes.pop("facts", {})
    options = {"load": steady(rate_rps=rate_rps, shape=Shape(prompt_tokens=131, output_tokens=64, cached_share=0.2))}
    options |= {"limits": LIMITS, "hosts": HOSTS, "now": NOW, **changes}
    load, limits = options.pop("load"), options.pop("limits")
    return plan(load, limits, entries, known.get, needs=needs or Needs(), **options)


def test_the_number_is_planned_at_the_low_end_and_its_interval_is_the_goodputs() -> None:
    (choice,) = planned(entry(goodput_rps=8.0, ci=(4.0, 16.0))).choices
    assert (choice.fewest, choice.likely, choice.replicas) == (1, 2, 4)  # 14.4/s with the headroom
    assert interval(choice) == "1\N{EN DASH}4, likely 2"
    assert choice.attainment > 0.99
    (proven,) = planned(entry(goodput_rps=8.0, ci=(4.0, 16.0), proven=True)).choices
    assert proven.replicas == 2
    (open_above,) = planned(entry(goodput_rps=8.0, ci=(8.0, None))).choices
    assert (open_above.fewest, open_above.replicas) == (2, 2)


def test_headroom_is_the_same_requests_so_much_faster() -> None:
    raced = entry(ci=(4.0, 9.0))
    counts = [planned(raced, rate_rps=11, headroom=share).choices[0].replicas for share in (0.0, 0.2, 1.0)]
    assert counts == [3, 4, 6]


@pytest.mark.parametrize(
    ("changes", "needs", "reason"),
    [
        ({"expires_utc": NOW - timedelta(days=1)}, {}, "evidence expired on 2026-11-29"),
        ({"slo": Limits(ttft_ms=1001, tpot_ms=60, percentile=99)}, {}, "looser limits: p99 of 1001 ms"),
        ({"slo": Limits(ttft_ms=500, tpot_ms=60, percentile=95)}, {}, "looser limits: p95"),
        ({"bucket": Bucket(128, 64, "fresh")}, {}, r"lighter work \(prompt<=128 output<=64 fresh\)"),
        ({"bucket": None}, {}, "not known what kind of work"),
        ({"arrivals": "equal gaps"}, {}, r"other arrivals \(equal gaps\)"),
        ({"ci": (0.0, 9.0)}, {}, "proven no rate"),
        ({}, {"capabilities": ("logprobs",)}, "vllm does not offer `logprobs`"),
        ({}, {"hardware": "rocm"}, "runs on cpu, cuda, and not on rocm"),
        ({}, {"hardware": "cuda"}, "ran on a processor, which says nothing of cuda"),
        ({"host": "gpu"}, {"hardware": "cpu"}, r"a machine with a card \(H200\)"),
        ({}, {"licences": ("Apache-2.0", "BSD-3-Clause")}, "licence MIT, and Apache-2.0 or BSD-3-Clause is asked"),
        ({"engine": "mine"}, {"air_gapped": True}, "not known which engine 'mine' is; say so with --called mine=ENG"),
    ],
)
def test_whoever_cannot_be_chosen_is_named_with_the_reason(
    changes: dict[str, Any], needs: dict[str, Any], reason: str
) -> None:
    hosts = {**HOSTS, "gpu": {"gpu": "H200"}}
    unknown = {"mine": None} if changes.get("engine") == "mine" else {}
    found = planned(entry(**changes), entry(engine="other"), needs=Needs(**needs), hosts=hosts, facts=unknown)
    (line,) = [line for line in refusals(found) if changes.get("engine", "vllm") in line]
    assert line.startswith("Not ")
    assert re.search(reason, line), line


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hosted": True}, "runs at a provider's"),
        ({"hosted": None}, "depends on its url"),
        ({"licence": ""}, "licence of vllm is not known"),
        ({"hardware": frozenset()}, "not known what hardware"),
    ],
)
def test_what_is_not_known_of_an_engine_is_not_promised(changes: dict[str, Any], reason: str) -> None:
    needs = Needs(air_gapped=True, licences=("MIT",), hardware="cpu")
    found = planned(entry(), needs=needs, facts={"vllm": facts("vllm", **changes)})
    assert reason in refusals(found)[0]
    assert answer(found) == "No engine that there is evidence of can carry this."


def test_the_cheapest_comes_first_where_prices_are_known_and_otherwise_the_one_that_needs_fewest() -> None:
    def priced(engine: str, lowest: float, price: float | None, currency: str = "EUR") -> Entry:
        economy = Economy(tokens_per_s=1.0, price_per_hour=price, currency=currency)
        return entry(engine=engine, ci=(lowest, 20.0), economy=economy if price else None)

    few, cheap = priced("few", 15.0, 9.0), priced("cheap", 5.0, 1.0)
    assert [each.entry.engine for each in planned(few, cheap).choices] == ["cheap", "few"]
    assert planned(few, cheap).choices[0].cost_per_hour == 3.0
    for other in (priced("cheap", 5.0, None), priced("cheap", 5.0, 1.0, "USD")):  # not to be set against each other
        assert [each.entry.engine for each in planned(few, other).choices] == ["few", "cheap"]


def test_what_a_plan_rests_on_is_said_beside_it() -> None:
    found = planned(
        entry(quick=True, complete=False, bucket=Bucket(2048, 256, "fresh")),
        needs=Needs(capabilities=("tools",)),
        here="another",
    )
    told = "\n".join(why(found))
    for words in ("quick race", "broken off", "heavier work", "another kind of machine", "`tools` needs an option"):
        assert words in told
    assert "lengths are not told" in "\n".join(why(planned(entry(), load=steady(rate_rps=1))))


# ------------------------------------------------------------------------------------------- engines, as they declare


def test_facts_are_what_adapters_declare() -> None:
    vllm, cloud = facts_of("vllm"), facts_of("litellm_cloud")
    assert vllm is not None
    assert cloud is not None
    assert (vllm.licence, vllm.hosted, vllm.offers["response_format"]) == ("Apache-2.0", False, "yes")
    assert cloud.hosted
    assert facts_of("no-such-engine") is None
    assert capability("structured_output") == "response_format"
    with pytest.raises(ValueError, match="did you mean 'structured_output'"):
        capability("structured_outputs")


# ----------------------------------------------------------------------------------------------------- the commands


def run(*words: str) -> Any:
    return CliRunner().invoke(app, list(words))


def test_the_command_answers_with_engine_number_and_reasons(tmp_path: Path) -> None:
    fresh = {"measured_utc": datetime.now(UTC), "expires_utc": datetime.now(UTC) + timedelta(days=9)}
    path = put(
        tmp_path / "evidence.json",
        entry(**fresh, ci=(4.0, 9.0)),
        entry(engine="llama_cpp", settings={}, **fresh),
        entry(engine="litellm_cloud", settings={}, **fresh),
        entry(engine="openvino", settings={}, expires_utc=datetime(2020, 1, 1, tzinfo=UTC)),
    )
    words = ["traffic", "--evidence", str(path), "--rate", "12", "--prompt-tokens", "130", "--output-tokens", "60"]
    done = run(*words, "--needs", "structured_output", "--air-gapped", "--licence", "Apache-2.0")
    assert done.exit_code == 0, done.output
    for line in (
        "4 replicas of vllm:",
        "Not llama_cpp: llama_cpp has the licence MIT",
        "Not litellm_cloud: litellm_cloud runs at a provider's",
        "Not openvino: Its evidence expired on 2020-01-01",
    ):
        assert line in done.stdout
    as_json = json.loads(run(*words, "--json").stdout)
    assert as_json["choices"][0]["entry"]["engine"] == "litellm_cloud"
    assert run(*words, "--needs", "logprobs", "--hardware", "npu").exit_code == 1


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--rate", "1", "--cv", "2", "--trace", "TRACE"], "--cv is for arrivals that are drawn"),
        ([], "--rate in requests a second, or a --trace"),
        (["--rate", "1", "--model", "n"], "There is evidence of m; choose one"),
        (["--rate", "1", "--prompt-tokens", "9"], "or neither"),
        (["--rate", "1", "--shared", "0.5"], "--shared says something"),
        (["--rate", "1", "--needs", "wings"], "no capability 'wings'"),
        (["--rate", "1", "--called", "a=wings"], "there is no engine 'wings'"),
        (["--rate", "1", "--evidence", "none.json"], "There is no none.json"),
        (["--trace", "TRACE"], "has 2 requests, and a plan needs at least 50"),
        (["--trace", "/dev/zero"], "is a device; name a file"),
        (["--trace", "EVIDENCE"], "this is no row of a Mooncake trace"),
    ],
)
def test_misuse_is_one_sentence_that_says_what_to_do(tmp_path: Path, words: list[str], sentence: str) -> None:
    path = put(tmp_path / "evidence.json", entry())
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9,1,1\n2023-11-16 18:17:04.9,1,1\n")
    words = [{"TRACE": str(trace), "EVIDENCE": str(path)}.get(word, word) for word in words]
    refused = run("traffic", "--evidence", str(path), *words)
    assert refused.exit_code == 2, refused.output
    assert refused.stderr.startswith("goodgate plan: ")
    assert sentence in refused.stderr


def test_a_trace_too_short_for_its_tenths_is_planned_for_as_a_whole() -> None:
    arrivals = np.arange(100, dtype=np.float64)
    assert replicas_needed(arrivals, goodput_rps=4.0, patience_s=1.0, allowed=0.01, periods=10) == 1


# --------------------------------------------------------------------------------------------- arrivals not seen before


def test_a_plan_holds_where_the_mean_rate_by_the_goodput_does_not() -> None:
    folds = backtest(steady(rate_rps=7.0, cv=3.0), goodput_rps=4.0, limits=LIMITS, parts=10, headroom=0.2)
    assert len(folds) == 9
    assert sum(fold.held for fold in folds) >= 8
    assert not any(fold.rule_held for fold in folds)
    assert "| bursty | 7 |" in backtest_markdown([("bursty", 7.0, folds)])


@pytest.mark.parametrize(
    ("name", "least_held"), [("AzureLLMInferenceTrace_conv.csv", 8), ("mooncake_conversation_trace.jsonl", 8)]
)
def test_plans_hold_on_recorded_arrivals_that_they_have_not_seen(name: str, least_held: int) -> None:
    path = TRACES / name
    if not path.exists():
        pytest.skip(f"{path} is not here")
    load = recorded(parse_trace(path.read_text(), name), rate_rps=4.0)
    folds = backtest(load, goodput_rps=4.0, limits=LIMITS, parts=10, headroom=0.2)
    assert len(folds) == 9
    assert sum(fold.held for fold in folds) >= least_held, folds
    assert sum(fold.held for fold in folds) > sum(fold.rule_held for fold in folds)
