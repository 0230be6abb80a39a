"""The values of the symbols: what a spec, a layout, a variant, a device and a workload say of themselves."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from pagegen.spec import AttentionSpec, CacheLayout, CppVariant, Device, TritonVariant, Variant, bytes_per_element
from pagegen.spec.variant import pieces
from pagegen.spec.workload import Workload


def bind_spec(spec: AttentionSpec, layout: CacheLayout) -> dict[str, Any]:
    """Values for the symbols of a spec and a layout, but for `window`: see `bind_workload`."""
    return dict(_of_spec(spec, layout))


@functools.lru_cache(maxsize=256)  # fractions of bytes are a third of a prediction's time
def _of_spec(spec: AttentionSpec, layout: CacheLayout) -> dict[str, Any]:
    return {
        "num_q_heads": spec.num_q_heads,
        "num_kv_heads": spec.num_kv_heads,
        "group": spec.group,
        "head_dim": spec.head_dim,
        "v_head_dim": spec.v_head_dim,
        "padded_head_dim": sum(pieces(spec.head_dim, "padded")),
        "padded_v_head_dim": sum(pieces(spec.v_head_dim, "padded")),
        "split_head_dim": sum(pieces(spec.head_dim, "split")),
        "split_v_head_dim": sum(pieces(spec.v_head_dim, "split")),
        "causal": int(spec.causal),
        "shared_values": int(spec.shared_kv),
        "batch_invariant": int(spec.batch_invariant),
        "uses_bfloat16": int(torch.bfloat16 in (spec.q_dtype, spec.kv_dtype)),
        "query_element_bytes": spec.q_dtype.itemsize,
        "kv_element_bytes": float(bytes_per_element(spec.kv_dtype)),
        "kv_token_bytes": spec.kv_bytes_per_token,
        "block_size": layout.block_size,
    }


def bind_variant(variant: Variant) -> dict[str, Any]:
    """Values for the symbols of a variant."""
    names: tuple[str, ...]
    if isinstance(variant, TritonVariant):
        names = ("tile_rows", "tile_kv", "num_splits", "split_tokens", "programs", "num_warps", "num_stages")
    elif isinstance(variant, CppVariant):
        names = ("tile_kv", "num_splits", "split_tokens")
    else:
        raise TypeError(f"variant must be a TritonVariant or a CppVariant, got {type(variant).__name__}")
    flags = {"splits_head": 0, "is_fma": 0}
    if isinstance(variant, TritonVariant):
        flags = {"splits_head": int(variant.head_pieces == "split"), "is_fma": int(variant.dot == "fma")}
    return {**{name: getattr(variant, name) for name in names}, **flags}


def bind_device(device: Device) -> dict[str, Any]:
    """Values for the symbols of a device."""
    return {
        "shared_limit_bytes": int(device.shared_memory_kib * 1024),
        "warp_size": device.target.warp_size,
        "is_amd": int(device.target.kind == "hip"),
        "capability": device.target.capability if device.target.kind == "cuda" else 0,
        # consumer Blackwell (sm_120) has neither wgmma nor tcgen05
        "has_wgmma": int(device.target.kind == "cuda" and 90 <= device.target.capability < 120),
        # 1024 threads a program on every CUDA and HIP arch; the table's figure is per multiprocessor
        "max_threads": min(1024, device.max_threads_per_unit or 1024),
        # what an instruction can name; AMD's data-centre parts have as many accumulation registers besides
        "register_limit": 512 if device.target.kind == "hip" else 255,
        "unit_registers": device.registers_per_unit,
    }


def bind_workload(spec: AttentionSpec, workload: Workload) -> dict[str, Any]:
    """Values for the symbols of a workload, arrays with one entry a sequence, and for `window`: beyond every key
    where the layer has none, and never further, so that float64 holds every sum exactly."""
    beyond = workload.max_context_len + workload.max_query_len + 1
    return {
        "context": np.asarray(workload.context_lens, dtype=np.float64),
        "queries": np.asarray(workload.query_lens, dtype=np.float64),
        "window": float(min(spec.window or beyond, beyond)),
    }
