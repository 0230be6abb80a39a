"""Hostile batches for kernel tests: whatever a kernel may not look at is poison.

Every slot that holds no token is NaN or infinite, every block-table entry past the used ones is far out of range,
blocks lie in random places, q is a slice of something wider, and ragged batches end in rows that belong to nobody.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pagegen.reference import reference_attention
from pagegen.spec import AttentionSpec, CacheLayout
from pagegen.targets.call import AttentionCall

# How K and V lie in memory; the tensors' logical shape is always [num_blocks, block_size, Hkv, D].
ORDERS = {
    "NHD": "NHD",
    "HND": "HND",
    "pool": "NHD",  # one [num_blocks, 2, block_size, Hkv, D] tensor, K and V interleaved by block
    "packed": "HND",  # one [num_blocks, Hkv, block_size, D + Dv + 8] tensor, as vLLM packs it, with padding
}
GARBAGE = (2**30, -5, 2**31 - 1, -7)
POISON = (float("nan"), float("inf"), -float("inf"))


@dataclass(frozen=True)
class Batch:
    """The operands of one call. `sequences` holds (tokens in the cache, queries) of each sequence."""

    spec: AttentionSpec
    layout: CacheLayout
    order: str
    sequences: tuple[tuple[int, int], ...]
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None

    def kwargs(self) -> dict[str, Any]:
        """The keyword arguments of `pagegen.reference_attention` and `pagegen.paged_attention`."""
        return {
            "q": self.q,
            "k_cache": self.k_cache,
            "v_cache": self.v_cache,
            "block_table": self.block_table,
            "seq_lens": self.seq_lens,
            "query_start_loc": self.query_start_loc,
            "scale": self.spec.scale,
            "causal": self.spec.causal,
            "window": self.spec.window,
            "logit_softcap": self.spec.logit_softcap,
            "alibi_slopes": self.alibi_slopes,
            "sinks": self.sinks,
        }

    def expected(self) -> tuple[Tensor, Tensor]:
        """(out, lse) of the float64 reference, out not rounded to q's dtype."""
        exact = replace(self, q=self.q.double())
        return reference_attention(**exact.kwargs(), return_lse=True)  # type: ignore[return-value]

    def call(self) -> AttentionCall:
        """A call as the operator makes it: `out` is uninitialised (here: NaN) for decode, zeroed otherwise."""
        ragged = self.query_start_loc is not None
        shape = self.q.shape[:2]
        out = self.q.new_full((*shape, self.spec.v_head_dim), 0.0 if ragged else float("nan"))
        lse = self.q.new_full(shape, -float("inf") if ragged else float("nan"), dtype=torch.float32)
        return AttentionCall(
            q=self.q,
            k_cache=self.k_cache,
            v_cache=self.v_cache,
            block_table=self.block_table,
            seq_lens=self.seq_lens,
            query_start_loc=self.query_start_loc,
            max_query_len=max(n for _, n in self.sequences),
            max_seq_len=max(n for n, _ in self.sequences),
            scale=self.spec.scale,
            alibi_slopes=self.alibi_slopes,
            sinks=self.sinks,
            out=out,
            lse=lse,
        )

    def permuted(self, seed: int = 1) -> Batch:
        """The same batch with its blocks in other places. A kernel must give the same bits."""
        num_blocks = self.k_cache.shape[0]
        moved_to = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed))
        k_cache, v_cache = _caches(self.spec, num_blocks, self.layout.block_size, self.order)
        k_cache[moved_to], v_cache[moved_to] = self.k_cache.cpu(), self.v_cache.cpu()
        table = self.block_table.cpu().clone()
        for s, (length, _) in enumerate(self.sequences):
            used = self.layout.blocks_for(length)
            table[s, :used] = moved_to[table[s, :used].long()].int()
        device = self.q.device
        return replace(self, k_cache=k_cache.to(device), v_cache=v_cache.to(device), block_table=table.to(device))


