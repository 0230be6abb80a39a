"""flash-attn's functions against attention written out, with their own masks and layouts."""

from __future__ import annotations

import math

import pytest
import torch

from pagegen.integrations.flash_attn_compat import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)

HEADS, KV_HEADS, DIM = 4, 2, 16


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def by_definition(q, k, v, *, causal=False, left=-1, softcap=0.0, slopes=None, sinks=None, scale=None):
    """One sequence: q [Sq, H, D], k and v [Sk, Hkv, D]; out and lse [H, Sq] in float64."""
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
    scores = q @ k.transpose(1, 2) * (scale or 1 / math.sqrt(q.shape[-1]))
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    rows = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
    columns = torch.arange(k.shape[1])
    if slopes is not None:
        scores = scores - slopes.double()[:, None, None] * (rows - columns)
    if causal:
        scores = scores.masked_fill(columns > rows, -math.inf)
    if left >= 0:
        scores = scores.masked_fill(columns < rows - left, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)], 2)
        v = torch.cat([v, v.new_zeros(len(v), 1, v.shape[2])], 1)
    lse = scores.logsumexp(2)
    weights = torch.nan_to_num((scores - lse[..., None]).exp())
    return (weights @ v).transpose(0, 1).float(), lse.float()


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6)


OPTIONS = {
    "plain": ({}, {}),
    "causal": ({"causal": True}, {"causal": True}),
    "window": ({"causal": True, "window_size": (5, 5)}, {"causal": True, "left": 5}),
    "window to the query": ({"window_size": (3, 0)}, {"causal": True, "left": 3}),
    "soft cap and scale": ({"softcap": 2.0, "softmax_scale": 0.5}, {"softcap": 2.0, "scale": 0.5}),
    "alibi": ({"causal": True, "alibi_slopes": draw(HEADS, seed=7)}, {"causal": True, "slopes": draw(HEADS, seed=7)}),
    "sinks": ({"causal": True, "s_aux": draw(HEADS, seed=8)}, {"causal": True, "sinks": draw(HEADS, seed=8)}),
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (1, 33), (5, 48), (9, 4)])
def test_the_dense_function_means_what_flash_attns_does(name, queries, keys):
    given, meant = OPTIONS[name]
    q, k, v = (draw(2, n, h, DIM, seed=n) for n, h in ((queries, HEADS), (keys, KV_HEADS), (keys, KV_HEADS)))
    out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True, **given)
    for i in range(2):
        expected = by_definition(q[i], k[i], v[i], **meant)
        close(out[i], expected[0])
        close(lse[i], expected[1])
    assert torch.equal(flash_attn_func(q, k, v, **given), out)


@pytest.mark.parametrize("name", OPTIONS)
def test_sequences_of_different_lengths_do_not_see_each_other(name):
    given, meant = OPTIONS[name]
    lengths_q, lengths_k = [3, 1, 8, 2], [3, 40, 21, 16]
    starts_q, starts_k = (torch.tensor([0, *n]).cumsum(0).int() for n in (lengths_q, lengths_k))
    q, k, v = draw(14 + 2, HEADS, DIM), draw(80 + 3, KV_HEADS, DIM, seed=1), draw(80 + 3, KV_HEADS, DIM, seed=2)
    k[80:], v[80:] = math.nan, math.nan  # rows behind the last sequence are nobody's
    out, lse, _ = flash_attn_varlen_func(
        q, k, v, starts_q, starts_k, 8, torch.tensor(40), return_attn_probs=True, **given
    )  # fmt: skip
    for i in range(4):
        rows, keys = slice(starts_q[i], starts_q[i + 1]), slice(starts_k[i], starts_k[i + 1])
        expected = by_definition(q[rows], k[keys], v[keys], **meant)
        close(out[rows], expected[0])
        close(lse[:, rows], expected[1])
    assert not out[14:].any()


def test_keys_may_lie_in_blocks():
    k, v = draw(6, 8, KV_HEADS, DIM, seed=1), draw(6, 8, KV_HEADS, DIM, seed=2)
    table = torch.tensor([[4, 1], [0, 5]], dtype=torch.int32)
    starts_q, starts_k = torch.tensor([0, 3, 4]).int(), torch.tensor([0, 11, 24]).int()
    q = draw(4, HEADS, DIM)
    out = flash_attn_varlen_func(q, k, v, starts_q, starts_k, 3, 13, causal=True, block_table=table)
    for i, length in enumerate((11, 13)):
        rows = slice(starts_q[i], starts_q[i + 1])
        keys, values = (x[table[i].long()].flatten(0, 1)[:length] for x in (k, v))
        close(out[rows], by_definition(q[rows], keys, values, causal=True)[0])


