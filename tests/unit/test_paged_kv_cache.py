"""The tensors behind the blocks, and the inputs of a step."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import pagegen
from pagegen import CacheLayout, OutOfBlocks, PagedKVCache
from pagegen.cache import Batch

SIZE, HEADS, DIM, V_DIM = 4, 2, 8, 6


def make(num_blocks=16, layers=2, order="NHD", **options):
    options = {"dtype": torch.float32, "v_head_dim": V_DIM, **options}
    return PagedKVCache(layers, num_blocks, CacheLayout(block_size=SIZE, order=order), HEADS, DIM, **options)


def write(cache, batch, seed=0):
    """Stores random keys and values for a batch's queries; what a token gets depends on all tokens up to it."""
    generator = torch.Generator().manual_seed(seed)
    for layer in range(cache.num_layers):
        k = torch.randn(len(batch.slot_mapping), HEADS, DIM, generator=generator)
        v = torch.randn(len(batch.slot_mapping), HEADS, V_DIM, generator=generator)
        torch.ops.pagegen.write_kv(k, v, cache.k_cache(layer), cache.v_cache(layer), batch.slot_mapping)


def contents(cache, seq_id):
    """Keys and values of a sequence's computed tokens in every layer."""
    blocks, length = torch.tensor(cache.block_ids(seq_id), dtype=torch.long), cache.computed(seq_id)
    views = [view(layer) for layer in range(cache.num_layers) for view in (cache.k_cache, cache.v_cache)]
    return [view[blocks].flatten(0, 1)[:length].clone() for view in views]


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", ["float32", torch.bfloat16, "float8_e4m3fn", "int8"])
def test_every_layer_is_a_view_of_the_zeroed_pools_of_keys_and_of_values(order, dtype):
    cache = make(order=order, dtype=dtype)
    for layer in range(2):
        for view, dim, pool in zip(
            (cache.k_cache(layer), cache.v_cache(layer)), (DIM, V_DIM), cache.pools, strict=True
        ):
            assert view.shape == (16, SIZE, HEADS, dim) and view.stride(-1) == 1 and view.dtype == cache.dtype
            assert view.stride(2) == (dim if order == "NHD" else dim * SIZE)
            assert view.untyped_storage().data_ptr() == pool.untyped_storage().data_ptr()
            assert not view.float().any()
    assert cache.k_cache(1) is cache.k_cache(1)
    for pool in cache.pools:
        pool.view(torch.uint8).fill_(1)
    assert all(
        (view(layer).view(torch.uint8) == 1).all() for layer in range(2) for view in (cache.k_cache, cache.v_cache)
    )


def test_no_two_layers_nor_keys_and_values_overlap():
    cache = make(num_blocks=3, layers=3)
    views = [view(layer) for layer in range(3) for view in (cache.k_cache, cache.v_cache)]
    for number, view in enumerate(views, 1):
        assert not view.any()
        view.fill_(number)
    assert [int(view.unique()) for view in views] == [1, 2, 3, 4, 5, 6]


def test_the_value_width_defaults_to_the_key_width():
    assert make(v_head_dim=None).v_cache(0).shape[-1] == DIM


def test_a_batch_holds_what_the_kernels_need():
    cache = make()
    cache.add("a", range(10, 16))
    cache.add("b", [7])
    batch = cache.batch(["b", "a"])
    assert isinstance(batch, Batch)
    (b,), (a0, a1) = cache.block_ids("b"), cache.block_ids("a")
    assert batch.block_table.tolist() == [[b, 0], [a0, a1]]
    assert batch.seq_lens.tolist() == [1, 6] and batch.query_start_loc.tolist() == [0, 1, 7]
    assert batch.positions.tolist() == [0, 0, 1, 2, 3, 4, 5]
    assert batch.input_ids.tolist() == [7, 10, 11, 12, 13, 14, 15]
    assert batch.slot_mapping.tolist() == [4 * b, *range(4 * a0, 4 * a0 + 4), 4 * a1, 4 * a1 + 1]
    assert (batch.max_query_len, batch.max_seq_len, batch.prefix_groups) == (6, 6, ())
    for tensor in (batch.block_table, batch.seq_lens, batch.query_start_loc):
        assert tensor.dtype == torch.int32 and tensor.is_contiguous()
    for tensor in (batch.slot_mapping, batch.positions, batch.input_ids):
        assert tensor.dtype == torch.int64
    pagegen.validate_batch(
        cache.k_cache(0), batch.block_table, batch.seq_lens, query_start_loc=batch.query_start_loc,
        slot_mapping=batch.slot_mapping, total_q=7, max_query_len=6, max_seq_len=6,
    )  # fmt: skip


