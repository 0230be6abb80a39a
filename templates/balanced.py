"""Paged attention in equal shares (stream-K, arXiv 2301.03598): a fixed number of programs divide the key tiles of all
rows among them, so that a batch of long and short sequences keeps every multiprocessor busy to the end.

Layouts are those of attention.py, whose kernel does the work of each share.
"""

import torch
import triton
import triton.language as tl
from attention import find_sequence, key_range, paged_attention_kernel, reduce_kernel
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit(do_not_specialize=["num_seqs", "num_tiles"])
def count_key_tiles_kernel(
    seq_lens_ptr,
    query_start_ptr,
    tile_start_ptr,
    num_seqs,
    num_tiles,
    TILE_QUERIES: tl.constexpr,
    TILE_KV: tl.constexpr,
    DECODE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Sums up the key tiles of the query tiles, in one program. A query tile that exists counts one at least, so that
    somebody writes its rows."""
    total = 0
    tl.store(tile_start_ptr, total)
    for first in range(0, num_tiles, 256):
        tile = first + tl.arange(0, 256)
        exists = tile < num_tiles
        if DECODE:
            first_query = tile * 0
            last_query = tile * 0
            q_len = tile * 0 + 1
            seq_len = tl.load(seq_lens_ptr + tile, mask=exists, other=0)
        else:
            tile = tl.minimum(tile, num_tiles - 1)
            seq = find_sequence(tile, query_start_ptr, num_seqs, TILE_QUERIES=TILE_QUERIES)
            first_token = tl.load(query_start_ptr + seq)
            q_len = tl.load(query_start_ptr + seq + 1) - first_token
            first_query = (tile - first_token // TILE_QUERIES - seq) * TILE_QUERIES
            last_query = tl.minimum(first_query + TILE_QUERIES, q_len) - 1
            seq_len = tl.load(seq_lens_ptr + seq)
            exists = exists & (first_query < q_len)
        begin, end = key_range(
            seq_len=seq_len,
            q_len=q_len,
            first_query=first_query,
            last_query=last_query,
            CAUSAL=CAUSAL,
            WINDOW=WINDOW,
        )
        counts = tl.where(exists, tl.maximum(tl.cdiv(end, TILE_KV) - begin // TILE_KV, 1), 0)
        place = first + tl.arange(0, 256)
        tl.store(tile_start_ptr + place + 1, total + tl.cumsum(counts, 0), mask=place < num_tiles)
        total += tl.sum(counts, 0)


@triton.jit
def find_tile(work, tile_start_ptr, num_tiles, heads):
    """The query tile whose key tiles, of all heads, hold piece `work`."""
    low = 0
    high = num_tiles
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(tile_start_ptr + middle) * heads <= work:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit(do_not_specialize=["num_seqs", "num_tiles", "stride_table_seq", "stride_tree_token", "tree_width"])
def balanced_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_desc,
    k_rest_desc,
    v_desc,
    v_rest_desc,
    block_table_ptr,
    seq_lens_ptr,
    query_start_ptr,
    tile_start_ptr,  # int32 [num_tiles + 1]: key tiles of the query tiles before one
    alibi_slopes_ptr,
    sinks_ptr,
    tree_ptr,
    k_scale_ptr,
    v_scale_ptr,
    k_zero_ptr,
    v_zero_ptr,
    captures,
    out_ptr,
    lse_ptr,
    partial_out_ptr,
    partial_lse_ptr,
    counter_ptr,
    scale,
    num_seqs,
    num_tiles,
    num_kv_heads,
    num_splits,
    stride_q_token,
    stride_q_head,
    stride_k_block,
    stride_k_slot,
    stride_k_head,
    stride_v_block,
    stride_v_slot,
    stride_v_head,
    stride_k_scale_block,
    stride_k_scale_slot,
    stride_k_scale_head,
    stride_v_scale_block,
    stride_v_scale_slot,
    stride_v_scale_head,
    stride_k_zero_block,
    stride_k_zero_slot,
    stride_k_zero_head,
    stride_v_zero_block,
    stride_v_zero_slot,
    stride_v_zero_head,
    stride_table_seq,
    stride_tree_token,
    tree_width,
    stride_out_token,
    stride_out_head,
    HEAD_DIM: tl.constexpr,
    HEAD_MAIN: tl.constexpr,
    HEAD_REST: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    V_MAIN: tl.constexpr,
    V_REST: tl.constexpr,
    V_FROM_K: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    ROW_TILES: tl.constexpr,
    SLOT_ROWS: tl.constexpr,
    TILE_KV: tl.constexpr,
    PAGE_WALK: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    REDUCE_LAST: tl.constexpr,
    BALANCED: tl.constexpr,
    DOT: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    WARP_SPECIALIZE: tl.constexpr,
    STORAGE: tl.constexpr,  # "float"; "convert" for what one instruction converts; "int4", "e4m3", "e5m2" bits
    PACK: tl.constexpr,  # values in a stored element
    SCALES: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    DECODE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_TREE: tl.constexpr,
    HAS_SCORE_MOD: tl.constexpr,
    HAS_MASK_MOD: tl.constexpr,
    MASK_LOW: tl.constexpr,
    MASK_HIGH: tl.constexpr,
    HAS_BEGIN: tl.constexpr,
    NATURAL: tl.constexpr,
    WRITE_LSE: tl.constexpr,
    UPCAST: tl.constexpr,
    WIDE: tl.constexpr,
):
    """A program takes an equal share of the (query tile, head, key tile) triples, in that order. Where its first or
    last row tile has keys in another program's share, it leaves a partial result, in slot 0 or 1."""
    heads = num_kv_heads * ROW_TILES
    total = tl.load(tile_start_ptr + num_tiles) * heads
    share = tl.cdiv(total, tl.num_programs(0))
    work = tl.program_id(0) * share
    end = tl.minimum(work + share, total)
    while work < end:
        tile_index = find_tile(work, tile_start_ptr, num_tiles, heads)
        tile_start = tl.load(tile_start_ptr + tile_index)
        num_key_tiles = tl.load(tile_start_ptr + tile_index + 1) - tile_start
        head_tile = (work - tile_start * heads) // num_key_tiles
        first = (work - tile_start * heads) % num_key_tiles
        last = tl.minimum(num_key_tiles, first + end - work)
        slot = 2 * tl.program_id(0) + tl.where(first == 0, 1, 0)
        paged_attention_kernel(
            q_ptr=q_ptr,
            k_ptr=k_ptr,
            v_ptr=v_ptr,
            k_desc=k_desc,
            k_rest_desc=k_rest_desc,
            v_desc=v_desc,
            v_rest_desc=v_rest_desc,
            block_table_ptr=block_table_ptr,
            seq_lens_ptr=seq_lens_ptr,
            query_start_ptr=query_start_ptr,
            alibi_slopes_ptr=alibi_slopes_ptr,
            sinks_ptr=sinks_ptr,
            tree_ptr=tree_ptr,
            k_scale_ptr=k_scale_ptr,
            v_scale_ptr=v_scale_ptr,
            k_zero_ptr=k_zero_ptr,
            v_zero_ptr=v_zero_ptr,
            captures=captures,
            out_ptr=out_ptr,
            lse_ptr=lse_ptr,
            partial_out_ptr=partial_out_ptr,
            partial_lse_ptr=partial_lse_ptr,
            counter_ptr=counter_ptr,
            unit_tile=tile_index,
            unit_head=head_tile,
            unit_first=first,
            unit_last=last,
            unit_whole=last - first == num_key_tiles,
            unit_slot=slot,
            scale=scale,
            num_seqs=num_seqs,
            num_kv_heads=num_kv_heads,
            num_splits=num_splits,
            stride_q_token=stride_q_token,
            stride_q_head=stride_q_head,
            stride_k_block=stride_k_block,
            stride_k_slot=stride_k_slot,
            stride_k_head=stride_k_head,
            stride_v_block=stride_v_block,
            stride_v_slot=stride_v_slot,
            stride_v_head=stride_v_head,
            stride_k_scale_block=stride_k_scale_block,
            stride_k_scale_slot=stride_k_scale_slot,
            stride_k_scale_head=stride_k_scale_head,
            stride_v_scale_block=stride_v_scale_block,
            stride_v_scale_slot=stride_v_scale_slot,
            stride_v_scale_head=stride_v_scale_head,
            stride_k_zero_block=stride_k_zero_block,
            stride_k_zero_slot=stride_k_zero_slot,
            stride_k_zero_head=stride_k_zero_head,
            stride_v_zero_block=stride_v_zero_block,
            stride_v_zero_slot=stride_v_zero_slot,
            stride_v_zero_head=stride_v_zero_head,
            stride_table_seq=stride_table_seq,
            stride_tree_token=stride_tree_token,
            tree_width=tree_width,
            stride_out_token=stride_out_token,
            stride_out_head=stride_out_head,
            HEAD_DIM=HEAD_DIM,
            HEAD_MAIN=HEAD_MAIN,
            HEAD_REST=HEAD_REST,
            V_HEAD_DIM=V_HEAD_DIM,
            V_MAIN=V_MAIN,
            V_REST=V_REST,
            V_FROM_K=V_FROM_K,
            GROUP=GROUP,
            BLOCK_SIZE=BLOCK_SIZE,
            TILE_ROWS=TILE_ROWS,
            TILE_QUERIES=TILE_QUERIES,
            ROW_TILES=ROW_TILES,
            SLOT_ROWS=SLOT_ROWS,
            TILE_KV=TILE_KV,
            PAGE_WALK=PAGE_WALK,
            SPLITS=SPLITS,
            SPLIT_TOKENS=SPLIT_TOKENS,
            REDUCE_LAST=REDUCE_LAST,
            BALANCED=BALANCED,
            DOT=DOT,
            DESCRIPTORS=DESCRIPTORS,
            WARP_SPECIALIZE=WARP_SPECIALIZE,
            STORAGE=STORAGE,
            PACK=PACK,
            SCALES=SCALES,
            HAS_ZEROS=HAS_ZEROS,
            DECODE=DECODE,
            CAUSAL=CAUSAL,
            WINDOW=WINDOW,
            SOFTCAP=SOFTCAP,
            HAS_ALIBI=HAS_ALIBI,
            HAS_SINKS=HAS_SINKS,
            HAS_TREE=HAS_TREE,
            HAS_SCORE_MOD=HAS_SCORE_MOD,
            HAS_MASK_MOD=HAS_MASK_MOD,
            MASK_LOW=MASK_LOW,
            MASK_HIGH=MASK_HIGH,
            HAS_BEGIN=HAS_BEGIN,
            NATURAL=NATURAL,
            WRITE_LSE=WRITE_LSE,
            UPCAST=UPCAST,
            WIDE=WIDE,
        )
        work += last - first


def launch_balanced(
    q,
    k_cache,
    v_cache,
    block_table,
    seq_lens,
    query_start_loc,
    scale,
    alibi_slopes,
    sinks,
    tree_mask,
    k_scale,
    v_scale,
    k_zero,
    v_zero,
    captures,
    out,
    lse,
    HEAD_DIM: int,
    HEAD_MAIN: int,
    HEAD_REST: int,
    V_HEAD_DIM: int,
    V_MAIN: int,
    V_REST: int,
    V_FROM_K: bool,
    GROUP: int,
    BLOCK_SIZE: int,
    TILE_ROWS: int,
    TILE_QUERIES: int,
    ROW_TILES: int,
    SLOT_ROWS: int,
    TILE_KV: int,
    PAGE_WALK: str,
    SPLITS: bool,
    SPLIT_TOKENS: int,
    REDUCE_LAST: bool,
    BALANCED: bool,
    DOT: str,
    DESCRIPTORS: bool,
    WARP_SPECIALIZE: bool,
    STORAGE: str,
    PACK: int,
    SCALES: str,
    HAS_ZEROS: bool,
    DECODE: bool,
    CAUSAL: bool,
    WINDOW: int,
    SOFTCAP: float,
    HAS_ALIBI: bool,
    HAS_SINKS: bool,
    HAS_TREE: bool,
    HAS_SCORE_MOD: bool,
    HAS_MASK_MOD: bool,
    MASK_LOW: bool,
    MASK_HIGH: bool,
    HAS_BEGIN: bool,
    NATURAL: bool,
    WRITE_LSE: bool,
    UPCAST: bool,
    WIDE: bool,
    V_PADDED: int,
    CHUNK: int,
    PROGRAMS: int,  # that share the work of the balanced schedule
    NUM_WARPS: int,
    NUM_STAGES: int,
):
    """Launches the attention of one batch, as `attention.launch` does, in equal shares."""
    num_seqs = seq_lens.shape[0]
    num_kv_heads = k_cache.shape[2]
    num_tiles = num_seqs if DECODE else q.shape[0] // TILE_QUERIES + num_seqs
    partial_rows = 2 * PROGRAMS * SLOT_ROWS
    partial_out = torch.empty(partial_rows * V_HEAD_DIM, dtype=torch.float32, device=q.device)
    partial_lse = torch.empty(partial_rows, dtype=torch.float32, device=q.device)
    if DESCRIPTORS:
        k_desc = TensorDescriptor.from_tensor(k_cache, [1, TILE_KV, 1, HEAD_MAIN // PACK])
        v_desc = TensorDescriptor.from_tensor(v_cache, [1, TILE_KV, 1, V_MAIN // PACK])
    else:
        k_desc = None
        v_desc = None
    if DESCRIPTORS and HEAD_REST > 0:
        k_rest_desc = TensorDescriptor.from_tensor(k_cache, [1, TILE_KV, 1, HEAD_REST // PACK])
    else:
        k_rest_desc = None
    if DESCRIPTORS and V_REST > 0:
        v_rest_desc = TensorDescriptor.from_tensor(v_cache, [1, TILE_KV, 1, V_REST // PACK])
    else:
        v_rest_desc = None
    tile_start = torch.empty(num_tiles + 1, dtype=torch.int32, device=q.device)
    count_key_tiles_kernel[(1,)](
        seq_lens_ptr=seq_lens,
        query_start_ptr=query_start_loc,
        tile_start_ptr=tile_start,
        num_seqs=num_seqs,
        num_tiles=num_tiles,
        TILE_QUERIES=TILE_QUERIES,
        TILE_KV=TILE_KV,
        DECODE=DECODE,
        CAUSAL=CAUSAL,
        WINDOW=WINDOW,
    )
    balanced_attention_kernel[(PROGRAMS,)](
        q_ptr=q,
        k_ptr=k_cache,
        v_ptr=v_cache,
        k_desc=k_desc,
        k_rest_desc=k_rest_desc,
        v_desc=v_desc,
        v_rest_desc=v_rest_desc,
        block_table_ptr=block_table,
        seq_lens_ptr=seq_lens,
        query_start_ptr=query_start_loc,
        tile_start_ptr=tile_start,
        alibi_slopes_ptr=alibi_slopes,
        sinks_ptr=sinks,
        tree_ptr=tree_mask,
        k_scale_ptr=k_scale,
        v_scale_ptr=v_scale,
        k_zero_ptr=k_zero,
        v_zero_ptr=v_zero,
        captures=captures,
        out_ptr=out,
        lse_ptr=lse,
        partial_out_ptr=partial_out,
        partial_lse_ptr=partial_lse,
        counter_ptr=None,
        scale=scale,
        num_seqs=num_seqs,
        num_tiles=num_tiles,
        num_kv_heads=num_kv_heads,
        num_splits=None,
        stride_q_token=q.stride(0),
        stride_q_head=q.stride(1),
        stride_k_block=k_cache.stride(0),
        stride_k_slot=k_cache.stride(1),
        stride_k_head=k_cache.stride(2),
        stride_v_block=v_cache.stride(0),
        stride_v_slot=v_cache.stride(1),
        stride_v_head=v_cache.stride(2),
        stride_k_scale_block=k_scale.stride(0) if SCALES != "none" else None,
        stride_k_scale_slot=k_scale.stride(1) if SCALES != "none" else None,
        stride_k_scale_head=k_scale.stride(2) if SCALES != "none" else None,
        stride_v_scale_block=v_scale.stride(0) if SCALES != "none" else None,
        stride_v_scale_slot=v_scale.stride(1) if SCALES != "none" else None,
        stride_v_scale_head=v_scale.stride(2) if SCALES != "none" else None,
        stride_k_zero_block=k_zero.stride(0) if HAS_ZEROS else None,
        stride_k_zero_slot=k_zero.stride(1) if HAS_ZEROS else None,
        stride_k_zero_head=k_zero.stride(2) if HAS_ZEROS else None,
        stride_v_zero_block=v_zero.stride(0) if HAS_ZEROS else None,
        stride_v_zero_slot=v_zero.stride(1) if HAS_ZEROS else None,
        stride_v_zero_head=v_zero.stride(2) if HAS_ZEROS else None,
        stride_table_seq=block_table.stride(0),
        stride_tree_token=tree_mask.stride(0) if HAS_TREE else None,
        tree_width=tree_mask.shape[1] if HAS_TREE else None,
        stride_out_token=out.stride(0),
        stride_out_head=out.stride(1),
        HEAD_DIM=HEAD_DIM,
        HEAD_MAIN=HEAD_MAIN,
        HEAD_REST=HEAD_REST,
        V_HEAD_DIM=V_HEAD_DIM,
        V_MAIN=V_MAIN,
        V_REST=V_REST,
        V_FROM_K=V_FROM_K,
        GROUP=GROUP,
        BLOCK_SIZE=BLOCK_SIZE,
        TILE_ROWS=TILE_ROWS,
        TILE_QUERIES=TILE_QUERIES,
        ROW_TILES=ROW_TILES,
        SLOT_ROWS=SLOT_ROWS,
        TILE_KV=TILE_KV,
        PAGE_WALK=PAGE_WALK,
        SPLITS=SPLITS,
        SPLIT_TOKENS=SPLIT_TOKENS,
        REDUCE_LAST=REDUCE_LAST,
        BALANCED=BALANCED,
        DOT=DOT,
        DESCRIPTORS=DESCRIPTORS,
        WARP_SPECIALIZE=WARP_SPECIALIZE,
        STORAGE=STORAGE,
        PACK=PACK,
        SCALES=SCALES,
        HAS_ZEROS=HAS_ZEROS,
        DECODE=DECODE,
        CAUSAL=CAUSAL,
        WINDOW=WINDOW,
        SOFTCAP=SOFTCAP,
        HAS_ALIBI=HAS_ALIBI,
        HAS_SINKS=HAS_SINKS,
        HAS_TREE=HAS_TREE,
        HAS_SCORE_MOD=HAS_SCORE_MOD,
        HAS_MASK_MOD=HAS_MASK_MOD,
        MASK_LOW=MASK_LOW,
        MASK_HIGH=MASK_HIGH,
        HAS_BEGIN=HAS_BEGIN,
        NATURAL=NATURAL,
        WRITE_LSE=WRITE_LSE,
        UPCAST=UPCAST,
        WIDE=WIDE,
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
    )
    reduce_kernel[(num_tiles, num_kv_heads * ROW_TILES, SLOT_ROWS)](
        partial_out_ptr=partial_out,
        partial_lse_ptr=partial_lse,
        sinks_ptr=sinks,
        query_start_ptr=query_start_loc,
        tile_start_ptr=tile_start,
        out_ptr=out,
        lse_ptr=lse,
        num_seqs=num_seqs,
        num_tiles=num_tiles,
        num_kv_heads=num_kv_heads,
        num_splits=None,
        num_programs=PROGRAMS,
        stride_out_token=out.stride(0),
        stride_out_head=out.stride(1),
        V_HEAD_DIM=V_HEAD_DIM,
        V_PADDED=V_PADDED,
        GROUP=GROUP,
        TILE_ROWS=TILE_ROWS,
        TILE_QUERIES=TILE_QUERIES,
        ROW_TILES=ROW_TILES,
        SLOT_ROWS=SLOT_ROWS,
        CHUNK=CHUNK,
        BALANCED=BALANCED,
        DECODE=DECODE,
        HAS_SINKS=HAS_SINKS,
        WRITE_LSE=WRITE_LSE,
        WIDE=WIDE,
    )
