"""Which lines a decode kernel prefetches: all of K and V but the first ones, none of another sequence's, and few twice.
A kernel that prefetches others computes the same numbers, slower: no other test would see it."""

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
    "int8": BASE.replace(kv_dtype=torch.int8, **NARROW),
    "int4": BASE.replace(kv_dtype=INT4, **NARROW),
    "group 1": BASE.replace(num_q_heads=4),
    "group 7": BASE.replace(num_q_heads=28),
    "group 16": BASE.replace(num_q_heads=64),  # two sets of rows meet each tile
    "16 heads": BASE.replace(num_q_heads=64, num_kv_heads=16),
    "dim 80": BASE.replace(head_dim=80, v_head_dim=80),  # rows of 160 bytes: no whole number of lines
    # sums in passes of unequal width
    "dim 224": BASE.replace(head_dim=224, v_head_dim=224),
    "dim 256": BASE.replace(head_dim=256, v_head_dim=256),
    "float8, dim 224": BASE.replace(head_dim=224, v_head_dim=224, kv_dtype=torch.float8_e4m3fn, **NARROW),
    "float32, dim 112": BASE.replace(head_dim=112, v_head_dim=112, q_dtype=torch.float32, kv_dtype=torch.float32),
    "values narrower": BASE.replace(head_dim=192, v_head_dim=128),
    "values wider": BASE.replace(head_dim=64, v_head_dim=128),
    "shared": BASE.replace(num_kv_heads=1, head_dim=192, v_head_dim=128, shared_kv=True),
}


@pytest.fixture(scope="module", autouse=True)
def compiler() -> None:
    if cpu.compiler() is None:
        pytest.skip("no compiler")


def prefetched(
    spec: AttentionSpec, layout: CacheLayout, variant: CppVariant, queries: int = 1
) -> tuple[Counter[int], Counter[int], set[int], set[int]]:
    """How often each line of K and of V was prefetched, by its number, and which lines hold the sequence."""
    source = cpp.render_attention(spec, layout, variant)
    assert source.count(NOTED) == 1
    library = cpp_build.load(RECORDER + source.replace(NOTED, "note(line)"), "prefetches noted")
    at = ctypes.POINTER(ctypes.c_void_p)()
    library.noted_lines.restype = ctypes.c_int64
    before = library.noted_lines(ctypes.byref(at))  # of a test that used the same library
    packed = 2 if spec.kv_dtype == INT4 else 1
    dtype = torch.uint8 if packed == 2 else spec.kv_dtype
    widths = (spec.head_dim // packed, spec.v_head_dim // packed)
    sizes = [BLOCKS * BLOCK * spec.num_kv_heads * width * dtype.itemsize for width in widths]
    memory = [torch.zeros(size + LINE, dtype=torch.uint8) for size in sizes]
    starts = [-m.data_ptr() % LINE for m in memory]
    flat = [m[start : start + size] for m, start, size in zip(memory, starts, sizes, strict=True)]
    k, v = (layout.view(f.view(dtype), spec.num_kv_heads, width) for f, width in zip(flat, widths, strict=True))
    if spec.shared_kv:
        v = k[..., : spec.v_head_dim]
    table = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(0))[: LENGTH // BLOCK].to(torch.int32)[None]
    q = torch.zeros(queries, spec.num_q_heads, spec.head_dim, dtype=spec.q_dtype)
    starts_at = None if queries == 1 else torch.tensor([0, queries], dtype=torch.int32)
    scale = torch.ones(1).expand(k.shape[:3]) if spec.kv_scale_granularity == "head" else None
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        cpu.CpuAttention(library, spec, layout)(
            AttentionCall(
                q=q, k_cache=k, v_cache=v, block_table=table, seq_lens=torch.tensor([LENGTH], dtype=torch.int32),
                query_start_loc=starts_at, max_query_len=queries, max_seq_len=LENGTH, scale=spec.scale,
                alibi_slopes=None, sinks=None, out=q.new_zeros(queries, spec.num_q_heads, spec.v_head_dim), lse=None,
                k_scale=scale, v_scale=scale,
            )
        )  # fmt: skip
    finally:
        torch.set_num_threads(threads)
    after = library.noted_lines(ctypes.byref(at))
    assert after < 1 << 20
    found: list[Counter[int]] = [Counter(), Counter()]
    for address in at[before:after]:
        for cache, counted in zip(flat, found, strict=True):
            if 0 <= address - cache.data_ptr() < len(cache):
                counted[(address - cache.data_ptr()) // LINE] += 1
    assert sum(c.total() for c in found) == after - before, "something else was prefetched"
    return found[0], found[1], lines_of(k, flat[0], table[0]), lines_of(v, flat[1], table[0])


def lines_of(cache: torch.Tensor, flat: torch.Tensor, table: torch.Tensor) -> set[int]:
    """The lines of `flat` that hold rows of the blocks in `table`."""
    own: set[int] = set()
    row_bytes = cache.shape[-1] * cache.element_size()
    for t in range(LENGTH):
        for row in cache[int(table[t // BLOCK]), t % BLOCK]:
            first = row.data_ptr() - flat.data_ptr()
            own |= set(range(first // LINE, (first + row_bytes - 1) // LINE + 1))
    return own


CASES = [*((name, 1, 1) for name in SPECS), ("bfloat16", 2, 1), ("dim 256", 2, 1), ("bfloat16", 1, 2), ("int8", 1, 2)]


@pytest.mark.parametrize("order", ["HND", "NHD"])
@pytest.mark.parametrize(("name", "ahead", "queries"), CASES)
def test_every_line_but_the_first_is_prefetched_and_no_other(name: str, order: str, ahead: int, queries: int) -> None:
    spec, layout = SPECS[name], CacheLayout(block_size=BLOCK, order=order)
    variant = replace(cpu.default_variant(spec, layout, decode=True), prefetch_ahead=ahead)
    found = prefetched(spec, layout, variant, queries)
    by_token = variant.read_order == "token"
    for width, lines, own, is_keys in zip(
        (spec.head_dim, spec.v_head_dim), found[:2], found[2:], (True, False), strict=True
    ):
        if spec.shared_kv and not is_keys:
            assert not lines  # prefetched as keys
            continue
        assert lines.keys() <= own, "lines of blocks that are not the sequence's"
        # By head, nothing prefetches the first units of an item (a tile of a head), and its last ones prefetch
        # themselves. By token, so with the first lanes of its keys, 16 at most; the values follow upon them.
        unit = variant.tile_kv / LENGTH / min(variant.heads_together, spec.num_kv_heads)
        missing = ahead * (unit if not by_token else 16 / LENGTH if is_keys else 0.0)
        row_lines = math.ceil(width * bytes_per_element(spec.kv_dtype) / LINE)  # two rows may share one
        assert len(lines) >= len(own) * (1 - missing) - 1
        times = 1 if by_token or spec.group > 8 else queries  # see `one_tile`
        assert lines.total() <= 1.01 * times * LENGTH * spec.num_kv_heads * row_lines


def test_nothing_is_prefetched_where_a_variant_looks_no_further_ahead() -> None:
    layout = CacheLayout(block_size=BLOCK)
    keys, values, *_ = prefetched(
        BASE, layout, replace(cpu.default_variant(BASE, layout, decode=True), prefetch_ahead=0)
    )
    assert not keys and not values
