"""The proven goodput in /metrics comes from a race's own file, and from nothing else."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from arena.evidence.document import digest
from gateway.config import ReplicaConfig
from gateway.replicas.replica import Replica
from gateway.routing import evidence
from gateway.routing.evidence import Entry, EvidenceError, entries_of, parse_evidence
from tests.gateway.rig import Gateway, Start, fake, model

NATIVE = {
    "engine": "fake",
    "version": "1",
    "model": "m",
    "served_model": "m",
    "goodput_rps": 8.0,
    "ci": [6.3, 8.9],
    "proven": False,
    "rank": [1, 1],
    "plans": [],
}
MEASURED = "2026-11-29T20:00:00+00:00"


def document(
    *engines: dict[str, Any], slo: dict[str, Any] | None = None, measured_utc: str = MEASURED, **fields: Any
) -> dict[str, Any]:
    """A file as the arena writes it: the digest is the arena's own."""
    shared = {"slo": slo or {"ttft_ms": 1000.0}, "measured_utc": measured_utc, "run_id": "r"}
    body = {"format": "goodgate-evidence/2", "entries": [{**shared, **engine} for engine in engines], **fields}
    return {**body, "digest": digest(body)}


def old_document(*engines: dict[str, Any]) -> dict[str, Any]:
    """A file as the arena wrote it before it knew settings, kinds of work and an expiry."""
    body = {
        "format": "goodgate-evidence/1",
        "run_id": "r",
        "measured_utc": MEASURED,
        "slo": {"ttft_ms": 1000.0},
        "engines": list(engines),
    }
    return {**body, "digest": digest(body)}


def write(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2))
    os.utime(path, ns=(0, path.stat().st_mtime_ns + len(path.read_bytes())))  # another stamp, however fast the test is


async def proven(gateway: Gateway) -> dict[str, float]:
    async with gateway.client.get(f"{gateway.url}/metrics") as response:
        lines = (await response.text()).splitlines()
    return {
        name: float(value)
        for name, _, value in (line.rpartition(" ") for line in lines)
        if name.startswith(("goodgate_goodput_proven_rps", "goodgate_evidence_timestamp"))
    }


