"""Races: who is eliminated, when, and that those who tie are not."""

from __future__ import annotations

import random

import pytest
from pagegen_autotune.racing import CONFIDENCE, losers, student
from pagegen_autotune.rounds import Rounds, interleave


def race(factors, *, noise=0.03, rounds=7, seed=0, lost=0.0, best_known=None):
    """Who is out after each round, until the last, and how many samples were taken."""
    rng, taken = random.Random(seed), Rounds()

    def sample(name):
        us = 1000.0 * factors[name] * (1 + rng.gauss(0, noise))
        return us * (50.0 if rng.random() < lost else 1.0)

    interleave(
        list(factors), sample, taken, rounds=rounds, rng=rng, more=lambda: True,
        judge=lambda samples: losers(samples, best_known=best_known),
    )  # fmt: skip
    return taken


def field(*factors):
    return {"default": 1.0, **{f"v{i}": factor for i, factor in enumerate(factors)}}


def test_what_takes_much_longer_is_out_after_two_rounds_and_what_ties_stays_to_the_end():
    slow = {f"v{i}": 1.6 + 0.1 * i for i in range(3, 12)}
    taken = race({**field(1.0, 0.995, 1.005), **slow})
    assert set(taken.out) == set(slow) and all(len(taken.samples[v]) <= 3 for v in slow)
    assert sum(len(taken.samples[v]) == 2 for v in slow) >= 6
    assert all(len(taken.samples[v]) == 7 for v in ("default", "v0", "v1", "v2"))


def test_equal_variants_are_hardly_ever_eliminated():
    wrong = sum(bool(race(field(*[1.0] * 8), seed=seed).out) for seed in range(200))
    assert wrong <= 200 * (1 - CONFIDENCE)


def test_the_best_is_hardly_ever_eliminated_even_where_threads_lose_their_cores():
    out = [race(field(0.97, 1.0, 1.1, 1.2, 1.02, 1.3), seed=seed, lost=0.03).out for seed in range(200)]
    assert sum("v0" in found for found in out) <= 200 * (1 - CONFIDENCE)
    assert sum("v5" in found for found in out) > 150


def test_a_race_costs_less_than_half_of_all_rounds_where_most_are_much_slower():
    taken = race(field(0.9, 0.95, *[1.3 + 0.05 * i for i in range(14)]))
    assert sum(map(len, taken.samples.values())) < 0.5 * 7 * 17 and "v0" not in taken.out


def test_the_default_stays_for_comparison_even_where_it_is_the_slowest():
    taken = race(field(0.5, 0.5))
    assert "default" not in taken.out and len(taken.samples["default"]) == 7


def test_a_race_of_losers_ends_with_the_last_of_them():
    taken = race(field(*[2.0] * 6))
    assert len(taken.samples["default"]) <= 4 and len(taken.out) == 6


def test_what_was_measured_before_eliminates_too():
    alone = race(field(1.0, 1.0, 1.0, 1.0), best_known=0.7)
    assert {"v0", "v1", "v2", "v3"} == set(alone.out)
    assert not race(field(1.0, 1.0, 1.0, 1.0), best_known=1.2).out


def test_the_stated_factor_is_a_lower_bound_nearly_always():
    held = checked = 0
    for seed in range(100):
        for name, factor in race(field(1.0, 1.2, 1.3, 1.5, 1.1, 1.05), seed=seed).out.items():
            checked += 1
            held += factor <= field(1.0, 1.2, 1.3, 1.5, 1.1, 1.05)[name] * 1.001
    assert checked > 200 and held / checked > CONFIDENCE


def test_a_drift_of_whole_rounds_eliminates_nobody():
    samples = {name: [1000.0 * 2**i for i in range(5)] for name in field(1.0, 1.0, 1.0)}
    assert losers(samples) == {}


def test_one_round_or_one_contender_says_nothing():
    assert losers({"a": [1.0], "b": [9.0]}) == {} == losers({"a": [1.0, 1.0]}) == losers({})


def test_too_few_times_to_know_the_noise_eliminate_nobody():
    assert losers({"default": [1.0] * 5, "v": [2.0] * 5}) == {}
    many = {f"v{i}": [2.0 + i / 100] * 2 for i in range(8)}
    assert set(losers({"default": [1.0] * 2, **many})) == set(many)


@pytest.mark.parametrize(("tail", "freedom", "exact"), [(0.025, 10, 2.228), (0.001, 4, 7.173), (0.005, 30, 2.750)])
def test_the_t_quantile_is_near_the_tables(tail, freedom, exact):
    assert student(tail, freedom) == pytest.approx(exact, rel=0.04)
