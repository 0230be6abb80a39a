"""`Cell`: one search of a tuning run."""

from __future__ import annotations

from dataclasses import dataclass

from pagegen.spec import CacheLayout, Variant
from pagegen_autotune.objective import Loads
from pagegen_autotune.space import Space


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One search: a layout and a class of batches ("decode", "mixed" or "all"). `loads` are the class's workloads with
    their weights, those that matter most first."""

    layout: CacheLayout
    batches: str
    space: Space
    loads: Loads

    @property
    def default(self) -> Variant:
        return self.space.start

    @property
    def name(self) -> str:
        """For people: "block size 16 NHD, decode"."""
        return f"block size {self.layout.block_size} {self.layout.order}, {self.batches}"


Contender = tuple[Cell, Variant]
