"""`torch.vmap` over the operators, and gradients, which they refuse."""

from __future__ import annotations

import pytest
import torch

import pagegen

KV_HEADS, DIM, BLOCK = 2, 16, 8


def made(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def caches():
    return made(16, BLOCK, KV_HEADS, DIM, seed=1), made(16, BLOCK, KV_HEADS, DIM, seed=2)


TABLE = torch.tensor([[3, 5], [1, 7], [9, 2]], dtype=torch.int32)
LENS = torch.tensor([5, 16, 9], dtype=torch.int32)


def attend(q, table, lens, k_cache, v_cache, **options):
    return pagegen.paged_attention(q, k_cache, v_cache, table, lens, return_lse=True, **options)


def write(k, *others):
    """A mapped function must return something."""
    pagegen.write_kv(k, *others)
    return k


@pytest.mark.compat("torch", "torch.vmap")
@pytest.mark.parametrize("dims", [(0, None, None), (1, 0, 0), (None, 1, 0), (2, None, 0)])
def test_mapped_queries_tables_and_lengths_are_more_sequences_of_one_call(caches, dims, monkeypatch):
    sizes = {"q": made(4, 3, 4, DIM), "table": TABLE.expand(4, 3, 2).clone(), "lens": LENS.expand(4, 3).clone()}
    sizes["table"][1] = sizes["table"][1].flip(0)
    sizes["lens"][2] -= 1
    whole = [value if d is not None else value[0] for value, d in zip(sizes.values(), dims, strict=True)]
    given = [v if d is None else v.movedim(0, d) for v, d in zip(whole, dims, strict=True)]
    out, lse = torch.vmap(attend, in_dims=(*dims, None, None))(*given, *caches)
    for i in range(4):
        expected = attend(*(v if d is None else v[i] for v, d in zip(whole, dims, strict=True)), *caches)
        torch.testing.assert_close((out[i], lse[i]), expected, rtol=1e-5, atol=1e-6)


def test_caches_and_sinks_may_be_mapped_and_a_ragged_batch_too(caches):
    k_cache, v_cache = (torch.stack([cache, cache.flip(0)]) for cache in caches)
    q, sinks = made(2, 5, 4, DIM), made(2, 4, seed=5)
    starts = torch.tensor([0, 2, 3, 5], dtype=torch.int32)

    def ragged(q, k_cache, v_cache, sinks):
        return attend(q, TABLE, LENS, k_cache, v_cache, query_start_loc=starts, max_query_len=2, sinks=sinks)

    found = torch.vmap(ragged)(q, k_cache, v_cache, sinks)
    for i in range(2):
        torch.testing.assert_close((found[0][i], found[1][i]), ragged(q[i], k_cache[i], v_cache[i], sinks[i]))


@pagegen.mask_mod
def behind_the_sequences_own_number(batch, head, q_pos, k_pos):
    return k_pos >= batch


@pytest.mark.parametrize(
    "options",
    [{"mask_mod": behind_the_sequences_own_number}, {"tree_mask": torch.tensor([[True], [False], [True]])}],
    ids=["a modifier", "a tree mask"],
)
def test_what_counts_sequences_or_queries_counts_those_of_its_own_batch(caches, options):
    q = made(2, 3, 4, DIM)
    found = torch.vmap(lambda q: attend(q, TABLE, LENS, *caches, **options))(q)
    for i in range(2):
        expected = attend(q[i], TABLE, LENS, *caches, **options)
        torch.testing.assert_close((found[0][i], found[1][i]), expected, rtol=1e-5, atol=1e-6)


def test_a_mapped_out_is_written_and_one_for_all_is_refused(caches):
    q, out = made(2, 3, 4, DIM), torch.full((2, 3, 4, DIM), 7.0)
    torch.vmap(lambda q, out: attend(q, TABLE, LENS, *caches, out=out))(q, out)
    torch.testing.assert_close(out[1], attend(q[1], TABLE, LENS, *caches)[0])
    with pytest.raises(ValueError, match="out must be batched as well"):
        torch.vmap(lambda q: attend(q, TABLE, LENS, *caches, out=out[0]))(q)


def test_no_entries_give_an_empty_result_or_an_error_that_says_so(caches):
    none = made(0, 3, 4, DIM)
    assert torch.vmap(lambda q: attend(q, TABLE, LENS, *caches)[0])(none).shape == (0, 3, 4, DIM)
    with pytest.raises(ValueError, match="at least one entry"):
        torch.vmap(lambda q: attend(q, TABLE, LENS, *caches, tree_mask=torch.ones(3, 1, dtype=torch.bool)))(none)


def test_nothing_mapped_at_this_level_is_one_plain_call(caches):
    q, scale = made(3, 4, DIM), made(2, 1)
    found = torch.vmap(lambda s: s + attend(q, TABLE, LENS, *caches)[0].sum())(scale)
    torch.testing.assert_close(found, scale + attend(q, TABLE, LENS, *caches)[0].sum())


def test_maps_may_be_nested(caches):
    q = made(2, 3, 3, 4, DIM)
    found = torch.vmap(torch.vmap(lambda q: attend(q, TABLE, LENS, *caches)[0]))(q)
    expected = torch.stack([torch.stack([attend(x, TABLE, LENS, *caches)[0] for x in row]) for row in q])
    torch.testing.assert_close(found, expected)


def test_mapped_tokens_are_written_at_their_slots(caches):
    k, v, slots = made(2, 3, KV_HEADS, DIM), made(2, 3, KV_HEADS, DIM), torch.tensor([[4, 9, -1], [100, 50, 8]])
    expected = [cache.clone() for cache in caches]
    for i in range(2):
        pagegen.write_kv(k[i], v[i], *expected, slots[i])
    torch.vmap(lambda k, v, slots: write(k, v, *caches, slots))(k, v, slots)
    assert all(torch.equal(one, other) for one, other in zip(caches, expected, strict=True))


def test_mapped_caches_are_each_written(caches):
    k_cache, v_cache = (torch.stack([cache, cache.clone()]) for cache in caches)
    k, slots = made(2, 1, KV_HEADS, DIM), torch.tensor([3])
    torch.vmap(lambda k, kc, vc: write(k, k, kc, vc, slots))(k, k_cache, v_cache)
    assert torch.equal(k_cache[:, 0, 3], k[:, 0]) and torch.equal(v_cache[:, 0, 3], k[:, 0])


def test_tokens_that_would_all_be_written_to_one_slot_are_refused(caches):
    k = made(2, 1, KV_HEADS, DIM)
    with pytest.raises(ValueError, match="k_cache must be batched as well"):
        torch.vmap(lambda k: write(k, k, *caches, torch.tensor([3])))(k)


def test_rotations_and_merges_may_be_mapped(caches):
    q, k, positions = made(2, 3, 4, DIM), made(2, 3, KV_HEADS, DIM), torch.tensor([[0, 1, 2], [5, 6, 7]])
    k_cache, v_cache = (torch.stack([cache, cache.clone()]) for cache in caches)
    expected = [[k_cache[i].clone(), v_cache[i].clone()] for i in range(2)]
    cos, sin, slots = made(16, DIM // 2), made(16, DIM // 2, seed=3), torch.tensor([0, 1, 2])

    def rotate(q, k, positions, k_cache, v_cache):
        return pagegen.rope_write_kv(q, k, k, positions, cos, sin, k_cache, v_cache, slots)

    found = torch.vmap(rotate)(q, k, positions, k_cache, v_cache)
    for i in range(2):
        torch.testing.assert_close(found[i], rotate(q[i], k[i], positions[i], *expected[i]))
        assert torch.equal(k_cache[i], expected[i][0])
    outs, lses = made(2, 3, 5, 4, DIM), made(2, 3, 5, 4)
    merged = torch.vmap(pagegen.merge_states)(outs, lses)
    torch.testing.assert_close(merged[0][1], pagegen.merge_states(outs[1], lses[1])[0])


@pytest.mark.compat("torch", "autograd: refused by name")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_what_wants_a_gradient_is_refused_by_name_and_runs_without(caches, compiled):
    weight = torch.nn.Parameter(made(DIM, DIM))

    def step(q):
        return attend(q @ weight, TABLE, LENS, *caches)[0]

    torch._dynamo.reset()
    run = torch.compile(step, fullgraph=True, backend="aot_eager") if compiled else step
    with pytest.raises(RuntimeError, match="q must not require gradients"):
        run(made(3, 4, DIM))
    with torch.no_grad():
        torch.testing.assert_close(run(made(3, 4, DIM)), step(made(3, 4, DIM)))


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_a_cache_that_wants_a_gradient_is_refused_by_name(caches, name):
    given = dict(zip(("k_cache", "v_cache"), caches, strict=True))
    given[name].requires_grad_()
    with pytest.raises(RuntimeError, match=f"{name} must not require gradients"):
        attend(made(3, 4, DIM), TABLE, LENS, **given)


def test_keys_that_want_a_gradient_are_not_written(caches):
    before = caches[0].clone()
    k = made(1, KV_HEADS, DIM).requires_grad_()
    with pytest.raises(RuntimeError, match="k must not require gradients"):
        pagegen.write_kv(k, k, *caches, torch.tensor([3]))
    assert torch.equal(caches[0], before)
