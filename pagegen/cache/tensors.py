"""`PagedKVCache`: the tensors behind the blocks, and the bookkeeping in front of them."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagegen.cache.allocator import BlockAllocator, BlockPairs
from pagegen.cache.batch import Batch, build
from pagegen.cache.sequence import MAX_TOKEN, TOKEN_CODE, SequenceState
from pagegen.cache.stats import CacheStats
from pagegen.spec import CacheLayout, bytes_per_element, check, dtype_name, parse_dtype
from pagegen.targets.huge_pages import huge_memory


class PagedKVCache:
    """Keys and values of many sequences in `num_blocks` blocks of `layout.block_size` tokens, for `num_layers` layers.

    One tensor holds all keys and another all values, each [num_layers, num_blocks, ...] in the layout's order and
    zero at first. Not one for both: torch.compile copies caches that one call writes and that share their storage. On a
    CPU they are in huge pages where the system has them, which take memory when a block is first written, on the memory
    node of the thread that writes it. Every thread reads every block, so where a machine has several nodes spread the
    pages over all of them (`numactl --interleave=all`). A sequence has the same blocks in every layer. `dtype` may be
    given by name; `watermark` and the errors are those of `BlockAllocator`, whose calls this class has, with tokens
    also as 1-D tensors or arrays of integers. Copies of copy-on-write are made before the call that needs them returns.
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
    ) -> None:
        check.integer("num_layers", num_layers)
        check.integer("num_kv_heads", num_kv_heads)
        check.instance("layout", layout, CacheLayout)
        stored = parse_dtype(dtype)
        if bytes_per_element(stored).denominator != 1:  # int4, two values a byte
            raise ValueError(f"dtype must have whole bytes an element, got {dtype_name(stored)}")
        self.num_layers = num_layers
        self.layout = layout
        self.dtype = stored
        self.device = torch.device(device)
        self.allocator = BlockAllocator(num_blocks, layout.block_size, prefix_caching, watermark=watermark)
        slots = num_layers * num_blocks * layout.block_size * num_kv_heads
        k_size = slots * check.integer("head_dim", head_dim)
        v_dim = head_dim if v_head_dim is None else check.integer("v_head_dim", v_head_dim)
        self.pools = tuple(_zeros(size, stored, self.device) for size in (k_size, slots * v_dim))
        # [num_layers * num_blocks, block_size, num_kv_heads, head_dim]: block b of layer l is l * num_blocks + b
        self._keys = layout.view(self.pools[0], num_kv_heads, head_dim)
        self._values = layout.view(self.pools[1], num_kv_heads, v_dim)
        firsts = range(0, num_layers * num_blocks, num_blocks)
        self._k_layers = [self._keys[first : first + num_blocks] for first in firsts]
        self._v_layers = [self._values[first : first + num_blocks] for first in firsts]

    def k_cache(self, layer: int) -> Tensor:
        """The keys of a layer, [num_blocks, block_size, num_kv_heads, head_dim]: always the same view."""
        return self._k_layers[self._layer(layer)]

    def v_cache(self, layer: int) -> Tensor:
        """The values of a layer, [num_blocks, block_size, num_kv_heads, v_head_dim]: always the same view."""
        return self._v_layers[self._layer(layer)]

    def add(self, seq_id: Hashable, tokens: Any, *, context: bytes = b"") -> int:
        """Admits a sequence; returns how many of its leading tokens are cached already."""
        return self.allocator.add(seq_id, as_tokens(tokens), context=context)

    def can_admit(self, num_tokens: int, *, tokens: Any = None, context: bytes = b"", lookahead: int = 0) -> bool:
        """Whether `add` of `num_tokens` tokens would succeed now. See `BlockAllocator.can_admit`."""
        known = None if tokens is None else as_tokens(tokens)
        return self.allocator.can_admit(num_tokens, tokens=known, context=context, lookahead=lookahead)

    def append(self, seq_id: Hashable, tokens: Any) -> None:
        """Makes room for `tokens` at the end, and copies the last block first where others refer to it."""
        self._copy(self.allocator.append(seq_id, as_tokens(tokens)))

    def fork(self, parent: Hashable, child: Hashable) -> None:
        """Starts `child` as a copy of `parent` that shares every block of it. See `BlockAllocator.fork`."""
        self.allocator.fork(parent, child)

    def truncate(self, seq_id: Hashable, length: int) -> None:
        """Takes back all tokens from `length` on."""
        self.allocator.truncate(seq_id, length)

    def free(self, seq_id: Hashable) -> None:
        """Ends a sequence; what it computed stays findable until its blocks are needed."""
        self.allocator.free(seq_id)

    def batch(self, seq_ids: Iterable[Hashable], *, query_lens: Sequence[int] | None = None) -> Batch:
        """The kernel inputs of a step that computes the tokens of `seq_ids` not yet computed, or the first
        `query_lens[i]` of them. They count as computed from here on, and full blocks can be
        found: after a step that fails before it wrote them, make a new cache, since `truncate` leaves them findable.

        Raises KeyError for an unknown id, ValueError for no or repeated ids or a query length out of range, and,
        only after a fork of uncomputed tokens, OutOfBlocks; all before any change.
        """
        ids = list(seq_ids)
        if not ids or len(set(ids)) != len(ids):
            twice = [seq_id for seq_id in ids if ids.count(seq_id) > 1]
            raise ValueError(f"seq_ids must name each sequence once, got {twice[0]!r} twice" if twice else
                             "seq_ids must name at least one sequence, got none")  # fmt: skip
        states = [self.allocator.sequence(seq_id) for seq_id in ids]
        starts = [state.computed for state in states]
        ends = [len(state.tokens) for state in states] if query_lens is None else _ends(ids, states, query_lens)
        self._copy(self.allocator.mark_all_computed(states, ends))
        return build(states, starts, ends, self.layout.block_size, self.device)

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

    def _layer(self, layer: int) -> int:
        if check.integer("layer", layer, at_least=0) >= self.num_layers:
            raise ValueError(f"layer must be below num_layers {self.num_layers}, got {layer}")
        return layer

    def _copy(self, pairs: BlockPairs) -> None:
        """Copies blocks in all layers, keys and values, in one call."""
        if not pairs:
            return
        first_blocks = torch.arange(self.num_layers)[:, None, None] * self.allocator.num_blocks
        every_layer = (first_blocks + torch.tensor(pairs)).reshape(-1, 2)
        torch.ops.pagegen.copy_blocks(self._keys, self._values, every_layer.to(self.device))


