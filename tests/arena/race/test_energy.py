"""Joules out of a folder that looks like the kernel's, and what they and a price come to in a race."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from arena.commands.common import Misuse
from arena.commands.contenders import priced
from arena.judging.judge import judge_race
from arena.judging.results import RaceResult
from arena.race.bakeoff import race
from arena.race.card import Contender
from arena.race.energy import RaplZone, nvml_cards, rapl_zones, readable_counters, sampled
from arena.race.scenario_file import parse
from arena.records.store import Store
from arena.reports.report import publish
from arena.reports.summary import summary
from tests.arena.race.test_bakeoff import SCENARIO, Log, card, scripted

WATTS = 40.0


def zone(powercap: Path, folder: str, name: str, *, energy_uj: int = 0, range_uj: int = 10**12) -> Path:
    made = powercap / folder
    made.mkdir(parents=True)
    (made / "name").write_text(f"{name}\n")
    (made / "energy_uj").write_text(f"{energy_uj}\n")
    (made / "max_energy_range_uj").write_text(f"{range_uj}\n")
    return made


def test_packages_and_their_memory_count_and_nothing_counts_twice(tmp_path: Path) -> None:
    """`psys` holds the packages, and a package holds its cores."""
    zone(tmp_path, "intel-rapl:0", "package-0")
    zone(tmp_path, "intel-rapl:0:0", "core")
    zone(tmp_path, "intel-rapl:0:1", "dram")
    zone(tmp_path, "intel-rapl:1", "package-1")
    zone(tmp_path, "intel-rapl:2", "psys")
    zones, reason = rapl_zones(tmp_path)
    assert ([each.name for each in zones], reason) == (["rapl:package-0", "rapl:package-1", "rapl:dram"], "")


def test_a_counter_that_wraps_goes_on_counting(tmp_path: Path) -> None:
    folder = zone(tmp_path, "intel-rapl:0", "package-0", energy_uj=900_000, range_uj=999_999)
    counter = RaplZone(folder)
    for shown_uj, joules in ((950_000, 0.05), (50_000, 0.15), (50_000, 0.15), (0, 1.1)):
        (folder / "energy_uj").write_text(str(shown_uj))
        assert counter.joules() == pytest.approx(joules)


def test_where_nothing_can_be_read_the_reason_is_told(tmp_path: Path) -> None:
    counters, missing = readable_counters(tmp_path, nvml="libno-such-driver.so")
    assert counters == []
    assert missing == [f"RAPL: there are no counters below {tmp_path}.", "NVML: there is no NVIDIA driver."]


def test_a_library_that_is_no_driver_is_told_and_not_a_crash() -> None:
    assert nvml_cards("libc.so.6")[1].startswith("NVML: the energy cannot be read")


DRIVER = """
static int reads;
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned number, void **card) {
    *card = (void *)(0x7f0000000000UL + number);
    return 0;
}
int nvmlDeviceGetTotalEnergyConsumption(void *card, unsigned long long *millijoules) {
    if ((unsigned long)card < 0x7f0000000000UL) return 2;
    *millijoules = 5000000000000ULL + 1500 * reads++;
    return 0;
}
"""


def test_cards_are_read_through_the_drivers_own_library(tmp_path: Path) -> None:
    """A driver's twin: handles are pointers and millijoules need 64 bits, neither of which may be cut."""
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("no C compiler")
    (tmp_path / "nvml.c").write_text(DRIVER)
    library = tmp_path / "libnvml.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, tmp_path / "nvml.c"], check=True)
    cards, reason = nvml_cards(str(library))
    assert ([card.name for card in cards], reason) == (["nvml:0", "nvml:1"], "")
    assert [cards[0].joules(), cards[0].joules()] == [3.0, 4.5]