def test_chunked_prefill_takes_the_first_queries_and_leaves_the_rest():
    cache = make()
    cache.add("a", range(10))
    cache.add("b", range(50, 53))
    first = cache.batch(["a", "b"], query_lens=[6, 0])
    assert first.seq_lens.tolist() == [6, 0] and first.positions.tolist() == list(range(6))
    assert first.block_table.shape == (2, 2) and first.query_start_loc.tolist() == [0, 6, 6]
    rest = cache.batch(["a", "b"])
    assert rest.seq_lens.tolist() == [10, 3] and rest.positions.tolist() == [6, 7, 8, 9, 0, 1, 2]
    done = cache.batch(["a"])
    assert (done.max_query_len, done.max_seq_len, done.slot_mapping.tolist()) == (0, 10, [])


def test_after_a_hit_only_the_uncached_tokens_are_queries():
    cache = make()
    cache.add("a", range(9))
    cache.batch(["a"])
    assert cache.add("b", [*range(8), 90, 91]) == 8
    batch = cache.batch(["b"])
    assert batch.positions.tolist() == [8, 9] and batch.input_ids.tolist() == [90, 91]
    assert batch.block_table[0, :2].tolist() == cache.block_ids("a")[:2]


def test_a_sequence_added_before_its_twin_was_batched_shares_nothing():
    cache = make()
    cache.add("a", range(9))
    assert cache.add("b", range(9)) == 0
    batch = cache.batch(["a", "b"])
    assert len(set(batch.slot_mapping.tolist())) == 18 and batch.prefix_groups == ()
    cache.check_invariants()


def test_appended_tokens_are_the_next_queries():
    cache = make()
    cache.add("a", range(3))
    cache.batch(["a"])
    cache.append("a", [3, 4])
    batch = cache.batch(["a"])
    assert batch.positions.tolist() == [3, 4] and batch.seq_lens.tolist() == [5]
    assert batch.slot_mapping.tolist() == [4 * cache.block_ids("a")[0] + 3, 4 * cache.block_ids("a")[1]]


@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int8"])
def test_copy_on_write_copies_keys_and_values_in_every_layer(order, dtype):
    cache = make(order=order, dtype=dtype, layers=3)
    cache.add("parent", range(6))
    cache.batch(["parent"])
    generator = torch.Generator().manual_seed(1)
    for pool in cache.pools:
        pool.copy_(torch.randint(0, 100, (pool.numel(),), generator=generator).to(torch.float32).to(cache.dtype))
    before = [view.float() for view in contents(cache, "parent")]
    cache.fork("parent", "child")
    cache.append("child", [60])
    cache.batch(["child"])
    assert cache.block_ids("child")[1] != cache.block_ids("parent")[1]
    after = [view.float()[:6] for view in contents(cache, "child")]
    assert same(before, after) and same(before, [view.float() for view in contents(cache, "parent")])


def test_both_ends_of_a_fork_append_without_disturbing_each_other():
    cache = make()
    cache.add("parent", range(6))
    write(cache, cache.batch(["parent"]))
    cache.fork("parent", "child")
    kept = contents(cache, "parent")
    for step in range(4):
        cache.append("parent", [step])
        cache.append("child", [50 + step])
        write(cache, cache.batch(["parent", "child"]), seed=step + 1)
        cache.check_invariants()
    for seq_id in ("parent", "child"):
        assert same(kept, [view[:6] for view in contents(cache, seq_id)])
    assert not same(contents(cache, "parent"), contents(cache, "child"))


