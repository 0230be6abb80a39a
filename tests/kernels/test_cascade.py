"""Cascade attention against the flat operator and the float64 reference, on batches full of poison (see batches.py)."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from batches import Batch, compare, make_batch
from torch.utils._python_dispatch import TorchDispatchMode

import pagegen
from pagegen.modifiers import mask_mod, score_mod
from pagegen.ops import cascade as cascade_module
from pagegen.reference import reference_attention
from pagegen.spec import AttentionSpec, CacheLayout

BLOCK = 16
Groups = tuple[tuple[int, tuple[int, ...]], ...]
# two groups with other prefixes, rows out of order, and two sequences in no group
DECODE = [(100, 1), (90, 1), (33, 1), (150, 1), (64, 1), (1, 1), (81, 1)]
DECODE_GROUPS: Groups = ((3, (1, 4, 0)), (5, (6, 3)))
RAGGED = [(100, 7), (90, 1), (50, 50), (150, 70), (64, 0), (113, 30), (81, 1)]
RAGGED_GROUPS: Groups = ((3, (0, 1, 4)), (5, (6, 3, 5)))


def shared(spec: AttentionSpec, sequences: list[tuple[int, int]], groups: Groups, **options: Any) -> Batch:
    """A batch in which the rows of each group have the same first blocks."""
    batch = make_batch(spec, sequences, block_size=BLOCK, **options)
    table = batch.block_table.clone()
    for blocks, rows in groups:
        table[list(rows), :blocks] = table[rows[0], :blocks].clone()
    return replace(batch, block_table=table)


def both(batch: Batch, groups: Groups, **options: Any) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """((out, lse) of the cascade, (out, lse) of the flat operator)."""
    given = {**batch.kwargs(), **options, "return_lse": True}
    return pagegen.cascade_attention(**given, prefix_groups=groups), pagegen.paged_attention(**given)


def check(batch: Batch, groups: Groups, **options: Any) -> None:
    (out, lse), (flat_out, flat_lse) = both(batch, groups, **options)
    expected = reference_attention(**{**replace(batch, q=batch.q.double()).kwargs(), **options}, return_lse=True)
    compare(out, lse, *expected, batch.spec.q_dtype)
    compare(out, lse, flat_out.double(), flat_lse.double(), batch.spec.q_dtype)


def spec_of(group: int = 4, dtype: str = "bfloat16", **fields: Any) -> AttentionSpec:
    return AttentionSpec(num_q_heads=2 * group, num_kv_heads=2, head_dim=64, q_dtype=dtype, **fields)


@pytest.fixture
def passes(monkeypatch):
    """The keyword arguments of every `paged_attention` call that the cascade makes."""
    seen: list[dict[str, Any]] = []

    def spy(*operands: Any, **options: Any) -> Any:
        seen.append(options)
        return pagegen.paged_attention(*operands, **options)

    monkeypatch.setattr(cascade_module, "paged_attention", spy)
    return seen


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    ("sequences", "groups"), [(DECODE, DECODE_GROUPS), (RAGGED, RAGGED_GROUPS)], ids=["decode", "ragged"]
)
def test_a_cascade_is_the_flat_result_for_several_groups_and_sequences_in_none(dtype, sequences, groups, passes):
    check(shared(spec_of(dtype=dtype), sequences, groups), groups)
    assert len(passes) == 2  # it did divide


@pytest.mark.parametrize("group", [1, 7])
def test_any_number_of_query_heads_may_share_a_kv_head(group):
    check(shared(spec_of(group), RAGGED, RAGGED_GROUPS), RAGGED_GROUPS)


@pytest.mark.parametrize("order", ["HND", "pool", "packed"])
def test_the_caches_may_lie_in_any_order(order):
    check(shared(spec_of(), DECODE, DECODE_GROUPS, order=order), DECODE_GROUPS)


@pytest.mark.parametrize("sequences", [DECODE, RAGGED], ids=["decode", "ragged"])
def test_a_sink_is_counted_once(sequences):
    groups = DECODE_GROUPS if sequences is DECODE else RAGGED_GROUPS
    check(shared(spec_of(sinks=True), sequences, groups), groups)


@pytest.mark.parametrize("fields", [{"logit_softcap": 5.0, "scale": 0.7, "alibi": True}, {"causal": False}])
def test_features_that_do_not_see_where_a_part_begins_are_divided(fields, passes):
    for sequences, groups in ((DECODE, DECODE_GROUPS), (RAGGED, RAGGED_GROUPS)):
        check(shared(spec_of(**fields), sequences, groups), groups)
    assert len(passes) == 4


def test_a_window_over_the_longest_sequence_is_divided_and_a_shorter_one_is_not(passes):
    for window, calls in ((150, 2), (149, 3)):
        check(shared(spec_of(window=window), RAGGED, RAGGED_GROUPS), RAGGED_GROUPS, max_seq_len=150)
        assert len(passes) == calls, window


def test_a_tree_of_own_tokens_stays_with_them(passes):
    generator = torch.Generator().manual_seed(3)
    batch = shared(spec_of(), RAGGED, RAGGED_GROUPS)
    mask = torch.rand(batch.q.shape[0], 70, generator=generator) < 0.4
    check(batch, RAGGED_GROUPS, tree_mask=mask)
    assert len(passes) == 2


@pytest.mark.parametrize(
    "fields",
    [
        {"kv_dtype": "int8", "kv_scale_granularity": "token_head", "kv_zero_points": True},
        {"kv_dtype": "int4", "kv_scale_granularity": "token_head"},
    ],
    ids=str,
)
def test_quantised_caches_pass_through(fields):
    check(shared(spec_of(dtype="float32", **fields), RAGGED, RAGGED_GROUPS), RAGGED_GROUPS)


def test_a_latent_cache_passes_through():
    spec = AttentionSpec(
        num_q_heads=8, num_kv_heads=1, head_dim=96, v_head_dim=64, q_dtype="float32", shared_kv=True
    )  # fmt: skip
    check(shared(spec, RAGGED, RAGGED_GROUPS), RAGGED_GROUPS)


def test_more_queries_than_the_prefix_has_tokens_are_divided_among_parts():
    sequences = [(16 + n, n) for n in (40, 1, 33, 0, 7)]
    groups = ((1, (0, 1, 2, 3, 4)),)
    batch = shared(spec_of(), sequences, groups)
    check(batch, groups)
    plan = plan_of(batch, groups)
    assert plan.prefix_max_query_len == 14 and len(plan.prefix_lens) == 6  # 81 queries in parts of at most 16


def plan_of(batch: Batch, groups: Groups) -> Any:
    counts = [n for _, n in batch.sequences]
    return pagegen.plan_cascade(groups, batch.block_table, batch.seq_lens, block_size=BLOCK, query_lens=counts)


def test_one_plan_serves_every_layer_and_reads_each_prefix_once(passes):
    batch = shared(spec_of(), [(100, 1), (90, 1), (80, 1)], ((4, (0, 1, 2)),))
    plan = plan_of(batch, ((4, (0, 1, 2)),))
    assert plan.prefix_lens.tolist() == [64]
    assert plan.seq_lens.tolist() == [36, 26, 16]
    for seed in (1, 2):
        other = shared(spec_of(), [(100, 1), (90, 1), (80, 1)], ((4, (0, 1, 2)),), seed=seed)
        layer = replace(batch, q=other.q, k_cache=batch.k_cache * seed)
        out = pagegen.cascade_attention(**layer.kwargs(), cascade=plan)
        compare(out, None, layer.expected()[0], None, torch.bfloat16)
    assert len(passes) == 4


def test_the_host_knows_how_long_each_part_can_be(passes):
    groups = ((3, (0, 1)), (5, (2, 3)))
    for sequences in ([(100, 1), (90, 1), (150, 1), (97, 1)], [(100, 1), (90, 1), (150, 1), (97, 1), (120, 1)]):
        batch = shared(spec_of(), sequences, groups)
        pagegen.cascade_attention(**batch.kwargs(), prefix_groups=groups, max_seq_len=150)
    bounds = [(options["max_seq_len"], options.get("max_query_len")) for options in passes]
    # the last sequence of the second batch is in no group, so no prefix is sure to be left out
    assert bounds == [(80, 2), (150 - 48, None), (80, 2), (150, None)]


def test_queries_that_follow_each_other_are_not_copied():
    batch = shared(spec_of(), [(100, 1), (90, 1), (80, 1)], ((4, (0, 1)),))
    assert plan_of(batch, ((4, (0, 1)),)).first_row == 0
    assert plan_of(batch, ((4, (1, 2)),)).first_row == 1
    assert plan_of(batch, ((4, (0, 2)),)).first_row is None


def test_rows_of_one_prefix_length_keep_a_view_of_the_block_table():
    batch = shared(spec_of(), [(100, 1), (90, 1), (80, 1)], ((4, (0, 1, 2)),))
    own = plan_of(batch, ((4, (0, 1, 2)),)).block_table
    assert own.data_ptr() == batch.block_table[:, 4:].data_ptr()


def test_a_prefix_that_is_all_a_waiting_sequence_has_is_not_read_past_the_table():
    groups = ((4, (0, 1, 2)),)
    batch = shared(spec_of(), [(64, 0), (65, 1), (70, 6)], groups)
    check(batch, groups)
    narrow = replace(batch, block_table=batch.block_table[:, :5])
    check(narrow, groups)


@pytest.mark.parametrize("groups", [(), ((3, (1,)),), ((3, (4,)), (2, (0,)))])
def test_where_no_two_queries_share_a_prefix_nothing_is_divided(groups, passes):
    batch = shared(spec_of(), RAGGED, groups)
    assert plan_of(batch, groups) is None
    (out, lse), (flat_out, flat_lse) = both(batch, groups)
    assert torch.equal(out, flat_out) and torch.equal(lse, flat_lse)
    assert len(passes) == 1


def test_a_plan_that_would_save_too_little_is_not_made():
    groups = ((4, (0, 1, 2)),)  # 64 tokens, read once instead of three times
    batch = shared(spec_of(), [(100, 1), (90, 1), (80, 1)], groups)
    operands = (groups, batch.block_table, batch.seq_lens)
    assert pagegen.plan_cascade(*operands, block_size=BLOCK, least_saved_tokens=128) is not None
    assert pagegen.plan_cascade(*operands, block_size=BLOCK, least_saved_tokens=129) is None


class Reading(TorchDispatchMode):
    """Refuses what makes the host wait for the device: reading a value, or a shape that depends on values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        assert not any(word in name for word in ("_local_scalar_dense", "nonzero", "masked_select", "unique")), name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("fields", [{}, {"alibi": True}, {"sinks": True}])
