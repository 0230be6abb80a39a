"""From trials to a decision: who wins, who does not, and what is said about it."""

from __future__ import annotations

import math
import random

import pytest
from pagegen_autotune.evidence import Evidence
from pagegen_autotune.objective import mean
from pagegen_autotune.partition import divisions
from pagegen_autotune.portfolio import best, common_loads, decide, dispatch_rule, leaders
from pagegen_autotune.regret import regret
from pagegen_autotune.tree import leaves
from tuning_fakes import DECODE, DEFAULT, DEVICE, FASTER, LONG, MIXED, SPEC

from pagegen.spec import CacheLayout, CppVariant, Measurement, Status, Workload
from pagegen.spec.result import COMPARE, CONFIRM, PURPOSE, SESSION

LOADS = [(DECODE, 0.6), (LONG, 0.2)]
OTHER = CppVariant(streams=2)
DEFAULTS = {"decode": DEFAULT, "mixed": DEFAULT}


def trial(variant, samples=(), workload=DECODE, session="a", purpose="search", status=Status.OK):
    return Measurement(
        spec=SPEC, layout=CacheLayout(block_size=16), target=DEVICE.target, device=DEVICE, variant=variant,
        workload=workload, status=status, samples_us=tuple(samples),
        environment={SESSION: session, PURPOSE: purpose},
    )  # fmt: skip


def trials(variant, factor, *, loads=LOADS, purpose="search", session="a", rounds=7, noise=0.0, seed=0):
    """The variant beside the default on each load, at `factor` of the default's time."""
    rng = random.Random(seed)
    found = []
    for workload, _ in loads:
        base = [100.0 * (1 + noise * rng.uniform(-1, 1)) for _ in range(rounds)]
        mine = [100.0 * factor * (1 + noise * rng.uniform(-1, 1)) for _ in range(rounds)]
        name = f"{session}-{purpose}-{variant.name}"
        found.append(trial(DEFAULT, base, workload, name, purpose))
        found.append(trial(variant, mine, workload, name, purpose))
    return found


def decision(found, loads=LOADS):
    return decide(Evidence(found, DEFAULT), loads, "decode")


def confirmed(variant, factor, **options):
    return trials(variant, factor, **options) + trials(variant, factor, purpose=CONFIRM, rounds=9, **options)


def test_a_confirmed_gain_replaces_the_default():
    made = decision(confirmed(FASTER, 0.9))
    assert made.chosen == FASTER
    assert made.speedup == pytest.approx(1 / 0.9)
    assert "won 9 of 9 fresh rounds" in made.confidence


def test_a_tie_keeps_the_default():
    made = decision(confirmed(FASTER, 1.0, noise=0.05))
    assert made.chosen == DEFAULT and made.speedup == 1.0
    assert "the default stays" in made.confidence


def test_a_gain_below_the_margin_keeps_the_default():
    assert decision(confirmed(FASTER, 0.99)).chosen == DEFAULT


def test_fresh_samples_that_do_not_confirm_overrule_the_search():
    found = trials(FASTER, 0.8) + trials(FASTER, 1.0, purpose=CONFIRM, rounds=9)
    assert decision(found).chosen == DEFAULT


def test_no_gain_is_believed_without_fresh_samples():
    made = decision(trials(FASTER, 0.7))
    assert made.chosen == DEFAULT
    assert "takes 0.700 of its time (won 7 of 7 rounds" in made.confidence


def test_two_lucky_rounds_are_not_enough():
    assert decision(trials(FASTER, 0.5) + trials(FASTER, 0.5, purpose=CONFIRM, rounds=2)).chosen == DEFAULT


def test_samples_of_different_minutes_are_not_compared():
    slow_minute = [trial(DEFAULT, [200.0] * 7, w, session="slow") for w, _ in LOADS]
    fast_minute = [trial(FASTER, [100.0] * 7, w, session="fast") for w, _ in LOADS]
    made = decision(slow_minute + fast_minute)
    assert made.chosen == DEFAULT and made.compared == 0


def test_a_drift_between_sessions_changes_no_ratio():
    early = confirmed(FASTER, 0.9)
    late = [trial(DEFAULT, [300.0] * 7, w, "late") for w, _ in LOADS] + [
        trial(OTHER, [330.0] * 7, w, "late") for w, _ in LOADS
    ]
    made = decision(early + late)
    assert made.chosen == FASTER and made.speedup == pytest.approx(1 / 0.9)


