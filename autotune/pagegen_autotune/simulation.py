"""Continuous batching, simulated: which sequences, at which lengths, share the steps of a server under a trace.

One step, as serving engines schedule it: every running sequence past its prompt decodes one token; what is left of the
token budget goes to prompts being prefilled, oldest first (chunked prefill), and then to waiting requests, admitted
first come first served while a slot, budget and memory for the whole prompt are free. A decode that finds no free
block takes the most recently admitted sequence's: that one goes back to the head of the queue and recomputes its
prompt and outputs later. The last output token is never fed back, so a request leaves with prompt + output - 1
tokens in the cache. Prefixes are not shared.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pagegen.spec import Workload, check
from pagegen_autotune.trace import Trace

BLOCK_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class Server:
    """Limits of a server and how long its steps take:

    step_s = base_s + prefill_token_s * prefill tokens + context_token_s * tokens in the contexts + seq_s * sequences.

    The defaults describe an 8 B model in bfloat16 on one accelerator of about 1.6 TB/s and 200 TFLOP/s sustained:
    16 GB of weights read a step: 10 ms; 2 * 8e9 flops a prefill token: 80 us; 32 layers of 8 KV heads of 128 in
    bfloat16 = 128 KiB a context token: 0.08 us; sampling and bookkeeping: 20 us a sequence. 32 GiB of cache make
    262144 tokens. 512 tokens a step keep decodes from waiting for long prompts (Agrawal et al., "Sarathi-Serve",
    OSDI 2024, use 512 where the time between tokens matters).
    """

    max_num_seqs: int = 64
    max_batch_tokens: int = 512
    kv_tokens: int = 262_144
    base_s: float = 10e-3
    prefill_token_s: float = 80e-6
    context_token_s: float = 0.08e-6
    seq_s: float = 20e-6

    def __post_init__(self) -> None:
        check.integer("max_num_seqs", self.max_num_seqs)
        # so that every running sequence can decode in every step
        check.integer("max_batch_tokens", self.max_batch_tokens, at_least=self.max_num_seqs)
        check.integer("kv_tokens", self.kv_tokens, at_least=BLOCK_TOKENS)
        if not (math.isfinite(self.base_s) and self.base_s > 0):
            raise ValueError(f"base_s must be a positive time in seconds, got {self.base_s}")
        for name in ("prefill_token_s", "context_token_s", "seq_s"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ValueError(f"{name} must be a time in seconds, not negative, got {getattr(self, name)}")

    @property
    def num_blocks(self) -> int:
        return self.kv_tokens // BLOCK_TOKENS

    def step_s(self, *, prefill_tokens: int, context_tokens: int, num_seqs: int) -> float:
        """How long one step takes."""
        return (
            self.base_s
            + self.prefill_token_s * prefill_tokens
            + self.context_token_s * context_tokens
            + self.seq_s * num_seqs
        )


@dataclass(frozen=True)
class Step:
    """`count` steps in a row of the same sequences: lengths after the first; with count > 1 all queries are 1 and
    every context grows by 1 a step."""

    context_lens: tuple[int, ...]
    query_lens: tuple[int, ...]
    count: int = 1

    def at(self, offset: int) -> Workload:
        """The batch of step `offset` of these, 0 <= offset < count."""
        return Workload(context_lens=tuple(n + offset for n in self.context_lens), query_lens=self.query_lens)


@dataclass(slots=True)
class Sequence:
    """One admitted request: tokens computed (in the cache) and outputs generated so far."""

    request: int
    prompt: int
    output: int
    computed: int = 0
    generated: int = 0
    blocks: int = 0

    @property
    def pending(self) -> int:
        """Tokens to compute before the next output: 1 while decoding."""
        return self.prompt + self.generated - self.computed

    @property
    def left(self) -> int:
        """Outputs still to come; a request for none ends when its prompt is computed, as one for 1 does."""
        return max(self.output, 1) - self.generated


class Simulation:
    """One run of a server over a trace. `steps` yields what it computes; the attributes hold the state between."""

    def __init__(self, trace: Trace, server: Server) -> None:
        n = len(trace)
        self.server = server
        self.now_s = 0.0
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of admission
        self.finished: list[Sequence] = []
        self.rejected: list[int] = []  # requests that no amount of waiting would fit into the memory
        self.free_blocks = server.num_blocks
        self.preemptions = 0
        self.recomputed_tokens = 0
        self._arrivals = [0.0] * n if trace.arrival_s is None else trace.arrival_s.tolist()
        self._prompts: list[int] = trace.prompt_tokens.tolist()
        self._outputs: list[int] = trace.output_tokens.tolist()
        self._next = 0

    def steps(self) -> Iterator[Step]:
        """Runs until every request is finished or rejected. Work grows with requests, chunks and preemptions, not
        with output lengths: steps that differ by nothing but one more token each come as one `Step`."""
        while True:
            self._arrive()
            if self.running or self.waiting:
                yield self._step()
            elif self._next < len(self._arrivals):
                self.now_s = self._arrivals[self._next]
            else:
                return

    def _arrive(self) -> None:
        while self._next < len(self._arrivals) and self._arrivals[self._next] <= self.now_s:
            sequence = Sequence(self._next, self._prompts[self._next], self._outputs[self._next])
            if cache_tokens(sequence.prompt, sequence.output) > self.server.num_blocks * BLOCK_TOKENS:
                self.rejected.append(self._next)
            else:
                self.waiting.append(sequence)
            self._next += 1

    def _step(self) -> Step:
        self._grow()
        batch = self._schedule()
        queries = tuple(query for _, query in batch)
        for sequence, query in batch:
            sequence.computed += query
        contexts = tuple(sequence.computed for sequence, _ in batch)
        prefill = sum(query for query in queries if query > 1)
        first_s = self.server.step_s(prefill_tokens=prefill, context_tokens=sum(contexts), num_seqs=len(batch))
        decoding = prefill == 0 and all(sequence.pending == 0 for sequence, _ in batch)
        count = self._repeats(first_s) if decoding else 1
        self.now_s = self._clock(first_s, len(batch), count)
        for sequence, _ in batch:
            self._advance(sequence, count)
        self.running = [sequence for sequence in self.running if sequence.left > 0]
        return Step(contexts, queries, count)

    def _grow(self) -> None:
        """A block for each sequence whose blocks are full, taken from the last admitted where none is free."""
        index = 0
        while index < len(self.running):
            sequence = self.running[index]
            if sequence.computed == sequence.blocks * BLOCK_TOKENS:
                if self.free_blocks == 0:
                    self._preempt()
                    continue
                sequence.blocks += 1
                self.free_blocks -= 1
            index += 1

    def _preempt(self) -> None:
        """Sends the last admitted back to the head of the queue. It is not admitted again before another ends: it
        needs all the blocks that it gave back, and at least one of them is taken at once or was short by one."""
        victim = self.running.pop()
        self.preemptions += 1
        self.recomputed_tokens += victim.computed
        self.free_blocks += victim.blocks
        victim.computed = victim.blocks = 0
        self.waiting.appendleft(victim)

    def _schedule(self) -> list[tuple[Sequence, int]]:
        """This step's sequences and how many tokens of each are computed, decodes first."""
        batch = [(sequence, 1) for sequence in self.running if sequence.pending == 1]
        budget = self.server.max_batch_tokens - len(batch)
        for sequence in self.running:
            if sequence.pending > 1 and budget > 0:
                batch.append((sequence, min(sequence.pending, budget)))
                budget -= batch[-1][1]
        while self.waiting and budget > 0 and len(self.running) < self.server.max_num_seqs:
            needed = _blocks(self.waiting[0].pending)
            if needed > self.free_blocks:
                break
            sequence = self.waiting.popleft()
            sequence.blocks = needed
            self.free_blocks -= needed
            self.running.append(sequence)
            batch.append((sequence, min(sequence.pending, budget)))
            budget -= batch[-1][1]
        return batch

    def _repeats(self, first_s: float) -> int:
        """How many steps like this one follow each other: until one ends, a block may be wanting or a free slot is
        asked for. Called after the first step's tokens were computed."""
        n = len(self.running)
        # each sequence has room for this step's token, and for 16 more a block it could still get
        steps = min(min(s.left for s in self.running), 1 + BLOCK_TOKENS * (self.free_blocks // n))
        if self.waiting or n == self.server.max_num_seqs or self._next == len(self._arrivals):
            return steps
        arrival = self._arrivals[self._next]
        return min(steps, 1 + bisect_left(range(1, steps + 1), arrival, key=lambda k: self._clock(first_s, n, k)))

    def _clock(self, first_s: float, num_seqs: int, count: int) -> float:
        """The time after `count` steps of `num_seqs` decodes, each step one token a sequence longer than the last."""
        growth_s = self.server.context_token_s * num_seqs
        return self.now_s + count * first_s + growth_s * (count * (count - 1) // 2)

    def _advance(self, sequence: Sequence, count: int) -> None:
        """Outputs of `count` steps, the first of which has been computed."""
        if sequence.pending:
            return
        sequence.generated += count
        sequence.computed += count - 1
        grown = _blocks(sequence.computed) - sequence.blocks
        if grown > 0:
            sequence.blocks += grown
            self.free_blocks -= grown
        if sequence.left == 0:
            self.free_blocks += sequence.blocks
            sequence.blocks = 0
            self.finished.append(sequence)


def cache_tokens(prompt: Any, output: Any) -> Any:
    """Tokens in the cache when a request ends, its most; of one request, or of arrays of them."""
    return prompt + output - (output > 0)


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)
