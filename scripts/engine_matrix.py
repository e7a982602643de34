"""`make matrix`: write the generated tables of docs/engine-matrix.md and docs/api.md. With `--live DIR`, also what live
engines showed.

python scripts/engine_matrix.py                       # what the adapters declare
python scripts/engine_matrix.py --live runs/live      # and the reports that `make live` has left there
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import msgspec  # noqa: E402

from adapters.marked_page import placed  # noqa: E402
from adapters.probing.faces import times_markdown, verdicts_markdown  # noqa: E402
from adapters.probing.matrix import all_columns, as_fields, as_markdown  # noqa: E402
from adapters.probing.probe import Report  # noqa: E402

PAGE = ROOT / "docs" / "engine-matrix.md"
API_PAGE = ROOT / "docs" / "api.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--live", type=Path, help="the folder of the reports")
    arguments = parser.parse_args()
    columns = all_columns()
    API_PAGE.write_text(placed(API_PAGE.read_text(), "fields", as_fields(columns)))
    page = placed(PAGE.read_text(), "matrix", as_markdown(columns))
    if arguments.live is not None:
        files = sorted(arguments.live.glob("*.json"))
        if not files:
            raise SystemExit(f"{arguments.live} holds no report; `make live` writes them.")
        reports = [msgspec.json.decode(file.read_bytes(), type=Report) for file in files]
        page = placed(page, "times", times_markdown(reports))
        page = placed(page, "live", verdicts_markdown(reports))
    PAGE.write_text(page)
    print(f"{PAGE.relative_to(ROOT)} and {API_PAGE.relative_to(ROOT)} are up to date")


if __name__ == "__main__":
    main()
