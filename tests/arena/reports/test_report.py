"""The report: honest in its sentence, safe with strange strings, whole without a network."""

import io
import json
import math
import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from arena.evidence.document import digest
from arena.judging.audit import Finding
from arena.judging.ranking import RankSet
from arena.judging.results import CellResult, EngineNotes, EngineResult, RaceResult, RunNotes, Sample, summary
from arena.judging.search import Goodput, estimate
from arena.judging.stats import Verdict
from arena.race.scenario import parse
from arena.reports.compare import compare_races
from arena.reports.evidence import evidence
from arena.reports.plots import nice_ticks
from arena.reports.report import publish, ranking_table, render
from arena.reports.wording import headline, interval_words

SCENARIO = parse(
    """
name: chat
model: m
workload: {kind: synthetic, prompt: {kind: uniform, low: 80, high: 120}, output: {kind: fixed, tokens: 64}}
slo: {ttft_ms: 1000, tpot_ms: 60}
""",
    source="test",
)
EVIL = "</script><script>alert(1)</script><b>x"


def cell(engine: str, rung: int, *, misses: int = 0, requests: int = 100, status: str = "ok") -> CellResult:
    good = [Sample(scheduled_s=i / 10, ttft_ms=80 + i, tpot_ms=20.0, ok=True) for i in range(requests - misses)]
    bad = [Sample(scheduled_s=i / 10, ttft_ms=math.inf, tpot_ms=None, ok=False) for i in range(misses)]
    return CellResult(
        cell_id=f"{engine}-{rung}",
        engine_id=engine,
        rung=rung,
        rate_rps=SCENARIO.settings.rate(rung),
        replicate=0,
        slot=rung,
        status=status,
        reason=None if status == "ok" else f"because {EVIL}",
        samples=(*good, *bad),
        misses=misses,
        design_effect=1.0,
        verdict=Verdict.FAIL if misses > 5 else Verdict.UNKNOWN,
        findings=(Finding("client_lag_p99_ms", True, 0.4, 10, "note", ""),),
        plan_sha256="ab" * 32,
    )


def engine(
    name: str, *, holds_at: int = 4, rank: RankSet | None = None, unranked: tuple[str, ...] = ()
) -> EngineResult:
    cells = (cell(name, holds_at), cell(name, holds_at + 1, misses=60))
    goodput = estimate([known.outcome() for known in cells], SCENARIO.settings)
    return EngineResult(
        engine_id=name,
        name=name,
        version="1.0",
        model="m",
        endpoint="http://127.0.0.1:1",
        notes=EngineNotes(
            probe={"exact_length": True, "counts_tokens": True, "refused": []}, start_s=2.0, burst_rps=9.0
        ),
        goodput=goodput,
        cells=cells,
        headline=cells[0].samples,
        headline_rps=cells[0].rate_rps,
        rank=rank,
        unranked=unranked,
    )


def race(*engines: EngineResult, interrupted: bool = False, quick: bool = False) -> RaceResult:
    reasons = [f"{known.name}: {reason}" for known in engines for reason in known.unranked]
    return RaceResult(
        run_id="chat-1",
        started_utc="2026-01-01T00:00:00+00:00",
        seed=7,
        git_sha="abc",
        host={"cpu": "c", "cores": 2, "memory_gib": 8},
        notes=RunNotes(
            scenario=SCENARIO, quick=quick, order=tuple(known.name for known in engines), interrupted=interrupted
        ),
        engines=engines,
        better={},
        invalid_reasons=tuple(reasons),
        prompt_tokens=131.0,
        answer_tokens=64.0,
    )


def test_the_headline_claims_a_lead_only_where_the_ranks_do() -> None:
    clear = race(engine("a", holds_at=8, rank=RankSet(1, 1)), engine("b", holds_at=4, rank=RankSet(2, 2)))
    assert headline(clear) == "a carries 4.00 requests/s, 2.0 times what b carries (2.00)"
    tied = race(engine("a", holds_at=5, rank=RankSet(1, 2)), engine("b", holds_at=4, rank=RankSet(1, 2)))
    assert headline(tied) == "a and b cannot be told apart (2.38 and 2.00 requests/s)"
    assert headline(race(engine("a", rank=RankSet(1, 1)))) == "a carries 2.00 requests/s"
    assert headline(race(engine("a", unranked=("It died.",)))) == "No engine could be ranked"
    assert headline(race()) == "No engine could be ranked"


def test_an_interval_that_nothing_bounds_is_written_as_open() -> None:
    known = replace(engine("a"), goodput=Goodput(4.0, False, None, False, 2.5, None))
    assert interval_words(known) == "above 2.50"
    assert "above 2.50" in render(race(known))


def test_nothing_from_an_engine_or_a_scenario_becomes_markup_or_script() -> None:
    evil = engine(EVIL, unranked=(EVIL,))
    stopped = cell(EVIL, 7, status="invalid_client")
    evil = replace(evil, version=EVIL, model=EVIL, cells=(*evil.cells, stopped))
    page = render(race(evil))
    own_scripts = len(re.findall(r"<script", render(race(engine("a")))))
    assert len(re.findall(r"<script", page)) == own_scripts
    assert "<b>x" not in page
    assert "&lt;/script&gt;" in page


