"""From a spec, a layout and a variant to something that runs, on each kind of target."""

from __future__ import annotations

import functools
import os

from pagegen.spec import (
    AttentionSpec,
    CacheLayout,
    CppVariant,
    Device,
    DispatchRule,
    Target,
    TritonVariant,
    Variant,
    dtype_name,
)
from pagegen.spec.dtypes import INT4, INTEGER_RANGES
from pagegen.targets.cache_call import Copier, Merger, State, Writer
from pagegen.targets.call import AttentionCall, AttentionKernel
from pagegen.targets.ready import compiled, shipped

__all__ = [
    "AttentionCall",
    "AttentionKernel",
    "State",
    "block_copier",
    "cache_writer",
    "code_hash",
    "compiled",
    "current_device",
    "default_variant",
    "load_attention",
    "shipped",
    "shipped_rule",
    "state_merger",
    "unsupported",
    "use_artefacts",
    "warm_up",
    "warm_up_writes",
]


@functools.lru_cache(maxsize=1024)
def load_attention(spec: AttentionSpec, layout: CacheLayout, variant: Variant, target: Target) -> AttentionKernel:
    """The compiled kernel, made once a process.

    Raises `Unsupported` for a spec that the target's templates do not cover, `CompileError` when the compiler
    refuses it, and ValueError for a variant of another family.
    """
    if variant.family != target.family:
        raise ValueError(f"variant must be of the {target.family} family for {target}, got {variant.name}")
    reason = unsupported(spec, target)
    if reason is not None:
        from pagegen.targets.errors import Unsupported

        raise Unsupported(reason)
    if isinstance(variant, CppVariant):
        from pagegen.targets import cpu

        return cpu.load_attention(spec, layout, variant)
    from pagegen.targets import triton_launch

    assert isinstance(variant, TritonVariant)
    return triton_launch.load_attention(spec, layout, variant, target)


def warm_up(kernel: AttentionKernel, spec: AttentionSpec, layout: CacheLayout, target: Target) -> None:
    """Makes a loaded kernel compile all it will ever compile. A C++ kernel did when it was loaded; Triton compiles
    at a kernel's first launch, so each form is launched once on a batch of one short sequence."""
    if target.is_gpu:
        from pagegen.targets import triton_launch, warm

        assert isinstance(kernel, triton_launch.TritonAttention)
        for call in warm.calls(spec, layout):
            kernel.warm(call)


def warm_up_writes(spec: AttentionSpec, layout: CacheLayout, target: Target) -> None:
    """Makes what serves `write_kv` to the caches of a spec compile: it writes no token."""
    from pagegen.targets import warm

    cache_writer(target)(warm.write(spec, layout, "cuda" if target.is_gpu else "cpu"))


def use_artefacts(path: str | os.PathLike[str], target: Target) -> None:
    """Takes kernels that were compiled elsewhere from a folder, from now on and in this process; where the folder does
    not fit this machine or its templates, a log line says why, and kernels are compiled. See
    `pagegen.targets.artefacts`."""
    from pagegen.targets import artefacts

    artefacts.use(path)
    if target.kind != "cpu":
        artefacts.say_once(f"the artefacts in {path} hold C++ kernels alone: those of {target} are compiled here")


def shipped_rule(spec: AttentionSpec, layout: CacheLayout, target: Target) -> DispatchRule | None:
    """The dispatch rule that came with the artefacts in use, or None."""
    from pagegen.targets import artefacts

    return artefacts.rule(spec, layout.canonical(spec.num_kv_heads), target)


def unsupported(spec: AttentionSpec, target: Target) -> str | None:
    """Why no generated kernel serves `spec` on `target` (a sentence), or None when one does."""
    reason = _untraceable(spec, target)
    if reason is not None:
        return reason
    if spec.kv_zero_points and spec.kv_dtype not in INTEGER_RANGES:
        return f"zero points belong to int8 and int4 caches, not {dtype_name(spec.kv_dtype)}"
    if spec.kv_dtype == INT4 and (spec.head_dim % 2 or spec.v_head_dim % 2):
        return f"int4 packs two values a byte: head dims must be even, not {spec.head_dim} and {spec.v_head_dim}"
    if target.kind == "cpu":
        from pagegen.targets import cpu

        return cpu.unsupported(spec)
    return None


def _untraceable(spec: AttentionSpec, target: Target) -> str | None:
    """Why a score or mask function of the spec cannot be generated: it is unknown in this process, it does what no
    expression says, or what Triton 3.7 does not compile (a load between the two products of a pipelined loop)."""
    if spec.score_mod is None and spec.mask_mod is None:
        return None
    from pagegen import modifiers

    try:
        for modifier in modifiers.find_both(spec.score_mod, spec.mask_mod):
            if modifiers.trace(modifier).indexes_by_score and target.is_gpu:
                return f"{modifier.kind}_mod {modifier.name} indexes a captured tensor by the score"
    except (modifiers.Untraceable, ValueError) as error:
        return str(error)
    return None


def default_variant(spec: AttentionSpec, layout: CacheLayout, target: Target, *, decode: bool) -> Variant:
    """A variant that is always legal and usually good, for decode or for batches with longer queries."""
    if target.kind == "cpu":
        from pagegen.targets import cpu

        return cpu.default_variant(spec, layout, decode=decode)
    from pagegen.codegen import defaults

    return defaults.default_variant(spec, layout, target, decode=decode)


def cache_writer(target: Target) -> Writer:
    """What serves `write_kv` and `rope_write_kv`: one kernel or one C++ call for every dtype. On a CPU without a
    compiler, torch's own operators."""
    if target.kind == "cpu":
        from pagegen.targets import cpu, cpu_cache, torch_cache

        return cpu_cache.write if cpu.compiler() else torch_cache.write
    from pagegen.targets import triton_cache

    return triton_cache.writer(target)


def block_copier(target: Target) -> Copier:
    """What serves `copy_blocks`, for caches of every dtype."""
    if target.kind == "cpu":
        from pagegen.targets import cpu, cpu_cache, torch_cache

        return cpu_cache.copy_blocks if cpu.compiler() else torch_cache.copy_blocks
    from pagegen.targets import triton_cache

    return triton_cache.copy_blocks


def state_merger(target: Target) -> Merger | None:
    """What merges partial states in one call, on a CPU with a compiler; None elsewhere: torch's own operators do."""
    if target.kind == "cpu":
        from pagegen.targets import cpu, cpu_merge

        return cpu_merge.merge if cpu.compiler() else None
    return None


def code_hash(target: Target) -> str:
    """The hash of the templates behind a target's kernels: part of every database key."""
    from pagegen.codegen import templates

    return templates.digest(templates.CPP if target.kind == "cpu" else templates.TRITON)


def current_device(target: Target) -> Device:
    """The device of this machine that `target` runs on. Raises ValueError for a GPU that is not here."""
    if target.kind == "interpreter":  # what it computes on is no device: every figure is unknown
        return Device(name="Triton interpreter", target=target)
    if target.kind == "cpu":
        from pagegen.targets import cpu_device

        return cpu_device.current_device()
    from pagegen.targets import gpu

    return gpu.current_device(target)
