"""A slice of the random sweep in Triton's interpreter (`make sweep` runs all of it), and what the sweep has found."""

from __future__ import annotations

import pytest
import sweep
import sweep_cases
from batches import compare
from triton_cases import Case, tiles

KERNELS = 3
SEED = 1


@pytest.mark.parametrize("kernel", range(KERNELS))
def test_reference_and_template_agree_with_the_kernels_of_a_random_slice(kernel: int) -> None:
    each = sweep_cases.CASES_A_KERNEL["interpreter"]
    slice_ = list(sweep.numbers(each * KERNELS, SEED))[each * kernel : each * (kernel + 1)]
    failures = sweep.failures_of("interpreter", slice_)
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("reduce", ["kernel", "last"])
@pytest.mark.parametrize("sequences", [[(0, 1), (0, 1)], [(0, 2), (0, 1)]], ids=["decode", "ragged"])
def test_a_batch_of_empty_sequences_has_results_under_splits_of_fixed_size(
    reduce: str, sequences: list[tuple[int, int]]
) -> None:
    variant = tiles("pages_in_tile", kv=16, split_tokens=32, reduce=reduce)
    case = Case("empty", 2, 64, 16, kv_heads=1, variant=variant, fields={"sinks": True})
    batch = case.batch(sequences)
    call = case.run(batch)
    compare(call.out, call.lse, *batch.expected(), case.spec.q_dtype)


def test_a_large_soft_cap_leaves_small_scores_as_they_are() -> None:
    case = Case("cap", 16, 64, 16, kv_heads=1, variant=tiles("pages_in_tile"), fields={"logit_softcap": 50.0})
    batch = case.batch([(1, 1)] * 8, magnitude=0.05)
    call = case.run(batch)
    compare(call.out, call.lse, *batch.expected(), case.spec.q_dtype)
