"""What the operators refuse on the host: memory that is shared, masks that are too narrow, values of a wrong type."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import pagegen
from pagegen.ops import cascade, memory
from pagegen.reference import reference_attention

BLOCKS, BLOCK, HEADS, DIM = 8, 4, 2, 16
CACHE = (BLOCKS, BLOCK, HEADS, DIM)
STARTS = torch.tensor([0, 3, 3, 5], dtype=torch.int32)


def operands(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "q": torch.randn(3, 4, DIM),
        "k_cache": torch.randn(CACHE),
        "v_cache": torch.randn(CACHE),
        "block_table": torch.tensor([[3, 1], [0, 2], [7, 5]], dtype=torch.int32),
        "seq_lens": torch.tensor([5, 3, 8], dtype=torch.int32),
    }
    return {**values, **changes}


def in_q(values: dict[str, Any]) -> Tensor:
    buffer = torch.randn(4, 4, DIM)
    values["q"] = buffer[:3]
    return buffer[1:]


def in_cache(name: str) -> Any:
    return lambda values: values[name].view(-1)[256 : 256 + 3 * 4 * DIM].view(3, 4, DIM)


OUTS: dict[str, Any] = {
    "in q at another offset": in_q,
    "in k_cache": in_cache("k_cache"),
    "in v_cache": in_cache("v_cache"),
    "in itself": lambda values: torch.zeros(400).as_strided((3, 4, DIM), (32, 16, 1)),
}


@pytest.mark.parametrize("where", OUTS)
def test_out_that_lies_in_what_is_read_or_in_itself_is_refused_before_anything_is_written(where: str) -> None:
    values = operands()
    out = OUTS[where](values)
    before = [values[name].clone() for name in ("q", "k_cache", "v_cache")]
    with pytest.raises(ValueError, match="out must have memory of its own"):
        pagegen.paged_attention(**values, out=out)
    assert all(map(torch.equal, before, [values[name] for name in ("q", "k_cache", "v_cache")]))


def test_out_may_lie_beside_the_queries_in_one_buffer() -> None:
    values, buffer = operands(), torch.randn(3, 2, 4, DIM)
    values["q"] = buffer[:, 0]
    expected = pagegen.paged_attention(**values)
    pagegen.paged_attention(**values, out=buffer[:, 1])
    assert torch.equal(buffer[:, 1], expected)


def pools() -> dict[str, tuple[Tensor, Tensor, bool]]:
    """(k_cache, v_cache, whether they share elements)"""
    wide, pair = torch.zeros(BLOCKS, BLOCK, HEADS, DIM + 4), torch.zeros(2, *CACHE)
    blocks, tokens = torch.zeros(BLOCKS, 2, *CACHE[1:]), torch.zeros(BLOCKS, BLOCK, 2, HEADS, DIM)
    return {
        "columns shifted": (wide[..., :DIM], wide[..., 4:], True),
        "rows shifted": (blocks.view(-1, *CACHE[1:])[:BLOCKS], blocks.view(-1, *CACHE[1:])[1 : BLOCKS + 1], True),
        "halves": (pair[0], pair[1], False),
        "a block each in turn": (blocks[:, 0], blocks[:, 1], False),
        "a token each in turn": (tokens[:, :, 0], tokens[:, :, 1], False),
        "columns side by side": (wide[..., :8], wide[..., 8:16], False),
    }


@pytest.mark.parametrize("name", pools())
def test_caches_that_share_elements_are_refused_and_pools_that_interleave_are_not(name: str) -> None:
    k_cache, v_cache, shared = pools()[name]
    k = torch.ones(2, HEADS, k_cache.shape[3])
    slots = torch.tensor([1, 6])
    if not shared:
        pagegen.write_kv(k, k * 2, k_cache, v_cache, slots)
        assert (k_cache.sum(), v_cache.sum()) == (k.sum(), 2 * k.sum())
        return
    with pytest.raises(ValueError, match="v_cache must have memory of its own"):
        pagegen.write_kv(k, k, k_cache, v_cache, slots)
    with pytest.raises(ValueError, match="v_cache must have memory of its own"):
        pagegen.copy_blocks(k_cache, v_cache, [(0, 1)])
    assert not k_cache.any()


def places(tensor: Tensor) -> set[int]:
    steps = itertools.product(*map(range, tensor.shape))
    return {tensor.storage_offset() + sum(map(int.__mul__, step, tensor.stride())) for step in steps}


@settings(max_examples=2 * settings.default.max_examples, deadline=None)
@given(st.data())
def test_sharing_is_what_counting_the_elements_says(data: st.DataObject) -> None:
    sizes = [data.draw(st.integers(1, 4)) for _ in range(3)]
    strides = [1]
    for size in sizes[:-1]:
        strides.append(strides[-1] * size + data.draw(st.integers(0, 4)))
    order = data.draw(st.permutations(range(3)))
    buffer = torch.empty(2000)

    def view() -> Tensor:
        shape = [data.draw(st.integers(1, sizes[i])) for i in order]
        return buffer.as_strided(shape, [strides[i] for i in order], data.draw(st.integers(0, 60)))

    one, other = view(), view()
    assert memory.share_elements(one, other) == bool(places(one) & places(other))
    assert memory.ranges_meet(one, other) == (
        max(min(places(one)), min(places(other))) <= min(max(places(one)), max(places(other)))
    )


@pytest.mark.parametrize("attend", [pagegen.paged_attention, reference_attention])
def test_a_tree_mask_narrower_than_the_longest_query_is_refused_on_the_host(attend: Any) -> None:
    with pytest.raises(ValueError, match=r"tree_mask must have at least 1 columns \(max_query_len\), got"):
        attend(**operands(), tree_mask=torch.ones(3, 0, dtype=torch.bool))
    ragged = operands(q=torch.randn(5, 4, DIM), query_start_loc=STARTS, max_query_len=3)
    with pytest.raises(ValueError, match=r"tree_mask must have at least 3 columns \(max_query_len\), got"):
        attend(**ragged, tree_mask=torch.ones(5, 2, dtype=torch.bool))
    attend(**ragged, tree_mask=torch.ones(5, 3, dtype=torch.bool))


def test_the_reference_sees_the_queries_lengths_where_no_bound_is_given() -> None:
    ragged = operands(q=torch.randn(5, 4, DIM), query_start_loc=STARTS)
    with pytest.raises(ValueError, match=r"tree_mask must have at least 3 columns"):
        reference_attention(**ragged, tree_mask=torch.ones(5, 2, dtype=torch.bool))


TYPES: dict[str, tuple[dict[str, Any], str]] = {
    "window": ({"window": 2.5}, "window must be an integer or None, got float 2.5"),
    "slopes": ({"alibi_slopes": [1.0, 2.0]}, r"alibi_slopes must be a tensor or None, got list \[1.0, 2.0\]"),
    "lengths": ({"seq_lens": [5, 9]}, r"seq_lens must be a tensor, got list \[5, 9\]"),
    "queries": ({"q": [1.0], "k_scale": 1.0}, r"q must be a tensor, got list \[1.0\]"),
    "causal": ({"causal": "yes"}, "causal must be True or False, got str 'yes'"),
    "cap": ({"logit_softcap": "30"}, "logit_softcap must be a number or None, got str '30'"),
    "variant": ({"variant": 3}, "variant must be a string or None, got int 3"),
    "out": ({"out": 3}, "out must be a tensor, got int 3"),
    "scale of k": ({"k_scale": "x"}, "k_scale must be a number, got str 'x'"),
}


@pytest.mark.parametrize("name", TYPES)
def test_a_value_of_a_wrong_type_is_a_type_error_that_names_the_argument(name: str) -> None:
    changes, message = TYPES[name]
    with pytest.raises(TypeError, match=message):
        pagegen.paged_attention(**operands(**changes))


def test_the_other_operators_name_a_value_of_a_wrong_type_too() -> None:
    cache, k = torch.zeros(CACHE), torch.ones(2, HEADS, DIM)
    with pytest.raises(TypeError, match="slot_mapping must be a tensor, got list"):
        pagegen.write_kv(k, k, cache, cache.clone(), [0, 1])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="v_scale must be a number, got str"):
        pagegen.write_kv(k, k, cache, cache.clone(), torch.tensor([0, 1]), v_scale="x")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="v_cache must be a tensor or None, got int 3"):
        pagegen.copy_blocks(cache, 3, [(0, 1)])  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_scale_that_is_no_finite_number_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="k_scale must be finite"):
        pagegen.paged_attention(**operands(k_scale=value))


@pytest.mark.parametrize("groups", ["x", [(3,)], [3], 7, [(1, (0, 1), 2)]])
def test_what_is_no_list_of_groups_is_refused_by_name(groups: Any) -> None:
    values = operands()
    with pytest.raises(TypeError, match=r"prefix_groups must hold \(num_shared_blocks, rows\) pairs, got"):
        pagegen.plan_cascade(groups, values["block_table"], values["seq_lens"], block_size=BLOCK)


def test_infinite_states_outweigh_finite_ones_and_share_alike() -> None:
    outs = torch.tensor([1.0, 5.0, 9.0]).view(3, 1, 1, 1)
    for lses, expected in (((0.0, math.inf, 3.0), 5.0), ((math.inf, -math.inf, math.inf), 5.0), ((math.inf,) * 3, 5.0)):
        merged, lse = pagegen.merge_states(outs, torch.tensor(lses).view(3, 1, 1))
        assert (merged.item(), lse.item()) == (expected, math.inf)


@pytest.mark.parametrize(
    ("prefix_lse", "own_lse", "expected"),
    [(math.inf, 0.0, 2.0), (0.0, math.inf, 4.0), (math.inf, math.inf, 3.0), (-math.inf, 0.0, 4.0), (0.0, 0.0, 3.0)],
)
def test_a_cascade_weighs_infinite_and_empty_states_as_merge_states_does(
    prefix_lse: float, own_lse: float, expected: float
) -> None:
    whole: Any = SimpleNamespace(first_row=0, rows=torch.arange(2))
    prefix = torch.full((2, 1, 3), 2.0), torch.full((2, 1), prefix_lse)
    own = torch.full((2, 1, 3), 4.0), torch.full((2, 1), own_lse)
    outs, lses = (torch.stack(pair) for pair in zip(prefix, own, strict=True))
    wanted, wanted_lse = pagegen.merge_states(outs, lses)
    out, lse = cascade._merge(whole, prefix, own)
    assert (out == expected).all()
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(lse, wanted_lse)