def make_batch(
    spec: AttentionSpec,
    sequences: list[tuple[int, int]],
    *,
    block_size: int,
    order: str = "NHD",
    seed: int = 0,
    magnitude: float = 1.0,
    padded_rows: int = 3,
    device: str = "cpu",
) -> Batch:
    """A batch of (tokens in the cache, queries) sequences. With one query each it is a decode batch, without
    query_start_loc; otherwise a ragged one that ends in `padded_rows` rows of NaN. q and k are normal with standard
    deviation `magnitude`, v with 1."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    layout = CacheLayout(block_size=block_size, order=ORDERS[order])
    used = [layout.blocks_for(length) for length, _ in sequences]
    num_blocks = sum(used) + 3
    places = torch.randperm(num_blocks, generator=generator).int()
    k_cache, v_cache = _caches(spec, num_blocks, block_size, order)
    table = _garbage(len(sequences), max([*used, 1]))
    for s, (length, _) in enumerate(sequences):
        table[s, : used[s]] = places[sum(used[:s]) : sum(used[: s + 1])]
        token = torch.arange(length)
        block, slot = table[s, token // block_size].long(), token % block_size
        k_cache[block, slot] = (normal(length, spec.num_kv_heads, spec.head_dim) * magnitude).to(spec.kv_dtype)
        v_cache[block, slot] = normal(length, spec.num_kv_heads, spec.v_head_dim).to(spec.kv_dtype)

    counts = torch.tensor([n for _, n in sequences])
    decode = bool((counts == 1).all())
    total = int(counts.sum()) + (0 if decode else padded_rows)
    # a slice of something wider, as q is where one matrix product gives q, k and v
    wide = torch.full((total, spec.num_q_heads + 1, spec.head_dim + 8), float("nan"), dtype=spec.q_dtype)
    q = wide[:, 1:, : spec.head_dim]
    rows = int(counts.sum())
    q[:rows] = (normal(rows, spec.num_q_heads, spec.head_dim) * magnitude).to(spec.q_dtype)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).int()
    slopes = 2.0 ** -(8.0 * torch.arange(1, spec.num_q_heads + 1) / spec.num_q_heads) if spec.alibi else None

    def there(value: Tensor | None) -> Any:
        return None if value is None else value.to(device)

    return Batch(
        spec=spec,
        layout=layout,
        order=order,
        sequences=tuple(sequences),
        q=q.to(device),
        k_cache=k_cache.to(device),
        v_cache=v_cache.to(device),
        block_table=table.to(device),
        seq_lens=torch.tensor([length for length, _ in sequences], dtype=torch.int32, device=device),
        query_start_loc=None if decode else starts.to(device),
        alibi_slopes=there(slopes),
        sinks=there(normal(spec.num_q_heads) + 1.0 if spec.sinks else None),
    )


def _garbage(num_seqs: int, width: int) -> Tensor:
    """A block table [num_seqs, width + 2] with rows farther apart than they are long, full of impossible ids."""
    size = num_seqs * (width + 5)
    return torch.tensor((GARBAGE * (size // 4 + 1))[:size], dtype=torch.int32).view(num_seqs, width + 5)[:, : width + 2]


def _caches(spec: AttentionSpec, num_blocks: int, block_size: int, order: str) -> tuple[Tensor, Tensor]:
    """Poisoned K and V caches."""
    heads, k_dim, v_dim = spec.num_kv_heads, spec.head_dim, spec.v_head_dim

    def poisoned(*shape: int) -> Tensor:
        size = torch.Size(shape).numel()
        return torch.tensor(POISON, dtype=spec.kv_dtype).repeat(size // 3 + 1)[:size].view(shape)

    if order == "NHD":
        return poisoned(num_blocks, block_size, heads, k_dim), poisoned(num_blocks, block_size, heads, v_dim)
    if order == "HND":
        k_cache, v_cache = (poisoned(num_blocks, heads, block_size, dim) for dim in (k_dim, v_dim))
        return k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    if order == "pool":
        pool = poisoned(num_blocks, 2, block_size, heads, max(k_dim, v_dim) + 1)
        return pool[:, 0, ..., :k_dim], pool[:, 1, ..., 1 : v_dim + 1]
    packed = poisoned(num_blocks, heads, block_size, k_dim + v_dim + 8).transpose(1, 2)
    return packed[..., :k_dim], packed[..., k_dim : k_dim + v_dim]


def compare(out: Tensor, lse: Tensor | None, expected_out: Tensor, expected_lse: Tensor, dtype: torch.dtype) -> None:
    """Raises AssertionError unless (out, lse) are the reference's to rounding. `dtype` is q's: a kernel
    rounds nothing else to 16 bits unless q and the cache are both bf16.

    16-bit: an element may be off by one eps of itself (half of it is the rounding of the result) and two eps of its
    row's root mean square (softmax weights rounded to bf16). float32: 64 times that, since a score
    of 16 is a sum of products rounded relative to their own size (torch's SDPA is as far off on the same inputs).
    lse is float32 whatever the dtype, and off by 4e-6 at most, and by 2e-6 of itself.
    """
    factor = 64.0 if dtype == torch.float32 else 1.0
    out64, wanted = out.double(), expected_out.double()
    assert not out64.isnan().any() or wanted.isnan().any(), "NaN where the reference has none"
    row = wanted.square().mean(dim=-1, keepdim=True).sqrt()
    allowed = factor * torch.finfo(dtype).eps * (wanted.abs() + 2.0 * row)
    excess = ((out64 - wanted).abs() - allowed).nan_to_num(0.0)
    worst = int(excess.argmax())
    assert excess.flatten()[worst] <= 0, (
        f"out differs by {(out64 - wanted).abs().flatten()[worst]:.3g}, allowed {allowed.flatten()[worst]:.3g}, "
        f"at {[int(i) for i in torch.unravel_index(torch.tensor(worst), out.shape)]}"
    )
    if lse is not None:
        torch.testing.assert_close(lse.double(), expected_lse.double(), atol=4e-6, rtol=2e-6)
