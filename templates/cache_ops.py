"""Writing and moving cache blocks.

Shapes; strides are in elements, every last stride is 1:
    k, v              [num_tokens, num_kv_heads, HEAD_DIM | V_HEAD_DIM]
    k_cache, v_cache  [num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_DIM | V_HEAD_DIM]
    slots             int64 [num_tokens]: block * BLOCK_SIZE + offset, or -1 for a token to skip
    pairs             int64 [num_pairs, 2]: source and target block; no block is both
"""

import triton
import triton.language as tl


@triton.jit
def write_kv_kernel(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    stride_k_block,
    stride_k_slot,
    stride_k_cache_head,
    stride_v_block,
    stride_v_slot,
    stride_v_cache_head,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    TILE_DIMS: tl.constexpr,  # power of two that covers both head dims
    BLOCK_SIZE: tl.constexpr,  # tokens a cache block
):
    """Program (token, head) stores one row of k and one of v."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    dims = tl.arange(0, TILE_DIMS)
    k = tl.load(k_ptr + token * stride_k_token + head * stride_k_head + dims, mask=dims < HEAD_DIM)
    v = tl.load(v_ptr + token * stride_v_token + head * stride_v_head + dims, mask=dims < V_HEAD_DIM)
    k_row = k_cache_ptr + block * stride_k_block + offset * stride_k_slot + head * stride_k_cache_head
    v_row = v_cache_ptr + block * stride_v_block + offset * stride_v_slot + head * stride_v_cache_head
    tl.store(k_row + dims, k.to(k_cache_ptr.dtype.element_ty), mask=dims < HEAD_DIM)
    tl.store(v_row + dims, v.to(v_cache_ptr.dtype.element_ty), mask=dims < V_HEAD_DIM)


@triton.jit
def copy_blocks_kernel(
    k_cache_ptr,
    v_cache_ptr,
    pairs_ptr,
    stride_k_block,
    stride_k_slot,
    stride_k_cache_head,
    stride_v_block,
    stride_v_slot,
    stride_v_cache_head,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    TILE_DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_SLOTS: tl.constexpr,  # slots a loop iteration moves
):
    """Program (pair, head) copies one head of one block."""
    pair = tl.program_id(0)
    head = tl.program_id(1)
    source = tl.load(pairs_ptr + 2 * pair)
    target = tl.load(pairs_ptr + 2 * pair + 1)
    dims = tl.arange(0, TILE_DIMS)
    for first in range(0, BLOCK_SIZE, TILE_SLOTS):
        slots = first + tl.arange(0, TILE_SLOTS)
        in_block = (slots < BLOCK_SIZE)[:, None]
        k_ptrs = k_cache_ptr + head * stride_k_cache_head + (slots * stride_k_slot)[:, None] + dims[None, :]
        v_ptrs = v_cache_ptr + head * stride_v_cache_head + (slots * stride_v_slot)[:, None] + dims[None, :]
        k_mask = in_block & (dims < HEAD_DIM)[None, :]
        v_mask = in_block & (dims < V_HEAD_DIM)[None, :]
        k = tl.load(k_ptrs + source * stride_k_block, mask=k_mask)
        v = tl.load(v_ptrs + source * stride_v_block, mask=v_mask)
        tl.store(k_ptrs + target * stride_k_block, k, mask=k_mask)
        tl.store(v_ptrs + target * stride_v_block, v, mask=v_mask)


def launch_write_kv(k, v, k_cache, v_cache, slots, HEAD_DIM: int, V_HEAD_DIM: int, TILE_DIMS: int, BLOCK_SIZE: int):
    """Stores k and v at their slots."""
    write_kv_kernel[(k.shape[0], k.shape[1])](
        k_ptr=k,
        v_ptr=v,
        k_cache_ptr=k_cache,
        v_cache_ptr=v_cache,
        slots_ptr=slots,
        stride_k_token=k.stride(0),
        stride_k_head=k.stride(1),
        stride_v_token=v.stride(0),
        stride_v_head=v.stride(1),
        stride_k_block=k_cache.stride(0),
        stride_k_slot=k_cache.stride(1),
        stride_k_cache_head=k_cache.stride(2),
        stride_v_block=v_cache.stride(0),
        stride_v_slot=v_cache.stride(1),
        stride_v_cache_head=v_cache.stride(2),
        HEAD_DIM=HEAD_DIM,
        V_HEAD_DIM=V_HEAD_DIM,
        TILE_DIMS=TILE_DIMS,
        BLOCK_SIZE=BLOCK_SIZE,
        num_warps=1,  # one row of a head: at most a few hundred elements
    )


def launch_copy_blocks(
    k_cache, v_cache, pairs, HEAD_DIM: int, V_HEAD_DIM: int, TILE_DIMS: int, BLOCK_SIZE: int, TILE_SLOTS: int
):
    """Copies each pair's source block over its target block."""
    copy_blocks_kernel[(pairs.shape[0], k_cache.shape[2])](
        k_cache_ptr=k_cache,
        v_cache_ptr=v_cache,
        pairs_ptr=pairs,
        stride_k_block=k_cache.stride(0),
        stride_k_slot=k_cache.stride(1),
        stride_k_cache_head=k_cache.stride(2),
        stride_v_block=v_cache.stride(0),
        stride_v_slot=v_cache.stride(1),
        stride_v_cache_head=v_cache.stride(2),
        HEAD_DIM=HEAD_DIM,
        V_HEAD_DIM=V_HEAD_DIM,
        TILE_DIMS=TILE_DIMS,
        BLOCK_SIZE=BLOCK_SIZE,
        TILE_SLOTS=TILE_SLOTS,
    )
