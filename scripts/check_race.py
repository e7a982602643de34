"""Check what a race left behind: `python scripts/check_race.py DIR engine...` fails unless every engine carried a load.

Used by continuous integration, where a race is run for its plumbing and not for its figures.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(folder: Path, wanted: list[str]) -> int:
    summary = json.loads((folder / "summary.json").read_text())
    engines = {engine["name"]: engine for engine in summary["engines"]}
    faults = [f"{name} is missing from the ranking" for name in wanted if name not in engines]
    for name, engine in engines.items():
        if not engine["requests"] or engine["requests"] == engine["failures"]:
            faults.append(f"{name} answered nothing: {engine['failures']} of {engine['requests']} requests failed")
        if engine["ttft_p50_ms"] is None or engine["tpot_p50_ms"] is None:
            faults.append(f"{name} has no latency figures")
    for name in ("arena.duckdb", "report.html", "evidence.json"):
        if not (folder / name).stat().st_size:
            faults.append(f"{name} is empty")
    if "<script src=" in (folder / "report.html").read_text():
        faults.append("the report would fetch a script")
    print("\n".join(faults) or f"race of {', '.join(engines)}: complete")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
