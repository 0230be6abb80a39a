"""How long the work around the attention kernel takes: rotation, writing, gathering, dense attention, merging.

All of it is passes over memory in a number of launches. Bytes that stay in a cache between two launches are counted
as if they did not: what is compared here differs by launches or by whole copies of the cache.
"""

from __future__ import annotations

from dataclasses import replace

from pagegen.costs.cpu import CPU_CALL_US
from pagegen.costs.gpu import LAUNCH_US
from pagegen.costs.model import flops, kv_bytes
from pagegen.costs.rates import CACHE_GAIN, MATRIX_EFFICIENCY, MEMORY_EFFICIENCY, bytes_per_us, flops_per_us
from pagegen.spec import AttentionSpec, CacheLayout, Device, Workload
from pagegen.spec.shared_prefix import PrefixGroups

# torch.compile makes one kernel of the rotation of q and one of k's.
ROTATE_LAUNCHES = 2
# Gathering indexes K and V once each.
GATHER_LAUNCHES = 2
# A boolean mask from positions and lengths (three element-wise kernels), and SDPA.
DENSE_LAUNCHES = 4
# What `pagegen.reference_attention` launches a sequence: two gathers, two casts, two products, the mask, the softmax.
REFERENCE_LAUNCHES = 40
# Passes over the float32 scores in it: written, scaled, masked (read and written each), exponentiated, multiplied.
REFERENCE_SCORE_PASSES = 10
# Merging the two states of a cascade, see `pagegen.ops.cascade`: eight element-wise kernels and two copies.
MERGE_LAUNCHES = 10
# Bytes an element of a 16-bit result moves there: both states to float32 (12), mixed (12), rounded and copied (6).
MERGE_ELEMENT_BYTES = 30
# A torch operator on the CPU: dispatch, allocation and a loop over few elements.
CPU_LAUNCH_US = 4.0


def _pass_us(device: Device, num_bytes: float, launches: int, *, own_kernel: bool = False) -> float:
    """`num_bytes` moved in `launches` launches, of torch's or of our own kernels."""
    on_cpu = CPU_CALL_US if own_kernel else CPU_LAUNCH_US
    launch_us = LAUNCH_US if device.target.is_gpu else on_cpu
    return launches * launch_us + num_bytes / (MEMORY_EFFICIENCY * bytes_per_us(device))


def _projected_bytes(spec: AttentionSpec, workload: Workload) -> tuple[int, int, int]:
    """Bytes of this step's q and k, of its k and v, and of what they take in the cache."""
    element, tokens = spec.q_dtype.itemsize, workload.total_q
    columns = spec.head_dim + (0 if spec.shared_kv else spec.v_head_dim)
    turned = tokens * (spec.num_q_heads + spec.num_kv_heads) * spec.head_dim * element
    return turned, tokens * spec.num_kv_heads * columns * element, tokens * spec.kv_bytes_per_token


def rotate_us(spec: AttentionSpec, device: Device, workload: Workload) -> float:
    """Rotating this step's queries and keys: read and written, once each."""
    turned, _, _ = _projected_bytes(spec, workload)
    return _pass_us(device, 2 * turned, ROTATE_LAUNCHES)


def write_us(spec: AttentionSpec, device: Device, workload: Workload) -> float:
    """Writing this step's keys and values into the cache: read once, stored once."""
    _, kv, cached = _projected_bytes(spec, workload)
    return _pass_us(device, kv + cached, 1, own_kernel=True)


def rotate_write_us(spec: AttentionSpec, device: Device, workload: Workload) -> float:
    """Both in one pass: q and k and v read once, q and the cache written once."""
    turned, kv, cached = _projected_bytes(spec, workload)
    queries = turned * spec.num_q_heads // (spec.num_q_heads + spec.num_kv_heads)
    return _pass_us(device, 2 * queries + kv + cached, 1, own_kernel=True)


def _padded(workload: Workload) -> Workload:
    """Every sequence as long as the longest, with as many queries: what a dense batch computes."""
    count = workload.num_seqs
    return Workload(
        context_lens=(max(workload.max_context_len, workload.max_query_len),) * count,
        query_lens=(workload.max_query_len,) * count,
    )


def gather_us(spec: AttentionSpec, device: Device, workload: Workload) -> float:
    """Copying every sequence's whole context out of its blocks, padded to the longest."""
    dense = _padded(workload)
    stored = spec.kv_bytes_per_token
    return _pass_us(device, stored * (workload.total_context + dense.total_context), GATHER_LAUNCHES)


