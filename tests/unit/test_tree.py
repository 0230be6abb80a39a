"""Decision trees over host integers: learned, flattened to clauses, checked on every cell they reach, read as text."""

from __future__ import annotations

import itertools
import random

from pagegen_autotune import tree

from pagegen.spec import Clause, CppVariant, DispatchRule, Workload

A, B, C = (CppVariant(streams=n) for n in (2, 4, 8))
SMALL = [Workload(context_lens=(500,) * n) for n in (1, 2, 4)]
LARGE = [Workload(context_lens=(500,) * n) for n in (16, 32, 64)]
LONG = [Workload(context_lens=(9000,) * n) for n in (1, 16)]


def by_table(times):
    """The cheapest of the variants for some workloads, by (variant, workload) times."""

    def best_of(part):
        costs = {v: sum(times(v, w) for w in part) for v in (A, B, C)}
        best = min(costs, key=lambda v: (costs[v], v.name))
        return costs[best], best

    return best_of


def rule_of(grown):
    return DispatchRule(clauses=tree.clauses(grown), reason="learned")


def ask(rule, w):
    return rule.choose(w.num_seqs, w.max_query_len, w.max_context_len)


def size_matters(v, w):
    return 1.0 if (v == A) == (w.num_seqs <= 4) else 2.0


def test_one_variant_that_serves_all_best_is_one_leaf_however_many_are_allowed():
    grown = tree.grow(SMALL + LARGE, by_table(lambda v, w: 1.0 if v == B else 2.0))
    assert [list(tree.leaves(t)) for t in grown] == [[tree.Leaf(variant=B, part=tuple(SMALL + LARGE))]] * 4


def test_the_split_lies_between_what_was_measured_half_way_by_factors():
    grown = tree.grow(SMALL + LARGE, by_table(size_matters))[1]
    assert (grown.feature, grown.threshold) == ("num_seqs", 8)
    rule = rule_of(grown)
    assert [ask(rule, w) == A for w in SMALL + LARGE] == [True] * 3 + [False] * 3


def test_more_leaves_are_taken_only_where_they_gain():
    sizes = [len(list(tree.leaves(t))) for t in tree.grow(SMALL + LARGE, by_table(size_matters))]
    assert sizes == [1, 2, 2, 2]


def test_clauses_choose_what_the_tree_chooses_on_every_batch():
    rng = random.Random(0)
    loads = SMALL + LARGE + LONG + [Workload(context_lens=(300,) * 3, query_lens=(1, 8, n)) for n in (1, 64)]
    for _ in range(30):
        times = {key: rng.random() for key in itertools.product((A, B, C), loads)}
        for grown in tree.grow(loads, by_table(lambda v, w, times=times: times[v, w])):
            rule = rule_of(grown)
            for leaf in tree.leaves(grown):
                assert all(ask(rule, w) == leaf.variant for w in leaf.part)


def test_a_batch_between_two_measured_ones_is_served_like_the_nearer_by_factors():
    rule = rule_of(tree.grow(SMALL + LARGE, by_table(size_matters))[1])
    assert rule.choose(7, 1, 500) == rule.choose(8, 1, 500) == A and rule.choose(9, 1, 500) != A


def test_every_cell_is_reached_and_an_illegal_variant_gives_way_to_the_safe_one_everywhere():
    clauses = (
        Clause(variant=A, max_num_seqs=8, max_query_len=1),
        Clause(variant=B, max_query_len=1),
        Clause(variant=C),
    )
    rule, looked_at = tree.checked(DispatchRule(clauses=clauses, reason="r"), lambda v: v != B, C)
    assert looked_at == 3 * 2 and B not in rule.variants
    assert rule.choose(8, 1, 10) == A and rule.choose(9, 1, 10) == C and rule.choose(1, 2, 10) == C


def test_a_clause_that_no_batch_reaches_is_dropped():
    clauses = (Clause(variant=A, max_num_seqs=8), Clause(variant=B, max_num_seqs=4), Clause(variant=C))
    rule, _ = tree.checked(DispatchRule(clauses=clauses, reason="r"), lambda v: True, C)
    assert rule.variants == (A, C)


def test_checking_changes_no_choice_where_all_is_legal():
    grown = tree.grow(SMALL + LARGE + LONG, by_table(lambda v, w: (hash((v.streams, w.num_seqs)) % 7) + 1.0))[-1]
    before = rule_of(grown)
    after, _ = tree.checked(before, lambda v: True, B)
    for cell in itertools.product(range(1, 70, 3), (1, 2, 60), (1, 500, 9000, 10**6)):
        assert before.choose(*cell) == after.choose(*cell)


def test_the_rule_reads_as_text():
    rule = rule_of(tree.grow(SMALL + LARGE, by_table(size_matters))[1])
    assert tree.text(rule) == [f"num_seqs <= 8: {A.name}", f"else: {B.name}"]
