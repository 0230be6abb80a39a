"""Snapshots and the few batches that stand for them."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagegen_autotune.representatives import features, k_medoids, represent
from pagegen_autotune.simulation import Step
from pagegen_autotune.snapshots import Reservoir, Snapshot, Snapshots, draw

from pagegen.spec import Workload


def decode(*contexts):
    return Workload(context_lens=contexts)


def snapshots(decode_loads=(), mixed_loads=(), decode_steps=None, mixed_steps=None):
    return Snapshots(
        decode=tuple(Snapshot(load) for load in decode_loads),
        mixed=tuple(Snapshot(load) for load in mixed_loads),
        decode_steps=len(decode_loads) if decode_steps is None else decode_steps,
        mixed_steps=len(mixed_loads) if mixed_steps is None else mixed_steps,
    )


def points(seed, n=40):
    xy = np.random.default_rng(seed).normal(size=(n, 2))
    return np.sqrt(((xy[:, None] - xy[None]) ** 2).sum(axis=2))


def test_reservoir_keeps_everything_that_fits():
    reservoir = Reservoir(10, seed=0)
    reservoir.offer(Step((5, 7), (1, 1), 3))
    reservoir.offer(Step((9,), (4,)))
    reservoir.offer(Step((20, 30), (1, 1), 1, 16))
    loads = [decode(5, 7), decode(6, 8), decode(7, 9), Workload(context_lens=(9,), query_lens=(4,))]
    assert reservoir.items == [*map(Snapshot, loads), Snapshot(decode(20, 30), 16)]
    assert reservoir.offered == 5


@pytest.mark.parametrize("run", [1, 7, 1000])
def test_reservoir_draws_early_and_late_steps_alike_however_they_are_grouped(run):
    counts = np.zeros(10)
    for seed in range(200):
        reservoir = Reservoir(20, seed)
        for first in range(0, 1000, run):
            reservoir.offer(Step((first + 1,), (1,), min(run, 1000 - first)))
        assert len(reservoir.items) == 20 and reservoir.offered == 1000
        for load, _ in reservoir.items:
            counts[(load.context_lens[0] - 1) // 100] += 1
    # 4000 picks over 10 equal parts: 400 each, standard deviation 19
    assert np.all(np.abs(counts - 400) < 80)


def test_kinds_of_steps_are_drawn_apart_and_counted_exactly():
    steps = [Step((10, 20), (1, 1), 500), Step((30, 512), (1, 512)), Step((600,), (100,))]
    drawn = draw(steps, capacity=4, seed=0)
    assert (drawn.decode_steps, drawn.mixed_steps) == (500, 2)
    assert len(drawn.decode) == 4 and len(drawn.mixed) == 2
    assert all(one.load.is_decode for one in drawn.decode) and not any(one.load.is_decode for one in drawn.mixed)
    assert sum(weight for _, weight in drawn.weighted()) == pytest.approx(1)
    assert draw(steps, capacity=4, seed=0) == drawn != draw(steps, capacity=4, seed=1)


def test_representatives_are_real_snapshots_with_the_share_of_each_kind():
    generator = np.random.default_rng(0)
    decodes = [decode(*generator.integers(1, 4000, generator.integers(1, 64)).tolist()) for _ in range(200)]
    mixed = [Workload(context_lens=(n, 600), query_lens=(1, 512)) for n in range(1, 50)]
    chosen = represent(snapshots(decodes, mixed, decode_steps=750, mixed_steps=250), 8)
    assert len(chosen.workloads) == 8
    shares = {True: 0.0, False: 0.0}
    for load, weight in zip(chosen.workloads, chosen.weights, strict=True):
        assert load in (decodes if load.is_decode else mixed)
        shares[load.is_decode] += weight
    assert shares == pytest.approx({True: 0.75, False: 0.25})


def test_rare_kind_keeps_two_representatives():
    decodes = [decode(n) for n in range(1, 100)]
    mixed = [Workload(context_lens=(n,), query_lens=(n,)) for n in (5, 6, 500, 501)]
    chosen = represent(snapshots(decodes, mixed, decode_steps=99_990, mixed_steps=10), 12)
    rare = [load.total_q for load in chosen.workloads if not load.is_decode]
    assert len(chosen.workloads) == 12 and len(rare) == 2
    assert min(rare) < 10 and max(rare) > 400


def test_every_step_its_own_representative_covers_without_error():
    loads = [decode(10), decode(100, 7), decode(1000)]
    chosen = represent(snapshots(loads), 3)
    assert set(chosen.workloads) == set(loads) and chosen.weights == pytest.approx((1 / 3,) * 3)
    assert chosen.mean_distance == chosen.mean_context_error == 0
    assert chosen.context_bias == pytest.approx(0, abs=1e-12)


def test_coverage_error_is_the_mean_over_steps():
    # 3 of 4 steps are the representative, the fourth has twice its context: 1 doubling in the total and, at weight
    # one half each, in the 4 quantiles: sqrt(1 + 4 / 4)
    chosen = represent(snapshots([decode(100)] * 3 + [decode(200)]), 1)
    assert chosen.workloads == (decode(100),) and chosen.weights == (1.0,)
    assert chosen.mean_distance == pytest.approx(np.sqrt(2) / 4)
    assert chosen.mean_context_error == pytest.approx(0.5 / 4)
    assert chosen.context_bias == pytest.approx(100 / 125 - 1)


def test_more_representatives_cover_better():
    generator = np.random.default_rng(1)
    loads = [decode(*generator.integers(1, 9000, generator.integers(1, 40)).tolist()) for _ in range(300)]
    errors = [represent(snapshots(loads), count).mean_distance for count in (1, 4, 16, 64)]
    assert errors == sorted(errors, reverse=True) and errors[-1] < 0.5 * errors[0]


def test_equal_snapshots_make_one_representative():
    chosen = represent(snapshots([decode(5, 6)] * 50), 12)
    assert chosen.workloads == (decode(5, 6),) and chosen.weights == (1.0,)


def test_balance_of_the_batch_counts_and_not_its_order():
    even, skewed = decode(100, 100, 100, 100), decode(397, 1, 1, 1)
    assert np.linalg.norm(features([Snapshot(even)])[0] - features([Snapshot(skewed)])[0]) > 1
    assert np.array_equal(features([Snapshot(decode(1, 2, 3))]), features([Snapshot(decode(3, 1, 2))]))


def test_fewer_representatives_than_kinds_are_refused():
    with pytest.raises(ValueError, match="count must be at least 2"):
        represent(snapshots([decode(5)], [Workload(context_lens=(5,), query_lens=(5,))]), 1)


def test_medoids_are_mostly_the_best_there_are():
    # a local optimum now and then is what swaps of one point give: over 100 seeds 83 were optimal, the mean 0.5 % off
    ratios = []
    for seed in range(40):
        distances = points(seed, n=14)
        best = min(distances[:, list(some)].min(axis=1).sum() for some in itertools.combinations(range(14), 3))
        medoids = k_medoids(distances, 3)
        assert len(set(medoids.tolist())) == 3
        ratios.append(distances[:, medoids].min(axis=1).sum() / best)
    assert np.mean(np.array(ratios) < 1 + 1e-9) >= 0.75 and np.mean(ratios) < 1.01


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 12))
def test_no_single_swap_improves_the_medoids(seed, count):
    distances = points(seed, n=25)
    medoids = k_medoids(distances, count).tolist()
    cost = distances[:, medoids].min(axis=1).sum()
    for position, point in itertools.product(range(count), range(25)):
        swapped = [*medoids[:position], point, *medoids[position + 1 :]]
        assert distances[:, swapped].min(axis=1).sum() >= cost * (1 - 1e-6)


def test_medoids_are_distinct_even_among_equal_points():
    assert len(set(k_medoids(np.zeros((5, 5)), 3).tolist())) == 3


def test_steps_that_share_more_are_apart_and_those_that_share_all_they_can_are_finite():
    load = decode(1000, 1000, 1000, 1000)
    none, half, most = (features([Snapshot(load, shared)])[0] for shared in (0, 2000, 10**9))
    assert np.linalg.norm(half - none) == pytest.approx(1)  # half of the reading is saved: one doubling
    assert np.linalg.norm(most - none) == pytest.approx(2)  # the longest context at least is read


def test_the_distribution_of_query_lengths_counts_and_not_their_longest_alone():
    one_long = Workload(context_lens=(600,) * 8, query_lens=(1,) * 6 + (200, 256))
    all_long = Workload(context_lens=(600,) * 8, query_lens=(1, *(29,) * 6, 256))
    one, other = (features([Snapshot(load)])[0] for load in (one_long, all_long))
    assert one_long.max_query_len == all_long.max_query_len and np.linalg.norm(one - other) > 1


def test_representatives_tell_what_they_share_and_the_error_of_nearly_all_steps():
    kinds = [Snapshot(decode(1000, 1000), shared) for shared in (0, 0, 0, 900)]
    found = represent(Snapshots(decode=tuple(kinds), mixed=(), decode_steps=4, mixed_steps=0), 2)
    assert sorted(found.shared_tokens) == [0, 900] and found.p95_distance == 0
    found = represent(Snapshots(decode=tuple(kinds), mixed=(), decode_steps=4, mixed_steps=0), 1)
    assert found.shared_tokens == (0,) and found.p95_distance > found.mean_distance > 0
