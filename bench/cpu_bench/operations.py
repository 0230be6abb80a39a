"""Writing, copying and merging beside a memcpy of the same bytes; and what a call costs before it does anything."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

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


class Operation(NamedTuple):
    """A call, the bytes it reads and writes, and memory like that which it reads from and writes to. `made` bytes of
    what it writes are in new memory: its result."""

    name: str
    call: Callable[[int], Any]
    read: int
    written: int
    source: Tensor
    target: Tensor
    made: int = 0


def operations(bench: Bench) -> Iterable[Row]:
    """Rates count the bytes read and the bytes written; `memcpy` reads and writes the same ones in one run, into new
    memory where the operation does."""
    for one in (*_writes(bench), *_copies(bench), *_merges()):
        size = one.read + one.written
        runners = [here(one.name, one.call, size), _memcpy(one, size // 2)]
        yield from bench.compare("copying", {"label": f"{size >> 20} MiB"}, runners, over=["memcpy"])


def _memcpy(one: Operation, size: int) -> Runner:
    """Copies `size` bytes from where the operation reads to where it writes, in one run, other ones each time where
    there are more; `made` of them to memory that is new each time, as the operation's result is: a system hands out
    pages at a fraction of the speed at which they are written."""
    sources, targets = (memory.flatten().view(torch.uint8).split(size) for memory in (one.source, one.target))
    sources, targets = ([part for part in parts if len(part) == size] for parts in (sources, targets))

    def call(i: int) -> None:
        source, target = sources[i % len(sources)], targets[i % len(targets)]
        if one.made:
            torch.empty(one.made, dtype=torch.uint8).copy_(source[: one.made])
        target[one.made :].copy_(source[one.made :])

    return here("memcpy", call, 2 * size)


def _writes(bench: Bench) -> Iterable[Operation]:
    heads, dim = BASE.num_kv_heads, BASE.head_dim
    k, v = (torch.randn(TOKENS, heads, dim).to(torch.bfloat16) for _ in range(2))
    q = torch.randn(TOKENS, BASE.num_q_heads, dim).to(torch.bfloat16)
    positions = torch.arange(TOKENS)
    cos, sin = (torch.rand(TOKENS, dim // 2) for _ in range(2))
    kv, rotated = k.nbytes + v.nbytes, q.nbytes
    k_cache, v_cache = bench.pool.caches(BASE, LAYOUT)
    slots = _slots(k_cache)
    rows = torch.zeros(2 * (kv + rotated), dtype=torch.uint8)  # as warm as k, v and q are
    strewn = bench.pool.values_memory
    yield Operation(
        "write_kv", lambda i: pagegen.write_kv(k, v, k_cache, v_cache, slots[i % len(slots)]), kv, kv, rows[:kv], strewn
    )
    yield Operation(
        "rope_write_kv",
        lambda i: pagegen.rope_write_kv(q, k, v, positions, cos, sin, k_cache, v_cache, slots[i % len(slots)]),
        kv + rotated + cos.nbytes + sin.nbytes, kv + rotated, rows, strewn, made=rotated,
    )  # fmt: skip
    k8, v8 = bench.pool.caches(BASE.replace(kv_dtype="float8_e4m3fn", kv_scale_granularity="head"), LAYOUT)
    slots8, scale = _slots(k8), torch.full((heads,), 0.05)

    def quantised(i: int) -> None:
        pagegen.write_kv(k, v, k8, v8, slots8[i % len(slots8)], k_scale=scale, v_scale=scale)

    yield Operation("write_kv e4m3", quantised, kv, kv // 2, rows[:kv], strewn)


def _slots(cache: Tensor) -> list[Tensor]:
    """int64 [TOKENS] each: whole blocks, shuffled over the cache."""
    blocks = torch.randperm(cache.shape[0]).view(-1, TOKENS // BLOCK_SIZE)[:64]
    return list((blocks[:, :, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten(1))


def _copies(bench: Bench) -> Iterable[Operation]:
    k_cache, v_cache = bench.pool.caches(BASE, LAYOUT)
    pairs = torch.randperm(k_cache.shape[0]).view(-1, 64, 2)
    size = 64 * BLOCK_SIZE * BASE.kv_bytes_per_token

    def call(i: int) -> None:
        pagegen.copy_blocks(k_cache, v_cache, pairs[i % len(pairs)])

    yield Operation("copy_blocks", call, size, size, bench.pool.gauge_memory, bench.pool.values_memory)


def _merges() -> Iterable[Operation]:
    sets = torch.randn(4, STATES, ROWS, BASE.num_q_heads, BASE.head_dim)
    lses = torch.randn(STATES, ROWS, BASE.num_q_heads)
    size = sets[0].nbytes
    out = torch.zeros(size, dtype=torch.uint8)  # used again, as memory for a result is
    made = size // STATES
    yield Operation("merge_states", lambda i: pagegen.merge_states(sets[i % 4], lses), size, made, sets, out, made)


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
