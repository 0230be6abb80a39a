"""What only a GPU's driver knows: its release, the power limit in force, and how the device is cut up."""

from __future__ import annotations

import ctypes
import functools
import re
from pathlib import Path

_NVML = "libnvidia-ml.so.1"
_NVIDIA_RELEASE = Path("/proc/driver/nvidia/version")
_AMD_RELEASE = Path("/sys/module/amdgpu/version")
_PCI_DEVICES = Path("/sys/bus/pci/devices")


@functools.cache
def release() -> str:
    """The release of the GPU driver ("570.86.15"), "" where none tells it."""
    if _NVIDIA_RELEASE.exists():
        found = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", _NVIDIA_RELEASE.read_text(encoding="utf-8"))
        return found[1] if found else ""
    return _AMD_RELEASE.read_text(encoding="utf-8").strip() if _AMD_RELEASE.exists() else ""


def power_limit_w(uuid: str, library: str = _NVML) -> float:
    """The enforced power limit of an NVIDIA GPU in watts; 0 where the driver's library is not there or does not say.

    `uuid` is torch's, without the prefix "GPU-". NVML calls, by nvml.h: 0 is success, milliwatts.
    """
    try:
        nvml = ctypes.CDLL(library)
        failed = nvml.nvmlInit_v2()
    except (OSError, AttributeError):
        return 0.0
    if failed:
        return 0.0
    try:
        handle, limit = ctypes.c_void_p(), ctypes.c_uint()
        if nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode(), ctypes.byref(handle)):
            return 0.0
        failed = nvml.nvmlDeviceGetEnforcedPowerLimit(handle, ctypes.byref(limit))
        return 0.0 if failed else limit.value / 1000
    finally:
        nvml.nvmlShutdown()


def partition(name: str, pci_address: str = "") -> str:
    """The slice of the device that a process sees: "MIG 1g.10gb" from an NVIDIA GPU's name, the compute partition
    ("CPX") that Linux tells of an AMD GPU at that PCI address, "" for a whole device."""
    found = re.search(r"\bMIG \S+", name)
    if found:
        return found[0]
    mode = _PCI_DEVICES / pci_address / "current_compute_partition"
    told = mode.read_text(encoding="utf-8").strip() if pci_address and mode.exists() else ""
    return "" if told == "SPX" else told  # one partition: the whole device
