"""Score and mask functions for the sweep: shipped ones and two of its own, with tensors that any batch can index.

A shipped function over tensors is known by their dtypes alone, so that another test may have registered the same name
with other tensors: whoever needs them asks `find`.
"""

from __future__ import annotations

from random import Random
from typing import Any

import torch
from batches import Range

from pagegen import modifiers

GENERATOR = torch.Generator().manual_seed(11)
SEQUENCES, POSITIONS = 8, 300  # longer sequences read the last column again
BIAS = torch.randn(SEQUENCES, 90, generator=GENERATOR)
OPEN = torch.rand(160, generator=GENERATOR) < 0.6
REACH = torch.randint(1, 60, (13,), generator=GENERATOR, dtype=torch.int32)
PREFIXES = torch.randint(0, 80, (SEQUENCES,), generator=GENERATOR)
SLOPES = 2.0 ** -(torch.arange(1, 129) % 8 + 1.0)


def _document_bounds() -> tuple[torch.Tensor, torch.Tensor]:
    starts, ends = torch.zeros(SEQUENCES, POSITIONS, dtype=torch.int64), torch.zeros(SEQUENCES, POSITIONS).int()
    for s in range(SEQUENCES):
        cuts = sorted({0, POSITIONS, *torch.randint(1, POSITIONS, (7,), generator=GENERATOR).tolist()})
        for low, high in zip(cuts, cuts[1:], strict=False):
            starts[s, low:high], ends[s, low:high] = low, high
    return starts, ends


STARTS, ENDS = _document_bounds()


@modifiers.score_mod
def bent(score: Any, batch: Any, head: Any, q_pos: Any, k_pos: Any) -> Any:
    bent_down = 9.0 * torch.tanh(score / 9.0) - 0.01 * abs(q_pos - k_pos) + BIAS[batch, k_pos - 3]
    return torch.where(OPEN[head], bent_down, score)


@modifiers.mask_mod
def within_reach(batch: Any, head: Any, q_pos: Any, k_pos: Any) -> Any:
    return (k_pos > q_pos - REACH[head]) & ((q_pos + k_pos) % 5 != 0)


_OVER_TENSORS = {
    "alibi(float32)": lambda: modifiers.alibi(SLOPES),
    "prefix_lm(int64)": lambda: modifiers.prefix_lm(PREFIXES),
    "documents(int64)": lambda: modifiers.documents(STARTS),
    "documents(int64, int32)": lambda: modifiers.documents(STARTS, ENDS),
}
AHEAD = ("causal()", "prefix_lm(int64)", "documents(int64, int32)")  # what is idle where attention is causal


def draw_score(random: Random) -> str:
    return random.choice(["soft_cap(4.0)", "soft_cap(30.0)", "alibi(float32)", bent.name, bent.name])


def draw_mask(random: Random) -> str:
    size = random.choice([1, 5, 16, 48, 100])
    masks = [f"chunked({size})", f"sliding_window({size})", "causal()", within_reach.name]
    return random.choice([*masks, "prefix_lm(int64)", "documents(int64)", "documents(int64, int32)"])


def find(name: str | None, kind: str) -> modifiers.Modifier | None:
    """The modifier of a drawn name."""
    try:
        return modifiers.find(name, kind)
    except ValueError:
        assert name is not None
        return _OVER_TENSORS[name]()


def range_of(name: str | None) -> Range | None:
    """The keys that a drawn mask allows, as plain Python; None for all."""
    if name is None or name == "causal()":
        return None if name is None else lambda s, q: (0, q + 1)
    kind, _, size = name.removesuffix(")").partition("(")
    if kind == "chunked":
        return lambda s, q: (q // int(size) * int(size), (q // int(size) + 1) * int(size))
    if kind == "sliding_window":
        return lambda s, q: (max(0, q - int(size) + 1), 2**30)
    if name == within_reach.name:
        return lambda s, q: (max(0, q - int(REACH.max()) + 1), 2**30)
    modifier = find(name, "mask")
    assert modifier is not None
    bounds = list(modifier.tensors.values())

    def at(tensor: torch.Tensor, *index: int) -> int:
        return int(tensor[tuple(max(0, min(i, size - 1)) for i, size in zip(index, tensor.shape, strict=True))])

    if kind == "prefix_lm":
        return lambda s, q: (0, max(q + 1, at(bounds[0], s)))
    if len(bounds) == 1:
        return lambda s, q: (at(bounds[0], s, q), q + 1)
    return lambda s, q: (at(bounds[0], s, q), at(bounds[1], s, q))
