"""The report: honest in its sentence, safe with strange strings, whole without a network."""

import html
import io
import json
import math
import re
import tomllib
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from arena.evidence.document import digest
from arena.judging.audit import Finding
from arena.judging.cells import CellResult, Sample
from arena.judging.controls import Control, Reading
from arena.judging.differences import Paired
from arena.judging.notes import EngineNotes, RunNotes
from arena.judging.ranking import RankSet
from arena.judging.results import EngineResult, RaceResult
from arena.judging.search import Goodput, estimate
from arena.judging.stats import Verdict
from arena.race.scenario import Load
from arena.race.scenario_file import parse
from arena.reports.axes import nice_ticks
from arena.reports.compare import compare_races
from arena.reports.evidence import evidence
from arena.reports.html_page import page
from arena.reports.markdown import markdown
from arena.reports.raced import with_seed
from arena.reports.report import document_of, publish, ranking_table, render
from arena.reports.standing import plain_words
from arena.reports.summary import summary
from arena.reports.wording import headline, interval_words
from tests.arena.reports.synthetic import synthetic_race

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
    assert "<script" not in page
    assert "<b>x" not in page
    assert "&lt;/script&gt;" in page


def test_the_report_holds_all_its_parts_and_forbids_itself_scripts_and_network() -> None:
    result = race(engine("a", rank=RankSet(1, 1)), engine("b", holds_at=2, rank=RankSet(2, 2)), quick=True)
    page = render(result)
    assert "<script" not in page
    assert "default-src 'none'" in page
    assert not re.search(r"""(src|href)=["']?(https?:)?//|url\(|@import""", page)
    for part in ("Ranking", "As the load rises", "What was asked", "Can it be believed?", "How to reproduce", "Words"):
        assert f">{part}</h2>" in page
    assert "A quick race: no cell has more than 100 requests, and p99 needs 299" in page
    assert "median prompt 131 tokens with the chat template, median answer 64" in page


def test_the_seed_that_was_drawn_is_in_the_command_that_repeats_the_race() -> None:
    """Without it, the command draws other arrivals and other prompts."""
    assert with_seed("goodgate arena run chat --out /tmp/x -o a.b='c d'", 7) == (
        "goodgate arena run chat -o 'a.b=c d' --seed 7"
    )
    assert with_seed("goodgate arena run chat --seed=3 --out=x", 7) == "goodgate arena run chat --seed 7"
    assert "--seed 7" in render(race(engine("a")))


def test_plain_words_say_proven_only_of_what_is_and_name_ties() -> None:
    clear = plain_words(race(engine("a", holds_at=8, rank=RankSet(1, 1)), engine("b", holds_at=4, rank=RankSet(2, 2))))
    assert "a kept the limits at up to 4.00 requests a second (observed, not yet proven)" in clear[1]
    assert clear[2] == "The order is certain: a, b."
    known = replace(engine("a", rank=RankSet(1, 2)), goodput=Goodput(4.0, True, 5.0, True, 3.0, None))
    tied = plain_words(race(known, engine("b", rank=RankSet(1, 2))))
    assert "4.00 requests a second (proven); its true limit lies above 3.00" in tied[1]
    assert tied[2] == "Not told apart from every neighbour, so tied: a and b (rank 1\N{EN DASH}2)."
    assert len(plain_words(race(engine("a", unranked=("It died.",))))) == 1


def test_failed_audits_and_cells_that_are_not_believed_come_first() -> None:
    late = replace(
        cell("a", 3, status="invalid_client"), findings=(Finding("client_lag_p99_ms", False, 12.0, 10, "note", ""),)
    )
    known = engine("a", rank=RankSet(1, 1))
    text = markdown(document_of(race(replace(known, cells=(*known.cells, late)))))
    audits = text.partition("Every audit of every cell")[2]
    assert "Not believed, and in no figure: 1." in text
    assert audits.index("client on time (p99 lag, ms) 12 (limit 10)") < audits.index("client on time (p99 lag, ms) 0.4")


def test_the_clients_own_errors_are_told_or_that_nobody_measured_them() -> None:
    known = markdown(document_of(synthetic_race()))
    assert "the client's error was at p99 0.44 ms of TTFT" in known
    assert "| 0.06 / 0.44 | 0.02 / 0.31 | 0.29 | 41 % |" in known
    assert "The client's own errors were not measured before this race." in markdown(document_of(race(engine("a"))))


