"""Which lines a decode kernel asks for ahead: all of K and V but the first ones, none of another sequence's, and few
twice. A kernel that asks for others computes the same numbers, slower: no other test would see it."""

from __future__ import annotations

import ctypes
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

from pagegen.codegen import cpp
from pagegen.spec import AttentionSpec, CacheLayout, CppVariant
from pagegen.spec.dtypes import INT4, bytes_per_element
from pagegen.targets import cpp_build, cpu
from pagegen.targets.call import AttentionCall

LENGTH, BLOCKS, BLOCK = 512, 40, 32  # tokens, blocks of which 24 are nobody's, tokens a block
LINE = 64  # bytes
# In place of the instruction: a list of the lines.
NOTED = "__builtin_prefetch(line, 0, C::prefetch_hint)"
RECORDER = """
#include <cstdint>
static int64_t noted;
static const void* lines[1 << 20];
static inline void note(const void* line) { lines[noted++ % (1 << 20)] = line; }
extern "C" int64_t noted_lines(const void*** at) { *at = lines; return noted; }
"""
BASE = AttentionSpec(num_q_heads=16, num_kv_heads=4, head_dim=128, q_dtype=torch.bfloat16)
NARROW = {"kv_scale_granularity": "head"}
SPECS = {
    "bfloat16": BASE,
    "float32": BASE.replace(q_dtype=torch.float32, kv_dtype=torch.float32),
    "float8": BASE.replace(kv_dtype=torch.float8_e4m3fn, **NARROW),
    "int4": BASE.replace(kv_dtype=INT4, **NARROW),
    "group 1": BASE.replace(num_q_heads=4),
    "group 7": BASE.replace(num_q_heads=28),
    "dim 80": BASE.replace(head_dim=80, v_head_dim=80),  # rows of 160 bytes: no whole number of lines
}


@pytest.fixture(scope="module", autouse=True)
def compiler() -> None:
    if cpu.compiler() is None:
        pytest.skip("no compiler")


def asked_for(
    spec: AttentionSpec, layout: CacheLayout, variant: CppVariant
) -> tuple[Counter[int], Counter[int], set[int]]:
    """How often each line of K and of V was asked for, by its number in the cache, and those that hold the sequence."""
    source = cpp.render_attention(spec, layout, variant)
    assert source.count(NOTED) == 1
    library = cpp_build.load(RECORDER + source.replace(NOTED, "note(line)"), "prefetches noted")
    at = ctypes.POINTER(ctypes.c_void_p)()
    library.noted_lines.restype = ctypes.c_int64
    before = library.noted_lines(ctypes.byref(at))  # of a test that used the same library
    packed = 2 if spec.kv_dtype == INT4 else 1
    elements = BLOCKS * BLOCK * spec.num_kv_heads * spec.head_dim // packed
    dtype = torch.uint8 if packed == 2 else spec.kv_dtype
    size = elements * dtype.itemsize
    memory = [torch.zeros(size + LINE, dtype=torch.uint8) for _ in range(2)]
    starts = [-m.data_ptr() % LINE for m in memory]
    flat = [m[start : start + size] for m, start in zip(memory, starts, strict=True)]
    k, v = (layout.view(f.view(dtype), spec.num_kv_heads, spec.head_dim // packed) for f in flat)
    table = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(0))[: LENGTH // BLOCK].to(torch.int32)[None]
    q = torch.zeros(1, spec.num_q_heads, spec.head_dim, dtype=spec.q_dtype)
    scale = torch.ones(1).expand(k.shape[:3]) if spec.kv_scale_granularity == "head" else None
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        cpu.CpuAttention(library, spec, layout)(
            AttentionCall(
                q=q, k_cache=k, v_cache=v, block_table=table, seq_lens=torch.tensor([LENGTH], dtype=torch.int32),
                query_start_loc=None, max_query_len=1, max_seq_len=LENGTH, scale=spec.scale, alibi_slopes=None,
                sinks=None, out=torch.zeros_like(q), lse=None, k_scale=scale, v_scale=scale,
            )
        )  # fmt: skip
    finally:
        torch.set_num_threads(threads)
    after = library.noted_lines(ctypes.byref(at))
    assert after < 1 << 20
    found: list[Counter[int]] = [Counter(), Counter()]
    for address in at[before:after]:
        for cache, counted in zip(flat, found, strict=True):
            if 0 <= address - cache.data_ptr() < size:
                counted[(address - cache.data_ptr()) // LINE] += 1
    assert sum(c.total() for c in found) == after - before, "something else was asked for"
    row_bytes = int(spec.head_dim * bytes_per_element(spec.kv_dtype))
    own = set()
    for t in range(LENGTH):
        for row in k[int(table[0, t // BLOCK]), t % BLOCK]:
            first = row.data_ptr() - flat[0].data_ptr()
            own |= set(range(first // LINE, (first + row_bytes - 1) // LINE + 1))
    return found[0], found[1], own


@pytest.mark.parametrize("order", ["HND", "NHD"])
@pytest.mark.parametrize(("name", "ahead"), [*((name, 1) for name in SPECS), ("bfloat16", 2)])
def test_every_line_but_the_first_is_asked_for_and_no_other(name: str, order: str, ahead: int) -> None:
    spec, layout = SPECS[name], CacheLayout(block_size=BLOCK, order=order)
    variant = replace(cpu.default_variant(spec, layout, decode=True), prefetch_ahead=ahead)
    keys, values, own = asked_for(spec, layout, variant)
    for asked in (keys, values):
        assert asked.keys() <= own, "lines of blocks that are not the sequence's"
    # By heads, nothing asks for the first units, and the last ones ask for themselves; by tokens, so with a few lanes.
    first = ahead * variant.tile_kv / LENGTH / (spec.num_kv_heads if variant.read_order == "head" else 1)
    row_lines = math.ceil(spec.head_dim * bytes_per_element(spec.kv_dtype) / LINE)  # two rows may share one
    for asked in (keys, values):
        assert len(asked) >= len(own) * (1 - first) - 1
        assert asked.total() <= 1.01 * LENGTH * spec.num_kv_heads * row_lines


def test_nothing_is_asked_for_where_a_variant_looks_no_further_ahead() -> None:
    layout = CacheLayout(block_size=BLOCK)
    keys, values, _ = asked_for(BASE, layout, replace(cpu.default_variant(BASE, layout, decode=True), prefetch_ahead=0))
    assert not keys and not values
