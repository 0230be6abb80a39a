"""How much of a trace's prompts an unlimited prefix cache would have served, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

# 1 Mi ids remembered: about 80 MB as a Python set
REMEMBERED_IDS = 2**20
_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: multiplying by it scatters neighbouring ids


class PrefixReuse:
    """Counts prompt tokens whose block was named by an earlier request, in the order of `see`.

    Once more than `remembered` ids are known, only ids whose hash falls in a shrinking part of the hash space are
    followed and stand for the rest (spatial sampling: Waldspurger et al., "SHARDS", FAST 2015): exact below the limit,
    an unbiased estimate above it. An id stands for a block and everything before it, so blocks can be judged singly.
    """

    def __init__(self, remembered: int = REMEMBERED_IDS) -> None:
        self._remembered = remembered
        self._seen: set[int] = set()
        self._shift = 0  # ids whose hash has `_shift` leading zero bits are followed
        self._prompt_tokens = 0
        self._reused_tokens = 0.0
        self._any_ids = False

    def see(self, runs: Iterable[tuple[int, int]], prompt_tokens: int) -> None:
        """Takes in one request: its inclusive runs of block ids and the tokens they cover between them."""
        total = hits = 0
        for first, last in runs:
            total += last - first + 1
            followed = self._followed(first, last)
            hits += len(self._seen.intersection(followed))
            self._seen.update(followed)
        self._prompt_tokens += prompt_tokens
        if total:
            self._any_ids = True
            self._reused_tokens += prompt_tokens * hits * 2.0**self._shift / total
        while len(self._seen) > self._remembered:
            self._shift += 1
            self._seen = {block for block in self._seen if self._follows(block)}

    @property
    def share(self) -> float | None:
        """Reused prompt tokens / prompt tokens, None where no request named a block."""
        return min(1.0, self._reused_tokens / self._prompt_tokens) if self._any_ids else None

    def _followed(self, first: int, last: int) -> Sequence[int]:
        """The ids of a run that are followed."""
        if not self._shift:
            return range(first, last + 1)
        if last - first < 16:
            return [block for block in range(first, last + 1) if self._follows(block)]
        ids = np.arange(last - first + 1, dtype=np.uint64) + np.uint64(first)
        followed: list[int] = ids[ids * np.uint64(_GOLDEN) >> np.uint64(64 - self._shift) == 0].tolist()
        return followed

    def _follows(self, block: int) -> bool:
        return (block * _GOLDEN & _MASK) >> (64 - self._shift) == 0
