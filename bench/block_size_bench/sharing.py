"""In what grain prefixes are shared: what a cache of full blocks finds of the tokens that a prompt has in common.

`common(requests)` says of how many leading tokens each request's keys and values were computed before. A cache of
blocks of b finds b*floor(min(common, prompt - 1) / b) of them: full blocks alone, and never the last token, which is
left to compute. The rest is lost to rounding.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from cache_bench.traces import Request, Turn, conversations, packed, turns_of
from pagegen_autotune.trace import Trace

from pagegen.cache import BlockAllocator

Row = dict[str, Any]
Lengths = npt.NDArray[np.int64]
REPLAYED_TOKENS = 500_000  # of prompts that the allocator is asked about too: it takes its time, the formula none


def requests_of(trace: Trace) -> list[Request]:
    """A trace read with its prefixes as requests with the ids one by one."""
    if trace.prefix_runs is None:
        raise ValueError("trace must be read with keep_prefixes=True and have prefixes, got one without")
    sizes = zip(trace.prompt_tokens.tolist(), trace.output_tokens.tolist(), trace.prefix_runs, strict=True)
    return [
        Request(row, prompt, output, tuple(itertools.chain.from_iterable(range(a, b + 1) for a, b in runs)))
        for row, (prompt, output, runs) in enumerate(sizes)
    ]


def common(dialogues: Sequence[Sequence[Request]], id_tokens: int) -> Lengths:
    """Leading tokens of each request that an earlier one had: those that the ids name, an id standing for `id_tokens`;
    in a conversation also the answer before, but for its last token, which nobody computed."""
    seen: set[int] = set()
    found = []
    for dialogue in dialogues:
        before = 0
        for request in dialogue:
            named = next((i for i, name in enumerate(request.ids) if name not in seen), len(request.ids))
            seen.update(request.ids)
            found.append(min(request.prompt_tokens, max(named * id_tokens, before)))
            before = request.prompt_tokens + max(request.output_tokens, 1) - 1
    return np.array(found, dtype=np.int64)


def hits(shared: Lengths, prompts: Lengths, block_size: int) -> Lengths:
    """Tokens that a cache of full blocks finds, nothing ever evicted."""
    return np.minimum(shared, prompts - 1) // block_size * block_size


def replayed(turns: Sequence[Turn], block_size: int) -> Lengths:
    """The same by `BlockAllocator`, every token made: what each `add` found."""
    most = sum(-(-(len(turn.prompt) + len(turn.output)) // block_size) for turn in turns)
    allocator = BlockAllocator(most, block_size)
    found = []
    for i, turn in enumerate(turns):
        prompt, fed_back = packed(turn.prompt), array("I", turn.output[:-1].tobytes())
        found.append(allocator.add(i, prompt))
        allocator.append(i, fed_back)
        allocator.mark_computed(i, len(prompt) + len(fed_back))
        allocator.free(i)
    return np.array(found, dtype=np.int64)


def rows(trace: Trace, name: str, id_tokens: int, block_sizes: tuple[int, ...]) -> Iterator[Row]:
    """One row a block size: `hit_share` of all prompt tokens, `lost_share` of those in common, `lost_tokens` a request
    that has any in common, and whether the allocator found the very same for the first requests."""
    dialogues = list(conversations(requests_of(trace)))
    prompts = np.array([request.prompt_tokens for dialogue in dialogues for request in dialogue], dtype=np.int64)
    shared = common(dialogues, id_tokens)
    reusable = np.minimum(shared, prompts - 1)
    first: list[Turn] = []
    left = REPLAYED_TOKENS
    for dialogue in dialogues:
        left -= sum(request.prompt_tokens for request in dialogue)
        if left < 0 and first:
            break
        first += turns_of(dialogue, id_tokens)
    for size in block_sizes:
        found = hits(shared, prompts, size)
        row: Row = {
            "section": "sharing",
            "cell": {"trace": name, "block_size": size, "requests": len(prompts), "id_tokens": id_tokens},
            "hit_share": int(found.sum()) / int(prompts.sum()),
            "common_share": int(reusable.sum()) / int(prompts.sum()),
            "lost_share": 1 - int(found.sum()) / max(1, int(reusable.sum())),
            "lost_tokens": float((reusable - found)[reusable > 0].mean()) if reusable.any() else 0.0,
        }
        if size >= 16:  # of smaller blocks the allocator has millions
            row["replayed"] = len(first)
            row["replayed_equal"] = bool((replayed(first, size) == found[: len(first)]).all())
        yield row