def _zeros(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    return huge_memory(size * dtype.itemsize).view(dtype)


def as_tokens(tokens: Any) -> Iterable[int]:
    """A 1-D tensor or numpy array of integers, packed; anything else as it is, for the allocator to check."""
    values = tokens.cpu().numpy() if isinstance(tokens, Tensor) else tokens
    if not isinstance(values, np.ndarray):
        return values  # type: ignore[no-any-return]
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise TypeError(f"tokens must be a 1-D sequence of integers, got {values.dtype} {list(values.shape)}")
    wrong = values[(values < 0) | (values > MAX_TOKEN)]
    if wrong.size:
        raise ValueError(f"tokens must be in 0..{MAX_TOKEN}, got {wrong[0]}")
    packed = array(TOKEN_CODE)
    packed.frombytes(values.astype(np.uintc).tobytes())
    return packed


def _ends(ids: list[Hashable], states: list[SequenceState], query_lens: Sequence[int]) -> list[int]:
    if len(query_lens) != len(ids):
        raise ValueError(f"query_lens must have one entry a sequence ({len(ids)}), got {len(query_lens)}")
    ends = []
    for seq_id, state, count in zip(ids, states, query_lens, strict=True):
        left = len(state.tokens) - state.computed
        if isinstance(count, bool) or not isinstance(count, (int, np.integer)):
            raise TypeError(f"query_lens must hold integers, got {type(count).__name__} {count!r} for {seq_id!r}")
        if not 0 <= count <= left:
            raise ValueError(f"query_lens must be in 0..{left} (tokens not computed) for {seq_id!r}, got {count}")
        ends.append(state.computed + int(count))
    return ends
