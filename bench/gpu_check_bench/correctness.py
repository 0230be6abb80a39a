"""Every kernel family against the float64 reference: the features and the hostile batches of tests/kernels.

Slots without a token are poison, unused block-table entries are garbage, and blocks lie in random places; a second run
with the blocks elsewhere must give the same bits.
"""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from batches import ORDERS, Batch, compare, make_batch
from features import FEATURES, Feature, WriterFeature
from torch import Tensor

import pagegen
from gpu_check_bench.context import Context
from gpu_check_bench.needed import missing
from gpu_check_bench.worker import Cases, Row
from pagegen import costs
from pagegen.modifiers import captured_tensors
from pagegen.spec import Variant
from pagegen.spec.dtypes import INT4
from pagegen.targets import default_variant, load_attention

DECODE = [(37, 1), (0, 1), (1, 1), (1500, 1)]
RAGGED = [(33, 1), (200, 200), (0, 0), (800, 90)]
# What a dry run takes: each is a C++ kernel to compile.
DRY_RUN = ("sliding window", "float8 e4m3, a scale a tensor or head", "write_kv, bfloat16")
DRY_RUN_SEQUENCES = [(37, 1), (0, 1), (1, 1), (90, 1)]
PYTEST_LIMIT_S = 100.0
BLOCKS, TOKENS = 40, 300


def add_cases(context: Context, cases: Cases) -> None:
    """A case a kernel: the families that differ most come first, since each case takes every n-th of the features."""
    for kind in ("decode", "ragged"):
        for number, feature in enumerate(FEATURES):
            if context.dry_run and feature.name not in DRY_RUN:
                continue
            if isinstance(feature, Feature) and kind in feature.kinds:
                cases.add(f"{feature.name}: {kind}", functools.partial(attention, context, feature, kind, number))
            elif isinstance(feature, WriterFeature) and kind == "decode":
                cases.add(f"{feature.name}: bits", functools.partial(written, context, feature))
    if not context.dry_run:
        cases.add("tests/gpu", functools.partial(pytest_run, context))


def attention(context: Context, feature: Feature, kind: str, number: int) -> Row:
    """One kernel on one kind of batch."""
    absent = feature.absent.get(str(context.target))
    if absent is not None:
        return {"skipped": absent}
    if feature.changes and context.target.family == "cpp":
        return {"skipped": "a way to compute that Triton kernels have"}
    variant = default_variant(feature.spec, feature.layout, context.target, decode=kind == "decode")
    variant = replace(variant, **feature.changes)
    illegal = costs.legal(feature.spec, feature.layout, variant, context.device)
    if illegal:
        return {"skipped": f"not legal on this device: {illegal[0]}", "variant": variant.name}
    # descriptors want addresses and strides of 16 bytes, which padded pools have not
    orders = ["NHD"] if feature.changes.get("loads") == "descriptor" else list(ORDERS)
    order = orders[number % len(orders)]
    decode = DRY_RUN_SEQUENCES if context.dry_run else DECODE
    captures = [_grown(tensor) for tensor in captured_tensors(feature.spec.score_mod, feature.spec.mask_mod)]
    batch = make_batch(
        feature.spec, decode if kind == "decode" else RAGGED, block_size=feature.block_size, order=order, seed=number,
        tree=kind == "ragged" and bool(feature.options.get("tree")), captures=tuple(captures), device=context.on,
    )  # fmt: skip
    if feature.options.get("wide") and context.on == "cuda":
        batch = _far(batch)
    return {"variant": variant.name, "order": order, **_checked(context, batch, variant)}


def _checked(context: Context, batch: Batch, variant: Variant) -> Row:
    kernel = load_attention(batch.spec, batch.layout, variant, context.target)
    here = batch.call()
    kernel(here)
    expected, expected_lse = batch.expected()
    error = float((here.out.double() - expected.double()).abs().nan_to_num(nan=torch.inf).max())
    try:
        compare(here.out, here.lse, expected, expected_lse, batch.spec.q_dtype, batch.spec.kv_dtype)
    except AssertionError as wrong:
        return {"error": f"wrong: {str(wrong).strip()[:300]}", "max_error": error}
    if len(batch.k_cache) < BLOCKS * 1000:  # moving the blocks of a cache beyond 2^31 elements takes seconds
        there = batch.permuted().call()
        kernel(there)
        if here.lse is None or there.lse is None:
            raise RuntimeError("a call without lse cannot be compared")
        if not (torch.equal(here.out, there.out) and torch.equal(here.lse, there.lse)):
            return {"error": "wrong: other bits where the blocks lie in other places", "max_error": error}
    return {"max_error": error}


def _grown(tensor: Tensor) -> Tensor:
    """A captured tensor with other values, large enough for the batches here (the features capture one for 64 keys)."""
    shape = [2048 if size == 64 else size for size in tensor.shape]
    generator = torch.Generator().manual_seed(0)
    if tensor.dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(tensor.dtype)
    return torch.randint(0, 40, shape, generator=generator).sort(dim=-1)[0].to(tensor.dtype)


