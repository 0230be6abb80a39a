"""A cache with contents, a model that reads nothing but them, and a clock that moves when told."""

from __future__ import annotations

from array import array
from hashlib import blake2b

from pagegen.cache import BlockAllocator
from pagegen.serving import replay


def next_token(tokens, window=None):
    """A token that hangs on every token before it, or on those of the window."""
    tokens = tokens if window is None else tokens[-window:]
    return int.from_bytes(blake2b(array("I", tokens).tobytes(), digest_size=2).digest(), "big")


def alone(request, window=None):
    """The tokens of a request that nobody disturbs."""
    tokens = list(request.prompt)
    while len(tokens) - len(request.prompt) < request.max_new_tokens:
        tokens.append(next_token(tokens, window))
        if tokens[-1] in request.stop_tokens:
            break
    return tokens[len(request.prompt) :]


class ContentCache(BlockAllocator):
    """Blocks that hold tokens in place of keys and values, copied where the bookkeeping says so."""

    def __init__(self, num_blocks, block_size, **options):
        super().__init__(num_blocks, block_size, **options)
        self.content = [[None] * block_size for _ in range(num_blocks)]
        self.host = [[None] * block_size for _ in range(options.get("num_host_blocks", 0))]

    def append(self, seq_id, tokens):
        return self._copied(super().append(seq_id, tokens), self.content, self.content)

    def append_each(self, seq_ids, tokens):
        return self._copied(super().append_each(seq_ids, tokens), self.content, self.content)

    def swap_out(self, seq_id):
        return self._copied(super().swap_out(seq_id), self.content, self.host)

    def swap_in(self, seq_id):
        pairs = super().swap_in(seq_id)
        self._copied([(host, device) for device, host in pairs], self.host, self.content)
        return pairs

    def _copied(self, pairs, source, target):
        for a, b in pairs:
            target[b] = list(source[a])
        return pairs


class FakeModel:
    """Computes steps over a ContentCache: writes the step's tokens into their slots, then reads each sequence's tokens
    back from its blocks. `queries` counts the tokens computed; `steps` keeps the steps."""

    def __init__(self, cache):
        self.cache = cache
        self.steps = []
        self.queries = 0

    def __call__(self, step):
        self.steps.append(step)
        cache, size = self.cache, self.cache.block_size
        starts = [cache.computed(seq_id) for seq_id in step.seq_ids]
        for seq_id, query, context, start in zip(step.seq_ids, step.query_lens, step.context_lens, starts, strict=True):
            assert start + query == context <= cache.length(seq_id)
            cache._copied(cache.mark_computed(seq_id, context), cache.content, cache.content)
        for seq_id, context, start in zip(step.seq_ids, step.context_lens, starts, strict=True):
            view = cache.sequence(seq_id)
            behind = view.released * size  # the tokens of blocks that a window gave back are not there
            for position in range(start, context):
                cache.content[view.blocks[position // size]][position % size] = view.tokens[position - behind]
        self.queries += step.num_tokens
        return [next_token(self._read(s, n)) for s, n in zip(step.seq_ids, step.context_lens, strict=True)]

    def _read(self, seq_id, length):
        """What the last query of a sequence sees."""
        cache, size = self.cache, self.cache.block_size
        blocks = cache.block_ids(seq_id)
        first = 0 if cache.window is None else max(0, length - cache.window)
        return [cache.content[blocks[i // size]][i % size] for i in range(first, length)]


class TickingClock:
    """One second a step, however large; idle time is skipped."""

    def __init__(self):
        self.time_s = 0.0

    def now_s(self):
        return self.time_s

    def wait_until(self, time_s):
        self.time_s = max(self.time_s, time_s)


def serve(scheduler, requests, model=None, on_token=None):
    """Serves `requests` to the end, a second a step; returns the outcomes by id."""
    clock = TickingClock()
    model = model or FakeModel(scheduler.cache)

    def run(step):
        tokens = model(step)
        clock.time_s += 1.0
        return tokens

    return {outcome.request.id: outcome for outcome in replay(scheduler, requests, run, clock, on_token)}
