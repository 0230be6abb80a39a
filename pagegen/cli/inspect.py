"""`pagegen inspect`: compiles for GPUs that are not here and shows what the compiler made of the kernel."""

from __future__ import annotations

from typing import Any

import click

from pagegen.cli import options, output
from pagegen.spec import AttentionSpec, CacheLayout, Target, TritonVariant

_COLUMNS = {
    "target": "target", "kernel": "kernel", "registers": "regs", "spills": "spills", "shared_bytes": "shared",
    "programs_per_unit": "per unit", "instructions": "instrs", "matrix": "matrix", "matrix_kind": "kind",
    "async_copies": "async", "descriptor_copies": "descr", "wide_loads": "wide", "narrow_loads": "narrow",
    "local_memory": "local", "integer_divisions": "idiv", "variant": "variant",
}  # fmt: skip
_LEGEND = """
regs and spills are a thread's, shared is bytes, per unit is programs resident on one multiprocessor or compute unit.
Of one turn of the loop over key tiles: its instructions, its matrix instructions and their kind, copies of 16 bytes
into shared memory (async), copies of whole tiles by descriptor (descr), loads of 16 bytes into registers (wide), loads
of fewer (narrow: block numbers, scales), accesses to local memory and divisions of integers."""


@click.command()
@options.model_options
@options.layout_options
@click.option("--target", "names", default="sm_80,sm_90,sm_100,gfx942", show_default=True, help="Targets, by commas.")
@click.option("--variant", "variant_name", help="A Triton variant's name; the default ones by default.")
@output.json_option
def command(
    model: str,
    layer: str | None,
    q_dtype: str | None,
    kv_dtype: str | None,
    kv_scales: str,
    kv_zero_points: bool,
    block_size: int,
    order: str,
    names: str,
    variant_name: str | None,
    as_json: bool,
) -> None:
    """Registers, spills, occupancy and what the main loop is made of, with no such GPU present."""
    spec = options.model_spec(model, layer, q_dtype, kv_dtype, kv_scales, kv_zero_points)
    layout = CacheLayout(block_size=block_size, order=order)
    targets = [_gpu(name) for name in names.split(",")]
    rows = [
        _row(spec, layout, target, decode=decode, variant_name=variant_name)
        for target in targets
        for decode in (True, False)
    ]
    output.show({"model": model, "block_size": block_size, "kernels": rows}, as_json, lambda: _table(rows))
    failed = [row for row in rows if row.get("error")]
    if failed:
        first = failed[0]
        raise output.Failure(f"{first['kernel']} does not compile for {first['target']}: {first['error']}")


def _table(rows: list[dict[str, Any]]) -> str:
    shown = [{**row, **(row.get("loop") or {})} for row in rows]
    return output.table(shown, _COLUMNS) + "\n" + _LEGEND


def _gpu(name: str) -> Target:
    try:
        target = Target.parse(name)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--target") from error
    if not target.is_gpu:
        raise click.BadParameter(f"a GPU such as sm_90 or gfx942 is compiled for, got {name}", param_hint="--target")
    options.known_device(target, None)
    return target


def _row(
    spec: AttentionSpec, layout: CacheLayout, target: Target, *, decode: bool, variant_name: str | None
) -> dict[str, Any]:
    from pagegen import targets
    from pagegen.targets import offline
    from pagegen.targets.errors import CompileError

    reason = targets.unsupported(spec, target)
    if reason is not None:
        raise output.Failure(f"no kernel is generated for this model on {target}: {reason}")
    try:
        if variant_name:
            variant = options.named_variant(variant_name, target)
        else:
            variant = targets.default_variant(spec, layout, target, decode=decode)
        assert isinstance(variant, TritonVariant)  # the family of every GPU target
        facts = offline.compile_facts(spec, layout, variant, target, decode=decode).to_dict()
    except CompileError as error:
        return {"target": str(target), "kernel": "decode" if decode else "ragged", "error": error.detail}
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    return {**facts, "variant": variant.name}
