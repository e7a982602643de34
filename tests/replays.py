"""Which tests replay which faults: read from the marks on the tests, and told as a table of a page.

    @pytest.mark.replay("G06")                         # one number or several: W.. of tests/wire_faults.py,
    async def test_what_one_sees(...) -> None: ...     # G.., A.. of tests/reported.py, F.., S.. of fault_matrix.py,
                                                       # R.. of tests/arena/faults.py,
                                                       # E.. of tests/native_engine/faults.py

A new mark changes its page. Take the fault's `open` away, if this is its first test, and write the page again:

    python -m tests.wire_faults > docs/wire-faults.md
    python -m tests.arena.faults > docs/arena-faults.md
    python -m tests.reliability > docs/reliability.md
    python -m tests.native_engine.faults > docs/engine-faults.md
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
WHAT_HAPPENED = "what happened"


class Fault(NamedTuple):
    symptom: str  # what a user sees
    cause: str  # what others did, with where it was reported; or what must hold
    open: str = ""  # why there is no test yet


class Replay(NamedTuple):
    fault: str
    file: str  # relative to the repository
    test: str


@cache
def replays() -> tuple[Replay, ...]:
    """Every marked test, once for each fault that its mark names."""
    return tuple(_read())


def _read() -> Iterator[Replay]:
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for fault in _marked(node):
                    yield Replay(fault, path.relative_to(ROOT).as_posix(), node.name)


def _marked(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    calls = [each for each in function.decorator_list if isinstance(each, ast.Call)]
    marks = [each for each in calls if ast.unparse(each.func) == "pytest.mark.replay"]
    return [argument.value for mark in marks for argument in mark.args if isinstance(argument, ast.Constant)]


def table(faults: Mapping[str, Fault], second: str = WHAT_HAPPENED) -> str:
    """A row for each fault: its symptom, its cause, and its tests or why there is none."""
    header = f"| | what one sees | {second} | replayed in |\n|---|---|---|---|\n"
    return header + "".join(_row(number, fault) for number, fault in faults.items())


def _row(number: str, fault: Fault) -> str:
    by_file: dict[str, list[str]] = {}
    for replay in replays():
        if replay.fault == number:
            by_file.setdefault(replay.file, []).append(replay.test)
    listed = "<br>".join(f"`{file}`: {', '.join(names)}" for file, names in by_file.items())
    return f"| {number} | {fault.symptom} | {fault.cause} | {listed or f'open: {fault.open}'} |\n"
