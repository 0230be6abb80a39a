"""What is checked of a case of the sweep: the reference, the same bits wherever blocks lie and whatever is in those
that no query can attend, and the same bits from the template as it stands."""

from __future__ import annotations

import ctypes
import functools
import importlib
import inspect
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from batches import Batch, compare
from sweep_cases import MACHINES, Case, Kernel
from sweep_modifiers import range_of
from torch import Tensor

from pagegen import paths
from pagegen.codegen import insert
from pagegen.codegen import triton as codegen
from pagegen.spec import AttentionSpec, CppVariant, Target, TritonVariant, dtype_name
from pagegen.targets import cpp_build, cpu, load_attention, triton_launch
from pagegen.targets.call import AttentionCall, AttentionKernel
from pagegen.targets.triton_module import import_source

Result = tuple[Tensor, Tensor]
# Every third of the C++ kernels without score and mask functions: those are no constants but text.
RAW_EVERY = 3


def checker(kernel: Kernel, number: int) -> Callable[[Case], None]:
    """A function that raises AssertionError for a case of `kernel` (with this number) that fails. May compile."""
    if kernel.target == "interpreter":
        return _check_interpreted
    assert isinstance(kernel.variant, CppVariant)
    machine = MACHINES[kernel.machine]
    generated = cpu.load_attention(kernel.spec, kernel.layout, kernel.variant, machine=machine)
    plain = kernel.spec.score_mod is None and kernel.spec.mask_mod is None
    template = raw_cpp(kernel) if plain and number % RAW_EVERY == 0 else None
    return lambda case: _check_compiled(case, generated, template)


def _check_compiled(case: Case, generated: AttentionKernel, template: AttentionKernel | None) -> None:
    batch = case.batch()
    found = run(generated, batch)
    agree(found, batch)
    unmoved(found, batch, lambda other: run(generated, other))
    unlogged = replace(batch.call(), lse=None)
    generated(unlogged)
    same(found[:1], (unlogged.out,), "without lse")
    if not batch.captures:
        alone(found, batch, case.number, lambda other: run(generated, other))
    if template is not None:
        same(found, run(template, batch), "from the template as it stands")


def _check_interpreted(case: Case) -> None:
    kernel, batch = case.kernel, case.batch()
    assert isinstance(kernel.variant, TritonVariant)
    attention = load_attention(kernel.spec, kernel.layout, kernel.variant, Target("interpreter"))
    with forms(kernel) as seen:
        found = run(attention, batch)
        agree(found, batch)
        same(found, run_template(kernel, batch, *seen[0]), "from the template as it stands")
        unmoved(found, batch, lambda other: run(attention, other))
        if case.number % 4 == 0:
            unlogged = replace(batch.call(), lse=None)
            attention(unlogged)
            same(found[:1], (unlogged.out,), "without lse")
        if kernel.spec.batch_invariant and not batch.captures:
            alone(found, batch, case.number, lambda other: run(attention, other))


def run(kernel: AttentionKernel, batch: Batch) -> Result:
    call = batch.call()
    kernel(call)
    assert call.lse is not None
    return call.out, call.lse


def agree(found: Result, batch: Batch) -> None:
    """As `compare`, whose tolerance for float32 is meant for scores up to 16: the rounding of larger ones is larger in
    proportion (a row's lse is about its largest score), and so is the error of its weights. Behind a sink weights may
    be too small for float32, whose least normal number is 2^-126: what is below 2^-120 counts as 0."""
    out, lse = found
    if not len(out):  # no sequence has a query
        return
    expected, expected_lse = batch.expected()
    wanted = expected.double()
    out = torch.where((out.double() - wanted).abs() < 2.0**-120, wanted, out.double())
    room = (expected_lse.double().abs() / 16.0).nan_to_num(1.0, posinf=1.0).clamp(min=1.0)[..., None]
    if batch.spec.q_dtype == torch.float32:
        out = wanted + (out - wanted) / room
    compare(out, lse, expected, expected_lse, batch.spec.q_dtype, batch.spec.kv_dtype)


def unmoved(found: Result, batch: Batch, again: Callable[[Batch], Result]) -> None:
    """Other places for the blocks, and poison in those that no query can attend, change no bit."""
    poisoned = batch.poisoned_outside(range_of(batch.spec.mask_mod))
    if not _equal(found, again(poisoned)):
        same(found, again(batch.permuted()), "with its blocks in other places")
        raise AssertionError("other bits with poison in the blocks that no query can attend")


def alone(found: Result, batch: Batch, number: int, again: Callable[[Batch], Result]) -> None:
    """A sequence's rows have the same bits where it is the only one."""
    s = number % len(batch.sequences)
    first = sum(n for _, n in batch.sequences[:s])
    rows = slice(first, first + batch.sequences[s][1])
    starts = None if batch.query_start_loc is None else torch.tensor([0, rows.stop - first], dtype=torch.int32)
    single = replace(
        batch, sequences=batch.sequences[s : s + 1], q=batch.q[rows], block_table=batch.block_table[s : s + 1],
        seq_lens=batch.seq_lens[s : s + 1], query_start_loc=starts,
        tree_mask=None if batch.tree_mask is None else batch.tree_mask[rows],
    )  # fmt: skip
    same(tuple(x[rows] for x in found), again(single), f"for sequence {s} alone")


def same(found: tuple[Tensor, ...], other: tuple[Tensor, ...], how: str) -> None:
    if not _equal(found, other):
        worst = max(
            float((a.double() - b.double()).abs().nan_to_num(0.0).max()) for a, b in zip(found, other, strict=True)
        )
        raise AssertionError(f"other bits {how}: off by {worst:.3g}")