@pytest.mark.parametrize("status", [s for s in Status if s is not Status.OK])
def test_a_variant_with_any_failed_trial_never_wins(status):
    assert decision([*confirmed(FASTER, 0.5), trial(FASTER, status=status, workload=MIXED)]).chosen == DEFAULT


def test_a_variant_measured_on_part_of_the_workloads_does_not_beat_one_measured_on_all():
    found = confirmed(OTHER, 0.9) + trials(FASTER, 0.5, loads=LOADS[:1])
    assert decision(found).chosen == OTHER


def test_fresh_samples_on_part_of_the_workloads_do_not_replace_the_default():
    found = trials(FASTER, 0.5) + trials(FASTER, 0.5, loads=LOADS[:1], purpose=CONFIRM)
    assert decision(found).chosen == DEFAULT


def test_where_nobody_was_measured_on_all_workloads_the_common_ones_name_the_leader():
    found = [trial(DEFAULT, [100.0], w, "baseline", "baseline") for w, _ in LOADS]
    found += trials(FASTER, 0.8, loads=LOADS[:1]) + trials(OTHER, 0.9, loads=LOADS[:1])
    found += trials(CppVariant(streams=1), 0.5, loads=[(MIXED, 1.0)])  # of the layout's other class of batches
    assert leaders(Evidence(found, DEFAULT), LOADS) == [FASTER]
    assert "on 1 of 2 workloads" in decision(found).confidence


def test_scores_compare_variants_that_were_measured_on_other_batches():
    found = trials(FASTER, 0.7, loads=LOADS[:1]) + trials(FASTER, 0.98, loads=LOADS[1:])
    found += trials(OTHER, 0.71, loads=LOADS[:1], session="alone")  # there everyone gains: it is no better than FASTER
    scores = Evidence(found, DEFAULT).scores(LOADS)
    assert scores[FASTER] < scores[OTHER] < 1
    assert scores[OTHER] / scores[FASTER] == pytest.approx(0.71 / 0.7)
    assert Evidence(found, DEFAULT).scores(LOADS, among=[OTHER])[OTHER] == pytest.approx(0.71)


def test_no_decision_before_the_default_was_measured_on_every_workload():
    assert decision(confirmed(FASTER, 0.8, loads=LOADS[:1])) is None
    assert common_loads(Evidence([], DEFAULT), LOADS) == []


def test_the_sum_over_the_class_decides_not_the_number_of_workloads_won():
    heavy = trials(FASTER, 1.3, loads=LOADS[:1]) + trials(FASTER, 0.7, loads=LOADS[1:])
    fresh = trials(FASTER, 1.3, loads=LOADS[:1], purpose=CONFIRM) + trials(
        FASTER, 0.7, loads=LOADS[1:], purpose=CONFIRM
    )
    assert decision(heavy + fresh).chosen == DEFAULT  # 0.6 * 1.3 + 0.2 * 0.7 > 0.8


def test_samples_that_lost_their_core_do_not_outweigh_the_round(loads=((DECODE, 0.1), (LONG, 0.1), (MIXED, 0.8))):
    found = [t for w, weight in loads for t in confirmed(FASTER, 0.9, loads=[(w, weight)], session=str(w.num_seqs))]
    kept = []
    for t in found:
        hit = t.variant == FASTER and t.environment[PURPOSE] == CONFIRM and t.workload != MIXED
        lost = (
            [5000.0, *t.samples_us[1:4], 5000.0, *t.samples_us[5:]]
            if t.workload == DECODE
            else [*t.samples_us[:6], *[5000.0] * 3]
        )
        kept.append(trial(FASTER, lost, t.workload, t.environment[SESSION], CONFIRM) if hit else t)
    made = decision(kept, loads)
    assert made.chosen == FASTER and made.speedup == pytest.approx(1 / 0.9)


def test_regret_is_the_excess_over_the_best_of_each_workload():
    split = confirmed(FASTER, 0.5, loads=LOADS[:1]) + confirmed(FASTER, 1.0, loads=LOADS[1:])
    split += trials(OTHER, 1.0, loads=LOADS[:1]) + trials(OTHER, 0.8, loads=LOADS[1:])
    made = decision(split)
    assert made.chosen == FASTER
    assert made.regret == pytest.approx((0.6 * 50 + 0.2 * 100) / (0.6 * 50 + 0.2 * 80) - 1)


