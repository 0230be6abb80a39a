"""The shipped table of devices (`pagegen/spec/devices.csv`): features of GPUs that are not in this machine."""

from __future__ import annotations

import csv
import functools
import re
from pathlib import Path

import pagegen.spec
from pagegen.spec import Device, Target


@functools.cache
def shipped_devices() -> tuple[Device, ...]:
    """Every device of the table, verified rows before partly verified ones, in the table's order."""
    text = (Path(pagegen.spec.__file__).parent / "devices.csv").read_text(encoding="utf-8")
    rows = sorted(csv.DictReader(text.splitlines()), key=lambda row: row["verified"] != "yes")
    return tuple(_device(row) for row in rows)


def _device(row: dict[str, str]) -> Device:
    return Device(
        name=row["name"],
        target=Target.parse(row["arch"]),
        units=int(row["units"] or 0),
        memory_gib=float(row["memory_gib"] or 0),
        bandwidth_gb_s=float(row["bandwidth_gb_s"] or 0),
        matrix_tflops=float(row["matrix_tflops"] or 0),
        last_level_cache_mib=float(row["last_level_cache_mib"] or 0),
        shared_memory_kib=float(row["shared_memory_kib"] or 0),
        registers_per_unit=int(row["registers_per_unit"] or 0),
        max_threads_per_unit=int(row["max_threads_per_unit"] or 0),
    )


def shipped_device(target: Target | str, *, name: str | None = None) -> Device:
    """The GPU that stands for an arch that is not in this machine; the one called `name` where the table has it.

    It is the first verified row of the table, else the first partly verified one: sm_80 is the
    A100-SXM4-40GB, sm_89 the RTX 4090, sm_90 the H100 80GB HBM3, sm_100 the B200, sm_120 the RTX 5090 (partly),
    gfx942 the MI300X, gfx950 the MI355X (partly).

    Raises ValueError for a target without a row, naming those that have one.
    """
    target = Target.parse(target)
    found = [device for device in shipped_devices() if device.target == target]
    if found:
        return next((device for device in found if device.name == name), found[0])
    known = ", ".join(sorted({str(device.target) for device in shipped_devices()}))
    raise ValueError(
        f"target must be an arch of the device table ({known}), got {target}: a GPU is added as a row of "
        "pagegen/spec/devices.csv"
    )


def product(target: Target | str, name: str) -> Device:
    """The product of an arch that `name` names, in full ("NVIDIA H200") or by words that no other row of the arch has
    ("h200", "a100 pcie"), in any case.

    Raises ValueError for a name that fits no product of the arch, or several, naming those that there are.
    """
    target = Target.parse(target)
    rows = [device for device in shipped_devices() if device.target == target]
    words = re.findall(r"[a-z0-9]+", name.lower())
    exact = [device for device in rows if device.name.lower() == name.strip().lower()]
    found = exact or [device for device in rows if _named(device, words)]
    if len(found) == 1:
        return found[0]
    names = ", ".join(device.name for device in found or rows) or "none in the device table"
    others = {str(d.target) for d in shipped_devices() if d.target != target and _named(d, words)} if not found else ()
    elsewhere = f", which names one of {', '.join(sorted(others))}" if others else ""
    raise ValueError(f"device must name one product of {target} ({names}), got {name!r}{elsewhere}")


def _named(device: Device, words: list[str]) -> bool:
    """Whether the words, of which there must be one, are all in the device's name."""
    return bool(words) and set(words) <= set(re.findall(r"[a-z0-9]+", device.name.lower()))
