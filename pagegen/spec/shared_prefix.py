"""Attending a shared prefix once (a cascade): which part of a spec is computed where, and when it may not be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from pagegen.spec.attention import AttentionSpec

# (num_shared_blocks, rows): the sequences `rows` have their first `num_shared_blocks` blocks in common.
PrefixGroups: TypeAlias = Sequence[tuple[int, Sequence[int]]]


def prefix_spec(spec: AttentionSpec) -> AttentionSpec:
    """What a cascade computes over a shared prefix. Every query stands behind it, so no mask is left, and a sink is
    counted with each query's own tokens. The other part is `spec` itself, over fewer tokens."""
    return spec.replace(causal=False, window=None, sinks=False)


def flat_reason(
    *, window: int | None, score_mod: object, mask_mod: object, batch_invariant: bool, max_seq_len: int
) -> str | None:
    """Why a batch whose longest sequence has `max_seq_len` tokens may not be divided at its shared prefixes, or None.

    Positions within a part differ from a token's true ones by the same number for queries and keys, which causal and
    tree masks and ALiBi do not see, but user functions do."""
    if batch_invariant:
        return "with batch_invariant a row's result must not depend on which neighbours share its prefix"
    if score_mod is not None or mask_mod is not None:
        return "score and mask functions see true positions, which a part of the keys does not have"
    if window is not None and window < max_seq_len:
        return f"a window of {window} keys ends inside or behind a prefix of sequences of up to {max_seq_len} tokens"
    return None
