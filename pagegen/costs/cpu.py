"""What a C++ kernel's time is made of: the walk over memory, the arithmetic, and how evenly threads share both."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from pagegen.costs import symbols as s
from pagegen.costs.parts import Parts
from pagegen.costs.rates import MATRIX_EFFICIENCY, bytes_per_us, floor_bytes, flops_per_us
from pagegen.spec import AttentionSpec, CacheLayout, CppVariant, Device
from pagegen.spec.dtypes import bytes_per_element

# A Python and OpenMP call of a compiled kernel: 10-13 us, measured on 2 cores (Zen 4).
CPU_CALL_US = 12.0
# Handing out one work item and merging its partial state: assumption, a lock-free counter and some cache misses.
CPU_ITEM_US = 0.3
# Starting a tile (block-table look-up, running maximum): chosen so that tiles of 16 keys lose 6-11 % against tiles of
# 64, as measured for a contiguous-head cache.
CPU_TILE_US = 0.02
# What one thread computes where the device does not say, in 1e12 flops/s: measured on a Zen 4 core for bf16 dot
# products and AVX-512 FMA; half of the latter for AVX2, an eighth of that for plain code (assumptions).
CPU_THREAD_TFLOPS = {"avx512_bf16": 0.234, "avx512f": 0.117, "avx2": 0.058, "": 0.007}
# Share of the sequential read bandwidth that a walk over chunks in random order reaches, 2 threads, loads only (Zen 4,
# bf16): by bytes of a contiguous chunk, without and with prefetch into L2, without and with four or more streams.
CPU_CHUNK_BYTES = (256, 4096, 8192, 32768, 65536, 262144)
CPU_WALK_EFFICIENCY = {
    (False, False): (0.44, 0.39, 0.32, 0.81, 0.89, 0.97),
    (False, True): (0.44, 0.55, 0.58, 0.81, 0.89, 0.97),
    (True, False): (0.77, 0.86, 0.76, 0.82, 0.88, 0.97),
    (True, True): (0.73, 0.87, 0.92, 0.94, 0.97, 0.99),
}


def cpu_parts(
    spec: AttentionSpec, layout: CacheLayout, variant: CppVariant, device: Device, values: dict[str, Any]
) -> Parts:
    """The parts of one call; `values` bind every symbol. A batch with nothing to do costs the call."""
    threads = max(1, device.units)
    shape = np.shape(values["context"])
    items = np.broadcast_to(s.evaluate(s.ITEMS, values), shape)
    num_items = float(items.sum())
    if not num_items:
        return Parts(fixed_us=CPU_CALL_US)
    share = _walk_share(spec, layout, variant)
    memory_us = floor_bytes(values) / (bytes_per_us(device) * share)
    rate = min(flops_per_us(spec, device), _cpu_flops_per_us(spec, device)) * MATRIX_EFFICIENCY
    matrix_us = s.total(s.CPU_FLOPS, values) / rate + s.total(s.CPU_TILES, values) * CPU_TILE_US / threads
    # Items are handed out longest first. The call ends no sooner than its longest item, and a few equal items leave
    # threads idle in the last turn.
    keys = np.broadcast_to(s.evaluate(s.ITEM_KEYS, values), shape)
    longest_share = float(keys.max()) / max(float((items * keys).sum()), 1.0)
    balance = max(1.0, longest_share * threads, math.ceil(num_items / threads) * threads / num_items)
    return Parts(
        fixed_us=CPU_CALL_US,
        memory_us=memory_us * balance,
        matrix_us=matrix_us * balance,
        merge_us=num_items * CPU_ITEM_US / threads,
    )


def _cpu_flops_per_us(spec: AttentionSpec, device: Device) -> float:
    """The rate of the widest instructions that the device's features name and the dtype can use."""
    usable = [f for f in device.features if f != "avx512_bf16" or spec.q_dtype == spec.kv_dtype == torch.bfloat16]
    best = max(CPU_THREAD_TFLOPS.get(feature, 0.0) for feature in ("", *usable))
    return best * 1e6 * max(1, device.units)


def _walk_share(spec: AttentionSpec, layout: CacheLayout, variant: CppVariant) -> float:
    """The share of sequential read bandwidth that the walk over the blocks reaches, by its contiguous chunk: one
    head's rows of a block in HND order, one token's rows of the heads read together in NHD order."""
    row_bytes = float(spec.head_dim * bytes_per_element(spec.kv_dtype))
    rows = layout.block_size if layout.order == "HND" else min(variant.heads_together, spec.num_kv_heads)
    shares = CPU_WALK_EFFICIENCY[variant.prefetch_ahead > 0, variant.streams >= 4]
    return float(np.interp(math.log2(rows * row_bytes), np.log2(CPU_CHUNK_BYTES), shares))