def test_ties_among_winners_go_to_fewer_resources_then_to_the_name():
    lean, rich = CppVariant(prefetch_ahead=0), CppVariant(prefetch_ahead=2)
    found = confirmed(rich, 0.800) + confirmed(lean, 0.805)
    assert decision(found).chosen == lean
    assert decision(list(reversed(found))).chosen == lean


def test_what_looks_better_than_the_proven_winner_is_confirmed_next():
    evidence = Evidence(confirmed(OTHER, 0.85) + trials(FASTER, 0.8), DEFAULT)
    assert best(evidence, LOADS).variant == OTHER
    assert leaders(evidence, LOADS) == [FASTER]


def test_what_the_search_cannot_tell_from_the_leader_is_confirmed_beside_it_and_others_are_not():
    near, far, slow = CppVariant(streams=2), CppVariant(tile_kv=32), CppVariant(tile_kv=256)
    found = trials(FASTER, 0.8) + trials(near, 0.82) + trials(far, 0.84) + trials(slow, 1.1)
    assert leaders(Evidence(found, DEFAULT), LOADS) == [FASTER, near]
    many = [CppVariant(split_tokens=512 * k) for k in range(2, 8)]
    alike = [t for v in many for t in trials(v, 0.82)]
    assert len(leaders(Evidence(found + alike, DEFAULT), LOADS)) == 3  # each further one is another chance for luck
    one = confirmed(OTHER, 0.83)
    assert len(leaders(Evidence(found + alike + one, DEFAULT), LOADS)) == 2


def test_there_is_no_leader_to_confirm_once_the_best_is_proven():
    evidence = Evidence(confirmed(OTHER, 0.8) + trials(FASTER, 0.9), DEFAULT)
    assert leaders(evidence, LOADS) == []


def test_a_confirmation_cut_short_does_not_count_as_one():
    evidence = Evidence(trials(FASTER, 0.9) + trials(FASTER, 0.9, purpose=CONFIRM, rounds=2), DEFAULT)
    assert leaders(evidence, LOADS) == [FASTER]


def test_a_round_interrupted_half_way_is_dropped():
    found = [trial(DEFAULT, [100.0] * 5), trial(FASTER, [50.0] * 6)]
    assert len(Evidence(found, DEFAULT).pairs(FASTER, DECODE, fresh=False)) == 5


def test_the_rule_serves_decode_and_mixed_batches_by_their_own_winners():
    decode = decide(Evidence(confirmed(FASTER, 0.8), DEFAULT), LOADS, "decode")
    mixed_loads = [(MIXED, 0.2)]
    mixed = decide(Evidence(confirmed(OTHER, 0.8, loads=mixed_loads), DEFAULT), mixed_loads, "mixed")
    rule = dispatch_rule([decode, mixed], DEFAULTS, kind="measured", source="tuned", evidence={"profile": "p"})
    assert rule.choose(64, 1, 9000) == FASTER
    assert rule.choose(64, 2, 9000) == OTHER
    assert rule.evidence["kind"] == "measured" and rule.evidence["decode"]["chosen"] == FASTER.name
    assert "1.25 times as fast" in rule.reason


def test_a_class_the_profile_does_not_hold_keeps_its_default():
    decode = decide(Evidence(confirmed(FASTER, 0.8), DEFAULT), LOADS, "decode")
    rule = dispatch_rule([decode], {"decode": DEFAULT, "mixed": OTHER}, kind="measured", source="tuned", evidence={})
    assert rule.choose(1, 1, 10) == FASTER and rule.choose(1, 5, 10) == OTHER
    assert "mixed not in the profile" in rule.reason


def test_one_variant_for_both_classes_makes_one_clause():
    decode = decide(Evidence(confirmed(FASTER, 0.8), DEFAULT), LOADS, "decode")
    rule = dispatch_rule([decode], {"decode": DEFAULT, "mixed": FASTER}, kind="measured", source="tuned", evidence={})
    assert len(rule.clauses) == 1