def _far(batch: Batch, elements: int = 2**31) -> Batch:
    """The batch with its blocks behind so many elements: 4 GiB each for K and V of 16 bits."""
    empty = elements // batch.k_cache[0].numel() + 1
    moved = {}
    for name in ("k_cache", "v_cache"):
        old = getattr(batch, name)
        moved[name] = old.new_full((empty + len(old), *old.shape[1:]), float("nan"))
        moved[name][empty:] = old
    return replace(batch, block_table=batch.block_table + empty, order="NHD", **moved)


def written(context: Context, feature: WriterFeature) -> Row:
    """Rotating and writing on the device against torch's own operators on the CPU, bit by bit."""
    stored, fields = feature.fields["stored"], dict(feature.fields)
    found = []
    for on in (context.on, "cpu"):
        given = _written_operands(stored, fields, on)
        if "rotary_half" in fields:
            rotated = pagegen.rope_write_kv(**given, interleaved=bool(fields.get("interleaved")), kv_dtype=stored)
        else:
            names = ("k", "v", "k_cache", "v_cache", "slot_mapping", "k_scale", "v_scale", "k_zero", "v_zero")
            pagegen.write_kv(**{name: given[name] for name in names if name in given}, kv_dtype=stored)
            rotated = None
        kept = [rotated, given["k_cache"], given["v_cache"]]
        found.append([tensor.cpu() for tensor in kept if tensor is not None])
    differing = sum(_differing(here, there) for here, there in zip(*found, strict=True))
    if differing:
        return {"error": f"wrong: {differing} elements have other bits than on the CPU"}
    return {"compared": "the bits of the CPU's"}


def _written_operands(stored: torch.dtype, fields: dict[str, Any], on: str) -> dict[str, Any]:
    heads, dim = fields.get("num_kv_heads", 8), fields.get("head_dim", 128)
    v_dim = fields.get("v_head_dim", dim)
    generator = torch.Generator().manual_seed(0)

    def normal(heads: int, dim: int) -> Tensor:
        return torch.randn(TOKENS, heads, dim, generator=generator).bfloat16()

    def cache(dim: int) -> Tensor:
        storage, width = (torch.uint8, dim // 2) if stored == INT4 else (stored, dim)
        return torch.zeros(BLOCKS, 16, heads, width).to(storage)

    slots = torch.randperm(BLOCKS * 16, generator=generator)[:TOKENS]
    slots[::7] = -1
    given: dict[str, Any] = {
        "k": normal(heads, dim), "v": normal(heads, v_dim) if v_dim else None, "k_cache": cache(dim),
        "v_cache": cache(v_dim) if v_dim else None, "slot_mapping": slots,
    }  # fmt: skip
    if "rotary_half" in fields:
        angles = torch.outer(torch.arange(512.0), 0.9 ** torch.arange(float(fields["rotary_half"])))
        positions = torch.randint(0, 512, (TOKENS,), generator=generator)
        given |= {"q": normal(fields["num_q_heads"], dim), "positions": positions}
        given |= {"cos": angles.cos(), "sin": angles.sin()}
    if fields.get("scaled"):
        given["k_scale"] = 0.05 + torch.rand(BLOCKS, 16, heads, generator=generator)
        given["v_scale"] = 0.05 + torch.rand(heads, generator=generator)
    if fields.get("zero_points"):
        given["k_zero"] = torch.randn(BLOCKS, 16, heads, generator=generator)
        given["v_zero"] = torch.randn(BLOCKS, 16, heads, generator=generator)
    return {name: None if value is None else value.to(on) for name, value in given.items()}


def _differing(here: Tensor, there: Tensor) -> int:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[here.element_size()]
    return int((here.view(integers) != there.view(integers)).sum())


def pytest_run(context: Context) -> Row:
    """tests/gpu in a process of its own, as far as the time goes."""
    lacking = missing(("pytest", "hypothesis"))
    if lacking:
        return {"skipped": f"not installed: {', '.join(lacking)}"}
    root = Path(pagegen.__file__).parents[1]
    limit = max(5.0, min(PYTEST_LIMIT_S, context.left_s()))
    arguments = [str(root / "tests" / "gpu"), "-v", "-p", "no:cacheprovider"]
    program = f"import sys; sys.path[:] = {sys.path!r}; import pytest; sys.exit(pytest.main(sys.argv[1:]))"
    try:
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=limit, cwd=root
        )
        output, ended = done.stdout, done.returncode
    except subprocess.TimeoutExpired as cut:
        output = cut.stdout.decode(errors="replace") if isinstance(cut.stdout, bytes) else cut.stdout or ""
        ended = None
    failed = re.findall(r"^(\S+::.+?) (?:FAILED|ERROR)", output, re.MULTILINE)
    row: Row = {
        "passed": len(re.findall(r" PASSED", output)),
        "cut": None if ended is not None else f"after {limit:.0f} s",
    }
    if failed:
        row["error"] = f"{len(failed)} failed, the first: {failed[0]}"
    elif ended not in (0, None):
        lines = [line for line in output.splitlines() if line.strip()]
        row["error"] = f"pytest ended with {ended}: {lines[-1][:200] if lines else 'it printed nothing'}"
    return row