def test_neither_the_plan_nor_the_passes_read_the_device(fields):
    batch = shared(spec_of(**fields), RAGGED, RAGGED_GROUPS)
    with Reading():
        out = pagegen.cascade_attention(**batch.kwargs(), cascade=plan_of(batch, RAGGED_GROUPS))
    compare(out, None, batch.expected()[0], None, torch.bfloat16)
    with pytest.raises(AssertionError, match="_local_scalar_dense"), Reading():
        batch.seq_lens.max().item()


def test_the_result_goes_where_it_is_wanted():
    batch = shared(spec_of(), RAGGED, RAGGED_GROUPS)
    (out, _), _ = both(batch, RAGGED_GROUPS)
    given = torch.full_like(out, float("nan"))
    result = pagegen.cascade_attention(**batch.kwargs(), prefix_groups=RAGGED_GROUPS, out=given)
    assert result is given and torch.equal(given, out)


def test_rows_that_belong_to_nobody_stay_empty():
    batch = shared(spec_of(), RAGGED, RAGGED_GROUPS)
    (out, lse), _ = both(batch, RAGGED_GROUPS)
    assert not out[-3:].any() and (lse[-3:] == -float("inf")).all()


def test_batch_invariance_is_bitwise_that_of_the_flat_operator(caplog, passes):
    cascade_module._announce_flat.cache_clear()
    batch = shared(spec_of(), DECODE, DECODE_GROUPS)
    with caplog.at_level(logging.WARNING, logger="pagegen"):
        for _ in range(3):
            (out, lse), (flat_out, flat_lse) = both(batch, DECODE_GROUPS, batch_invariant=True)
            assert torch.equal(out, flat_out) and torch.equal(lse, flat_lse)
    assert [r.message for r in caplog.records if "cascade_attention attends every sequence by itself" in r.message] == [
        "cascade_attention attends every sequence by itself: with batch_invariant a row's result must not depend on "
        "which neighbours share its prefix"
    ]
    assert len(passes) == 3


