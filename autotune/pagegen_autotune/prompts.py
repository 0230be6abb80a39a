"""Prompts made up so that they share what a trace says its prompts shared."""

from __future__ import annotations

from array import array

import numpy as np

from pagegen.cache.sequence import TOKEN_CODE
from pagegen_autotune.prefix_runs import Runs

_OWN = 2**31  # ids from here on are nobody else's


def prompt_of(runs: Runs, request: int, prompt_tokens: int, block_tokens: int) -> array[int]:
    """The `prompt_tokens` tokens of a request: block i of `block_tokens` holds nothing but the i-th id of `runs`,
    modulo 2^31, so that prompts agree exactly as far as their ids do. Where the ids end before the prompt, the rest is
    shared with nobody."""
    firsts = [np.arange(last - first + 1, dtype=np.uint64) + np.uint64(first) for first, last in runs]
    ids = np.concatenate(firsts) if firsts else np.empty(0, dtype=np.uint64)
    named = np.repeat((ids % np.uint64(_OWN)).astype(np.uintc), block_tokens)[:prompt_tokens]
    own = np.full(prompt_tokens - len(named), _OWN + request % _OWN, dtype=np.uintc)
    tokens = array(TOKEN_CODE)
    tokens.frombytes(named.tobytes() + own.tobytes())
    return tokens
