"""What the tests of the C++ attention kernels share: named kernels, compiled two at a time, and their checks."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from batches import ORDERS, Batch, compare, make_batch
from torch import Tensor

from pagegen.codegen import cpp
from pagegen.modifiers import captured_tensors
from pagegen.spec import AttentionSpec, CacheLayout, CppVariant
from pagegen.targets import cpp_build, cpu
from pagegen.targets.call import AttentionKernel

SHORT = CppVariant(tile_kv=16, streams=2, prefetch_ahead=4, split_tokens=64)
LONG = CppVariant(tile_kv=64, streams=4, prefetch_ahead=1, split_tokens=128)
# as the defaults read caches in NHD order: a few tokens of several heads at a time
TOKENS = CppVariant(tile_kv=32, streams=4, heads_together=3, rows_together=4, read_order="token", split_tokens=64)
DECODE = [(0, 1), (1, 1), (37, 1), (300, 1), (64, 1), (129, 1)]
RAGGED = [(70, 70), (0, 0), (33, 1), (200, 17), (5, 5), (310, 2), (129, 64)]
HASWELL = ("-march=haswell",)
PORTABLE = ("-march=x86-64",)
Result = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    """One compiled kernel. `fields` are those of AttentionSpec; heads are `kv_heads` times `group`. A `nightly` one is
    a further combination of what other cases have: it is run with --nightly, as the random sweep's are."""

    name: str
    group: int
    head_dim: int
    block_size: int
    order: str = "NHD"
    dtype: str = "bfloat16"
    kv_heads: int = 2
    variant: CppVariant = LONG
    machine: tuple[str, ...] = cpp_build.NATIVE
    fields: dict[str, Any] = field(default_factory=dict, hash=False)
    nightly: bool = field(default=False, compare=False)
    captures: tuple[Tensor, ...] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        # now: another test may register other tensors under the same name
        captures = captured_tensors(self.fields.get("score_mod"), self.fields.get("mask_mod"))
        object.__setattr__(self, "captures", captures)

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(
            num_q_heads=self.kv_heads * self.group, num_kv_heads=self.kv_heads, head_dim=self.head_dim,
            q_dtype=self.dtype, **self.fields,
        )  # fmt: skip

    @property
    def layout(self) -> CacheLayout:
        return CacheLayout(block_size=self.block_size, order=ORDERS[self.order])

    def load(self) -> AttentionKernel:
        return cpu.load_attention(self.spec, self.layout, self.variant, machine=self.machine)

    def batch(self, sequences: list[tuple[int, int]], **options: Any) -> Batch:
        return make_batch(
            self.spec, sequences, block_size=self.block_size, order=self.order, captures=self.captures, **options
        )


def prebuild(cases: Sequence[Case]) -> None:
    """Compiles whatever is not in the cache yet, two at a time, but for nightly cases; skips the tests where there is
    no compiler."""
    cases = [case for case in cases if not case.nightly]
    if cpu.compiler() is None:
        pytest.skip(cpu.unsupported(cases[0].spec) or "no compiler")
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda case: cpp_build.build(source(case), case.name, machine=case.machine), cases))


def source(case: Case) -> str:
    return cpp.render_attention(case.spec, case.layout, case.variant)


def run(kernel: AttentionKernel, batch: Batch) -> Result:
    call = batch.call()
    kernel(call)
    assert call.lse is not None
    return call.out, call.lse


def check(kernel: AttentionKernel, batch: Batch) -> Result:
    out, lse = run(kernel, batch)
    compare(out, lse, *batch.expected(), batch.spec.q_dtype, batch.spec.kv_dtype)
    return out, lse


def same_bits(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