def _equal(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# ---- the templates as they stand -------------------------------------------------------------------------------


def raw_cpp(kernel: Kernel) -> AttentionKernel:
    """templates/attention.hpp as it stands, instantiated over a struct of constants that is written here from the spec,
    not by the generator."""
    spec, variant = kernel.spec, kernel.variant
    assert isinstance(variant, CppVariant)
    scales = {"none": "none", "tensor": "head", "head": "head", "token_head": "token"}[spec.kv_scale_granularity]
    constants: dict[str, Any] = {
        "Dtype q_dtype": f"Dtype::{dtype_name(spec.q_dtype)}", "Dtype kv_dtype": f"Dtype::{dtype_name(spec.kv_dtype)}",
        "Scales kv_scales": f"Scales::{scales}", "float logit_softcap": f"{spec.logit_softcap or 0.0}f",
        "int num_kv_heads": spec.num_kv_heads, "int group": spec.num_q_heads // spec.num_kv_heads,
        "int head_dim": spec.head_dim, "int v_head_dim": spec.v_head_dim, "int block_size": kernel.block_size,
        "int window": spec.window or 0, "int tile_kv": variant.tile_kv,
        "int heads_together": min(variant.heads_together, spec.num_kv_heads),
        "int streams": variant.streams, "int prefetch_ahead": variant.prefetch_ahead,
        "int split_tokens": variant.split_tokens, "int num_splits": variant.num_splits,
        "bool balanced": int(variant.schedule == "balanced"), "bool dot": int(variant.accumulate == "dot"),
        "int rows_together": variant.rows_together,
        "bool read_tokens": int(variant.read_order == "token"),
        "int prefetch_hint": {"l1": 3, "l2": 2}[variant.prefetch_hint],
        "bool shared_kv": int(spec.shared_kv), "bool zero_points": int(spec.kv_zero_points),
        "bool causal": int(spec.causal), "bool alibi": int(spec.alibi), "bool sinks": int(spec.sinks),
    }  # fmt: skip
    members = "\n".join(f"  static constexpr {name} = {value};" for name, value in constants.items())
    text = f"""#include "attention.hpp"
namespace pagegen {{ namespace {{
struct Mine : Constants {{
{members}
}};
}} }}
extern "C" int64_t template_attention(const pagegen_attention_args* args) {{
  return pagegen::Attention<pagegen::Mine>::run(*args);
}}
"""
    library = _compiled(text, MACHINES[kernel.machine])
    found = SimpleNamespace(pagegen_attention=library.template_attention)
    return cpu.CpuAttention(found, spec, kernel.layout)  # type: ignore[arg-type]  # a library by its function


@functools.lru_cache(maxsize=4)  # the cases of a kernel follow each other
def _compiled(text: str, machine: tuple[str, ...]) -> ctypes.CDLL:
    """The library of a C++ file that includes the templates; its files are gone once it is loaded."""
    with tempfile.TemporaryDirectory(prefix="pagegen-sweep-") as folder:
        source, library = Path(folder, "raw.cpp"), Path(folder, "raw.so")
        source.write_text(text)
        compiler = cpp_build.find_compiler()
        command = [*compiler.command, *compiler.flags, *machine, f"-I{paths.data('templates')}"]
        subprocess.run([*command, "-o", str(library), str(source)], check=True, capture_output=True)
        return ctypes.CDLL(str(library))


@contextmanager
def forms(kernel: Kernel) -> Iterator[list[tuple[AttentionCall, codegen.Form]]]:
    """Kernels of the drawn form, and the calls for which one was asked, as they are launched."""
    seen: list[tuple[AttentionCall, codegen.Form]] = []
    form_of = triton_launch.form_of

    def drawn(call: AttentionCall, variant: TritonVariant, target: Target) -> codegen.Form:
        form = replace(form_of(call, variant, target), **dict(kernel.form))
        seen.append((call, form))
        return form

    with mock.patch.object(triton_launch, "form_of", drawn):
        yield seen


def run_template(kernel: Kernel, batch: Batch, launched: AttentionCall, form: codegen.Form) -> Result:
    """The launch of the unspecialised template for the batch: the call that was `launched`, with fresh results."""
    spec, variant = kernel.spec, kernel.variant
    assert isinstance(variant, TritonVariant)
    if variant.loads == "descriptor" and not triton_launch._aligned(launched):
        variant = replace(variant, loads="pointer")
    fresh = batch.call()
    if fresh.query_start_loc is None and launched.query_start_loc is not None:
        fresh = replace(fresh, query_start_loc=launched.query_start_loc)
    call = triton_launch._stored(fresh, form)
    launch = getattr(_template(spec, variant), codegen.launcher_name(variant))
    bound = codegen.bindings(spec, kernel.layout, variant, form)
    captured = dict(zip(insert.captured_names(spec), call.captures, strict=True))
    names = [name for name in inspect.signature(launch).parameters if name not in bound and name not in captured]
    launch(**{name: getattr(call, name) for name in names}, **captured, **bound)
    assert fresh.lse is not None
    return fresh.out, fresh.lse


def _template(spec: AttentionSpec, variant: TritonVariant) -> ModuleType:
    """The template's file, or its text with the spec's functions in their places."""
    name = codegen.BALANCED if variant.programs else codegen.ATTENTION
    if spec.score_mod is not None or spec.mask_mod is not None:
        return import_source(codegen.source(spec, name))
    folder = str(paths.data("templates"))
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(name.removesuffix(".py"))