@pytest.mark.parametrize("paged", [True, False], ids=["blocks", "rows"])
@pytest.mark.parametrize("new", [1, 4])
def test_a_step_is_written_behind_what_is_cached_and_attended(paged, new):
    before = torch.tensor([5, 16, 23], dtype=torch.int32)
    if paged:
        k_cache, v_cache = draw(12, 8, KV_HEADS, DIM, seed=1), draw(12, 8, KV_HEADS, DIM, seed=2)
        table = torch.randperm(12, generator=torch.Generator().manual_seed(0)).view(3, 4).int()
        where = {"block_table": table}
        rows = [k_cache[table[i].long()].flatten(0, 1) for i in range(3)]
        values = [v_cache[table[i].long()].flatten(0, 1) for i in range(3)]
    else:
        k_cache, v_cache = draw(5, 28, KV_HEADS, DIM, seed=1), draw(5, 28, KV_HEADS, DIM, seed=2)
        where = {"cache_batch_idx": torch.tensor([4, 0, 2])}
        rows, values = ([cache[i].clone() for i in (4, 0, 2)] for cache in (k_cache, v_cache))
    q = draw(3, new, HEADS, DIM)
    k, v = draw(3, new, KV_HEADS, DIM, seed=5), draw(3, new, KV_HEADS, DIM, seed=6)
    out, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=before, causal=True, return_softmax_lse=True, **where
    )  # fmt: skip
    for i, length in enumerate(before.tolist()):
        keys, vals = torch.cat([rows[i][:length], k[i]]), torch.cat([values[i][:length], v[i]])
        expected = by_definition(q[i], keys, vals, causal=True)
        close(out[i], expected[0])
        close(lse[i], expected[1])


@pytest.mark.parametrize("interleaved", [False, True])
def test_queries_and_keys_are_rotated_at_their_positions(interleaved):
    k_cache, v_cache = draw(2, 16, KV_HEADS, DIM, seed=1), draw(2, 16, KV_HEADS, DIM, seed=2)
    before, angles = torch.tensor([3, 9]), draw(16, DIM // 4, seed=9)
    q, k, v = draw(2, 2, HEADS, DIM), draw(2, 2, KV_HEADS, DIM, seed=5), draw(2, 2, KV_HEADS, DIM, seed=6)

    def rotated(x, i):
        cos, sin = (f(angles[before[i] : before[i] + 2])[:, None] for f in (torch.cos, torch.sin))
        turn, rest = x[..., : DIM // 2], x[..., DIM // 2 :]
        a, b = (turn[..., ::2], turn[..., 1::2]) if interleaved else turn.chunk(2, -1)
        pairs = (a * cos - b * sin, a * sin + b * cos)
        return torch.cat([torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1), rest], -1)

    old = [cache.clone() for cache in (k_cache, v_cache)]
    out = flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, angles.cos(), angles.sin(), before, causal=True, rotary_interleaved=interleaved
    )  # fmt: skip
    for i, length in enumerate(before.tolist()):
        keys = torch.cat([old[0][i, :length], rotated(k[i], i)])
        close(out[i], by_definition(rotated(q[i], i), keys, torch.cat([old[1][i, :length], v[i]]), causal=True)[0])


def test_without_new_keys_the_whole_cache_is_attended_unless_lengths_say_less():
    q, k, v = draw(2, 1, HEADS, DIM), draw(2, 12, KV_HEADS, DIM, seed=1), draw(2, 12, KV_HEADS, DIM, seed=2)
    close(flash_attn_with_kvcache(q, k, v)[1], by_definition(q[1], k[1], v[1])[0])
    close(flash_attn_with_kvcache(q, k, v, cache_seqlens=7)[0], by_definition(q[0], k[0, :7], v[0, :7])[0])


Q, K = draw(2, 2, HEADS, DIM), draw(2, 16, KV_HEADS, DIM)
STARTS = torch.tensor([0, 5])


def packed(starts_q, starts_k, longest_q, longest_k):
    keys = draw(5, KV_HEADS, DIM)
    return flash_attn_varlen_func(draw(3, HEADS, DIM), keys, keys, starts_q, starts_k, longest_q, longest_k)


