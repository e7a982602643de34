"""What paging saves, on paper: the memory that a list of requests takes with and without it.

    paging_figures([Reserved(prompt_ids, 64), ...], block_size=32, max_model_len=8192, token_bytes=23040)

Three ways to keep keys and values, all requests held at once and at their full length:

    contiguous      one stretch of `max_model_len` tokens for each request
    paged           whole blocks, as many as its tokens need
    paged+prefix    the same, and full blocks of equal beginnings once
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from native_engine.blocks import extend_chain
from native_engine.capacity import blocks_for


class Reserved(NamedTuple):
    prompt_ids: list[int]
    num_output_tokens: int

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + self.num_output_tokens


@dataclass(frozen=True, slots=True)
class Reservation:
    """Bytes. `used` holds keys and values of some token, each once where requests share it; the rest is wasted."""

    name: str
    reserved: int
    used: int

    @property
    def wasted(self) -> int:
        return self.reserved - self.used

    @property
    def waste_share(self) -> float:
        return self.wasted / self.reserved if self.reserved else 0.0


def paging_figures(
    requests: Sequence[Reserved], *, block_size: int, max_model_len: int, token_bytes: int
) -> list[Reservation]:
    """In the order of the table above. `ValueError`: a request is longer than `max_model_len`."""
    for request in requests:
        if request.num_tokens > max_model_len:
            raise ValueError(f"A request has {request.num_tokens} tokens, but max_model_len is {max_model_len}.")
    used = sum(request.num_tokens for request in requests)
    paged = sum(blocks_for(request.num_tokens, block_size) for request in requests) * block_size
    shared = _num_shared_blocks(requests, block_size) * block_size
    return [
        Reservation("contiguous", len(requests) * max_model_len * token_bytes, used * token_bytes),
        Reservation("paged", paged * token_bytes, used * token_bytes),
        Reservation("paged+prefix", (paged - shared) * token_bytes, (used - shared) * token_bytes),
    ]


def _num_shared_blocks(requests: Sequence[Reserved], block_size: int) -> int:
    """Blocks that an earlier request has as well; as in the engine, never that of a prompt's last token."""
    seen: set[bytes] = set()
    num_shared = 0
    for request in requests:
        chain: list[bytes] = []
        extend_chain(chain, request.prompt_ids, block_size=block_size)
        usable = chain[: max(0, len(request.prompt_ids) - 1) // block_size]
        num_shared += sum(digest in seen for digest in usable)
        seen.update(chain)
    return num_shared
