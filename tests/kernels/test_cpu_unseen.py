"""The C++ kernels and what must not matter to them: keys that nobody attends, zero divisors, infinite sinks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from batches import Batch
from cpu_cases import DECODE, PORTABLE, RAGGED, SHORT, TOKENS, Case, check, prebuild, run, same_bits

from pagegen.modifiers import mask_mod, score_mod

# Divisors by position: every sequence of DIVIDED ends before the first zero, but not every tile does.
DIVIDED = [(40, 1), (37, 1), (3, 1)]
DIVISORS = torch.zeros(64, dtype=torch.int32)
DIVISORS[:40] = 3
WIDE = DIVISORS.long()


@mask_mod
def divided(batch: Any, head: Any, q_pos: Any, k_pos: Any) -> Any:
    return (k_pos % DIVISORS[k_pos] == 0) | (k_pos // WIDE[k_pos] == 5)


@score_mod
def divided_score(score: Any, batch: Any, head: Any, q_pos: Any, k_pos: Any) -> Any:
    divided = (q_pos - k_pos - 2) // DIVISORS[k_pos] * 0.1 + k_pos % abs(WIDE[k_pos]) * 0.1
    return score + divided + k_pos % (k_pos + 1) ** 4 * 0.01  # a power that is positive, and 0 in 32 bits at 255


LEAST = torch.tensor([-(2**63)])
LEAST_BY = torch.tensor([-1, 3])


@score_mod
def least(score: Any, batch: Any, head: Any, q_pos: Any, k_pos: Any) -> Any:
    """-2**63 // -1 is no 64-bit number; the CPU stops at it as at a zero divisor."""
    quotient, rest = LEAST[0] // LEAST_BY[k_pos % 2], LEAST[0] % LEAST_BY[k_pos % 2]
    return score + torch.where((quotient == 7) | (rest == 5), 1.0, 0.0)


@mask_mod
def every_other(batch: Any, head: Any, q_pos: Any, k_pos: Any) -> Any:
    return k_pos % 2 == 0


@mask_mod
def by_head_with_holes(batch: Any, head: Any, q_pos: Any, k_pos: Any) -> Any:
    """No head attends the last half of every 8 keys; the first half is divided among them."""
    return (k_pos % 8 < 4) & ((k_pos + head) % 2 == 0)


INT4 = {"kv_dtype": "int4", "kv_scale_granularity": "token_head", "kv_zero_points": True}
DIVIDING = [
    Case("divided", 2, 64, 16, fields={"mask_mod": divided.name, "score_mod": divided_score.name}),
    Case("least", 2, 64, 16, dtype="float32", fields={"score_mod": least.name}),
]
HOLES = [
    Case("every-other", 4, 64, 16, fields={"mask_mod": every_other.name}),
    Case("by-head", 2, 64, 16, "HND", dtype="float32", variant=SHORT, machine=PORTABLE,
         fields={"mask_mod": by_head_with_holes.name}),
    Case("every-other-tokens", 4, 64, 16, kv_heads=5, variant=TOKENS, fields={"mask_mod": every_other.name}),
    Case("by-head-tokens", 2, 64, 16, kv_heads=5, variant=TOKENS, fields={"mask_mod": by_head_with_holes.name}),
    Case("latent", 16, 96, 16, kv_heads=1,
         fields={"v_head_dim": 64, "shared_kv": True, "mask_mod": every_other.name}),
]  # fmt: skip
TREES = [
    Case("tree-plain", 4, 64, 16, variant=SHORT), Case("tree-tokens", 4, 64, 16, variant=TOKENS, kv_heads=5),
    Case("tree-int4", 4, 64, 16, fields=INT4),
]  # fmt: skip
SINKS = Case("sinks", 2, 64, 16, dtype="float32", fields={"window": 12, "sinks": True})


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    prebuild([*DIVIDING, *HOLES, *TREES, SINKS])


def spoil(batch: Batch, s: int, positions: list[int]) -> None:
    """Makes keys, values, scales and zero points of sequence s at the positions NaN, where they are floats."""
    for position in positions:
        block, slot = int(batch.block_table[s, position // batch.layout.block_size]), position % batch.layout.block_size
        for cache in (batch.k_cache, batch.v_cache):
            if cache is not None and cache.is_floating_point():
                cache[block, slot] = float("nan")
        for factor in (batch.k_scale, batch.v_scale, batch.k_zero, batch.v_zero):
            if factor is not None and factor.dim() == 3:
                factor[block, slot] = float("nan")


def test_a_zero_divisor_past_the_last_token_does_not_end_the_process() -> None:
    case = DIVIDING[0]
    for sequences in (DIVIDED, [(40, 33), (20, 20)]):
        check(case.load(), case.batch(sequences))


def test_a_zero_divisor_at_a_key_in_use_does_not_end_the_process() -> None:
    out, _ = run(DIVIDING[0].load(), DIVIDING[0].batch([(64, 1), (300, 3), (40, 1)], padded_rows=0))
    assert out.isfinite().all()


def test_a_quotient_that_no_integer_holds_does_not_end_the_process() -> None:
    out, _ = run(DIVIDING[1].load(), DIVIDING[1].batch([(40, 1), (70, 1)]))  # torch itself would be ended
    assert out.isfinite().all()


@pytest.mark.parametrize("case", HOLES, ids=lambda case: case.name)
@pytest.mark.parametrize("sequences", [DECODE, RAGGED], ids=["decode", "ragged"])
def test_nan_at_keys_that_a_mask_keeps_from_everybody_changes_no_bit(
    case: Case, sequences: list[tuple[int, int]]
) -> None:
    batch = case.batch(sequences)
    clean = check(case.load(), batch)
    for s, (length, _) in enumerate(sequences):
        spoil(batch, s, [k for k in range(length) if (k % 8 >= 4 if case.name.startswith("by-head") else k % 2 == 1)])
    assert same_bits(clean, check(case.load(), batch))


@pytest.mark.parametrize("case", TREES, ids=lambda case: case.name)
def test_nan_at_drafts_that_no_query_of_the_tree_sees_changes_no_bit(case: Case) -> None:
    sequences = [(70, 20), (33, 3), (5, 5), (310, 9), (129, 40)]
    batch = case.batch(sequences, tree=True)
    assert batch.tree_mask is not None
    first = 0
    for _, queries in sequences:
        batch.tree_mask[first : first + queries, 1:queries:3] = False
        first += queries
    clean = check(case.load(), batch)
    for s, (length, queries) in enumerate(sequences):
        spoil(batch, s, list(range(length - queries + 1, length, 3)))
    assert same_bits(clean, check(case.load(), batch))


def test_an_infinite_sink_takes_all_the_weight() -> None:
    batch = SINKS.batch([(50, 6), (6, 6), (300, 1)])
    assert batch.sinks is not None
    batch.sinks[1] = float("inf")
    out, lse = run(SINKS.load(), batch)
    expected, expected_lse = batch.expected()
    assert torch.equal(out[:, 1], torch.zeros_like(out[:, 1]))
    assert torch.equal(lse[:13, 1], torch.full((13,), float("inf")))
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(lse, expected_lse.float(), atol=1e-5, rtol=1e-4)