def test_truncating_into_a_shared_block_keeps_both_sides():
    cache = make()
    cache.add("parent", range(8))
    write(cache, cache.batch(["parent"]))
    cache.fork("parent", "child")
    kept = contents(cache, "parent")
    cache.truncate("child", 6)
    cache.append("child", [60, 61])
    write(cache, cache.batch(["child"]), seed=1)
    assert same(kept, contents(cache, "parent"))
    assert same([view[:6] for view in kept], [view[:6] for view in contents(cache, "child")])
    assert not same(kept, contents(cache, "child"))


def test_a_fork_of_uncomputed_tokens_computes_them_in_its_own_blocks():
    cache = make()
    cache.add("parent", range(10))
    write(cache, cache.batch(["parent"], query_lens=[6]))
    cache.fork("parent", "child")
    kept = contents(cache, "parent")
    batch = cache.batch(["parent", "child"])
    assert len(set(batch.slot_mapping.tolist())) == 8 and batch.prefix_groups == ((1, (0, 1)),)
    write(cache, batch, seed=1)
    for seq_id in ("parent", "child"):
        assert same(kept, [view[:6] for view in contents(cache, seq_id)])
    cache.check_invariants()


def test_prefix_groups_name_rows_that_share_leading_blocks():
    cache = make(num_blocks=32)
    cache.add("a", [*range(8), 1])
    cache.add("x", [*range(100, 105)])
    cache.batch(["a", "x"])
    cache.add("b", [*range(8), 2, 3])
    cache.add("c", [*range(4), 9])
    cache.fork("x", "y")
    for seq_id in "axy":
        cache.append(seq_id, [7])
    batch = cache.batch(["x", "a", "b", "y"])
    assert batch.prefix_groups == ((1, (0, 3)), (2, (1, 2)))
    cache.append("a", [7])
    assert cache.batch(["a", "c"]).prefix_groups == ((1, (0, 1)),)


def test_blocks_that_a_query_stands_in_are_no_shared_prefix():
    cache = make()
    cache.add("a", range(8))
    cache.batch(["a"])
    cache.fork("a", "b")
    cache.truncate("b", 5)
    cache.append("a", [8])
    assert cache.batch(["a", "b"]).prefix_groups == ((1, (0, 1)),)


def test_attention_over_shared_blocks_equals_attention_over_a_cache_of_its_own():
    torch.manual_seed(0)
    tokens, keys, values = [*range(11)], torch.randn(11, HEADS, DIM), torch.randn(11, HEADS, V_DIM)
    alone, crowded = make(prefix_caching=False), make(order="HND")
    crowded.add("first", [*tokens[:8], 99])
    batch = crowded.batch(["first"])
    torch.ops.pagegen.write_kv(
        torch.cat([keys[:8], keys[:1]]), torch.cat([values[:8], values[:1]]), crowded.k_cache(1), crowded.v_cache(1),
        batch.slot_mapping,
    )  # fmt: skip
    crowded.free("first")
    results = []
    for cache, cached in ((alone, 0), (crowded, 8)):
        assert cache.add("s", tokens) == cached
        batch = cache.batch(["s"])
        torch.ops.pagegen.write_kv(
            keys[batch.positions], values[batch.positions], cache.k_cache(1), cache.v_cache(1), batch.slot_mapping
        )
        q = torch.randn(11, 4, DIM, generator=torch.Generator().manual_seed(3))[batch.positions]
        out = pagegen.reference_attention(
            q, cache.k_cache(1), cache.v_cache(1), batch.block_table, batch.seq_lens,
            query_start_loc=batch.query_start_loc,
        )  # fmt: skip
        results.append(out[-3:])
    assert torch.equal(*results)


