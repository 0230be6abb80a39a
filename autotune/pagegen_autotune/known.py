"""What is known of a kernel without a run, for the database: what its compiler made of it, what the model expects."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import pagegen
from pagegen import costs
from pagegen.spec import (
    AttentionSpec,
    CacheLayout,
    CompileFacts,
    CppVariant,
    Device,
    Prediction,
    Target,
    TritonVariant,
    Variant,
    Workload,
)
from pagegen.targets.errors import CompileError
from pagegen_autotune.measure import environment_of

if TYPE_CHECKING:
    from pagegen.targets.offline import ResourceFacts

log = logging.getLogger(__name__)

# The kernels that serve a class of batches: for decode, and for batches with longer queries.
FORMS = {"decode": (True,), "mixed": (False,), "all": (True, False)}
TOOLCHAIN = ("pagegen", "torch", "triton", "compiler")
MODEL = f"pagegen.costs {pagegen.__version__}"


def compile_facts(
    spec: AttentionSpec, layout: CacheLayout, variant: Variant, target: Target, *, decode: bool, code_hash: str
) -> CompileFacts | None:
    """Registers, spills, shared memory and size of a kernel, from the compiler's cache where it was compiled before;
    None, with a log line, where it cannot be said. A C++ kernel tells its size only."""
    try:
        if isinstance(variant, CppVariant):
            from pagegen.codegen import cpp
            from pagegen.targets import cpp_build

            library = cpp_build.build(cpp.render_attention(spec, layout, variant), variant.name)
            return CompileFacts(
                spec=spec, layout=layout, target=target, variant=variant, form=_form(decode), code_hash=code_hash,
                binary_bytes=library.stat().st_size, environment=toolchain(target),
            )  # fmt: skip
        from pagegen.targets import offline

        assert isinstance(variant, TritonVariant)
        found = offline.compile_facts(spec, layout, variant, target, decode=decode)
    except (CompileError, RuntimeError, ValueError, OSError) as error:
        log.info("nothing is known of the code of %s on %s: %s", variant.name, target, error)
        return None
    return facts_of(found, spec, layout, variant, target, decode=decode, code_hash=code_hash)


def facts_of(
    found: ResourceFacts, spec: AttentionSpec, layout: CacheLayout, variant: Variant, target: Target, *,
    decode: bool, code_hash: str,
) -> CompileFacts:  # fmt: skip
    """What Triton's compiler told, as the database keeps it."""
    return CompileFacts(
        spec=spec, layout=layout, target=target, variant=variant, form=_form(decode), code_hash=code_hash,
        registers=found.registers, spills=found.spills, shared_bytes=found.shared_bytes, num_warps=found.num_warps,
        programs_per_unit=found.programs_per_unit, binary_bytes=found.binary_bytes,
        loop={} if found.loop is None else found.to_dict()["loop"], environment=toolchain(target),
    )  # fmt: skip


def toolchain(target: Target) -> dict[str, str]:
    """What of an environment decides what a compiler makes."""
    told = environment_of(target)
    return {name: told[name] for name in TOOLCHAIN if name in told}


def _form(decode: bool) -> str:
    return "decode" if decode else "ragged"


def predictions(
    spec: AttentionSpec, layout: CacheLayout, variant: Variant, device: Device, loads: list[Workload], code_hash: str,
    *, facts: Mapping[tuple[Variant, str], CompileFacts] | None = None, fit: costs.Fit | None = None,
) -> Iterator[Prediction]:  # fmt: skip
    """What the cost model expects of a variant on each of some batches, by what a compiler told of its forms and by
    coefficients fitted to the device, where there are any; nothing on a device of unknown rates."""
    if not device.bandwidth_gb_s > 0:
        return
    for workload in loads:
        told = None if facts is None else facts.get((variant, _form(workload.is_decode)))
        predicted_us = costs.predict_us(spec, layout, variant, device, workload, facts=told, fit=fit)
        yield Prediction(
            spec=spec, layout=layout, device=device, variant=variant, workload=workload, code_hash=code_hash,
            predicted_us=predicted_us, model=MODEL if fit is None else f"{MODEL}, fitted",
        )  # fmt: skip
