"""Where a variant may run: every condition as a symbolic expression, with the reason it gives where it does not hold.

`CONTRADICTIONS` are between the fields of one variant, whatever it is for: the values of a search space that break one
never become a variant. `RULES` hold a variant against a spec, a layout and a device, before anything is compiled;
`CODE_RULES` hold what a compiler made of it against the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sympy import And, Eq, Ge, Le, Lt, Max, Min, Mod, Or

from pagegen.costs import symbols as s
from pagegen.spec import AttentionSpec, CacheLayout, CompileFacts, Device, TritonVariant, Variant


@dataclass(frozen=True, kw_only=True)
class Rule:
    """`condition` must hold wherever `applies`; `reason` is a format string over the values of the symbols and of the
    quantities in `shown`."""

    name: str
    applies: Callable[[Variant, Device], bool]
    condition: Any
    reason: str
    shown: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Plain:
    """`condition` over plain values, wherever it is asked; `reason` as a rule's."""

    name: str
    condition: Any
    reason: str


def _triton(variant: Variant, device: Device) -> bool:
    return isinstance(variant, TritonVariant)


def _walks(page_walk: str) -> Callable[[Variant, Device], bool]:
    return lambda variant, device: isinstance(variant, TritonVariant) and variant.page_walk == page_walk


def _descriptors(variant: Variant, device: Device) -> bool:
    return isinstance(variant, TritonVariant) and variant.loads == "descriptor"


def _specialised(variant: Variant, device: Device) -> bool:
    return isinstance(variant, TritonVariant) and variant.warp_specialize


def _on_gpu(variant: Variant, device: Device) -> bool:
    return isinstance(variant, TritonVariant) and device.target.is_gpu


def _on_known_gpu(variant: Variant, device: Device) -> bool:
    return _on_gpu(variant, device) and device.shared_memory_kib > 0


def _multiplies_by_matrix(variant: Variant, device: Device) -> bool:
    return _on_gpu(variant, device) and isinstance(variant, TritonVariant) and variant.dot == "mma"


CONTRADICTIONS = (
    Plain(
        name="matrix_minimum",
        condition=Or(And(Ge(s.tile_rows, 16), Ge(s.tile_kv, 16)), And(Eq(s.is_fma, 1), Ge(s.tile_kv, 16))),
        reason="matrix instructions take 16 rows and 16 keys or more, got {tile_rows} and {tile_kv}",
    ),
    Plain(
        name="whole_tiles_a_split",
        condition=Eq(Mod(s.split_tokens, s.tile_kv), 0),
        reason="split_tokens must be a multiple of tile_kv {tile_kv}, got {split_tokens}",
    ),
    Plain(
        name="one_kind_of_split",
        condition=Or(Eq(s.split_tokens, 0), Eq(s.num_splits, 1)),
        reason="num_splits must be 1 where split_tokens divides the keys, got {num_splits}",
    ),
    Plain(
        name="shares_or_splits",
        condition=Or(Eq(s.programs, 0), And(Eq(s.num_splits, 1), Eq(s.split_tokens, 0), Eq(s.reduces_last, 0))),
        reason="programs that share all work do not split or reduce it otherwise, got {programs}",
    ),
    Plain(
        name="descriptor_tiles",
        condition=Or(Eq(s.descriptors, 0), Eq(s.tile_in_page, 1)),
        reason="descriptor loads take whole tiles of a block: page_walk must be tile_in_page",
    ),
)

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
        applies=_specialised,
        condition=Ge(s.capability, 100) & Lt(s.capability, 120),
        reason="warp specialisation needs tcgen05 (sm_100 to sm_110)",
    ),
    Rule(
        name="warp_specialize_shape",
        applies=_specialised,
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
        name="bfloat16_hardware",
        applies=lambda variant, device: _on_gpu(variant, device) and device.target.kind == "cuda",
        condition=Eq(s.uses_bfloat16, 0) | Ge(s.capability, 80),
        reason="bfloat16 needs sm_80 or later, not sm_{capability}",
    ),
    Rule(
        name="batch_invariant_schedule",
        applies=_triton,
        condition=Eq(s.batch_invariant, 0) | Eq(s.programs, 0),
        reason="equal shares of a batch's work cut a row's keys by what else is in the batch",
    ),
    Rule(
        name="threads",
        applies=_on_gpu,
        condition=Le(s.num_warps * s.warp_size, s.max_threads),
        reason="{num_warps} warps of {warp_size} threads are more than the {max_threads} a program may have",
    ),
    Rule(
        name="registers",
        applies=_multiplies_by_matrix,
        # a kernel that needs more keeps the rest in memory: it runs, many times slower
        condition=Le(s.REGISTERS, s.register_limit),
        reason="about {registers} registers a thread are more than the {register_limit} there are",
        shown={"registers": s.REGISTERS},
    ),
    Rule(
        name="register_file",
        applies=lambda variant, device: _multiplies_by_matrix(variant, device) and device.registers_per_unit > 0,
        condition=Le(s.THREADS * Min(s.REGISTERS, s.register_limit), s.unit_registers),
        reason="about {registers} registers are more than the {unit_registers} of {device}",
        shown={"registers": s.THREADS * Min(s.REGISTERS, s.register_limit)},
    ),
    Rule(
        name="shared_memory",
        applies=_on_known_gpu,
        condition=Le(s.SHARED_BYTES, s.shared_limit_bytes),
        reason="about {shared_bytes} bytes of shared memory are more than the device's {shared_limit_bytes}",
        shown={"shared_bytes": s.SHARED_BYTES},
    ),
)


