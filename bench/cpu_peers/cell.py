"""`Cell`: one shape to measure; what a peer makes of it; and its meaning in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pagegen.spec.dtypes import DTYPES
from pagegen.targets.huge_pages import huge_memory

POOL_BYTES = 512 << 20  # K and V together: far more than any cache holds
# Largest error against float64 on random normal input; outputs are about 0.1 to 0.5.
TOLERANCE = {"bfloat16": 2e-2, "float16": 1e-2, "float32": 1e-3}


class Unsupported(Exception):
    """The peer has no kernel for this cell, and why."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """`batch` sequences of `context` tokens, of which the last `new` are queries (causal). Where a peer has blocks of
    its own size, `block_size` is ignored."""

    batch: int
    context: int
    new: int = 1
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    dtype: str = "bfloat16"
    block_size: int = 32

    @property
    def group(self) -> int:
        return self.num_q_heads // self.num_kv_heads

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V of one batch."""
        return self.batch * self.context * self.num_kv_heads * self.head_dim * 2 * self.torch_dtype.itemsize

    @property
    def sets(self) -> int:
        """Batches that take turns, so that nothing is found in a cache."""
        wanted = max(1, -(-POOL_BYTES // self.kv_bytes))
        return wanted if self.new == 1 else min(wanted, 8)  # arithmetic bounds a prefill

    def small(self) -> Cell:
        """A shape with the same kernels that float64 computes in an instant."""
        context = 96 if self.new == 1 else 64 if self.new == self.context else 128
        return replace(self, batch=min(self.batch, 3), context=context, new=1 if self.new == 1 else 64)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Given:
    """The logical content of one batch: q [batch, new, Hq, D], k and v [batch, context, Hkv, D]."""

    q: Tensor
    k: Tensor
    v: Tensor


@dataclass(frozen=True)
class Prepared:
    """`run(i)` computes one batch, the i-th in turn; `output()` [batch, new, Hq, D] is the last one's result; `note`
    says what differs from the cell; `owners` is what a peer holds by address alone and must not outlive."""

    run: Callable[[int], None]
    output: Callable[[], Tensor]
    note: str = ""
    owners: tuple[Any, ...] = ()


def given(cell: Cell) -> Given:
    """Random normal content, always the same."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(cell.torch_dtype)

    kv = (cell.batch, cell.context, cell.num_kv_heads, cell.head_dim)
    return Given(normal(cell.batch, cell.new, cell.num_q_heads, cell.head_dim), normal(*kv), normal(*kv))


def expected(cell: Cell, content: Given) -> Tensor:
    """float64 [batch, new, Hq, D]: what the cell means."""
    q, k, v = (t.double().transpose(1, 2) for t in (content.q, content.k, content.v))
    k, v = (t.repeat_interleave(cell.group, dim=1) for t in (k, v))
    scores = q @ k.transpose(2, 3) * cell.head_dim**-0.5
    weights: Tensor = scores.masked_fill(~causal(cell), float("-inf")).softmax(-1)
    return (weights @ v).transpose(1, 2)


def causal(cell: Cell) -> Tensor:
    """bool [new, context]: which keys a query attends."""
    return torch.arange(cell.context) <= torch.arange(cell.context - cell.new, cell.context)[:, None]


def queries(cell: Cell, content: Given | None) -> Tensor:
    """[batch, new, Hq, D] of the cell's dtype: those of the content, or random ones."""
    return given(replace(cell, context=cell.new)).q if content is None else content.q


def memory(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Random normal numbers in huge pages. 16 MiB of them repeat: filling gigabytes would take longer than measuring,
    and no cache knows."""
    size = torch.Size(shape).numel()
    flat = huge_memory(size * dtype.itemsize).view(dtype)
    piece = torch.randn(min(size, (16 << 20) // dtype.itemsize)).to(dtype)
    for start in range(0, size, piece.numel()):
        flat[start : start + piece.numel()] = piece[: size - start]
    return flat.view(shape)


def dense(cell: Cell, sets: int, content: Given | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """K and V as [sets, batch, Hkv, context, D], contiguous."""
    if content is not None:
        k, v = (t.to(dtype).transpose(1, 2).contiguous()[None] for t in (content.k, content.v))
        return k, v
    shape = (sets, cell.batch, cell.num_kv_heads, cell.context, cell.head_dim)
    return memory(shape, dtype), memory(shape, dtype)


def tables(cell: Cell, sets: int, block_size: int) -> Tensor:
    """int32 [sets, batch, blocks of a sequence]: every block of the pool once, shuffled."""
    blocks = -(-cell.context // block_size)
    return torch.randperm(sets * cell.batch * blocks).to(torch.int32).view(sets, cell.batch, blocks)


def paged(cell: Cell, content: Given, table: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """One batch's K and V as [num_blocks, block_size, Hkv, D] with the blocks where `table` [batch, blocks] says."""
    blocks = table.shape[1]
    pages = []
    for t in (content.k, content.v):
        padded = torch.zeros(cell.batch, blocks * block_size, *t.shape[2:], dtype=t.dtype)
        padded[:, : cell.context] = t
        page = torch.empty(table.numel(), block_size, *t.shape[2:], dtype=t.dtype)
        page[table.flatten().long()] = padded.view(-1, block_size, *t.shape[2:])
        pages.append(page)
    return pages[0], pages[1]
