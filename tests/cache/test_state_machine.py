"""Random operations on the cache, against a naive model that knows what every slot must hold."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from machine import COUNTS
from machine_faults import CacheMachine, TensorMachine

STEPS = 50  # operations of an example at most
NIGHTLY = 100  # times as many examples
RUNS = 5  # at most, until there are steps enough and each rare thing has come about: 2,600 once had no copy on write

# What must have come about in a run for it to say anything.
RARE = (
    "prefix hits", "prefix hits after evictions", "evictions", "copies on write", "copies for uncomputed forks",
    "truncations", "blocks behind a window", "swaps out", "swaps in", "blocks shared again",
    "refused for want of blocks", "failed steps", "failed steps that somebody found",
)  # fmt: skip


@pytest.mark.parametrize(
    ("machine", "index_class", "examples", "least"),
    [
        (CacheMachine, "compiled", 540, 20_000),
        (CacheMachine, "python", 80, 2_500),
        (TensorMachine, "compiled", 60, 2_000),
    ],
    ids=["books", "books with the index in Python", "tensors"],
    indirect=["index_class"],
)
def test_random_operations_never_mix_up_what_sequences_read(machine, index_class, examples, least, nightly):
    COUNTS.clear()
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    for _ in range(RUNS):
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=examples * (NIGHTLY if nightly else 1),
                stateful_step_count=STEPS,
                deadline=None,
                suppress_health_check=checks,
            ),
        )
        if COUNTS["steps"] >= least and all(COUNTS[what] for what in RARE):
            break
    assert COUNTS["steps"] >= least, COUNTS
    assert all(COUNTS[what] for what in RARE), COUNTS
