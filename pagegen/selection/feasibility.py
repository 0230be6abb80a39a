"""Whether a variant can run here at all, judged before anything is compiled or launched."""

from __future__ import annotations

import torch

from pagegen import costs, targets
from pagegen.spec import AttentionSpec, CacheLayout, Device, TritonVariant, Variant
from pagegen.spec.dtypes import dtype_name
from pagegen.spec.variant import pieces

# What one thread can name. A kernel that needs more keeps the rest in memory: it runs, many times slower.
REGISTERS_A_THREAD = 255
# Addresses, block ids and softmax state beside the tiles: 40-60 a thread in what Triton 3.7 compiled for sm_80, sm_90.
OTHER_REGISTERS = 40
# Compute capability from which a CUDA device has bfloat16 arithmetic.
BFLOAT16_CAPABILITY = 80


def infeasible(spec: AttentionSpec, layout: CacheLayout, variant: Variant, device: Device) -> list[str]:
    """Why the variant must not be launched for this spec and layout on this device: an unserved spec, a dtype that the
    device lacks, too few registers, or what `costs.legal` names (shared memory, threads, the shape of tiles and
    blocks). Empty where nothing speaks against it; a limit that is not known of the device refuses nothing."""
    unserved = targets.unsupported(spec, device.target)
    reasons = [] if unserved is None else [unserved]
    reasons += _dtype(spec, device)
    reasons += costs.legal(spec, layout, variant, device)
    if isinstance(variant, TritonVariant) and device.target.is_gpu:
        reasons += _registers(spec, variant, device)
    return reasons


def _dtype(spec: AttentionSpec, device: Device) -> list[str]:
    target = device.target
    if target.kind == "cuda" and target.capability < BFLOAT16_CAPABILITY and torch.bfloat16 in (
        spec.q_dtype, spec.kv_dtype
    ):  # fmt: skip
        return [f"{dtype_name(torch.bfloat16)} needs sm_{BFLOAT16_CAPABILITY} or later, not {target}"]
    return []


def registers_a_thread(spec: AttentionSpec, variant: TritonVariant, device: Device) -> int:
    """About how many registers a thread needs: its share of the float32 accumulator, of the scores with what they
    become, and of q at two values a register."""
    values = (
        sum(pieces(spec.v_head_dim, variant.head_pieces))
        + 1.25 * variant.tile_kv
        + sum(pieces(spec.head_dim, variant.head_pieces)) / 2
    )
    threads = variant.num_warps * device.target.warp_size
    return OTHER_REGISTERS + round(variant.tile_rows * values / threads)


def _registers(spec: AttentionSpec, variant: TritonVariant, device: Device) -> list[str]:
    needed = registers_a_thread(spec, variant, device)
    reasons = []
    if needed > REGISTERS_A_THREAD:
        reasons.append(f"about {needed} registers a thread are more than the {REGISTERS_A_THREAD} there are")
    threads = variant.num_warps * device.target.warp_size
    if 0 < device.registers_per_unit < threads * min(needed, REGISTERS_A_THREAD):
        whole = threads * min(needed, REGISTERS_A_THREAD)
        reasons.append(f"about {whole} registers are more than the {device.registers_per_unit} of {device.name}")
    return reasons
