"""The block ids of many requests in little memory, and what the lengths of prompts tell of them."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagegen_autotune.prefix_runs import PrefixRuns, block_tokens
from pagegen_autotune.profiles import distil, import_trace
from pagegen_autotune.simulation import Server
from pagegen_autotune.trace import Trace, read_trace

ids = st.integers(0, 2**64 - 1)
run = st.tuples(ids, st.integers(0, 99)).map(lambda r: (min(r[0], 2**64 - 100), min(r[0], 2**64 - 100) + r[1]))


@given(st.lists(st.lists(run, max_size=4).map(tuple), min_size=1, max_size=20), st.randoms())
def test_runs_come_back_as_they_went_in_in_any_order(requests, rng):
    kept = PrefixRuns.of(requests)
    assert kept == requests and list(kept) == requests and kept[-1] == requests[-1]
    order = [rng.randrange(len(requests)) for _ in range(7)]
    assert kept.take(np.array(order)) == [requests[i] for i in order]
    assert kept[1:] == requests[1:]
    assert kept.blocks().tolist() == [sum(b - a + 1 for a, b in runs) for runs in requests]


def test_a_million_requests_take_24_bytes_each():
    kept = PrefixRuns.of(((i, i + 3),) for i in range(100_000))
    assert kept.nbytes <= 24 * 100_000 + 8


def of_size(size, lengths, *, up):
    blocks = [-(-n // size) if up else n // size for n in lengths]
    return PrefixRuns.of(((0, k - 1),) if k else () for k in blocks), np.array(lengths)


@pytest.mark.parametrize("up", [True, False])
@pytest.mark.parametrize("size", [1, 16, 48, 512])
def test_the_lengths_of_many_prompts_tell_what_an_id_stands_for(size, up):
    rng = random.Random(size)
    lengths = [rng.randrange(1, 40 * size + 2) for _ in range(3000)]
    assert block_tokens(*of_size(size, lengths, up=up)) == size


def test_lengths_that_tell_nothing_or_contradict_each_other_tell_no_size():
    assert block_tokens(*of_size(16, [5, 9], up=False)) is None  # no ids at all
    runs, lengths = of_size(16, [100, 333, 900], up=True)
    assert block_tokens(runs, lengths + [0, 200, 0]) is None
    assert block_tokens(*of_size(48, [100], up=True)) is None  # 34 to 49 rounded up, or 26 to 33 rounded down


def conversations(tmp_path, turns=6, count=60):
    """Turns that repeat all before them, one after the other; ids of 64 tokens, the last one partial."""
    path = tmp_path / "turns.csv"
    rows, time = ["arrival_s,prompt_tokens,output_tokens,prefix_hash_ids"], 0.0
    rng = random.Random(5)
    lengths = [0] * count
    for turn in range(turns):
        for talk in range(count):
            time += 0.4
            lengths[talk] += rng.randrange(64, 200)
            full, rest = divmod(lengths[talk], 64)
            names = [f"{1000 * talk}-{1000 * talk + full - 1}"]
            names += [str(10**6 + 1000 * turn + talk)] if rest else []
            rows.append(f"{time:.2f},{lengths[talk]},20,{' '.join(names)}")
    path.write_text("\n".join(rows) + "\n")
    return path


SMALL = Server(max_num_seqs=8, max_batch_tokens=128, kv_tokens=131_072)


def test_a_profile_of_a_trace_with_ids_is_of_a_server_that_shares_them(tmp_path):
    path = conversations(tmp_path)
    shared, alone = import_trace(path, server=SMALL), import_trace(path, server=SMALL, prefix_reuse=False)
    sharing = shared.figures["sharing"]
    assert alone.figures["sharing"] is None and alone.figures["simulation"]["prefix_reuse"] is False
    assert sharing["prefix_block_tokens"] == 64 and shared.figures["simulation"]["prefix_reuse"] is True
    # about what an unlimited cache would have is found: that figure counts the last, partial block as a whole one
    assert 0.8 < sharing["hit_share"] / shared.figures["prefix_reuse_share"] < 1.1
    assert len(sharing["batches_shared_tokens"]) == len(shared.workloads)
    # what is found is not computed: fewer mixed steps, and a server that can do more
    figures = [p.figures["simulation"] for p in (shared, alone)]
    assert figures[0]["decode_step_share"] > figures[1]["decode_step_share"]
    assert figures[0]["capacity_requests_per_s"] > 1.2 * figures[1]["capacity_requests_per_s"]
    assert figures[0]["kept_share"] == 1.0


def test_sharing_is_deterministic_and_a_size_may_be_named(tmp_path):
    path = conversations(tmp_path, turns=3)
    first = import_trace(path, server=SMALL, prefix_block_tokens=64)
    assert first.to_dict() == import_trace(path, server=SMALL).to_dict()
    with pytest.raises(ValueError, match="prefix_block_tokens must be"):
        import_trace(path, server=SMALL, prefix_block_tokens=0)
    with pytest.raises(ValueError, match="keep_prefixes"):
        distil(read_trace(path), name="x", server=SMALL, prefix_block_tokens=64)


def test_tokens_that_two_sequences_have_are_counted_once_more_than_they_lie():
    from pagegen_autotune.simulation import Simulation

    runs = (((0, 3),), ((0, 3),), ((0, 1),))
    trace = Trace(
        arrival_s=np.array([0.0, 1.0, 2.0]), prompt_tokens=np.array([70, 70, 40]), output_tokens=np.array([900] * 3),
        prefix_runs=runs,
    )  # fmt: skip
    steps = list(Simulation(trace, SMALL, prefix_block_tokens=16).steps())
    assert max(step.shared_tokens for step in steps) == 64 + 32
    assert steps[0].shared_tokens == 0
