"""Continuous batching: nothing lost, no limit broken, and the same steps as a simulator that takes them one by one."""

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pagegen_autotune import load as load_module
from pagegen_autotune import simulation as simulation_module
from pagegen_autotune.load import offered
from pagegen_autotune.prompts import prompt_of
from pagegen_autotune.simulation import BLOCK_TOKENS, Server, Simulation, Step, cache_tokens
from pagegen_autotune.trace import Trace, read_trace
from serving_fakes import ContentCache, FakeModel, TickingClock

from pagegen.cache import BlockAllocator
from pagegen.serving import Request, Scheduler, replay

# times that are sums of powers of two are exact, so that two orders of adding them up agree
EXACT = {"base_s": 2**-6, "prefill_token_s": 2**-13, "context_token_s": 2**-20, "seq_s": 2**-15}


def trace(requests, arrivals=None):
    """A trace of (prompt, output) pairs."""
    prompts, outputs = zip(*requests, strict=True)
    return Trace(
        arrival_s=None if arrivals is None else np.array(arrivals, dtype=np.float64),
        prompt_tokens=np.array(prompts, dtype=np.int64),
        output_tokens=np.array(outputs, dtype=np.int64),
    )


@st.composite
def cases(draw):
    slots = draw(st.integers(1, 6))
    blocks = draw(st.integers(1, 12))
    server = Server(
        max_num_seqs=slots,
        max_batch_tokens=slots + draw(st.integers(0, 40)),
        kv_tokens=blocks * BLOCK_TOKENS + draw(st.integers(0, BLOCK_TOKENS - 1)),
        **EXACT,
    )
    request = st.tuples(st.integers(1, 100), st.integers(0, 120))
    requests = draw(st.lists(request, min_size=1, max_size=14))
    ticks = draw(st.none() | st.lists(st.integers(0, 3000), min_size=len(requests), max_size=len(requests)))
    return trace(requests, None if ticks is None else [tick / 1024 for tick in sorted(ticks)]), server


def run(requests, server, **options):
    simulation = Simulation(requests, server, **options)
    return simulation, list(simulation.steps())


def one_by_one(steps):
    return [step.at(offset) for step in steps for offset in range(step.count)]


