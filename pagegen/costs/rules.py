"""Where a variant may run: symbolic conditions, each with the reason it gives when it does not hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sympy import Eq, Ge, Le, Lt, Max, Mod

from pagegen.costs import symbols as s
from pagegen.spec import AttentionSpec, CacheLayout, Device, TritonVariant, Variant


@dataclass(frozen=True, kw_only=True)
class Rule:
    """`condition` must hold wherever `applies`; `reason` is a format string over the symbols' values."""

    name: str
    applies: Callable[[Variant, Device], bool]
    condition: Any
    reason: str


def _triton(variant: Variant, device: Device) -> bool:
    return isinstance(variant, TritonVariant)


def _walks(page_walk: str) -> Callable[[Variant, Device], bool]:
    return lambda variant, device: isinstance(variant, TritonVariant) and variant.page_walk == page_walk


def _descriptors(variant: Variant, device: Device) -> bool:
    return isinstance(variant, TritonVariant) and variant.loads == "descriptor"


def _on_known_gpu(variant: Variant, device: Device) -> bool:
    return isinstance(variant, TritonVariant) and device.target.is_gpu and device.shared_memory_kib > 0


RULES = (
    Rule(
        name="tile_in_page",
        applies=_walks("tile_in_page"),
        condition=Eq(Mod(s.block_size, s.tile_kv), 0),
        reason='page_walk "tile_in_page" needs a block_size that is a multiple of tile_kv {tile_kv}, '
        "got block_size {block_size}",
    ),
    Rule(
        name="pages_in_tile",
        applies=_walks("pages_in_tile"),
        condition=Eq(Mod(s.tile_kv, s.block_size), 0),
        # tile_kv is a power of two, so a block_size that divides it is one too
        reason='page_walk "pages_in_tile" needs a power-of-two block_size that divides tile_kv {tile_kv}, '
        "got block_size {block_size}",
    ),
    Rule(
        name="descriptor_hardware",
        applies=lambda variant, device: _descriptors(variant, device) and device.target.is_gpu,
        condition=Ge(s.capability, 90),
        reason="descriptor loads need a tensor memory accelerator (sm_90 or later)",
    ),
    Rule(
        name="descriptor_alignment",
        applies=_descriptors,
        condition=Eq(Mod(s.head_dim * s.kv_element_bytes, 16), 0) & Eq(Mod(s.v_head_dim * s.kv_element_bytes, 16), 0),
        reason="descriptor loads need rows of whole 16 bytes, got head dims {head_dim} and {v_head_dim} of "
        "{kv_element_bytes:g} bytes",
    ),
    Rule(
        name="warp_specialize_hardware",
        applies=lambda variant, device: isinstance(variant, TritonVariant) and variant.warp_specialize,
        condition=Ge(s.capability, 100) & Lt(s.capability, 120),
        reason="warp specialisation needs tcgen05 (sm_100 to sm_110)",
    ),
    Rule(
        name="warp_specialize_shape",
        applies=lambda variant, device: isinstance(variant, TritonVariant) and variant.warp_specialize,
        # what Triton 3.7 compiles without spills, of 16 to 128 rows and keys in 4 or 8 warps (head dim 128)
        condition=Eq(s.tile_rows, 64) & Eq(s.tile_kv, 128) & Eq(s.num_warps, 8) & Eq(s.head_columns, 128),
        reason="warp specialisation compiles for 64 rows, 128 keys and 8 warps at head dim 128, "
        "not for {tile_rows} rows, {tile_kv} keys and {num_warps} warps",
    ),
    Rule(
        name="fma_rows",
        applies=lambda variant, device: isinstance(variant, TritonVariant) and variant.dot == "fma",
        # every product of a tile is a value in registers before it is summed: 64 a thread (at 128, 56 bytes spill)
        condition=Le(
            s.tile_rows * s.tile_kv * Max(s.head_columns, s.v_columns), 64 * s.num_warps * Max(s.warp_size, 32)
        ),
        reason="multiply-adds over {tile_rows} rows and {tile_kv} keys need more registers than {num_warps} warps have",
    ),
    Rule(
        name="batch_invariant_schedule",
        applies=_triton,
        condition=Eq(s.batch_invariant, 0) | Eq(s.programs, 0),
        reason="equal shares of a batch's work cut a row's keys by what else is in the batch",
    ),
    Rule(
        name="threads",
        applies=lambda variant, device: isinstance(variant, TritonVariant) and device.target.is_gpu,
        condition=Le(s.num_warps * s.warp_size, s.max_threads),
        reason="{num_warps} warps of {warp_size} threads are more than the {max_threads} a program may have",
    ),
    Rule(
        name="shared_memory",
        applies=_on_known_gpu,
        condition=Le(s.SHARED_BYTES, s.shared_limit_bytes),
        reason="about {shared_bytes} bytes of shared memory are more than the device's {shared_limit_bytes}",
    ),
)


def broken_rules(spec: AttentionSpec, layout: CacheLayout, variant: Variant, device: Device) -> list[tuple[str, str]]:
    """(rule's name, reason) of every rule that the variant breaks on the device."""
    if variant.family != device.target.family:
        wanted = device.target.family
        return [("family", f"a {variant.family} variant does not run on {device.target}, which takes {wanted}")]
    values = {**s.bind_spec(spec, layout), **s.bind_variant(variant), **s.bind_device(device)}
    broken = []
    for rule in RULES:
        if rule.applies(variant, device) and not bool(s.evaluate(rule.condition, values)):
            shown = dict(values)
            if rule.name == "shared_memory":
                shown["shared_bytes"] = int(s.evaluate(s.SHARED_BYTES, values))
            broken.append((rule.name, rule.reason.format(**shown)))
    return broken


def legal(spec: AttentionSpec, layout: CacheLayout, variant: Variant, device: Device) -> list[str]:
    """Why the variant may not run for this spec and layout on this device; empty when it may.

    Shared memory is an estimate and is checked where the device's limit is known (not 0). The search space's own
    bounds (powers of two, 16 rows and keys at least, splits of whole tiles) hold by the variant's construction, so
    a C++ variant of the right family is always legal.
    """
    return [reason for _, reason in broken_rules(spec, layout, variant, device)]
