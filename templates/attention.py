"""Paged attention over a block table.

Shapes; strides are in elements, every last stride is 1:
    q, out            [total_q, num_q_heads, HEAD_DIM | V_HEAD_DIM]
    k_cache, v_cache  [num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_DIM | V_HEAD_DIM], as stored
    block_table       int32 [num_seqs, max_blocks]: only entries of blocks that hold a key in range are read
    seq_lens          int32 [num_seqs]: cached tokens, this step's included

A program owns the rows of one query tile and one KV head: row r is query r // GROUP of the tile and head
r % GROUP of the group, so that a key is read once for all the heads that share it. Scores are in base 2; softmax
state and accumulators are float32.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


# --- what score and mask functions are made of --------------------------------------------------------------


@triton.jit
def floor_div(a, b):
    """a / b rounded down, also for negative operands, where // rounds towards 0."""
    return a // b - tl.where((a % b != 0) & ((a < 0) != (b < 0)), 1, 0)


@triton.jit
def floor_mod(a, b):
    """What floor_div leaves: it has the sign of b."""
    return a - floor_div(a, b) * b


@triton.jit
def tanh(x):
    # exp(-2|x|) never overflows; near 0, where 1 - exp(-2|x|) loses digits that a large cap multiplies, Taylor's series
    square = x * x
    series = x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    decayed = tl.exp2(tl.abs(x) * (-2.0 * LOG2_E))
    size = (1.0 - decayed) / (1.0 + decayed)
    return tl.where(tl.abs(x) < 0.2, series, tl.where(x < 0.0, -size, size))


@triton.jit
def captured_1(ptr, i, size_0):
    """An element of a captured vector; an index outside it, of a key that is masked, is moved inside."""
    return tl.load(ptr + tl.minimum(tl.maximum(i, 0), size_0 - 1))


@triton.jit
def captured_2(ptr, i, j, size_0, size_1):
    """An element of a captured matrix, likewise."""
    row = tl.minimum(tl.maximum(i, 0), size_0 - 1)
    return tl.load(ptr + row * size_1 + tl.minimum(tl.maximum(j, 0), size_1 - 1))


@triton.jit
def captured_3(ptr, i, j, k, size_0, size_1, size_2):
    """An element of a captured tensor of three dimensions, likewise."""
    row = tl.minimum(tl.maximum(i, 0), size_0 - 1) * size_1 + tl.minimum(tl.maximum(j, 0), size_1 - 1)
    return tl.load(ptr + row * size_2 + tl.minimum(tl.maximum(k, 0), size_2 - 1))


# The generator writes the traced functions and the range that was derived from the mask in place of these four.


@triton.jit
def score_mod(score, batch, head, q_pos, k_pos, captures):
    """What becomes of a score."""
    return score


@triton.jit
def mask_mod(batch, head, q_pos, k_pos, captures):
    """Whether a query may attend a key."""
    return k_pos >= 0


@triton.jit
def mask_low(batch, head, q_pos, captures):
    """The first key that the mask may allow a query."""
    return 0


@triton.jit
def mask_high(batch, head, q_pos, captures):
    """The key after the last one that the mask may allow a query."""
    return 2147483647


# --- what a cache holds -------------------------------------------------------------------------------------