def test_the_report_needs_no_network_and_holds_all_its_parts() -> None:
    page = render(race(engine("a", rank=RankSet(1, 1)), engine("b", holds_at=2, rank=RankSet(2, 2)), quick=True))
    head, _, _ = page.partition("<script>")
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", head)
    assert "Plotly.newPlot" in page
    for part in (
        "Requests in time",
        "by percentile",
        "What was asked",
        "Where and with what",
        "same work",
        "Every cell",
    ):
        assert part in page
    assert "A quick race: no cell has more than 100 requests, and p99 needs 299" in page
    assert "median prompt 131 tokens with the chat template, median answer 64" in page


def test_an_engine_that_is_out_is_shown_with_its_reason_and_not_hidden() -> None:
    result = race(engine("a", rank=RankSet(1, 1)), engine("b", unranked=("Only 40% of its answers are complete.",)))
    assert "Only 40% of its answers are complete." in render(result)
    assert summary(result)["engines"][1]["rank"] is None
    console = Console(record=True, width=100, file=io.StringIO())
    console.print(ranking_table(result))
    printed = console.export_text()
    assert "Only 40% of its answers are complete." in printed
    assert re.search(r"-\s+b\s", printed)


def test_the_summary_has_its_stable_keys_and_never_an_infinity() -> None:
    document = json.loads(json.dumps(summary(race(engine("a", rank=RankSet(1, 1)))), allow_nan=False))
    assert {"run_id", "scenario", "model", "slo", "engines", "valid", "invalid_reasons"} <= set(document)
    assert set(document["slo"]) == {"ttft_ms", "tpot_ms", "percentile"}
    keys = (
        "name version goodput_rps ci rank ttft_p50_ms ttft_p99_ms tpot_p50_ms tpot_p99_ms attainment requests failures"
    )
    assert set(keys.split()) <= set(document["engines"][0])
    assert document["engines"][0]["rank"] == [1, 1]
    assert len(document["engines"][0]["ci"]) == 2


def test_a_percentile_that_most_requests_failed_is_null_and_not_a_number() -> None:
    lost = cell("a", 2, misses=100)
    known = replace(engine("a"), headline=lost.samples, headline_rps=lost.rate_rps)
    assert summary(race(known))["engines"][0]["ttft_p99_ms"] is None


def test_evidence_names_its_question_and_machine_and_notices_edits() -> None:
    document = evidence(race(engine("a", rank=RankSet(1, 1)), engine("b", unranked=("It died.",))))
    (entry,) = document["entries"]  # nobody is routed to on the word of a failed run
    assert (entry["engine"], entry["model"], entry["run_id"]) == ("a", "m", document["entries"][0]["run_id"])
    assert entry["slo"] == {"ttft_ms": 1000.0, "tpot_ms": 60.0, "percentile": 99.0}
    assert list(document["hosts"]) == [entry["host"]]
    assert document["digest"] == digest(document)
    assert document["digest"] != digest({**document, "hosts": {}})


def test_an_empty_race_still_has_a_readable_report(tmp_path: Path) -> None:
    publish(race(interrupted=True), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"report.html", "summary.json", "evidence.json"}


@pytest.mark.parametrize(("low", "high"), [(1, 3), (0.3, 40), (15, 17), (1, 1000), (2.2, 2.9)])
def test_axis_ticks_lie_inside_the_axis_and_are_few(low: float, high: float) -> None:
    ticks = nice_ticks(low, high)
    assert all(low <= tick <= high for tick in ticks)
    assert len(ticks) <= 12


def test_races_are_compared_only_when_they_asked_the_same_question() -> None:
    monday, tuesday = race(engine("a", holds_at=4)), race(engine("a", holds_at=12), engine("new"))
    changes = compare_races(monday, tuesday)
    assert [(change.engine, change.words) for change in changes] == [
        ("a", "surely better"),
        ("new", "measured in one race only"),
    ]
    assert compare_races(monday, monday)[0].words == "cannot be told apart"
    other = race(engine("a"))
    other = replace(other, notes=RunNotes(scenario=SCENARIO.with_model("bigger")))
    with pytest.raises(ValueError, match="they differ in `model`"):
        compare_races(monday, other)


def test_an_engine_without_a_rank_gets_no_verdict_in_a_comparison() -> None:
    """It answered shorter than asked, say: that it now carries more is no improvement."""
    monday, tuesday = race(engine("a", holds_at=4)), race(engine("a", holds_at=12, unranked=("It answers short.",)))
    assert compare_races(monday, tuesday)[0].words == "not ranked in both races"


def test_every_data_file_of_the_arena_is_packaged() -> None:
    """A file that only the source tree has would fail the report at the end of an installed race."""
    root = Path(__file__).resolve().parents[3]
    patterns = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["arena"]
    data = [path for path in (root / "arena").iterdir() if path.is_file() and path.suffix != ".py"]
    assert {path.suffix for path in data} == {".sql", ".css"}
    assert all(any(path.match(pattern) for pattern in patterns) for path in data)
