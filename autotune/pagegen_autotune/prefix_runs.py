"""The block ids of many requests, 16 bytes a run, and how many tokens one of them names."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt

Runs = tuple[tuple[int, int], ...]  # inclusive runs of block ids, in order


class PrefixRuns(Sequence[Runs]):
    """The runs of each of many requests. Equal to any sequence of the same runs."""

    def __init__(self, ends: npt.NDArray[np.uint64], offsets: npt.NDArray[np.int64]) -> None:
        """`ends` [runs, 2]: first and last id; those of request i are `ends[offsets[i] : offsets[i + 1]]`."""
        self._ends = ends
        self._offsets = offsets

    @classmethod
    def of(cls, requests: Iterable[Runs]) -> PrefixRuns:
        """Of the runs of each request."""
        made = PrefixRunsBuilder()
        for runs in requests:
            made.add(runs)
        return made.runs()

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @overload
    def __getitem__(self, index: int) -> Runs: ...

    @overload
    def __getitem__(self, index: slice) -> PrefixRuns: ...

    def __getitem__(self, index: int | slice) -> Runs | PrefixRuns:
        if isinstance(index, slice):
            return self.take(np.arange(len(self))[index])
        begin, end = self._offsets[range(len(self))[index] :][:2].tolist()
        return tuple([(first, last) for first, last in self._ends[begin:end].tolist()])

    def __iter__(self) -> Iterator[Runs]:
        return (self[i] for i in range(len(self)))

    def __eq__(self, other: object) -> bool:
        same_size = isinstance(other, Sequence) and len(other) == len(self)
        return same_size and all(mine == its for mine, its in zip(self, other, strict=True))  # type: ignore[call-overload]

    __hash__ = None  # type: ignore[assignment]  # equal to lists

    def take(self, requests: npt.NDArray[Any]) -> PrefixRuns:
        """Those of the requests of these indices."""
        counts = np.diff(self._offsets)[requests]
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], counts)
        return PrefixRuns(self._ends[np.repeat(self._offsets[:-1][requests], counts) + within], offsets)

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self._ends.nbytes + self._offsets.nbytes

    def blocks(self) -> npt.NDArray[np.int64]:
        """How many blocks the runs of each request name."""
        lengths = (self._ends[:, 1] - self._ends[:, 0]).astype(np.int64) + 1
        before = np.concatenate([[0], np.cumsum(lengths)])
        found: npt.NDArray[np.int64] = np.diff(before[self._offsets])
        return found


class PrefixRunsBuilder:
    """Takes requests in, one after the other."""

    def __init__(self) -> None:
        self._ends: array[int] = array("Q")
        self._offsets: array[int] = array("q", [0])

    def add(self, runs: Runs) -> None:
        for run in runs:
            self._ends.extend(run)
        self._offsets.append(len(self._ends) // 2)

    def runs(self) -> PrefixRuns:
        """All that was taken in."""
        ends = np.array(self._ends, dtype=np.uint64).reshape(-1, 2)
        return PrefixRuns(ends, np.array(self._offsets, dtype=np.int64))


def block_tokens(runs: PrefixRuns, prompt_tokens: npt.NDArray[np.int64]) -> int | None:
    """How many tokens an id stands for, as the prompts' lengths tell it: every prompt of n tokens has n / b ids, all
    rounded down (only full blocks have ids) or all up. The only size that agrees with that, else the only power of two;
    None where no prompt has ids, or the lengths leave it open or contradict each other.
    """
    blocks = runs.blocks()
    named = blocks > 0
    n, k = prompt_tokens[named].astype(np.float64), blocks[named].astype(np.float64)
    if not len(n):
        return None
    # rounded down: k b <= n < (k + 1) b; rounded up: (k - 1) b < n <= k b
    down = (math.floor((n / (k + 1)).max()) + 1, math.floor((n / k).min()))
    several = k > 1
    up = (math.ceil((n / k).max()), math.ceil((n[several] / (k[several] - 1)).min()) - 1 if several.any() else 0)
    found = {_size(low, high) for low, high in (down, up) if low <= high}
    return found.pop() if len(found) == 1 else None


def _size(low: int, high: int) -> int | None:
    """The one size between two bounds, else the one power of two; None where that leaves it open."""
    sizes = [low] if low == high else [2**e for e in range(25) if low <= 2**e <= high]
    return sizes[0] if len(sizes) == 1 else None
