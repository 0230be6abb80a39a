"""Traces with block ids, as requests whose token ids are made from them: equal ids give equal tokens, always.

A block id names a block and everything before it, so a request's tokens can be made block by block. What a trace does
not name (the tokens behind the last full block, an answer that no later prompt repeats) gets tokens of its own.
"""

from __future__ import annotations

import csv
import itertools
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.uint32]
VOCABULARY = 128_256  # Llama 3's: most ids need more than 16 bits, as a real tokenizer's do
# Files of a folder of traces, and the tokens that one of their ids stands for.
MOONCAKE, SHAREGPT = ("mooncake_conversation.csv", 512), ("sharegpt_v3_part_multiturn.csv", 16)
_NAMELESS = 2**40  # positions from here on belong to tokens that no id stands for
_STEPS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9)  # odd constants of splitmix64 (Steele et al., OOPSLA 2014)


@dataclass(frozen=True)
class Request:
    """One row of a trace: the answer's length, and the ids of the prompt's blocks, the last of them perhaps partial."""

    row: int
    prompt_tokens: int
    output_tokens: int
    ids: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Turn:
    """One request with its token ids: uint32 [prompt_tokens] and [output_tokens]."""

    prompt: Tokens
    output: Tokens


def read(path: Path, limit: int | None = None) -> Iterator[Request]:
    """The rows of a trace with `prefix_hash_ids`, the first `limit` of them. Raises OSError."""
    with path.open(encoding="utf-8", newline="") as file:
        for row, fields in enumerate(itertools.islice(csv.DictReader(file), limit)):
            runs = (item.partition("-") for item in fields["prefix_hash_ids"].split())
            ids = itertools.chain.from_iterable(range(int(a), int(b or a) + 1) for a, _, b in runs)
            yield Request(row, int(fields["prompt_tokens"]), int(fields["output_tokens"]), tuple(ids))


def prompt_of(request: Request, block: int) -> Tokens:
    """The prompt's token ids, where every id of the trace stands for `block` tokens."""
    named = np.array(request.ids, dtype=np.uint64)[:, None] * np.uint64(block) + np.arange(block, dtype=np.uint64)
    positions = named.reshape(-1)[: request.prompt_tokens]
    rest = np.arange(request.prompt_tokens - len(positions), dtype=np.uint64) + np.uint64(_nameless(request.row))
    return _scattered(np.concatenate([positions, rest]))


def packed(tokens: Tokens) -> array[int]:
    """The ids as the allocator takes them without a loop over them."""
    return array("I", tokens.tobytes())


def turn_of(request: Request, block: int, following: Tokens | None = None) -> Turn:
    """The request with its tokens; those that the `following` prompt of the same conversation repeats are taken from
    there, so that the next turn finds the answer's blocks too."""
    if following is not None:
        ends = request.prompt_tokens, request.prompt_tokens + request.output_tokens
        return Turn(following[: ends[0]], following[ends[0] : ends[1]])
    # behind anything that the prompt's own tail could take
    first = _nameless(request.row) + 2**19
    answer = np.arange(first, first + request.output_tokens, dtype=np.uint64)
    return Turn(prompt_of(request, block), _scattered(answer))


def conversations(requests: Iterable[Request]) -> Iterator[list[Request]]:
    """Runs of neighbouring rows in which each prompt begins with the one before and its answer."""
    turns: list[Request] = []
    for request in requests:
        if turns and not _continues(turns[-1], request):
            yield turns
            turns = []
        turns.append(request)
    if turns:
        yield turns


def turns_of(conversation: Sequence[Request], block: int) -> list[Turn]:
    """All turns of a conversation with tokens: the last prompt has those of every turn before."""
    turns: list[Turn] = []
    for request in reversed(conversation):
        turns.append(turn_of(request, block, turns[-1].prompt if turns else None))
    return turns[::-1]


def _continues(before: Request, request: Request) -> bool:
    longer = request.prompt_tokens >= before.prompt_tokens + before.output_tokens
    return longer and request.ids[: len(before.ids)] == before.ids


def _nameless(row: int) -> int:
    """The first position of a row's own tokens: 2^20 are its alone, more than a prompt and an answer together have."""
    return _NAMELESS + row * 2**20


def _scattered(positions: npt.NDArray[np.uint64]) -> Tokens:
    """A token id for each position; 16 in a row tell blocks apart (17 bits each)."""
    mixed = positions * np.uint64(_STEPS[0])
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(_STEPS[1])
    mixed ^= mixed >> np.uint64(32)
    tokens: Tokens = (mixed % np.uint64(VOCABULARY)).astype(np.uint32)
    return tokens
