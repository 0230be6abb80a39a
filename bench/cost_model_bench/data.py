"""What others measured: one row a kernel, shape and GPU, as the file has it, and the fastest of each shape."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pagegen import costs
from pagegen.spec import AttentionSpec, CacheLayout, Device, Workload

USUAL_PLACE = Path(__file__).parents[3] / "shared" / "data" / "measured_decode_attention.csv"
ORIGIN = {
    "source": "aiconfigurator-core 0.12.0 (package index): decode-attention latencies of vLLM, SGLang and TensorRT-LLM "
    "kernels on A100 SXM and H200",
    "licence": "Apache-2.0",
    "notes": "Latencies are taken as milliseconds in the source. Page size, timing method and whether the KV write is "
    "included are not stated there.",
}
# The 80 GB product: one kernel of the data reads 1,575 GB/s, which the 40 GB product's memory (1,555) cannot give.
DEVICES = {
    "a100_sxm": costs.shipped_device("sm_80", name="NVIDIA A100-SXM4-80GB"),
    "h200_sxm": costs.shipped_device("sm_90", name="NVIDIA H200"),
}
# A working set so many times the last-level cache comes from memory, whatever was read before.
BEYOND_CACHE = 4.0
# The source does not state a block size; the floor depends on it by the bytes of the block table alone.
LAYOUT = CacheLayout(block_size=64)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One kernel's latency on one shape."""

    system: str
    backend: str
    batch: int
    context: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    window: int
    kv_dtype: str
    us: float

    @property
    def device(self) -> Device:
        return DEVICES[self.system]

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(
            num_q_heads=self.num_q_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim,
            window=self.window or None, q_dtype=torch.bfloat16, kv_dtype=getattr(torch, self.kv_dtype),
        )  # fmt: skip

    @property
    def workload(self) -> Workload:
        return Workload(context_lens=(self.context,) * self.batch)

    @property
    def geometry(self) -> tuple[Any, ...]:
        """The spec's heads and dtype."""
        return (self.num_q_heads, self.num_kv_heads, self.head_dim, self.window, self.kv_dtype)

    @property
    def shape(self) -> tuple[Any, ...]:
        """All but the kernel and its time."""
        return (self.system, *self.geometry, self.batch, self.context)

    @property
    def rate_gb_s(self) -> float:
        """Bytes of K and V over the time."""
        return costs.kv_bytes(self.spec, LAYOUT, self.workload) / self.us / 1e3

    @property
    def is_beyond_memory(self) -> bool:
        """Whether no memory of the device's rate can have given the keys and values in that time."""
        working_set = costs.kv_bytes(self.spec, LAYOUT, self.workload)
        cached = working_set <= BEYOND_CACHE * self.device.last_level_cache_mib * 2**20
        return not cached and self.rate_gb_s > self.device.bandwidth_gb_s


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A shape, and the fastest kernel on it."""

    fastest: Row

    @property
    def floor_us(self) -> float:
        """The model's floor."""
        return costs.roofline_us(self.fastest.spec, LAYOUT, self.fastest.device, self.fastest.workload)

    @property
    def ratio(self) -> float:
        """The fastest time over the floor."""
        return self.fastest.us / self.floor_us


def read(path: Path) -> list[Row]:
    """Every row of the file. Raises FileNotFoundError naming what is missing."""
    if not path.exists():
        raise FileNotFoundError(f"the measured latencies are not at {path}: name the file with --data")
    dtypes = {"fp8": "float8_e4m3fn"}
    with path.open(encoding="utf-8", newline="") as file:
        return [
            Row(
                system=line["system"], backend=line["backend"], batch=int(line["batch_size"]), context=int(line["ctx"]),
                num_q_heads=int(line["num_heads"]), num_kv_heads=int(line["num_key_value_heads"]),
                head_dim=int(line["head_dim"]), window=int(line["window_size"]),
                kv_dtype=dtypes.get(line["kv_cache_dtype"], line["kv_cache_dtype"]), us=float(line["lat_us"]),
            )
            for line in csv.DictReader(file)
        ]  # fmt: skip


def sound(rows: Iterable[Row]) -> tuple[list[Shape], list[dict[str, Any]]]:
    """The shapes by the fastest kernel of the sources that can be true, and what was set aside: all rows of a source
    (an engine on a GPU) of which some are faster than the memory."""
    sources: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        sources[row.system, row.backend].append(row)
    kept: dict[tuple[Any, ...], Row] = {}
    dropped = []
    for (system, backend), own in sources.items():
        beyond = [row for row in own if row.is_beyond_memory]
        if beyond:
            highest = max(beyond, key=lambda row: row.rate_gb_s)
            dropped.append(
                {
                    "system": system, "engine": backend, "rows": len(own), "rows_faster_than_memory": len(beyond),
                    "highest_gb_s": round(highest.rate_gb_s), "memory_gb_s": highest.device.bandwidth_gb_s,
                    "dtype_as_labelled": highest.kv_dtype,
                    "highest_gb_s_if_elements_had_one_byte": round(highest.rate_gb_s / 2),
                }
            )  # fmt: skip
            continue
        for row in own:
            if row.shape not in kept or row.us < kept[row.shape].us:
                kept[row.shape] = row
    return [Shape(fastest=row) for row in kept.values()], dropped
