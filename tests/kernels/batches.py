"""Hostile batches for kernel tests: whatever a kernel may not look at is poison.

Every slot that holds no token is NaN or infinite (in integer caches: its scale and zero point are), every block-table
entry past the used ones is far out of range, blocks lie in random places, q is a slice of something wider, and ragged
batches end in rows that belong to nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pagegen.reference import reference_attention
from pagegen.spec import AttentionSpec, CacheLayout
from pagegen.spec.dtypes import INT4, dtype_name
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
BYTE_POISON = {  # of one-byte caches: NaN where there is one, else the largest values
    torch.float8_e4m3fn: (0x7F, 0xFF, 0x7F),
    torch.float8_e5m2: (0x7F, 0x7C, 0xFC),
    torch.int8: (0x7F, 0x80, 0x81),
    INT4: (0x77, 0x88, 0x78),
}
K_SCALE, V_SCALE = 0.37, 1.9  # different ones, so that mixing them up shows
# Quantisation steps a standard deviation, where there are scales; unscaled integers are small ones
STEPS = {torch.int8: 40.0, INT4: 2.5}
# (batch, position of a query) -> the keys [low, high) that the query can attend
Range = Callable[[int, int], tuple[int, int]]


@dataclass(frozen=True)
class Batch:
    """The operands of one call. `sequences` holds (tokens in the cache, queries) of each sequence. Scales are as a
    user gives them: [1], [Hkv] or [num_blocks, block_size, Hkv]. A shared cache has no `v_cache`."""

    spec: AttentionSpec
    layout: CacheLayout
    order: str
    sequences: tuple[tuple[int, int], ...]
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor | None
    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    k_zero: Tensor | None = None
    v_zero: Tensor | None = None
    tree_mask: Tensor | None = None
    captures: tuple[Tensor, ...] = ()

    def kwargs(self) -> dict[str, Any]:
        """The keyword arguments of `pagegen.reference_attention` and `pagegen.paged_attention`."""
        shared = {"v_head_dim": self.spec.v_head_dim} if self.spec.shared_kv else {}
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
            "k_scale": self.k_scale,
            "v_scale": self.v_scale,
            "k_zero": self.k_zero,
            "v_zero": self.v_zero,
            "tree_mask": self.tree_mask,
            "score_mod": self.spec.score_mod,
            "mask_mod": self.spec.mask_mod,
            "kv_dtype": dtype_name(self.spec.kv_dtype),
            **shared,
        }

    def expected(self) -> tuple[Tensor, Tensor]:
        """(out, lse) of the float64 reference, out not rounded to q's dtype."""
        exact = replace(self, q=self.q.double())
        captures = list(self.captures) or None  # not those that another test registered under the same name since
        return reference_attention(**exact.kwargs(), captures=captures, return_lse=True)  # type: ignore[return-value]

    def call(self) -> AttentionCall:
        """A call as the operator makes it: `out` is uninitialised (here: NaN) for decode, zeroed otherwise."""
        ragged = self.query_start_loc is not None
        shape = self.q.shape[:2]
        out = self.q.new_full((*shape, self.spec.v_head_dim), 0.0 if ragged else float("nan"))
        lse = self.q.new_full(shape, -float("inf") if ragged else float("nan"), dtype=torch.float32)
        v_cache = self.v_cache
        if v_cache is None:
            v_cache = self.k_cache if self.spec.kv_dtype == INT4 else self.k_cache[..., : self.spec.v_head_dim]
        # the values of a shared cache are dequantised as its keys are
        value_scales = (self.k_scale, self.k_zero) if self.spec.shared_kv else (self.v_scale, self.v_zero)
        return AttentionCall(
            q=self.q,
            k_cache=self.k_cache,
            v_cache=v_cache,
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
            k_scale=self._per_token(self.k_scale),
            v_scale=self._per_token(value_scales[0]),
            k_zero=self._per_token(self.k_zero),
            v_zero=self._per_token(value_scales[1]),
            tree_mask=self.tree_mask,
            captures=self.captures,
        )

    def _per_token(self, scale: Tensor | None) -> Tensor | None:
        return None if scale is None else scale.expand(self.k_cache.shape[:3])

    def permuted(self, seed: int = 1) -> Batch:
        """The same batch with its blocks in other places. A kernel must give the same bits."""
        num_blocks = self.k_cache.shape[0]
        moved_to = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed))
        moved: dict[str, Any] = {}
        fresh = _caches(self.spec, num_blocks, self.layout.block_size, self.order)
        for name, new in zip(("k_cache", "v_cache"), fresh, strict=True):
            old = getattr(self, name)
            if new is not None:
                _stored(new)[moved_to] = _stored(old).cpu()
                moved[name] = new.to(old.device)
        for name in ("k_scale", "v_scale", "k_zero", "v_zero"):
            old = getattr(self, name)
            if old is not None and old.dim() == 3:
                moved[name] = torch.empty_like(old)
                moved[name][moved_to.to(old.device)] = old
        table = self.block_table.cpu().clone()
        for s, (length, _) in enumerate(self.sequences):
            used = self.layout.blocks_for(length)
            table[s, :used] = moved_to[table[s, :used].long()].int()
        return replace(self, block_table=table.to(self.q.device), **moved)

    def poisoned_outside(self, mask_range: Range | None = None) -> Batch:
        """A copy in which the blocks that no query of their sequence can attend are poison, and their block-table
        entries garbage. Which those are follows from `causal`, `window` and `mask_range`. The reference cannot read
        it: compare with this batch's own `expected`."""
        copy = self.permuted()
        table = copy.block_table.cpu()
        blank = _caches(self.spec, 1, self.layout.block_size, self.order)
        for s, (length, queries) in enumerate(self.sequences):
            rows = [self._row_range(s, q, mask_range) for q in range(length - queries, length)]
            rows = [(low, high) for low, high in rows if low < high]
            begin, end = min((low for low, _ in rows), default=0), max((high for _, high in rows), default=0)
            for i in range(self.layout.blocks_for(length)):
                if i * self.layout.block_size < end and (i + 1) * self.layout.block_size > begin:
                    continue
                for cache, poison in zip((copy.k_cache, copy.v_cache), blank, strict=True):
                    if cache is not None and poison is not None:
                        _stored(cache)[int(table[s, i])] = _stored(poison)[0].to(cache.device)
                for scale in (copy.k_scale, copy.v_scale, copy.k_zero, copy.v_zero):
                    if scale is not None and scale.dim() == 3:
                        scale[int(table[s, i])] = float("nan")
                table[s, i] = GARBAGE[i % len(GARBAGE)]
        return replace(copy, block_table=table.to(self.q.device))

    def _row_range(self, s: int, q_pos: int, mask_range: Range | None) -> tuple[int, int]:
        length, _ = self.sequences[s]
        low = max(0, q_pos - self.spec.window + 1) if self.spec.window else 0
        high = q_pos + 1 if self.spec.causal else length
        if mask_range is not None:
            more_low, more_high = mask_range(s, q_pos)
            low, high = max(low, more_low), min(high, more_high)
        return low, high


