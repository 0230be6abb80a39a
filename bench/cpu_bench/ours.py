"""pagegen's kernels, the walk of the same blocks, and the gauges, as runners."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

import torch
from cpu_peers.cell import Cell
from torch import Tensor

from cpu_bench.samples import Failed, Gauge, Runner, Timed, here
from pagegen.spec import AttentionSpec, CacheLayout, CppVariant
from pagegen.spec.dtypes import INT4, bytes_per_element
from pagegen.targets import cpu, cpu_probes
from pagegen.targets.call import AttentionCall, values_in_keys
from pagegen.targets.errors import CompileError
from pagegen.targets.huge_pages import huge_memory

GAUGE_BYTES = 256 << 20


class Pool:
    """Memory in huge pages that every cache of this process is a view of: K and V, `GAUGE_BYTES` or more each.

    What it holds is tame as numbers of any type: bytes in turn free of 0x88 and one of 3e, 3f, be, bf, which make
    magnitudes of 1/8 to 2 in bfloat16 and float32, and no NaN in any.
    """

    def __init__(self) -> None:
        self._memory: list[Tensor] = []
        self.grow(GAUGE_BYTES)

    def grow(self, size: int) -> None:
        """Makes both parts at least `size` bytes."""
        if self._memory and self._memory[0].nbytes >= size:
            return
        self._memory = []  # before there are new ones
        self._memory = [huge_memory(max(size, GAUGE_BYTES)) for _ in range(2)]
        piece = torch.randint(256, (16 << 20,), dtype=torch.uint8) & 0x77
        piece[1::2] = (piece[1::2] & 1) | ((piece[1::2] & 2) << 6) | 0x3E
        for memory in self._memory:
            for start in range(0, memory.nbytes, piece.nbytes):
                memory[start : start + piece.nbytes] = piece[: memory.nbytes - start]

    def shrink(self) -> None:
        """Gives back what a large cell needed."""
        if self._memory[0].nbytes > GAUGE_BYTES:
            self._memory = []
            self.grow(GAUGE_BYTES)

    @property
    def gauge_memory(self) -> Tensor:
        return self._memory[0][:GAUGE_BYTES]

    @property
    def values_memory(self) -> Tensor:
        return self._memory[1][:GAUGE_BYTES]

    def caches(self, spec: AttentionSpec, layout: CacheLayout) -> tuple[Tensor, Tensor]:
        """All of the memory as K and V caches [num_blocks, block_size, Hkv, D]; a shared cache has K alone."""
        dtype = torch.uint8 if spec.kv_dtype == INT4 else spec.kv_dtype
        packed = 2 if spec.kv_dtype == INT4 else 1
        k = layout.view(self._memory[0].view(dtype), spec.num_kv_heads, spec.head_dim // packed)
        if spec.shared_kv:
            return k, values_in_keys(k, spec)
        return k, layout.view(self._memory[1].view(dtype), spec.num_kv_heads, spec.v_head_dim // packed)


@dataclass
class Batches:
    """Batches of the same lengths in blocks of their own, all over a pool."""

    spec: AttentionSpec
    layout: CacheLayout
    lens: Tensor
    k: Tensor
    v: Tensor
    tables: list[Tensor]

    @property
    def kv_bytes(self) -> int:
        """Bytes of K, V and their scales that one batch reads."""
        return int(self.lens.sum()) * self.spec.kv_bytes_per_token


def pool_bytes(spec: AttentionSpec, tokens: int) -> int:
    """Bytes of one of K and V that `tokens` tokens take."""
    return int(tokens * spec.num_kv_heads * max(spec.head_dim, spec.v_head_dim) * bytes_per_element(spec.kv_dtype))


def batches(pool: Pool, spec: AttentionSpec, layout: CacheLayout, lens: list[int]) -> Batches:
    """As many batches as the pool holds blocks for, their blocks shuffled over all of it."""
    blocks = [layout.blocks_for(n) for n in lens]
    pool.grow(pool_bytes(spec, sum(blocks) * layout.block_size))
    k, v = pool.caches(spec, layout)
    ids = torch.randperm(k.shape[0]).to(torch.int32)
    tables, at = [], 0
    for _ in range(min(512, len(ids) // sum(blocks))):
        table = torch.zeros(len(lens), max(blocks), dtype=torch.int32)
        for row, n in zip(table, blocks, strict=True):
            row[:n] = ids[at : at + n]
            at += n
        tables.append(table)
    return Batches(spec, layout, torch.tensor(lens, dtype=torch.int32), k, v, tables)


def kernel(found: Batches, new: int = 1, name: str = "", variant: CppVariant | None = None) -> Runner:
    """pagegen's kernel on those batches, the last `new` tokens of every sequence as queries; the default variant unless
    one is given."""
    spec, layout = found.spec, found.layout
    chosen = variant or cpu.default_variant(spec, layout, decode=new == 1)
    title = name or f"pagegen {layout.order}"
    work = found.kv_bytes if new == 1 else flops(spec, found.lens.tolist(), new)
    try:
        attend = cpu.load_attention(spec, layout, chosen)
    except CompileError as error:  # a row like any other: the others are still worth measuring
        return Runner(title, _never, work, failure=f"does not compile: {error.detail}", note=chosen.name)
    count = len(found.lens)
    q = torch.randn(count * new, spec.num_q_heads, spec.head_dim).to(spec.q_dtype)
    starts = None if new == 1 else torch.arange(count + 1, dtype=torch.int32) * new
    k_scale, v_scale = _scales(spec, found), _scales(spec, found)
    out = torch.zeros(count * new, spec.num_q_heads, spec.v_head_dim, dtype=spec.q_dtype)
    longest = int(found.lens.max())
    calls = [
        AttentionCall(
            q=q, k_cache=found.k, v_cache=found.v, block_table=t, seq_lens=found.lens, query_start_loc=starts,
            max_query_len=new, max_seq_len=longest, scale=spec.scale, alibi_slopes=None, sinks=None, out=out, lse=None,
            k_scale=k_scale, v_scale=v_scale,
        )
        for t in found.tables
    ]  # fmt: skip
    return here(title, lambda i: attend(calls[i % len(calls)]), work, chosen.name)


def _never(first: int, calls: int) -> Timed:
    raise Failed("never prepared: it does not run")


def _scales(spec: AttentionSpec, found: Batches) -> Tensor | None:
    """[num_blocks, block_size, Hkv], of one number a head or of one a token and head."""
    if spec.kv_scale_granularity == "none":
        return None
    shape = found.k.shape[:3]
    if spec.kv_scale_granularity == "token_head":
        # in huge pages, as the cache: one number is read for every row of it
        memory = huge_memory(4 * math.prod(shape)).view(torch.float32)
        return memory.fill_(0.01).view(shape)
    return torch.full((shape[2],), 0.01).expand(shape)


def flops(spec: AttentionSpec, lens: list[int], new: int) -> int:
    """Two a multiply-add, of the (query, key) pairs that causality leaves."""
    pairs = sum(new * (n - new) + new * (new + 1) // 2 for n in lens)
    return 2 * spec.num_q_heads * (spec.head_dim + spec.v_head_dim) * pairs


def spec_of(cell: Cell) -> AttentionSpec:
    return AttentionSpec(
        num_q_heads=cell.num_q_heads, num_kv_heads=cell.num_kv_heads, head_dim=cell.head_dim, q_dtype=cell.torch_dtype
    )


def work_of(cell: Cell) -> int:
    """What bounds one call: bytes of K and V in decode, floating-point operations with longer queries."""
    return cell.kv_bytes if cell.new == 1 else flops(spec_of(cell), [cell.context] * cell.batch, cell.new)


# Ways to walk that were best somewhere, as (tile, streams, ahead, heads in turn): which is, depends on the length of
# runs and on the number of threads.
HND = ((64, 4, 1, 1), (64, 1, 1, 1), (128, 8, 1, 1), (256, 8, 1, 1), (64, 4, 4, 8), (256, 8, 1, 8))
NHD = ((64, 1, 1, 1), (64, 1, 4, 8), (64, 4, 4, 8), (256, 8, 1, 8), (256, 16, 1, 8))
BY_TOKEN = ((64, 1, 1, 1), (64, 4, 1, 1), (64, 8, 1, 1), (128, 8, 1, 1), (256, 8, 1, 1), (128, 8, 0, 1), (256, 8, 0, 1))


def walk(found: Batches, name: str = "", *, tokens: bool = False) -> Runner:
    """Loads alone, of the same blocks through the same tables: the fastest way here and now. Heads come one after
    another within a tile; with `tokens` (NHD) the heads of a token do, as they lie, in every stream."""
    k, v, lens, together = found.k, found.v, found.lens, 1
    if tokens:
        together = k.shape[2]  # rows of as many heads count as so many tokens of one
        k, v, lens = k.flatten(1, 2).unsqueeze(2), v.flatten(1, 2).unsqueeze(2), lens * together
    threads = torch.get_num_threads()
    ways = BY_TOKEN if tokens else NHD if found.layout.order == "NHD" else HND
    title = name or f"walk {found.layout.order}" + (" tokens" if tokens else "")

    def runner(tile: int, streams: int, ahead: int, heads: int) -> Runner:
        way = cpu_probes.Walk(tile=tile * together, streams=streams, ahead=ahead, heads=heads, split=2048 * together)
        items = k.shape[2] // heads
        while way.split > 256 * together and sum(-(-n // way.split) for n in lens.tolist()) * items < 4 * threads:
            way = replace(way, split=way.split // 2)  # every thread needs several
        values = None if found.spec.shared_kv else v
        packed = [way.arguments(k, values, t, lens, threads) for t in found.tables]
        call = here(title, lambda i: cpu_probes.walk(packed[i % len(packed)]), found.kv_bytes, f"{way}")
        call.owners = (k, v, lens)
        call.warm_up()
        return call

    # by CPU time, which others' turns do not lengthen; the items are many, so that threads share them evenly
    runners = [runner(*way) for way in ways]
    spent = [math.inf] * len(runners)
    for _ in range(5):
        spent = [min(best, each.sample()[1] / each.calls) for best, each in zip(spent, runners, strict=True)]
    return runners[spent.index(min(spent))]


def with_walks(found: Batches) -> list[Runner]:
    """The decode kernel and every walk of its cache order."""
    tokens = [walk(found, tokens=True)] if found.layout.order == "NHD" else []
    return [kernel(found), walk(found), *tokens]


def read_alike(pool: Pool, found: Batches) -> list[Runner]:
    """Sequential reading of as many bytes as one batch of `found`, other ones each time: what starting threads leaves
    of the bandwidth where there is little to read. None where READ itself reads no more."""
    size = found.kv_bytes
    if size > GAUGE_BYTES // 2:
        return []
    parts = pool.gauge_memory.split(size)[: GAUGE_BYTES // size]
    return [here("read", lambda i: cpu_probes.read(parts[i % len(parts)], torch.get_num_threads()), size)]


def read_gauge(pool: Pool) -> Gauge:
    """Sequential reading of the pool's memory on torch's threads."""

    def timed(threads: int) -> Timed:
        start, cpu_start = time.perf_counter(), time.process_time()
        cpu_probes.read(pool.gauge_memory, threads)
        return time.perf_counter() - start, time.process_time() - cpu_start

    one = max(GAUGE_BYTES / timed(1)[1] / 1e9 for _ in range(5))
    return Gauge(lambda: timed(torch.get_num_threads()), GAUGE_BYTES, one)


def peak_gauge(kind: str) -> Gauge:
    """Multiply-adds of one of `cpu_probes.PEAKS` on torch's threads, about 10 ms of them."""
    library, code = cpu_probes.library(), cpu_probes.PEAKS.index(kind)
    turns = 1 << 17
    flops_of_one = library.pagegen_peak_flops(code) * turns

    def timed(threads: int) -> Timed:
        start, cpu_start = time.perf_counter(), time.process_time()
        library.pagegen_peak(code, turns, threads)
        return time.perf_counter() - start, time.process_time() - cpu_start

    one = max(flops_of_one / timed(1)[1] / 1e9 for _ in range(3))
    return Gauge(lambda: timed(torch.get_num_threads()), flops_of_one * torch.get_num_threads(), one)


def byte_products(spec: AttentionSpec, tokens: int) -> int:
    """Operations that decode by products of bytes needs: two a multiply-add, and two planes a query's element or a
    weight (templates/bytes.hpp)."""
    return 4 * tokens * spec.num_q_heads * (spec.head_dim + spec.v_head_dim)


def peak_kind(dtype: str) -> str:
    """Which peak bounds a kernel of this dtype: pairs of bf16 where the CPU multiplies those and queries are such."""
    pairs = dtype == "bfloat16" and cpu_probes.library().pagegen_peak_flops(cpu_probes.PEAKS.index("bfloat16")) > 0
    return "bfloat16" if pairs else "float32"
