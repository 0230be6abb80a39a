"""What every part knows: the device, the sizes, the time that is left and where the trials are kept."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gpu_check_bench.timing import Clock, DeviceClock, HostClock
from pagegen import targets
from pagegen.spec import Device, Target

# Cold means: so many times the last-level cache is read between two readings of one block.
CACHES = 4
UNKNOWN_CACHE_MIB = 64.0
DATABASE = "tuning.db"


@dataclass(eq=False)
class Context:
    """`on` is where the tensors are, "cuda" or "cpu"; a dry run is small and its figures mean nothing. `until` is when
    the running part ends, on the monotonic clock."""

    on: str
    dry_run: bool
    folder: Path
    shard: tuple[int, int] = (0, 1)
    records: str = ""  # a file of earlier records to add to, where there is one
    failed: set[tuple[str, str]] = field(default_factory=set)  # (part, case) of this run, in any process
    until: float = 0.0

    @classmethod
    def make(cls, asked: dict[str, Any]) -> Context:
        on = "cpu" if asked["dry_run"] else "cuda"
        number, of = asked["shard"]
        return cls(
            on=on, dry_run=asked["dry_run"], folder=Path(asked["folder"]), shard=(number, of), records=asked["records"],
            failed={(part, case) for part, case in asked["failed"]},
        )  # fmt: skip

    @property
    def database(self) -> str:
        """The run's own: what the operator asks too (PAGEGEN_DB)."""
        return str(self.folder / DATABASE)

    @functools.cached_property
    def target(self) -> Target:
        return Target("cpu") if self.on == "cpu" else Target.current()

    @functools.cached_property
    def device(self) -> Device:
        return targets.current_device(self.target)

    @property
    def cold_bytes(self) -> int:
        """What a contender must walk over before it comes back to a block."""
        if self.dry_run:
            return 1 << 20
        return int(CACHES * (self.device.last_level_cache_mib or UNKNOWN_CACHE_MIB) * 2**20)

    def left_s(self) -> float:
        return self.until - time.monotonic()

    def stuck(self) -> bool:
        """Whether an error sticks to this process, as CUDA's do: nothing more can be run in it."""
        if self.on == "cpu":
            return False
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return True
        return False

    def environment(self) -> dict[str, Any]:
        """What the figures depend on."""
        from pagegen_autotune.measure import environment_of

        facts: dict[str, Any] = {**environment_of(self.target), "target": str(self.target)}
        facts["device"] = self.device.to_dict()
        return facts

    @functools.cached_property
    def clock(self) -> Clock:
        return HostClock() if self.on == "cpu" else DeviceClock(self.cold_bytes)
