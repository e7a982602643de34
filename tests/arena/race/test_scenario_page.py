"""docs/scenarios.md names every key of a scenario, and its examples are valid."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import msgspec
import pytest
import yaml

from arena.race.config import scenario_names
from arena.race.scenario import Scenario
from arena.race.scenario_file import parse

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "scenarios.md").read_text("utf-8")
EXAMPLES = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
REST = {"name": "x", "model": "m", "slo": {"ttft_ms": 500, "tpot_ms": 50}}


def structs(kind: Any) -> Iterator[type[msgspec.Struct]]:
    """Every mapping that a scenario may have, itself included."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield kind
        for field in msgspec.structs.fields(kind):
            yield from structs(field.type)
    elif get_origin(kind) is not dict:
        for member in get_args(kind):
            yield from structs(member)


def words() -> set[str]:
    """What stands in code marks, with the parts of dotted names, and in the examples."""
    marked = re.findall(r"`([^`\n]+)`", PAGE) + EXAMPLES
    return {word for text in marked for word in re.findall(r"\w+", text)}


def test_every_key_and_every_kind_is_on_the_page() -> None:
    known = words()
    missing = set()
    for struct in structs(Scenario):
        missing |= {field.encode_name for field in msgspec.structs.fields(struct)} - known
        if struct.__struct_config__.tag_field:
            missing |= {str(struct.__struct_config__.tag)} - known
    assert not missing, f"docs/scenarios.md lacks {', '.join(sorted(missing))}"


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_every_example_is_a_valid_scenario(example: str) -> None:
    shown = yaml.safe_load(example)
    scenario = parse(yaml.safe_dump({**REST, **shown}), source="docs/scenarios.md")
    assert scenario.workload.__struct_config__.tag == shown["workload"]["kind"]


def test_the_page_lists_the_shipped_scenarios() -> None:
    assert set(re.findall(r"^\| `(\w+)` \| [^|]+ \|$", PAGE, re.MULTILINE)) >= set(scenario_names())
