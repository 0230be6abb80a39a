"""Continuous batching, simulated: which sequences, at which lengths, share the steps of a server under a trace.

The policy is that of `pagegen.serving.Scheduler`, which drives real models too; here are the clock, which a step's
sizes set forward, and the way past long stretches of equal steps. All requests have one priority and one tenant: first
come, first served. The last output token is never fed back, so a request leaves with prompt + output - 1 tokens in the
cache. Prefixes are not shared unless asked for.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

from pagegen import serving
from pagegen.serving import CountingCache, NeverFits, Outcome, Request, Scheduler
from pagegen.spec import Workload, check
from pagegen_autotune.prompts import prompt_of
from pagegen_autotune.shared_counts import SharedCounts
from pagegen_autotune.trace import Trace

BLOCK_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class Server:
    """Limits of a server and how long its steps take:

    step_s = base_s + prefill_token_s * prefill tokens + context_token_s * tokens in the contexts + seq_s * sequences
             + prefill_pair_s * pairs of a prefill token and a token of its context.

    The defaults describe an 8 B model in bfloat16 on one accelerator of about 1.6 TB/s and 200 TFLOP/s sustained:
    16 GB of weights read a step: 10 ms; 2 * 8e9 flops a prefill token: 80 us; 32 layers of 8 KV heads of 128 in
    bfloat16 = 128 KiB a context token: 0.08 us; sampling and bookkeeping: 20 us a sequence. 32 GiB of cache make
    262144 tokens, in blocks of `block_tokens`. 512 tokens a step keep decodes from waiting for long prompts (Agrawal et
    al., "Sarathi-Serve", OSDI 2024, use 512 where the time between tokens matters). Attention of a prefill token counts
    by its context alone unless pairs have a price.
    """

    max_num_seqs: int = 64
    max_batch_tokens: int = 512
    kv_tokens: int = 262_144
    block_tokens: int = BLOCK_TOKENS
    base_s: float = 10e-3
    prefill_token_s: float = 80e-6
    context_token_s: float = 0.08e-6
    seq_s: float = 20e-6
    prefill_pair_s: float = 0.0

    def __post_init__(self) -> None:
        check.integer("max_num_seqs", self.max_num_seqs)
        # so that every running sequence can decode in every step
        check.integer("max_batch_tokens", self.max_batch_tokens, at_least=self.max_num_seqs)
        check.integer("block_tokens", self.block_tokens)
        check.integer("kv_tokens", self.kv_tokens, at_least=self.block_tokens)
        if not (math.isfinite(self.base_s) and self.base_s > 0):
            raise ValueError(f"base_s must be a positive time in seconds, got {self.base_s}")
        for name in ("prefill_token_s", "context_token_s", "seq_s", "prefill_pair_s"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ValueError(f"{name} must be a time in seconds, not negative, got {getattr(self, name)}")

    @property
    def num_blocks(self) -> int:
        return self.kv_tokens // self.block_tokens

    def step_s(self, *, prefill_tokens: int, context_tokens: int, num_seqs: int, prefill_pairs: int = 0) -> float:
        """How long one step takes."""
        return (
            self.base_s
            + self.prefill_token_s * prefill_tokens
            + self.context_token_s * context_tokens
            + self.seq_s * num_seqs
            + self.prefill_pair_s * prefill_pairs
        )


@dataclass(frozen=True)
class Step:
    """`count` steps in a row of the same sequences: lengths after the first; with count > 1 all queries are 1 and
    every context grows by 1 a step. `shared_tokens` of the sequences in the cache lie in blocks that another one has
    too: what reading or storing each block once would save."""

    context_lens: tuple[int, ...]
    query_lens: tuple[int, ...]
    count: int = 1
    shared_tokens: int = 0

    def at(self, offset: int) -> Workload:
        """The batch of step `offset` of these, 0 <= offset < count."""
        return Workload(context_lens=tuple(n + offset for n in self.context_lens), query_lens=self.query_lens)


class Simulation:
    """One run of a server over a trace. `steps` yields what it computes; the attributes hold the state between.

    With `prefix_block_tokens` prompts share what the trace's `prefix_runs` say, an id standing for so many tokens;
    else nothing is shared. `on_end` is told of each request that ends; its id is its index in the trace.
    """

    def __init__(
        self,
        trace: Trace,
        server: Server,
        *,
        prefix_block_tokens: int | None = None,
        on_end: Callable[[Outcome], object] | None = None,
    ) -> None:
        if prefix_block_tokens is not None and trace.prefix_runs is None:
            raise ValueError("prefix_block_tokens needs a trace read with keep_prefixes=True, got one without prefixes")
        self.server = server
        self.now_s = 0.0
        self.finished = 0
        self.rejected: list[int] = []  # requests that no amount of waiting would fit into the memory
        size = server.block_tokens
        self._shared = None if prefix_block_tokens is None else SharedCounts(server.num_blocks, size)
        self.cache = self._shared or CountingCache(server.num_blocks, size)
        self.scheduler = Scheduler(
            self.cache, max_num_seqs=server.max_num_seqs, max_batch_tokens=server.max_batch_tokens
        )
        self._requests = _requests(trace, prefix_block_tokens)
        self._coming = next(self._requests, None)
        self._on_end = on_end

    def steps(self) -> Iterator[Step]:
        """Runs until every request is finished or rejected. Work grows with requests, chunks and preemptions, not
        with output lengths: steps that differ by nothing but one more token each come as one `Step`."""
        while True:
            self._arrive()
            step = self.scheduler.schedule(self.now_s)
            if step is not None:
                yield self._compute(step)
            elif self._coming is not None:
                self.now_s = self._coming.arrival_s
            else:
                return

    def _arrive(self) -> None:
        while self._coming is not None and self._coming.arrival_s <= self.now_s:
            try:
                self.scheduler.submit(self._coming)
            except NeverFits as refused:
                self.rejected.append(cast(int, refused.request_id))
            self._coming = next(self._requests, None)

    def _compute(self, step: serving.Step) -> Step:
        first_s = self.server.step_s(
            prefill_tokens=sum(query for query in step.query_lens if query > 1),
            context_tokens=sum(step.context_lens),
            num_seqs=len(step.seq_ids),
            prefill_pairs=self._pairs(step),
        )
        count = self._repeats(step, first_s)
        if count > 1:
            self.scheduler.repeat(step, count, self.now_s + first_s)
        shared_tokens = 0
        if self._shared is not None:
            shared_tokens = self._shared.shared_blocks * self._shared.block_size
            self._shared.mark_all_computed(step.seq_ids, [length + count - 1 for length in step.context_lens])
        self.now_s = self._clock(first_s, len(step.seq_ids), count)
        for outcome in self.scheduler.complete(step, None, self.now_s):
            self.finished += 1
            if self._on_end is not None:
                self._on_end(outcome)
        return Step(step.context_lens, step.query_lens, count, shared_tokens)

    def _pairs(self, step: serving.Step) -> int:
        if not self.server.prefill_pair_s:
            return 0
        return sum(
            query * context for query, context in zip(step.query_lens, step.context_lens, strict=True) if query > 1
        )

    def _repeats(self, step: serving.Step, first_s: float) -> int:
        """How many steps like this one follow each other: until one ends, a block may be wanting or a free slot is
        asked for."""
        steps, n = self.scheduler.steady_steps(step), len(step.seq_ids)
        # who stands behind others, or before a full server, changes nothing
        if steps == 1 or self._coming is None or self.scheduler.waiting or n == self.server.max_num_seqs:
            return steps
        arrival = self._coming.arrival_s
        return min(steps, 1 + bisect_left(range(1, steps + 1), arrival, key=lambda k: self._clock(first_s, n, k)))

    def _clock(self, first_s: float, num_seqs: int, count: int) -> float:
        """The time after `count` steps of `num_seqs` decodes, each step one token a sequence longer than the last."""
        growth_s = self.server.context_token_s * num_seqs
        return self.now_s + count * first_s + growth_s * (count * (count - 1) // 2)


def _requests(trace: Trace, prefix_block_tokens: int | None) -> Iterator[Request]:
    """The trace's requests; one for no output ends with its prompt, as one for 1 does."""
    arrivals = [0.0] * len(trace) if trace.arrival_s is None else trace.arrival_s.tolist()
    sizes = zip(trace.prompt_tokens.tolist(), trace.output_tokens.tolist(), strict=True)
    for index, (prompt, output) in enumerate(sizes):
        tokens: int | array[int] = prompt
        if prefix_block_tokens is not None and trace.prefix_runs is not None:
            tokens = prompt_of(trace.prefix_runs[index], index, prompt, prefix_block_tokens)
        yield Request(index, tokens, max(output, 1), arrival_s=arrivals[index])


def cache_tokens(prompt: Any, output: Any) -> Any:
    """Tokens in the cache when a request ends, its most; of one request, or of arrays of them."""
    return prompt + output - (output > 0)