REFUSALS = {
    "dropout_p must be 0": lambda: flash_attn_func(Q, K, K, 0.1),
    r"window_size must be .* got \(4, 4\)": lambda: flash_attn_func(Q, K, K, window_size=(4, 4)),
    r"window_size must be .* got \(-1, 2\)": lambda: flash_attn_func(Q, K, K, window_size=(-1, 2)),
    r"alibi_slopes must be \[num_heads\], got \[2, 4\]": lambda: flash_attn_func(Q, K, K, alibi_slopes=draw(2, HEADS)),
    "cache_leftpad must be None": lambda: flash_attn_with_kvcache(Q, K, K, cache_leftpad=torch.tensor([0, 1])),
    "v must be given with k": lambda: flash_attn_with_kvcache(Q, K, K, K[:, :2], cache_seqlens=3),
    "rotary_cos must be None where no k": lambda: flash_attn_with_kvcache(Q, K, K, rotary_cos=Q, rotary_sin=Q),
    "causal must be True where several": lambda: flash_attn_with_kvcache(
        Q, K, K, K[:, :2], K[:, :2], draw(16, 4), draw(16, 4), 3
    ),
    "rows that follow one another": lambda: flash_attn_with_kvcache(
        Q, K.repeat(1, 2, 1, 1)[:, :24], K.repeat(1, 2, 1, 1)[:, :24]
    ),
    "alibi_slopes must be None unless causal": lambda: flash_attn_func(Q, K, K, alibi_slopes=draw(HEADS)),
    r"k must be .* = \[2, any, any, 16\]": lambda: flash_attn_func(Q, K[:1], K[:1]),
    "v must be": lambda: flash_attn_func(Q, K.view(2, 16, KV_HEADS, DIM), K.reshape(1, 32, KV_HEADS, DIM)),
    "v must be given with k, got v alone": lambda: flash_attn_with_kvcache(Q, K, K, None, K[:, :2], cache_seqlens=3),
    "rotary_cos and rotary_sin must both": lambda: flash_attn_with_kvcache(
        Q, K, K, K[:, :2], K[:, :2], draw(16, 4), None, 3, causal=True
    ),
    "rotary_sin must both be given": lambda: flash_attn_with_kvcache(Q, K, K, rotary_sin=draw(16, 4)),
    "k_cache must have 2 rows": lambda: flash_attn_with_kvcache(Q, K[:1], K[:1]),
    "v_cache must be": lambda: flash_attn_with_kvcache(Q, K, K[:, :8]),
    r"cache_batch_idx must be in 0\.\.1": lambda: flash_attn_with_kvcache(
        Q, K, K, cache_batch_idx=torch.tensor([0, 2])
    ),
    r"cache_seqlens must be in 0\.\.16": lambda: flash_attn_with_kvcache(Q, K, K, cache_seqlens=17),
    r"cache_seqlens must be in 0\.\.14": lambda: flash_attn_with_kvcache(
        Q, K, K, K[:, :2], K[:, :2], cache_seqlens=torch.tensor([3, 15])
    ),
    r"cache_seqlens must be \[batch\] = \[2\]": lambda: flash_attn_with_kvcache(
        Q, K, K, cache_seqlens=torch.tensor([3])
    ),
    "cache_seqlens must be int32 or int64": lambda: flash_attn_with_kvcache(Q, K, K, cache_seqlens=torch.ones(2)),
    "cu_seqlens_q must be int32 or int64": lambda: packed(torch.tensor([0.0, 3.0]), STARTS, 3, 5),
    r"cu_seqlens_k must be \[num_seqs \+ 1\] = \[2\]": lambda: packed(
        torch.tensor([0, 3]), torch.tensor([0, 2, 5]), 3, 3
    ),
    "cu_seqlens_k must rise from 0 and end at most at 5": lambda: packed(
        torch.tensor([0, 3]), torch.tensor([0, 6]), 3, 6
    ),
    "max_seqlen_k must be at least 5, got 4": lambda: packed(torch.tensor([0, 3]), STARTS, 3, 4),
    "max_seqlen_q must be at least 3, got 1": lambda: packed(torch.tensor([0, 3]), STARTS, 1, 5),
    "cache_batch_idx must be None": lambda: flash_attn_with_kvcache(
        Q, K, K, block_table=torch.zeros(2, 1, dtype=torch.int32), cache_batch_idx=torch.tensor([0, 1])
    ),
}


@pytest.mark.parametrize("message", REFUSALS)
def test_what_a_paged_step_cannot_mean_is_refused_by_name(message):
    with pytest.raises(ValueError, match=message):
        REFUSALS[message]()


def test_what_is_refused_wrote_nothing():
    k_cache, k = K.clone(), draw(2, 2, KV_HEADS, DIM, seed=3)
    with pytest.raises(ValueError, match="v must be"):
        flash_attn_with_kvcache(Q, k_cache, k_cache.clone(), k, k[:, :1], cache_seqlens=3)
    assert torch.equal(k_cache, K)


def test_slopes_without_a_causal_mask_are_for_a_single_query():
    slopes = draw(HEADS, seed=7).abs()
    out = flash_attn_func(Q[:, :1], K, K, alibi_slopes=slopes)
    close(out[0], by_definition(Q[0, :1], K[0], K[0], slopes=slopes)[0])