def naive(requests, server):
    """The policy of the module's docstring, one step at a time, with nothing kept but each request's two counters."""
    arrivals = [0.0] * len(requests) if requests.arrival_s is None else requests.arrival_s.tolist()
    prompts, outputs = requests.prompt_tokens.tolist(), requests.output_tokens.tolist()
    capacity = server.kv_tokens // 16
    computed, generated, reserved = {}, {}, {}
    queue, running, batches, now, arrived = [], [], [], 0.0, 0
    while True:
        while arrived < len(arrivals) and arrivals[arrived] <= now:
            if -(-(prompts[arrived] + max(outputs[arrived] - 1, 0)) // 16) <= capacity:
                queue.append(arrived)
                generated[arrived] = 0
            arrived += 1
        if not queue and not running:
            if arrived == len(arrivals):
                return batches
            now = arrivals[arrived]
            continue
        preempted = False
        for r in list(running):
            while r in running and computed[r] % 16 == 0 and reserved[r] == computed[r] // 16:
                if sum(reserved[x] for x in running) < capacity:
                    reserved[r] += 1
                else:
                    preempted = True
                    queue.insert(0, running.pop())

        def pending(r):
            return prompts[r] + generated[r] - computed[r]

        batch = [(r, 1) for r in running if pending(r) == 1]
        budget = server.max_batch_tokens - len(batch)
        for r in [r for r in running if pending(r) > 1]:
            if budget:
                batch.append((r, min(budget, pending(r))))
                budget -= batch[-1][1]
        while queue and not preempted and budget and len(running) < server.max_num_seqs:
            r = queue[0]
            need = -(-(prompts[r] + generated[r]) // 16)
            if sum(reserved[x] for x in running) + need > capacity:
                break
            running.append(queue.pop(0))
            computed[r], reserved[r] = 0, need
            batch.append((r, min(budget, pending(r))))
            budget -= batch[-1][1]
        for r, query in batch:
            computed[r] += query
        batches.append((tuple(computed[r] for r, _ in batch), tuple(query for _, query in batch)))
        now += server.step_s(
            prefill_tokens=sum(query for _, query in batch if query > 1),
            context_tokens=sum(computed[r] for r, _ in batch),
            num_seqs=len(batch),
        )
        for r, _ in batch:
            if pending(r) == 0:
                generated[r] += 1
        running = [r for r in running if generated[r] < max(outputs[r], 1)]


@settings(max_examples=2 * settings.default.max_examples, deadline=None)
@given(cases())
@example((trace([(31, 30), (31, 30)]), Server(max_num_seqs=2, kv_tokens=96, **EXACT)))
def test_steps_are_those_of_a_simulator_that_takes_them_one_by_one(case):
    requests, server = case
    _, steps = run(requests, server)
    assert [(w.context_lens, w.query_lens) for w in one_by_one(steps)] == naive(requests, server)


@settings(max_examples=settings.default.max_examples, deadline=None)
@given(cases())
def test_every_request_ends_with_all_its_tokens_or_is_rejected(case):
    requests, server = case
    outcomes = []
    simulation, steps = run(requests, server, on_end=outcomes.append)
    ended = sorted([outcome.request.id for outcome in outcomes] + simulation.rejected)
    assert ended == list(range(len(requests))) and simulation.finished == len(outcomes)
    needed = 0
    for outcome in outcomes:
        prompt, output = requests.prompt_tokens[outcome.request.id], requests.output_tokens[outcome.request.id]
        assert outcome.output_tokens == max(output, 1) == 1 + sum(outcome.times.gap_counts)
        needed += cache_tokens(prompt, output)
    counters = simulation.scheduler.counters
    batches = one_by_one(steps)
    assert sum(batch.total_q for batch in batches) == needed + counters.recomputed_tokens == counters.computed_tokens
    assert len(batches) == counters.steps
    assert (counters.recomputed_tokens > 0) <= (counters.preemptions > 0)
    for request in simulation.rejected:
        assert (
            cache_tokens(requests.prompt_tokens[request], requests.output_tokens[request]) > server.kv_tokens // 16 * 16
        )


@settings(max_examples=settings.default.max_examples, deadline=None)
@given(cases())
def test_no_step_exceeds_memory_token_budget_or_slots(case):
    requests, server = case
    simulation = Simulation(requests, server)
    for step in simulation.steps():
        for batch in (step.at(0), step.at(step.count - 1)):
            assert batch.num_seqs <= server.max_num_seqs
            assert batch.total_q <= server.max_batch_tokens
            assert sum(-(-n // BLOCK_TOKENS) * BLOCK_TOKENS for n in batch.context_lens) <= server.kv_tokens
            assert all(1 <= q <= n for q, n in zip(batch.query_lens, batch.context_lens, strict=True))
        simulation.cache.check_invariants()
    assert simulation.cache.free_blocks == server.num_blocks and not simulation.scheduler.waiting


@settings(max_examples=60, deadline=None)
@given(cases())
def test_a_real_run_takes_the_steps_of_the_simulation(case):
    """The same requests with tokens, real bookkeeping and a model, under a clock set forward by the same step times."""
    requests, server = case
    _, simulated = run(requests, server)
    cache = ContentCache(server.num_blocks, BLOCK_TOKENS, prefix_caching=False)
    scheduler = Scheduler(cache, max_num_seqs=server.max_num_seqs, max_batch_tokens=server.max_batch_tokens)
    model, clock, taken = FakeModel(cache), TickingClock(), []

    def compute(step):
        taken.append((step.context_lens, step.query_lens))
        clock.time_s += server.step_s(
            prefill_tokens=sum(query for query in step.query_lens if query > 1),
            context_tokens=sum(step.context_lens),
            num_seqs=len(step.seq_ids),
        )
        return model(step)

    arrivals = [0.0] * len(requests) if requests.arrival_s is None else requests.arrival_s.tolist()
    sizes = list(zip(requests.prompt_tokens.tolist(), requests.output_tokens.tolist(), arrivals, strict=True))
    fitting = [
        Request(i, range(prompt), max(output, 1), arrival_s=arrival)
        for i, (prompt, output, arrival) in enumerate(sizes)
        if -(-cache_tokens(prompt, output) // BLOCK_TOKENS) <= server.num_blocks
    ]
    for _ in replay(scheduler, fitting, compute, clock):
        pass
    assert taken == [(load.context_lens, load.query_lens) for load in one_by_one(simulated)]


def test_latencies_of_a_simulation_are_those_of_its_steps():
    server = Server(base_s=1.0, prefill_token_s=0.0, context_token_s=0.25, seq_s=0.0)
    ended = []
    run(trace([(4, 3)], [10.0]), server, on_end=ended.append)
    times = ended[0].times
    assert times.time_to_first_token_s == 1 + 4 / 4
    assert sum(times.gap_counts) == 2 and times.end_to_end_s == 2 + (1 + 5 / 4) + (1 + 6 / 4)
    assert sum(gap * count for gap, count in zip(times.gaps_s, times.gap_counts, strict=True)) == 4.75


def shared_prompts():
    """Two conversations of two turns: the second turn repeats the first's 32 tokens."""
    sizes = trace([(32, 4), (32, 4), (80, 4), (80, 4)], [0.0, 1.0, 50.0, 51.0])
    runs = (((0, 1),), ((2, 3),), ((0, 1), (7, 9)), ((2, 3), (10, 12)))
    return Trace(
        arrival_s=sizes.arrival_s,
        prompt_tokens=sizes.prompt_tokens,
        output_tokens=sizes.output_tokens,
        prefix_runs=runs,
    )


def test_prompts_share_what_the_trace_says_only_where_that_is_asked_for():
    def hits(**options):
        ended = []
        simulation, _ = run(shared_prompts(), Server(), on_end=ended.append, **options)
        return [outcome.hit_tokens for outcome in ended], simulation.scheduler.counters.computed_tokens

    assert hits(prefix_block_tokens=16) == ([0, 0, 32, 32], 64 + 2 * 48 + 4 * 3)
    assert hits() == ([0, 0, 0, 0], 64 + 2 * 80 + 4 * 3)


class Allocator(BlockAllocator):
    """A real allocator in place of the counts."""

    @property
    def shared_blocks(self):
        blocks = [self.block_ids(seq_id) for seq_id in self.sequences]
        return sum(map(len, blocks)) - len({block for ids in blocks for block in ids})


@st.composite
def sharing_cases(draw):
    """A case whose prompts continue each other, with ids of 8 to 48 tokens: finer and coarser than blocks, and neither
    a multiple of them."""
    requests, server = draw(cases())
    size = draw(st.sampled_from([8, 16, 24, 48]))
    runs = []
    for i, prompt in enumerate(requests.prompt_tokens.tolist()):
        blocks = draw(st.sampled_from([prompt // size, -(-prompt // size)]))
        common = draw(st.integers(0, blocks))
        mine = draw(st.integers(0, 2))
        shared = ((mine * 100, mine * 100 + common - 1),) if common else ()
        own = ((1000 * i + 500, 1000 * i + 500 + blocks - common - 1),) if blocks > common else ()
        runs.append((*shared, *own))
    shared_trace = Trace(
        arrival_s=requests.arrival_s, prompt_tokens=requests.prompt_tokens, output_tokens=requests.output_tokens,
        prefix_runs=runs,
    )  # fmt: skip
    return shared_trace, server, size


@settings(max_examples=settings.default.max_examples, deadline=None)
@given(sharing_cases())
def test_prompts_that_share_take_the_steps_that_the_real_bookkeeping_gives_them(case):
    requests, server, size = case
    found = []
    for cache in (simulation_module.SharedCounts, Allocator):
        ended = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(simulation_module, "SharedCounts", cache)
            simulation, steps = run(requests, server, prefix_block_tokens=size, on_end=ended.append)
        simulation.cache.check_invariants()
        times = [(o.request.id, o.hit_tokens, o.preemptions, o.times) for o in ended]
        found.append((steps, times, simulation.scheduler.counters))
    assert found[0] == found[1]


def test_a_trace_keeps_its_prefixes_if_asked_in_order_of_arrival(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens,prefix_hash_ids\n5,32,1,7-8\n1,16,1,\n2,40,1,0 4\n")
    assert read_trace(path).prefix_runs is None
    kept = read_trace(path, keep_prefixes=True)
    assert kept.prefix_runs == ((), ((0, 0), (4, 4)), ((7, 8),))
    assert kept.take(np.array([2, 0]), None).prefix_runs == (((7, 8),), ())


def test_prefixes_that_were_not_kept_are_asked_for():
    with pytest.raises(ValueError, match="prefix_block_tokens needs a trace read with keep_prefixes=True"):
        Simulation(trace([(5, 5)]), Server(), prefix_block_tokens=16)


def test_prompts_agree_exactly_as_far_as_their_ids_do():
    long = prompt_of(((5, 6), (9, 9)), 0, 40, 16)
    assert (
        len(long) == 40 and long[:32] == prompt_of(((5, 6),), 1, 32, 16) and long[32:] == prompt_of(((9, 9),), 2, 8, 16)
    )
    # what no id names is nobody else's; an id of 64 bits is taken as well
    assert prompt_of((), 3, 5, 16) != prompt_of((), 4, 5, 16)
    assert prompt_of(((2**64 - 1, 2**64 - 1),), 5, 2, 16).tolist() == [2**31 - 1] * 2


def test_simulation_is_deterministic():
    requests = trace([(50, 30), (90, 3), (5, 100)] * 5, np.arange(15) * 0.01)
    server = Server(max_num_seqs=4, max_batch_tokens=32, kv_tokens=256)
    assert run(requests, server)[1] == run(requests, server)[1]


def test_one_request_is_prefilled_in_chunks_and_then_decodes():
    _, steps = run(trace([(10, 3)]), Server(max_num_seqs=1, max_batch_tokens=4))
    batches = [(w.context_lens[0], w.query_lens[0]) for w in one_by_one(steps)]
    # the third chunk yields the first output; the third output is never fed back
    assert batches == [(4, 4), (8, 4), (10, 2), (11, 1), (12, 1)]


@pytest.mark.parametrize("outputs", [0, 1])
def test_request_for_at_most_one_output_ends_with_its_prompt(outputs):
    _, steps = run(trace([(10, outputs)]), Server())
    assert one_by_one(steps) == [Step((10,), (10,)).at(0)]


def test_decodes_go_on_while_a_prompt_is_prefilled():
    server = Server(max_num_seqs=2, max_batch_tokens=8, base_s=1.0)
    _, steps = run(trace([(4, 20), (30, 2)], [0.0, 2.5]), server)
    mixed = [w.query_lens for w in one_by_one(steps) if w.max_query_len > 1 and w.num_seqs == 2]
    assert mixed == [(1, 7), (1, 7), (1, 7), (1, 7), (1, 2)]


def test_the_last_admitted_is_preempted_and_ends_later():
    # two requests grow to 3 blocks each, the memory holds 5
    ended = []
    requests = trace([(16, 33), (16, 33)])
    simulation, steps = run(requests, Server(max_num_seqs=2, kv_tokens=80), on_end=ended.append)
    assert simulation.scheduler.counters.preemptions == 1
    assert [outcome.request.id for outcome in ended] == [0, 1]
    # it had prompt and 16 outputs' tokens in the cache when the other needed a third block
    assert simulation.scheduler.counters.recomputed_tokens == 32
    assert (33,) in [w.query_lens for w in one_by_one(steps)]


@pytest.mark.parametrize("request_", [(10**6, 5), (5, 10**6)])
def test_request_larger_than_memory_is_rejected_and_the_rest_goes_on(request_):
    simulation, _ = run(trace([request_, (40, 2), request_]), Server(kv_tokens=64, max_num_seqs=2))
    assert simulation.rejected == [0, 2] and simulation.finished == 1


def test_millions_of_output_tokens_cost_little_work():
    simulation, steps = run(trace([(10, 2**24)] * 4), Server(kv_tokens=2**27))
    assert sum(step.count for step in steps) == 2**24 and len(steps) < 100
    assert simulation.finished == 4


def test_idle_time_between_requests_takes_no_steps():
    simulation, steps = run(trace([(5, 1), (5, 1)], [0.0, 1e9]), Server())
    assert len(steps) == 2 and simulation.now_s > 1e9


def test_step_time_is_the_stated_sum():
    server = Server(base_s=1.0, prefill_token_s=0.1, context_token_s=0.01, seq_s=0.001)
    assert server.step_s(prefill_tokens=20, context_tokens=300, num_seqs=4) == pytest.approx(1 + 2 + 3 + 0.004)
    simulation, _ = run(trace([(20, 3)]), server)
    assert simulation.now_s == pytest.approx((1 + 2 + 0.2 + 0.001) + (1 + 0.21 + 0.001) + (1 + 0.22 + 0.001))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_num_seqs", 0),
        ("max_batch_tokens", 63),
        ("kv_tokens", 15),
        ("base_s", 0.0),
        ("base_s", math.nan),
        ("seq_s", -1.0),
        ("context_token_s", math.inf),
    ],
)
def test_server_names_the_value_it_refuses(field, value):
    with pytest.raises(ValueError, match=f"{field} must"):
        Server(**{field: value})


def poisson(n, rate, seed=0):
    generator = np.random.default_rng(seed)
    arrivals = np.cumsum(generator.exponential(1 / rate, n))
    return trace(list(zip(generator.integers(1, 2000, n), generator.integers(1, 300, n), strict=True)), arrivals)


@pytest.mark.parametrize("rate", [0.01, 1.0, 1000.0])
def test_load_is_scaled_so_that_the_server_is_neither_idle_nor_overloaded(rate):
    server = Server(max_num_seqs=16)
    load = offered(poisson(3000, rate), server, utilisation=0.8, rate_scale=None, seed=0)
    simulation = Simulation(load.trace, server)
    queued = [simulation.scheduler.waiting for _ in simulation.steps()]
    arrival_rate = (len(load.trace) - 1) / load.trace.duration_s
    assert arrival_rate == pytest.approx(0.8 * load.capacity_per_s, rel=0.05)
    assert np.median(queued) < 5
    # it ends soon after the last arrival: nothing piled up
    assert simulation.now_s < 1.1 * load.trace.arrival_s[-1]


def test_thinning_keeps_the_clock_of_the_trace():
    load = offered(poisson(10_000, 100), Server(), utilisation=0.8, rate_scale=0.5, seed=1)
    assert load.kept_share == 0.5 and len(load.trace) == pytest.approx(5000, rel=0.05)
    assert load.trace.duration_s == pytest.approx(100, rel=0.02)
    assert load.capacity_per_s is None


def test_speeding_up_keeps_every_request_and_the_shape_of_the_arrivals():
    slow = poisson(500, 1.0)
    load = offered(slow, Server(), utilisation=0.8, rate_scale=4.0, seed=1)
    assert np.allclose(np.diff(load.trace.arrival_s) * 4, np.diff(slow.arrival_s))


def test_long_trace_is_simulated_in_stretches_from_all_of_it():
    n = 200_000
    long = trace([(1 + i % 7, 1) for i in range(n)], np.arange(n) * 0.5)
    numbered = Trace(arrival_s=long.arrival_s, prompt_tokens=np.arange(1, n + 1), output_tokens=long.output_tokens)
    load = offered(numbered, Server(), utilisation=0.8, rate_scale=1.0, seed=0)
    assert len(load.trace) == load_module.MAX_REQUESTS
    assert load.trace.prompt_tokens[0] == 1 and load.trace.prompt_tokens[-1] == n
    # the seams do not show: neighbours arrive half a second apart all along
    assert np.allclose(np.diff(load.trace.arrival_s), 0.5)


@pytest.mark.parametrize("arrivals", [None, [7.0, 7.0, 7.0]])
def test_trace_without_times_or_of_one_moment_is_a_closed_loop(arrivals):
    load = offered(trace([(5, 5)] * 3, arrivals), Server(), utilisation=0.8, rate_scale=None, seed=0)
    assert load.trace.arrival_s is None and load.rate_scale is None


def test_requests_that_never_fit_are_counted_and_none_that_fits_is_an_error():
    requests = trace([(100, 5), (10, 5), (10, 60)], [0.0, 1.0, 2.0])
    load = offered(requests, Server(kv_tokens=64), utilisation=0.8, rate_scale=None, seed=0)
    assert load.rejected == 2 and load.trace.prompt_tokens.tolist() == [10]
    with pytest.raises(ValueError, match="kv_tokens must hold .*smallest request \\(18 tokens .*got 16"):
        offered(
            trace([(100, 5), (17, 2)]), Server(max_num_seqs=1, kv_tokens=16), utilisation=0.8, rate_scale=None, seed=0
        )
