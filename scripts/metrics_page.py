"""`make matrix` writes docs/metrics.md with this: every metric of the gateway, from the table they are made of.

python scripts/metrics_page.py
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from adapters.marked_page import placed  # noqa: E402
from gateway.records.metric_table import as_markdown  # noqa: E402

PAGE = ROOT / "docs" / "metrics.md"


def main() -> None:
    PAGE.write_text(placed(PAGE.read_text(), "metrics", as_markdown()))
    print(f"{PAGE.relative_to(ROOT)} is up to date")


if __name__ == "__main__":
    main()
