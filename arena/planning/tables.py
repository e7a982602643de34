"""Plans and back-tests for people: a terminal's table, sentences, and Markdown. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from rich import box
from rich.markup import escape
from rich.table import Table

from arena.evidence.document import Entry
from arena.planning.backtest import Fold
from arena.planning.traffic import Choice, Plan

if TYPE_CHECKING:
    from native_engine.capacity import Capacity, Device


def answer(plan: Plan) -> str:
    """The plan in one sentence, claiming no more than its interval does."""
    if not plan.choices:
        return "No engine that there is evidence of can carry this."
    best = plan.choices[0]
    number = f"{best.replicas} replica{'' if best.replicas == 1 else 's'} of {best.entry.engine}"
    cost = f", {best.cost_per_hour:g} {best.currency} an hour" if best.cost_per_hour is not None else ""
    return f"{number}{cost}: {plan.limits.percentile:g} % of the requests in time, at the low end of what was raced."


def why(plan: Plan) -> list[str]:
    """The reasoning, line by line."""
    slo, bursts = plan.limits, plan.burstiness
    lines = [
        f"Load: {plan.load} ({plan.rate_rps:.3g} requests/s).",
        f"Limits: p{slo.percentile:g} TTFT {slo.ttft_ms:g} ms, p{slo.percentile:g} TPOT {slo.tpot_ms:g} ms.",
        f"Bursts: the fullest {bursts.window_s:g} s hold {bursts.peak_over_mean:g} times the mean; counts disperse "
        f"{bursts.dispersion:g} times as those of Poisson arrivals do.",
        f"Headroom: the plan is made for the same requests {plan.headroom:.0%} faster.",
    ]
    for choice in plan.choices:
        entry = choice.entry
        surely = "proven" if entry.proven else f"low end of the {entry.confidence:.0%} interval"
        lines.append(
            f"{_named(entry)}: goodput {entry.goodput_rps:g}/s, surely {entry.lowest_rps:g}/s "
            f"({surely}, {entry.run_id}); with "
            f"{choice.replicas} replicas {choice.attainment:.2%} in time without headroom."
        )
        lines += [f"  {remark}" for remark in choice.remarks]
    return lines


def table(plan: Plan) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, title_justify="left", title=escape(answer(plan)), title_style="bold")
    for heading in ("engine", "replicas", "interval", "goodput", "surely", "cost/h", "evidence"):
        shown.add_column(heading, justify="left" if heading in ("engine", "evidence") else "right", no_wrap=True)
    for choice in plan.choices:
        entry = choice.entry
        shown.add_row(
            escape(_named(entry)), str(choice.replicas), interval(choice), f"{entry.goodput_rps:g}/s",
            f"{entry.lowest_rps:g}/s", _cost(choice), escape(f"{entry.run_id}, until {entry.expires_utc.date()}"),
        )  # fmt: skip
    return shown


def refusals(plan: Plan) -> list[str]:
    return [f"Not {_named(each.entry)}: {' '.join(each.reasons)}" for each in plan.refused]


def interval(choice: Choice) -> str:
    """What the goodput's interval leaves open; the plan stands at its upper end."""
    if choice.fewest == choice.replicas:
        return str(choice.replicas)
    return f"{choice.fewest}\N{EN DASH}{choice.replicas}, likely {choice.likely}"


def backtest_markdown(rows: Sequence[tuple[str, float, Sequence[Fold]]]) -> str:
    """One line for each trace and rate."""
    lines = [
        "| trace | requests/s | plan held | replicas | worst part in time | mean rate / goodput held | replicas |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, rate, folds in rows:
        lines.append(
            f"| {name} | {rate:g} | {sum(fold.held for fold in folds)} of {len(folds)} "
            f"| {fmean(fold.replicas for fold in folds):.1f} | {min(fold.attainment for fold in folds):.1%} "
            f"| {sum(fold.rule_held for fold in folds)} of {len(folds)} "
            f"| {fmean(fold.rule_replicas for fold in folds):.1f} |"
        )
    return "\n".join(lines)


def _named(entry: Entry) -> str:
    settings = ", ".join(f"{key}={value}" for key, value in sorted(entry.settings.items()))
    return f"{entry.engine} ({settings})" if settings else entry.engine


def _cost(choice: Choice) -> str:
    return "-" if choice.cost_per_hour is None else f"{choice.cost_per_hour:g} {choice.currency}"


def capacity(found: Sequence[tuple[Device, str, Capacity]], *, model: str, context: int) -> Table:
    """What devices hold and read of a model, by the form of its cache."""
    shown = Table(
        box=box.SIMPLE_HEAD, title_justify="left", title=escape(_held(found, model, context)), title_style="bold",
        caption="texts: how many fit; a second: decoding at best, by what is read of memory for one or all of them",
        caption_justify="left",
    )  # fmt: skip
    for heading in ("device", "cache"):
        shown.add_column(heading, overflow="fold")
    for heading in ("bytes/token", "texts", "one alone", "all"):
        shown.add_column(heading, justify="right", no_wrap=True)
    last = ""
    for device, form, fits in found:
        name = f"{device.name}, {device.memory_bytes / 1e9:.0f} GB,\n{device.bytes_per_s / 1e9:,.0f} GB/s"
        if last and name != last:
            shown.add_section()
        shown.add_row(
            "" if name == last else escape(name), form, f"{fits.token_bytes:,}", f"{fits.num_sequences:,}",
            f"{fits.alone_tokens_per_s:,.0f}/s", f"{fits.tokens_per_s:,.0f}/s",
        )  # fmt: skip
        last = name
    return shown


def _held(found: Sequence[tuple[Device, str, Capacity]], model: str, context: int) -> str:
    device, _, fits = found[0]
    if not fits.num_sequences:
        return f"{model} and one text of {context:,} tokens do not fit on {device.name}"
    weights = f"{model}, {fits.weight_bytes / 1e9:.2f} GB"
    return f"{weights}: {fits.num_sequences:,} texts of {context:,} tokens fit on {device.name}"
