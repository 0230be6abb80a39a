"""This machine's CPU as a `Device`."""

from __future__ import annotations

import functools
import os
import platform
import re
import time
from pathlib import Path

import torch

from pagegen.spec import Device, Target
from pagegen.targets import cpu_features
from pagegen.targets.errors import CompileError

# What decides which kernels are compiled and how fast they are; the kernel lists a hundred others.
_TOLD = (
    "asimd", "asimddp", "amx_bf16", "amx_tile", "avx2", "avx512_bf16", "avx512_fp16", "avx512_vnni", "avx512bw",
    "avx512f", "avx512vl", "avx_vnni", "bf16", "f16c", "fma", "sve", "sve2",
)  # fmt: skip
_PROBE_SECONDS = 0.2


def current_device() -> Device:
    """The CPU this process runs on. `units` are the threads torch uses, `matrix_tflops` is not known.

    `bandwidth_gb_s` is measured once a process (and number of threads) by reading memory front to back on those
    threads for about 0.2 s; 0 where no compiler works. Where others have the cores meanwhile it is what the threads
    draw while they run.
    """
    return _describe(torch.get_num_threads())


@functools.cache
def _describe(threads: int) -> Device:
    return Device(
        name=_model_name(),
        target=Target("cpu"),
        units=threads,
        memory_gib=round(_memory_bytes() / 2**30, 1),
        bandwidth_gb_s=round(read_bandwidth_gb_s(), 1),
        last_level_cache_mib=last_level_cache_bytes() / 2**20,
        features=tuple(f for f in cpu_features.names() if f in _TOLD),
    )


def _model_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def last_level_cache_bytes() -> int:
    """The largest data cache that the first CPU sees; 0 where the system does not say."""
    sizes = [0]
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        found = re.fullmatch(r"(\d+)([KM]?)", (index / "size").read_text(encoding="utf-8").strip())
        if found:
            sizes.append(int(found[1]) * {"": 1, "K": 2**10, "M": 2**20}[found[2]])
    return max(sizes)


def read_bandwidth_gb_s(seconds: float = _PROBE_SECONDS) -> float:
    """The best rate of several sequential reads of memory that is in no cache; 0 where no compiler works.

    Reads a buffer of four last-level caches (in huge pages where the system gives them), 128 MiB at least and a quarter
    of memory at most, as often as fits into `seconds`, filling it included.
    """
    from pagegen.targets import cpu_probes
    from pagegen.targets.huge_pages import huge_memory

    try:
        cpu_probes.library()
    except CompileError:
        return 0.0
    size = min(max(128 << 20, 4 * last_level_cache_bytes()), _memory_bytes() // 4) // 4096 * 4096
    end = time.perf_counter() + seconds
    # written once, or every page would be the same page of zeros
    buffer = huge_memory(size).fill_(1)
    best = float("inf")
    while best == float("inf") or time.perf_counter() < end:
        start, cpu_start = time.perf_counter(), time.process_time()
        cpu_probes.read(buffer)
        best = min(best, _undisturbed(time.perf_counter() - start, time.process_time() - cpu_start))
    return size / best / 1e9


def _undisturbed(wall_s: float, cpu_s: float) -> float:
    """Seconds that the threads would have taken without others. Where ten processes wanted each core reads took 0.2 to
    1.2 GB/s by the clock, and at 26 to 42 by CPU time: kernels were then held to be impossibly fast."""
    side_by_side = min(torch.get_num_threads(), len(os.sched_getaffinity(0)))
    return min(wall_s, cpu_s / side_by_side) if cpu_s > 0 else wall_s
