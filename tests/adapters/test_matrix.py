"""The capability matrix: complete, honest about options, readable without colour, and the same in the documentation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from adapters.base import Capabilities
from adapters.cli import app
from adapters.marked_page import placed
from adapters.probing.matrix import (
    PARAMETERS,
    Column,
    Offer,
    all_columns,
    as_fields,
    as_markdown,
    as_tables,
    groups,
    offer,
    request_fields,
)
from adapters.registry import engine_names
from scripts.engine_matrix import API_PAGE, PAGE

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def columns() -> list[Column]:
    return all_columns()


def test_every_request_field_has_one_row() -> None:
    rows = [field for fields in PARAMETERS.values() for field in fields]
    assert sorted(rows) == sorted(request_fields())


def test_every_capability_has_a_row() -> None:
    keys = {row.key.partition(".")[0] for _, rows in groups() for row in rows}
    assert set(Capabilities.__struct_fields__) - {"parameters", "load"} <= keys


def test_every_engine_has_a_column_and_those_with_two_routes_have_two(columns: list[Column]) -> None:
    assert {column.engine for column in columns} == set(engine_names())
    assert {column.name for column in columns} >= {
        "sglang openai", "sglang native", "tgi generate", "tgi openai",
        "triton_server llmapi", "triton_server ensemble",
    }  # fmt: skip


def cell(columns: list[Column], name: str, key: str) -> Offer:
    column = next(column for column in columns if column.name == name)
    row = next(row for _, rows in groups() for row in rows if row.key == key)
    return offer(row, column)


def test_a_cell_says_whether_it_takes_an_option(columns: list[Column]) -> None:
    assert cell(columns, "vllm", "logit_bias") is Offer.YES
    assert cell(columns, "tensorrt_llm", "response_format") is Offer.OPTION
    assert cell(columns, "triton_server llmapi", "chat") is Offer.OPTION
    assert cell(columns, "triton_server llmapi", "tools") is not Offer.YES
    assert cell(columns, "llama_cpp", "min_tokens") is Offer.NO


def test_an_option_that_only_takes_away_is_not_named(columns: list[Column]) -> None:
    assert "incremental_output" not in next(column for column in columns if column.name == "sglang native").wider


@pytest.mark.parametrize("width", [80, 120, 160])
def test_no_line_is_wider_than_the_terminal_and_no_name_is_cut(width: int, columns: list[Column]) -> None:
    console = Console(width=width, no_color=True, record=True, markup=False)
    for table in as_tables(columns, width):
        console.print(table)
    text = console.export_text()
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    assert "…" not in text
    for word in ("openvino", "ensemble", "max_completion_tokens"):
        assert word in text


def test_the_json_names_every_engine_with_its_offers() -> None:
    found = json.loads(CliRunner().invoke(app, ["--matrix", "--json"]).stdout)
    vllm = next(engine for engine in found["engines"] if engine["engine"] == "vllm")
    assert vllm["offers"]["sampling"]["temperature"] == "yes"
    assert set(found["legend"]) == {"yes", "opt", "-"}


def test_the_table_explains_its_marks() -> None:
    result = CliRunner().invoke(app, ["--matrix"], env={"COLUMNS": "160"})
    assert result.exit_code == 0
    assert "refused by name" in result.stdout
    assert "tensorrt_llm: guided_decoding" in result.stdout


def test_the_documentation_shows_the_matrix_of_this_code(columns: list[Column]) -> None:
    page = PAGE.read_text()
    assert placed(page, "matrix", as_markdown(columns)) == page, "run `make matrix`, and commit docs/engine-matrix.md"


def test_the_page_of_the_routes_says_of_every_field_who_honours_it(columns: list[Column]) -> None:
    page = API_PAGE.read_text()
    assert placed(page, "fields", as_fields(columns)) == page, "run `make matrix`, and commit docs/api.md"


def test_a_field_is_with_one_kind_of_engines_only(columns: list[Column]) -> None:
    lines = {line.split("`")[1]: line for line in as_fields(columns).splitlines()[2:]}
    assert set(lines) == request_fields()
    assert lines["temperature"] == "| `temperature` | all | - | - |"
    assert lines["min_tokens"].endswith(
        "| llama_cpp, litellm_cloud, openai_compatible, tgi generate, tgi openai, triton_server llmapi |"
    )
