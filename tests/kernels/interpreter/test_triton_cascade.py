"""Cascade attention over the Triton kernels, in Triton's interpreter, against the float64 reference.

Run with TRITON_INTERPRET=1, in a process of its own: the interpreter replaces triton.jit for the whole process.
"""

from __future__ import annotations

import pytest
import torch
from batches import compare
from test_cascade import RAGGED_GROUPS, shared, spec_of

import pagegen
from pagegen.spec import TritonVariant

RAGGED = [(100, 3), (90, 1), (17, 17), (150, 2), (64, 0), (113, 1), (81, 1)]
DECODE = [(n, 1) for n, _ in RAGGED]
WIDE = TritonVariant(tile_rows=16, tile_kv=64)


@pytest.mark.parametrize("fields", [{}, {"sinks": True, "logit_softcap": 20.0, "alibi": True}], ids=str)
@pytest.mark.parametrize("sequences", [DECODE, RAGGED], ids=["decode", "ragged"])
def test_both_passes_run_on_the_triton_kernels(sequences, fields, monkeypatch):
    monkeypatch.setenv("PAGEGEN_TARGET", "interpreter")
    batch = shared(spec_of(2, **fields), sequences, RAGGED_GROUPS)
    out, lse = pagegen.cascade_attention(
        **batch.kwargs(), prefix_groups=RAGGED_GROUPS, return_lse=True, variant=WIDE, prefix_variant=WIDE
    )
    compare(out, lse, *batch.expected(), torch.bfloat16)


def test_a_split_prefix_is_the_same(monkeypatch):
    monkeypatch.setenv("PAGEGEN_TARGET", "interpreter")
    batch = shared(spec_of(2), RAGGED, RAGGED_GROUPS)
    split = TritonVariant(tile_rows=16, tile_kv=32, num_splits=2)
    out = pagegen.cascade_attention(**batch.kwargs(), prefix_groups=RAGGED_GROUPS, variant=WIDE, prefix_variant=split)
    compare(out, None, batch.expected()[0], None, torch.bfloat16)
