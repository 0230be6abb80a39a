"""A quantised `PagedKVCache`: what it holds beside its blocks goes where they go."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch
from torch import Tensor

import pagegen

HEADS, DIM, BLOCK = 2, 32, 8
# dtype, zero points
HELD = [
    ("float8_e4m3fn", False),
    ("float8_e5m2", False),
    ("int8", False),
    ("int8", True),
    ("int4", False),
    ("int4", True),
]


def make(dtype: str, zeros: bool, **options: Any) -> pagegen.PagedKVCache:
    return pagegen.PagedKVCache(
        2, 12, pagegen.CacheLayout(block_size=BLOCK, order=options.pop("order", "NHD")), HEADS, DIM, dtype=dtype,
        kv_scale_granularity="token_head", kv_zero_points=zeros, **options,
    )  # fmt: skip


def rows(tokens: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """Keys and values of tokens in a layer, whatever is around them, of magnitudes that differ a hundredfold."""
    each = []
    for token in tokens.tolist():
        generator = torch.Generator().manual_seed(1000 * layer + token)
        each.append(torch.randn(2, HEADS, DIM, generator=generator) * 10.0 ** (token % 3 - 1))
    k, v = torch.stack(each, 1)
    return k, v


def compute(cache: pagegen.PagedKVCache, *names: Hashable) -> None:
    """A step: every token not yet computed is quantised and written, in every layer."""
    write(cache, cache.batch(names))


def compute_each(both: pagegen.GroupedKVCache, *names: Hashable) -> None:
    for cache, batch in zip(both.caches, both.batch(names), strict=True):
        write(cache, batch)


def write(cache: pagegen.PagedKVCache, batch: pagegen.Batch) -> None:
    for layer in range(cache.num_layers):
        k, v = rows(batch.input_ids, layer)
        k_cache, v_cache, how = cache.k_cache(layer), cache.v_cache(layer), cache.quantisation(layer)
        pagegen.update_scales(k, v, batch.slot_mapping, **how)
        pagegen.write_kv(k, v, k_cache, v_cache, batch.slot_mapping, **how)


def attended(cache: pagegen.PagedKVCache, name: Hashable, layer: int) -> Tensor:
    q = torch.randn(1, 4, DIM, generator=torch.Generator().manual_seed(5))
    table = torch.tensor([cache.block_ids(name)], dtype=torch.int32)
    lengths = torch.tensor([cache.length(name)], dtype=torch.int32)
    return pagegen.paged_attention(
        q, cache.k_cache(layer), cache.v_cache(layer), table, lengths, **cache.quantisation(layer)
    )


def alone(dtype: str, zeros: bool, tokens: list[int], layer: int) -> Tensor:
    """What a cache gives that holds these tokens and never held others."""
    cache = make(dtype, zeros)
    cache.add("a", tokens)
    compute(cache, "a")
    return attended(cache, "a", layer)


@pytest.mark.parametrize(("dtype", "zeros"), HELD)
@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_a_copied_block_takes_its_scales_along(dtype: str, zeros: bool, order: str) -> None:
    cache = make(dtype, zeros, order=order)
    cache.add("parent", range(12))
    compute(cache, "parent")
    cache.fork("parent", "child")
    cache.append("child", [50, 51])  # copies the second block, half full
    compute(cache, "child")
    cache.append("parent", [60])
    compute(cache, "parent")
    for layer in range(2):
        for name, last in (("child", [50, 51]), ("parent", [60])):
            assert attended(cache, name, layer).equal(alone(dtype, zeros, [*range(12), *last], layer))


@pytest.mark.parametrize(("dtype", "zeros"), HELD)
def test_what_is_swapped_out_comes_back_with_its_scales(dtype: str, zeros: bool) -> None:
    cache = make(dtype, zeros, num_host_blocks=4, prefix_caching=False)
    cache.add("a", range(20))
    compute(cache, "a")
    before = [attended(cache, "a", layer) for layer in range(2)]
    cache.swap_out("a")
    cache.add("b", range(100, 196))  # all blocks: scales too
    compute(cache, "b")
    cache.free("b")
    cache.swap_in("a")
    assert all(attended(cache, "a", layer).equal(before[layer]) for layer in range(2))


def test_a_shared_prefix_is_read_with_the_scales_of_who_wrote_it() -> None:
    cache = make("int8", True)
    cache.add("a", range(16))
    compute(cache, "a")
    cache.free("a")
    assert cache.add("b", range(20)) == 16
    compute(cache, "b")
    assert attended(cache, "b", 1).equal(alone("int8", True, list(range(20)), 1))


@pytest.mark.parametrize(("dtype", "zeros"), HELD)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_a_copy_of_a_cache_has_scales_of_its_own(dtype: str, zeros: bool, copied: Callable[..., Any]) -> None:
    cache = make(dtype, zeros)
    cache.add("a", range(12))
    compute(cache, "a")
    other = copied(cache)
    cache.quantisation(0)["k_scale"].fill_(7.0)
    assert attended(other, "a", 0).equal(alone(dtype, zeros, list(range(12)), 0))
    other.append("a", [12])
    compute(other, "a")
    assert attended(other, "a", 0).equal(alone(dtype, zeros, list(range(13)), 0))


def test_a_layer_is_compiled_with_what_it_holds() -> None:
    cache = make("int4", True)
    cache.add("a", range(12))
    batch = cache.batch(["a"])
    k, v = rows(batch.input_ids, 1)
    q = torch.randn(12, 4, DIM)

    @torch.compile(fullgraph=True)
    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k_cache, v_cache, how = cache.k_cache(1), cache.v_cache(1), cache.quantisation(1)
        pagegen.update_scales(k, v, batch.slot_mapping, **how)
        pagegen.write_kv(k, v, k_cache, v_cache, batch.slot_mapping, **how)
        return pagegen.paged_attention(
            q, k_cache, v_cache, batch.block_table, batch.seq_lens, query_start_loc=batch.query_start_loc, **how
        )

    found = layer(q, k, v)
    k_cache, v_cache, how = cache.k_cache(1), cache.v_cache(1), cache.quantisation(1)
    wanted = pagegen.reference_attention(
        q, k_cache, v_cache, batch.block_table, batch.seq_lens, query_start_loc=batch.query_start_loc, **how
    )
    torch.testing.assert_close(found, wanted.to(found.dtype), atol=1e-4, rtol=1e-4)


def test_groups_of_layers_take_their_scales_along() -> None:
    caches = [make("int8", True), make("int4", False, order="HND")]
    both = pagegen.GroupedKVCache(caches)
    both.add("parent", range(12))
    compute_each(both, "parent")
    both.fork("parent", "child")
    both.append("child", [50])
    compute_each(both, "child")
    for cache, (dtype, zeros) in zip(caches, [("int8", True), ("int4", False)], strict=True):
        assert attended(cache, "child", 1).equal(alone(dtype, zeros, [*range(12), 50], 1))


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_scales_are_float32_whatever_torch_makes_by_default(default: torch.dtype) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        how = make("int8", True).quantisation(0)
    finally:
        torch.set_default_dtype(before)
    assert all(how[name].dtype == torch.float32 for name in ("k_scale", "v_scale", "k_zero", "v_zero"))


def test_what_a_cache_holds() -> None:
    plain = pagegen.PagedKVCache(1, 4, pagegen.CacheLayout(block_size=BLOCK), HEADS, DIM, kv_scale_granularity="none")
    assert plain.quantisation(0) == {}
    bare = pagegen.PagedKVCache(1, 4, pagegen.CacheLayout(block_size=BLOCK), HEADS, DIM, dtype="int8")
    assert bare.quantisation(0) == {"kv_dtype": "int8"}
    packed = make("int4", True)
    assert packed.k_cache(0).shape == (12, BLOCK, HEADS, DIM // 2) and packed.k_cache(0).dtype == torch.uint8
    packed.quantisation(1)["k_scale"].fill_(3.0)
    assert not packed.quantisation(0)["k_scale"].any()  # every layer has its own
    how = packed.quantisation(1)
    assert set(how) == {"kv_dtype", "k_scale", "v_scale", "k_zero", "v_zero"}
    assert all(how.pop(name).shape == (12, BLOCK, HEADS) for name in ("k_scale", "v_scale", "k_zero", "v_zero"))
    assert how == {"kv_dtype": "int4"}
    with pytest.raises(ValueError, match="layer must be below"):
        packed.quantisation(2)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"dtype": "bfloat16", "kv_scale_granularity": "token_head"}, "kv_scale_granularity must be none .* bfloat16"),
        ({"dtype": "int8", "kv_scale_granularity": "block"}, "kv_scale_granularity must be one of"),
        ({"dtype": "int8", "kv_scale_granularity": "head"}, "kv_scale_granularity must be none or token_head .* head"),
        ({"dtype": "float8_e4m3fn", "kv_scale_granularity": "token_head", "kv_zero_points": True},
         "kv_zero_points must be False .* float8_e4m3fn"),
        ({"dtype": "int8", "kv_zero_points": True}, "kv_zero_points must be False .* none"),
        ({"dtype": "int8", "kv_zero_points": 1}, "kv_zero_points must be"),
        ({"dtype": "int4", "head_dim": 31}, "head_dim must be even .* got 31"),
        ({"dtype": "int4", "v_head_dim": 15}, "v_head_dim must be even .* got 15"),
    ],
)  # fmt: skip
def test_what_no_cache_can_hold_is_refused_by_name(options: dict[str, Any], told: str) -> None:
    given = {"head_dim": DIM, **options}
    with pytest.raises((TypeError, ValueError), match=told):
        pagegen.PagedKVCache(1, 4, pagegen.CacheLayout(block_size=BLOCK), HEADS, **given)
