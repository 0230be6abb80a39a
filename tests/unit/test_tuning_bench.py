"""The replay behind bench/tuning.py: what it shows the search, what it judges by, and that the target is met."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))

from pagegen_autotune.search import exhaustive, guided  # noqa: E402
from tuning_bench.replay import Recording, ReplayBench, replay  # noqa: E402

RECORDED = BENCH / "tuning_bench" / "recorded"


@pytest.fixture(scope="module")
def recording():
    return Recording.load(RECORDED / "llama-3.1-8b-int8.json")


def test_at_least_five_kernels_are_recorded_with_hundreds_of_cells_each():
    files = sorted(RECORDED.glob("*.json"))
    assert len(files) >= 5 and sum(file.stat().st_size for file in files) < 2 << 20
    for file in files:
        found = Recording.load(file)
        assert len(found.ratios) >= 500 and found.default == found.variants[0]
        assert all(len(ratios) >= 20 and min(ratios) > 0 for ratios in found.ratios.values())


def test_the_search_sees_one_half_of_the_rounds_and_is_judged_on_the_other_drawn_anew_for_each_seed(recording):
    load = recording.profile.workloads[0]
    halves = []
    for seed in (1, 2):
        bench, (searched, judged) = ReplayBench(recording, seed), recording.halves(seed)
        shown = {bench.sample(recording.layout, recording.default, load) for _ in range(40)}
        assert shown == {recording.default_us[load][i] for i in searched[load]}
        assert sorted([*searched[load], *judged[load]]) == list(range(len(recording.default_us[load])))
        assert len(searched[load]) == len(judged[load])
        halves.append(set(searched[load]))
    assert halves[0] != halves[1]


def test_contenders_of_one_round_are_shown_the_same_recorded_round(recording):
    bench, load = ReplayBench(recording, 2), recording.profile.workloads[1]
    for _ in range(12):
        base = bench.sample(recording.layout, recording.default, load)
        number = recording.default_us[load].index(base)
        for variant in recording.variants[1:4]:
            expected = base * recording.ratios[variant, load][number]
            assert bench.sample(recording.layout, variant, load) == expected


def test_a_seed_repeats_a_run_and_another_one_differs(recording):
    assert replay(recording, guided, 3) == replay(recording, guided, 3) != replay(recording, guided, 4)


@pytest.mark.parametrize("case", ["llama-3.1-8b-int8", "qwen2.5-0.5b", "head-dim-256"])
def test_a_tenth_of_the_trials_finds_what_an_exhaustive_search_would_choose_within_three_percent(case):
    found = [replay(Recording.load(RECORDED / f"{case}.json"), guided, seed, budget=0.1) for seed in (0, 1, 2)]
    assert sorted(o.against_search for o in found)[1] <= 0.03
    assert sorted(max(o.cells, o.samples) for o in found)[1] <= 0.10
    assert all(o.speedup > 0.98 for o in found)


def test_an_exhaustive_search_by_the_same_code_measures_everything_and_is_no_better(recording):
    whole = replay(recording, exhaustive, 0, reach=float("inf"))
    assert whole.cells == 1.0 and whole.samples > 0.25
    assert replay(recording, guided, 0, budget=0.1).regret <= whole.regret + 0.03
