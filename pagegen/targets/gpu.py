"""The GPU of this machine as a `Device`, asked of the driver and completed from the shipped table."""

from __future__ import annotations

from typing import Any

import torch

from pagegen.spec import Device, Target
from pagegen.targets import gpu_driver


def current_device(target: Target) -> Device:
    """The current GPU's features. Raises ValueError when it is not of `target`'s architecture."""
    here = Target.current() if torch.cuda.is_available() else None
    if here != target:
        there = here or "there is none"
        raise ValueError(f"target must be the GPU of this machine ({there}), got {target}")
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    table = _table_row(target, properties.name)
    return Device(
        name=properties.name,
        target=target,
        units=properties.multi_processor_count,
        memory_gib=round(properties.total_memory / 2**30, 1),
        # the driver does not tell these; the shipped row of the same product, or of the architecture, does
        bandwidth_gb_s=table.bandwidth_gb_s,
        matrix_tflops=table.matrix_tflops,
        last_level_cache_mib=round(getattr(properties, "L2_cache_size", 0) / 2**20, 1),
        shared_memory_kib=getattr(properties, "shared_memory_per_block_optin", 0) / 1024 or table.shared_memory_kib,
        registers_per_unit=getattr(properties, "regs_per_multiprocessor", 0) or table.registers_per_unit,
        max_threads_per_unit=getattr(properties, "max_threads_per_multi_processor", 0) or table.max_threads_per_unit,
        core_clock_mhz=getattr(properties, "clock_rate", 0) / 1000,
        memory_clock_mhz=getattr(properties, "memory_clock_rate", 0) / 1000,
        power_limit_w=gpu_driver.power_limit_w(str(getattr(properties, "uuid", ""))) if target.kind == "cuda" else 0.0,
        partition=gpu_driver.partition(properties.name, _pci_address(properties) if target.kind == "hip" else ""),
    )


def _pci_address(properties: Any) -> str:
    """The device's address as Linux writes it ("0000:c1:00.0"), "" where torch does not tell it."""
    parts = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    known = [part for part in parts if isinstance(part, int)]
    return "{:04x}:{:02x}:{:02x}.0".format(*known) if len(known) == 3 else ""


def _table_row(target: Target, name: str) -> Device:
    """The shipped facts of this product, or of its architecture; rates of 0 (unknown) for one that has no row."""
    from pagegen.costs import shipped_device

    try:
        return shipped_device(target, name=name)
    except ValueError:
        return Device(name=name, target=target)
