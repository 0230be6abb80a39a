"""Random traffic on a tiny memory: everybody gets the right tokens, and nothing is left behind."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from serving_fakes import ContentCache, FakeModel, alone

from pagegen.serving import CountingCache, NeverFits, Request, Scheduler

SIZE = 3


@st.composite
def traffic(draw):
    """Requests with few different beginnings, so that prefixes are found, priorities, tenants and stop tokens."""
    requests = []
    for number in range(draw(st.integers(1, 10))):
        beginning = [draw(st.integers(0, 1))] * draw(st.integers(0, 9))
        requests.append(
            Request(
                number,
                [*beginning, *draw(st.lists(st.integers(0, 2), min_size=1, max_size=6))],
                draw(st.integers(1, 14)),
                arrival_s=float(draw(st.integers(0, 30))),
                priority=draw(st.integers(0, 2)),
                tenant=draw(st.sampled_from("ab")),
                context=draw(st.sampled_from([b"", b"adapter"])),
                stop_tokens=draw(st.sampled_from([frozenset(), frozenset(range(0, 2**16, 5))])),
            )
        )
    return sorted(requests, key=lambda r: r.arrival_s)


@st.composite
def servers(draw):
    places = draw(st.integers(1, 5))
    watermark = draw(st.integers(0, 2))
    cache = ContentCache(
        draw(st.integers(8, 14)) + watermark, SIZE, prefix_caching=draw(st.booleans()), watermark=watermark,
        num_host_blocks=draw(st.sampled_from([0, 3, 9])), window=draw(st.sampled_from([None, None, 1, 4, 7])),
    )  # fmt: skip
    return Scheduler(
        cache, max_num_seqs=places, max_batch_tokens=places + draw(st.integers(0, 12)),
        lookahead=draw(st.integers(0, 4)), preempt=draw(st.sampled_from(["recompute", "swap"])),
        max_overtakes=draw(st.integers(1, 4)),
    )  # fmt: skip


@settings(max_examples=settings.default.max_examples, deadline=None)
@given(traffic(), servers(), st.data())
def test_every_request_ends_with_the_right_tokens_and_every_block_is_free_in_the_end(requests, scheduler, data):
    cache, model = scheduler.cache, FakeModel(scheduler.cache)
    heard = {request.id: [] for request in requests}
    outcomes, refused, coming = {}, set(), list(requests)
    for now in range(5000):
        while coming and coming[0].arrival_s <= now:
            request = coming.pop(0)
            try:
                scheduler.submit(request, lambda name, token: heard[name].append(token))
            except NeverFits:
                refused.add(request.id)
        step = scheduler.schedule(float(now))
        if step is None:
            if not coming and not scheduler.waiting:
                break
            continue
        assert len(step.seq_ids) <= scheduler.max_num_seqs and step.num_tokens <= scheduler.max_batch_tokens
        # nobody who runs is left out while the budget lasts
        assert len(step.seq_ids) == scheduler.running or step.num_tokens == scheduler.max_batch_tokens
        fate = data.draw(st.sampled_from(["done"] * 12 + ["failed before", "failed after", "abort"]), label="fate")
        if fate == "abort":
            victim = data.draw(st.sampled_from(step.seq_ids), label="aborted")
            outcomes[victim] = scheduler.abort(victim, now + 0.5)
        if fate != "failed before":
            tokens = model(step)
        if fate.startswith("failed"):
            scheduler.fail(step)
        else:
            outcomes.update({o.request.id: o for o in scheduler.complete(step, tokens, now + 1.0)})
        cache.check_invariants()
    else:
        raise AssertionError("requests wait forever")
    assert set(outcomes) | refused == {request.id for request in requests}
    for request in requests:
        if request.id in refused:
            assert -(-request.most_tokens // SIZE) > cache.num_blocks - cache.watermark
            continue
        outcome, expected = outcomes[request.id], alone(request, cache.window)
        assert list(outcome.tokens) == heard[request.id] == expected[: outcome.output_tokens]
        assert outcome.reason == "aborted" or len(outcome.tokens) == len(expected)
    stats = cache.stats()
    assert stats.used_blocks == stats.num_sequences == 0
    assert scheduler.counters.output_tokens == sum(map(len, heard.values()))


@settings(max_examples=settings.default.max_examples, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 14), st.integers(0, 2)), min_size=1, max_size=10),
    st.sampled_from(["recompute", "swap"]),
    st.integers(0, 9),
    st.integers(0, 2),
)
def test_counting_blocks_gives_the_steps_of_the_real_bookkeeping(sizes, preempt, host, watermark):
    def steps_over(cache):
        scheduler = Scheduler(cache, max_num_seqs=4, max_batch_tokens=10, preempt=preempt)
        for number, (prompt, new, priority) in enumerate(sizes):
            scheduler.submit(Request(number, prompt, new, priority=priority))
        steps = []
        while (step := scheduler.schedule(0.0)) is not None:
            steps.append(step)
            if isinstance(cache, ContentCache):
                for name, length in zip(step.seq_ids, step.context_lens, strict=True):
                    cache.mark_computed(name, length)
            scheduler.complete(step, None, 0.0)
            cache.check_invariants()
        return steps, scheduler.counters

    options = {"watermark": watermark, "num_host_blocks": host}
    counted, counters = steps_over(CountingCache(16, SIZE, **options))
    real, real_counters = steps_over(ContentCache(16, SIZE, prefix_caching=False, **options))
    assert counted == real and counters == real_counters


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 8), st.sampled_from("abc")), min_size=20, max_size=40))
def test_tenants_with_work_are_served_alike_whatever_they_ask_for(asked):
    """The bound of virtual token counters: two tenants that both wait all the while are at most one admission apart,
    besides what runs."""
    scheduler = Scheduler(CountingCache(1000, SIZE), max_num_seqs=2, max_batch_tokens=64)
    for number, (prompt, new, tenant) in enumerate(asked):
        scheduler.submit(Request(number, prompt, new, tenant=tenant))
    left = Counter(tenant for _, _, tenant in asked)
    started: set[int] = set()
    while (step := scheduler.schedule(0.0)) is not None:
        for name in set(step.seq_ids) - started:
            started.add(name)
            left[asked[name][2]] -= 1
        scheduler.complete(step, None, 0.0)
        served = [scheduler._line.served[tenant] for tenant, waiting in left.items() if waiting > 0]
        # a request costs at most 12 + 2 * 8; two of them run
        assert not served or max(served) - min(served) <= 3 * (12 + 2 * 8)
