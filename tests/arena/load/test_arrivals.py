"""Arrivals are what they claim to be: tested against the theory of their process, over many seeds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from arena.load.arrivals import SECOND_NS, Offsets, Span, constant, draw, gamma, intensity_of, poisson, seed_sequence
from arena.load.spec import Arrivals, Constant, Gamma, Poisson, Ramp, Steps

SEEDS = 50
SECONDS = 60
RATE = 40.0


def schedules(rate_rps: float = RATE) -> list[Offsets]:
    return [
        poisson(rate_rps=rate_rps, horizon_ns=SECONDS * SECOND_NS, seed=seed_sequence(run=run, cell=0, replicate=0))
        for run in range(SEEDS)
    ]


def counts_per_second(offsets: Offsets) -> np.ndarray:
    return np.bincount(offsets // SECOND_NS, minlength=SECONDS)


@pytest.mark.replay("R37", "R38", "R39")
def test_counts_per_second_are_dispersed_as_a_poisson_process_in_49_of_50_seeds() -> None:
    """Shared seeds, rescaling and bucket-wise normalising all show here (dispersion 3.6 or 0.01 instead of 1)."""
    low, high = stats.chi2.ppf([0.005, 0.995], SECONDS - 1)
    inside = 0
    for offsets in schedules():
        counts = counts_per_second(offsets)
        inside += low <= (SECONDS - 1) * counts.var(ddof=1) / counts.mean() <= high
    assert inside >= 49


@pytest.mark.replay("R37", "R38")
def test_gaps_are_exponential_and_independent_of_each_other() -> None:
    gaps = [np.diff(offsets) / SECOND_NS for offsets in schedules()]
    assert stats.kstest(np.concatenate(gaps), "expon", args=(0, 1 / RATE)).pvalue > 0.001
    lag_one = [np.corrcoef(series[:-1], series[1:])[0, 1] for series in gaps]
    num_gaps = np.mean([len(series) for series in gaps])
    assert abs(np.mean(lag_one)) < 3 / np.sqrt(SEEDS * num_gaps)


@pytest.mark.replay("R04", "R37")
def test_the_number_of_arrivals_is_random_and_right_on_average() -> None:
    """Rescaling to n / rate would make every count equal; adding up relative sleeps would make them too few."""
    counts = [len(offsets) for offsets in schedules()]
    expected = RATE * SECONDS
    assert len(set(counts)) > SEEDS / 2
    assert abs(np.mean(counts) - expected) < 4 * np.sqrt(expected / SEEDS)


@pytest.mark.replay("R37", "R38")
def test_several_schedules_merged_are_still_poisson() -> None:
    """Eight processes with one seed would arrive in lock-step: dispersion 8."""
    merged = np.zeros(SECONDS)
    for cell in range(8):
        seed = seed_sequence(run=3, cell=cell, replicate=0)
        merged += counts_per_second(poisson(rate_rps=5, horizon_ns=SECONDS * SECOND_NS, seed=seed))
    low, high = stats.chi2.ppf([0.001, 0.999], SECONDS - 1)
    assert low <= (SECONDS - 1) * merged.var(ddof=1) / merged.mean() <= high


@pytest.mark.replay("R39")
def test_arrivals_show_no_preference_for_whole_seconds() -> None:
    fractions = np.concatenate(schedules()) % SECOND_NS / SECOND_NS
    assert stats.kstest(fractions, "uniform").pvalue > 0.001


@given(
    rate=st.floats(0.05, 2000),
    short_ns=st.integers(1, 20 * SECOND_NS),
    more_ns=st.integers(0, 20 * SECOND_NS),
    run=st.integers(0, 2**32),
)
def test_a_longer_horizon_only_appends(rate: float, short_ns: int, more_ns: int, run: int) -> None:
    seed = seed_sequence(run=run, cell=1, replicate=2)
    short = poisson(rate_rps=rate, horizon_ns=short_ns, seed=seed)
    long = poisson(rate_rps=rate, horizon_ns=short_ns + more_ns, seed=seed_sequence(run=run, cell=1, replicate=2))
    assert np.array_equal(short, long[long < short_ns])
    assert np.all(np.diff(long) >= 0)


@pytest.mark.replay("R39")
def test_one_seed_gives_one_schedule_and_every_other_seed_another() -> None:
    def draw(run: int, cell: int, replicate: int) -> tuple[int, ...]:
        seed = seed_sequence(run=run, cell=cell, replicate=replicate)
        return tuple(poisson(rate_rps=10, horizon_ns=SECOND_NS, seed=seed))

    assert draw(1, 2, 3) == draw(1, 2, 3)
    assert len({draw(1, 2, 3), draw(2, 2, 3), draw(1, 3, 3), draw(1, 2, 4), draw(2, 1, 3)}) == 5


@given(rate=st.floats(0.05, 2000), horizon_ns=st.integers(1, 100 * SECOND_NS))
@pytest.mark.replay("R39")
def test_constant_arrivals_never_drift(rate: float, horizon_ns: int) -> None:
    offsets = constant(rate_rps=rate, horizon_ns=horizon_ns)
    assert offsets[0] == 0
    assert offsets[-1] < horizon_ns <= offsets[-1] + SECOND_NS / rate + 1
    assert np.all(np.abs(offsets - np.arange(len(offsets)) * (SECOND_NS / rate)) <= 1)


@pytest.mark.parametrize(("rate", "horizon_ns"), [(0, 1), (-1, 1), (float("nan"), 1), (1, 0)])
def test_impossible_schedules_are_refused(rate: float, horizon_ns: int) -> None:
    with pytest.raises(ValueError, match=r"must be above 0"):
        draw(Poisson(), rate_rps=rate, span=Span(0, horizon_ns, 0), seed=seed_sequence(run=0, cell=0, replicate=0))


MINUTE = Span(0, SECONDS * SECOND_NS, 0)
SPAN = Span(5 * SECOND_NS, 20 * SECOND_NS, 5 * SECOND_NS)
KINDS: dict[str, Arrivals] = {
    "poisson": Poisson(),
    "smooth": Gamma(cv=0.4),
    "bursts": Gamma(cv=3.0),
    "constant": Constant(),
    "ramp": Ramp(from_=1, to=3),
    "from nothing": Ramp(from_=0, to=1),
    "steps": Steps(levels=(1, 4, 0, 2), lengths=(2, 1, 1, 4)),
}


def drawn(spec: Arrivals, run: int, *, rate: float = RATE, span: Span = MINUTE) -> Offsets:
    return draw(spec, rate_rps=rate, span=span, seed=seed_sequence(run=run, cell=0, replicate=0))[1]


@pytest.mark.replay("R39")
@pytest.mark.parametrize("kind", KINDS)
def test_one_seed_gives_one_schedule_of_every_kind_and_another_seed_another(kind: str) -> None:
    first, again, other = (drawn(KINDS[kind], run, span=SPAN) for run in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert np.all(np.diff(first) >= 0)
    assert first[0] >= 0
    assert first[-1] < SPAN.total_ns


@pytest.mark.parametrize("kind", KINDS)
def test_the_rate_is_the_mean_over_the_measured_window(kind: str) -> None:
    """Over many seeds; whatever the shape is, a search that varies the rate varies this."""
    counts = []
    for run in range(SEEDS * 4):
        offsets = drawn(KINDS[kind], run, span=SPAN)
        counts.append(np.count_nonzero((offsets >= SPAN.before_ns) & (offsets < SPAN.before_ns + SPAN.window_ns)))
    expected = RATE * SPAN.window_ns / SECOND_NS
    error = np.std(counts) / np.sqrt(len(counts))
    assert abs(np.mean(counts) - expected) < 4 * error + 1


@pytest.mark.parametrize("cv", [0.2, 0.5, 1.0, 2.0, 4.0])
def test_gamma_gaps_vary_as_much_as_stated(cv: float) -> None:
    gaps = np.concatenate([np.diff(drawn(Gamma(cv=cv), run)) for run in range(SEEDS)]) / SECOND_NS
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(cv, rel=0.1)
    if cv <= 1:  # below that, gaps of less than a nanosecond become 0
        assert stats.kstest(gaps, "gamma", args=(cv**-2, 0, cv**2 / RATE)).pvalue > 0.001


def test_gamma_arrivals_come_at_the_stated_rate_from_the_first_second_on() -> None:
    """Starting with a whole gap, smooth arrivals would be late in their first second and bursty ones would crowd it."""
    for cv in (0.3, 2.5):
        counts = [np.count_nonzero(drawn(Gamma(cv=cv), run, rate=2.0) < SECOND_NS // 2) for run in range(4000)]
        assert np.mean(counts) == pytest.approx(1.0, abs=4 * np.std(counts) / np.sqrt(len(counts)))


def test_gamma_of_variation_one_is_poisson() -> None:
    low, high = stats.chi2.ppf([0.005, 0.995], SECONDS - 1)
    inside = 0
    for run in range(SEEDS):
        counts = counts_per_second(drawn(Gamma(cv=1.0), run))
        inside += low <= (SECONDS - 1) * counts.var(ddof=1) / counts.mean() <= high
    assert inside >= 49


@pytest.mark.replay("R39")
def test_constant_arrivals_do_not_vary_and_prefer_no_part_of_a_second() -> None:
    """A "constant" schedule with exponential gaps has a variation of 1; one that is pinned to the clock fires on each
    full second.
    """
    schedules = [drawn(Constant(), run, rate=7.3) for run in range(SEEDS)]
    for offsets in schedules:
        gaps = np.diff(offsets)
        assert np.std(gaps) / np.mean(gaps) < 1e-6
    fractions = np.concatenate(schedules) % SECOND_NS / SECOND_NS
    assert stats.kstest(fractions, "uniform").pvalue > 0.001
    phases = [drawn(Constant(), run, rate=1.0)[0] / SECOND_NS for run in range(400)]
    assert stats.kstest(phases, "uniform").pvalue > 0.001


@pytest.mark.parametrize("kind", ["ramp", "from nothing", "steps"])
def test_a_changing_rate_is_poisson_in_its_own_time(kind: str) -> None:
    """Time-rescaling: where the cumulated rate is the clock, gaps are exponential and of mean 1."""
    spec = KINDS[kind]
    assert isinstance(spec, (Ramp, Steps))
    rate = intensity_of(spec, rate_rps=RATE, span=SPAN)
    gaps = [np.diff(rate.cumulated(drawn(spec, run, span=SPAN) / SECOND_NS)) for run in range(SEEDS)]
    assert stats.kstest(np.concatenate(gaps), "expon").pvalue > 0.001


def test_a_ramp_climbs_in_the_window_and_is_level_around_it() -> None:
    counts = sum(
        np.bincount(drawn(Ramp(from_=1, to=3), run, span=SPAN) // SECOND_NS, minlength=30) for run in range(200)
    )
    per_second = counts / 200
    assert per_second[:5].mean() == pytest.approx(RATE / 2, rel=0.05)
    assert per_second[5:25].mean() == pytest.approx(RATE, rel=0.03)
    assert per_second[25:].mean() == pytest.approx(RATE * 1.5, rel=0.05)
    assert np.polyfit(np.arange(20), per_second[5:25], 1)[0] == pytest.approx(RATE / 20, rel=0.1)


def test_steps_have_their_levels_and_lengths() -> None:
    spec = Steps(levels=(1, 4, 0, 2), lengths=(2, 1, 1, 4))  # of 20 s: 5, 2.5, 2.5 and 10
    counts = sum(np.bincount(drawn(spec, run, span=SPAN) * 2 // SECOND_NS, minlength=60) for run in range(200))
    half_seconds = counts / 200
    unit = RATE * 8 / (2 * 1 + 4 + 0 + 4 * 2) / 2
    for first, last, level in ((0, 20, 1), (20, 25, 4), (25, 30, 0), (30, 60, 2)):
        assert half_seconds[first:last].mean() == pytest.approx(unit * level, rel=0.06)


@given(
    rate=st.floats(0.05, 500),
    seconds=st.integers(1, 30),
    more_ns=st.integers(1, 30 * SECOND_NS),
    run=st.integers(0, 2**32),
    kind=st.sampled_from(sorted(KINDS)),
)
@settings(max_examples=60)
def test_a_longer_cool_down_only_appends(rate: float, seconds: int, more_ns: int, run: int, kind: str) -> None:
    """Whatever is scheduled within the window does not depend on how long load is kept up after it."""
    short, long = Span(SECOND_NS, seconds * SECOND_NS, 0), Span(SECOND_NS, seconds * SECOND_NS, more_ns)
    few, many = (drawn(KINDS[kind], run, rate=rate, span=span) for span in (short, long))
    head = many[many < short.total_ns]
    assert len(few) == len(head)
    assert np.all(np.abs(few - head) <= 1)


@given(
    pieces=st.lists(st.tuples(st.floats(0.1, 20), st.just(0.0) | st.floats(0.01, 9)), min_size=1, max_size=5).filter(
        lambda pairs: any(level for _, level in pairs)
    ),
    at=st.floats(0, 1),
)
def test_the_inverse_of_the_cumulated_rate_leads_back(pieces: list[tuple[float, float]], at: float) -> None:
    lengths, levels = zip(*pieces, strict=True)
    rate = intensity_of(Steps(levels=levels, lengths=lengths), rate_rps=3.0, span=SPAN)
    mass = at * rate.expected * 0.999
    there = rate.inverse(np.array([mass]))
    assert rate.cumulated(there)[0] == pytest.approx(mass, rel=1e-9, abs=1e-9)


@given(cv=st.floats(0.05, 20), rate=st.floats(0.05, 2000), horizon_ns=st.integers(1, 20 * SECOND_NS))
@settings(max_examples=60)
def test_gamma_arrivals_stay_within_the_horizon_however_bursty(cv: float, rate: float, horizon_ns: int) -> None:
    offsets = gamma(cv=cv, rate_rps=rate, horizon_ns=horizon_ns, seed=seed_sequence(run=1, cell=1, replicate=1))
    assert np.all(np.diff(offsets) >= 0)
    assert offsets.size == 0 or (offsets[0] >= 0 and offsets[-1] < horizon_ns)
