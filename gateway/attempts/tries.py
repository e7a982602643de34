"""What whoever makes an attempt and whoever wants it made tell each other of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

HEDGE = "hedge"
CONTINUATION = "continuation"


def _nothing() -> None:
    pass


@dataclass(slots=True)
class Try:
    """`why` it is made beside the first: the code of the failure before it, `hedge` or `continuation`."""

    why: str = ""
    on_first_token: Callable[[], None] = _nothing
    is_lost: bool = False  # another one has answered first, so it is ended
