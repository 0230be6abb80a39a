"""Writing, copying and merging beside a memcpy of the same bytes; and what a call costs before it does anything."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

import pagegen
from cpu_bench import ours
from cpu_bench.bench import Bench, Row
from cpu_bench.own import BASE
from cpu_bench.samples import Runner, here
from pagegen.spec import CacheLayout

TOKENS, BLOCK_SIZE = 2048, 32
STATES, ROWS = 4, 512
LAYOUT = CacheLayout(block_size=BLOCK_SIZE, order="HND")
Operation = tuple[str, Callable[[int], Any], int, int]  # name, call, bytes read, bytes written


def operations(bench: Bench) -> Iterable[Row]:
    """Rates count the bytes read and the bytes written; `memcpy` reads and writes the same ones in one run."""
    target = torch.empty(64 << 20, dtype=torch.uint8)
    for name, call, read, written in (*_writes(bench), *_copies(bench), *_merges()):
        runners = [here(name, call, read + written), _memcpy(bench, target, (read + written) // 2)]
        yield from bench.compare("copying", {"label": f"{(read + written) >> 20} MiB"}, runners, over=["memcpy"])


def _memcpy(bench: Bench, target: Tensor, size: int) -> Runner:
    """Copies `size` bytes of the pool, other ones each time, to memory that is used again as an output's is."""
    source = bench.pool.gauge_memory
    places = source.numel() // size
    to = target[:size]
    return here("memcpy", lambda i: to.copy_(source[i % places * size :][:size]), 2 * size)


def _writes(bench: Bench) -> Iterable[Operation]:
    heads, dim = BASE.num_kv_heads, BASE.head_dim
    k, v = (torch.randn(TOKENS, heads, dim).to(torch.bfloat16) for _ in range(2))
    q = torch.randn(TOKENS, BASE.num_q_heads, dim).to(torch.bfloat16)
    positions = torch.arange(TOKENS)
    cos, sin = (torch.rand(TOKENS, dim // 2) for _ in range(2))
    kv = k.nbytes + v.nbytes
    k_cache, v_cache = bench.pool.caches(BASE, LAYOUT)
    slots = _slots(k_cache)
    yield "write_kv", lambda i: pagegen.write_kv(k, v, k_cache, v_cache, slots[i % len(slots)]), kv, kv
    yield (
        "rope_write_kv",
        lambda i: pagegen.rope_write_kv(q, k, v, positions, cos, sin, k_cache, v_cache, slots[i % len(slots)]),
        kv + q.nbytes + cos.nbytes + sin.nbytes,
        kv + q.nbytes,
    )
    k8, v8 = bench.pool.caches(BASE.replace(kv_dtype="float8_e4m3fn", kv_scale_granularity="head"), LAYOUT)
    slots8, scale = _slots(k8), torch.full((heads,), 0.05)

    def quantised(i: int) -> None:
        pagegen.write_kv(k, v, k8, v8, slots8[i % len(slots8)], k_scale=scale, v_scale=scale)

    yield "write_kv e4m3", quantised, kv, kv // 2


def _slots(cache: Tensor) -> list[Tensor]:
    """int64 [TOKENS] each: whole blocks, shuffled over the cache."""
    blocks = torch.randperm(cache.shape[0]).view(-1, TOKENS // BLOCK_SIZE)[:64]
    return list((blocks[:, :, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten(1))


def _copies(bench: Bench) -> Iterable[Operation]:
    k_cache, v_cache = bench.pool.caches(BASE, LAYOUT)
    pairs = torch.randperm(k_cache.shape[0]).view(-1, 64, 2)
    size = 64 * BLOCK_SIZE * BASE.kv_bytes_per_token
    yield "copy_blocks", lambda i: pagegen.copy_blocks(k_cache, v_cache, pairs[i % len(pairs)]), size, size


def _merges() -> Iterable[Operation]:
    sets = [torch.randn(STATES, ROWS, BASE.num_q_heads, BASE.head_dim) for _ in range(4)]
    lses = torch.randn(STATES, ROWS, BASE.num_q_heads)
    size = sets[0].nbytes
    yield "merge_states", lambda i: pagegen.merge_states(sets[i % 4], lses), size, size // STATES


def overhead(bench: Bench) -> Iterable[Row]:
    """One sequence of 16 tokens, hot: the kernel's object, the public function, the torch operator, and one token's
    write. One thread's work each; milliseconds a call are what counts."""
    spec = BASE
    found = ours.batches(bench.pool, spec, CacheLayout(block_size=16, order="HND"), [16])
    found.tables = found.tables[:1]
    q = torch.randn(1, spec.num_q_heads, spec.head_dim).to(spec.q_dtype)
    table, lens, out = found.tables[0], found.lens, torch.empty_like(q)
    operator = torch.ops.pagegen.paged_attention.default
    k, v = (torch.randn(1, spec.num_kv_heads, spec.head_dim).to(spec.q_dtype) for _ in range(2))
    slot = torch.tensor([16 * int(table[0, 0])])
    calls: dict[str, Callable[[int], Any]] = {
        "paged_attention": lambda i: pagegen.paged_attention(q, found.k, found.v, table, lens, out=out),
        "torch operator": lambda i: operator(q, found.k, found.v, table, lens),
        "write_kv": lambda i: pagegen.write_kv(k, v, found.k, found.v, slot),
        "torch.add": lambda i: torch.add(q, q, out=out),
    }
    kernel = ours.kernel(found, name="kernel object")
    runners = [kernel, *(here(name, call, found.kv_bytes) for name, call in calls.items())]
    yield from bench.compare("overhead", {"label": "B1 ctx16"}, runners)
