"""Tensor and context parallelism on real gloo process groups (the checks are in parallel_ranks.py), and what needs no
second process."""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path
from typing import Any

import parallel_ranks
import pytest
import torch
import torch.multiprocessing
from batches import compare, make_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from spread_blocks import dealt

import pagegen
from pagegen.integrations import context_parallel
from pagegen.integrations.context_parallel import BlockSpread
from pagegen.integrations.sharding import HeadShard, head_shard
from pagegen.modifiers import score_mod
from pagegen.ops import attention as attention_module
from pagegen.spec import AttentionSpec

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch has no torch.distributed")


@functools.cache
def said(ranks: int, folder: Path) -> dict[str, list[str | None]]:
    """What every rank said about each check; one set of processes a size."""
    torch.multiprocessing.start_processes(
        parallel_ranks.run, args=(ranks, str(folder)), nprocs=ranks, start_method="forkserver"
    )
    answers = [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(ranks)]
    return {name: [answer[name] for answer in answers] for name in parallel_ranks.CHECKS[ranks]}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[int, Path]:
    return {ranks: tmp_path_factory.mktemp(f"ranks{ranks}") for ranks in parallel_ranks.SIZES}


@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        pytest.param(ranks, name, marks=pytest.mark.compat("torch", parallel_ranks.FEATURES[name]))
        for ranks, checks in parallel_ranks.CHECKS.items()
        for name in checks
    ],
)
def test_on_a_process_group(ranks, name, folders):
    for rank, answer in enumerate(said(ranks, folders[ranks])[name]):
        assert answer is None, f"rank {rank} of {ranks}:\n{answer}"


def shards(ranks: int, q_heads: int, kv_heads: int) -> list[HeadShard]:
    spec = AttentionSpec(num_q_heads=q_heads, num_kv_heads=kv_heads, head_dim=16, q_dtype="float32")
    return [head_shard(spec, rank, ranks) for rank in range(ranks)]


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 20))
def test_every_query_head_is_on_one_rank_beside_its_kv_head(kv_heads, group, ranks):
    if -(-ranks // kv_heads) > group and ranks > kv_heads:
        with pytest.raises(ValueError, match="ranks must be at most"):
            shards(ranks, kv_heads * group, kv_heads)
        return
    found = shards(ranks, kv_heads * group, kv_heads)
    assert [h for s in found for h in range(s.q_heads.start, s.q_heads.stop)] == list(range(kv_heads * group))
    for shard in found:
        local = shard.spec
        for i, head in enumerate(range(shard.q_heads.start, shard.q_heads.stop)):
            assert shard.kv_heads.start + i // local.group == head // group
        assert local.num_kv_heads == shard.kv_heads.stop - shard.kv_heads.start
    counts = [shard.spec.num_kv_heads for shard in found]
    assert max(counts) - min(counts) <= 1


def test_head_shards_of_known_models_are_those_that_engines_give():
    assert [(s.q_heads, s.kv_heads) for s in shards(4, 32, 8)][1] == (slice(8, 16), slice(2, 4))
    assert [s.kv_heads.start for s in shards(4, 8, 2)] == [0, 0, 1, 1]  # two ranks replicate each KV head
    assert [s.spec.num_q_heads for s in shards(2, 9, 3)] == [6, 3]  # SmolLM2-135M, uneven


def test_uneven_shards_together_compute_the_whole():
    spec = AttentionSpec(num_q_heads=9, num_kv_heads=3, head_dim=16, q_dtype="float32")
    batch = make_batch(spec, parallel_ranks.RAGGED, block_size=8)
    given = batch.kwargs()
    outs = []
    for rank in range(2):
        shard = head_shard(spec, rank, 2)
        local = {n: given[n][:, :, shard.kv_heads] for n in ("k_cache", "v_cache")}
        outs.append(pagegen.paged_attention(**{**given, **local, "q": given["q"][:, shard.q_heads]}))
    compare(torch.cat(outs, dim=1), None, *batch.expected(), torch.float32)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((None, 0, 2), TypeError, "spec must be an AttentionSpec, got NoneType None"),
        (("spec", 2, 2), ValueError, r"rank must be in 0\.\.1, got 2"),
        (("spec", -1, 2), ValueError, "rank must be at least 0, got -1"),
        (("spec", 0, 0), ValueError, "ranks must be at least 1, got 0"),
        (("spec", 0, True), TypeError, "ranks must be an integer, got bool True"),
        (("spec", 0, 16), ValueError, "ranks must be at most 8 for 8 query and 2 KV heads"),
    ],
)
def test_a_head_shard_that_cannot_be_is_refused(arguments, error, message):
    spec = AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=16)
    with pytest.raises(error, match=message):
        head_shard(*(spec if a == "spec" else a for a in arguments))


