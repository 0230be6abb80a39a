"""The search space: the values each field of a variant may take, and which points of it are legal."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from pagegen import costs
from pagegen.spec import AttentionSpec, CacheLayout, CppVariant, Device, TritonVariant, Variant
from pagegen.spec.dtypes import INT4
from pagegen.spec.variant import ACCUMULATES, PAGE_WALKS, SCHEDULES, all_heads

# Ordered values move one step at a time; the unordered `page_walk` may change to any other.
AXES: dict[str, dict[str, tuple[Any, ...]]] = {
    "cpp": {
        "tile_kv": (32, 64, 128, 256),
        "streams": (2, 4, 8),
        "heads_together": (1, 2, 8),
        "prefetch_ahead": (0, 1, 2),
        "split_tokens": (512, 2048, 8192),
    },
    "triton": {
        "tile_rows": (16, 32, 64, 128),
        "tile_kv": (16, 32, 64, 128),
        "page_walk": PAGE_WALKS,
        "num_splits": (1, 2, 4, 8, 16, 32),
        "num_warps": (2, 4, 8),
        "num_stages": (1, 2, 3, 4),
    },
}
# The one shape that Triton 3.7 compiles with loads and arithmetic in warps of their own.
WARP_SPECIALIZED = {
    "warp_specialize": True, "loads": "descriptor", "page_walk": "tile_in_page", "tile_rows": 64, "tile_kv": 128,
    "num_warps": 8, "num_stages": 2,
}  # fmt: skip
# Other ways to do the work, tried one at a time and not multiplied out: changes that belong together.
WAYS: dict[str, tuple[dict[str, Any], ...]] = {
    "cpp": (
        {"read_order": "head"},
        {"read_order": "token", "heads_together": 8, "rows_together": 4, "prefetch_ahead": 1},
        *({"rows_together": rows} for rows in (2, 4, 8)),
        *({"prefetch_hint": hint} for hint in ("l1", "l2")),
        *({"num_splits": splits} for splits in (0, 4)),
        *({"schedule": schedule} for schedule in SCHEDULES),
        *({"accumulate": accumulate} for accumulate in ACCUMULATES),
    ),
    "triton": (
        {"head_pieces": "padded"},
        {"head_pieces": "split"},
        {"dot": "mma", "tile_rows": 16},
        *(
            {"dot": "fma", "tile_rows": rows, "tile_kv": 16, "page_walk": walk}
            for rows in (1, 2, 4)
            for walk in PAGE_WALKS
        ),
        {"loads": "pointer"},
        {"loads": "descriptor", "page_walk": "tile_in_page"},
        {"reduce": "kernel"},
        {"reduce": "last"},
        {"split_tokens": 0, "num_splits": 8},
        *({"split_tokens": tokens, "num_splits": 1, "programs": 0} for tokens in (256, 512, 1024)),
        {"warp_specialize": False},
        WARP_SPECIALIZED,
    ),
}
# Programs a multiprocessor that share all work equally.
SHARES = (1, 2, 4)
Legality = Callable[[Variant], Sequence[str]]
# What a variant is expected to take on the batches it is searched for, in any unit.
Prior = Callable[[Variant], float]


def resources(variant: Variant) -> tuple[int, ...]:
    """What a variant occupies, for tie-breaks: less is better. Threads, then memory in flight, then extra work."""
    if isinstance(variant, TritonVariant):
        in_flight = variant.tile_kv * variant.num_stages + variant.tile_rows
        # the walks in the order of the block-table entries they read: one a tile, one a block, one a key
        parts = variant.num_splits + (variant.split_tokens > 0) + (variant.programs > 0)
        return (variant.num_warps, in_flight, parts, PAGE_WALKS.index(variant.page_walk))
    if isinstance(variant, CppVariant):
        # a larger split divides fewer sequences, so fewer partial states are kept and merged
        in_flight = variant.tile_kv * (1 + variant.prefetch_ahead)
        return (in_flight, variant.streams * variant.heads_together, variant.num_splits, -variant.split_tokens)
    raise TypeError(f"variant must be a TritonVariant or a CppVariant, got {type(variant).__name__}")


class Space:
    """The legal variants of one spec and layout on one device, around a start that is always legal.

    `legality` gives the reasons why a variant is not legal (none: it is). `rejected` keeps every point that was
    asked for and refused, with its reasons, under the variant's name. `prior` and `seeds` are what is known before
    anything is measured: what a model expects, and what won on similar devices.
    """

    def __init__(
        self, start: Variant, legality: Legality, ways: Sequence[dict[str, Any]] | None = None, *,
        axes: Mapping[str, tuple[Any, ...]] | None = None, prior: Prior | None = None, seeds: Sequence[Variant] = (),
    ) -> None:  # fmt: skip
        self.start = start
        self.axes = AXES[start.family] if axes is None else axes
        self.ways = WAYS[start.family] if ways is None else ways
        self.prior = prior
        self.seeds: list[Variant] = []
        self.rejected: dict[str, tuple[str, ...]] = {}
        self._legality = legality
        self.seed(seeds)

    def seed(self, variants: Iterable[Variant]) -> None:
        """Puts variants that won elsewhere before the seeds there are, those that are legal here."""
        found = [v for v in variants if v.family == self.start.family and not self._legality(v)]
        self.seeds = [v for v in dict.fromkeys([*found, *self.seeds]) if v != self.start]

    def grid(self) -> list[Variant]:
        """Every legal variant along the axes, the start first."""
        names = list(self.axes)
        points = (dict(zip(names, values, strict=True)) for values in itertools.product(*self.axes.values()))
        return self._legal([{}, *points])

    def points(self) -> list[Variant]:
        """The grid, and the start with each other way to do the work: all that a search chooses from at first."""
        return list(dict.fromkeys([*self.grid(), *self._legal(self.ways)]))

    def neighbours(self, variant: Variant) -> list[Variant]:
        """The legal variants one step along one axis away from `variant`, or another way to do the work."""
        ways = [way for way in self.ways if any(getattr(variant, name) != value for name, value in way.items())]
        return [v for v in self._legal([*self._steps(variant), *ways], base=variant) if v != variant]

    def lines(self, variant: Variant) -> list[Variant]:
        """The legal variants with another value of one axis, however far."""
        steps = ({name: value} for name, values in self.axes.items() for value in values)
        return [v for v in self._legal(steps, base=variant) if v != variant]

    def combine(self, base: Variant, moves: Iterable[Variant]) -> list[Variant]:
        """`base` with each move's changes applied, the earlier move winning where two change one field. The
        moves are variants that differ from `base`; the result is empty where the combination is not legal."""
        changes: dict[str, Any] = {}
        for move in moves:
            for f in fields(base):
                value = getattr(move, f.name)
                if value != getattr(base, f.name):
                    changes.setdefault(f.name, value)
        return self._legal([changes], base=base)

    def _steps(self, variant: Variant) -> Iterator[dict[str, Any]]:
        for name, values in self.axes.items():
            here = getattr(variant, name)
            if isinstance(here, str):
                yield from ({name: value} for value in values if value != here)
                continue
            # a default may lie between the axis's values
            line = sorted({*values, here})
            at = line.index(here)
            for value in line[max(at - 1, 0) : at] + line[at + 1 : at + 2]:
                yield {name: value}
                if name == "tile_kv" and "page_walk" in self.axes:
                    # the walk fits the tile to the block: a step that only takes another walk is one step, too
                    yield from ({name: value, "page_walk": walk} for walk in PAGE_WALKS if walk != variant.page_walk)  # type: ignore[attr-defined]

    def _legal(self, points: Iterable[dict[str, Any]], base: Variant | None = None) -> list[Variant]:
        base = self.start if base is None else base
        found: dict[Variant, None] = {}
        for changes in points:
            try:
                variant = replace(base, **changes)
            except ValueError as error:  # the fields contradict each other: not a variant at all
                self.rejected[_describe(base, changes)] = (str(error),)
                continue
            reasons = () if variant == self.start else tuple(self._legality(variant))
            if reasons:
                self.rejected[variant.name] = reasons
            else:
                found[variant] = None
        return list(found)


def _describe(base: Variant, changes: dict[str, Any]) -> str:
    return f"{base.name} with " + ",".join(f"{k}={v}" for k, v in changes.items())


def space_around(
    start: Variant, spec: AttentionSpec, layout: CacheLayout, device: Device, *, prior: Prior | None = None,
    seeds: Sequence[Variant] = (),
) -> Space:  # fmt: skip
    """The space that `pagegen.costs.legal` allows on `device`; the rest is the space's own."""
    ways = list(WAYS[start.family])
    if start.family == "cpp":
        if _multiplies_bytes(spec, device):
            ways = [way for way in ways if way.get("read_order") != "token"]
        if spec.num_kv_heads > 8:
            heads = {"heads_together": all_heads(spec.num_kv_heads)}
            ways = [{**way, **heads} if "heads_together" in way else way for way in ways] + [heads]
    if start.family == "triton" and device.target.is_gpu:
        equal = {"num_splits": 1, "split_tokens": 0, "reduce": "kernel"}
        ways += [{"programs": 0}, *({"programs": n * device.units, **equal} for n in SHARES)]
    return Space(start, lambda v: costs.legal(spec, layout, v, device), ways, prior=prior, seeds=seeds)


def _multiplies_bytes(spec: AttentionSpec, device: Device) -> bool:
    """Whether the C++ kernel multiplies what is stored as bytes, which it does by head whatever `read_order` says: see
    `BYTES` in templates/rows.hpp."""
    instructions = "avx512_vnni" in device.features
    dtypes = spec.kv_dtype in (torch.int8, INT4) and spec.q_dtype != torch.float32
    return instructions and dtypes and spec.head_dim % 16 == 0 and spec.head_dim <= 256
