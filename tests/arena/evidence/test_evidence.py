"""Evidence as files: what several races say together, what has expired, and what is no evidence at all."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from arena.commands.cli import app
from arena.evidence.document import Entry, Evidence, EvidenceError, Limits, digest, document, parse
from arena.evidence.files import read, write
from arena.evidence.merge import merge
from arena.judging.shape import Bucket, Shape, bucket_of
from gateway.routing.evidence import parse_evidence

NOW = datetime(2026, 11, 30, tzinfo=UTC)
SHAPE = Shape(prompt_tokens=131.0, output_tokens=64.0, cached_share=0.24)
HOSTS = {"abc": {"cpu": "test", "cores": 2}}


def entry(**changes: Any) -> Entry:
    known: dict[str, Any] = {
        "engine": "vllm",
        "version": "0.32.0",
        "settings": {"threads": 2},
        "model": "m",
        "served_model": "m",
        "host": "abc",
        "workload": SHAPE,
        "bucket": SHAPE.bucket,
        "slo": Limits(ttft_ms=1000, tpot_ms=60, percentile=99),
        "goodput_rps": 8.0,
        "ci": (6.0, 9.5),
        "confidence": 0.95,
        "proven": False,
        "rank": (1, 1),
        "run_id": "monday",
        "measured_utc": NOW - timedelta(days=10),
        "expires_utc": NOW + timedelta(days=80),
        "scenario": "chat",
        "quick": False,
        "complete": True,
        "plans": ["ab"],
    }
    return Entry(**{**known, **changes})


def evidence(*entries: Entry) -> Evidence:
    return Evidence(hosts=HOSTS, entries=entries)


def put(path: Path, *entries: Entry) -> Path:
    path.write_text(json.dumps(document(entries, HOSTS)))
    return path


@pytest.mark.parametrize(
    ("newer", "stays"),
    [
        ({}, "tuesday"),
        ({"quick": True}, "monday"),
        ({"complete": False}, "monday"),
        ({"version": "0.33.0"}, "tuesday"),
        ({"measured_utc": NOW - timedelta(days=20)}, "monday"),
    ],
)
def test_of_two_races_of_the_same_question_one_stays_and_the_other_is_told(newer: dict[str, Any], stays: str) -> None:
    second = entry(**{"run_id": "tuesday", "measured_utc": NOW - timedelta(days=9), **newer})
    for parts in ([evidence(entry()), evidence(second)], [evidence(second), evidence(entry())]):
        merged = merge(parts, now=NOW)
        assert [each.run_id for each in merged.evidence.entries] == [stays]
        assert len(merged.told) == 1
        assert f"gives way to the race {stays} of" in merged.told[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "n"},
        {"engine": "sglang"},
        {"settings": {"threads": 1}},
        {"host": "def"},
        {"bucket": Bucket(2048, 64, "fresh")},
        {"slo": Limits(ttft_ms=500, tpot_ms=60, percentile=99)},
        {"arrivals": "equal gaps"},
    ],
)
def test_another_question_keeps_its_own_entry(changes: dict[str, Any]) -> None:
    merged = merge([evidence(entry()), evidence(entry(**changes))], now=NOW)
    assert (len(merged.evidence.entries), merged.told) == (2, ())


def test_what_has_expired_is_left_out_and_told_and_a_race_given_twice_is_one() -> None:
    stale = entry(engine="old", expires_utc=NOW - timedelta(days=1))
    merged = merge([evidence(entry(), stale), evidence(entry())], now=NOW)
    assert [each.engine for each in merged.evidence.entries] == ["vllm"]
    assert merged.told == ("old on m, raced in monday, has expired on 2026-11-29; race it again.",)


def test_the_same_entries_are_the_same_file_in_any_order() -> None:
    one, other = entry(), entry(engine="sglang")
    assert document([one, other], HOSTS) == document([other, one], HOSTS)


def test_the_gateway_reads_what_the_arena_writes(tmp_path: Path) -> None:
    """Two readers of one format, which share no code: a gateway never imports the arena."""
    text = put(tmp_path / "evidence.json", entry(), entry(bucket=None, rank=None)).read_bytes()
    ours, gateways = parse(text, "it").entries, parse_evidence(text).entries
    for mine, its in zip(ours, gateways, strict=True):
        for name in ("engine", "model", "goodput_rps", "ci", "settings", "measured_utc", "expires_utc"):
            assert getattr(mine, name) == getattr(its, name)
        assert mine.lowest_rps == its.proven_rps
        assert (mine.slo.ttft_ms, mine.slo.tpot_ms) == (its.slo.ttft_ms, its.slo.tpot_ms)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"format": "goodgate-evidence/1"}, "older version.*`goodgate arena report`.*anew"),
        ({"format": "goodgate-evidence/9"}, "has the format 'goodgate-evidence/9'"),
        ({"hosts": {}}, "edited after it was written"),
        ({"entries": [{"engine": "vllm"}], "digest": None}, "is no evidence.json.*version"),
    ],
)
def test_what_is_no_evidence_is_refused_with_a_sentence(changes: dict[str, Any], sentence: str) -> None:
    found = {**document([entry()], HOSTS), **changes}
    if found["digest"] is None:
        found["digest"] = digest(found)
    with pytest.raises(EvidenceError, match=f"^x.json .*{sentence}"):
        parse(json.dumps(found).encode(), "x.json")


def test_a_file_that_is_no_evidence_is_not_overwritten(tmp_path: Path) -> None:
    notes = tmp_path / "notes.json"
    notes.write_text("{}")
    with pytest.raises(EvidenceError, match="has the format None"):
        write(document([entry()], HOSTS), notes)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.json"]
    assert notes.read_text() == "{}"


def test_a_file_without_an_end_is_no_evidence_and_does_not_fill_the_memory() -> None:
    with pytest.raises(EvidenceError, match="is larger than 1048576 bytes"):
        read(Path("/dev/zero"))


def test_a_place_that_cannot_be_written_is_named_and_not_the_file_beside_it(tmp_path: Path) -> None:
    with pytest.raises(EvidenceError, match=rf"^{tmp_path}/none/e\.json cannot be written: No such file or directory"):
        write(document([entry()], HOSTS), tmp_path / "none" / "e.json")


def test_the_command_merges_folders_and_files_and_says_what_it_left_out(tmp_path: Path) -> None:
    race = tmp_path / "race"
    race.mkdir()
    put(race / "evidence.json", entry(measured_utc=datetime.now(UTC), expires_utc=datetime.now(UTC) + timedelta(9)))
    old = put(tmp_path / "old.json", entry(engine="old", expires_utc=datetime(2020, 1, 1, tzinfo=UTC)))
    out = tmp_path / "evidence.json"
    for _ in range(2):  # the second time over its own file
        done = CliRunner().invoke(app, ["evidence", str(race), str(old), "--out", str(out)])
        assert done.exit_code == 0, done.output
        assert "1 entries of 1 races" in done.stdout
        assert "has expired on 2020-01-01" in done.stderr
    assert [each.engine for each in read(out).entries] == ["vllm"]
    for words, code, sentence in [
        ([str(old), "--out", str(out)], 1, "Nothing is left"),
        ([str(tmp_path), "--out", str(race)], 2, "is a folder"),
        ([str(tmp_path / "none"), "--out", str(out)], 2, "There is no"),
    ]:
        refused = CliRunner().invoke(app, ["evidence", *words])
        assert (refused.exit_code, sentence in refused.stderr) == (code, True), refused.output


@pytest.mark.parametrize(
    ("tokens", "bucket"),
    [
        ((131.0, 64.0, 0.24), "prompt<=512 output<=64 fresh"),
        ((128.0, 65.0, None), "prompt<=128 output<=256 untold"),
        ((1e5, 1e5, 0.9), "prompt>32768 output>4096 mostly"),
        ((513.0, 1.0, 0.5), "prompt<=2048 output<=16 partly"),
    ],
)
def test_work_is_classed_by_its_lengths_and_by_what_prompts_share(
    tokens: tuple[float, float, float | None], bucket: str
) -> None:
    assert str(bucket_of(*tokens)) == bucket


@pytest.mark.parametrize(
    ("raced", "asked", "is_enough"),
    [
        ((512, 64, "fresh"), (512, 64, "fresh"), True),
        ((512, 64, "fresh"), (128, 16, "mostly"), True),
        ((0, 64, "fresh"), (32768, 64, "fresh"), True),
        ((512, 64, "fresh"), (0, 64, "fresh"), False),
        ((512, 64, "fresh"), (512, 256, "fresh"), False),
        ((512, 64, "mostly"), (512, 64, "fresh"), False),
    ],
)
def test_heavier_work_answers_for_lighter_work_and_not_the_other_way_round(
    raced: tuple[Any, ...], asked: tuple[Any, ...], is_enough: bool
) -> None:
    assert Bucket(*raced).is_as_heavy_as(Bucket(*asked)) is is_enough


def test_an_entry_survives_json() -> None:
    assert msgspec.convert(msgspec.to_builtins(entry()), Entry) == entry()
