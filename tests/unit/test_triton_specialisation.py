"""What Triton would compile a kernel for: one specialisation serves every batch, context and table width.

Triton compiles anew where an integer argument becomes 1, or divisible by 16, or ceases to be, unless the kernel says
that it does not matter. No GPU is needed: arguments are specialised before anything is compiled.
"""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch

from pagegen import AttentionSpec, CacheLayout, Target, targets
from pagegen.targets import triton_cache, triton_launch
from pagegen.targets.cache_call import WriteCall
from pagegen.targets.call import AttentionCall

SM_90 = Target.parse("sm_90")
BATCHES = [(n, width) for n in (1, 3, 16, 64, 100) for width in (1, 2, 16, 33)]


@pytest.fixture
def compiled(monkeypatch):
    """Kernel name -> the specialisations that were asked for."""
    jit = pytest.importorskip("triton.runtime.jit")
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend

    backend, found = CUDABackend(GPUTarget("cuda", 90, 32)), defaultdict(set)

    def run(kernel, *args, grid, warmup, **options):
        bind = jit.create_function_from_signature(kernel.signature, kernel.params, backend)
        _, specialisation, _ = bind(*args, **options)
        found[kernel.fn.__name__].add(str(specialisation))

    monkeypatch.setattr(jit.JITFunction, "run", run)
    return found


def call(spec, num_seqs, width, decode):
    q = torch.zeros(num_seqs, spec.num_q_heads, spec.head_dim, dtype=spec.q_dtype)
    cache = torch.zeros(64, 16, spec.num_kv_heads, spec.head_dim, dtype=spec.kv_dtype)
    return AttentionCall(
        q=q, k_cache=cache, v_cache=cache.clone(), block_table=torch.zeros(num_seqs, width, dtype=torch.int32),
        seq_lens=torch.ones(num_seqs, dtype=torch.int32),
        query_start_loc=None if decode else torch.arange(num_seqs + 1, dtype=torch.int32),
        max_query_len=1 if decode else 16 * width, max_seq_len=16 * width, scale=0.125, alibi_slopes=None, sinks=None,
        out=torch.empty_like(q), lse=None,
    )  # fmt: skip


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("decode", [True, False], ids=["decode", "mixed"])
def test_one_compilation_serves_every_batch(compiled, decode, kv_dtype):
    spec, layout = (
        AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=64, kv_dtype=kv_dtype),
        CacheLayout(block_size=16),
    )
    variant = targets.default_variant(spec, layout, SM_90, decode=decode)
    kernel = triton_launch.TritonAttention(spec, layout, variant, SM_90)
    for num_seqs, width in BATCHES:
        kernel(call(spec, num_seqs, width, decode))
    assert compiled and all(len(found) == 1 for found in compiled.values()), {k: len(v) for k, v in compiled.items()}


def test_one_compilation_writes_any_number_of_tokens(compiled):
    write = triton_cache.writer(SM_90)
    for tokens in (1, 3, 16, 17):
        k, cache = torch.zeros(tokens, 2, 64, dtype=torch.bfloat16), torch.zeros(8, 16, 2, 64, dtype=torch.bfloat16)
        slots = torch.full((tokens,), -1)
        write(WriteCall(k, k.clone(), cache, cache.clone(), slots, torch.bfloat16))
    assert compiled and all(len(found) == 1 for found in compiled.values())


def test_the_count_sees_a_specialisation(compiled):
    spec, layout = AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=64), CacheLayout(block_size=16)
    kernel = triton_launch.TritonAttention(
        spec, layout, targets.default_variant(spec, layout, SM_90, decode=True), SM_90
    )
    kernel(call(spec, 3, 2, decode=True))
    odd = call(spec, 3, 2, decode=True)
    odd.q = torch.zeros(3 * 8 * 64 + 1, dtype=torch.bfloat16)[1:].view(3, 8, 64)  # not aligned to 16 bytes
    kernel(odd)
    assert any(len(found) == 2 for found in compiled.values())
