"""Writing and moving cache blocks.

Shapes; strides are in elements, every last stride is 1:
    k, v              [num_tokens, NUM_KV_HEADS, HEAD_DIM | V_HEAD_DIM]
    q, rotated        [num_tokens, NUM_Q_HEADS, HEAD_DIM]
    k_cache, v_cache  [num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM | V_HEAD_DIM]; float8 as uint8 of the same bits,
                      int4 as uint8 of half as many columns, the even column in the low four bits
    scales, zeros     float32 [num_blocks, BLOCK_SIZE, NUM_KV_HEADS]
    slots             int64 [num_tokens]: block * BLOCK_SIZE + offset, or negative for a token to skip
    positions         int64 [num_tokens]
    cos, sin          [max_position, ROTARY_HALF]
    pairs             int64 [num_pairs, 2]: source and target block; no block is both

What a cache stores: value / scale + zero in float32, rounded to nearest even, saturated; NaN is 0 in integers.
"""

import triton
import triton.language as tl


@triton.jit
def float8_bits(x, STORED: tl.constexpr):
    """float32 within the range of a float8 as its bits, to nearest even, by integer arithmetic: for targets that
    have no such conversion, or one that rounds twice. Adding a number whose last place is the smallest subnormal
    rounds subnormals."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    if STORED == "float8_e4m3fn":  # bias 7, 3 mantissa bits: the smallest normal is 2^-6, the subnormals' step 2^-9
        normal = (size + 0x7FFFF + ((size >> 20) & 1) - (120 << 23)) >> 20
        subnormal = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.where(size < (121 << 23), subnormal, normal)
    else:  # bias 15, 2 mantissa bits: 2^-14 and 2^-16
        normal = (size + 0xFFFFF + ((size >> 21) & 1) - (112 << 23)) >> 21
        subnormal = (tl.abs(x) + 128.0).to(tl.int32, bitcast=True) - 0x43000000
        code = tl.where(size < (113 << 23), subnormal, normal)
    return tl.where(x == x, code, 0x7F) | ((bits >> 24) & 0x80)


@triton.jit
def quantised(
    x,
    scale,
    zero,
    STORED: tl.constexpr,  # the cache's type; "float" where storing converts to it
    LOWEST: tl.constexpr,  # the range of the cache's type
    HIGHEST: tl.constexpr,
    NATIVE_FLOAT8: tl.constexpr,  # the target converts float32 to float8 to nearest even
    SCALED: tl.constexpr,
    ZERO_POINTS: tl.constexpr,
):
    """float32 values as what the cache stores, one a column: float32 yet, or bits as uint8 or int32."""
    if SCALED:
        x = tl.div_rn(x, scale)
    if ZERO_POINTS:
        x = x + zero
    if STORED == "float":
        code = x
    elif STORED == "int8" or STORED == "int4":
        limited = tl.minimum(tl.maximum(x, LOWEST), HIGHEST)
        # 1.5 * 2^23: its last place is 1, so the sum is rounded to an integer, which is its low bits
        rounded = (limited + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
        code = tl.where(x == x, rounded, 0)
    else:
        limited = tl.where(x == x, tl.minimum(tl.maximum(x, LOWEST), HIGHEST), x)
        if NATIVE_FLOAT8 and STORED == "float8_e4m3fn":
            code = limited.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        elif NATIVE_FLOAT8:
            code = limited.to(tl.float8e5).to(tl.uint8, bitcast=True)
        else:
            code = float8_bits(x=limited, STORED=STORED)
    return code


@triton.jit
def turned(
    rows,
    dims,
    in_rows,
    cos_row,
    sin_row,
    ROTARY_HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    TILE_DIMS: tl.constexpr,
):
    """Columns `dims` of rows, rotated in float32 (RoFormer, arXiv 2104.09864) and rounded to the rows' dtype."""
    x = tl.load(rows + dims, mask=in_rows, other=0.0)
    if INTERLEAVED:
        angles = tl.arange(0, TILE_DIMS // 2)[None, :]
        turns = angles < ROTARY_HALF  # columns past them are not rotated
        cos = tl.load(cos_row + angles, mask=turns, other=1.0).to(tl.float32)
        sin = tl.load(sin_row + angles, mask=turns, other=0.0).to(tl.float32)
        even, odd = tl.split(tl.reshape(x.to(tl.float32), (TILE_HEADS, TILE_DIMS // 2, 2)))
        first = tl.where(turns, even * cos - odd * sin, even)
        second = tl.where(turns, odd * cos + even * sin, odd)
        rotated = tl.reshape(tl.join(first, second), (TILE_HEADS, TILE_DIMS))
    else:
        in_first = dims < ROTARY_HALF
        turns = dims < 2 * ROTARY_HALF  # columns past them are not rotated
        angles = tl.where(in_first, dims, dims - ROTARY_HALF)
        cos = tl.load(cos_row + angles, mask=turns, other=1.0).to(tl.float32)
        sin = tl.load(sin_row + angles, mask=turns, other=0.0).to(tl.float32)
        partner = tl.where(in_first, dims + ROTARY_HALF, dims - ROTARY_HALF)
        other = tl.load(rows + partner, mask=in_rows & turns, other=0.0).to(tl.float32)
        turned_x = x.to(tl.float32) * cos + tl.where(in_first, -other, other) * sin
        rotated = tl.where(turns, turned_x, x.to(tl.float32))
    return rotated.to(x.dtype)


@triton.jit
def stored_rows(
    x,
    to,
    in_rows,
    width,
    scale,
    zero,
    STORED: tl.constexpr,
    LOWEST: tl.constexpr,
    HIGHEST: tl.constexpr,
    NATIVE_FLOAT8: tl.constexpr,
    SCALED: tl.constexpr,
    ZERO_POINTS: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    TILE_DIMS: tl.constexpr,
):
    """Quantises rows x and stores their first `width` columns at `to`."""
    code = quantised(
        x=x.to(tl.float32),
        scale=scale,
        zero=zero,
        STORED=STORED,
        LOWEST=LOWEST,
        HIGHEST=HIGHEST,
        NATIVE_FLOAT8=NATIVE_FLOAT8,
        SCALED=SCALED,
        ZERO_POINTS=ZERO_POINTS,
    )
    if STORED == "int4":
        low, high = tl.split(tl.reshape(code, (TILE_HEADS, TILE_DIMS // 2, 2)))
        pairs = tl.arange(0, TILE_DIMS // 2)[None, :]
        code = (low & 15) | ((high & 15) << 4)
        tl.store(to + pairs, code.to(to.dtype.element_ty), mask=in_rows & (pairs < width // 2))
    else:
        dims = tl.arange(0, TILE_DIMS)[None, :]
        tl.store(to + dims, code.to(to.dtype.element_ty), mask=in_rows & (dims < width))


@triton.jit
def write_kv_kernel(
    q_ptr,
    rotated_ptr,
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    positions_ptr,
    cos_ptr,
    sin_ptr,
    k_scale_ptr,
    v_scale_ptr,
    k_zero_ptr,
    v_zero_ptr,
    max_position,
    stride_q_token,
    stride_q_head,
    stride_rotated_token,
    stride_rotated_head,
    stride_cos,
    stride_sin,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    stride_k_cache_block,
    stride_k_cache_slot,
    stride_k_cache_head,
    stride_v_cache_block,
    stride_v_cache_slot,
    stride_v_cache_head,
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
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,  # 0: K alone is written
    BLOCK_SIZE: tl.constexpr,  # tokens a cache block
    STORED: tl.constexpr,
    LOWEST: tl.constexpr,
    HIGHEST: tl.constexpr,
    NATIVE_FLOAT8: tl.constexpr,
    SCALED: tl.constexpr,
    ZERO_POINTS: tl.constexpr,
    ROTATE: tl.constexpr,  # q and k are rotated first
    ROTARY_HALF: tl.constexpr,  # half the columns that are rotated
    INTERLEAVED: tl.constexpr,  # pairs are (2i, 2i + 1), not (i, i + ROTARY_HALF)
    TILE_HEADS: tl.constexpr,  # rows a program handles
    TILE_DIMS: tl.constexpr,  # power of two that covers both head dims
):
    """Program (token, tile) handles TILE_HEADS heads of one token: q's where it is rotated, then those of k and v."""
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    dims = tl.arange(0, TILE_DIMS)[None, :]
    if ROTATE:
        position = tl.minimum(tl.maximum(tl.load(positions_ptr + token), 0), max_position - 1)
        cos_row = cos_ptr + position * stride_cos
        sin_row = sin_ptr + position * stride_sin
        if tile < tl.cdiv(NUM_Q_HEADS, TILE_HEADS):
            q_heads = (tile * TILE_HEADS + tl.arange(0, TILE_HEADS)).to(tl.int64)[:, None]
            in_q = (q_heads < NUM_Q_HEADS) & (dims < HEAD_DIM)
            q = turned(
                rows=q_ptr + token * stride_q_token + q_heads * stride_q_head,
                dims=dims,
                in_rows=in_q,
                cos_row=cos_row,
                sin_row=sin_row,
                ROTARY_HALF=ROTARY_HALF,
                INTERLEAVED=INTERLEAVED,
                TILE_HEADS=TILE_HEADS,
                TILE_DIMS=TILE_DIMS,
            )
            tl.store(rotated_ptr + token * stride_rotated_token + q_heads * stride_rotated_head + dims, q, mask=in_q)
            return
        tile = tile - tl.cdiv(NUM_Q_HEADS, TILE_HEADS)
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    heads = (tile * TILE_HEADS + tl.arange(0, TILE_HEADS)).to(tl.int64)[:, None]
    in_heads = heads < NUM_KV_HEADS
    if SCALED:
        k_scales = k_scale_ptr + block * stride_k_scale_block + offset * stride_k_scale_slot
        k_scale = tl.load(k_scales + heads * stride_k_scale_head, mask=in_heads, other=1.0)
    else:
        k_scale = None
    if ZERO_POINTS:
        k_zeros = k_zero_ptr + block * stride_k_zero_block + offset * stride_k_zero_slot
        k_zero = tl.load(k_zeros + heads * stride_k_zero_head, mask=in_heads, other=0.0)
    else:
        k_zero = None
    k_rows = k_ptr + token * stride_k_token + heads * stride_k_head
    in_k = in_heads & (dims < HEAD_DIM)
    if ROTATE:
        k = turned(
            rows=k_rows,
            dims=dims,
            in_rows=in_k,
            cos_row=cos_row,
            sin_row=sin_row,
            ROTARY_HALF=ROTARY_HALF,
            INTERLEAVED=INTERLEAVED,
            TILE_HEADS=TILE_HEADS,
            TILE_DIMS=TILE_DIMS,
        )
    else:
        k = tl.load(k_rows + dims, mask=in_k, other=0.0)
    stored_rows(
        x=k,
        to=k_cache_ptr + block * stride_k_cache_block + offset * stride_k_cache_slot + heads * stride_k_cache_head,
        in_rows=in_heads,
        width=HEAD_DIM,
        scale=k_scale,
        zero=k_zero,
        STORED=STORED,
        LOWEST=LOWEST,
        HIGHEST=HIGHEST,
        NATIVE_FLOAT8=NATIVE_FLOAT8,
        SCALED=SCALED,
        ZERO_POINTS=ZERO_POINTS,
        TILE_HEADS=TILE_HEADS,
        TILE_DIMS=TILE_DIMS,
    )
    if V_HEAD_DIM > 0:
        if SCALED:
            v_scales = v_scale_ptr + block * stride_v_scale_block + offset * stride_v_scale_slot
            v_scale = tl.load(v_scales + heads * stride_v_scale_head, mask=in_heads, other=1.0)
        else:
            v_scale = None
        if ZERO_POINTS:
            v_zeros = v_zero_ptr + block * stride_v_zero_block + offset * stride_v_zero_slot
            v_zero = tl.load(v_zeros + heads * stride_v_zero_head, mask=in_heads, other=0.0)
        else:
            v_zero = None
        v_rows = v_ptr + token * stride_v_token + heads * stride_v_head
        v = tl.load(v_rows + dims, mask=in_heads & (dims < V_HEAD_DIM), other=0.0)
        stored_rows(
            x=v,
            to=v_cache_ptr + block * stride_v_cache_block + offset * stride_v_cache_slot + heads * stride_v_cache_head,
            in_rows=in_heads,
            width=V_HEAD_DIM,
            scale=v_scale,
            zero=v_zero,
            STORED=STORED,
            LOWEST=LOWEST,
            HIGHEST=HIGHEST,
            NATIVE_FLOAT8=NATIVE_FLOAT8,
            SCALED=SCALED,
            ZERO_POINTS=ZERO_POINTS,
            TILE_HEADS=TILE_HEADS,
            TILE_DIMS=TILE_DIMS,
        )


@triton.jit
def copy_blocks_kernel(
    k_cache_ptr,
    v_cache_ptr,
    pairs_ptr,
    stride_k_block,
    stride_k_slot,
    stride_k_head,
    stride_v_block,
    stride_v_slot,
    stride_v_head,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    TILE_DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_SLOTS: tl.constexpr,  # slots a loop iteration moves
):
    """Program (pair, head) copies one head of one block."""
    pair = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    source = tl.load(pairs_ptr + 2 * pair)
    target = tl.load(pairs_ptr + 2 * pair + 1)
    dims = tl.arange(0, TILE_DIMS)
    for first in range(0, BLOCK_SIZE, TILE_SLOTS):
        slots = (first + tl.arange(0, TILE_SLOTS)).to(tl.int64)
        in_block = (slots < BLOCK_SIZE)[:, None]
        k_ptrs = k_cache_ptr + head * stride_k_head + (slots * stride_k_slot)[:, None] + dims[None, :]
        k_mask = in_block & (dims < HEAD_DIM)[None, :]
        k = tl.load(k_ptrs + source * stride_k_block, mask=k_mask)
        if V_HEAD_DIM > 0:
            v_ptrs = v_cache_ptr + head * stride_v_head + (slots * stride_v_slot)[:, None] + dims[None, :]
            v_mask = in_block & (dims < V_HEAD_DIM)[None, :]
            v = tl.load(v_ptrs + source * stride_v_block, mask=v_mask)
            tl.store(v_ptrs + target * stride_v_block, v, mask=v_mask)
        tl.store(k_ptrs + target * stride_k_block, k, mask=k_mask)


def launch_write_kv(
    k,
    v,
    k_cache,
    v_cache,
    slots,
    k_scale,
    v_scale,
    k_zero,
    v_zero,
    q,
    rotated,
    positions,
    cos,
    sin,
    NUM_Q_HEADS: int,
    NUM_KV_HEADS: int,
    HEAD_DIM: int,
    V_HEAD_DIM: int,
    BLOCK_SIZE: int,
    STORED: str,
    LOWEST: float,
    HIGHEST: float,
    NATIVE_FLOAT8: bool,
    SCALED: bool,
    ZERO_POINTS: bool,
    ROTATE: bool,
    ROTARY_HALF: int,
    INTERLEAVED: bool,
    TILE_HEADS: int,
    TILE_DIMS: int,
):
    """Rotates, quantises and stores the rows of a call of one token or more."""
    kv_tiles = triton.cdiv(NUM_KV_HEADS, TILE_HEADS)
    tiles = triton.cdiv(NUM_Q_HEADS, TILE_HEADS) + kv_tiles if ROTATE else kv_tiles
    write_kv_kernel[(k.shape[0], tiles)](
        q_ptr=q,
        rotated_ptr=rotated,
        k_ptr=k,
        v_ptr=v,
        k_cache_ptr=k_cache,
        v_cache_ptr=v_cache,
        slots_ptr=slots,
        positions_ptr=positions,
        cos_ptr=cos,
        sin_ptr=sin,
        k_scale_ptr=k_scale,
        v_scale_ptr=v_scale,
        k_zero_ptr=k_zero,
        v_zero_ptr=v_zero,
        max_position=cos.shape[0] if ROTATE else 0,
        stride_q_token=q.stride(0) if ROTATE else 0,
        stride_q_head=q.stride(1) if ROTATE else 0,
        stride_rotated_token=rotated.stride(0) if ROTATE else 0,
        stride_rotated_head=rotated.stride(1) if ROTATE else 0,
        stride_cos=cos.stride(0) if ROTATE else 0,
        stride_sin=sin.stride(0) if ROTATE else 0,
        stride_k_token=k.stride(0),
        stride_k_head=k.stride(1),
        stride_v_token=v.stride(0) if V_HEAD_DIM > 0 else 0,
        stride_v_head=v.stride(1) if V_HEAD_DIM > 0 else 0,
        stride_k_cache_block=k_cache.stride(0),
        stride_k_cache_slot=k_cache.stride(1),
        stride_k_cache_head=k_cache.stride(2),
        stride_v_cache_block=v_cache.stride(0) if V_HEAD_DIM > 0 else 0,
        stride_v_cache_slot=v_cache.stride(1) if V_HEAD_DIM > 0 else 0,
        stride_v_cache_head=v_cache.stride(2) if V_HEAD_DIM > 0 else 0,
        stride_k_scale_block=k_scale.stride(0) if SCALED else 0,
        stride_k_scale_slot=k_scale.stride(1) if SCALED else 0,
        stride_k_scale_head=k_scale.stride(2) if SCALED else 0,
        stride_v_scale_block=v_scale.stride(0) if SCALED and V_HEAD_DIM > 0 else 0,
        stride_v_scale_slot=v_scale.stride(1) if SCALED and V_HEAD_DIM > 0 else 0,
        stride_v_scale_head=v_scale.stride(2) if SCALED and V_HEAD_DIM > 0 else 0,
        stride_k_zero_block=k_zero.stride(0) if ZERO_POINTS else 0,
        stride_k_zero_slot=k_zero.stride(1) if ZERO_POINTS else 0,
        stride_k_zero_head=k_zero.stride(2) if ZERO_POINTS else 0,
        stride_v_zero_block=v_zero.stride(0) if ZERO_POINTS and V_HEAD_DIM > 0 else 0,
        stride_v_zero_slot=v_zero.stride(1) if ZERO_POINTS and V_HEAD_DIM > 0 else 0,
        stride_v_zero_head=v_zero.stride(2) if ZERO_POINTS and V_HEAD_DIM > 0 else 0,
        NUM_Q_HEADS=NUM_Q_HEADS,
        NUM_KV_HEADS=NUM_KV_HEADS,
        HEAD_DIM=HEAD_DIM,
        V_HEAD_DIM=V_HEAD_DIM,
        BLOCK_SIZE=BLOCK_SIZE,
        STORED=STORED,
        LOWEST=LOWEST,
        HIGHEST=HIGHEST,
        NATIVE_FLOAT8=NATIVE_FLOAT8,
        SCALED=SCALED,
        ZERO_POINTS=ZERO_POINTS,
        ROTATE=ROTATE,
        ROTARY_HALF=ROTARY_HALF,
        INTERLEAVED=INTERLEAVED,
        TILE_HEADS=TILE_HEADS,
        TILE_DIMS=TILE_DIMS,
        num_warps=4,
        enable_fp_fusion=False,  # a rotation is two products and a sum, each rounded, as on every other target
    )


def launch_copy_blocks(
    k_cache,
    v_cache,
    pairs,
    HEAD_DIM: int,
    V_HEAD_DIM: int,
    TILE_DIMS: int,
    BLOCK_SIZE: int,
    TILE_SLOTS: int,
):
    """Copies each pair's source block over its target block."""
    copy_blocks_kernel[(pairs.shape[0], k_cache.shape[2])](
        k_cache_ptr=k_cache,
        v_cache_ptr=v_cache,
        pairs_ptr=pairs,
        stride_k_block=k_cache.stride(0),
        stride_k_slot=k_cache.stride(1),
        stride_k_head=k_cache.stride(2),
        stride_v_block=v_cache.stride(0) if V_HEAD_DIM > 0 else 0,
        stride_v_slot=v_cache.stride(1) if V_HEAD_DIM > 0 else 0,
        stride_v_head=v_cache.stride(2) if V_HEAD_DIM > 0 else 0,
        HEAD_DIM=HEAD_DIM,
        V_HEAD_DIM=V_HEAD_DIM,
        TILE_DIMS=TILE_DIMS,
        BLOCK_SIZE=BLOCK_SIZE,
        TILE_SLOTS=TILE_SLOTS,
    )