CODE_RULES = (
    Plain(
        name="spills",
        condition=Eq(s.spills, 0),
        reason="spills registers to memory: {spills} of them (AMD) or bytes a thread",
    ),
    Plain(
        name="taken_shared_memory",
        condition=Or(Eq(s.shared_limit_bytes, 0), Le(s.taken_shared_bytes, s.shared_limit_bytes)),
        reason="takes {taken_shared_bytes} bytes of shared memory, more than the device's {shared_limit_bytes}",
    ),
    Plain(
        name="occupancy",
        condition=Ge(s.programs_per_unit, 1),
        reason="not one program fits a multiprocessor: {taken_registers} registers a thread, {num_warps} warps, "
        "{taken_shared_bytes} bytes of shared memory",
    ),
)


def broken_by_code(facts: CompileFacts, device: Device) -> list[tuple[str, str]]:
    """(rule's name, reason) of every rule that compiled code breaks on the device. What a compiler did not tell breaks
    none."""
    values = {
        **s.bind_device(device),
        "spills": facts.spills or 0,
        "taken_registers": facts.registers or 0,
        "taken_shared_bytes": facts.shared_bytes or 0,
        "num_warps": facts.num_warps or 0,
        "programs_per_unit": 1 if facts.programs_per_unit is None else facts.programs_per_unit,
    }
    return _broken(CODE_RULES, values)


def broken_rules(spec: AttentionSpec, layout: CacheLayout, variant: Variant, device: Device) -> list[tuple[str, str]]:
    """(rule's name, reason) of every rule that the variant breaks on the device."""
    if variant.family != device.target.family:
        wanted = device.target.family
        return [("family", f"a {variant.family} variant does not run on {device.target}, which takes {wanted}")]
    values = {**s.bind_spec(spec, layout), **s.bind_variant(variant), **s.bind_device(device)}
    broken = []
    for rule in RULES:
        if rule.applies(variant, device) and not bool(s.evaluate(rule.condition, values)):
            shown = {name: int(s.evaluate(quantity, values)) for name, quantity in (rule.shown or {}).items()}
            broken.append((rule.name, rule.reason.format(**{**values, **shown, "device": device.name})))
    return broken


def contradictions(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(name, reason) of every contradiction between fields of a Triton variant (those that `values` lacks are at their
    defaults) that its class refuses."""
    plain = TritonVariant()
    fields = {**plain.to_dict(), **values}
    named = {
        **{name: value for name, value in fields.items() if isinstance(value, int)},
        "is_fma": int(fields["dot"] == "fma"),
        "descriptors": int(fields["loads"] == "descriptor"),
        "tile_in_page": int(fields["page_walk"] == "tile_in_page"),
        "reduces_last": int(fields["reduce"] == "last"),
    }
    return _broken(CONTRADICTIONS, named)


def _broken(rules: Iterable[Plain], values: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(r.name, r.reason.format(**values)) for r in rules if not bool(s.evaluate(r.condition, values))]


def legal(spec: AttentionSpec, layout: CacheLayout, variant: Variant, device: Device) -> list[str]:
    """Why the variant may not run for this spec and layout on this device; empty when it may.

    Shared memory and registers are estimates, and are checked where the device's limit is known (not 0). A C++ variant
    of the right family is always legal: its fields' own bounds hold by construction.
    """
    return [reason for _, reason in broken_rules(spec, layout, variant, device)]