def test_one_class_for_all_batches_makes_one_clause_whatever_their_queries():
    made = decide(Evidence(confirmed(FASTER, 0.8), DEFAULT), LOADS, "all")
    rule = dispatch_rule([made], {"all": DEFAULT}, kind="measured", source="tuned", evidence={})
    assert rule.choose(1, 1, 10) == rule.choose(4, 100, 10) == FASTER and len(rule.clauses) == 1


def test_a_layouts_times_are_those_of_the_rounds_over_all_layouts_and_they_change_no_decision():
    found = confirmed(FASTER, 0.8)
    before = decision(found)
    for workload, _ in LOADS:  # in another minute, twice as slow, and the winner happens to look slower
        found += [
            trial(DEFAULT, [200.0] * 7, workload, "late", COMPARE),
            trial(FASTER, [220.0] * 7, workload, "late", COMPARE),
        ]
    after = decision(found)
    assert (after.chosen, after.speedup, after.confidence) == (before.chosen, before.speedup, before.confidence)
    assert (before.default_us, after.default_us) == pytest.approx((100.0, 200.0))


SMALL = Workload(context_lens=(500,) * 2)
BIG = Workload(context_lens=(500,) * 40)
BOTH = [(SMALL, 0.5), (BIG, 0.5)]


def beside(chosen, variant, factors, *, session, rounds=9):
    """Fresh rounds of the default, the chosen variant and another, at these factors of the default's time."""
    found = []
    for workload, (own, other) in factors.items():
        name = f"{session}-{workload.num_seqs}"
        found.append(trial(DEFAULT, [100.0] * rounds, workload, name, CONFIRM))
        found.append(trial(variant, [100.0 * other] * rounds, workload, name, CONFIRM))
        if chosen != DEFAULT:
            found.append(trial(chosen, [100.0 * own] * rounds, workload, name, CONFIRM))
    return found


def divided(small=0.6, big=1.2):
    """FASTER is proven on all, OTHER better on the small batch alone by the search's samples."""
    found = trials(FASTER, 0.8, loads=BOTH) + trials(FASTER, 0.8, loads=BOTH, purpose=CONFIRM, rounds=9)
    return found + trials(OTHER, small, loads=BOTH[:1]) + trials(OTHER, big, loads=BOTH[1:])


def test_a_variant_that_would_serve_a_part_better_is_confirmed_there_beside_the_chosen_one():
    assert divisions(Evidence(divided(), DEFAULT), BOTH, FASTER) == [(OTHER, [(SMALL, 0.5)])]


def test_a_proven_part_gets_its_own_variant_and_the_regret_falls_under_the_bound():
    found = divided()
    alone = decision(found, BOTH)
    assert alone.variants == (FASTER,) and alone.regret == pytest.approx(1.6 / 1.4 - 1)
    made = decision(found + beside(FASTER, OTHER, {SMALL: (0.8, 0.6)}, session="part"), BOTH)
    assert {leaf.variant: leaf.part for leaf in leaves(made.tree)} == {OTHER: (SMALL,), FASTER: (BIG,)}
    assert made.chosen_us == pytest.approx(70.0) and made.regret == pytest.approx(0.0, abs=1e-6)
    rule = dispatch_rule([made], DEFAULTS, kind="measured", source="tuned", evidence={})
    assert rule.choose(2, 1, 500) == OTHER and rule.choose(40, 1, 500) == FASTER and rule.choose(2, 5, 9) == DEFAULT
    assert "on 1 of 2 batches" in made.confidence and len(made.to_dict()["workloads"]) == 2


def test_fresh_samples_that_speak_against_a_part_leave_it_to_the_chosen_variant_and_are_not_asked_for_again():
    found = divided() + beside(FASTER, OTHER, {SMALL: (0.8, 0.82)}, session="part")
    assert decision(found, BOTH).variants == (FASTER,)
    assert divisions(Evidence(found, DEFAULT), BOTH, FASTER) == []


def test_a_loss_under_the_bound_is_no_reason_for_a_second_variant():
    evidence = Evidence(divided(small=0.79), DEFAULT)
    assert divisions(evidence, BOTH, FASTER) == []


def test_the_default_itself_may_serve_a_part_where_the_chosen_variant_is_slower():
    found = trials(FASTER, 1.1, loads=BOTH[:1]) + trials(FASTER, 0.5, loads=BOTH[1:])
    found += trials(FASTER, 1.1, loads=BOTH[:1], purpose=CONFIRM, rounds=9)
    found += trials(FASTER, 0.5, loads=BOTH[1:], purpose=CONFIRM, rounds=9)
    made = decision(found, BOTH)
    assert {leaf.variant for leaf in leaves(made.tree)} == {FASTER, DEFAULT}
    assert made.chosen_us == pytest.approx(75.0)


