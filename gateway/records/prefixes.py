"""How much of their prompts tenants get from prefix caches, and what they could do to get more.

    watch = PrefixWatch(gives_advice=True)
    watch.note(trace, request)          # when a generation has ended well: now and then a fingerprint of its prompt
    watch.answered(trace)               # a sink: what the engine has told of its prefix cache
    report = watch.report()             # a row for each tenant and model
    for line in lines(report): ...      # as `goodgate prefixes` shows it

Kept are counts, and of each tenant's last prompts for a model a few fingerprints: hashes with a salt that lives in this
process's memory only, and no text. Both are bounded. To take a fingerprint costs up to 0.1 ms, so after the first
prompts only some are looked at; to compare them is left to whoever asks for the report.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Iterator

import msgspec
from msgspec import Struct, field

from adapters.types import ChatRequest, GenerateRequest
from gateway.commands.table import table
from gateway.records.fingerprints import MAX_CHARS, Finding, Fingerprint, fingerprint, lost_reuse
from gateway.records.metrics import ANONYMOUS
from gateway.records.trace import Trace

MAX_PAIRS = 256  # of tenants and models; beyond them, the one that was used longest ago is forgotten
RING = 8  # fingerprints of each; up to 4 KB
SAMPLE_EVERY = 16  # prompts, once the ring is full
MAX_PARTS = 16


class Advice(Struct, frozen=True):
    """Where prompts lose reuse, in characters. See `Finding`."""

    sentence: str
    same_chars: int
    differs_by_char: int
    part: str
    lost_chars: int
    lost_share: float


class Row(Struct, frozen=True, kw_only=True):
    """One tenant's prompts for one model. Tokens are those of requests whose engine has told how many were cached;
    `hit_rate` is null where none has."""

    tenant: str
    model: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    hit_rate: float | None
    advice: Advice | None


class Report(Struct, frozen=True):
    """Since when (seconds since 1970), and the rows: the tenants and models that were used last come first."""

    since: int
    rows: list[Row]


class _Pair(Struct):
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    num_prompts: int = 0
    ring: deque[Fingerprint] = field(default_factory=lambda: deque(maxlen=RING))


class PrefixWatch:
    def __init__(self, *, gives_advice: bool) -> None:
        self.since = int(time.time())
        self._gives_advice = gives_advice  # without, no prompt is looked at
        self._salt = secrets.token_hex(8)
        self._pairs: OrderedDict[tuple[str, str], _Pair] = OrderedDict()

    def note(self, trace: Trace, request: GenerateRequest) -> None:
        """Take the fingerprint of a prompt, if it is its turn."""
        if not self._gives_advice:
            return
        pair = self._pair(trace)
        pair.num_prompts += 1
        if len(pair.ring) < RING or pair.num_prompts % SAMPLE_EVERY == 0:
            text, parts = head_of(request)
            pair.ring.append(fingerprint(text, parts, self._salt))

    def answered(self, trace: Trace) -> None:
        if trace.cached_tokens is not None:
            pair = self._pair(trace)
            pair.requests += 1
            pair.prompt_tokens += trace.prompt_tokens
            pair.cached_tokens += trace.cached_tokens

    def report(self) -> Report:
        """What is known. Takes about a millisecond a row, so call it in a thread."""
        kept = [(names, pair, list(pair.ring)) for names, pair in reversed(self._pairs.copy().items())]
        return Report(self.since, [_row(*names, pair, lost_reuse(ring)) for names, pair, ring in kept])

    def _pair(self, trace: Trace) -> _Pair:
        names = (ANONYMOUS if trace.caller is None else trace.caller.tenant, trace.model)
        pair = self._pairs.get(names)
        if pair is None:
            pair = self._pairs[names] = _Pair()
            if len(self._pairs) > MAX_PAIRS:
                self._pairs.popitem(last=False)
        self._pairs.move_to_end(names)
        return pair


def lines(report: Report) -> Iterator[str]:
    """The report for a person: a table, and the advice under it."""
    titles = ("tenant", "model", "requests", "prompt tokens", "from the cache")
    yield from table([titles, *(_cells(row) for row in report.rows)])
    for row in report.rows:
        if row.advice is not None:
            yield f"\n{row.tenant}, {row.model}: {row.advice.sentence}"


def _cells(row: Row) -> tuple[str, ...]:
    rate = "not told" if row.hit_rate is None else f"{row.hit_rate:.0%}"
    return row.tenant, row.model, str(row.requests), str(row.prompt_tokens), rate


def head_of(request: GenerateRequest) -> tuple[str, list[tuple[int, str]]]:
    """The beginning of a prompt about as a template would write it, and where its parts begin. A prompt of token ids
    has no text to look at."""
    if not isinstance(request, ChatRequest):
        return (request.prompt[:MAX_CHARS] if isinstance(request.prompt, str) else ""), [(0, "prompt")]
    texts: list[str] = []
    parts: list[tuple[int, str]] = []
    length = 0
    for name, text in itertools.islice(_parts(request), MAX_PARTS):
        parts.append((length, name))
        texts.append(text[: MAX_CHARS - length])
        length += len(texts[-1])
        if length >= MAX_CHARS:
            break
    return "".join(texts), parts


def _parts(request: ChatRequest) -> Iterator[tuple[str, str]]:
    if isinstance(request.tools, list) and request.tools:
        yield "tools", msgspec.json.encode(request.tools).decode() + "\n"
    for number, message in enumerate(request.messages, 1):
        yield f"message {number}, {message.role}", message.text() + "\n"


def _row(tenant: str, model: str, pair: _Pair, finding: Finding | None) -> Row:
    return Row(
        tenant=tenant,
        model=model,
        requests=pair.requests,
        prompt_tokens=pair.prompt_tokens,
        cached_tokens=pair.cached_tokens,
        hit_rate=pair.cached_tokens / pair.prompt_tokens if pair.prompt_tokens else None,
        advice=None if finding is None else _advice(finding),
    )


def _advice(finding: Finding) -> Advice:
    return Advice(
        sentence=finding.sentence,
        same_chars=finding.same,
        differs_by_char=finding.differs_by,
        part=finding.part,
        lost_chars=finding.lost,
        lost_share=round(finding.lost / finding.rest, 3),
    )
