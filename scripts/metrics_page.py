"""`make matrix` writes docs/metrics.md with this: every metric of the gateway, from the table they are made of.

python scripts/metrics_page.py
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from gateway.records.metric_table import as_markdown  # noqa: E402

PAGE = ROOT / "docs" / "metrics.md"
BEGIN, END = "<!-- metrics: begin -->", "<!-- metrics: end -->"


def written(page: str) -> str:
    """The page with the table between its marks."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{as_markdown()}\n{END}{tail}"


def main() -> None:
    PAGE.write_text(written(PAGE.read_text()))
    print(f"{PAGE.relative_to(ROOT)} is up to date")


if __name__ == "__main__":
    main()