async def test_a_counter_that_fails_for_a_while_leaves_a_gap_and_no_zero(tmp_path: Path) -> None:
    folder = zone(tmp_path, "intel-rapl:0", "package-0")
    async with sampled([RaplZone(folder)], every_s=0.01) as samples:
        (folder / "energy_uj").rename(folder / "away")
        await asyncio.sleep(0.05)
        during = len(samples)
        (folder / "away").rename(folder / "energy_uj")
        (folder / "energy_uj").write_text("5000000")
    assert during == 1
    assert {sample.joules for sample in samples} == {0.0, 5.0}


@contextmanager
def burning(powercap: Path) -> Iterator[None]:
    """A package that takes `WATTS`, as its counter shows it."""
    folder, ended = zone(powercap, "intel-rapl:0", "package-0"), threading.Event()
    began = time.monotonic()

    def burn() -> None:
        while not ended.wait(0.05):
            beside = folder / "beside"  # a reader sees a whole number at any time
            beside.write_text(str(int((time.monotonic() - began) * WATTS * 1e6)))
            beside.replace(folder / "energy_uj")

    thread = threading.Thread(target=burn)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@pytest.fixture(scope="module")
def raced(tmp_path_factory: pytest.TempPathFactory) -> tuple[RaceResult, Path]:
    out, powercap = tmp_path_factory.mktemp("race"), tmp_path_factory.mktemp("powercap")
    scenario = parse(f"{SCENARIO}\ncost: {{per_hour: 3.6, currency: EUR}}", source="test")
    with scripted("--ttft-ms", "40", "--itl-ms", "10") as url, burning(powercap):
        known = replace(card(out, [Contender(name="one", url=url)]), scenario=scenario, powercap=powercap)
        result = asyncio.run(race(known, Log()))
    publish(result, out)
    return result, out


def test_a_race_says_what_a_token_takes_and_what_money_buys(raced: tuple[RaceResult, Path]) -> None:
    (engine,) = raced[0].engines
    economy = engine.economy
    assert economy is not None
    assert economy.energy_sources == ("rapl:package-0",)
    assert economy.joules_per_token == pytest.approx(WATTS / economy.tokens_per_s, rel=0.25)
    assert economy.tokens_per_money == pytest.approx(1000 * economy.tokens_per_s, rel=1e-3)  # 0.001 EUR a second
    shown = summary(raced[0])["engines"][0]
    assert (shown["joules_per_token"], shown["currency"]) == (economy.joules_per_token, "EUR")


def test_evidence_has_the_kind_of_work_the_price_and_the_energy(raced: tuple[RaceResult, Path]) -> None:
    (entry,) = json.loads((raced[1] / "evidence.json").read_text())["entries"]
    assert entry["workload"]["output_tokens"] == 8.0
    assert entry["bucket"]["output"] == 16
    assert entry["economy"] == json.loads(msgspec.json.encode(raced[0].engines[0].economy))
    days = (raced[0].started_utc[:10], entry["expires_utc"][:10])
    assert days == ("2026-01-01", "2026-04-01")


def test_a_race_from_before_energy_was_noted_is_judged_without(raced: tuple[RaceResult, Path], tmp_path: Path) -> None:
    import duckdb

    (tmp_path / "arena.duckdb").write_bytes((raced[1] / "arena.duckdb").read_bytes())
    with duckdb.connect(str(tmp_path / "arena.duckdb")) as connection:
        connection.execute("DROP TABLE energy")
    with Store(tmp_path / "arena.duckdb", read_only=True) as store:
        economy = judge_race(store).engines[0].economy
    assert economy is not None
    assert (economy.joules_per_token, economy.tokens_per_money is not None) == (None, True)


def test_a_price_of_the_command_line_goes_before_the_scenarios() -> None:
    scenario = parse(f"{SCENARIO}\ncost: {{per_hour: 3.6, currency: EUR}}", source="test")
    cost = priced(scenario, ["a=2.5"], ["a", "b"]).cost
    assert cost is not None
    assert (cost.per_hour, cost.currency) == ({"a": 2.5, "b": 3.6}, "EUR")
    assert priced(scenario, [], ["a"]) is scenario
    for words in ("c=1", "a=", "a=-1", "a"):
        with pytest.raises(Misuse, match="--price"):
            priced(scenario, [words], ["a", "b"])