@triton.jit
def decode(stored, STORAGE: tl.constexpr):
    """Stored bits as numbers, where no instruction converts them."""
    if STORAGE == "int4":
        # [rows, n] bytes are [rows, 2 n] values in -8..7; the low nibble is the even column
        low = ((stored & 0xF) ^ 8).to(tl.int8) - 8
        high = ((stored >> 4) ^ 8).to(tl.int8) - 8
        values = tl.interleave(low, high)
    elif STORAGE == "e4m3":
        # the bits in the middle of a float16's, where their exponent is 8 too small
        values = ((stored.to(tl.int8, bitcast=True).to(tl.int16) << 7) & ~0x4000).to(tl.float16, bitcast=True) * 256.0
        values = tl.where((stored & 0x7F) == 0x7F, float("nan"), values)
    else:
        # e5m2 is the upper half of a float16
        values = (stored.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    return values


# --- which keys a program reads -----------------------------------------------------------------------------


@triton.jit
def find_sequence(tile, query_start_ptr, num_seqs, TILE_QUERIES: tl.constexpr):
    """The sequence that query tile `tile` (one, or many) belongs to. Sequence s owns the tiles from query_start[s] //
    TILE_QUERIES + s on: at least as many as it needs, so that no list of tiles has to be built."""
    low = tile * 0
    high = low + num_seqs
    span = num_seqs
    while span > 0:
        middle = (low + high) // 2
        owns_later = tl.load(query_start_ptr + middle) // TILE_QUERIES + middle <= tile
        searching = low < high
        low = tl.where(searching & owns_later, middle + 1, low)
        high = tl.where(searching & (owns_later == 0), middle, high)
        span = span // 2
    return low - 1


@triton.jit
def key_range(seq_len, q_len, first_query, last_query, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """The keys that some query of the tile may see: the first, and the one after the last."""
    if WINDOW > 0:
        begin = tl.maximum(seq_len - q_len + first_query - WINDOW + 1, 0)
    else:
        begin = seq_len * 0
    if CAUSAL:
        end = tl.maximum(seq_len - q_len + last_query + 1, 0)
    else:
        end = seq_len
    return begin, end


@triton.jit
def look_up(
    table_ptr,
    start,
    kv_begin,
    kv_end,
    BLOCK_SIZE: tl.constexpr,
    TILE_KV: tl.constexpr,
    PAGE_WALK: tl.constexpr,
    HAS_BEGIN: tl.constexpr,
):
    """The blocks of the key tile that begins at `start`."""
    if PAGE_WALK == "tile_in_page":
        # the tile lies in one block
        blocks = tl.load(table_ptr + start // BLOCK_SIZE, mask=start < kv_end, other=0)
    elif PAGE_WALK == "pages_in_tile":
        # the tile is whole blocks
        entry = start // BLOCK_SIZE + tl.arange(0, TILE_KV // BLOCK_SIZE)
        if HAS_BEGIN:
            used = (entry * BLOCK_SIZE < kv_end) & (entry * BLOCK_SIZE + BLOCK_SIZE > kv_begin)
        else:
            used = entry * BLOCK_SIZE < kv_end
        blocks = tl.load(table_ptr + entry, mask=used, other=0)
    else:
        # blocks and tiles need not fit each other
        k_pos = start + tl.arange(0, TILE_KV)
        if HAS_BEGIN:
            used = (k_pos < kv_end) & (k_pos >= kv_begin)
        else:
            used = k_pos < kv_end
        blocks = tl.load(table_ptr + k_pos // BLOCK_SIZE, mask=used, other=0)
    return blocks


# --- the two products ---------------------------------------------------------------------------------------


@triton.jit
def times_keys(q, k, DOT: tl.constexpr):
    """[rows, keys] of q [rows, columns] and k [keys, columns]."""
    if DOT == "fma":  # a matrix instruction would compute 16 rows for the one or two that there are
        products = tl.sum(q.to(tl.float32)[:, None, :] * k.to(tl.float32)[None, :, :], 2)
    else:
        products = tl.dot(q, tl.trans(k), input_precision="ieee")
    return products


@triton.jit
def times_values(weights, v, DOT: tl.constexpr):
    """[rows, columns] of weights [rows, keys] and v [keys, columns]."""
    if DOT == "fma":
        products = tl.sum(weights[:, :, None] * v.to(tl.float32)[None, :, :], 1)
    else:
        products = tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return products


# --- leaving results ----------------------------------------------------------------------------------------


@triton.jit
def store_partial(
    acc,
    acc_rest,
    row_max,
    row_sum,
    partial,
    row_used,
    partial_out_ptr,
    partial_lse_ptr,
    V_HEAD_DIM: tl.constexpr,
    V_MAIN: tl.constexpr,
    V_REST: tl.constexpr,
):
    """Leaves what a part of the keys gave, as rows `partial`."""
    safe_sum = tl.where(row_sum > 0.0, row_sum, 1.0)
    tl.store(partial_lse_ptr + partial, row_max + tl.log2(safe_sum), mask=row_used)
    row_ptrs = (partial_out_ptr + partial * V_HEAD_DIM)[:, None]
    columns = tl.arange(0, V_MAIN)[None, :]
    tl.store(row_ptrs + columns, acc / safe_sum[:, None], mask=row_used[:, None] & (columns < V_HEAD_DIM))
    if V_REST > 0:
        columns = V_MAIN + tl.arange(0, V_REST)[None, :]
        tl.store(row_ptrs + columns, acc_rest / safe_sum[:, None], mask=row_used[:, None] & (columns < V_HEAD_DIM))


@triton.jit
def store_result(
    acc,
    acc_rest,
    row_max,
    row_sum,
    token,
    head,
    row,
    row_used,
    sinks_ptr,
    out_ptr,
    lse_ptr,
    stride_out_token,
    stride_out_head,
    V_HEAD_DIM: tl.constexpr,
    V_MAIN: tl.constexpr,
    V_REST: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    WRITE_LSE: tl.constexpr,
):
    """Divides by the sums and writes the rows."""
    if HAS_SINKS:
        # one more logit in the denominator that carries no value; here and nowhere else, so that it counts once
        sink = tl.load(sinks_ptr + head, mask=row_used, other=0.0) * LOG2_E
        new_max = tl.maximum(row_max, sink)
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        decay = tl.exp2(row_max - shift)
        row_sum = row_sum * decay + tl.exp2(sink - shift)
        row_max = new_max
        factor = decay / tl.where(row_sum > 0.0, row_sum, 1.0)
    else:
        factor = 1.0 / tl.where(row_sum > 0.0, row_sum, 1.0)
    row_ptrs = (out_ptr + token * stride_out_token + head * stride_out_head)[:, None]
    columns = tl.arange(0, V_MAIN)[None, :]
    result = (acc * factor[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(row_ptrs + columns, result, mask=row_used[:, None] & (columns < V_HEAD_DIM))
    if V_REST > 0:
        columns = V_MAIN + tl.arange(0, V_REST)[None, :]
        result = (acc_rest * factor[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(row_ptrs + columns, result, mask=row_used[:, None] & (columns < V_HEAD_DIM))
    if WRITE_LSE:
        lse = (row_max + tl.log2(tl.where(row_sum > 0.0, row_sum, 1.0))) * LN_2
        tl.store(lse_ptr + row, lse, mask=row_used)


# --- attention ----------------------------------------------------------------------------------------------


# these change from batch to batch, and none is worth a recompilation
@triton.jit(do_not_specialize=["num_seqs", "num_splits", "stride_table_seq", "stride_tree_token", "tree_width"])
def paged_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_desc,  # tensor descriptors of the caches, [1, TILE_KV, 1, columns] a load
    k_rest_desc,
    v_desc,
    v_rest_desc,
    block_table_ptr,
    seq_lens_ptr,
    query_start_ptr,  # int32 [num_seqs + 1]
    alibi_slopes_ptr,  # float32 [num_q_heads]
    sinks_ptr,  # float32 [num_q_heads]
    tree_ptr,  # uint8 [total_q, max_query_len]: which of this step's own tokens a query sees
    k_scale_ptr,  # float32 [num_blocks, BLOCK_SIZE, num_kv_heads], strides may be 0
    v_scale_ptr,
    k_zero_ptr,  # likewise: value = (stored - zero) * scale
    v_zero_ptr,
    captures,
    out_ptr,
    lse_ptr,  # float32 [total_q, num_q_heads], natural logarithm
    partial_out_ptr,  # float32 [rows, V_HEAD_DIM] of partial results, normalised
    partial_lse_ptr,  # float32 [rows], base 2
    counter_ptr,  # int32, zeros: splits of a query tile and head that are done
    unit_tile,  # a piece of work of the balanced schedule: query tile, head, key tiles [first, last) of them
    unit_head,
    unit_first,
    unit_last,
    unit_whole,  # all the key tiles there are
    unit_slot,  # where the partial results go
    scale,
    num_seqs,
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
    HEAD_MAIN: tl.constexpr,  # columns, a power of two: tl.arange needs one
    HEAD_REST: tl.constexpr,  # columns of a second piece, where HEAD_DIM is no power of two; or 0
    V_HEAD_DIM: tl.constexpr,
    V_MAIN: tl.constexpr,
    V_REST: tl.constexpr,
    V_FROM_K: tl.constexpr,  # values are the first piece of the keys, as loaded (a latent cache)
    GROUP: tl.constexpr,  # query heads that share a KV head
    BLOCK_SIZE: tl.constexpr,  # tokens a cache block
    TILE_ROWS: tl.constexpr,
    TILE_QUERIES: tl.constexpr,  # queries whose heads fit in TILE_ROWS
    ROW_TILES: tl.constexpr,  # programs that share the heads of a group, where they do not fit
    SLOT_ROWS: tl.constexpr,  # rows of a query tile that are used
    TILE_KV: tl.constexpr,  # keys a loop iteration reads
    PAGE_WALK: tl.constexpr,
    SPLITS: tl.constexpr,  # several programs share a sequence's keys
    SPLIT_TOKENS: tl.constexpr,  # keys of a split; 0: equal parts
    REDUCE_LAST: tl.constexpr,  # the last of them to finish merges
    BALANCED: tl.constexpr,
    DOT: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    WARP_SPECIALIZE: tl.constexpr,
    STORAGE: tl.constexpr,  # "float"; "convert" for what one instruction converts; "int4", "e4m3", "e5m2" bits
    PACK: tl.constexpr,  # values in a stored element: two int4 a byte
    SCALES: tl.constexpr,  # "none", one a "head" (or for all), one a "token" and head
    HAS_ZEROS: tl.constexpr,
    DECODE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,  # keys a query sees, its own included; 0: all
    SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_TREE: tl.constexpr,
    HAS_SCORE_MOD: tl.constexpr,
    HAS_MASK_MOD: tl.constexpr,
    MASK_LOW: tl.constexpr,  # the mask's range has a first key
    MASK_HIGH: tl.constexpr,  # and a last one
    HAS_BEGIN: tl.constexpr,  # keys before the range's first are not read
    NATURAL: tl.constexpr,  # scores pass through functions, in natural units, before they turn to base 2
    WRITE_LSE: tl.constexpr,
    UPCAST: tl.constexpr,  # compute in float32: for mixed dtypes, and for the interpreter, whose bf16 is wrong
    WIDE: tl.constexpr,  # offsets of 64 bits: some tensor has more than 2^31 elements
):
    if BALANCED:
        tile_index = unit_tile
        head_tile = unit_head
    else:
        tile_index = tl.program_id(0)
        head_tile = tl.program_id(1)
    rows = tl.arange(0, TILE_ROWS)
    if ROW_TILES > 1:
        kv_head = head_tile // ROW_TILES
        group_row = head_tile % ROW_TILES * TILE_ROWS + rows
    else:
        kv_head = head_tile
        group_row = rows

    if DECODE:
        seq = tile_index
        seq_len = tl.load(seq_lens_ptr + seq)
        q_len = 1
        first_query = 0
        last_query = 0
        token = seq
        q_pos = tl.zeros([TILE_ROWS], tl.int32) + (seq_len - 1)
        head = kv_head * GROUP + group_row
        row_used = group_row < GROUP
    else:
        seq = find_sequence(tile_index, query_start_ptr, num_seqs, TILE_QUERIES=TILE_QUERIES)
        first_token = tl.load(query_start_ptr + seq)
        q_len = tl.load(query_start_ptr + seq + 1) - first_token
        first_query = (tile_index - first_token // TILE_QUERIES - seq) * TILE_QUERIES
        if not BALANCED:
            if first_query >= q_len:
                return
        seq_len = tl.load(seq_lens_ptr + seq)
        last_query = tl.minimum(first_query + TILE_QUERIES, q_len) - 1
        if TILE_QUERIES > 1:
            query = first_query + group_row // GROUP
            head = kv_head * GROUP + group_row % GROUP
            row_used = (group_row < TILE_QUERIES * GROUP) & (query < q_len)
        else:
            query = first_query + group_row * 0
            head = kv_head * GROUP + group_row
            row_used = group_row < GROUP
        token = first_token + query
        q_pos = seq_len - q_len + query
    if WIDE:
        token = token.to(tl.int64)

    kv_begin, kv_end = key_range(
        seq_len=seq_len,
        q_len=q_len,
        first_query=first_query,
        last_query=last_query,
        CAUSAL=CAUSAL,
        WINDOW=WINDOW,
    )
    if MASK_LOW:
        low = mask_low(batch=seq, head=head, q_pos=q_pos, captures=captures)
        low = tl.where(row_used, tl.minimum(tl.maximum(low, kv_begin), kv_end), kv_end)
        kv_begin = tl.min(low, 0).to(tl.int32)
    if MASK_HIGH:
        high = mask_high(batch=seq, head=head, q_pos=q_pos, captures=captures)
        high = tl.where(row_used, tl.minimum(tl.maximum(high, 0), kv_end), 0)
        kv_end = tl.max(high, 0).to(tl.int32)

    first_tile = kv_begin // TILE_KV
    last_tile = tl.cdiv(kv_end, TILE_KV)
    if SPLITS:
        split = tl.program_id(2)
        if SPLIT_TOKENS > 0:
            first_tile = tl.maximum(first_tile, split * (SPLIT_TOKENS // TILE_KV))
            last_tile = tl.minimum(last_tile, (split + 1) * (SPLIT_TOKENS // TILE_KV))
        else:
            tiles_per_split = tl.cdiv(last_tile - first_tile, num_splits)
            first_tile = first_tile + split * tiles_per_split
            last_tile = tl.minimum(first_tile + tiles_per_split, last_tile)
    if BALANCED:
        last_tile = tl.minimum(first_tile + unit_last, last_tile)
        first_tile = first_tile + unit_first

    dims = tl.arange(0, HEAD_MAIN)
    q_row_ptrs = (q_ptr + token * stride_q_token + head * stride_q_head)[:, None]
    if HEAD_MAIN > HEAD_DIM:
        q = tl.load(q_row_ptrs + dims[None, :], mask=row_used[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    else:
        q = tl.load(q_row_ptrs + dims[None, :], mask=row_used[:, None], other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    if HEAD_REST > 0:
        rest_dims = HEAD_MAIN + tl.arange(0, HEAD_REST)
        if HEAD_MAIN + HEAD_REST > HEAD_DIM:
            rest_mask = row_used[:, None] & (rest_dims < HEAD_DIM)[None, :]
        else:
            rest_mask = row_used[:, None]
        q_rest = tl.load(q_row_ptrs + rest_dims[None, :], mask=rest_mask, other=0.0)
        if UPCAST:
            q_rest = q_rest.to(tl.float32)
    if HAS_ZEROS:
        # q . (k - zero) is q . k - zero * sum(q)
        q_sum = tl.sum(q.to(tl.float32), 1)
        if HEAD_REST > 0:
            q_sum += tl.sum(q_rest.to(tl.float32), 1)
    qk_scale = scale
    if SCALES == "head":
        qk_scale = qk_scale * tl.load(k_scale_ptr + kv_head * stride_k_scale_head)
    if not NATURAL:
        qk_scale = qk_scale * LOG2_E
    if HAS_ALIBI:
        slope = tl.load(alibi_slopes_ptr + head, mask=row_used, other=0.0)
        if not NATURAL:
            slope = slope * LOG2_E

    k_columns = tl.arange(0, HEAD_MAIN // PACK)
    v_columns = tl.arange(0, V_MAIN // PACK)
    if HEAD_REST > 0:
        k_rest_columns = HEAD_MAIN // PACK + tl.arange(0, HEAD_REST // PACK)
    if V_REST > 0:
        v_rest_columns = V_MAIN // PACK + tl.arange(0, V_REST // PACK)

    if WIDE:
        table_ptr = block_table_ptr + seq.to(tl.int64) * stride_table_seq
    else:
        table_ptr = block_table_ptr + seq * stride_table_seq
    k_head_ptr = k_ptr + kv_head * stride_k_head
    v_head_ptr = v_ptr + kv_head * stride_v_head
    row_max = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([TILE_ROWS], tl.float32)
    acc = tl.zeros([TILE_ROWS, V_MAIN], tl.float32)
    if V_REST > 0:
        acc_rest = tl.zeros([TILE_ROWS, V_REST], tl.float32)
    else:
        acc_rest = acc  # never read

    blocks = look_up(
        table_ptr=table_ptr,
        start=first_tile * TILE_KV,
        kv_begin=kv_begin,
        kv_end=kv_end,
        BLOCK_SIZE=BLOCK_SIZE,
        TILE_KV=TILE_KV,
        PAGE_WALK=PAGE_WALK,
        HAS_BEGIN=HAS_BEGIN,
    )
    for tile in tl.range(first_tile, last_tile, warp_specialize=WARP_SPECIALIZE):
        start = tile * TILE_KV
        k_pos = start + tl.arange(0, TILE_KV)
        if HAS_BEGIN:
            in_range = (k_pos < kv_end) & (k_pos >= kv_begin)
        else:
            in_range = k_pos < kv_end
        if WIDE:
            block = blocks.to(tl.int64)
        else:
            block = blocks
        if PAGE_WALK == "tile_in_page":
            slot = start % BLOCK_SIZE + tl.arange(0, TILE_KV)
        else:
            slot = k_pos % BLOCK_SIZE
        if PAGE_WALK == "pages_in_tile":
            block = tl.reshape(tl.broadcast_to(block[:, None], (TILE_KV // BLOCK_SIZE, BLOCK_SIZE)), (TILE_KV,))

        # masked keys and values load as 0: whatever an unused slot holds, NaN included, cannot reach the sums
        if DESCRIPTORS:
            k = tl.reshape(k_desc.load([blocks, start % BLOCK_SIZE, kv_head, 0]), (TILE_KV, HEAD_MAIN // PACK))
        else:
            k_row_ptrs = (k_head_ptr + block * stride_k_block + slot * stride_k_slot)[:, None]
            if HEAD_MAIN > HEAD_DIM:
                k_mask = in_range[:, None] & (k_columns < HEAD_DIM // PACK)[None, :]
            else:
                k_mask = in_range[:, None]
            k = tl.load(k_row_ptrs + k_columns[None, :], mask=k_mask, other=0.0)
        if STORAGE == "int4" or STORAGE == "e4m3" or STORAGE == "e5m2":
            k = decode(k, STORAGE=STORAGE)
        if STORAGE != "float":
            k = k.to(q.dtype)
        scores = times_keys(q, k, DOT=DOT)
        if HEAD_REST > 0:
            if DESCRIPTORS:
                k_rest = k_rest_desc.load([blocks, start % BLOCK_SIZE, kv_head, HEAD_MAIN // PACK])
                k_rest = tl.reshape(k_rest, (TILE_KV, HEAD_REST // PACK))
            else:
                if HEAD_MAIN + HEAD_REST > HEAD_DIM:
                    k_rest_mask = in_range[:, None] & (k_rest_columns < HEAD_DIM // PACK)[None, :]
                else:
                    k_rest_mask = in_range[:, None]
                k_rest = tl.load(k_row_ptrs + k_rest_columns[None, :], mask=k_rest_mask, other=0.0)
            if STORAGE == "int4" or STORAGE == "e4m3" or STORAGE == "e5m2":
                k_rest = decode(k_rest, STORAGE=STORAGE)
            if STORAGE != "float":
                k_rest = k_rest.to(q.dtype)
            scores += times_keys(q_rest, k_rest, DOT=DOT)

        if HAS_ZEROS:
            k_zero_ptrs = k_zero_ptr + kv_head * stride_k_zero_head + block * stride_k_zero_block
            k_zero = tl.load(k_zero_ptrs + slot * stride_k_zero_slot, mask=in_range, other=0.0)
            scores -= q_sum[:, None] * k_zero[None, :]
        if SCALES == "token":
            k_scale_ptrs = k_scale_ptr + kv_head * stride_k_scale_head + block * stride_k_scale_block
            k_scale = tl.load(k_scale_ptrs + slot * stride_k_scale_slot, mask=in_range, other=0.0)
            scores = scores * (qk_scale * k_scale)[None, :]
        else:
            scores = scores * qk_scale
        if SOFTCAP > 0.0:
            scores = SOFTCAP * tanh(scores / SOFTCAP)
        if HAS_ALIBI:
            scores += slope[:, None] * (k_pos[None, :] - q_pos[:, None]).to(tl.float32)
        if HAS_SCORE_MOD:
            scores = score_mod(
                score=scores,
                batch=seq,
                head=head[:, None],
                q_pos=q_pos[:, None],
                k_pos=k_pos[None, :],
                captures=captures,
            )
        if NATURAL:
            scores = scores * LOG2_E

        visible = in_range[None, :]
        if CAUSAL and not DECODE:  # the one query of a decode step stands behind every key
            visible = visible & (k_pos[None, :] <= q_pos[:, None])
        if WINDOW > 0 and not DECODE:
            visible = visible & (k_pos[None, :] > q_pos[:, None] - WINDOW)
        if HAS_TREE:
            own = k_pos - (seq_len - q_len)  # of this step's tokens; older ones are open
            tree_ptrs = tree_ptr + (token * stride_tree_token)[:, None] + own[None, :]
            own_mask = row_used[:, None] & (in_range & (own >= 0) & (own < tree_width))[None, :]
            visible = visible & (tl.load(tree_ptrs, mask=own_mask, other=1) != 0)
        if HAS_MASK_MOD:
            visible = visible & mask_mod(
                batch=seq,
                head=head[:, None],
                q_pos=q_pos[:, None],
                k_pos=k_pos[None, :],
                captures=captures,
            )
        scores = tl.where(visible, scores, float("-inf"))
        if HAS_TREE or HAS_MASK_MOD:
            # a value that no row may see counts as 0: what it holds must not matter, be it NaN
            seen = tl.max((visible & row_used[:, None]).to(tl.int32), 0) > 0

        new_max = tl.maximum(row_max, tl.max(scores, 1))
        # a row that has seen no key keeps the maximum -inf: subtract 0 there, since -inf - -inf is NaN
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(row_max - shift)
        row_sum = row_sum * decay + tl.sum(weights, 1)
        row_max = new_max

        if SCALES == "token":
            v_scale_ptrs = v_scale_ptr + kv_head * stride_v_scale_head + block * stride_v_scale_block
            v_scale = tl.load(v_scale_ptrs + slot * stride_v_scale_slot, mask=in_range, other=0.0)
        if HAS_ZEROS:
            v_zero_ptrs = v_zero_ptr + kv_head * stride_v_zero_head + block * stride_v_zero_block
            v_zero = tl.load(v_zero_ptrs + slot * stride_v_zero_slot, mask=in_range, other=0.0)
        v_row_ptrs = (v_head_ptr + block * stride_v_block + slot * stride_v_slot)[:, None]
        if V_FROM_K:
            v = k
        else:
            if DESCRIPTORS:
                v = tl.reshape(v_desc.load([blocks, start % BLOCK_SIZE, kv_head, 0]), (TILE_KV, V_MAIN // PACK))
            else:
                if V_MAIN > V_HEAD_DIM:
                    v_mask = in_range[:, None] & (v_columns < V_HEAD_DIM // PACK)[None, :]
                else:
                    v_mask = in_range[:, None]
                v = tl.load(v_row_ptrs + v_columns[None, :], mask=v_mask, other=0.0)
            if STORAGE == "int4" or STORAGE == "e4m3" or STORAGE == "e5m2":
                v = decode(v, STORAGE=STORAGE)
        if HAS_ZEROS:
            v = v.to(tl.float32) - v_zero[:, None]
        if SCALES == "token":
            v = v.to(tl.float32) * v_scale[:, None]
        if STORAGE != "float":
            v = v.to(q.dtype)
        if DESCRIPTORS:
            v = tl.where(in_range[:, None], v, 0.0)  # whole tiles were read: 0 * NaN must not happen
        if HAS_TREE or HAS_MASK_MOD:
            v = tl.where(seen[:, None], v, 0.0)
        acc = acc * decay[:, None] + times_values(weights, v, DOT=DOT)
        if V_REST > 0:
            if DESCRIPTORS:
                v_rest = v_rest_desc.load([blocks, start % BLOCK_SIZE, kv_head, V_MAIN // PACK])
                v_rest = tl.reshape(v_rest, (TILE_KV, V_REST // PACK))
            else:
                if V_MAIN + V_REST > V_HEAD_DIM:
                    v_rest_mask = in_range[:, None] & (v_rest_columns < V_HEAD_DIM // PACK)[None, :]
                else:
                    v_rest_mask = in_range[:, None]
                v_rest = tl.load(v_row_ptrs + v_rest_columns[None, :], mask=v_rest_mask, other=0.0)
            if STORAGE == "int4" or STORAGE == "e4m3" or STORAGE == "e5m2":
                v_rest = decode(v_rest, STORAGE=STORAGE)
            if HAS_ZEROS:
                v_rest = v_rest.to(tl.float32) - v_zero[:, None]
            if SCALES == "token":
                v_rest = v_rest.to(tl.float32) * v_scale[:, None]
            if STORAGE != "float":
                v_rest = v_rest.to(q.dtype)
            if DESCRIPTORS:
                v_rest = tl.where(in_range[:, None], v_rest, 0.0)
            if HAS_TREE or HAS_MASK_MOD:
                v_rest = tl.where(seen[:, None], v_rest, 0.0)
            acc_rest = acc_rest * decay[:, None] + times_values(weights, v_rest, DOT=DOT)

        # the next tile's blocks, now: loads that waited for them could not be pipelined
        blocks = look_up(
            table_ptr=table_ptr,
            start=start + TILE_KV,
            kv_begin=kv_begin,
            kv_end=kv_end,
            BLOCK_SIZE=BLOCK_SIZE,
            TILE_KV=TILE_KV,
            PAGE_WALK=PAGE_WALK,
            HAS_BEGIN=HAS_BEGIN,
        )

    if SCALES == "head":
        v_scale = tl.load(v_scale_ptr + kv_head * stride_v_scale_head)
        acc = acc * v_scale
        if V_REST > 0:
            acc_rest = acc_rest * v_scale
    row = token * (num_kv_heads * GROUP) + head  # of the [total_q, num_q_heads] results
    if BALANCED:
        if unit_whole:
            store_result(
                acc,
                acc_rest=acc_rest,
                row_max=row_max,
                row_sum=row_sum,
                token=token,
                head=head,
                row=row,
                row_used=row_used,
                sinks_ptr=sinks_ptr,
                out_ptr=out_ptr,
                lse_ptr=lse_ptr,
                stride_out_token=stride_out_token,
                stride_out_head=stride_out_head,
                V_HEAD_DIM=V_HEAD_DIM,
                V_MAIN=V_MAIN,
                V_REST=V_REST,
                HAS_SINKS=HAS_SINKS,
                WRITE_LSE=WRITE_LSE,
            )
        else:
            store_partial(
                acc,
                acc_rest=acc_rest,
                row_max=row_max,
                row_sum=row_sum,
                partial=unit_slot * SLOT_ROWS + rows,
                row_used=row_used,
                partial_out_ptr=partial_out_ptr,
                partial_lse_ptr=partial_lse_ptr,
                V_HEAD_DIM=V_HEAD_DIM,
                V_MAIN=V_MAIN,
                V_REST=V_REST,
            )
    elif SPLITS:
        store_partial(
            acc,
            acc_rest=acc_rest,
            row_max=row_max,
            row_sum=row_sum,
            partial=row * num_splits + split,
            row_used=row_used,
            partial_out_ptr=partial_out_ptr,
            partial_lse_ptr=partial_lse_ptr,
            V_HEAD_DIM=V_HEAD_DIM,
            V_MAIN=V_MAIN,
            V_REST=V_REST,
        )
        if REDUCE_LAST:
            tl.debug_barrier()  # the counter must not say so before every thread's part is written
            done = tl.atomic_add(counter_ptr + tile_index * tl.num_programs(1) + head_tile, 1, sem="acq_rel")
            if done == num_splits - 1:
                row_max = tl.full([TILE_ROWS], float("-inf"), tl.float32)
                row_sum = tl.zeros([TILE_ROWS], tl.float32)
                acc = tl.zeros([TILE_ROWS, V_MAIN], tl.float32)
                if V_REST > 0:
                    acc_rest = tl.zeros([TILE_ROWS, V_REST], tl.float32)
                columns = tl.arange(0, V_MAIN)[None, :]
                for other in range(0, num_splits):
                    part = row * num_splits + other
                    # .cg: another multiprocessor wrote it, so this one's first-level cache may not answer
                    lse = tl.load(partial_lse_ptr + part, mask=row_used, other=float("-inf"), cache_modifier=".cg")
                    new_max = tl.maximum(row_max, lse)
                    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
                    weight = tl.exp2(lse - shift)
                    decay = tl.exp2(row_max - shift)
                    part_ptrs = (partial_out_ptr + part * V_HEAD_DIM)[:, None]
                    used = row_used[:, None] & (columns < V_HEAD_DIM)
                    part_out = tl.load(part_ptrs + columns, mask=used, other=0.0, cache_modifier=".cg")
                    acc = acc * decay[:, None] + part_out * weight[:, None]
                    if V_REST > 0:
                        rest = V_MAIN + tl.arange(0, V_REST)[None, :]
                        used = row_used[:, None] & (rest < V_HEAD_DIM)
                        part_out = tl.load(part_ptrs + rest, mask=used, other=0.0, cache_modifier=".cg")
                        acc_rest = acc_rest * decay[:, None] + part_out * weight[:, None]
                    row_sum = row_sum * decay + weight
                    row_max = new_max
                store_result(
                    acc,
                    acc_rest=acc_rest,
                    row_max=row_max,
                    row_sum=row_sum,
                    token=token,
                    head=head,
                    row=row,
                    row_used=row_used,
                    sinks_ptr=sinks_ptr,
                    out_ptr=out_ptr,
                    lse_ptr=lse_ptr,
                    stride_out_token=stride_out_token,
                    stride_out_head=stride_out_head,
                    V_HEAD_DIM=V_HEAD_DIM,
                    V_MAIN=V_MAIN,
                    V_REST=V_REST,
                    HAS_SINKS=HAS_SINKS,
                    WRITE_LSE=WRITE_LSE,
                )
    else:
        store_result(
            acc,
            acc_rest=acc_rest,
            row_max=row_max,
            row_sum=row_sum,
            token=token,
            head=head,
            row=row,
            row_used=row_used,
            sinks_ptr=sinks_ptr,
            out_ptr=out_ptr,
            lse_ptr=lse_ptr,
            stride_out_token=stride_out_token,
            stride_out_head=stride_out_head,
            V_HEAD_DIM=V_HEAD_DIM,
            V_MAIN=V_MAIN,
            V_REST=V_REST,
            HAS_SINKS=HAS_SINKS,
            WRITE_LSE=WRITE_LSE,
        )


# --- merging --------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["num_seqs", "num_tiles", "num_splits"])
def reduce_kernel(
    partial_out_ptr,
    partial_lse_ptr,
    sinks_ptr,
    query_start_ptr,
    tile_start_ptr,
    out_ptr,
    lse_ptr,
    num_seqs,
    num_tiles,
    num_kv_heads,
    num_splits,
    num_programs,  # that shared the work
    stride_out_token,
    stride_out_head,
    V_HEAD_DIM: tl.constexpr,
    V_PADDED: tl.constexpr,  # the next power of two
    GROUP: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    ROW_TILES: tl.constexpr,
    SLOT_ROWS: tl.constexpr,
    CHUNK: tl.constexpr,  # partial results a loop iteration merges
    BALANCED: tl.constexpr,
    DECODE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    WRITE_LSE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Merges the partial results of one row, in the order of their keys: a mean weighted by 2^lse."""
    if BALANCED:
        tile_index = tl.program_id(0)
        head_tile = tl.program_id(1)
        tile_row = tl.program_id(2)
        heads = num_kv_heads * ROW_TILES
        tile_start = tl.load(tile_start_ptr + tile_index)
        num_key_tiles = tl.load(tile_start_ptr + tile_index + 1) - tile_start
        share = tl.cdiv(tl.load(tile_start_ptr + num_tiles) * heads, num_programs)
        first_work = tile_start * heads + head_tile * num_key_tiles
        first_program = first_work // tl.maximum(share, 1)
        last_program = (first_work + num_key_tiles - 1) // tl.maximum(share, 1)
        if first_program >= last_program:  # written as it was computed, or not there at all
            return
        count = last_program - first_program + 1
        group_row = head_tile % ROW_TILES * TILE_ROWS + tile_row
        if DECODE:
            token = tile_index
            head = head_tile // ROW_TILES * GROUP + group_row
            if group_row >= GROUP:
                return
        else:
            seq = find_sequence(tile_index, query_start_ptr, num_seqs, TILE_QUERIES=TILE_QUERIES)
            first_token = tl.load(query_start_ptr + seq)
            query = (tile_index - first_token // TILE_QUERIES - seq) * TILE_QUERIES
            if TILE_QUERIES > 1:
                query += tile_row // GROUP
                head = head_tile * GROUP + tile_row % GROUP
            else:
                head = head_tile // ROW_TILES * GROUP + group_row
                if group_row >= GROUP:
                    return
            token = first_token + query
            if token >= tl.load(query_start_ptr + seq + 1):
                return
        num_q_heads = num_kv_heads * GROUP
    else:
        token = tl.program_id(0)
        head = tl.program_id(1)
        num_q_heads = tl.num_programs(1)
        count = num_splits
        if not DECODE:
            if token >= tl.load(query_start_ptr + num_seqs):  # a row of no sequence
                return
    if WIDE:
        token = token.to(tl.int64)
    row = token * num_q_heads + head
    v_dims = tl.arange(0, V_PADDED)
    top = float("-inf")
    total = 0.0
    acc = tl.zeros([V_PADDED], tl.float32)
    for first in range(0, count, CHUNK):
        parts = first + tl.arange(0, CHUNK)
        if BALANCED:
            # the first program left it as its last rows, the others as their first
            slot = 2 * (first_program + parts) + tl.where(parts == 0, 1, 0)
            partial = slot * SLOT_ROWS + tile_row
        else:
            partial = row * num_splits + parts
        lse = tl.load(partial_lse_ptr + partial, mask=parts < count, other=float("-inf"))
        new_top = tl.maximum(top, tl.max(lse, 0))
        # subtract 0 where nothing was seen, since -inf - -inf is NaN
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(lse - shift)
        decay = tl.exp2(top - shift)
        # an empty part has weight 0 and is not read
        used = (weights > 0.0)[:, None] & (v_dims < V_HEAD_DIM)[None, :]
        partials = tl.load((partial_out_ptr + partial * V_HEAD_DIM)[:, None] + v_dims[None, :], mask=used, other=0.0)
        acc = acc * decay + tl.sum(partials * weights[:, None], 0)
        total = total * decay + tl.sum(weights, 0)
        top = new_top
    if HAS_SINKS:  # here and not in the parts: it counts once
        sink = tl.load(sinks_ptr + head) * LOG2_E
        new_top = tl.maximum(top, sink)
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        decay = tl.exp2(top - shift)
        acc = acc * decay
        total = total * decay + tl.exp2(sink - shift)
        top = new_top
    safe_total = tl.where(total > 0.0, total, 1.0)
    out_ptrs = out_ptr + token * stride_out_token + head * stride_out_head + v_dims
    tl.store(out_ptrs, (acc / safe_total).to(out_ptr.dtype.element_ty), mask=v_dims < V_HEAD_DIM)
    if WRITE_LSE:
        tl.store(lse_ptr + row, (top + tl.log2(safe_total)) * LN_2)


# --- the host's side ------------------------------------------------------------------------------------------


def launch(
    q,
    k_cache,
    v_cache,
    block_table,
    seq_lens,
    query_start_loc,
    max_seq_len,
    scale,
    alibi_slopes,
    sinks,
    tree_mask,  # uint8
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
    NUM_SPLITS: int,  # parts of a sequence's keys, where they are equal
    NUM_WARPS: int,
    NUM_STAGES: int,
):
    """Launches the attention of one batch. Shapes as above; the results are written in place."""
    num_seqs = seq_lens.shape[0]
    num_kv_heads = k_cache.shape[2]
    num_tiles = num_seqs if DECODE else q.shape[0] // TILE_QUERIES + num_seqs
    num_splits = max(1, triton.cdiv(max_seq_len, SPLIT_TOKENS)) if SPLIT_TOKENS > 0 else NUM_SPLITS
    if SPLITS:
        partial_rows = q.shape[0] * q.shape[1] * num_splits
        partial_out = torch.empty(partial_rows * V_HEAD_DIM, dtype=torch.float32, device=q.device)
        partial_lse = torch.empty(partial_rows, dtype=torch.float32, device=q.device)
    else:
        partial_out = None
        partial_lse = None
    if REDUCE_LAST:
        counter = torch.zeros(num_tiles * num_kv_heads * ROW_TILES, dtype=torch.int32, device=q.device)
    else:
        counter = None
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
    paged_attention_kernel[(num_tiles, num_kv_heads * ROW_TILES, num_splits)](
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
        counter_ptr=counter,
        unit_tile=None,
        unit_head=None,
        unit_first=None,
        unit_last=None,
        unit_whole=None,
        unit_slot=None,
        scale=scale,
        num_seqs=num_seqs,
        num_kv_heads=num_kv_heads,
        num_splits=num_splits,
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
    if SPLITS and not REDUCE_LAST:
        reduce_kernel[(q.shape[0], q.shape[1])](
            partial_out_ptr=partial_out,
            partial_lse_ptr=partial_lse,
            sinks_ptr=sinks,
            query_start_ptr=query_start_loc,
            tile_start_ptr=None,
            out_ptr=out,
            lse_ptr=lse,
            num_seqs=num_seqs,
            num_tiles=num_tiles,
            num_kv_heads=num_kv_heads,
            num_splits=num_splits,
            num_programs=None,
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
