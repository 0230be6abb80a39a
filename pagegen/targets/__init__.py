"""From a spec, a layout and a variant to something that runs, on each kind of target."""

from __future__ import annotations

import functools
from collections.abc import Callable

from pagegen.spec import AttentionSpec, CacheLayout, CppVariant, Device, Target, TritonVariant, Variant
from pagegen.targets.call import AttentionCall, AttentionKernel

__all__ = [
    "AttentionCall",
    "AttentionKernel",
    "code_hash",
    "copy_blocks",
    "current_device",
    "default_variant",
    "load_attention",
    "unsupported",
    "warm_up",
    "write_kv",
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
        from pagegen.targets import warm

        for call in warm.calls(spec, layout):
            kernel(call)


def unsupported(spec: AttentionSpec, target: Target) -> str | None:
    """Why no generated kernel serves `spec` on `target` (a sentence), or None when one does."""
    if target.kind == "cpu":
        from pagegen.targets import cpu

        return cpu.unsupported(spec)
    from pagegen.codegen import triton

    return triton.unsupported(spec)


def default_variant(spec: AttentionSpec, layout: CacheLayout, target: Target, *, decode: bool) -> Variant:
    """A variant that is always legal and usually good, for decode or for batches with longer queries."""
    if target.kind == "cpu":
        from pagegen.targets import cpu

        return cpu.default_variant(spec, layout, decode=decode)
    from pagegen.codegen import triton

    return triton.default_variant(spec, layout, decode=decode)


def write_kv(target: Target) -> Callable[..., None] | None:
    """The generated writer `(k, v, k_cache, v_cache, slot_mapping) -> None`, or None where torch's own indexing
    serves (no compiler on this machine)."""
    if target.kind == "cpu":
        from pagegen.targets import cpu

        return cpu.write_kv if cpu.compiler() else None
    from pagegen.targets import triton_launch

    return triton_launch.write_kv


def copy_blocks(target: Target) -> Callable[..., None] | None:
    """The generated copier `(k_cache, v_cache, pairs) -> None`, or None where torch's own indexing serves."""
    if target.kind == "cpu":
        from pagegen.targets import cpu

        return cpu.copy_blocks if cpu.compiler() else None
    from pagegen.targets import triton_launch

    return triton_launch.copy_blocks


@functools.cache
def code_hash(target: Target) -> str:
    """The hash of the templates behind a target's kernels: part of every database key."""
    if target.kind == "cpu":
        from pagegen.targets import cpu

        return cpu.code_hash()
    from pagegen.codegen import triton

    return triton.template_hash()


def current_device(target: Target) -> Device:
    """The device of this machine that `target` runs on. Raises ValueError for a GPU that is not here."""
    if target.kind == "interpreter":  # what it computes on is no device: every figure is unknown
        return Device(name="Triton interpreter", target=target)
    if target.kind == "cpu":
        from pagegen.targets import cpu

        return cpu.current_device()
    from pagegen.targets import gpu

    return gpu.current_device(target)
