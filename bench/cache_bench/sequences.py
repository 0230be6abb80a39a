"""The sequences that the implementations replay: of real traces where those are at hand, and four that are made."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from cache_bench.recording import Recording, record
from cache_bench.traces import MOONCAKE, SHAREGPT, VOCABULARY, Tokens, Turn, conversations, read, turn_of, turns_of

BLOCK_SIZE = 16
MADE = "made, seed 0"


def sequences(data: Path, operations: int) -> Iterator[Recording]:
    """About `operations` operations each, in blocks of 16 tokens."""
    if (data / SHAREGPT[0]).exists():
        yield conversation(data, operations)
    if (data / MOONCAKE[0]).exists():
        yield long_prompts(data, operations)
    yield made_conversation(operations)
    yield decode(256, 1000, operations)
    yield full_hits(32_768, min(200, max(2, operations // 500)))


def conversation(data: Path, operations: int) -> Recording:
    """Multi-turn chat: 64 conversations at a time in 8192 blocks, so that what is cached is evicted again."""
    name, block = SHAREGPT
    dialogues = (turns_of(turns, block) for turns in conversations(read(data / name)))
    short = (turns for turns in dialogues if len(turns[-1].prompt) < 32_768)  # 2048 of the blocks
    return record(
        "chat, many turns", name, short, block_size=BLOCK_SIZE, num_blocks=8192, running=64, operations=operations
    )


def long_prompts(data: Path, operations: int) -> Recording:
    """Long prompts with shared beginnings: 32 at a time in 65,536 blocks."""
    name, block = MOONCAKE
    dialogues = ([turn_of(request, block)] for request in read(data / name))
    return record(
        "long prompts", name, dialogues, block_size=BLOCK_SIZE, num_blocks=65_536, running=32, operations=operations
    )


def made_conversation(operations: int) -> Recording:
    """Chat without a trace: one of 8 system prompts of 300 to 800 tokens, turns of 20 to 400 tokens, answers of 30 to
    400, 1 to 6 turns."""
    draw = np.random.default_rng(0)
    systems = [_ids(draw, length) for length in draw.integers(300, 800, 8).tolist()]

    def dialogue() -> list[Turn]:
        said, turns = systems[draw.integers(8)], []
        for _ in range(draw.integers(1, 7)):
            prompt = np.concatenate([said, _ids(draw, int(draw.integers(20, 400)))])
            output = _ids(draw, int(draw.integers(30, 400)))
            turns.append(Turn(prompt, output))
            said = np.concatenate([prompt, output])
        return turns

    dialogues = iter(dialogue, None)
    return record(
        "chat, made", MADE, dialogues, block_size=BLOCK_SIZE, num_blocks=8192, running=64, operations=operations
    )


def decode(num_seqs: int, context: int, operations: int) -> Recording:
    """Steps alone: `num_seqs` sequences of `context` tokens on average that nothing ends."""
    draw = np.random.default_rng(0)
    lengths = draw.integers(context // 2, context * 3 // 2, num_seqs).tolist()
    answer = operations // num_seqs + 2
    dialogues = [[Turn(_ids(draw, length), _ids(draw, answer))] for length in lengths]
    return record(
        f"decode, {num_seqs} sequences", MADE, dialogues, block_size=BLOCK_SIZE,
        num_blocks=num_seqs * (context * 3 // 2 + answer) // BLOCK_SIZE, running=num_seqs, operations=operations,
    )  # fmt: skip


def full_hits(length: int, times: int) -> Recording:
    """The same prompt again and again, one at a time: all but the first add find all of it."""
    turn = Turn(_ids(np.random.default_rng(0), length), np.zeros(1, np.uint32))
    dialogues = itertools.repeat([turn], times)
    return record(
        f"add, {length} tokens cached", MADE, dialogues, block_size=BLOCK_SIZE, num_blocks=length // BLOCK_SIZE + 64,
        running=1, operations=10 * times,
    )  # fmt: skip


def _ids(draw: np.random.Generator, count: int) -> Tokens:
    return draw.integers(0, VOCABULARY, count, dtype=np.uint32)