@score_mod
def nearer(score, batch, head, q_pos, k_pos):
    return score - 0.01 * (q_pos - k_pos)


@mask_mod
def even_keys(batch, head, q_pos, k_pos):
    return k_pos % 2 == 0


def test_functions_of_positions_see_true_ones():
    batch = shared(spec_of(dtype="float32"), RAGGED, RAGGED_GROUPS)
    check(batch, RAGGED_GROUPS, score_mod=nearer)
    check(batch, RAGGED_GROUPS, mask_mod=even_keys)


def test_what_a_paged_cache_reports_is_what_a_cascade_takes():
    cache = pagegen.PagedKVCache(2, 40, CacheLayout(block_size=4), 2, 32, dtype="float32")
    for pool in cache.pools:
        pool.normal_()
    prompt = list(range(18))
    cache.add("a", [*prompt, 50])
    cache.add("other", [99, 98, 97])
    cache.batch(["a", "other"])
    for name, token in (("b", 51), ("c", 52)):
        assert cache.add(name, [*prompt, token, token]) == 16
    cache.append("a", [7])
    cache.append("other", [7])
    batch = cache.batch(["b", "other", "a", "c"])
    assert batch.prefix_groups == ((4, (0, 2, 3)),) and batch.query_lens == (4, 1, 1, 4)
    plan = pagegen.plan_cascade(
        batch.prefix_groups, batch.block_table, batch.seq_lens, block_size=4, query_lens=batch.query_lens
    )
    for layer in range(2):
        q = torch.randn(len(batch.positions), 4, 32)
        operands = (q, cache.k_cache(layer), cache.v_cache(layer), batch.block_table, batch.seq_lens)
        starts = {"query_start_loc": batch.query_start_loc}
        torch.testing.assert_close(
            pagegen.cascade_attention(*operands, **starts, cascade=plan), pagegen.paged_attention(*operands, **starts)
        )


