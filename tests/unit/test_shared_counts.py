"""`SharedCounts` answers as a `BlockAllocator` does, whatever is asked of it."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagegen_autotune.block_runs import contents
from pagegen_autotune.shared_counts import SharedCounts

from pagegen.cache import BlockAllocator, OutOfBlocks


def stretches(rng, length):
    """Tokens in stretches of few values, some longer than several blocks."""
    tokens: list[int] = []
    while len(tokens) < length:
        tokens += [rng.choice([0, 0, 1, 2, 2**31 + rng.randrange(3)])] * rng.choice([1, 2, 3, 4, 8, 12, 31])
    return tokens[:length]


def outcome(call):
    try:
        return call()
    except OutOfBlocks as error:
        return error.needed, error.free


class Both:
    """A real allocator and the counts, asked the same."""

    def __init__(self, num_blocks, block_size, watermark=0):
        self.real = BlockAllocator(num_blocks, block_size, watermark=watermark)
        self.counts = SharedCounts(num_blocks, block_size, watermark=watermark)

    def ask(self, name, *args, **options):
        real, counted = (outcome(lambda c=c: getattr(c, name)(*args, **options)) for c in (self.real, self.counts))
        if name in ("add", "can_admit") or isinstance(counted, tuple):
            assert counted == real, (name, args)
        else:
            assert not isinstance(real, tuple), (name, real)
        assert self.counts.free_blocks == self.real.pool.available, name
        assert self.counts.cached_blocks == len(self.real.pool.cached), name
        return real


@settings(max_examples=2 * settings.default.max_examples)
@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(2, 40), st.integers(0, 2))
def test_random_traffic_gets_the_answers_of_the_real_bookkeeping(seed, block_size, num_blocks, watermark):
    rng = random.Random(seed)
    both = Both(num_blocks, block_size, min(watermark, num_blocks))
    prompts = [stretches(rng, rng.randrange(1, 70)) for _ in range(4)]
    prompts += [p[: rng.randrange(1, len(p) + 1)] + stretches(rng, rng.randrange(0, 40)) for p in prompts * 2]
    live: dict[int, int] = {}
    for number in range(60):
        kind = rng.choice(["add", "add", "mark", "mark", "mark", "grow", "grow", "append", "free"])
        if kind == "add":
            prompt, context = rng.choice(prompts), rng.choice([b"", b"", b"", b"other"])
            both.ask("can_admit", len(prompt), tokens=prompt, context=context, lookahead=rng.randrange(3))
            if not isinstance(both.ask("add", number, prompt, context=context), tuple):
                live[number] = both.real.length(number)
        elif not live:
            continue
        elif kind == "mark":
            ids = rng.sample(sorted(live), rng.randrange(1, len(live) + 1))
            lengths = [rng.randrange(both.real.computed(i), both.real.length(i) + 1) for i in ids]
            both.ask("mark_all_computed", ids, lengths)
        elif kind == "grow":
            both.ask("append_each", sorted(live), [rng.choice([0, 0, 0, 7]) for _ in live])
        elif kind == "append":
            both.ask("append", rng.choice(sorted(live)), rng.choice([[0] * 9, [], [0, 5, 0, 0, 0], range(3)]))
        else:
            gone = rng.choice(sorted(live))
            del live[gone]
            both.ask("free", gone)
        both.counts.check_invariants()
    blocks = [both.real.block_ids(i) for i in live]
    different = len({block for ids in blocks for block in ids})
    assert both.counts.held_blocks == sum(map(len, blocks))
    assert both.counts.shared_blocks == both.counts.held_blocks - different
    for i in list(live):
        both.ask("free", i)
    assert both.counts.free_blocks == num_blocks and both.counts.shared_blocks == 0


def test_contents_are_what_the_blocks_hold():
    tokens = np.array([5, 5, 5, 5, 5, 5, 1, 2, 1, 2, 0, 0, 0], dtype=np.uint32)
    mixed = np.array([1, 2], dtype=np.uint32).tobytes()
    assert contents(tokens, 2) == [(5, 3), (mixed, 2), (0, 1)]
    assert contents(tokens[:1], 2) == [] and contents(tokens[:4], 1) == [(5, 4)]


def test_what_is_not_known_is_named_and_nothing_is_taken_back():
    counts = SharedCounts(8, 4)
    counts.add("a", range(6))
    with pytest.raises(ValueError, match="seq_id must be new, got 'a'"):
        counts.add("a", range(6))
    with pytest.raises(KeyError, match="'b': unknown or freed"):
        counts.free("b")
    with pytest.raises(ValueError, match="each sequence once"):
        counts.append_each(["a", "a"], [0, 0])
    with pytest.raises(ValueError, match="one a sequence"):
        counts.append_each(["a"], [0, 0])
    with pytest.raises(ValueError, match=r"length must be in 0\.\.6, got 9"):
        counts.mark_computed("a", 9)
    with pytest.raises(TypeError, match="context must be bytes"):
        counts.can_admit(3, tokens=range(3), context="x")
    for call in (lambda: counts.truncate("a", 1), lambda: counts.abandon(["a"]), lambda: counts.swap_out("a"),
                 lambda: counts.swap_in("a")):  # fmt: skip
        with pytest.raises(RuntimeError, match="use a BlockAllocator"):
            call()
    assert counts.free_blocks == 6 and counts.length("a") == 6


def test_a_prompt_of_a_million_tokens_costs_what_its_stretches_do():
    counts = SharedCounts(200_000, 16)
    prompt = np.repeat(np.arange(8, dtype=np.uint32), 125_000)
    counts.add("a", prompt)
    counts.mark_computed("a", 600_000)
    counts.mark_computed("a", 1_000_000)
    assert counts.add("b", prompt) == 999_984  # but for the block of the last token
    assert len(counts.sequences["b"].holds) <= 16 + 2
    counts.free("a")
    counts.free("b")
    assert counts.cached_blocks == 62_500
