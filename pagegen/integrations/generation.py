"""Greedy generation over paged blocks: every step is one ragged batch, one compiled graph serves them all.

Which sequences share a step, and with how many tokens each, is `pagegen.serving.Scheduler`'s to say.
"""

from __future__ import annotations

import inspect
import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from pagegen import serving
from pagegen.cache import BlockAllocator, PagedKVCache
from pagegen.integrations.hf_attention import Step
from pagegen.integrations.hf_cache import RaggedCache, View
from pagegen.spec import AttentionSpec, check

# Sequences a step is padded to a multiple of. PyTorch compiles a size of 1 as a constant, which would cost a second
# graph; and MKL takes 73 ms to multiply 3 rows by SmolLM2's float32 weights on one core, 57 ms for 2, 43 ms for 4.
_GROUP = 4
# Every size that changes from step to step must be dynamic in the one graph, and PyTorch gives equal sizes one
# symbol: the graph is traced on sizes that all differ.
_TRACE_QUERY_LENS = (4, 7)
_TRACE_BLOCKS = 5


class PagedGenerator:
    """Generates greedily for prompts of different lengths, admitting waiting ones as blocks come free. The most likely
    token is taken as it is: penalties and other processors of a generation config are not applied.

    A step's tokens (one of everyone who has begun to answer, and prompts, in chunks where `max_batch_tokens` asks for
    them) run as one flat batch [1, total_q]. With `compile=True` the whole model is one `torch.compile(fullgraph=True)`
    graph for every batch size, prompt length and block-table width. Blocks of shared prompt beginnings are computed
    once. Prompts are admitted while their own tokens fit; where answers then outgrow the blocks, the last admitted
    gives way as `preempt` says, and goes on later with the same tokens: see `Scheduler`, also for the limits.

    `figures` and `latencies` are of the last `generate` that returned: the server's speed, and what prompts waited.
    """

    def __init__(
        self,
        model: Any,
        specs: tuple[AttentionSpec, ...],
        store: PagedKVCache,
        *,
        variant: str | None = None,
        compile: bool = True,
        backend: str | Callable[..., Any] = "inductor",
        max_num_seqs: int = 256,
        max_batch_tokens: int = 2048,
        preempt: serving.Preempt = "recompute",
    ) -> None:
        _refuse_batch_dependent_rope(model.config)
        self.model = model
        self.specs = specs
        self.store = store
        self.variant = variant
        self._views = [(_view(store.k_cache(layer)), _view(store.v_cache(layer))) for layer in range(len(specs))]
        self.figures: serving.ServerFigures | None = None
        self.latencies: serving.Latencies | None = None
        self._max_num_seqs, self._max_batch_tokens, self._preempt = max_num_seqs, max_batch_tokens, preempt
        self.scheduler()  # raises for limits that are wrong, before anything is compiled
        parameters = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self._keeps_logits = "logits_to_keep" in parameters
        self._ids = itertools.count()
        self._forward: Callable[..., Tensor] = self._greedy_tokens
        if compile:
            for pool in store.pools:
                torch._dynamo.mark_static_address(pool, guard=False)
            self._forward = torch.compile(self._greedy_tokens, fullgraph=True, backend=backend)
            self._trace()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        eos_token_id: int | Iterable[int] | None = None,
        on_token: Callable[[int, int], None] | None = None,
    ) -> list[list[int]]:
        """The new tokens of each prompt (a sequence or 1-D tensor of token ids), its end-of-sequence token included
        where one came.

        `eos_token_id` defaults to the model's generation config. `on_token(prompt_index, token)` is called as
        tokens come. Raises ValueError or TypeError naming a bad prompt, and OutOfBlocks for one that could never fit.
        """
        check.integer("max_new_tokens", max_new_tokens)
        stop = self._stop_tokens(eos_token_id)
        requests = [self._request(i, prompt, max_new_tokens, stop) for i, prompt in enumerate(prompts)]
        index_of = {request.id: index for index, request in enumerate(requests)}
        scheduler, clock = self.scheduler(), serving.WallClock()
        heard = None if on_token is None else lambda request, token: on_token(index_of[request], token)
        outcomes: dict[int, serving.Outcome] = {}
        try:
            for outcome in serving.replay(scheduler, requests, self.run, clock, heard):
                outcomes[index_of[outcome.request.id]] = outcome
        except Exception:
            scheduler.abort_all(clock.now_s())
            raise
        except BaseException:  # an interrupt may come between any two operations of the bookkeeping
            self.reset()
            raise
        if outcomes:
            self.figures = scheduler.figures(clock.now_s())
            self.latencies = serving.Latencies.of(outcome.times for outcome in outcomes.values())
        return [outcomes[index].tokens.tolist() for index in range(len(requests))]

    def scheduler(self) -> serving.Scheduler:
        """A scheduler over the store, to serve requests as they come: `replay(scheduler, requests, generator.run,
        WallClock())`. One at a time: it takes the store for its own."""
        return serving.Scheduler(
            self.store, max_num_seqs=self._max_num_seqs, max_batch_tokens=self._max_batch_tokens, preempt=self._preempt
        )

    def run(self, planned: serving.Step) -> list[int]:
        """Computes a step: the most likely next token behind each row's last query."""
        batch = self.store.batch(planned.seq_ids, query_lens=planned.query_lens)
        step = Step(
            block_table=batch.block_table,
            seq_lens=batch.seq_lens,
            query_start_loc=batch.query_start_loc,
            slot_mapping=batch.slot_mapping,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
        )
        with torch.no_grad():
            tokens = self._call(batch.input_ids, batch.positions, step).tolist()
        return [int(token) for token in tokens[: len(planned.seq_ids)]]

    def reset(self) -> None:
        """Forgets every sequence and every shared beginning. Call it after the model's weights have changed."""
        old = self.store.allocator
        self.store.allocator = BlockAllocator(
            old.num_blocks, old.block_size, old.prefix_caching,
            watermark=old.watermark, window=old.window, num_host_blocks=old.num_host_blocks,
        )  # fmt: skip

    def _stop_tokens(self, given: int | Iterable[int] | None) -> frozenset[int]:
        value = getattr(self.model, "generation_config", self.model.config).eos_token_id if given is None else given
        if value is None:
            return frozenset()
        return frozenset([value] if isinstance(value, int) else value)

    def _request(self, index: int, prompt: Any, max_new_tokens: int, stop: frozenset[int]) -> serving.Request:
        try:
            tokens = [operator.index(token) for token in prompt]
        except TypeError as error:
            raise TypeError(f"prompts[{index}] must be a sequence of token ids, got {prompt!r}") from error
        if not tokens:
            raise ValueError(f"prompts[{index}] must hold at least one token, got none")
        return serving.Request(next(self._ids), tokens, max_new_tokens, stop_tokens=stop)

    def _call(self, ids: Tensor, positions: Tensor, step: Step) -> Tensor:
        """Runs the step, padded to whole groups of sequences that write nothing, and to two block-table columns."""
        table, lens, starts, slots = step.block_table, step.seq_lens, step.query_start_loc, step.slot_mapping
        more = -len(lens) % _GROUP
        table = pad(table, (0, max(0, 2 - table.shape[1]), 0, more))
        if more:
            lens, slots = pad(lens, (0, more), value=1), pad(slots, (0, more), value=-1)
            starts = torch.cat(
                [starts, starts[-1] + torch.arange(1, more + 1, dtype=starts.dtype, device=starts.device)]
            )
            ids, positions = pad(ids, (0, more)), pad(positions, (0, more))
        bounds = _bounds(step.max_query_len, step.max_seq_len)
        return self._forward(ids, positions, slots, table, lens, starts, bounds, *self.store.pools)

    def _greedy_tokens(
        self,
        ids: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        query_start_loc: Tensor,
        bounds: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
    ) -> Tensor:
        """What is compiled: a flat batch in, each sequence's next token [num_seqs] out."""
        step = Step(
            block_table=block_table,
            seq_lens=seq_lens,
            query_start_loc=query_start_loc,
            slot_mapping=slot_mapping,
            max_query_len=bounds.shape[0] - 1,
            max_seq_len=bounds.shape[1] - 1,
        )
        cache = RaggedCache(self.specs, (k_pool, v_pool), self._views, step, self.variant)
        last = query_start_loc[1:].long() - 1
        keep = {"logits_to_keep": last} if self._keeps_logits else {}
        output = self.model(
            input_ids=ids[None], position_ids=positions[None], use_cache=True, **{self._cache_argument: cache}, **keep
        )
        logits = output.logits[0] if self._keeps_logits else output.logits[0, last]
        tokens: Tensor = logits.argmax(-1)
        return tokens

    def _trace(self) -> None:
        """Compiles the step on a batch whose every changing size is dynamic; it writes no slot."""
        device = self.store.device
        lens = torch.tensor(_TRACE_QUERY_LENS, dtype=torch.int32, device=device)
        total = int(lens.sum())
        starts = torch.tensor([0, *itertools.accumulate(_TRACE_QUERY_LENS)], dtype=torch.int32, device=device)
        ids = torch.zeros(total, dtype=torch.int64, device=device)
        positions = torch.cat([torch.arange(n, device=device) for n in _TRACE_QUERY_LENS])
        slots = torch.full((total,), -1, dtype=torch.int64, device=device)
        table = torch.zeros(len(lens), _TRACE_BLOCKS, dtype=torch.int32, device=device)
        bounds = _bounds(max(_TRACE_QUERY_LENS), 12)
        for tensor in (ids, positions, slots, table, lens, starts, bounds, *self.store.pools):
            torch._dynamo.mark_dynamic(tensor, 0)
        torch._dynamo.mark_dynamic(table, 1)
        torch._dynamo.mark_dynamic(bounds, 1)
        with torch.no_grad():
            self._forward(ids, positions, slots, table, lens, starts, bounds, *self.store.pools)


def _bounds(max_query_len: int, max_seq_len: int) -> Tensor:
    """Two integers as the sizes of an empty tensor, which can be marked dynamic where an integer argument would
    be compiled as a constant first. One is added so that no size is 1."""
    return torch.empty(max_query_len + 1, max_seq_len + 1, 0)


def _view(x: Tensor) -> View:
    return tuple(x.shape), x.stride(), int(x.storage_offset())


def _refuse_batch_dependent_rope(config: Any) -> None:
    """Some rotary embeddings turn by the longest sequence of the batch: one prompt would change another's answer."""
    given = getattr(config, "rope_parameters", None) or {}
    for parameters in (given, *(value for value in given.values() if isinstance(value, dict))):
        kind = parameters.get("rope_type")
        if kind in ("dynamic", "longrope"):
            raise ValueError(
                f"rope_type {kind!r} depends on the longest sequence of a batch, which a ragged batch mixes: "
                "use model.generate with a paged cache"
            )
