"""Paged attention over a block table: decode, prefill and mixed batches, one pass or split.

Shapes; strides are in elements, every last stride is 1:
    q, out            [total_q, num_q_heads, HEAD_DIM | V_HEAD_DIM]
    k_cache, v_cache  [num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_DIM | V_HEAD_DIM]
    block_table       int32 [num_seqs, max_blocks]: only entries below ceil(seq_len / BLOCK_SIZE) are read
    seq_lens          int32 [num_seqs]: cached tokens, this step's included

A program owns the rows of one query tile and one KV head: row r is query r // GROUP of the tile and head
r % GROUP of the group, so that a key is read once for all the heads that share it. Scores are in base 2; the
softmax state and the accumulator are float32.
"""

import torch
import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def find_sequence(
    tile,
    query_start_ptr,
    num_seqs,
    TILE_QUERIES: tl.constexpr,
):
    """The sequence that query tile `tile` belongs to. Sequence s owns the tiles from query_start[s] // TILE_QUERIES
    + s on: at least as many as it needs, so that no list of tiles has to be built."""
    low = 0
    high = num_seqs
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_start_ptr + middle) // TILE_QUERIES + middle <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit(do_not_specialize=["num_seqs", "stride_table_seq"])  # both change from batch to batch
def paged_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    block_table_ptr,
    seq_lens_ptr,
    query_start_ptr,  # int32 [num_seqs + 1]
    alibi_slopes_ptr,  # float32 [num_q_heads]
    sinks_ptr,  # float32 [num_q_heads]
    out_ptr,
    lse_ptr,  # float32 [total_q, num_q_heads], natural logarithm
    partial_out_ptr,  # float32 [total_q, num_q_heads, NUM_SPLITS, V_HEAD_DIM]
    partial_lse_ptr,  # float32 [total_q, num_q_heads, NUM_SPLITS], base 2
    scale,
    num_seqs,
    stride_q_token,
    stride_q_head,
    stride_k_block,
    stride_k_slot,
    stride_k_head,
    stride_v_block,
    stride_v_slot,
    stride_v_head,
    stride_table_seq,
    stride_out_token,
    stride_out_head,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,  # next power of two: tl.arange needs one
    V_HEAD_DIM: tl.constexpr,
    V_HEAD_DIM_PADDED: tl.constexpr,
    GROUP: tl.constexpr,  # query heads that share a KV head
    BLOCK_SIZE: tl.constexpr,  # tokens a cache block
    TILE_ROWS: tl.constexpr,
    TILE_QUERIES: tl.constexpr,  # queries whose heads fit in TILE_ROWS
    TILE_KV: tl.constexpr,  # keys a loop iteration reads
    PAGE_WALK: tl.constexpr,
    NUM_SPLITS: tl.constexpr,  # programs that share one sequence's keys
    DECODE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,  # keys a query sees, its own included; 0: all
    SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    WRITE_LSE: tl.constexpr,
    UPCAST: tl.constexpr,  # compute in float32: for mixed dtypes, and for the interpreter, whose bf16 is wrong
):
    kv_head = tl.program_id(1)
    rows = tl.arange(0, TILE_ROWS)
    if DECODE:
        seq = tl.program_id(0)
        seq_len = tl.load(seq_lens_ptr + seq)
        token = seq.to(tl.int64)
        head = kv_head * GROUP + rows
        row_used = rows < GROUP
        q_pos = tl.zeros([TILE_ROWS], tl.int32) + (seq_len - 1)
        kv_end = seq_len
        if WINDOW > 0:
            first_tile = tl.maximum(seq_len - WINDOW, 0) // TILE_KV
        else:
            first_tile = 0
    else:
        tile_index = tl.program_id(0)
        seq = find_sequence(
            tile=tile_index,
            query_start_ptr=query_start_ptr,
            num_seqs=num_seqs,
            TILE_QUERIES=TILE_QUERIES,
        )
        first_token = tl.load(query_start_ptr + seq)
        q_len = tl.load(query_start_ptr + seq + 1) - first_token
        first_query = (tile_index - first_token // TILE_QUERIES - seq) * TILE_QUERIES
        if first_query >= q_len:
            return
        seq_len = tl.load(seq_lens_ptr + seq)
        query = first_query + rows // GROUP
        token = (first_token + query).to(tl.int64)  # 64 bits: token * stride passes 2^31 at 262,144 x 8,192
        head = kv_head * GROUP + rows % GROUP
        row_used = (rows < TILE_QUERIES * GROUP) & (query < q_len)
        q_pos = seq_len - q_len + query
        # keys from first_tile * TILE_KV to kv_end: no row of this tile may see another
        if CAUSAL:
            last_query = tl.minimum(first_query + TILE_QUERIES, q_len) - 1
            kv_end = tl.maximum(seq_len - q_len + last_query + 1, 0)
        else:
            kv_end = seq_len
        if WINDOW > 0:
            first_tile = tl.maximum(seq_len - q_len + first_query - WINDOW + 1, 0) // TILE_KV
        else:
            first_tile = 0

    dims = tl.arange(0, HEAD_DIM_PADDED)
    v_dims = tl.arange(0, V_HEAD_DIM_PADDED)
    q_ptrs = (q_ptr + token * stride_q_token + head * stride_q_head)[:, None] + dims[None, :]
    if HEAD_DIM == HEAD_DIM_PADDED:
        q = tl.load(q_ptrs, mask=row_used[:, None], other=0.0)
    else:
        q = tl.load(q_ptrs, mask=row_used[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    if HAS_ALIBI:
        slope = tl.load(alibi_slopes_ptr + head, mask=row_used, other=0.0) * LOG2_E

    last_tile = tl.cdiv(kv_end, TILE_KV)
    if NUM_SPLITS > 1:
        split = tl.program_id(2)
        tiles_per_split = tl.cdiv(last_tile - first_tile, NUM_SPLITS)
        first_tile = first_tile + split * tiles_per_split
        last_tile = tl.minimum(first_tile + tiles_per_split, last_tile)

    table_ptr = block_table_ptr + seq.to(tl.int64) * stride_table_seq
    k_head_ptr = k_ptr + kv_head * stride_k_head
    v_head_ptr = v_ptr + kv_head * stride_v_head
    row_max = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([TILE_ROWS], tl.float32)
    acc = tl.zeros([TILE_ROWS, V_HEAD_DIM_PADDED], tl.float32)

    for tile in range(first_tile, last_tile):
        start = tile * TILE_KV
        k_pos = start + tl.arange(0, TILE_KV)
        in_range = k_pos < kv_end
        if PAGE_WALK == "tile_in_page":
            # the tile lies in one block: one look-up, and plain strided addresses
            block = tl.load(table_ptr + start // BLOCK_SIZE).to(tl.int64)
            slot = start % BLOCK_SIZE + tl.arange(0, TILE_KV)
        elif PAGE_WALK == "pages_in_tile":
            # the tile is whole blocks: one look-up a block, spread over its slots
            entry = start // BLOCK_SIZE + tl.arange(0, TILE_KV // BLOCK_SIZE)
            blocks = tl.load(table_ptr + entry, mask=entry * BLOCK_SIZE < kv_end, other=0).to(tl.int64)
            block = tl.reshape(tl.broadcast_to(blocks[:, None], (TILE_KV // BLOCK_SIZE, BLOCK_SIZE)), (TILE_KV,))
            slot = k_pos % BLOCK_SIZE
        else:
            # blocks and tiles need not fit each other: one look-up a key
            block = tl.load(table_ptr + k_pos // BLOCK_SIZE, mask=in_range, other=0).to(tl.int64)
            slot = k_pos % BLOCK_SIZE
        k_ptrs = (k_head_ptr + block * stride_k_block + slot * stride_k_slot)[:, None] + dims[None, :]
        v_ptrs = (v_head_ptr + block * stride_v_block + slot * stride_v_slot)[:, None] + v_dims[None, :]
        # masked keys and values load as 0: whatever an unused slot holds, NaN included, cannot reach the sums
        if HEAD_DIM == HEAD_DIM_PADDED:
            k = tl.load(k_ptrs, mask=in_range[:, None], other=0.0)
        else:
            k = tl.load(k_ptrs, mask=in_range[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
        if V_HEAD_DIM == V_HEAD_DIM_PADDED:
            v = tl.load(v_ptrs, mask=in_range[:, None], other=0.0)
        else:
            v = tl.load(v_ptrs, mask=in_range[:, None] & (v_dims < V_HEAD_DIM)[None, :], other=0.0)
        if UPCAST:
            k = k.to(tl.float32)
            v = v.to(tl.float32)

        if SOFTCAP > 0.0:
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            # tanh(x) as 1 - 2 / (exp(2x) + 1): finite for every finite x, where exp(x) / exp(x) is not
            scores = SOFTCAP * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2_E / SOFTCAP)) + 1.0)) * LOG2_E
        else:
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2_E)
        if HAS_ALIBI:
            scores += slope[:, None] * (k_pos[None, :] - q_pos[:, None]).to(tl.float32)
        visible = in_range[None, :]
        if CAUSAL and not DECODE:  # the one query of a decode step stands behind every key
            visible = visible & (k_pos[None, :] <= q_pos[:, None])
        if WINDOW > 0:
            visible = visible & (k_pos[None, :] > q_pos[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))

        new_max = tl.maximum(row_max, tl.max(scores, 1))
        # a row that has seen no key keeps the maximum -inf: subtract 0 there, since -inf - -inf is NaN
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(row_max - shift)
        row_sum = row_sum * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        row_max = new_max

    row = token * (tl.num_programs(1) * GROUP) + head  # of the [total_q, num_q_heads] results
    if NUM_SPLITS > 1:
        partial = row * NUM_SPLITS + split
        safe_sum = tl.where(row_sum > 0.0, row_sum, 1.0)
        tl.store(partial_lse_ptr + partial, row_max + tl.log2(safe_sum), mask=row_used)
        tl.store(
            partial_out_ptr + partial[:, None] * V_HEAD_DIM + v_dims[None, :],
            acc / safe_sum[:, None],
            mask=row_used[:, None] & (v_dims < V_HEAD_DIM)[None, :],
        )
    else:
        if HAS_SINKS:
            # one more logit in the denominator that carries no value
            sink = tl.load(sinks_ptr + head, mask=row_used, other=0.0) * LOG2_E
            new_max = tl.maximum(row_max, sink)
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)
            decay = tl.exp2(row_max - shift)
            row_sum = row_sum * decay + tl.exp2(sink - shift)
            acc = acc * decay[:, None]
            row_max = new_max
        safe_sum = tl.where(row_sum > 0.0, row_sum, 1.0)
        out_ptrs = (out_ptr + token * stride_out_token + head * stride_out_head)[:, None] + v_dims[None, :]
        result = (acc / safe_sum[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptrs, result, mask=row_used[:, None] & (v_dims < V_HEAD_DIM)[None, :])
        if WRITE_LSE:
            tl.store(lse_ptr + row, (row_max + tl.log2(safe_sum)) * LN_2, mask=row_used)


@triton.jit
def reduce_splits_kernel(
    partial_out_ptr,
    partial_lse_ptr,
    sinks_ptr,
    out_ptr,
    lse_ptr,
    stride_out_token,
    stride_out_head,
    V_HEAD_DIM: tl.constexpr,
    V_HEAD_DIM_PADDED: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    NUM_SPLITS_PADDED: tl.constexpr,
    DECODE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    WRITE_LSE: tl.constexpr,
):
    """Merges the partial states of one row: a mean of the outputs weighted by 2^lse."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row = token * tl.num_programs(1) + head
    splits = tl.arange(0, NUM_SPLITS_PADDED)
    v_dims = tl.arange(0, V_HEAD_DIM_PADDED)
    lse = tl.load(partial_lse_ptr + row * NUM_SPLITS + splits, mask=splits < NUM_SPLITS, other=float("-inf"))
    top = tl.max(lse, 0)
    if not DECODE:
        # no split wrote this row: it belongs to no sequence
        if top == float("inf"):
            return
    if HAS_SINKS:  # here and not in the splits: it counts once
        sink = tl.load(sinks_ptr + head) * LOG2_E
        top = tl.maximum(top, sink)
    shift = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp2(lse - shift)
    total = tl.sum(weights, 0)
    if HAS_SINKS:
        total += tl.exp2(sink - shift)
    safe_total = tl.where(total > 0.0, total, 1.0)
    # an empty split has weight 0 and is not read
    used = (weights > 0.0)[:, None] & (v_dims < V_HEAD_DIM)[None, :]
    partial_ptrs = partial_out_ptr + (row * NUM_SPLITS + splits)[:, None] * V_HEAD_DIM + v_dims[None, :]
    partials = tl.load(partial_ptrs, mask=used, other=0.0)
    result = tl.sum(partials * weights[:, None], 0) / safe_total
    out_ptrs = out_ptr + token * stride_out_token + head * stride_out_head + v_dims
    tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=v_dims < V_HEAD_DIM)
    if WRITE_LSE:
        tl.store(lse_ptr + row, (shift + tl.log2(safe_total)) * LN_2 + tl.where(total > 0.0, 0.0, float("-inf")))


def launch(
    q,
    k_cache,
    v_cache,
    block_table,
    seq_lens,
    query_start_loc,
    scale,
    alibi_slopes,
    sinks,
    out,
    lse,
    HEAD_DIM: int,
    HEAD_DIM_PADDED: int,
    V_HEAD_DIM: int,
    V_HEAD_DIM_PADDED: int,
    GROUP: int,
    BLOCK_SIZE: int,
    TILE_ROWS: int,
    TILE_QUERIES: int,
    TILE_KV: int,
    PAGE_WALK: str,
    NUM_SPLITS: int,
    NUM_SPLITS_PADDED: int,
    DECODE: bool,
    CAUSAL: bool,
    WINDOW: int,
    SOFTCAP: float,
    HAS_ALIBI: bool,
    HAS_SINKS: bool,
    WRITE_LSE: bool,
    UPCAST: bool,
    NUM_WARPS: int,
    NUM_STAGES: int,
):
    """Launches the attention of one batch. Shapes as above; the results are written in place."""
    num_seqs = seq_lens.shape[0]
    num_kv_heads = k_cache.shape[2]
    num_tiles = num_seqs if DECODE else q.shape[0] // TILE_QUERIES + num_seqs
    if NUM_SPLITS == 1:
        partial_out = None
        partial_lse = None
    else:
        num_rows = q.shape[0] * q.shape[1]
        partial_out = torch.empty(num_rows * NUM_SPLITS * V_HEAD_DIM, dtype=torch.float32, device=q.device)
        partial_lse = torch.empty(num_rows * NUM_SPLITS, dtype=torch.float32, device=q.device)
        if not DECODE:
            partial_lse.fill_(float("inf"))  # the mark of a row that no sequence owns
    paged_attention_kernel[(num_tiles, num_kv_heads, NUM_SPLITS)](
        q_ptr=q,
        k_ptr=k_cache,
        v_ptr=v_cache,
        block_table_ptr=block_table,
        seq_lens_ptr=seq_lens,
        query_start_ptr=query_start_loc,
        alibi_slopes_ptr=alibi_slopes,
        sinks_ptr=sinks,
        out_ptr=out,
        lse_ptr=lse,
        partial_out_ptr=partial_out,
        partial_lse_ptr=partial_lse,
        scale=scale,
        num_seqs=num_seqs,
        stride_q_token=q.stride(0),
        stride_q_head=q.stride(1),
        stride_k_block=k_cache.stride(0),
        stride_k_slot=k_cache.stride(1),
        stride_k_head=k_cache.stride(2),
        stride_v_block=v_cache.stride(0),
        stride_v_slot=v_cache.stride(1),
        stride_v_head=v_cache.stride(2),
        stride_table_seq=block_table.stride(0),
        stride_out_token=out.stride(0),
        stride_out_head=out.stride(1),
        HEAD_DIM=HEAD_DIM,
        HEAD_DIM_PADDED=HEAD_DIM_PADDED,
        V_HEAD_DIM=V_HEAD_DIM,
        V_HEAD_DIM_PADDED=V_HEAD_DIM_PADDED,
        GROUP=GROUP,
        BLOCK_SIZE=BLOCK_SIZE,
        TILE_ROWS=TILE_ROWS,
        TILE_QUERIES=TILE_QUERIES,
        TILE_KV=TILE_KV,
        PAGE_WALK=PAGE_WALK,
        NUM_SPLITS=NUM_SPLITS,
        DECODE=DECODE,
        CAUSAL=CAUSAL,
        WINDOW=WINDOW,
        SOFTCAP=SOFTCAP,
        HAS_ALIBI=HAS_ALIBI,
        HAS_SINKS=HAS_SINKS,
        WRITE_LSE=WRITE_LSE,
        UPCAST=UPCAST,
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
    )
    if NUM_SPLITS > 1:
        reduce_splits_kernel[(q.shape[0], q.shape[1])](
            partial_out_ptr=partial_out,
            partial_lse_ptr=partial_lse,
            sinks_ptr=sinks,
            out_ptr=out,
            lse_ptr=lse,
            stride_out_token=out.stride(0),
            stride_out_head=out.stride(1),
            V_HEAD_DIM=V_HEAD_DIM,
            V_HEAD_DIM_PADDED=V_HEAD_DIM_PADDED,
            NUM_SPLITS=NUM_SPLITS,
            NUM_SPLITS_PADDED=NUM_SPLITS_PADDED,
            DECODE=DECODE,
            HAS_SINKS=HAS_SINKS,
            WRITE_LSE=WRITE_LSE,
        )
