"""The words of a report, for somebody who meets them for the first time. Data."""

from __future__ import annotations

from arena.reports.document import Cell, Facts, Paragraph, Section

WORDS: tuple[tuple[str, str], ...] = (
    ("token", "The piece that a language model reads and writes; in English about three quarters of a word."),
    ("TTFT", "Time to first token: from the moment a request was due until the first piece of its answer."),
    ("TPOT", "Time per output token after the first: how fast the answer is written. 50 ms is 20 tokens a second."),
    ("ITL", "Inter-token latency: the pauses between the pieces of one answer, one by one. A long one is a stutter."),
    ("SLO", "Service-level objective: the limits on TTFT and TPOT that a request has to keep to be good."),
    ("p50, p99", "Percentiles: half, or 99 of 100 requests, were at least that fast."),
    ("goodput", "The highest rate of requests at which the limits hold for as many of the requests as was asked."),
    ("attainment", "The share of all scheduled requests that met both limits. Failed ones are in the denominator."),
    ("interval", "Where the true value lies, at the stated confidence. A single figure without it says too much."),
    ("proven, observed", "Proven: enough requests met the limits to rule luck out. Observed: too few for that."),
    ("rank 1\N{EN DASH}2", "A tie: the measurements cannot say which of the two is better."),
    ("open loop", "Requests are sent when they are due, whether or not earlier ones were answered, as people do."),
    ("Poisson", "Arrivals by chance at a steady mean rate, as of many people who know nothing of each other."),
    ("cell", "One engine at one rate: a warm-up, the measured window, then load until the last measured answer."),
    ("plan", "Arrivals and prompts of a cell, drawn before it runs. All engines get the same ones."),
    ("backlog", "Requests that pile up because more come than are served. A rate with a growing one fails."),
    ("n eff.", "Requests that wait in one queue are late together; so many independent ones would tell as much."),
    ("audit", "A check of the measurement itself. A cell that fails one is not believed."),
    ("lag", "How late the load generator was in sending. It is measured for each request and belongs to no engine."),
)  # fmt: skip


def glossary_section() -> Section:
    rows: tuple[tuple[str, Cell], ...] = WORDS
    method = (
        "The interval is a fit of the miss rate over all cells of an engine, weighted by the effective number of "
        "requests; ranks follow from pairwise probabilities of these fits, corrected for the number of pairs. "
        "Everything here is computed from the raw rows in arena.duckdb."
    )
    return Section("words", "Words", (Facts(rows), Paragraph(method, "soft")))
