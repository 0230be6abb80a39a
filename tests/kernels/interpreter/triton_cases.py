"""Specialised kernels for the interpreter's tests, and what they run on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import features
import pytest
import torch
from batches import ORDERS, Batch, make_batch

from pagegen.spec import AttentionSpec, CacheLayout, Target, TritonVariant
from pagegen.spec.dtypes import QUERY_DTYPES
from pagegen.targets import load_attention
from pagegen.targets.call import AttentionCall

INTERPRETER = Target("interpreter")
# A case that docs/coverage.md names runs on both; the others take turns, but for --nightly: each has other code for
# decode, and shares it with others of its kind.
DECODE = [(0, 1), (1, 1), (37, 1), (150, 1)]
RAGGED = [(10, 10), (0, 0), (33, 1), (80, 5), (3, 3), (3, 5)]


@dataclass(frozen=True)
class Case:
    """One specialised kernel. `fields` are those of AttentionSpec; heads are `kv_heads` times `group`."""

    name: str
    group: int
    head_dim: int
    block_size: int
    order: str = "NHD"
    dtype: str = "float32"
    kv_heads: int = 2
    variant: TritonVariant = TritonVariant()
    fields: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(
            num_q_heads=self.kv_heads * self.group, num_kv_heads=self.kv_heads, head_dim=self.head_dim,
            q_dtype=self.dtype, **self.fields,
        )  # fmt: skip

    @property
    def layout(self) -> CacheLayout:
        return CacheLayout(block_size=self.block_size, order=ORDERS[self.order])

    def batch(self, sequences: list[tuple[int, int]], **options: Any) -> Batch:
        return make_batch(self.spec, sequences, block_size=self.block_size, order=self.order, **options)

    def run(self, batch: Batch) -> AttentionCall:
        call = batch.call()
        load_attention(self.spec, self.layout, self.variant, INTERPRETER)(call)
        return call


def on_both_batches(cases: Sequence[Case], file: str) -> list[Any]:
    """(sequences, case) for a test of `file`."""
    named = {test for row in features.FEATURES for test in row.interpreter if f"/{file}.py::" in test}
    found = []
    for kind, sequences in (("decode", DECODE), ("ragged", RAGGED)):
        for number, case in enumerate(cases):
            left_out = number % 2 == (kind == "decode") and not any(t.endswith(f"[ragged-{case.name}]") for t in named)
            marks = [pytest.mark.nightly] if left_out else []
            found.append(pytest.param(sequences, case, id=f"{kind}-{case.name}", marks=marks))
    return found


def tiles(walk: str, kv: int = 64, rows: int = 16, splits: int = 1, **fields: Any) -> TritonVariant:
    return TritonVariant(page_walk=walk, tile_kv=kv, tile_rows=rows, num_splits=splits, **fields)


def coarser(spec: AttentionSpec) -> torch.dtype:
    """The dtype whose rounding a result shows: a quantised cache is exact, once dequantised."""
    plain = [dtype for dtype in (spec.q_dtype, spec.kv_dtype) if dtype in QUERY_DTYPES]
    return max(plain, key=lambda dtype: torch.finfo(dtype).eps)
