"""The page of all that goes wrong, with the tests that replay it.

    python -m tests.reliability > docs/reliability.md

It is made of tests/fault_matrix.py and tests/reported.py, of the marks on the tests (tests/replays.py), and of
the sizes of what is made by tables: bad input, the matrix of keys, the fuzzers. tests/test_reliability.py keeps it so.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from tests import fuzz
from tests.fault_matrix import FAULT_MATRIX, SCENARIOS, SCORES
from tests.gateway.bad_input import num_cases
from tests.gateway.tenants.test_auth import matrix_size
from tests.replays import Fault, table
from tests.reported import ATTACKS, FAULTS

INTRODUCTION = """\
# Reliability: what goes wrong, replayed

What fails between a gateway and its engines, clients and host, what users of other gateways reported, and what
attackers send; each row with the tests that replay it here, over real sockets or with real processes. A row without a
test is open, and says why. `pytest -m replay` runs them, and those of [wire-faults.md](wire-faults.md), which has the
faults of engines' answers. This page is made by `python -m tests.reliability`, from the marks on the tests;
`make test` fails where it does not tell the truth. What half an hour of load with faults in turn leaves behind shows
[performance.md](performance.md#soak).

"""
CROWD = """\
Faults of engines are also replayed while fifty streams are open, three times each with other draws of where they
strike: tests/gateway/test_faults_in_a_crowd.py, and test_native_failures.py for the native engine.

"""
MEETS = (  # what, told where, and what its client sees of it
    (
        "the process: memory, open files or turns of the loop are short",
        "[overload.md](overload.md)",
        "503 before its body is read",
    ),
    ("the gateway: `server.max_in_flight` generations are open", "[admission.md](admission.md)", "503 at once"),
    ("its caller's limits and budgets", "[keys.md](keys.md#limits)", "429"),
    ("its model is not loaded yet", "[load-on-demand.md](load-on-demand.md)", "a wait, in a stream with heartbeats"),
    (
        "its model's gate: there is more than can be served in time",
        "[admission.md](admission.md)",
        "a wait for its turn, or 503 with the time to come back",
    ),
    (
        "replicas that are down, ejected, set aside or slow",
        "[health.md](health.md)",
        "nothing: they are left out, or get a share",
    ),
    ("the choice among the others", "[routing.md](routing.md)", "nothing"),
    (
        "an engine that fails, is full or does not begin",
        "[retries.md](retries.md)",
        "nothing, where another try or a fallback answers; else that failure",
    ),
    ("**its first byte**: from here on nothing begins anew in silence", "[retries.md](retries.md)", "the answer"),
    (
        "an engine that breaks off",
        "[retries.md](retries.md#exact-continuation)",
        "an error event and no `[DONE]`, or the same tokens from another replica",
    ),
    (
        "a client that takes nothing, or leaves",
        "[overload.md](overload.md#clients-that-read-slowly-or-vanish)",
        "its connection ends, and its engine's work stops",
    ),
    ("the end of its own time", "[retries.md](retries.md#deadlines)", "504, or an error event"),
    (
        "another configuration; the end of the gateway",
        "[reload.md](reload.md)",
        "it ends as it began, or is told within the limit",
    ),
)
IN_ORDER = """
## What a request meets, in this order

| it meets | where | its client sees |
|---|---|---|
"""
TOLD = """
What became of it, and where its time went, says `goodgate why` ([ledger.md](ledger.md#one-request)).
"""
MADE = """
| what is made by tables | size |
|---|---|
"""
MUST_HOLD = "what must hold"
SCORED = """\
The scenarios and their numbers are failoverbench's: a model with one broken engine, two retries, another model as its
fallback, an answer of sixty words and thirty seconds for it. tests/gateway/test_scorecard.py plays all of them at a
tenth of their times, and scores what the official client sees: `passed`, where all is well in the end, `safe`, where it
gets an error in time that it cannot overlook, and `failed` otherwise.

"""
COMPARED = """
S08 and S09 are safe in streams, because the beginning of the answer has reached the client: nobody can take that back,
and nothing here begins anew in silence. Greedy streams of the native engine go on where `continuation` is on
([retries.md](retries.md)). failoverbench scored four others on 2026-09-12, each over 16 scenarios of these and their
like (passed / in part / safe / failed): LiteLLM 9/3/4/0, Bifrost 2.1.1 9/3/3/1, Portkey 11/2/0/3, LangChain 9/3/4/0.
Its rules for a score are its own, so these figures and ours are no race.

"""
LISTS = {
    "The fault matrix": FAULT_MATRIX,
    "Failure scenarios, scored": SCENARIOS,
    "Faults that users of other gateways reported": FAULTS,
    "What attackers send": ATTACKS,
}


def page() -> str:
    meets = "".join(f"| {' | '.join(row)} |\n" for row in MEETS)
    sizes = "".join(f"| {name} | {size} |\n" for name, size in _sizes().items())
    return (
        f"{INTRODUCTION}{_summary()}{MADE}{sizes}{IN_ORDER}{meets}{TOLD}"
        f"\n## The fault matrix\n\n{CROWD}{table(FAULT_MATRIX, MUST_HOLD)}"
        f"\n## Failure scenarios, scored\n\n{SCORED}{_scorecard()}{COMPARED}{table(SCENARIOS, MUST_HOLD)}"
        f"\n## Faults that users of other gateways reported\n\n{table(FAULTS)}"
        f"\n## What attackers send\n\n{table(ATTACKS)}"
    )


def _summary() -> str:
    rows = "".join(_summed(name, faults) for name, faults in LISTS.items())
    return f"| list | rows | replayed | open |\n|---|---|---|---|\n{rows}"


def _summed(name: str, faults: Mapping[str, Fault]) -> str:
    still = [f"{number}: {fault.open}" for number, fault in faults.items() if fault.open]
    return f"| {name} | {len(faults)} | {len(faults) - len(still)} | {'<br>'.join(still) or 'none'} |\n"


def _scorecard() -> str:
    names = " | ".join(SCORES)
    whole = " | ".join(score.whole for score in SCORES.values())
    streamed = " | ".join(score.streamed for score in SCORES.values())
    return f"| | {names} |\n|{'---|' * (len(SCORES) + 1)}\n| whole answers | {whole} |\n| streams | {streamed} |\n"


def _sizes() -> dict[str, str]:
    matrix = matrix_size()
    return {
        "Bad input: named cases, each for each route that it is sent to": f"{num_cases()} cases",
        "Fuzzer: targets whose cases never end (`python -m tests.fuzz`)": f"{len(fuzz.TARGETS)} targets",
        "Keys: routes x (no header, and roles x forms of the header)": (
            f"{matrix.routes} x (1 + {matrix.roles} x {matrix.forms}) = {matrix.cases} requests"
        ),
    }


if __name__ == "__main__":
    sys.stdout.write(page())
