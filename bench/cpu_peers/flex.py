"""FlexAttention over torch's paged cache (torch.nn.attention.experimental), compiled."""

from __future__ import annotations

import torch

from cpu_peers.cell import Cell, Given, Prepared, Unsupported, memory, queries


def version() -> str:
    import torch.nn.attention.experimental._paged_attention  # noqa: F401

    return torch.__version__


def prepare(cell: Cell, sets: int, content: Given | None) -> Prepared:
    """One batch, whatever `sets`: the compiled function is bound to one page table. A small cell may then find its keys
    in the cache, which favours it."""
    from torch.nn.attention.experimental._paged_attention import PagedAttention
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention, noop_mask

    if cell.new > 1:
        raise Unsupported("measured for decode")
    size = cell.block_size
    pages = cell.batch * -(-cell.context // size)
    cache = PagedAttention(pages, size, cell.batch, device="cpu")
    cache.empty_pages = torch.randperm(pages).tolist()
    shape = (1, cell.num_kv_heads, pages * size, cell.head_dim)
    k_cache, v_cache = memory(shape, cell.torch_dtype), memory(shape, cell.torch_dtype)
    for b in range(cell.batch):
        cache.reserve(torch.tensor(b), torch.tensor(cell.context))
    if content is not None:
        places = torch.arange(cell.context).repeat(cell.batch, 1)
        k, v = content.k.transpose(1, 2), content.v.transpose(1, 2)
        cache.assign(torch.arange(cell.batch), places, k, v, k_cache, v_cache)
    lens = torch.full((cell.batch,), cell.context)
    logical = create_block_mask(noop_mask, cell.batch, 1, 1, cell.context, device="cpu", BLOCK_SIZE=(size, size))
    mask = cache.convert_logical_block_mask(logical, kv_len=lens)
    score = cache.get_score_mod(None, kv_len=lens)
    torch._dynamo.reset()  # after eight shapes of one function it would no longer compile
    attend = torch.compile(flex_attention, dynamic=False)
    q = queries(cell, content).transpose(1, 2)
    kept: list[torch.Tensor] = []

    def run(i: int) -> None:
        with torch.no_grad():
            kept[:] = [attend(q, k_cache, v_cache, block_mask=mask, score_mod=score, enable_gqa=True)]

    return Prepared(run, lambda: kept[0].transpose(1, 2), "compiled; one batch, not cold where it fits a cache")
