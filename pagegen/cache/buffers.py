"""`BatchBuffers`: one step's kernel inputs at fixed addresses, where a step rewrites only what changed."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pagegen.cache.allocator import BlockAllocator
from pagegen.cache.arrays import Ints
from pagegen.cache.batch import Asked, Batch, batch_of, find_queries
from pagegen.cache.sharing import PrefixGroups
from pagegen.cache.table import Appended
from pagegen.spec import check


class BatchBuffers:
    """The tensors of `Batch`, at fixed addresses: for CUDA graphs, and so that a step rewrites only what changed.

    Each step's `Batch` is made of views of them, so it is valid until the next one is made in the same buffers (take
    two by turns to prepare a step while another runs). The block table is as wide as `max_blocks` in every batch.
    Behind a batch smaller than the buffers, `seq_lens` are 0, `query_start_loc` repeats its last value and
    `slot_mapping` is -1: a graph captured for all of `max_num_seqs` and `max_queries` does nothing there. On CUDA, the
    host writes to pinned memory, copied without waiting for it.
    """

    def __init__(
        self, max_num_seqs: int, max_queries: int, max_blocks: int, *, device: str | torch.device = "cpu"
    ) -> None:
        self.max_num_seqs = check.integer("max_num_seqs", max_num_seqs)
        self.max_queries = check.integer("max_queries", max_queries, at_least=0)
        self.max_blocks = check.integer("max_blocks", max_blocks)
        self.device = torch.empty(0, device=device).device
        self._on_host = self.device.type == "cpu"
        self._table = _Buffer((max_num_seqs, max_blocks), torch.int32, self.device)
        self._lens = _Buffer((max_num_seqs,), torch.int32, self.device)
        self._starts = _Buffer((max_num_seqs + 1,), torch.int32, self.device)
        self._slots = _Buffer((max_queries,), torch.int64, self.device, fill=-1)
        self._positions = _Buffer((max_queries,), torch.int64, self.device)
        self._ids = _Buffer((max_queries,), torch.int64, self.device)
        self._shown = np.full((2, max_num_seqs), -1, dtype=np.int64)  # of each table row: whose it is, as of when
        self._owner: BlockAllocator | None = None
        self._rows: Ints | None = None
        self._as_of = -1
        self._decoding = 0  # sequences of the last batch, if each had one query
        self._size = (0, 0)
        self._views: tuple[Tensor, ...] = ()
        self._copied = torch.cuda.Event() if self.device.type == "cuda" else None

    def __reduce__(self) -> str:
        raise TypeError(
            "BatchBuffers cannot be copied or pickled: what matters of them is where they are. Make new ones"
        )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The whole buffers: block table, lengths, query starts, slots, positions and token ids."""
        return tuple(buffer.tensor for buffer in self._buffers)

    @property
    def _buffers(self) -> tuple[_Buffer, ...]:
        return self._table, self._lens, self._starts, self._slots, self._positions, self._ids

    def require(self, num_seqs: int, queries: int, blocks: int, device: torch.device) -> None:
        """Raises ValueError where a batch does not fit, or is to be on another device."""
        if device != self.device:
            raise ValueError(f"buffers must be on {device}, where the cache is, got {self.device}")
        if num_seqs > self.max_num_seqs or queries > self.max_queries or blocks > self.max_blocks:
            raise ValueError(
                f"buffers must take {num_seqs} sequences, {queries} queries and {blocks} blocks, got buffers for "
                f"{self.max_num_seqs}, {self.max_queries} and {self.max_blocks}"
            )

    def fill(self, allocator: BlockAllocator, asked: Asked, prefix_groups: PrefixGroups) -> Batch:
        """The batch that was asked for."""
        if self._copied is not None:
            self._copied.synchronize()  # the last step's copies have read the pinned memory
        queries = find_queries(allocator, asked)
        num_seqs, total, decode = len(asked.rows), asked.total, asked.is_decode
        self._show(allocator, asked.rows, queries.appended)
        self._lens.host[:num_seqs] = asked.ends
        if not (decode and self._decoding == num_seqs):  # else they are what they were
            self._starts.host[1 : num_seqs + 1] = asked.counts.cumsum()
        self._positions.host[:total] = queries.positions
        self._slots.host[:total] = queries.slots
        self._ids.host[:total] = queries.tokens
        self._finish(num_seqs, total)
        self._decoding = num_seqs if decode else 0
        return batch_of(asked, prefix_groups, self._views)

    def _show(self, allocator: BlockAllocator, rows: Ints, last: Appended | None) -> None:
        """Brings the block table up to date where its rows show others, or older blocks: `last` knows where, if it came
        right behind the last batch of the same rows."""
        if allocator is not self._owner:
            self._owner, self._rows = allocator, None
            self._shown[:] = -1
            self._table.host[:] = 0
        table = allocator.table
        if last is not None and rows is self._rows and last.since == self._as_of:
            outdated = last.growing
            if len(outdated):
                self._table.host[outdated, last.indices] = table.blocks[rows[outdated], last.indices]
                self._shown[1, outdated] = table.version
        else:
            shown, now = self._shown[:, : len(rows)], table.changed.take(rows)
            outdated = ((shown[0] != rows) | (shown[1] != now)).nonzero()[0]
            if len(outdated):
                width = min(self.max_blocks, table.blocks.shape[1])
                self._table.host[outdated, :width] = table.blocks[rows[outdated], :width]
                shown[0], shown[1] = rows, now
        self._table.push(outdated)
        self._rows, self._as_of = rows, table.version

    def _finish(self, num_seqs: int, total: int) -> None:
        """Empties what the last, larger batch left behind this one, copies to the device, and cuts the views."""
        seqs_before, total_before = self._size
        if num_seqs < seqs_before or total != self._starts.host[-1]:
            self._lens.host[num_seqs:] = 0
            self._starts.host[num_seqs + 1 :] = total
        if total < total_before:
            self._slots.host[total:total_before] = -1
            self._positions.host[total:total_before] = 0
            self._ids.host[total:total_before] = 0
        if not self._on_host:
            for buffer in self._buffers[1:]:
                buffer.push()
        if self._copied is not None:
            self._copied.record()
        if (num_seqs, total) != self._size or not self._views:
            self._size = num_seqs, total
            sizes = (num_seqs, num_seqs, num_seqs + 1, total, total, total)
            self._views = tuple(buffer.tensor[:n] for buffer, n in zip(self._buffers, sizes, strict=True))


class _Buffer:
    """A tensor on the device, and what the host writes: the same memory on a CPU, pinned memory for CUDA."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, fill: int = 0) -> None:
        self.staging = torch.full(shape, fill, dtype=dtype, pin_memory=device.type == "cuda")
        self.host = self.staging.numpy()
        self.tensor = self.staging if device.type == "cpu" else torch.full(shape, fill, dtype=dtype, device=device)

    def push(self, rows: Ints | None = None) -> None:
        """Brings the device up to date: the whole buffer, or some rows."""
        if self.tensor is self.staging or (rows is not None and not len(rows)):
            return
        if rows is None or len(rows) > len(self.host) // 4:  # one copy of all, rather than gather, copy and scatter
            self.tensor.copy_(self.staging, non_blocking=True)
        else:
            places = torch.from_numpy(rows)
            self.tensor.index_copy_(0, places.to(self.tensor.device), self.staging[places].to(self.tensor.device))