def test_one_kernel_serves_all_batches_where_rows_must_not_depend_on_their_neighbours():
    found = divided() + beside(FASTER, OTHER, {SMALL: (0.8, 0.6)}, session="part")
    assert decide(Evidence(found, DEFAULT), BOTH, "all").variants == (FASTER,)


def test_no_part_of_a_portfolio_is_slower_than_the_default_whatever_the_noise():
    for seed in range(20):
        rng = random.Random(seed)
        true = {v: {w: rng.uniform(0.7, 1.3) for w, _ in BOTH} for v in (FASTER, OTHER, CppVariant(streams=16))}
        found = []
        for purpose, rounds in (("search", 7), (CONFIRM, 9)):
            for v, factors in true.items():
                for w, f in factors.items():
                    found += trials(v, f, loads=[(w, 0.5)], purpose=purpose, rounds=rounds, noise=0.04,
                                    session=f"{w.num_seqs}", seed=rng.random())  # fmt: skip
        for leaf in leaves(decision(found, BOTH).tree):
            for w in leaf.part:
                assert leaf.variant == DEFAULT or sum(true[leaf.variant][x] for x in leaf.part) < len(leaf.part)
                assert w in dict(BOTH)


def test_nothing_is_said_of_the_regret_where_nothing_was_compared():
    made = decision([trial(DEFAULT, [100.0] * 5, w, "b", "baseline") for w, _ in LOADS])
    assert made.regret_bound is None and "nothing was compared" in made.confidence
    assert "regret_at_most" not in made.to_dict()


def test_a_threshold_lies_where_the_kernels_own_trials_put_it_and_not_at_a_constant():
    """A rank tunes the kernel of its own head counts. With a quarter of the heads the same gain begins at four times
    the sequences, and so does the threshold."""

    def split_at(few, many):
        loads = [(Workload(context_lens=(500,) * n), 1.0) for n in (2, 8, 32, 128)]
        found = []
        for w, _ in loads:
            factor = 0.6 if w.num_seqs <= few else 1.4
            found += trials(OTHER, factor, loads=[(w, 1.0)], session=str(w.num_seqs))
            found += trials(OTHER, factor, loads=[(w, 1.0)], session=str(w.num_seqs), purpose=CONFIRM, rounds=9)
        made = decide(Evidence(found, DEFAULT), loads, "decode")
        assert made.tree.feature == "num_seqs" and few <= made.tree.threshold < many
        return made.tree.threshold

    assert split_at(8, 32) * 4 == split_at(32, 128)


class _Drawn:
    """Twelve variants that nearly tie on each of four workloads: 2 % apart, samples off by 5 %."""

    default, objective = "default", staticmethod(mean)

    def __init__(self, seed):
        draw = random.Random(seed)
        self.workloads = [Workload(context_lens=(100 * n,)) for n in range(1, 5)]
        self.variants = [f"v{n}" for n in range(12)]
        self.true = {(v, w): math.exp(draw.gauss(0, 0.02)) for v in self.variants for w in self.workloads}
        noise = {
            (v, w, fresh): [(self.true[v, w] * math.exp(draw.gauss(0, 0.05)), 1.0) for _ in range(9 if fresh else 7)]
            for v, w in self.true for fresh in (False, True)
        }  # fmt: skip
        self.pairs = lambda variant, workload, *, fresh: noise[variant, workload, fresh]

    def cost_us(self, workload):
        return 1.0


def test_what_a_choice_loses_at_most_holds_as_often_as_is_said():
    held = 0
    for seed in range(40):
        drawn = _Drawn(seed)
        loads = [(w, 0.25) for w in drawn.workloads]
        bound = regret(drawn, loads, dict.fromkeys(drawn.workloads, "v0"), draws=100).at_most
        ours = sum(drawn.true["v0", w] for w in drawn.workloads)
        best = sum(min(1.0, *(drawn.true[v, w] for v in drawn.variants)) for w in drawn.workloads)
        held += ours / best - 1 <= bound
    assert held >= 38  # 95 % of 40
