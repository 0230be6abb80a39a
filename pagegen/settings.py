"""The only place that reads the environment. Argument beats environment beats default."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import platformdirs

APP = "pagegen"
# The dictionary that os.environ wraps: 0.1 us, where the wrapper takes 0.6 to find that there is no such variable.
_ENVIRONMENT = os.environ
_WRAPPED: Mapping[bytes, bytes] = getattr(os.environb, "_data", os.environb)


def cache_dir() -> Path:
    """Where generated kernels and compiled libraries are kept (`PAGEGEN_CACHE_DIR`)."""
    return Path(os.environ.get("PAGEGEN_CACHE_DIR") or platformdirs.user_cache_dir(APP))


def artefacts() -> str:
    """The folder of kernels that were compiled elsewhere (`PAGEGEN_ARTEFACTS`, see `pagegen build`), or ""."""
    return os.environ.get("PAGEGEN_ARTEFACTS", "")


def artefacts_sha256() -> str:
    """The sha256 that the manifest of every folder of artefacts must have (`PAGEGEN_ARTEFACTS_SHA256`), or ""."""
    return os.environ.get("PAGEGEN_ARTEFACTS_SHA256", "")


def database_url() -> str:
    """The tuning database (`PAGEGEN_DB`: a path or a URL), by default `own_database`."""
    return os.environ.get("PAGEGEN_DB") or own_database()


def own_database() -> str:
    """The tuning database that nobody named: a file in the user's data folder."""
    return str(Path(platformdirs.user_data_dir(APP)) / "tuning.db")


def target_name() -> str:
    """The target to use in place of the machine's own (`PAGEGEN_TARGET`), or ""."""
    return os.environ.get("PAGEGEN_TARGET", "") if _may_hold(b"PAGEGEN_TARGET") else ""


def check_values() -> bool:
    """Whether every call checks block ids and lengths on the device (`PAGEGEN_CHECK=1`)."""
    return _may_hold(b"PAGEGEN_CHECK") and os.environ.get("PAGEGEN_CHECK") == "1"


def _may_hold(name: bytes) -> bool:
    """Whether os.environ must be asked for a variable: where it is set, or a test put a dictionary there."""
    return name in _WRAPPED or os.environ is not _ENVIRONMENT


def cxx() -> str:
    """The C++ compiler (`CXX`), by default c++."""
    return os.environ.get("CXX") or "c++"


def omp_wait_policy() -> str:
    """How OpenMP threads wait in processes that measure (`OMP_WAIT_POLICY`), by default asleep: where a host shares its
    cores, a thread that spins takes the time of the one it waits for (batches of 0.5 ms then took 12)."""
    return os.environ.get("OMP_WAIT_POLICY") or "passive"


def measuring_environment() -> dict[str, str]:
    """The environment of a process that measures: this one's, and `omp_wait_policy`, which OpenMP reads as it loads;
    without artefacts, since what is measured is what the compiler here makes."""
    own = {name: value for name, value in os.environ.items() if name != "PAGEGEN_ARTEFACTS"}
    return {**own, "OMP_WAIT_POLICY": omp_wait_policy()}


def keep_ray_quiet() -> None:
    """Ray reports how it is used to its makers unless it is told not to; a process of pagegen's never does."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


def interpreting() -> bool:
    """Whether Triton's interpreter was asked for (`TRITON_INTERPRET=1`), which must be set before triton loads."""
    return os.environ.get("TRITON_INTERPRET", "") == "1"


def vllm_replaced() -> tuple[str, ...]:
    """Attention backends of vLLM whose place pagegen's takes (`PAGEGEN_VLLM_REPLACE`, separated by commas)."""
    names = os.environ.get("PAGEGEN_VLLM_REPLACE", "").split(",")
    return tuple(name.strip().upper() for name in names if name.strip())
