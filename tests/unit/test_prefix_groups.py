"""Which rows of a batch are attended together: the groups that save the most blocks."""

from __future__ import annotations

import functools
import itertools
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagegen.cache.sharing import prefix_groups

Groups = tuple[tuple[int, tuple[int, ...]], ...]


def groups_of(rows: list[list[int]]) -> Groups:
    width = max([1, *map(len, rows)])
    table = np.zeros((len(rows), width), dtype=np.int32)
    for i, row in enumerate(rows):
        table[i, : len(row)] = row
    return prefix_groups(table, np.array([len(row) for row in rows], dtype=np.int64))


def saved(groups: Groups) -> int:
    return sum(blocks * (len(rows) - 1) for blocks, rows in groups)


def most(rows: list[tuple[int, ...]]) -> int:
    """The most blocks that any choice of disjoint groups saves: every subset of rows tried as a group."""

    @functools.cache
    def best(left: frozenset[int]) -> int:
        if len(left) < 2:
            return 0
        first, *others = sorted(left)
        found = best(left - {first})
        for size in range(1, len(others) + 1):
            for chosen in itertools.combinations(others, size):
                group = (first, *chosen)
                shared = 0
                while all(len(rows[i]) > shared and rows[i][shared] == rows[first][shared] for i in group):
                    shared += 1
                if shared:
                    found = max(found, shared * size + best(left - set(group)))
        return found

    return best(frozenset(range(len(rows))))


def test_a_short_common_prompt_does_not_hide_long_documents():
    documents = [[1, *range(10, 60)], [1, *range(100, 150)]]
    rows = [[*documents[i % 2], 1000 + i] for i in range(6)]
    assert groups_of(rows) == ((51, (0, 2, 4)), (51, (1, 3, 5)))


def test_a_long_common_prompt_is_shared_by_all():
    rows = [[*range(1, 51), 100 + i % 2, 1000 + i] for i in range(6)]
    assert groups_of(rows) == ((50, (0, 1, 2, 3, 4, 5)),)


def test_rows_that_would_shorten_a_prefix_too_much_stay_alone():
    rows = [list(range(1, 101))] * 5 + [[1, 2]]
    assert groups_of(rows) == ((100, (0, 1, 2, 3, 4)),)


@pytest.mark.parametrize("rows", [[[]], [[], []], [[1], [2]], [[1, 2], []]])
def test_rows_with_nothing_in_common_are_in_no_group(rows):
    assert groups_of(rows) == ()


def test_who_shares_a_prompt_only_is_grouped_beside_those_who_share_a_document():
    rows = [list(range(1, 101))] * 3 + [[1, 200 + i] for i in range(4)]
    assert groups_of(rows) == ((100, (0, 1, 2)), (1, (3, 4, 5, 6)))


@given(st.lists(st.lists(st.integers(1, 3), max_size=6), min_size=1, max_size=6))
def test_groups_are_true_disjoint_and_save_nearly_as_much_as_any(rows):
    found = groups_of(rows)
    members = [row for _, group in found for row in group]
    assert len(members) == len(set(members))
    for blocks, group in found:
        assert blocks >= 1 and len(group) >= 2 and list(group) == sorted(group)
        assert all(len(rows[row]) >= blocks and rows[row][:blocks] == rows[group[0]][:blocks] for row in group)
    assert saved(found) >= 0.7 * most([tuple(row) for row in rows])


def test_a_thousand_rows_that_branch_one_after_another_are_grouped_quickly():
    chain = [list(range(1, 1 + i)) for i in range(1, 1200)]  # deeper than Python's recursion would go
    start = time.process_time()
    found = groups_of(chain)
    assert time.process_time() - start < 1.0
    assert saved(found) >= 599 * 600  # (1199 - d) * d is greatest in the middle
