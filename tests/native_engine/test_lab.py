"""The experiments, small, on a random model: what they count is right, and what they draw is well formed.

What takes how long is for the machine to say; here only what holds on every machine is asked.
"""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from adapters.errors import GoodgateError
from native_engine.blocks import BlockPool
from native_engine.config import EngineConfig
from native_engine.lab import batch_depth, batching, cli, files, kv_cache, paging, picture, prefix, speculation
from native_engine.lab.catalogue import QUESTIONS, load
from native_engine.lab.workbench import Spread, Workbench, short
from native_engine.loading import make_model
from native_engine.weights import open_checkpoint
from tests.native_engine.tiny_llama import tiny_config, write_tiny_llama

LABS = Path(__file__).resolve().parents[2] / "docs" / "labs"
SVG = "{http://www.w3.org/2000/svg}"
FACTS = {"machine": "a <small> one", "model": "tiny", "version": "1", "command": "goodgate lab all", "date": "today"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its blocks are large enough that a MiB holds few."""
    config = tiny_config(num_layers=8, head_dim=64, max_model_len=1024)
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"), config)


@pytest.fixture(scope="module")
def bench(folder: Path, kernel_cache: Path) -> Workbench:
    config = EngineConfig(kv_cache_mib=16, num_threads=1)
    model = make_model(open_checkpoint(folder), config, kernel_cache=kernel_cache)
    return Workbench(model, config, is_quick=True)


@pytest.fixture(scope="module")
def found(bench: Workbench) -> Any:
    """What each experiment found, run once."""
    return cache(lambda name: load(name).measure(bench))


def test_the_cache_takes_whole_blocks_and_its_text_is_the_one_without(bench: Workbench, found: Any) -> None:
    result: kv_cache.Found = found("kv-cache")
    pool = BlockPool(1, bench.config.block_size)
    for each in result.lengths:
        assert each.allocated_bytes == pool.blocks_for(each.num_tokens) * pool.block_size * bench.token_bytes
        assert each.formula_bytes <= each.allocated_bytes < each.formula_bytes + pool.block_size * bench.token_bytes
    assert result.text.tokens_are_equal
    assert len(result.text.cached_s) == len(result.text.uncached_s) == 32
    assert all(later > earlier for earlier, later in pairwise(result.text.uncached_s))
    assert result.token_bytes.without_grouped_heads == 3 * result.token_bytes.as_served


def test_the_engine_holds_the_blocks_that_the_figures_of_paging_say(found: Any) -> None:
    result: paging.Found = found("paging")
    for each in result.held:
        assert each.paged_bytes == each.paged_engine_bytes
        assert each.shared_bytes == each.shared_engine_bytes
        assert each.shared_bytes < each.paged_bytes < each.contiguous_bytes
    assert "exactly what" in paging.show(result).says
    assert [each.block_size for each in result.sizes] == [16, 32, 128]
    assert result.sizes[0].wasted_share < result.sizes[-1].wasted_share
    assert result.sizes[-1].shared_share == 0, "a prefix of 100 tokens fills no block of 128"


def test_static_batches_leave_seats_empty_only_where_answers_differ(found: Any) -> None:
    even, varied = found("batching").variances
    assert even.variation == 0
    assert even.static_seats == even.continuous_seats == 1
    assert varied.static_seats < varied.continuous_seats
    assert sum(found("batching").static.taken) == sum(found("batching").continuous.taken) == 120


def test_lengths_keep_their_sum_whatever_their_spread() -> None:
    for spread in (0.0, 0.5, 1.5):
        drawn = batching.lengths(spread, 32, 24)
        assert (len(drawn), sum(drawn)) == (32, 32 * 24)
        assert min(drawn) >= 2
    variations = [batching.variation(batching.lengths(spread, 32, 24)) for spread in (0.0, 0.4, 0.8, 1.2)]
    assert variations == sorted(variations)
    assert variations[0] == 0


def test_a_level_is_kept_until_its_step_ends_and_falls_to_nothing_at_last() -> None:
    corners = batching.steps(batching.Seats([1.0, 3.0], [4, 2]))
    assert corners == [(0, 4), (1, 4), (1, 2), (3, 2), (3, 0)]


def test_the_long_prompt_takes_one_step_whole_and_several_in_chunks(found: Any) -> None:
    small, whole = found("chunked-prefill").chunks
    assert whole.is_whole
    assert whole.prompt_steps == 1
    assert not small.is_whole
    assert small.prompt_steps >= 384 / 64


def test_the_pauses_are_those_of_a_request_that_was_there_before_the_prompt_came(found: Any) -> None:
    for each in found("chunked-prefill").courses:
        assert each.at_s[0] < 0 < each.at_s[-1]
        assert len(each.at_s) == len(each.pause_ms) == 23


def test_as_many_blocks_are_given_back_as_were_asked_for(found: Any) -> None:
    result = found("preemption")
    for each in result.losses:
        assert (each.num_blocks - 1) * result.block_size < each.num_tokens <= each.num_blocks * result.block_size
        assert 0 < each.copies_ms.median < each.swap_ms.median


def test_a_timestamp_in_front_leaves_nothing_to_be_found(found: Any) -> None:
    result: prefix.Found = found("prefix")
    for each in result.lengths:
        assert each.found_share["stamp_first"] == 0
        assert each.found_share["plain"] > each.found_share["stamp_last"] > 0.5
    assert all(len(spreads) == prefix.NUM_REQUESTS for spreads in result.in_order_ms.values())


def test_goodput_is_never_above_the_speed(found: Any) -> None:
    for each in found("batch-depth").depths:
        assert each.good_tokens_per_s.median <= each.tokens_per_s.median
        assert each.tpot_ms.median <= each.slow_tpot_ms.median
        assert 0 <= each.good_share <= 1


def test_drafts_change_no_token_and_are_right_where_the_text_repeats_itself(found: Any) -> None:
    result: speculation.Found = found("speculation")
    assert result.tokens_are_equal
    for each in result.drafts:
        assert 0 <= each.accepted_share <= 1
        assert (each.accepted_share == 0) == (each.num_draft_tokens == 0 or each.tokens_per_step <= 1)
    assert all(each.tokens_per_step == 1 for each in result.drafts if each.num_draft_tokens == 0)


def depth(seats: int, speed: float, good: float, tpot_ms: float) -> batch_depth.AtDepth:
    one = Spread.of
    return batch_depth.AtDepth(
        seats, one([speed]), one([good]), one([tpot_ms]), one([tpot_ms]), good / speed
    )  # fmt: skip


def test_a_peak_is_called_one_only_where_both_sides_are_lower() -> None:
    rows = [depth(1, 20, 20, 50), depth(8, 90, 90, 80), depth(64, 200, 10, 300)]
    assert "falls on both sides" in batch_depth.show(batch_depth.Found(100, rows)).says
    assert "at the end of what was tried" in batch_depth.show(batch_depth.Found(100, rows[:2])).says


def test_a_spread_tells_its_ends_only_where_they_differ() -> None:
    assert str(Spread.of([3.0])) == "3"
    assert str(Spread.of([61.2, 60.1, 75.0])) == "61.2 (60.1 to 75)"
    assert [short(value) for value in (0.1234, 12.34, 1234.5)] == ["0.12", "12.3", "1,234"]
    assert [picture.times(*pair) for pair in ((3, 2), (200, 9))] == ["1.5 times", "22 times"]


@pytest.mark.parametrize("name", QUESTIONS)
def test_an_experiment_leaves_a_picture_a_page_and_its_figures(name: str, found: Any, tmp_path: Path) -> None:
    experiment = load(name)
    shown = experiment.show(found(name))
    files.write(tmp_path, files.Ran(name, FACTS, found(name)))
    root = ET.fromstring((tmp_path / f"{name}.svg").read_text())
    words = [each.text or "" for each in root.iter(f"{SVG}text")]
    assert any("a <small> one" in each for each in words), "a figure names the machine"
    assert any("goodgate lab all" in each for each in words)
    assert {each.title for each in shown.charts} <= set(words)
    assert all(len(each.title) <= 50 for each in shown.charts), "a longer one runs into the next chart"
    assert len(experiment.TITLE) <= 66, "a longer one runs off the sheet"
    assert len(root.findall(f".//{SVG}g/{SVG}svg")) >= len(shown.charts)
    assert len({place for place, _ in picture.legend(shown.charts)}) == len(picture.legend(shown.charts))
    assert files.read(tmp_path, name) == files.Ran(name, FACTS, found(name)), "what is written can be drawn again"
    page = (tmp_path / f"{name}.md").read_text()
    assert page.startswith(f"# {experiment.TITLE}\n\n![")
    assert all(f"## {title}" in page for title, _ in shown.tables)
    assert f"![{experiment.TITLE}]({name}.svg)" in files.index(list(files.left_in(tmp_path)))


def test_everything_that_is_drawn_lies_on_its_sheet(found: Any) -> None:
    for name in QUESTIONS:
        root = ET.fromstring(files.figure(files.Ran(name, FACTS, found(name))))
        width, height = (float(root.attrib[side]) for side in ("width", "height"))
        for text in root.findall(f"{SVG}text"):
            assert 0 < float(text.attrib["y"]) < height - 4
            assert float(text.attrib["x"]) + 5.5 * len(text.text or "") < width


def test_the_kept_figures_are_drawn_as_experiments_draw_now() -> None:
    kept = list(files.left_in(LABS))
    assert [ran.name for ran in kept] == list(QUESTIONS)
    for ran in kept:
        assert (LABS / f"{ran.name}.svg").read_text() == files.figure(ran), "run: goodgate lab draw --out docs/labs"
        assert (LABS / f"{ran.name}.md").read_text() == files.page(ran)
    assert (LABS / "README.md").read_text() == files.index(kept)


# ---- the command


def run(*words: str) -> Any:
    return CliRunner().invoke(cli.app, list(words))


def test_the_list_names_every_experiment() -> None:
    listed = run("list").stdout
    assert all(f"{name} " in listed and question in listed for name, question in QUESTIONS.items())


def test_the_command_runs_an_experiment_and_says_what_to_see(folder: Path, tmp_path: Path) -> None:
    result = run("prefix", "--quick", "--threads", "1", "--model", str(folder), "--out", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(prefix.TITLE)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "prefix.svg", "prefix.md", "prefix.json", "README.md",
    }  # fmt: skip
    before = {path.name: path.read_text() for path in (tmp_path / "out").iterdir()}
    assert run("draw", "--out", str(tmp_path / "out")).exit_code == 0
    assert {path.name: path.read_text() for path in (tmp_path / "out").iterdir()} == before
    facts = json.loads((tmp_path / "out" / "prefix.json").read_text())["facts"]
    assert facts["command"] == f"goodgate lab prefix --model {folder} --threads 1 --quick"
    assert str(Path.home()) not in facts["machine"]


def test_a_model_whose_context_is_too_short_is_refused_in_a_sentence(tmp_path: Path) -> None:
    short_one = write_tiny_llama(tmp_path / "short")
    result = run("prefix", "--quick", "--model", str(short_one), "--out", str(tmp_path / "out"))
    assert result.exit_code == 1
    assert "needs a context of 422 tokens, and the model has 256" in result.stderr


def test_what_cannot_be_read_or_written_is_said_in_a_sentence(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for words in (
        ("--model", str(tmp_path / "nothing.gguf"), "--out", str(tmp_path / "out")),
        ("--model", str(folder), "--out", str(tmp_path / "file")),
    ):
        result = run("prefix", "--quick", *words)
        assert result.exit_code == 1
        assert result.stderr.startswith("goodgate lab: ")
        assert result.stderr.count("\n") == 1, result.stderr


def test_a_folder_without_what_was_measured_is_not_drawn(tmp_path: Path) -> None:
    assert "holds no experiment; run one" in run("draw", "--out", str(tmp_path)).stderr
    (tmp_path / "prefix.json").write_text('{"facts": {}, "found": {"lengths": 3}}')
    result = run("draw", "--out", str(tmp_path))
    assert result.exit_code == 1
    assert "prefix.json is not what prefix leaves" in result.stderr


def test_a_model_that_is_not_in_the_store_is_named_with_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOODGATE_HOME", str(tmp_path))
    result = run("prefix", "--out", str(tmp_path / "out"))
    assert isinstance(result.exception, GoodgateError)
    assert "goodgate models pull smollm2-135m-instruct" in result.exception.message
