"""The order in which cached blocks are evicted, against an `OrderedDict`."""

from __future__ import annotations

from collections import OrderedDict

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from pagegen.cache.eviction import EvictionOrder

BLOCKS = 12
CHOICES = st.lists(st.integers(0, BLOCKS - 1), unique=True)


@pytest.mark.parametrize("least", [0, 64])
@given(operations=st.lists(st.tuples(st.sampled_from(["push", "withdraw", "pop"]), CHOICES), max_size=60))
def test_blocks_come_out_in_the_order_in_which_they_came_in(least, operations):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pagegen.cache.eviction._LEAST", least)  # without it, the end is reached every few pushes
        order, naive = EvictionOrder(BLOCKS), OrderedDict()
    for verb, blocks in operations:
        if verb == "push":
            fresh = [block for block in blocks if block not in naive]
            order.push(np.array(fresh, dtype=np.int32))
            naive.update(dict.fromkeys(fresh))
        elif verb == "withdraw":
            there = [block for block in blocks if block in naive]
            order.withdraw(np.array(there, dtype=np.int32))
            for block in there:
                del naive[block]
        elif naive:
            count = 1 + len(blocks) % len(naive)
            assert order.pop(count).tolist() == [naive.popitem(last=False)[0] for _ in range(count)]
        assert list(order) == list(naive) and len(order) == len(naive)


def test_what_was_withdrawn_is_skipped_however_much_it_is():
    order = EvictionOrder(1000)
    order.push(np.arange(1000))
    order.withdraw(np.arange(990))
    assert order.pop(3).tolist() == [990, 991, 992] and len(order) == 7
