"""What a predicted time is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

# The parts that overlap: the longest of them is what is waited for.
OVERLAPPING = ("memory_us", "matrix_us", "issue_us", "latency_us")


@dataclass(frozen=True, kw_only=True)
class Parts:
    """One call's predicted time, in microseconds.

    `fixed_us`: launches or the call. Then what overlaps: `memory_us`, the bytes at the rate that the programs in flight
    can draw; `matrix_us`, the products at the matrix units' rate; `issue_us`, the main loop's instructions at the rate
    they are issued; `latency_us`, the longest program alone, tile after tile. `merge_us`: handing out work and merging
    partial states.
    """

    fixed_us: float
    memory_us: float = 0.0
    matrix_us: float = 0.0
    issue_us: float = 0.0
    latency_us: float = 0.0
    merge_us: float = 0.0

    @property
    def total_us(self) -> float:
        """The expected time."""
        return self.fixed_us + max(self.memory_us, self.matrix_us, self.issue_us, self.latency_us) + self.merge_us

    @property
    def bound(self) -> str:
        """Which of the overlapping parts is waited for: "memory", "matrix", "issue" or "latency"."""
        return max(OVERLAPPING, key=lambda name: float(getattr(self, name))).removesuffix("_us")

    @property
    def shares(self) -> Mapping[str, float]:
        """Every part over the total, 0 to 1, by its name without the unit."""
        total = self.total_us
        return {name.removesuffix("_us"): us / total for name, us in asdict(self).items()}

    def to_dict(self) -> dict[str, float]:
        """Plain JSON-ready fields."""
        return asdict(self)
