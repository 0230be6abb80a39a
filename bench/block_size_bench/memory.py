"""How much memory requests hold, slot by slot, over their lives: in blocks, and reserved in one piece.

A request is in the cache with its prompt and then one token more a step: at prompt, prompt + 1, ... prompt + output - 1
tokens, since the last output is never fed back. Sums over all these lengths are closed forms, so whole traces take no
time. `first` and `last` are int64 arrays of a trace's requests: the least and the largest length of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from pagegen_autotune.trace import Trace

from pagegen.spec import AttentionSpec

Row = dict[str, Any]
Lengths = npt.NDArray[np.int64]


def lives(trace: Trace) -> tuple[Lengths, Lengths]:
    """(first, last) of every request; one for no output is in the cache once, as one for 1 is."""
    return trace.prompt_tokens, trace.prompt_tokens + np.maximum(trace.output_tokens, 1) - 1


def wasted_slots(lengths: Lengths, block_size: int) -> Lengths:
    """Slots of the last block that hold nothing, b*ceil(n/b) - n."""
    return -lengths % block_size


def block_slots(first: Lengths, last: Lengths, block_size: int) -> Lengths:
    """b*ceil(n/b), summed over n = first ... last."""
    return _slots_up_to(last, block_size) - _slots_up_to(first - 1, block_size)


def _slots_up_to(length: Lengths, block_size: int) -> Lengths:
    """b*ceil(n/b), summed over n = 1 ... length: b lengths for each full block, and what is left."""
    full, left = length // block_size, length % block_size
    return block_size * (block_size * full * (full + 1) // 2 + left * (full + 1))


def tokens(first: Lengths, last: Lengths) -> Lengths:
    """n, summed over n = first ... last."""
    return (first + last) * (last - first + 1) // 2


def power_of_two(lengths: Lengths) -> Lengths:
    """The least powers of two that are not smaller."""
    exponents: Lengths = np.ceil(np.log2(np.maximum(lengths, 1))).astype(np.int64)
    powers: Lengths = np.left_shift(1, exponents)
    return powers


# What a server reserves in one piece when it admits a request: for the longest request of the whole trace, for this
# one's own length rounded up to a power of two as a buddy allocator does, and for its own length, which nobody knows.
RESERVATIONS: Mapping[str, Callable[[Lengths], Lengths]] = {
    "longest request": lambda last: np.full_like(last, last.max()),
    "power of two": power_of_two,
    "own length, foretold": lambda last: last,
}


def rows(
    trace: Trace, name: str, block_sizes: tuple[int, ...], spec: AttentionSpec, layers: int, memory_bytes: int
) -> Iterator[Row]:
    """One row a way to hold a trace's requests. `used_share`: of the slots held, over all lives, those with a token in;
    `end_waste`: mean slots wasted by a request at its end; `sequences`: how many of them, each at a random moment of
    its life, the memory holds on average; `metadata_bytes`: of a mean sequence's block table and length."""
    first, last = lives(trace)
    held, moments = int(tokens(first, last).sum()), int((last - first + 1).sum())
    memory_tokens = memory_bytes // (spec.kv_bytes_per_token * layers)
    cell = {"trace": name, "requests": len(trace)}

    def row(way: dict[str, Any], slots: int, end_waste: float, metadata: float) -> Row:
        return {
            "section": "memory",
            "cell": {**cell, **way},
            "used_share": held / slots,
            "end_waste": end_waste,
            "sequences": memory_tokens / (slots / moments),
            "metadata_bytes": metadata,
            "metadata_share": metadata / (held / moments * spec.kv_bytes_per_token * layers),
        }

    for size in block_sizes:
        slots = int(block_slots(first, last, size).sum())
        # a block id is an int32, and so is a length
        yield row({"block_size": size}, slots, float(wasted_slots(last, size).mean()), 4 * slots / moments / size + 4)
    for reservation, reserved in RESERVATIONS.items():
        kept = reserved(last)
        slots = int((kept * (last - first + 1)).sum())
        # an address and a length
        yield row({"reservation": reservation}, slots, float((kept - last).mean()), 12.0)
