"""What routing may know of one prompt: how much work it is, and what it has in common with others. Never the text.

ask = Ask(prompt_tokens=812, completion_tokens=256)
"""

from __future__ import annotations

from msgspec import Struct


class Ask(Struct, frozen=True, kw_only=True):
    """Both are estimates from before the request is sent (gateway/tenants/cost.py); the second is the most that it may
    get."""

    prompt_tokens: int
    completion_tokens: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens
