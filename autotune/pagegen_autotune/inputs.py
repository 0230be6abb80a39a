"""Operands: a small hard batch to check a kernel on, and real batches over a big pool to time it on."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pagegen.modifiers import captured_tensors
from pagegen.reference import reference_attention
from pagegen.spec import AttentionSpec, CacheLayout, Device, Profile, Workload
from pagegen.targets.call import AttentionCall, values_in_keys
from pagegen.targets.huge_pages import huge_memory
from pagegen_autotune import stored

GIB = 1 << 30
# Four times the last-level cache: a block comes round again long after it was evicted.
POOL_CACHE_FACTOR = 4
# What a device that does not tell its last-level cache is taken to have: more than most CPUs' share of one socket.
UNKNOWN_CACHE_MIB = 64.0
POOL_LIMIT_BYTES = GIB
TABLES_LIMIT_BYTES = 64 << 20
MAX_TABLES = 1024
# Longer than two of the largest splits, so that three partial states are merged; the float64 copy stays below 1 GiB.
LONG_CONTEXT = 2 * 8192 + 37
REFERENCE_LIMIT_BYTES = GIB
# Scores with a spread of 3 leave a few keys most of the weight: outputs stay near 1, where an error shows. At a spread
# of 1 a long context averages its values to nothing, and any tolerance passes.
QUERY_SPREAD = 3.0
GARBAGE_BLOCK = 2**31 - 1
# 0.2 ms at 20 GB/s: short beside a sample, long beside the start of a few threads.
GAUGE_BYTES = 4 << 20


def block_table(workload: Workload, layout: CacheLayout, blocks: Tensor) -> Tensor:
    """int32 [num_seqs, max_blocks] that hands `blocks` out to the sequences in order; unused entries are garbage."""
    counts = torch.tensor([layout.blocks_for(n) for n in workload.context_lens])
    table = torch.full((len(counts), max(1, int(counts.max()))), GARBAGE_BLOCK, dtype=torch.int32)
    used = torch.arange(table.shape[1])[None, :] < counts[:, None]
    table[used] = blocks[: int(counts.sum())].to(torch.int32)
    return table


def query_starts(workload: Workload) -> Tensor | None:
    """int32 [num_seqs + 1], or None for decode (one query a sequence)."""
    if set(workload.query_lens) == {1}:
        return None
    return torch.tensor([0, *workload.query_lens]).cumsum(0).to(torch.int32)


def extras(spec: AttentionSpec, generator: torch.Generator) -> tuple[Tensor | None, Tensor | None]:
    """(alibi_slopes, sinks), float32 [Hq] each, or None where the spec has none."""
    heads = spec.num_q_heads
    # the geometric slopes of the ALiBi paper (arXiv 2108.12409): 2^(-8/H), 2^(-16/H), ...
    slopes = 2.0 ** (-8.0 * torch.arange(1, heads + 1) / heads) if spec.alibi else None
    return slopes, torch.randn(heads, generator=generator) if spec.sinks else None


def _call(
    spec: AttentionSpec, workload: Workload, q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor,
    slopes: Tensor | None, sinks: Tensor | None, factors: dict[str, Tensor],
) -> AttentionCall:  # fmt: skip
    device = q.device
    starts = query_starts(workload)
    return AttentionCall(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        block_table=table.to(device),
        seq_lens=torch.tensor(workload.context_lens, dtype=torch.int32, device=device),
        query_start_loc=None if starts is None else starts.to(device),
        max_query_len=workload.max_query_len,
        max_seq_len=workload.max_context_len,
        scale=spec.scale,
        alibi_slopes=None if slopes is None else slopes.to(device),
        sinks=None if sinks is None else sinks.to(device),
        out=torch.zeros(*q.shape[:2], spec.v_head_dim, dtype=q.dtype, device=device),
        lse=None,
        captures=tuple(tensor.to(device) for tensor in captured_tensors(spec.score_mod, spec.mask_mod)),
        **{name: tensor.to(device) for name, tensor in factors.items()},
    )


@dataclass(frozen=True)
class CheckBatch:
    """A call and its float64 answer: `expected` [total_q, Hq, Dv] and `expected_lse` [total_q, Hq], both float32."""

    call: AttentionCall
    expected: Tensor
    expected_lse: Tensor
    _untouched: dict[str, Tensor] = field(init=False, repr=False)  # the memory of what a kernel may only read

    def __post_init__(self) -> None:
        object.__setattr__(self, "_untouched", {name: bytes_.clone() for name, bytes_ in self._operands().items()})

    def put_back(self) -> tuple[str, ...]:
        """The operands that were written since the batch was made, which hold again what they held: the next candidate
        is checked on the same batch."""
        written = []
        for name, now in self._operands().items():
            if not torch.equal(now, self._untouched[name]):
                now.copy_(self._untouched[name])
                written.append(name)
        return tuple(written)

    def _operands(self) -> dict[str, Tensor]:
        """All bytes of the memory behind each operand: strides of 0, gaps and NaN are no matter then."""
        given = {name: getattr(self.call, name) for name in AttentionCall.__slots__ if name not in ("out", "lse")}
        given |= {f"captures[{i}]": tensor for i, tensor in enumerate(self.call.captures)}
        tensors = {name: tensor for name, tensor in given.items() if isinstance(tensor, Tensor)}
        memory = {tensor.untyped_storage().data_ptr(): name for name, tensor in reversed(tensors.items())}
        return {
            name: torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
            for name, tensor in tensors.items()
            if memory[tensor.untyped_storage().data_ptr()] == name  # v_cache may be columns of k_cache
        }


def check_workloads(spec: AttentionSpec, layout: CacheLayout) -> tuple[Workload, Workload]:
    """A ragged decode batch (an empty sequence and one that splits included) and a mixed one: whole prompts, chunks
    that end off every boundary, decode rows between them."""
    block = layout.block_size
    row = spec.num_kv_heads * (spec.head_dim + spec.v_head_dim) * 8
    long = max(4 * block + 1, min(LONG_CONTEXT, REFERENCE_LIMIT_BYTES // row))
    decode = Workload(context_lens=(700, 0, 1, block, block + 1, long, 2 * block - 1, 137))
    mixed = Workload(context_lens=(1, 40, 300, block + 3, 77, 131), query_lens=(1, 40, 33, 2, 1, 131))
    return decode, mixed


def check_batch(spec: AttentionSpec, layout: CacheLayout, workload: Workload, device: str, seed: int) -> CheckBatch:
    """`workload` with random operands: blocks in random places of a pool twice as large, NaN in every slot that holds
    no token of a sequence (where integers are stored, in its scale and zero point), garbage in every unused block-table
    entry."""
    generator = torch.Generator().manual_seed(seed)
    counts = [layout.blocks_for(n) for n in workload.context_lens]
    num_blocks = 2 * sum(counts) + 1
    slots = num_blocks * layout.block_size * spec.num_kv_heads
    table = block_table(workload, layout, torch.randperm(num_blocks, generator=generator))
    used = torch.zeros(num_blocks, layout.block_size, dtype=torch.bool)
    for s, length in enumerate(workload.context_lens):
        places = torch.arange(length)
        used[table[s, places // layout.block_size].long(), places % layout.block_size] = True

    def poisoned(width: int) -> Tensor:
        values = torch.randn(num_blocks, layout.block_size, spec.num_kv_heads, width, generator=generator)
        held = stored.stored(spec, values.masked_fill_(~used[:, :, None, None], math.nan))
        cache = layout.view(torch.empty(slots * held.shape[-1], dtype=held.dtype), spec.num_kv_heads, held.shape[-1])
        return cache.copy_(held)

    k_cache = poisoned(spec.head_dim)
    v_cache = values_in_keys(k_cache, spec) if spec.shared_kv else poisoned(spec.v_head_dim)
    factors = stored.factors(spec, num_blocks, layout, generator, used=used)
    q = torch.randn(workload.total_q, spec.num_q_heads, spec.head_dim, generator=generator)
    # scores scale * q.k of unit normals spread by scale * sqrt(D)
    q = (q * QUERY_SPREAD / (spec.scale * math.sqrt(spec.head_dim))).to(spec.q_dtype)
    slopes, sinks = extras(spec, generator)
    call = _call(spec, workload, q, k_cache, v_cache, table, slopes, sinks, factors)
    expected, expected_lse = _answer(spec, call)
    moved = _call(spec, workload, q.to(device), k_cache.to(device), v_cache.to(device), table, slopes, sinks, factors)
    return CheckBatch(moved, expected, expected_lse)


def _answer(spec: AttentionSpec, call: AttentionCall) -> tuple[Tensor, Tensor]:
    options: dict[str, Any] = {
        "query_start_loc": call.query_start_loc, "scale": spec.scale, "causal": spec.causal, "window": spec.window,
        "logit_softcap": spec.logit_softcap, "alibi_slopes": call.alibi_slopes, "sinks": call.sinks,
        "score_mod": spec.score_mod, "mask_mod": spec.mask_mod, "captures": list(call.captures), "return_lse": True,
        "kv_dtype": spec.kv_dtype, "k_scale": call.k_scale, "k_zero": call.k_zero,
    }  # fmt: skip
    if spec.shared_kv:
        options["v_head_dim"] = spec.v_head_dim
    else:
        options |= {"v_scale": call.v_scale, "v_zero": call.v_zero}
    v_cache = None if spec.shared_kv else call.v_cache
    # in float32, since the answer is compared, not stored: rounding it would hide half of the kernel's own error
    result = reference_attention(call.q.float(), call.k_cache, v_cache, call.block_table, call.seq_lens, **options)
    assert isinstance(result, tuple)
    return result


class Pool:
    """A KV pool of random numbers much larger than the last-level cache, viewed in any layout, and calls over it.

    A workload larger than the pool walks round it more than once: every block is read long after the cache dropped it,
    so the traffic to memory is that of a pool which holds them all.
    """

    def __init__(self, spec: AttentionSpec, profile: Profile, device: Device, *, on: str, seed: int) -> None:
        self.spec = spec
        self.on = on
        self._generator = torch.Generator().manual_seed(seed)
        cache_bytes = int((device.last_level_cache_mib or UNKNOWN_CACHE_MIB) * (1 << 20))
        largest = max(w.total_context for w in profile.workloads) * spec.kv_bytes_per_token
        self.bytes = min(max(POOL_CACHE_FACTOR * cache_bytes, largest), POOL_LIMIT_BYTES)
        # a cache too large for the pool to overflow keeps part of it from call to call
        self.regime = "cold" if self.bytes >= 2 * cache_bytes else "warm"
        self.tokens = max(1, self.bytes // spec.kv_bytes_per_token)
        self._gauged = 0
        self._keys = self._fill(spec.head_dim)
        self._values = None if spec.shared_kv else self._fill(spec.v_head_dim)

    def calls(self, layout: CacheLayout, workload: Workload) -> list[AttentionCall]:
        """Calls that differ in the blocks they read, in the order to use them: together they walk the whole pool."""
        spec = self.spec
        k_cache = layout.view(self._keys, spec.num_kv_heads, stored.columns(spec, spec.head_dim))
        if self._values is None:
            v_cache = values_in_keys(k_cache, spec)
        else:
            v_cache = layout.view(self._values, spec.num_kv_heads, stored.columns(spec, spec.v_head_dim))
        num_blocks = k_cache.shape[0]
        if num_blocks == 0:
            raise MemoryError(f"a pool of {self.bytes} bytes does not hold one block of {layout.block_size} tokens")
        needed = max(1, sum(layout.blocks_for(n) for n in workload.context_lens))
        table_bytes = 4 * workload.num_seqs * max(1, layout.blocks_for(workload.max_context_len))
        count = max(1, min(-(-num_blocks // needed), MAX_TABLES, TABLES_LIMIT_BYTES // table_bytes))
        places = torch.randperm(num_blocks, generator=self._generator)
        q = torch.randn(workload.total_q, spec.num_q_heads, spec.head_dim, generator=self._generator)
        slopes, sinks = extras(spec, self._generator)
        first = _call(
            spec, workload, q.to(self.on, spec.q_dtype), k_cache, v_cache,
            block_table(workload, layout, places[torch.arange(needed) % num_blocks]), slopes, sinks,
            stored.factors(spec, num_blocks, layout, self._generator),
        )  # fmt: skip
        return [first, *(self._elsewhere(first, workload, layout, places, i * needed) for i in range(1, count))]

    def read_gb_s(self) -> float:
        """The rate of reading the next GAUGE_BYTES of the keys front to back on all threads."""
        from pagegen.targets import cpu_probes

        memory = self._keys.view(torch.uint8)
        size = min(GAUGE_BYTES, memory.numel() // 64 * 64)
        if self._gauged + size > memory.numel():
            self._gauged = 0
        part = memory[self._gauged : self._gauged + size]
        self._gauged += size
        start = time.perf_counter_ns()
        cpu_probes.read(part)
        return size / max(1, time.perf_counter_ns() - start)

    def _elsewhere(
        self, call: AttentionCall, workload: Workload, layout: CacheLayout, places: Tensor, start: int
    ) -> AttentionCall:
        """`call` over the blocks that follow `start` on the walk; everything else is shared."""
        needed = max(1, sum(layout.blocks_for(n) for n in workload.context_lens))
        blocks = places[(start + torch.arange(needed)) % len(places)]
        operands = {name: getattr(call, name) for name in AttentionCall.__slots__}
        operands["block_table"] = block_table(workload, layout, blocks).to(self.on)
        return AttentionCall(**operands)

    def _fill(self, width: int) -> Tensor:
        """Flat random storage for all tokens. One million numbers repeat: the values change no time, and
        drawing up to half a billion would take seconds."""
        size = self.tokens * self.spec.num_kv_heads * stored.columns(self.spec, width)
        piece = stored.stored(self.spec, torch.randn(1 << 20, generator=self._generator))[:size]
        if self.on != "cpu":
            return piece.repeat(-(-size // piece.numel()))[:size].to(self.on)
        storage = huge_memory(size * piece.element_size()).view(piece.dtype)  # as a PagedKVCache's are
        for part in storage.split(piece.numel()):
            part.copy_(piece[: len(part)])
        return storage
