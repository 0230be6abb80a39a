"""Paged blocks in the shape of a transformers `Cache`: one for `generate()`, one for a compiled ragged step."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from pagegen.cache import PagedKVCache
from pagegen.integrations.hf_attention import Step
from pagegen.spec import AttentionSpec

View = tuple[tuple[int, ...], tuple[int, ...], int]


class PagedCacheBase(Cache):  # type: ignore[misc]  # transformers ships no types
    """What both caches share: the attention function writes and reads the blocks, so `update` passes through."""

    def __init__(self, specs: tuple[AttentionSpec, ...], variant: str | None) -> None:
        super().__init__(layers=[])
        self._specs = specs
        self.variant = variant
        self.entered = False  # set by the hook of an enabled model

    def scale(self, layer: int, given: float | None) -> float:
        """The spec's scale where the model's is the same but for rounding (64**-0.5 and 1/sqrt(64) may differ in
        the last bit), so that the call finds the kernels prepared for the spec; else the model's."""
        own = self._specs[layer].scale
        # not math.isclose: once models of two head dims were compiled, `given` is symbolic, and it takes none such
        return own if given is None or abs(given - own) <= 1e-9 * abs(own) else given

    def refuse_window(self, layer: int, given: int | None) -> None:
        """A model that has a window in its masks alone would attend what they hide."""
        own = self._specs[layer].window
        if given != own:
            raise ValueError(f"layer {layer} must attend a window of {own}, as its config and modules say, got {given}")

    # transformers asks these of a list of layer objects, which this cache has no use for; an empty list would mean
    # that all layers are linear attention
    def __len__(self) -> int:
        return len(self._specs)

    @property
    def is_linear(self) -> list[bool]:
        return [False] * len(self)

    is_sliding = is_dummy = is_linear  # windows are the kernel's: the blocks keep every token

    @property
    def is_initialized(self) -> bool:
        return True

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        if not self.entered:
            raise ValueError("a paged cache works with the model that it was made for: enable(model).cache()")
        return key_states, value_states

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return int(self.get_seq_length(layer_idx))

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        # transformers before 5.12 gave the positions themselves
        queries = query_length.shape[0] if isinstance(query_length, Tensor) else query_length
        return self.get_seq_length(layer_idx) + queries, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    get_max_cache_shape = get_max_length


class RaggedCache(PagedCacheBase):
    """The cache of one compiled step: nothing but tensors, so that `fullgraph=True` traces through it.

    `pools` holds all keys and all values, `views` the (size, stride, storage offset) of each layer's k_cache and
    v_cache in them. The graph gets the pools and cuts the views itself, each where it is used: 60 inputs that share
    two storages cost guards in every step, and views cut up front, times the writes that renew them, minutes of
    compiling.
    """

    def __init__(
        self,
        specs: tuple[AttentionSpec, ...],
        pools: tuple[Tensor, Tensor],
        views: list[tuple[View, View]],
        step: Step,
        variant: str | None,
    ) -> None:
        super().__init__(specs, variant)
        self._pools = pools
        self._views = views
        self._step = step

    def step(self, layer: int, batch: int, tokens: int, padding: Tensor | None) -> Step:
        return self._step

    def blocks(self, layer: int) -> tuple[Tensor, Tensor]:
        k, v = self._views[layer]
        return self._pools[0].as_strided(*k), self._pools[1].as_strided(*v)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # the caller gives the positions


class PagedCache(PagedCacheBase):
    """The cache to pass as `model.generate(..., past_key_values=cache)`.

    Rows of the batch are sequences of a `PagedKVCache`; padding tokens take no slot. Beam search forks rows,
    which share their blocks until they part. One cache serves one batch at a time: `reset` empties it.
    """

    def __init__(self, specs: tuple[AttentionSpec, ...], store: PagedKVCache, variant: str | None = None) -> None:
        super().__init__(specs, variant)
        self.store = store
        self._ids = itertools.count()
        self._rows: list[int] = []
        self._seen = 0  # columns of the batch that came so far, padding included
        self._step: Step | None = None

    @property
    def batch_size(self) -> int:
        """Rows of the batch; -1 before the first forward, as transformers has it."""
        return len(self._rows) or -1

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._seen

    def blocks(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.store.k_cache(layer), self.store.v_cache(layer)

    def step(self, layer: int, batch: int, tokens: int, padding: Tensor | None) -> Step:
        """Makes room for this forward's tokens when its first layer asks; later layers get the same step."""
        if layer == 0:
            self._step = self._advance(batch, tokens, padding)
        if self._step is None:
            raise ValueError(f"layer {layer} ran before layer 0: a paged cache needs whole forwards")
        return self._step

    def _advance(self, batch: int, tokens: int, padding: Tensor | None) -> Step:
        if self._rows and len(self._rows) != batch:
            raise ValueError(f"the batch must keep its {len(self._rows)} rows until reset(), got {batch}")
        counts = [tokens] * batch if padding is None else self._real_tokens(tokens, padding)
        if self._rows:
            for row, count in zip(self._rows, counts, strict=True):
                self.store.append(row, [0] * count)
        else:
            self._admit(counts)
        self._seen += tokens
        made = self.store.batch(self._rows)
        rows = None
        if sum(counts) != batch * tokens:
            assert padding is not None
            rows = padding[:, -tokens:].flatten().nonzero().flatten()
        return Step(
            block_table=made.block_table,
            seq_lens=made.seq_lens,
            query_start_loc=made.query_start_loc,
            slot_mapping=made.slot_mapping,
            max_query_len=max(counts),
            max_seq_len=self._seen,
            rows=rows,
        )

    def _admit(self, counts: list[int]) -> None:
        """Admits every row or none. The token values are unknown here; nothing looks at them, since this cache
        shares no prefixes."""
        for count in counts:
            row = next(self._ids)
            try:
                self.store.add(row, [0] * count)
            except BaseException:
                self.reset()
                raise
            self._rows.append(row)

    def _real_tokens(self, tokens: int, padding: Tensor) -> list[int]:
        """Real tokens a row among the last `tokens` columns of the bool [batch, seen] mask."""
        runs = (padding[:, 1:] != padding[:, :-1]).sum(1)
        if bool((runs > 1).any()):
            raise ValueError("attention_mask must pad on one side only, got a row with padding inside")
        stored = padding[:, :-tokens].sum(1).tolist()
        lengths = [self.store.length(row) for row in self._rows] or [0] * len(padding)
        if stored != lengths:
            raise ValueError(f"attention_mask must keep showing the tokens in the cache {lengths}, got {stored}")
        counts = [int(n) for n in padding[:, -tokens:].sum(1).tolist()]
        if min(counts) < 1:
            raise ValueError("attention_mask must leave every row a token in each forward, got a row of padding")
        return counts

    def reset(self) -> None:
        """Frees every sequence."""
        for row in self._rows:
            self.store.free(row)
        self._rows, self._seen, self._step = [], 0, None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.batch_select_indices(torch.arange(len(self._rows)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Row i becomes a fork of old row `indices[i]`."""
        kept = []
        for source in indices.tolist():
            child = next(self._ids)
            self.store.fork(self._rows[source], child)
            kept.append(child)
        for row in self._rows:
            self.store.free(row)
        self._rows = kept

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the last -tokens_to_remove tokens of every row. A positive number is the length to keep,
        as transformers meant it before 5.13."""
        keep = self._seen + tokens_to_remove if tokens_to_remove <= 0 else min(tokens_to_remove, self._seen)
        for row in self._rows:
            self.store.truncate(row, self.store.length(row) - (self._seen - keep))
        self._seen = keep
