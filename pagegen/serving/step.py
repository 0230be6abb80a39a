"""`Step`: what the model computes next."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass


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
