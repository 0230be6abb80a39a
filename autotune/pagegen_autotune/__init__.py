"""The tuner: traces, profiles, search, measurement. Names load when first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagegen_autotune.fleet import FleetReport, tune_fleet
    from pagegen_autotune.profiles import import_trace, load_profile, shipped_profiles
    from pagegen_autotune.report import Report
    from pagegen_autotune.served import Rest, ServedBlockSize, serve_block_sizes
    from pagegen_autotune.tuner import tune

__all__ = [
    "FleetReport",
    "Report",
    "Rest",
    "ServedBlockSize",
    "import_trace",
    "load_profile",
    "serve_block_sizes",
    "shipped_profiles",
    "tune",
    "tune_fleet",
]

_HOMES = {
    "FleetReport": "pagegen_autotune.fleet",
    "Report": "pagegen_autotune.report",
    "Rest": "pagegen_autotune.served",
    "ServedBlockSize": "pagegen_autotune.served",
    "import_trace": "pagegen_autotune.profiles",
    "load_profile": "pagegen_autotune.profiles",
    "serve_block_sizes": "pagegen_autotune.served",
    "shipped_profiles": "pagegen_autotune.profiles",
    "tune": "pagegen_autotune.tuner",
    "tune_fleet": "pagegen_autotune.fleet",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'pagegen_autotune' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
