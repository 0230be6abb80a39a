"""Objectives, and what a choice loses by them."""

from __future__ import annotations

import random

import pytest
from pagegen_autotune.evidence import Evidence
from pagegen_autotune.objective import OBJECTIVES, cvar, mean, p99
from pagegen_autotune.portfolio import decide
from pagegen_autotune.regret import regret
from test_portfolio import confirmed, decision, trials
from tuning_fakes import DECODE, DEFAULT, FASTER, LONG

from pagegen.spec import CppVariant, Workload

A, B, C = (Workload(context_lens=(n,)) for n in (1, 2, 3))
TIMES = {A: 10.0, B: 100.0, C: 1000.0}
LOADS = [(DECODE, 0.6), (LONG, 0.2)]
OTHER = CppVariant(streams=2)


def test_mean_weighs_by_share_whatever_the_shares_sum_to():
    assert mean(TIMES, [(A, 0.5), (B, 0.5)]) == mean(TIMES, [(A, 5.0), (B, 5.0)]) == 55.0


def test_p99_is_the_time_that_99_of_100_steps_do_not_exceed():
    assert p99(TIMES, [(A, 0.98), (B, 0.01), (C, 0.01)]) == 100.0
    assert p99(TIMES, [(A, 0.97), (B, 0.01), (C, 0.02)]) == 1000.0
    assert p99(TIMES, [(A, 1.0)]) == 10.0


def test_cvar_is_the_mean_of_the_slowest_twentieth_a_batch_counting_in_part():
    assert cvar(TIMES, [(A, 0.95), (C, 0.05)]) == pytest.approx(1000.0)
    assert cvar(TIMES, [(A, 0.95), (B, 0.04), (C, 0.01)]) == pytest.approx((0.01 * 1000 + 0.04 * 100) / 0.05)
    assert cvar(TIMES, [(C, 0.5), (A, 0.5)]) == pytest.approx(1000.0)


@pytest.mark.parametrize("objective", list(OBJECTIVES.values()))
def test_every_objective_scales_with_the_times_and_never_falls_when_one_rises(objective):
    loads = [(A, 0.6), (B, 0.3), (C, 0.1)]
    assert objective({w: 3 * us for w, us in TIMES.items()}, loads) == pytest.approx(3 * objective(TIMES, loads))
    for workload in TIMES:
        assert objective({**TIMES, workload: 2 * TIMES[workload]}, loads) >= objective(TIMES, loads)


def split(kind):
    """FASTER on the frequent short batch, much slower on the rare long one; every way of judging decides by itself."""
    found = []
    for load, factor in ((LOADS[0], 0.5), (LOADS[1], 1.4)):
        found += confirmed(FASTER, factor, loads=[load])
    loads = [(DECODE, 0.9), (LONG, 0.1)]
    return decide(Evidence(found, DEFAULT, OBJECTIVES[kind]), loads, "all")


def test_the_conservative_objectives_refuse_a_variant_that_makes_the_slow_steps_slower():
    assert split("mean").chosen == FASTER
    assert split("p99").chosen == split("cvar").chosen == DEFAULT


def test_a_decision_states_every_objective_of_the_default_and_of_the_choice():
    made = decision(confirmed(FASTER, 0.8))
    told = made.to_dict()["objectives_us"]
    assert set(told) == set(OBJECTIVES) and told["p99"] == {"default": 100.0, "chosen": pytest.approx(80.0)}


def noisy(factors, seed, noise=0.03):
    rng = random.Random(seed)
    found = []
    for variant, factor in factors.items():
        found += trials(variant, factor, noise=noise, seed=rng.random())
    return Evidence(found, DEFAULT)


def test_regret_of_a_tie_is_near_zero_although_the_best_of_many_noisy_times_is_not():
    equal = {CppVariant(streams=s, tile_kv=t): 1.0 for s in (1, 2, 8, 16) for t in (32, 128, 256)}
    found = [regret(noisy(equal, seed), LOADS, dict.fromkeys((DECODE, LONG), DEFAULT)) for seed in range(30)]
    assert sum(r.expected for r in found) / 30 < 0.01
    assert all(r.at_most >= r.expected >= 0 for r in found)


def test_regret_by_workload_and_of_the_profile_are_what_the_choice_loses():
    evidence = Evidence(trials(FASTER, 0.5, loads=LOADS[:1]) + trials(FASTER, 1.2, loads=LOADS[1:]), DEFAULT)
    lost = regret(evidence, LOADS, dict.fromkeys((DECODE, LONG), DEFAULT))
    assert lost.by_workload[DECODE] == pytest.approx(1.0) and lost.by_workload[LONG] == 0.0
    assert lost.expected == lost.at_most == pytest.approx((0.6 + 0.2) / (0.3 + 0.2) - 1)


def test_the_stated_bound_holds_as_often_as_it_says():
    held = 0
    for seed in range(60):
        evidence = noisy({FASTER: 0.8, OTHER: 1.0}, seed)
        held += regret(evidence, LOADS, dict.fromkeys((DECODE, LONG), DEFAULT)).at_most + 0.005 >= 1 / 0.8 - 1
    assert held >= 0.9 * 60