def test_a_compiled_model_takes_a_plan_as_it_is():
    batch = shared(spec_of(), RAGGED, RAGGED_GROUPS)
    plan = plan_of(batch, RAGGED_GROUPS)
    compiled = torch.compile(pagegen.cascade_attention, fullgraph=True, backend="aot_eager")
    out = compiled(**batch.kwargs(), cascade=plan)
    assert torch.equal(out, pagegen.cascade_attention(**batch.kwargs(), cascade=plan))


def test_values_are_checked_when_asked(monkeypatch):
    monkeypatch.setenv("PAGEGEN_CHECK", "1")
    batch = shared(spec_of(), DECODE, DECODE_GROUPS)
    check(batch, DECODE_GROUPS)
    many = ((1, tuple(range(5))),)
    check(shared(spec_of(), [(20 + n, 1 + n) for n in (3, 3, 4, 1, 2)], many), many)
    with pytest.raises(ValueError, match="rows with the same 4 blocks, got rows 0 and 1"):
        plan_of(batch, ((4, (0, 1)),))
    with pytest.raises(ValueError, match=r"before every query of row 4 \(63\), got 4 blocks of 16"):
        equal = batch.block_table.clone()
        equal[4, :4] = equal[0, :4]
        plan_of(replace(batch, block_table=equal), ((4, (0, 4)),))


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        (((0, (0, 1)),), "prefix_groups must be at least 1"),
        (((2, (0, 7)),), "rows in 0..6, each once, got row 7"),
        (((2, (0, -1)),), "prefix_groups must be at least 0"),
        (((2, (0, 1)), (1, (1, 2))), "each once, got row 1"),
        (((500, (0, 1)),), "at most max_blocks 12 blocks, got 500"),
    ],
)
def test_groups_that_cannot_be_are_refused(groups, said):
    batch = shared(spec_of(), DECODE, ())
    with pytest.raises(ValueError, match=said):
        plan_of(batch, groups)


def test_a_plan_of_another_batch_is_refused():
    batch = shared(spec_of(), DECODE, DECODE_GROUPS)
    plan = plan_of(batch, DECODE_GROUPS)
    other = shared(spec_of(), DECODE[:3], ())
    with pytest.raises(ValueError, match=r"cascade must be of this batch: made for .* \(16, 7\)"):
        pagegen.cascade_attention(**other.kwargs(), cascade=plan)
    with pytest.raises(ValueError, match="must be None where cascade is given"):
        pagegen.cascade_attention(**batch.kwargs(), cascade=plan, prefix_groups=DECODE_GROUPS)
    with pytest.raises(ValueError, match=r"query_lens must have one entry a sequence \(7\), got 3"):
        pagegen.plan_cascade(DECODE_GROUPS, batch.block_table, batch.seq_lens, block_size=BLOCK, query_lens=[1, 1, 1])
