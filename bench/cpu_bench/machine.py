"""What the numbers were taken on."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import Any

import torch

from pagegen import __version__
from pagegen.targets import cpu, cpu_device


def environment(peers: dict[str, str]) -> dict[str, Any]:
    """CPU, compiler, versions (a peer's, or "not installed"), load and pages."""
    device = cpu_device.current_device()
    return {
        "date": date(),
        "cpu": device.name,
        "features": list(device.features),
        "threads": torch.get_num_threads(),
        "last_level_cache_mib": device.last_level_cache_mib,
        "memory_gib": device.memory_gib,
        "huge_pages_gib": round(_kib("/proc/self/smaps_rollup", "AnonHugePages") / 2**20, 2),
        "compiler": cpu.compiler(),
        "pagegen": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "load_average": round(os.getloadavg()[0], 2),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", ""),
        "peers": peers,
    }


def date() -> str:
    """Today in UTC: the day of a measurement."""
    return time.strftime("%Y-%m-%d", time.gmtime())


def available_bytes() -> int:
    """Memory that processes could still take; a lot where the system does not say."""
    return _kib("/proc/meminfo", "MemAvailable") * 1024 or 1 << 40


def _kib(path: str, field: str) -> int:
    file = Path(path)
    if file.exists():
        for line in file.read_text(encoding="utf-8").splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1])
    return 0
