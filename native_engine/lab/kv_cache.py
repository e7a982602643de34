"""What the KV cache saves, and what it takes.

Without a cache, the next token takes the keys and values of the whole text so far again: the work of a token grows with
the text, that of a text with its square. Both ways run on the same engine: with a cache a request goes on, without one
every token is a new request whose prompt is the text so far. Their tokens must be the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from native_engine.capacity import bytes_per_token
from native_engine.lab.picture import Chart, Shown, Table, axis_of, chart, line, linear_axis, log_axis, table, times
from native_engine.lab.workbench import Course, Spread, Workbench, drive, greedy, short

TITLE = "The KV cache: a text costs T steps instead of T squared"
WITH, WITHOUT = "with a KV cache", "without: the whole text again for every token"
NUM_DECODES = 6
MB = 1e6


@dataclass(frozen=True, slots=True)
class AtLength:
    """Of a text of so many tokens: what the next one costs, and what the cache holds."""

    num_tokens: int
    cached_ms: Spread
    uncached_ms: Spread
    allocated_bytes: int  # of the blocks that the engine had given it
    formula_bytes: int


@dataclass(frozen=True, slots=True)
class Text:
    """A whole text: seconds until each of its tokens was there, medians of the repeats."""

    cached_s: list[float]
    uncached_s: list[float]
    tokens_are_equal: bool


@dataclass(frozen=True, slots=True)
class TokenBytes:
    as_served: int
    in_int8: int
    without_grouped_heads: int  # keys and values for every query head


@dataclass(frozen=True, slots=True)
class Found:
    lengths: list[AtLength]
    text: Text
    token_bytes: TokenBytes


def measure(bench: Workbench) -> Found:
    lengths: tuple[int, ...] = bench.pick((32, 128, 384), (32, 64, 128, 256, 512, 1024, 2048))
    bench.need_context(lengths[-1] + NUM_DECODES + 2)
    runs: dict[int, list[_Run]] = {length: [] for length in lengths}
    repeats = bench.pick(2, 3)
    for repeat in range(repeats):
        for length in lengths:
            bench.say(f"kv-cache: {length:,} tokens, repeat {repeat + 1} of {repeats}")
            runs[length].append(_next_tokens(bench, length))
    block_bytes = bench.token_bytes * bench.config.block_size
    return Found(
        [
            AtLength(
                length,
                cached_ms=Spread.of([run.cached_ms for run in of_length]),
                uncached_ms=Spread.of([run.uncached_ms for run in of_length]),
                allocated_bytes=of_length[0].num_blocks * block_bytes,
                formula_bytes=length * bench.token_bytes,
            )
            for length, of_length in runs.items()
        ],
        _texts(bench, bench.pick(32, 192), bench.pick(1, 2)),
        _token_bytes(bench),
    )


@dataclass(frozen=True, slots=True)
class _Run:
    cached_ms: float
    uncached_ms: float
    num_blocks: int


def _next_tokens(bench: Workbench, length: int) -> _Run:
    """One request tells both: its first token is computed of the whole text, the ones after it with the cache."""
    engine = bench.engine(enable_prefix_caching=False, max_num_batched_tokens=256)
    engine.add("text", bench.prompt(length), greedy(1 + NUM_DECODES))
    blocks: list[int] = []

    def look(course: Course, _: float) -> None:
        if not blocks and course.num_tokens == 1:
            blocks.append(engine.stats().kv_blocks_used)

    course = drive(engine, look)
    return _Run(median(course.gaps_s("text")) * 1e3, course.ttft_s("text") * 1e3, blocks[0])


def _texts(bench: Workbench, num_tokens: int, repeats: int) -> Text:
    prompt = bench.prompt(8)
    cached: list[list[float]] = []
    uncached: list[list[float]] = []
    texts: list[list[int]] = []
    for repeat in range(repeats):
        bench.say(f"kv-cache: a text of {num_tokens} tokens, repeat {repeat + 1} of {repeats}")
        for seconds, write in ((cached, _write_cached), (uncached, _write_uncached)):
            written, times_s = write(bench, prompt, num_tokens)
            seconds.append(times_s)
            texts.append(written)
    return Text(
        [median(each) for each in zip(*cached, strict=True)],
        [median(each) for each in zip(*uncached, strict=True)],
        all(text == texts[0] for text in texts),
    )


def _write_cached(bench: Workbench, prompt: list[int], num_tokens: int) -> tuple[list[int], list[float]]:
    engine = bench.engine(enable_prefix_caching=False)
    engine.add("text", prompt, greedy(num_tokens))
    course = drive(engine)
    return course.token_ids["text"], course.token_s["text"]


def _write_uncached(bench: Workbench, prompt: list[int], num_tokens: int) -> tuple[list[int], list[float]]:
    engine = bench.engine(enable_prefix_caching=False)
    written: list[int] = []
    times_s: list[float] = []
    for _ in range(num_tokens):
        engine.add("text", [*prompt, *written], greedy(1))
        course = drive(engine)
        written += course.token_ids["text"]
        times_s.append((times_s[-1] if times_s else 0.0) + course.seconds)
    return written, times_s


def _token_bytes(bench: Workbench) -> TokenBytes:
    config, dtype = bench.model.config, bench.config.dtype
    return TokenBytes(
        as_served=bench.token_bytes,
        in_int8=bytes_per_token(config, dtype, "int8"),
        without_grouped_heads=bytes_per_token(replace(config, num_kv_heads=config.num_heads), dtype),
    )


def show(found: Found) -> Shown:
    return Shown(_says(found), (_speed(found.lengths), _whole_text(found.text), _bytes(found)), _tables(found))


def _says(found: Found) -> str:
    first, last, text = found.lengths[0], found.lengths[-1], found.text
    half, whole = len(text.cached_s) // 2 - 1, len(text.cached_s) - 1
    same = "the same" if text.tokens_are_equal else "NOT the same, which is a fault"
    return (
        f"Behind {last.num_tokens:,} tokens the next one takes {short(last.cached_ms.median)} ms with the cache and "
        f"{short(last.uncached_ms.median)} ms without, {times(last.uncached_ms.median, last.cached_ms.median)} as "
        f"long; behind {first.num_tokens} it takes {short(first.cached_ms.median)} and "
        f"{short(first.uncached_ms.median)} ms. For a whole text of {whole + 1} tokens that adds up to "
        f"{short(text.cached_s[whole])} s against {short(text.uncached_s[whole])} s. The second half of the text takes "
        f"{times(text.cached_s[whole] - text.cached_s[half], text.cached_s[half])} as long as the first with the cache "
        f"and {times(text.uncached_s[whole] - text.uncached_s[half], text.uncached_s[half])} without (a pure square: "
        f"3 times; a step has a base cost that short texts hide behind). The tokens of both are {same}. The price is "
        f"memory: {found.token_bytes.as_served:,} bytes a token, taken in whole blocks."
    )


def _speed(lengths: Sequence[AtLength]) -> Chart:
    cached = [(each.num_tokens, _per_s(each.cached_ms)) for each in lengths]
    uncached = [(each.num_tokens, _per_s(each.uncached_ms)) for each in lengths]
    rates = [end for _, spread in (*cached, *uncached) for end in (spread.low, spread.high)]
    return chart(
        "Speed by the length of the text so far",
        "Tokens a second stay nearly level with a cache, and fall as one over the length without.",
        axis_of("tokens in the text so far", [each.num_tokens for each in lengths]),
        log_axis("tokens a second", min(rates) / 1.5, max(rates) * 1.5),
        [line(WITH, 0, cached, unit="tokens/s"), line(WITHOUT, 1, uncached, unit="tokens/s")],
    )


def _per_s(ms: Spread) -> Spread:
    return Spread(1e3 / ms.median, 1e3 / ms.high, 1e3 / ms.low, ms.count)


def _whole_text(text: Text) -> Chart:
    lines = [
        line(name, place, [(number, seconds) for number, seconds in enumerate(of_text, 1)], has_marks=False)
        for name, place, of_text in ((WITH, 0, text.cached_s), (WITHOUT, 1, text.uncached_s))
    ]
    return chart(
        "Seconds until a whole text is written",
        "Seconds grow with the length of the text with a cache, and with its square without.",
        linear_axis("tokens written", len(text.cached_s)),
        linear_axis("seconds", max(text.cached_s[-1], text.uncached_s[-1])),
        lines,
    )


def _bytes(found: Found) -> Chart:
    ends = (0, found.lengths[-1].num_tokens)
    per_token = found.token_bytes
    formulas = (
        ("formula: 2 x layers x KV heads x head size x bytes", 2, per_token.as_served),
        ("the same in int8", 3, per_token.in_int8),
        ("the same if query heads shared no KV heads", 4, per_token.without_grouped_heads),
    )
    lines = [
        line(name, place, [(end, end * each / MB) for end in ends], has_marks=False) for name, place, each in formulas
    ]
    taken = [(each.num_tokens, each.allocated_bytes / MB) for each in found.lengths]
    return chart(
        "What the cache takes",
        "Bytes of the blocks that the engine gave lie on the line of the formula, rounded up to whole blocks.",
        linear_axis("tokens in the cache", ends[1]),
        linear_axis("MB", ends[1] * per_token.without_grouped_heads / MB),
        [*lines, line("blocks that the engine gave", 5, taken, unit="MB", has_line=False)],
    )


def _tables(found: Found) -> tuple[tuple[str, Table], ...]:
    return (
        table(
            "The next token, by the length of the text",
            ("tokens in the text", "with cache, ms", "without, ms", "cache, bytes given", "by formula"),
            (
                (
                    f"{each.num_tokens:,}",
                    str(each.cached_ms),
                    str(each.uncached_ms),
                    f"{each.allocated_bytes:,}",
                    f"{each.formula_bytes:,}",
                )
                for each in found.lengths
            ),
        ),
        table(
            "A whole text",
            ("tokens written", "with cache, s", "without, s"),
            (
                (f"{count}", short(found.text.cached_s[count - 1]), short(found.text.uncached_s[count - 1]))
                for count in _eighths(len(found.text.cached_s))
            ),
        ),
        table(
            "Bytes a token",
            ("cache", "bytes"),
            (
                ("as served", f"{found.token_bytes.as_served:,}"),
                ("in int8, with a scale for each token and head", f"{found.token_bytes.in_int8:,}"),
                ("keys and values for every query head", f"{found.token_bytes.without_grouped_heads:,}"),
            ),
        ),
    )


def _eighths(count: int) -> list[int]:
    return sorted({max(1, count * part // 8) for part in (1, 2, 4, 6, 8)})