def dense_us(spec: AttentionSpec, layout: CacheLayout, device: Device, workload: Workload) -> float:
    """torch's SDPA over the padded copy, with a mask."""
    dense, whole = _padded(workload), spec.replace(window=None, causal=False)
    read = spec.kv_bytes_per_token * dense.total_context + 4 * _query_bytes(spec, dense)
    computing = flops(whole, layout, dense) / (flops_per_us(spec, device) * MATRIX_EFFICIENCY)
    return max(_pass_us(device, read, DENSE_LAUNCHES), DENSE_LAUNCHES * _pass_us(device, 0, 1) + computing)


def reference_us(spec: AttentionSpec, layout: CacheLayout, device: Device, workload: Workload) -> float:
    """`pagegen.reference_attention` in float32, sequence by sequence: K and V gathered, cast and read again, and all
    scores written out."""
    whole = spec.replace(window=None, causal=False)
    columns = spec.num_kv_heads * (spec.head_dim + spec.v_head_dim)
    keys = workload.total_context * (3 * spec.kv_bytes_per_token + 4 * 4 * columns)
    scores = sum(n * m for n, m in zip(workload.context_lens, workload.query_lens, strict=True)) * spec.num_q_heads
    # CUDA cores and not matrix units: float32 products are not rounded to TF32
    computing = flops(whole, layout, workload) / (flops_per_us(spec, device) * MATRIX_EFFICIENCY / 8)
    moving = _pass_us(device, keys + 4 * REFERENCE_SCORE_PASSES * scores, REFERENCE_LAUNCHES * workload.num_seqs)
    return moving + computing


def _query_bytes(spec: AttentionSpec, workload: Workload) -> int:
    return workload.total_q * spec.num_q_heads * max(spec.head_dim, spec.v_head_dim) * spec.q_dtype.itemsize


def prefix_workloads(layout: CacheLayout, workload: Workload, groups: PrefixGroups) -> tuple[Workload, Workload]:
    """The two passes of a cascade over `groups` of (num_shared_blocks, rows): all queries of a group over its prefix,
    in parts of no more queries than keys, and every sequence over the tokens of its own.

    Raises ValueError where a group shares more than stands before the queries of one of its rows, or names none."""
    own = list(workload.context_lens)
    contexts: list[int] = []
    queries: list[int] = []
    for blocks, rows in groups:
        shared = blocks * layout.block_size
        for row in rows:
            if not 0 <= row < workload.num_seqs or own[row] != workload.context_lens[row]:
                raise ValueError(f"prefix_groups must name rows in 0..{workload.num_seqs - 1}, each once, got {row}")
            if not 0 < shared <= own[row] - workload.query_lens[row]:
                raise ValueError(
                    f"prefix_groups must share tokens before every query of row {row} "
                    f"({own[row] - workload.query_lens[row]}), got {blocks} blocks of {layout.block_size}"
                )
            own[row] -= shared
        count = sum(workload.query_lens[row] for row in rows)
        parts = -(-count // shared)
        contexts += [shared] * parts
        queries += [count // parts + (i < count % parts) for i in range(parts)]
    if not contexts:
        raise ValueError("prefix_groups must hold at least one group with queries, got none")
    prefix = Workload(context_lens=tuple(contexts), query_lens=tuple(queries))
    return prefix, Workload(context_lens=tuple(own), query_lens=workload.query_lens)


def with_reuse(
    spec: AttentionSpec, layout: CacheLayout, device: Device, workload: Workload, groups: PrefixGroups
) -> Device:
    """The device as attention that reads a shared prefix once a sequence finds it: where the last-level cache holds the
    prefixes, all but the first reading of them comes from there, as from a memory with more bandwidth."""
    token = spec.kv_bytes_per_token
    prefixes = [(blocks * layout.block_size * token, len(rows)) for blocks, rows in groups]
    total = kv_bytes(spec, layout, workload)
    if not total or sum(size for size, _ in prefixes) > device.last_level_cache_mib * 2**20:
        return device
    repeated = min(sum(size * (count - 1) for size, count in prefixes), total)
    seen = total - repeated + repeated / CACHE_GAIN
    return replace(device, bandwidth_gb_s=device.bandwidth_gb_s * total / seen)


def merge_us(spec: AttentionSpec, device: Device, num_rows: int) -> float:
    """Merging two states of `num_rows` queries."""
    elements = num_rows * spec.num_q_heads * (spec.v_head_dim + 1)
    return _pass_us(device, elements * MERGE_ELEMENT_BYTES, MERGE_LAUNCHES)