def make_batch(
    spec: AttentionSpec,
    sequences: list[tuple[int, int]],
    *,
    block_size: int,
    order: str = "NHD",
    seed: int = 0,
    magnitude: float = 1.0,
    padded_rows: int = 3,
    tree: bool = False,
    captures: tuple[Tensor, ...] = (),
    device: str = "cpu",
) -> Batch:
    """A batch of (tokens in the cache, queries) sequences. With one query each it is a decode batch, without
    query_start_loc; otherwise a ragged one that ends in `padded_rows` rows of NaN. q and k are normal with standard
    deviation `magnitude`, v with 1 (times K_SCALE, V_SCALE and a random factor where the cache has scales). `tree`
    makes a tree mask, `captures` are the tensors that the spec's score and mask functions captured."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    layout = CacheLayout(block_size=block_size, order=ORDERS[order])
    used = [layout.blocks_for(length) for length, _ in sequences]
    num_blocks = sum(used) + 3
    places = torch.randperm(num_blocks, generator=generator).int()
    caches = _caches(spec, num_blocks, block_size, order)
    table = _garbage(len(sequences), max([*used, 1]))
    zeros = _zeros(spec, num_blocks, block_size)
    for s, (length, _) in enumerate(sequences):
        table[s, : used[s]] = places[sum(used[:s]) : sum(used[: s + 1])]
        token = torch.arange(length)
        block, slot = table[s, token // block_size].long(), token % block_size
        for cache, zero, dim, size in zip(caches, zeros, (spec.head_dim, spec.v_head_dim), (magnitude, 1), strict=True):
            if cache is None:
                continue
            values = normal(length, spec.num_kv_heads, dim) * size
            if zero is not None:
                zero[block, slot] = torch.rand(length, spec.num_kv_heads, generator=generator) * 6.0 - 3.0
            _stored(cache)[block, slot] = _quantised(values, spec, None if zero is None else zero[block, slot])

    counts = torch.tensor([n for _, n in sequences])
    decode = bool((counts == 1).all()) and not tree
    total = int(counts.sum()) + (0 if decode else padded_rows)
    # a slice of something wider, as q is where one matrix product gives q, k and v
    wide = torch.full((total, spec.num_q_heads + 1, spec.head_dim + 8), float("nan"), dtype=spec.q_dtype)
    q = wide[:, 1:, : spec.head_dim]
    rows = int(counts.sum())
    q[:rows] = (normal(rows, spec.num_q_heads, spec.head_dim) * magnitude).to(spec.q_dtype)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).int()
    slopes = 2.0 ** -(8.0 * torch.arange(1, spec.num_q_heads + 1) / spec.num_q_heads) if spec.alibi else None
    sinks = normal(spec.num_q_heads) + 1.0 if spec.sinks else None
    written = _written(table, sequences, num_blocks, block_size)
    k_scale, v_scale = (
        None if cache is None else _scale(spec, size, written, generator)
        for cache, size in zip(caches, (K_SCALE, V_SCALE), strict=True)
    )

    def there(value: Tensor | None) -> Any:
        return None if value is None else value.to(device)

    return Batch(
        spec=spec,
        layout=layout,
        order=order,
        sequences=tuple(sequences),
        q=q.to(device),
        k_cache=there(caches[0]),
        v_cache=there(caches[1]),
        block_table=table.to(device),
        seq_lens=torch.tensor([length for length, _ in sequences], dtype=torch.int32, device=device),
        query_start_loc=None if decode else starts.to(device),
        alibi_slopes=there(slopes),
        sinks=there(sinks),
        k_scale=there(k_scale),
        v_scale=there(v_scale),
        k_zero=there(zeros[0]),
        v_zero=there(zeros[1]),
        tree_mask=there(_tree(sequences, total, generator) if tree else None),
        captures=tuple(capture.to(device) for capture in captures),
    )


def _quantised(values: Tensor, spec: AttentionSpec, zero: Tensor | None) -> Tensor:
    """`values` [length, Hkv, D] as `_stored` holds them; `zero` [length, Hkv] is added first."""
    if spec.kv_dtype not in STEPS:
        return _stored(values.to(spec.kv_dtype))
    low, high = (-8, 7) if spec.kv_dtype == INT4 else (-128, 127)
    steps = 1.0 if spec.kv_scale_granularity == "none" else STEPS[spec.kv_dtype]
    integers = (values * steps + (0.0 if zero is None else zero[..., None])).round().clamp(low, high).to(torch.int8)
    if spec.kv_dtype != INT4:
        return _stored(integers)
    nibbles = integers.view(torch.uint8) & 0xF
    return nibbles[..., ::2] | nibbles[..., 1::2] << 4


def _zeros(spec: AttentionSpec, num_blocks: int, block_size: int) -> tuple[Tensor | None, Tensor | None]:
    """Poisoned zero points of K and V, where the spec has them."""
    shape = (num_blocks, block_size, spec.num_kv_heads)
    if not spec.kv_zero_points:
        return None, None
    return _poison(shape, torch.float32), None if spec.shared_kv else _poison(shape, torch.float32)


def _scale(spec: AttentionSpec, size: float, written: Tensor, generator: torch.Generator) -> Tensor | None:
    """Scales around `size` as a user gives them; those of slots where nothing is `written` are poison."""
    shapes = {"tensor": (1,), "head": (spec.num_kv_heads,), "token_head": (*written.shape, spec.num_kv_heads)}
    if spec.kv_scale_granularity == "none":
        return None
    shape = shapes[spec.kv_scale_granularity]
    factor = 2.0 ** (torch.rand(shape, generator=generator) * 2.0 - 1.0) / STEPS.get(spec.kv_dtype, 1.0)
    if len(shape) < 3:
        return size * factor
    return torch.where(written[..., None], size * factor, _poison(shape, torch.float32))


def _written(table: Tensor, sequences: list[tuple[int, int]], num_blocks: int, block_size: int) -> Tensor:
    """bool [num_blocks, block_size]: which slots hold a token."""
    written = torch.zeros(num_blocks, block_size, dtype=torch.bool)
    for s, (length, _) in enumerate(sequences):
        token = torch.arange(length)
        written[table[s, token // block_size].long(), token % block_size] = True
    return written


def _tree(sequences: list[tuple[int, int]], total: int, generator: torch.Generator) -> Tensor:
    """A random tree a sequence: a query sees itself and its ancestors, less a tenth of them, and some later ones
    (which count only where attention is not causal). What belongs to no token is random."""
    longest = max(n for _, n in sequences)
    wide = torch.rand(total, longest + 3, generator=generator) < 0.5
    row = 0
    for _, queries in sequences:
        sees = torch.eye(queries, dtype=torch.bool)
        for i in range(1, queries):
            parent = max(0, i - 1 - int(torch.randint(4, (1,), generator=generator)))
            sees[i] |= sees[parent]
        sees &= torch.rand(queries, queries, generator=generator) < 0.9
        ahead = torch.rand(queries, queries, generator=generator) < 0.2
        wide[row : row + queries, :queries] = sees | ahead.triu(1)
        row += queries
    return wide[:, :longest]


def _garbage(num_seqs: int, width: int) -> Tensor:
    """A block table [num_seqs, width + 2] with rows farther apart than they are long, full of impossible ids."""
    size = num_seqs * (width + 5)
    return torch.tensor((GARBAGE * (size // 4 + 1))[:size], dtype=torch.int32).view(num_seqs, width + 5)[:, : width + 2]


def _stored(cache: Tensor) -> Tensor:
    """A view that torch can index and assign to: few operations know one-byte floats."""
    return cache.view(torch.uint8) if cache.element_size() == 1 else cache


def _poison(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Poison of `shape` as a cache of `dtype` stores it (packed int4: bytes)."""
    size = torch.Size(shape).numel()
    values = BYTE_POISON.get(dtype)
    few = torch.tensor(POISON, dtype=dtype) if values is None else torch.tensor(values, dtype=torch.uint8)
    flat = few.repeat(size // 3 + 1)[:size].view(shape)
    return flat if values is None or dtype == INT4 else flat.view(dtype)


def _caches(spec: AttentionSpec, num_blocks: int, block_size: int, order: str) -> tuple[Tensor, Tensor | None]:
    """Poisoned K and V caches; no V where it is shared."""
    packed = 2 if spec.kv_dtype == INT4 else 1
    heads, k_dim, v_dim = spec.num_kv_heads, spec.head_dim // packed, spec.v_head_dim // packed

    def poisoned(*shape: int) -> Tensor:
        return _poison(shape, spec.kv_dtype)

    if order == "NHD":
        k_cache, v_cache = (poisoned(num_blocks, block_size, heads, dim) for dim in (k_dim, v_dim))
    elif order == "HND":
        k_cache, v_cache = (poisoned(num_blocks, heads, block_size, dim).transpose(1, 2) for dim in (k_dim, v_dim))
    elif order == "pool":
        pool = poisoned(num_blocks, 2, block_size, heads, max(k_dim, v_dim) + 1)
        k_cache, v_cache = pool[:, 0, ..., :k_dim], pool[:, 1, ..., 1 : v_dim + 1]
    else:
        both = poisoned(num_blocks, heads, block_size, k_dim + v_dim + 8).transpose(1, 2)
        k_cache, v_cache = both[..., :k_dim], both[..., k_dim : k_dim + v_dim]
    return k_cache, None if spec.shared_kv else v_cache


def compare(
    out: Tensor,
    lse: Tensor | None,
    expected_out: Tensor,
    expected_lse: Tensor,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
) -> None:
    """Raises AssertionError unless (out, lse) are the reference's to rounding. `dtype` is q's: a kernel
    rounds nothing else to 16 bits unless q is bf16 and the cache bf16 or narrower.

    16-bit: an element may be off by one eps of itself (half of it is the rounding of the result), two eps of its row's
    root mean square (softmax weights rounded to bf16) and one step between subnormals. float32: 64 times that, since a
    score of 16 is a sum of products rounded relative to their own size (torch's SDPA is as far off on the same inputs).
    lse is float32 whatever the dtype, and off by 4e-6 at most, and by 2e-6 of itself; 4e-4 and 2e-5 where q of 16 bits
    meets a cache of integers, since q may be rounded to 16 bits beside its row's largest element.
    """
    factor = 64.0 if dtype == torch.float32 else 1.0
    out64, wanted = out.double(), expected_out.double()
    assert not out64.isnan().any() or wanted.isnan().any(), "NaN where the reference has none"
    row = wanted.square().mean(dim=-1, keepdim=True).sqrt()
    info = torch.finfo(dtype)
    allowed = factor * info.eps * (wanted.abs() + 2.0 * row + info.smallest_normal)
    excess = ((out64 - wanted).abs() - allowed).nan_to_num(0.0)
    worst = int(excess.argmax())
    assert excess.flatten()[worst] <= 0, (
        f"out differs by {(out64 - wanted).abs().flatten()[worst]:.3g}, allowed {allowed.flatten()[worst]:.3g}, "
        f"at {[int(i) for i in torch.unravel_index(torch.tensor(worst), out.shape)]}"
    )
    if lse is not None:
        rounded = kv_dtype in (torch.int8, INT4) and dtype != torch.float32
        torch.testing.assert_close(
            lse.double(), expected_lse.double(), atol=4e-4 if rounded else 4e-6, rtol=2e-5 if rounded else 2e-6
        )