async def test_a_race_shows_what_each_replica_is_proven_to_carry(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "evidence.json"
    write(path, document(NATIVE, {**NATIVE, "engine": "special", "proven": True}))
    gateway = await start(model(fake(), fake("special")), evidence=str(path))
    assert await proven(gateway) == {
        'goodgate_goodput_proven_rps{engine="fake",model="m",replica="fake-0"}': 6.3,
        'goodgate_goodput_proven_rps{engine="fake",model="m",replica="special"}': 8.0,
        "goodgate_evidence_timestamp_seconds": 1795982400.0,
    }


async def test_a_file_of_the_old_format_still_counts(start: Start, tmp_path: Path) -> None:
    write(tmp_path / "evidence.json", old_document(NATIVE))
    gateway = await start(model(fake()), evidence=str(tmp_path / "evidence.json"))
    assert list((await proven(gateway)).values()) == [6.3, 1795982400.0]
    (entry,) = parse_evidence(json.dumps(old_document(NATIVE)).encode()).entries
    assert (entry.slo.ttft_ms, entry.expires_utc, entry.settings) == (1000.0, None, None)


async def test_of_several_races_the_lowest_figure_is_shown_and_the_oldest_day(start: Start, tmp_path: Path) -> None:
    """Nobody knows here which of the raced kinds of work live requests are like."""
    later = {**NATIVE, "ci": [3.5, 4.0], "measured_utc": "2026-11-30T20:00:00+00:00"}
    write(tmp_path / "evidence.json", document(NATIVE, later))
    gateway = await start(model(fake()), evidence=str(tmp_path / "evidence.json"))
    assert list((await proven(gateway)).values()) == [3.5, 1795982400.0]


async def test_a_new_race_replaces_the_figures_and_a_removed_file_takes_them_away(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "evidence.json"
    gateway = await start(model(fake()), evidence=str(path))
    assert await proven(gateway) == {}
    write(path, document(NATIVE))
    assert list((await proven(gateway)).values()) == [6.3, 1795982400.0]
    write(path, document({**NATIVE, "ci": [12.5, None]}))
    assert list((await proven(gateway)).values()) == [12.5, 1795982400.0]
    path.unlink()
    assert await proven(gateway) == {}


async def test_a_file_that_proves_nothing_is_told_once_and_serving_goes_on(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "evidence.json"
    write(path, {**document(NATIVE), "hosts": {"better": {}}})
    with caplog.at_level(logging.WARNING, "goodgate"):
        gateway = await start(model(fake()), evidence=str(path))
        assert await proven(gateway) == await proven(gateway) == {}
        status, _, _ = await gateway.chat()
    assert status == 200
    told = "It was edited after the race, so it proves nothing; copy the race's own file here again."
    assert reasons_of(caplog) == [told]


def reasons_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [vars(record)["fields"]["reason"] for record in caplog.records if record.message == "no proven goodput"]


async def test_a_file_that_is_missing_is_told_once(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "goodgate"):
        gateway = await start(model(fake()), evidence=str(tmp_path / "evidence.json"))
        assert await proven(gateway) == await proven(gateway) == {}
    assert reasons_of(caplog) == ["It cannot be read: No such file or directory."]


async def test_a_file_that_is_no_evidence_by_its_size_is_not_read(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence, "MAX_BYTES", 100)
    write(tmp_path / "evidence.json", document(NATIVE))
    with caplog.at_level(logging.WARNING, "goodgate"):
        gateway = await start(model(fake()), evidence=str(tmp_path / "evidence.json"))
        assert await proven(gateway) == {}
    assert reasons_of(caplog) == ["It is larger than 100 bytes."]


async def test_a_file_is_read_again_only_when_it_has_changed(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[bytes] = []
    monkeypatch.setattr(evidence, "parse_evidence", lambda text: reads.append(text) or parse_evidence(text))
    path = tmp_path / "evidence.json"
    write(path, document(NATIVE))
    gateway = await start(model(fake()), evidence=str(path))
    assert await proven(gateway) == await proven(gateway) != {}
    write(path, document({**NATIVE, "ci": [12.5, None]}))
    await proven(gateway)
    assert len(reads) == 2


async def test_a_race_of_other_models_gives_no_figures_and_says_so(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "evidence.json"
    write(path, document({**NATIVE, "model": "n", "served_model": "n"}))
    with caplog.at_level(logging.WARNING, "goodgate"):
        gateway = await start(model(fake()), evidence=str(path))
        assert not any("proven_rps{" in name for name in await proven(gateway))
    assert "names none of this gateway's models" in str([vars(record) for record in caplog.records])


@pytest.mark.parametrize("ci", [[0.0, 1.5], [None, None]])
async def test_an_engine_that_was_proven_to_carry_nothing_has_no_figure(
    start: Start, tmp_path: Path, ci: list[float | None]
) -> None:
    """Load divided by nothing is infinite, and an autoscaler would start all the pods that it may."""
    write(tmp_path / "evidence.json", document({**NATIVE, "ci": ci}, {**NATIVE, "engine": "other"}))
    gateway = await start(model(fake(), fake("other")), evidence=str(tmp_path / "evidence.json"))
    assert [name for name in await proven(gateway) if "{" in name] == [
        'goodgate_goodput_proven_rps{engine="fake",model="m",replica="other"}'
    ]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (b"", "no evidence.json of a race"),
        (b"[]", "no evidence.json of a race"),
        (b'{"format": "\xff"}', "no evidence.json of a race"),
        (b'{"engines":' + b"[" * 5000 + b"]" * 5000 + b"}", "no evidence.json of a race"),
        (json.dumps(document(NATIVE, measured_utc="2026-11-29T20:00:00")).encode(), "no evidence.json.*measured_utc"),
        (json.dumps(document(NATIVE, format="goodgate-evidence/9")).encode(), "'goodgate-evidence/9'.*run the race"),
        (json.dumps({**document(NATIVE), "entries": []}).encode(), "edited after the race"),
        (json.dumps(document({**NATIVE, "goodput_rps": None})).encode(), r"no evidence.json of a race.*goodput_rps"),
        (json.dumps({**document(NATIVE), "digest": ""}).encode(), "edited after the race"),
        (b'{"format": "goodgate-evidence/2", "digest": ""}', "it has no 'entries'"),
        (b'{"format": "goodgate-evidence/2"}', "it has no 'digest'"),
    ],
)
def test_what_is_not_a_races_own_file_is_explained(text: bytes, sentence: str) -> None:
    with pytest.raises(EvidenceError, match=sentence):
        parse_evidence(text)


def test_an_entry_is_found_by_alias_and_the_replicas_name_goes_before_its_engine() -> None:
    entries = tuple(
        msgspec.convert(
            {**NATIVE, "engine": engine, "model": name, "served_model": served, "measured_utc": MEASURED}, Entry
        )
        for engine, name, served in (("fake", "m", None), ("a", "other", "alias"), ("a", "third", None))
    )
    replica = Replica(name="a", model="m", engine="fake", config=ReplicaConfig(engine="fake"))
    assert entries_of(replica, frozenset({"m", "alias"}), entries) == [entries[1]]
    assert entries_of(replica, frozenset({"m"}), entries) == [entries[0]]
    assert entries_of(replica, frozenset({"x"}), entries) == []
