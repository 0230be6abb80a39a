"""Two hundred requests under a tiny memory get the tokens that each gets alone."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from crowd import VOCABULARY, Crowd, Families, Family, alone
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from pagegen import PagedKVCache
from pagegen.integrations import smollm2
from pagegen.integrations.transformers import enable
from pagegen.serving import Request
from pagegen.spec import CacheLayout

SIZE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "dtype": "float32",
}


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """The models are tiny: a second thread costs more than it gives, and much more on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def build(window=None):
    """A random model with weights so large that the next token hangs on attention."""
    torch.manual_seed(0)
    if window is None:
        model = LlamaForCausalLM(LlamaConfig(**SIZE)).eval()
    else:
        model = MistralForCausalLM(MistralConfig(**SIZE, sliding_window=window)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5)
    return model


def traffic(count, families, *, unit=4, answers=(4, 16)):
    """Requests and families, most of which begin as others do: prompts of 1 to 8 times `unit` tokens, a block's, and
    answers of so many."""
    rng = random.Random(0)

    def some(most):
        return [rng.randrange(2, VOCABULARY) for _ in range(rng.randint(1, most))]

    beginnings = [[rng.randrange(2, VOCABULARY) for _ in range(unit * n + n % 2)] for n in (2, 3, 4, 5, 6)]
    requests = []
    for i in range(count):
        prompt = rng.choice(beginnings)[: rng.choice([None, None, unit * 2])] + some(2 * unit)
        others = {"tenant": i % 3, "priority": int(i % 7 == 0), "context": b"tenant" if i % 11 == 0 else b""}
        requests.append(Request(i, prompt, rng.randint(*answers), **others))
    return requests, [
        Family(
            f"family {i}", rng.choice(beginnings) + some(unit), rng.randint(2, 4), sum(answers) // 2, random.Random(i)
        )
        for i in range(families)
    ]


class Served:
    """What came of serving `requests` and `families` from `num_blocks` blocks and `num_host_blocks` on the host;
    `damage` is done to the cache first."""

    def __init__(
        self, model, requests, families, *, num_blocks, num_host_blocks, block_size=4, window=None, damage=None
    ):
        paged = enable(model, block_size=block_size)
        spec = paged.specs[0]
        store = PagedKVCache(
            len(paged.specs), num_blocks, CacheLayout(block_size=block_size), spec.num_kv_heads, spec.head_dim,
            dtype=spec.kv_dtype, window=window, num_host_blocks=num_host_blocks, watermark=1,
        )  # fmt: skip
        for pool in store.pools:
            pool.fill_(torch.nan)  # what nobody has written
        self.counts = Counter()
        self._count_in(store)
        if damage is not None:
            damage(store)
        crowd = Crowd(
            model, paged.specs, store, variant=paged.variant, compile=False, max_num_seqs=8,
            max_batch_tokens=8 * block_size, preempt="swap",
        )  # fmt: skip
        crowd.families, crowd.failing = Families(store, families), 9
        try:
            self.outputs = crowd.serve(requests)
        finally:
            paged.disable()
        self.requests, self.branches = requests, crowd.families.ended
        self.left = store.stats()
        counters = crowd.counters
        self.counts.update(
            crowd.families.counts, steps=crowd.steps, failed=crowd.failed, hits=counters.hit_tokens,
            preemptions=counters.preemptions, recomputed=counters.preemptions - counters.swap_outs,
            swapped=counters.swap_outs,
        )  # fmt: skip

    def wrong(self, model):
        """The requests and branches whose tokens are not those of a run alone."""
        found = [r.id for r in self.requests if alone(model, list(r.prompt), r.max_new_tokens) != self.outputs[r.id]]
        return found + [b.id for b in self.branches if alone(model, b.prompt, len(b.outputs), b.forced) != b.outputs]

    def _count_in(self, store):
        """Counts what the cache does out of sight: blocks evicted, copied on write and moved to the host and back."""
        pool = store.allocator.pool
        _replace(pool, "take", lambda count: self.counts.update(evictions=max(0, count - len(pool.free))))
        for name in ("copy", "to_host", "from_host"):
            _replace(store.storage, name, lambda pairs, name=name: self.counts.update({name: len(pairs)}))


def _replace(owner, name, before):
    """Calls `before` with the argument of every call of a method."""
    call = getattr(owner, name)

    def called(argument):
        before(argument)
        return call(argument)

    setattr(owner, name, called)


HAPPENS = (
    "evictions", "copy", "to_host", "from_host", "hits", "preemptions", "recomputed", "swapped", "failed",
    "family preemptions", "branches given up", "guesses taken back",
)  # fmt: skip


@pytest.mark.parametrize(("window", "blocks"), [(None, (34, 12)), (9, (28, 4))], ids=["full", "window"])
def test_two_hundred_requests_under_a_tiny_memory_get_the_tokens_that_each_gets_alone(window, blocks):
    model = build(window)
    requests, families = traffic(200, 30)
    served = Served(model, requests, families, num_blocks=blocks[0], num_host_blocks=blocks[1], window=window)
    assert len(served.outputs) == 200 and len(served.branches) >= 60
    assert all(served.counts[name] for name in HAPPENS), served.counts
    assert not served.wrong(model)
    assert (served.left.num_sequences, served.left.used_blocks, served.left.free_host_blocks) == (0, 0, blocks[1])


def no_copies(store):
    store.storage.copy = lambda pairs: None


def nothing_comes_back_from_the_host(store):
    store.storage.from_host = lambda pairs: None


def a_hit_finds_what_another_block_holds(store):
    add, size, num_blocks = store.add, store.layout.block_size, store.allocator.num_blocks

    def adding(seq_id, tokens, **options):
        cached = add(seq_id, tokens, **options)
        if cached:
            block = store.block_ids(seq_id)[cached // size - 1]
            store.storage.copy([((block + 1) % num_blocks, block)])
        return cached

    store.add = adding


@pytest.mark.parametrize("damage", [no_copies, nothing_comes_back_from_the_host, a_hit_finds_what_another_block_holds])
def test_one_fault_of_the_cache_would_change_tokens(damage):
    model = build()
    requests, families = traffic(60, 20)
    served = Served(model, requests, families, num_blocks=34, num_host_blocks=12, damage=damage)
    assert served.wrong(model)


def test_smollm2_gives_two_hundred_requests_under_a_tiny_memory_the_tokens_that_each_gets_alone(nightly):
    if not nightly:
        pytest.skip("minutes: run with --nightly")
    try:
        model, _ = smollm2.load()
    except smollm2.WeightsMissing as error:
        pytest.skip(str(error))
    requests, families = traffic(200, 30, unit=16, answers=(4, 20))
    served = Served(model, requests, families, num_blocks=34, num_host_blocks=12, block_size=16)
    assert len(served.outputs) == 200 and all(served.counts[name] for name in HAPPENS), served.counts
    assert not served.wrong(model)