@pytest.mark.parametrize(
    "tokens",
    [
        torch.arange(6),
        torch.arange(6, dtype=torch.int32),
        torch.arange(12)[::2],
        np.arange(6),
        np.arange(6, dtype=np.uint8),
        range(6),
        (0, 1, 2, 3, 4, 5),
    ],
    ids=lambda tokens: type(tokens).__name__,
)
def test_tokens_may_be_tensors_arrays_or_sequences(tokens):
    cache = make()
    cache.add("a", tokens)
    cache.append("a", tokens[:2])
    expected = [int(token) for token in tokens]
    assert cache.batch(["a"]).input_ids.tolist() == expected + expected[:2]
    assert cache.can_admit(len(tokens), tokens=tokens)


@pytest.mark.parametrize(
    ("tokens", "error"),
    [
        (torch.tensor([[1, 2]]), TypeError),
        (torch.tensor([1.0]), TypeError),
        (torch.tensor([True]), TypeError),
        (torch.tensor(3), TypeError),
        (torch.tensor([1, -5]), ValueError),
        (np.array([2**32]), ValueError),
        ([[1, 2]], TypeError),
    ],
)
def test_wrong_tokens_are_refused_by_name(tokens, error):
    cache = make()
    with pytest.raises(error, match="tokens"):
        cache.add("a", tokens)
    assert cache.stats().num_sequences == 0


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda c: c.batch([]), ValueError, "at least one"),
        (lambda c: c.batch(["a", "a"]), ValueError, "'a' twice"),
        (lambda c: c.batch(["a", "nobody"]), KeyError, "nobody"),
        (lambda c: c.batch(["a"], query_lens=[7]), ValueError, r"0\.\.6 .* for 'a', got 7"),
        (lambda c: c.batch(["a"], query_lens=[-1]), ValueError, "query_lens"),
        (lambda c: c.batch(["a"], query_lens=[1, 2]), ValueError, "one entry a sequence"),
        (lambda c: c.batch(["a"], query_lens=[1.0]), TypeError, "query_lens"),
        (lambda c: c.k_cache(2), ValueError, "layer must be below num_layers 2"),
        (lambda c: c.v_cache(-1), ValueError, "layer"),
    ],
)
def test_wrong_arguments_change_nothing(call, error, says):
    cache = make()
    cache.add("a", range(6))
    with pytest.raises(error, match=says):
        call(cache)
    assert cache.computed("a") == 0


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"layers": 0}, ValueError, "num_layers"),
        ({"num_blocks": 0}, ValueError, "num_blocks"),
        ({"v_head_dim": 0}, ValueError, "v_head_dim"),
        ({"dtype": torch.int64}, ValueError, "dtype"),
        ({"watermark": 17}, ValueError, "watermark"),
    ],
)
def test_wrong_construction_is_refused_by_name(changes, error, says):
    with pytest.raises(error, match=says):
        make(**changes)
    with pytest.raises(TypeError, match="layout must be a CacheLayout"):
        PagedKVCache(1, 1, 16, 1, 1)


def test_a_step_that_lacks_blocks_for_its_copies_changes_nothing():
    cache = make(num_blocks=2)
    cache.add("parent", range(6))
    cache.fork("parent", "child")
    with pytest.raises(OutOfBlocks) as error:
        cache.batch(["child"])
    assert (error.value.needed, error.value.free) == (2, 0)
    assert cache.computed("child") == 0 and cache.block_ids("child") == cache.block_ids("parent")


def test_hundreds_of_sequences_in_one_batch_agree_with_a_plain_loop():
    cache = make(num_blocks=4000, layers=1, dtype=torch.bfloat16)
    lengths = [1 + (37 * i) % 50 for i in range(300)]
    for i, length in enumerate(lengths):
        cache.add(i, [i] * length)
    batch = cache.batch(range(300))
    slots = [cache.block_ids(i)[p // SIZE] * SIZE + p % SIZE for i, n in enumerate(lengths) for p in range(n)]
    assert batch.slot_mapping.tolist() == slots
    assert batch.positions.tolist() == [p for n in lengths for p in range(n)]
    assert batch.input_ids.tolist() == [i for i, n in enumerate(lengths) for _ in range(n)]
    assert all(batch.block_table[i, : -(-n // SIZE)].tolist() == cache.block_ids(i) for i, n in enumerate(lengths))