spreads = st.builds(BlockSpread, ranks=st.integers(1, 5), block_size=st.integers(1, 4), stripe_blocks=st.integers(1, 3))


@given(spreads, st.integers(0, 100))
def test_every_token_is_held_by_its_owner_alone(spread, length):
    for rank in range(spread.ranks):
        assert spread.held(rank, length) == sum(spread.owner(p) == rank for p in range(length))
        assert int(spread.held(rank, torch.tensor([length]))) == spread.held(rank, length)


@given(spreads, st.integers(0, 2**32))
def test_a_slot_of_the_allocator_is_one_ranks_slot_under_the_table_that_it_reads(spread, seed):
    turns = random.Random(seed).sample(range(20), 4)
    table = spread.local_table(torch.tensor([turns], dtype=torch.int32))
    positions = range(4 * spread.turn_tokens)
    slots = torch.tensor(
        [turns[p // spread.turn_tokens] * spread.turn_tokens + p % spread.turn_tokens for p in positions]
    )
    for rank in range(spread.ranks):
        local = spread.local_slots(rank, torch.cat([slots, torch.tensor([-1])])).tolist()
        kept = [slot for slot in local if slot >= 0]
        read = [
            int(table[0, i // spread.block_size]) * spread.block_size + i % spread.block_size for i in range(len(kept))
        ]
        assert kept == read
        assert [slot >= 0 for slot in local] == [*(spread.owner(p) == rank for p in positions), False]


FIELDS: list[dict[str, Any]] = [{"sinks": True}, {"window": 5, "sinks": True}, {"causal": False}]


@settings(max_examples=60)
@given(
    spreads.filter(lambda spread: spread.block_size == 4), st.sampled_from(FIELDS),
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=4), st.booleans(),
)  # fmt: skip
def test_the_states_of_any_spread_merge_to_the_whole(spread, fields, sequences, decode):
    sequences = [(n, 1 if decode else min(n, q)) for n, q in sequences]
    spec = AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=16, q_dtype="float32", **fields)
    batch = make_batch(spec, sequences, block_size=spread.block_size)
    hosted = batch.query_start_loc is not None
    lengths, counts = zip(*sequences, strict=True)
    states = []
    for rank in range(spread.ranks):
        table, k_cache, v_cache = dealt(batch, spread, rank)
        share = context_parallel.share_of(
            spread, rank, table, lengths if hosted else batch.seq_lens, query_lens=counts if hosted else None,
            causal=spec.causal, window=spec.window,
        )  # fmt: skip
        states.append(context_parallel.attend(share, batch.q, k_cache, v_cache, sinks=batch.sinks))
        for part in share.parts:
            pagegen.validate_batch(
                k_cache, part.block_table, part.seq_lens, query_start_loc=part.query_start_loc,
                max_query_len=part.max_query_len, max_seq_len=part.max_seq_len,
            )  # fmt: skip
    compare(*pagegen.merge_states(*zip(*states, strict=True)), *batch.expected(), torch.float32)


def test_an_empty_share_is_the_empty_state_and_sinks_count_on_the_first_rank_only():
    spec = AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=16, q_dtype="float32", sinks=True)
    batch = make_batch(spec, [(3, 1), (8, 1)], block_size=8)
    spread = BlockSpread(ranks=3, block_size=8)
    for rank, (lengths, counts) in ((1, (batch.seq_lens, None)), (2, ([3, 8], [1, 1]))):
        table, *caches = dealt(batch, spread, rank)
        share = context_parallel.share_of(spread, rank, table, lengths, query_lens=counts)
        out, lse = context_parallel.attend(share, batch.q, *caches, sinks=batch.sinks)
        assert not out.any() and (lse == -torch.inf).all()
    # rank 0 holds everything behind the first query's position, and still counts its sink
    late = context_parallel.share_of(
        BlockSpread(ranks=2, block_size=8), 1, torch.zeros(1, 1, dtype=torch.int32), [4], query_lens=[4]
    )
    assert late.parts == ()


@pytest.mark.parametrize("fields", FIELDS)
def test_local_specs_name_every_kernel_that_a_rank_calls(fields, monkeypatch):
    asked: list[AttentionSpec] = []
    look_up = attention_module.plans.lookup

    def spy(spec: AttentionSpec, *where: Any) -> Any:
        asked.append(spec)
        return look_up(spec, *where)

    monkeypatch.setattr(attention_module.plans, "lookup", spy)
    spec = AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=16, q_dtype="float32", **fields)
    batch = make_batch(spec, parallel_ranks.RAGGED, block_size=4)
    lengths, counts = zip(*batch.sequences, strict=True)
    spread = BlockSpread(ranks=2, block_size=4)
    for rank in range(2):
        attention_module.forget()
        asked.clear()
        table, *caches = dealt(batch, spread, rank)
        for window in {spec.window, None if spec.window is None else 1000}:  # one that reaches over every sequence
            share = context_parallel.share_of(
                spread, rank, table, lengths, query_lens=counts, causal=spec.causal, window=window
            )
            context_parallel.attend(share, batch.q, *caches, sinks=batch.sinks)
        assert set(asked) == set(context_parallel.local_specs(spec, rank))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"spread": 2}, TypeError, "spread must be a BlockSpread, got int 2"),
        ({"rank": 2}, ValueError, r"rank must be in 0\.\.1, got 2"),
        ({"block_table": torch.zeros(2, 3)}, ValueError, "block_table must be int32 .*, got float32"),
        ({"seq_lens": [1]}, ValueError, "seq_lens must have an entry a row of block_table, 2, got 1"),
        ({"seq_lens": [1, -1]}, ValueError, "seq_lens must be at least 0, got -1"),
        ({"query_lens": [1]}, ValueError, "query_lens must have an entry a sequence, 2, got 1"),
        ({"query_lens": [1, 9]}, ValueError, r"query_lens\[1\] must be in 0\.\.8, got 9"),
        ({"seq_lens": [4, 800], "query_lens": [1, 1]}, ValueError, "block_table must have 50 columns .* got 3"),
        ({"seq_lens": [4, 800]}, ValueError, "block_table must have 50 columns .* got 3"),
        ({"max_seq_len": -1, "seq_lens": torch.zeros(2).int()}, ValueError, "max_seq_len must be at least 0, got -1"),
        ({"max_seq_len": 9, "query_lens": [1, 1]}, ValueError, "max_seq_len must be None where query_lens are given"),
        ({"window": 0}, ValueError, "window must be at least 1, got 0"),
        ({"window": 4, "causal": False}, ValueError, "window must be None where causal is False"),
    ],
)
def test_a_share_that_cannot_be_is_refused(change, error, message):
    table = torch.zeros(2, 3, dtype=torch.int32)
    given = {
        "spread": BlockSpread(ranks=2, block_size=8),
        "rank": 0,
        "block_table": table,
        "seq_lens": [4, 8],
        **change,
    }
    with pytest.raises(error, match=message):
        context_parallel.share_of(**given)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"alibi_slopes": torch.ones(4)}, ValueError, "alibi_slopes must be None where blocks lie on several ranks"),
        ({"tree_mask": torch.ones(2, 1)}, ValueError, "tree_mask must be None"),
        ({"mask_mod": "causal()"}, ValueError, "mask_mod must be None"),
        ({"window": 4}, TypeError, "window must not be given here: share_of decides it"),
        ({"softcap": 4}, TypeError, "attend has no option softcap"),
        (
            {"score_mod": score_mod(lambda score, batch, head, q_pos, k_pos: score + k_pos)},
            ValueError,
            "score_mod must read nothing but the score and the head .* reads k_pos",
        ),
    ],
)
def test_what_needs_positions_is_refused(options, error, message):
    spread = BlockSpread(ranks=2, block_size=8)
    share = context_parallel.share_of(spread, 0, torch.zeros(2, 1, dtype=torch.int32), [4, 8])
    q, cache = torch.zeros(2, 4, 16), torch.zeros(1, 8, 2, 16)
    with pytest.raises(error, match=message):
        context_parallel.attend(share, q, cache, cache, **options)
    with pytest.raises(ValueError, match="q must have at least the 2 queries of share, got 1"):
        context_parallel.attend(share, q[:1], cache, cache)


def test_merging_without_a_process_group_says_what_is_missing():
    with pytest.raises(RuntimeError, match=r"torch.distributed must be initialised \(init_process_group\)"):
        context_parallel.merge_over_ranks(torch.zeros(1, 2, 4), torch.zeros(1, 2))