def test_a_race_at_a_given_rate_and_a_closed_loop_are_not_told_as_a_search() -> None:
    given = race(engine("a"))
    given = replace(given, notes=msgspec.structs.replace(given.notes, searched=False))
    assert "No higher one was looked for." in plain_words(given)[0]
    assert len(plain_words(given)) == 1
    load = Load(kind="closed", concurrency=4, think_s=0.5)
    scenario = msgspec.structs.replace(SCENARIO, load=load)
    closed = replace(given, notes=msgspec.structs.replace(given.notes, scenario=scenario))
    text = markdown(document_of(closed))
    assert "closed loop: 4 requests in flight, 0.5 s of thinking after each answer" in text
    assert "open loop, one seeded" not in text


def test_a_control_that_failed_stands_above_everything_and_a_sound_one_is_told() -> None:
    aa = Control("aa", False, 0.999, "a and its second entry a-again are one engine, and were told apart (P = 0.999).")
    drift = Control("drift", True, 0.01, "A fixed task took the same time throughout.")
    readings = tuple(Reading(slot, "a", 10 + slot / 100) for slot in range(12))
    failed = replace(race(engine("a"), engine("b")), controls=(aa, drift), drift=readings)
    document = document_of(failed)
    assert "Nothing is proven by this race. a and its second entry" in document.notices[0]
    text = markdown(document)
    assert "| FAILED | a and its second entry a-again" in text
    assert "| as it must be | A fixed task took the same time throughout. |" in text
    assert "slot 3, before a: 10 ms" in page(document)
    assert "what is the same" not in markdown(document_of(race(engine("a"))))


def test_engines_on_equal_plans_stand_side_by_side_with_intervals() -> None:
    pair = Paired("a", "b", "in_time", 120, 20, 0.03, 0.01, 0.05, True)
    late = Paired("a", "b", "ttft_ms", 120, 20, -4.0, -9.5, 1.5, False)
    text = markdown(document_of(replace(race(engine("a"), engine("b")), paired=(pair, late))))
    assert "| a | b | requests in time | +3.0 points | +1.0 points to +5.0 points | yes | 120 |" in text
    assert "| a | b | TTFT, median | -4.0 ms | -9.5 ms to +1.5 ms | no | 120 |" in text


def test_the_page_the_markdown_and_the_json_say_the_same(tmp_path: Path) -> None:
    publish(synthetic_race(), tmp_path)
    document = json.loads((tmp_path / "report.json").read_text())
    page, text = (tmp_path / "report.html").read_text(), (tmp_path / "report.md").read_text()
    for section in document["sections"]:
        assert f">{html.escape(section['title'])}</h2>" in page
        assert f"## {section['title']}\n" in text
    for row in document["sections"][0]["blocks"][0]["rows"]:
        for figure in (row["name"], row["rate"], row["interval"], row["in_time"]):
            assert html.escape(figure) in page
            assert figure.replace("_", "\\_") in text


def test_a_race_of_four_engines_stays_small(tmp_path: Path) -> None:
    """It is kept in a repository and sent by mail; Plotly alone was twelve times as large."""
    publish(synthetic_race(), tmp_path)
    assert (tmp_path / "report.html").stat().st_size < 400_000


def test_no_word_of_an_engine_becomes_markdown() -> None:
    evil = "|<b>x</b> *y* `z`\n# title [a](b)"
    text = markdown(document_of(race(engine(evil, unranked=(evil,)))))
    assert "<b>" not in text
    assert "\n# title" not in text
    assert all(line.count("|") - line.count("\\|") >= 2 for line in text.splitlines() if line.startswith("| "))
    assert "](b)" not in text.replace("\\]", "")


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
    documents = {"report.html", "report.md", "report.json", "summary.json", "evidence.json", "manifest.json"}
    assert {path.name for path in tmp_path.iterdir()} == documents


@pytest.mark.parametrize(("low", "high"), [(1, 3), (0.3, 40), (15, 17), (1, 1000), (2.2, 2.9)])
def test_axis_ticks_lie_inside_the_axis_and_are_few(low: float, high: float) -> None:
    ticks = nice_ticks(low, high)
    assert all(low <= tick <= high for tick in ticks)
    assert 2 <= len(ticks) <= 8


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
    packaged = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    data = [path for path in (root / "arena").rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")]
    assert {path.suffix for path in data} == {".sql", ".css"}
    for path in data:
        package = ".".join(path.parent.relative_to(root).parts)
        assert any(path.match(pattern) for pattern in packaged[package]), path
