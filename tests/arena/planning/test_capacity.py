"""`goodgate plan capacity` on a small random model."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from adapters.errors import GoodgateError
from arena.commands.plan import app
from tests.native_engine.tiny_llama import write_tiny_llama

TINY_TOKEN_BYTES = 2 * 2 * 2 * 16 * 2  # keys and values, layers, KV heads, their size, bf16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_llama(tmp_path_factory.mktemp("tiny")))


def test_every_form_of_the_cache_is_told_for_every_device(model: str) -> None:
    asked = ["capacity", "--model", model, "--context", "128", "--device", "l4", "--device", "h200", "--json"]
    rows = json.loads(CliRunner().invoke(app, asked, catch_exceptions=False).stdout)
    assert [row["name"] for row in rows] == ["l4"] * 4 + ["h200"] * 4
    assert rows[0]["token_bytes"] == TINY_TOKEN_BYTES
    assert rows[1]["cache"] == "as is, in int8"
    assert rows[1]["num_sequences"] > rows[0]["num_sequences"] > rows[2]["num_sequences"]
    assert rows[4]["tokens_per_s"] > rows[0]["tokens_per_s"]


def test_the_table_begins_with_what_fits(model: str) -> None:
    asked = ["capacity", "--model", model, "--context", "128", "--device", "l4"]
    result = CliRunner().invoke(app, asked, catch_exceptions=False)
    assert result.exit_code == 0
    assert "texts of 128 tokens fit on l4" in " ".join(result.stdout.split())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--device", "abacus"), "No device 'abacus' is known"),
        (("--context", "4000"), "context is 256 tokens, shorter than 4000"),
    ],
)
def test_what_cannot_be_planned_is_said_in_a_sentence(model: str, options: tuple[str, ...], says: str) -> None:
    result = CliRunner().invoke(app, ["capacity", "--model", model, *options])
    assert result.exit_code == 1
    assert says in result.stderr
    assert not isinstance(result.exception, GoodgateError)
