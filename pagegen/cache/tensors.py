"""`PagedKVCache`: the tensors behind the blocks, and the bookkeeping in front of them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagegen.cache.allocator import BlockAllocator
from pagegen.cache.arrays import Ints
from pagegen.cache.batch import Asked, Batch, fresh_batch
from pagegen.cache.buffers import BatchBuffers
from pagegen.cache.quantised import QUANTISED, factors, stored_width
from pagegen.cache.sequence import listed
from pagegen.cache.sharing import SharedPrefixes
from pagegen.cache.stats import CacheStats
from pagegen.cache.storage import BlockStorage
from pagegen.spec import CacheLayout, check, dtype_name, parse_dtype
from pagegen.spec.dtypes import INT4

_VIEWS = ("pools", "_k_layers", "_v_layers", "_quantisation")  # made anew from the storage


class PagedKVCache:
    """Keys and values of many sequences in `num_blocks` blocks of `layout.block_size` tokens, for `num_layers` layers.

    One tensor holds all keys and another all values, each [num_layers, num_blocks, ...] in the layout's order and
    zero at first. Not one for both: torch.compile copies caches that one call writes and that share their storage. On a
    CPU they are in huge pages where the system has them, which take memory when a block is first written, on the memory
    node of the thread that writes it. Every thread reads every block, so where a machine has several nodes spread the
    pages over all of them (`numactl --interleave=all`). A sequence has the same blocks in every layer. `dtype` may be
    given by name; `watermark`, `window` and the errors are those of `BlockAllocator`, whose calls this class has, with
    tokens also as 1-D tensors of integers. Copies of copy-on-write, and to and from the `num_host_blocks` blocks of
    host memory (pinned for CUDA), are made before the call that needs them returns.

    An int4 cache is uint8, two values a byte. With `kv_scale_granularity` "token_head" a quantised cache holds a scale
    a token and head of K and of V, and with `kv_zero_points` (int8, int4) a zero point, 0 until `update_scales` sets
    them; they are copied and swapped with their blocks: see `quantisation`. Other scales bind to no block, and are
    passed to the operators.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        layout: CacheLayout,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        dtype: str | torch.dtype = torch.bfloat16,
        device: str | torch.device = "cpu",
        prefix_caching: bool = True,
        *,
        watermark: int = 0,
        window: int | None = None,
        num_host_blocks: int = 0,
        kv_scale_granularity: str = "none",
        kv_zero_points: bool = False,
    ) -> None:
        check.integer("num_layers", num_layers)
        check.integer("num_kv_heads", num_kv_heads)
        check.instance("layout", layout, CacheLayout)
        stored = parse_dtype(dtype)
        names = factors(stored, kv_scale_granularity, kv_zero_points)
        self.num_layers = num_layers
        self.layout = layout
        self.dtype = stored
        self.device = torch.empty(0, device=device).device  # "cuda" is the current device, with its number
        self.allocator = BlockAllocator(
            num_blocks, layout.block_size, prefix_caching,
            watermark=watermark, window=window, num_host_blocks=num_host_blocks,
        )  # fmt: skip
        widths = (
            stored_width("head_dim", head_dim, stored),
            stored_width("v_head_dim", head_dim if v_head_dim is None else v_head_dim, stored),
        )
        self.storage = BlockStorage(
            num_layers, num_blocks, num_host_blocks, layout, num_kv_heads, widths,
            torch.uint8 if stored == INT4 else stored, self.device, names,
        )  # fmt: skip
        self._make_views()
        self._shared = SharedPrefixes()

    def _make_views(self) -> None:
        blocks = self.storage.num_blocks
        firsts = range(0, self.num_layers * blocks, blocks)
        self.pools = self.storage.pools
        self._k_layers = [self.storage.keys[first : first + blocks] for first in firsts]
        self._v_layers = [self.storage.values[first : first + blocks] for first in firsts]
        named = {"kv_dtype": dtype_name(self.dtype)} if self.dtype in QUANTISED else {}
        self._quantisation: list[dict[str, Any]] = [
            named | {name: factor[first : first + blocks] for name, factor in self.storage.factors.items()}
            for first in firsts
        ]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _VIEWS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copied or unpickled cache looks into its own storage again."""
        self.__dict__.update(state)
        self._make_views()

    def k_cache(self, layer: int) -> Tensor:
        """The keys of a layer, [num_blocks, block_size, num_kv_heads, head_dim]: always the same view."""
        return self._k_layers[self._layer(layer)]

    def v_cache(self, layer: int) -> Tensor:
        """The values of a layer, [num_blocks, block_size, num_kv_heads, v_head_dim]: always the same view."""
        return self._v_layers[self._layer(layer)]

    def quantisation(self, layer: int) -> dict[str, Any]:
        """What says how to read and write a quantised layer, as keyword arguments of `update_scales`, `write_kv` and
        `paged_attention`: `kv_dtype`, and of what is held a token and head k_scale, v_scale, k_zero and v_zero, float32
        [num_blocks, block_size, num_kv_heads] each, always the same views. Empty for a cache that is not quantised."""
        return dict(self._quantisation[self._layer(layer)])

    def add(self, seq_id: Hashable, tokens: Any, *, context: bytes = b"", most_cached: int | None = None) -> int:
        """Admits a sequence; returns how many of its leading tokens are cached already."""
        return self.allocator.add(seq_id, as_tokens(tokens), context=context, most_cached=most_cached)

    def can_admit(self, num_tokens: int, *, tokens: Any = None, context: bytes = b"", lookahead: int = 0) -> bool:
        """Whether `add` of `num_tokens` tokens would succeed now. See `BlockAllocator.can_admit`."""
        known = None if tokens is None else as_tokens(tokens)
        return self.allocator.can_admit(num_tokens, tokens=known, context=context, lookahead=lookahead)

    def append(self, seq_id: Hashable, tokens: Any) -> None:
        """Makes room for `tokens` at the end, and copies the last block first where others refer to it."""
        self.storage.copy(self.allocator.append(seq_id, as_tokens(tokens)))

    def append_each(self, seq_ids: Iterable[Hashable], tokens: Any) -> None:
        """Makes room for one token more in each of many sequences: all or, on OutOfBlocks, none."""
        self.storage.copy(self.allocator.append_each(seq_ids, as_tokens(tokens)))

    def fork(self, parent: Hashable, child: Hashable) -> None:
        """Starts `child` as a copy of `parent` that shares every block of it. See `BlockAllocator.fork`."""
        self.allocator.fork(parent, child)

    def truncate(self, seq_id: Hashable, length: int) -> None:
        """Takes back all tokens from `length` on."""
        self.allocator.truncate(seq_id, length)

    def free(self, seq_id: Hashable) -> None:
        """Ends a sequence; what it computed stays findable until its blocks are needed."""
        self.allocator.free(seq_id)

    def batch(
        self,
        seq_ids: Iterable[Hashable],
        *,
        query_lens: Sequence[int] | None = None,
        buffers: BatchBuffers | None = None,
    ) -> Batch:
        """The kernel inputs of a step that computes the tokens of `seq_ids` not yet computed, or the first
        `query_lens[i]` of them. They count as computed from here on, and full blocks can be found: after a step that
        failed before it wrote them, call `abandon`.

        The batch's tensors are its own; with `buffers` they are views of those, and valid until the next batch made
        there. Raises KeyError for an unknown id, ValueError for no or repeated ids, a query length out of range or
        buffers too small and, only after a fork of uncomputed tokens, OutOfBlocks; all before any change.
        """
        return self.make(self.ask(seq_ids, query_lens, buffers), buffers)

    def ask(self, seq_ids: Iterable[Hashable], query_lens: Sequence[int] | None, buffers: BatchBuffers | None) -> Asked:
        """What `batch` was asked for, checked: raises what it does but for OutOfBlocks, and changes nothing."""
        given = None if query_lens is None else listed("query_lens", query_lens)
        rows = self.allocator.rows(seq_ids)
        if not len(rows):
            raise ValueError("seq_ids must name at least one sequence, got none")
        starts, lengths = self.allocator.table.computed.take(rows), self.allocator.table.lengths.take(rows)
        ends = lengths if given is None else starts + self._counts(rows, lengths - starts, given)
        counts = ends - starts
        total, max_query_len, max_seq_len = int(counts.sum()), int(counts.max()), int(ends.max())
        if buffers is not None:
            check.instance("buffers", buffers, BatchBuffers)
            buffers.require(len(rows), total, self.layout.blocks_for(max_seq_len), self.device)
        return Asked(rows, starts, ends, counts, total, max_query_len, max_seq_len)

    def make(self, asked: Asked, buffers: BatchBuffers | None) -> Batch:
        """The batch that was asked for. Raises OutOfBlocks, before any change."""
        self.storage.copy(self.allocator.announce(asked.rows, asked.ends))
        groups = self._shared.find(self.allocator, asked.rows, asked.starts)
        if buffers is None:
            return fresh_batch(self.allocator, asked, groups, self.device)
        return buffers.fill(self.allocator, asked, groups)

    def abandon(self, seq_ids: Iterable[Hashable]) -> None:
        """Says that the last step batched for `seq_ids` failed before it wrote: its tokens are to be computed again,
        and nobody finds them. See `BlockAllocator.abandon`."""
        self.allocator.abandon(seq_ids)

    def swap_out(self, seq_id: Hashable) -> None:
        """Copies a sequence to host memory, and gives back its blocks. See `BlockAllocator.swap_out`."""
        self.storage.to_host(self.allocator.swap_out(seq_id))

    def swap_in(self, seq_id: Hashable) -> None:
        """Brings a sequence back from host memory. See `BlockAllocator.swap_in`."""
        self.storage.from_host(self.allocator.swap_in(seq_id))

    def can_swap_in(self, seq_id: Hashable, *, lookahead: int = 0) -> bool:
        """Whether `swap_in` would succeed now, with room for `lookahead` tokens more."""
        return self.allocator.can_swap_in(seq_id, lookahead=lookahead)

    def is_swapped(self, seq_id: Hashable) -> bool:
        """Whether a sequence is swapped out."""
        return self.allocator.is_swapped(seq_id)

    def block_ids(self, seq_id: Hashable) -> list[int]:
        """The blocks of a sequence, in order."""
        return self.allocator.block_ids(seq_id)

    def length(self, seq_id: Hashable) -> int:
        """Tokens of a sequence, computed or not."""
        return self.allocator.length(seq_id)

    def computed(self, seq_id: Hashable) -> int:
        """Leading tokens of a sequence that are computed."""
        return self.allocator.computed(seq_id)

    def stats(self) -> CacheStats:
        """Blocks, slots, waste and hit rate now."""
        return self.allocator.stats()

    def check_invariants(self) -> None:
        """Raises `InvariantBroken`, naming the invariant, if the bookkeeping contradicts itself."""
        self.allocator.check_invariants()

    def _counts(self, rows: Ints, left: Ints, given: list[int]) -> Ints:
        """The query lengths asked for, each in 0..left[i]."""
        if len(given) != len(rows):
            raise ValueError(f"query_lens must have one entry a sequence ({len(rows)}), got {len(given)}")
        for count in given:
            if isinstance(count, (bool, np.bool_)) or not isinstance(count, (int, np.integer)):
                raise TypeError(f"query_lens must hold integers, got {type(count).__name__} {count!r}")
        for row, count, most in zip(rows.tolist(), given, left.tolist(), strict=True):
            if not 0 <= count <= most:
                state = self.allocator.table.states[row]
                name = "" if state is None else repr(state.seq_id)
                raise ValueError(f"query_lens must be in 0..{most} (tokens not computed) for {name}, got {count}")
        return np.array(given, dtype=np.int64)

    def _layer(self, layer: int) -> int:
        if check.integer("layer", layer, at_least=0) >= self.num_layers:
            raise ValueError(f"layer must be below num_layers {self.num_layers}, got {layer}")
        return layer


def as_tokens(tokens: Any) -> Any:
    """A tensor as a numpy array; anything else as it is. The allocator checks either."""
    return tokens.cpu().numpy() if isinstance(tokens, Tensor) else tokens
