"""`Step`: what the model computes next."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

from pagegen.cache.sequence import pack_tokens


@dataclass(frozen=True, kw_only=True)
class Step:
    """One ragged batch, sequences that decode first. Row i is the sequence `seq_ids[i]` of the cache (the request's
    id): its next `query_lens[i]` tokens are computed, after which `context_lens[i]` are. Where `samples[i]`, its last
    known token is among them, and the step gives it a new one; the others are chunks of a prompt.

    A real model takes `cache.batch(step.seq_ids, query_lens=step.query_lens)`.
    """

    number: int
    seq_ids: tuple[Hashable, ...]
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    samples: tuple[bool, ...]

    @property
    def num_tokens(self) -> int:
        """Query tokens of all rows."""
        return sum(self.query_lens)

    @property
    def is_decode(self) -> bool:
        """Whether every row computes one token and gives the next."""
        return all(self.samples) and max(self.query_lens) == 1

    def answers(self, tokens: Iterable[Any]) -> array[int]:
        """The token of each row, 0 for a row that does not sample, whatever is given for it. Raises TypeError or
        ValueError for what is not one token a row."""
        if isinstance(tokens, (str, bytes, bytearray, memoryview)) or not isinstance(tokens, Iterable):
            raise TypeError(f"tokens must be a sequence of integers, got {type(tokens).__name__}")
        given = list(tokens)
        if len(given) != len(self.samples):
            raise ValueError(f"tokens must be one a row of the step ({len(self.samples)}), got {len(given)}")
        return pack_tokens([token if samples else 0 for token, samples in zip(given, self.samples, strict=True)])
