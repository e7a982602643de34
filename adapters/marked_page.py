"""Pages of which a program writes parts, between marks that name them.

text = placed(page, "soak", table)      # between <!-- soak: begin --> and <!-- soak: end -->
"""

from __future__ import annotations

from adapters.errors import GoodgateError


class NoPlace(GoodgateError):
    code = "no_place"


def placed(page: str, name: str, text: str) -> str:
    """The page with the text between the marks of that name. Pure."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    head, found, rest = page.partition(begin)
    _, closed, tail = rest.partition(end)
    if not (found and closed):
        raise NoPlace(f"The page has no place for {name}; put the lines {begin} and {end} where it shall stand.")
    return f"{head}{begin}\n{text}\n{end}{tail}"
