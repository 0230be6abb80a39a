"""Continuous batching: who shares a step, who gives way, and that nobody's tokens change for it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from serving_fakes import ContentCache, FakeModel, TickingClock, alone, next_token, serve

from pagegen.cache import BlockAllocator, GroupedAllocator, OutOfBlocks
from pagegen.serving import CountingCache, NeverFits, Request, Scheduler, replay, residents, waiting
from pagegen.serving.job import Job


def request(name, prompt=10, new=5, **options):
    """A request whose prompt is `prompt` tokens of its own, or those given."""
    tokens = [hash_of(name) * 1000 + i for i in range(prompt)] if isinstance(prompt, int) else prompt
    return Request(name, tokens, new, **options)


def hash_of(name):
    return sum(ord(letter) * 31**i for i, letter in enumerate(str(name))) % 100_000


def scheduler_of(blocks=64, size=4, *, host=0, watermark=0, prefix=True, **options):
    host_options = {"num_host_blocks": host} if host else {}
    return Scheduler(ContentCache(blocks, size, watermark=watermark, prefix_caching=prefix, **host_options), **options)


def assert_all_free(cache):
    cache.check_invariants()
    stats = cache.stats()
    assert stats.used_blocks == 0 and stats.num_sequences == 0


# --- a step -------------------------------------------------------------------------------------------------------


def test_decodes_come_first_and_a_prompt_takes_what_is_left():
    scheduler = scheduler_of(max_num_seqs=4, max_batch_tokens=8)
    model = FakeModel(scheduler.cache)
    for name in ("a", "b"):
        scheduler.submit(request(name, prompt=3, new=9))
    scheduler.complete(step := scheduler.schedule(0), model(step), 1)
    scheduler.submit(request("long", prompt=20, new=2))
    for expected in ((1, 1, 6), (1, 1, 6), (1, 1, 6), (1, 1, 2)):
        step = scheduler.schedule(1)
        assert step.query_lens == expected and step.seq_ids == ("a", "b", "long")
        scheduler.complete(step, model(step), 1)
    assert step.samples == (True, True, True)


def test_no_decode_waits_for_an_admission():
    scheduler = scheduler_of(max_num_seqs=4, max_batch_tokens=6)
    model = FakeModel(scheduler.cache)
    requests = [request(i, prompt=5 + 7 * (i % 3), new=12, arrival_s=i // 2) for i in range(10)]
    seen = {}
    serve(scheduler, requests, model, on_token=lambda name, token: seen.setdefault(name, []).append(token))
    first, last = {}, {}
    for step in model.steps:
        for name, samples in zip(step.seq_ids, step.samples, strict=True):
            if samples:
                first.setdefault(name, step.number)
                last[name] = step.number
    assert all(last[r.id] - first[r.id] == 11 for r in requests)


def test_limits_of_sequences_and_tokens_hold_in_every_step():
    scheduler = scheduler_of(max_num_seqs=3, max_batch_tokens=7)
    model = FakeModel(scheduler.cache)
    serve(scheduler, [request(i, prompt=1 + i * 3, new=4) for i in range(9)], model)
    assert all(len(step.seq_ids) <= 3 and step.num_tokens <= 7 for step in model.steps)
    assert max(step.num_tokens for step in model.steps) == 7 and max(len(s.seq_ids) for s in model.steps) == 3


def test_a_second_step_is_refused_while_one_is_in_flight():
    scheduler = scheduler_of()
    scheduler.submit(request("a"))
    step = scheduler.schedule(0)
    with pytest.raises(ValueError, match="step 0 must be completed or failed before another"):
        scheduler.schedule(0)
    scheduler.complete(step, FakeModel(scheduler.cache)(step), 1)
    with pytest.raises(ValueError, match=r"step must be the one in flight \(none is\), got 0"):
        scheduler.complete(step, [1], 1)


def test_a_wrong_number_of_tokens_is_refused_and_the_step_stays_in_flight():
    scheduler = scheduler_of()
    scheduler.submit(request("a"))
    step = scheduler.schedule(0)
    with pytest.raises(ValueError, match=r"tokens must be one a row of the step \(1\), got 2"):
        scheduler.complete(step, [1, 2], 1)
    scheduler.complete(step, FakeModel(scheduler.cache)(step), 1)


def test_an_urgent_prompt_is_computed_before_an_older_one():
    scheduler = scheduler_of(max_num_seqs=2, max_batch_tokens=8)
    model = FakeModel(scheduler.cache)
    requests = [request("patient", prompt=40, priority=1), request("urgent", prompt=16, arrival_s=1.5)]
    heard = []
    serve(scheduler, requests, model, on_token=lambda name, token: heard.append(name))
    assert [step.seq_ids for step in model.steps[:4]] == [("patient",)] * 2 + [("urgent",)] * 2
    assert all(step.seq_ids == ("urgent", "patient") for step in model.steps[4:7])
    assert heard.index("patient") > heard.index("urgent") + 2


def test_nothing_to_do_is_no_step():
    assert scheduler_of().schedule(0.0) is None


# --- what comes out -----------------------------------------------------------------------------------------------


def test_every_request_gets_the_tokens_it_gets_alone():
    requests = [request(i, prompt=1 + i, new=1 + i % 5) for i in range(12)]
    scheduler = scheduler_of(max_num_seqs=4, max_batch_tokens=9)
    outcomes = serve(scheduler, requests)
    assert {name: list(o.tokens) for name, o in outcomes.items()} == {r.id: alone(r) for r in requests}
    assert all(o.reason == "length" and o.output_tokens == o.request.max_new_tokens for o in outcomes.values())
    assert_all_free(scheduler.cache)


def test_a_stop_token_ends_a_request_and_is_kept():
    free = alone(request("a", new=8))
    stopped = request("a", new=8, stop_tokens={free[3]})
    outcome = serve(scheduler_of(), [stopped])["a"]
    assert outcome.reason == "stop" and list(outcome.tokens) == free[: free.index(free[3]) + 1]


def test_steps_without_tokens_never_stop_early():
    outcome = serve(scheduler_of(), [request("a", new=4, stop_tokens={0})], model=lambda step: None)["a"]
    assert outcome.reason == "length" and outcome.output_tokens == 4


def test_tokens_stream_in_order_while_the_request_runs():
    scheduler = scheduler_of(max_num_seqs=2, max_batch_tokens=8)
    heard = []
    requests = [request(i, prompt=4, new=5) for i in range(5)]
    outcomes = serve(scheduler, requests, on_token=lambda name, token: heard.append((name, token)))
    for r in requests:
        assert [token for name, token in heard if name == r.id] == list(outcomes[r.id].tokens)
    # the first two run side by side: a token of each in turn, nothing held back to the end
    assert [name for name, _ in heard[:10]] == [0, 1] * 5


def test_a_callback_that_raises_costs_no_other_request_a_token():
    scheduler = scheduler_of()
    model = FakeModel(scheduler.cache)
    heard = []

    def fail(name, token):
        raise KeyboardInterrupt

    scheduler.submit(request("bad", new=1), fail)
    scheduler.submit(request("good", new=2), lambda name, token: heard.append(token))
    step = scheduler.schedule(0)
    with pytest.raises(KeyboardInterrupt):
        scheduler.complete(step, model(step), 1)
    ended = scheduler.complete(step := scheduler.schedule(1), model(step), 2)
    assert heard == alone(request("good", new=2))
    assert [outcome.request.id for outcome in ended] == ["good"]
    assert [outcome.request.id for outcome in scheduler.drain()] == ["bad"]
    assert scheduler.drain() == []
    assert_all_free(scheduler.cache)


def test_a_prompt_known_before_is_found_and_not_computed_again():
    scheduler = scheduler_of()
    model = FakeModel(scheduler.cache)
    serve(scheduler, [request("a", prompt=range(12), new=2)], model)
    outcome = serve(scheduler, [request("b", prompt=[*range(12), 99], new=2)], model)["b"]
    assert outcome.hit_tokens == 12 and model.steps[-2].query_lens == (1,)
    assert list(outcome.tokens) == alone(outcome.request)


def test_another_context_finds_nothing():
    scheduler = scheduler_of()
    requests = [request("a", prompt=range(12)), request("b", prompt=range(12), context=b"adapter 2", arrival_s=9)]
    assert serve(scheduler, requests)["b"].hit_tokens == 0


def test_prompts_given_by_their_length_share_nothing_and_keep_no_tokens():
    scheduler = scheduler_of()

    def announce(step):
        scheduler.cache.mark_all_computed(step.seq_ids, step.context_lens)

    outcomes = serve(scheduler, [Request(i, 12, 3, arrival_s=9 * i) for i in range(2)], model=announce)
    assert [(o.hit_tokens, o.output_tokens, len(o.tokens)) for o in outcomes.values()] == [(0, 3, 0)] * 2


# --- admission ----------------------------------------------------------------------------------------------------


def test_a_request_that_can_never_fit_is_refused_and_nothing_is_lost():
    scheduler = scheduler_of(blocks=4, size=4)
    scheduler.submit(request("a", prompt=9, new=8))  # 16 tokens in the cache: the last is never fed back
    with pytest.raises(NeverFits, match=r"request 'b' needs 5 blocks for 9 prompt and up to 9 new tokens.* 4 blocks:"):
        scheduler.submit(request("b", prompt=9, new=9))
    with pytest.raises(OutOfBlocks):
        scheduler.submit(request("b", prompt=99, new=1))
    assert scheduler.waiting == 1
    outcomes = serve(scheduler, [request("b", prompt=3, new=2)])
    assert {name: list(o.tokens) for name, o in outcomes.items()} == {
        "a": alone(request("a", prompt=9, new=8)),
        "b": alone(request("b", prompt=3, new=2)),
    }


def test_blocks_kept_back_count_where_a_request_is_refused():
    scheduler = scheduler_of(blocks=4, size=4, watermark=1)
    with pytest.raises(NeverFits, match="has 4 blocks, 1 of them kept back"):
        scheduler.submit(request("a", prompt=9, new=8))
    assert serve(scheduler, [request("a", prompt=9, new=4)])["a"].output_tokens == 4


def test_the_look_ahead_keeps_room_for_answers_but_never_more_than_they_need():
    def admitted(lookahead):
        scheduler = scheduler_of(blocks=6, size=4, lookahead=lookahead)
        for name in "abc":
            scheduler.submit(request(name, prompt=8, new=4))
        return len(scheduler.schedule(0).seq_ids)

    assert [admitted(0), admitted(1), admitted(10**6)] == [3, 2, 2]


def test_a_smaller_request_does_not_overtake_the_head_of_the_line():
    scheduler = scheduler_of(blocks=8, size=4, max_num_seqs=4)
    model = FakeModel(scheduler.cache)
    requests = [request("first", prompt=16, new=9), request("large", prompt=24, new=2), request("small", prompt=4)]
    serve(scheduler, requests, model)
    started = list(dict.fromkeys(name for step in model.steps for name in step.seq_ids))
    assert started == ["first", "large", "small"]


def test_the_head_of_the_line_is_let_in_once_its_prefix_can_be_found():
    # 8 blocks: the first prompt takes 6; the second has 6 blocks too, of which it shares 5
    scheduler = scheduler_of(blocks=8, size=4)
    model = FakeModel(scheduler.cache)
    requests = [request("a", prompt=range(23), new=8), request("b", prompt=[*range(20), 99], new=2)]
    outcomes = serve(scheduler, requests, model)
    assert model.steps[0].seq_ids == ("a",) and model.steps[1].seq_ids == ("a", "b")
    assert outcomes["b"].hit_tokens == 20 and outcomes["b"].preemptions == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1, got 0"),
        ({"max_num_seqs": 9, "max_batch_tokens": 8}, "max_batch_tokens must be at least 9, got 8"),
        ({"preempt": "kill"}, "preempt must be one of 'recompute', 'swap', got 'kill'"),
        ({"lookahead": -1}, "lookahead must be at least 0"),
        ({"max_overtakes": 0}, "max_overtakes must be at least 1"),
    ],
)
def test_limits_that_make_no_sense_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        scheduler_of(**options)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([], 1), {}, "prompt must hold at least one token, got none for request 'r'"),
        ((0, 1), {}, "prompt must be at least 1, got 0"),
        (([-1], 1), {}, "prompt must be in 0"),
        (([1], 0), {}, "max_new_tokens must be at least 1, got 0"),
        (([1], 1), {"arrival_s": float("nan")}, "arrival_s must be a time in seconds"),
        (([1], 1), {"context": "lora"}, "context must be bytes"),
        ((["a"], 1), {}, "prompt must be a sequence of integers"),
    ],
)
def test_requests_that_make_no_sense_are_refused_by_name(arguments, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Request("r", *arguments, **options)


def test_an_id_is_new_until_its_request_has_ended():
    scheduler = scheduler_of()
    scheduler.submit(request("a"))
    with pytest.raises(ValueError, match="request.id must be new, got 'a', which is being served"):
        scheduler.submit(request("a"))
    serve(scheduler, [])
    scheduler.submit(request("a"))


# --- preemption ---------------------------------------------------------------------------------------------------

TIGHT = [request(name, prompt=8, new=17) for name in "abc"]  # 6 blocks each in the end, 2 at first


@pytest.mark.parametrize("preempt", ["recompute", "swap"])
@pytest.mark.parametrize("prefix", [True, False])
def test_a_preempted_request_ends_with_the_tokens_of_one_never_preempted(preempt, prefix):
    scheduler = scheduler_of(blocks=9, size=4, host=9, preempt=preempt, prefix=prefix)
    heard = []
    outcomes = serve(scheduler, TIGHT, on_token=lambda name, token: heard.append((name, token)))
    assert {name: list(o.tokens) for name, o in outcomes.items()} == {r.id: alone(r) for r in TIGHT}
    assert sum(o.preemptions for o in outcomes.values()) > 0
    # nothing is streamed twice
    assert all([t for n, t in heard if n == r.id] == alone(r) for r in TIGHT)
    assert_all_free(scheduler.cache)


def test_the_last_admitted_of_the_worst_priority_gives_way():
    requests = [
        request("first", prompt=8, new=17, priority=1),
        request("second", prompt=8, new=17, priority=1),
        request("late but urgent", prompt=8, new=17, priority=0, arrival_s=3.0),
    ]
    outcomes = serve(scheduler_of(blocks=12, size=4), requests)
    assert outcomes["late but urgent"].preemptions == outcomes["first"].preemptions == 0
    assert outcomes["second"].preemptions > 0


def test_a_step_that_preempts_admits_nobody():
    def run(newcomer_at):
        """The number of the first step that preempts, and the next one's rows; an urgent newcomer before one."""
        scheduler = scheduler_of(blocks=9, size=4)
        model = FakeModel(scheduler.cache)
        for r in TIGHT:
            scheduler.submit(r)
        for number in range(100):
            if number == newcomer_at:
                scheduler.submit(request("newcomer", prompt=1, new=1, priority=-1))
            step = scheduler.schedule(0)
            if scheduler.counters.preemptions:
                scheduler.complete(step, model(step), 0)
                return number, step.seq_ids, scheduler.schedule(0).seq_ids
            scheduler.complete(step, model(step), 0)
        raise AssertionError("no step preempts")

    number, rows, _ = run(None)
    again, same_rows, next_rows = run(number)
    assert (again, same_rows) == (number, rows) and "newcomer" in next_rows


def test_what_is_computed_again_is_counted_and_the_prefix_cache_gives_back_the_rest():
    counters = {}
    for prefix in (False, True):
        scheduler = scheduler_of(blocks=9, size=4, prefix=prefix)
        model = FakeModel(scheduler.cache)
        serve(scheduler, TIGHT, model)
        counters[prefix] = scheduler.counters
        assert model.queries == counters[prefix].computed_tokens
        assert model.queries == sum(r.most_tokens for r in TIGHT) + counters[prefix].recomputed_tokens
    assert counters[False].recomputed_tokens > counters[True].recomputed_tokens >= 0


def test_swapped_blocks_are_counted_and_nothing_is_computed_twice():
    scheduler = scheduler_of(blocks=9, size=4, host=9, preempt="swap")
    model = FakeModel(scheduler.cache)
    serve(scheduler, TIGHT, model)
    counters = scheduler.counters
    assert counters.swap_outs == counters.preemptions > 0 and counters.recomputed_tokens == 0
    assert counters.swapped_out_blocks > 0
    assert model.queries == sum(r.most_tokens for r in TIGHT)


def test_where_host_memory_is_full_blocks_are_dropped():
    scheduler = scheduler_of(blocks=9, size=4, host=1, preempt="swap", prefix=False)
    outcomes = serve(scheduler, TIGHT)
    assert scheduler.counters.preemptions > scheduler.counters.swap_outs == 0
    assert {name: list(o.tokens) for name, o in outcomes.items()} == {r.id: alone(r) for r in TIGHT}


# --- priorities, tenants, nobody forever --------------------------------------------------------------------------


def order_of_answers(scheduler, requests):
    return list(serve(scheduler, requests))


def test_better_priorities_go_first_and_equal_ones_in_order_of_arrival():
    requests = [request(f"{priority}{i}", priority=priority) for i in range(2) for priority in (2, 0, 1)]
    assert order_of_answers(scheduler_of(max_num_seqs=1), requests) == ["00", "01", "10", "11", "20", "21"]


def test_a_flood_of_better_priorities_does_not_starve_a_worse_one():
    flood = [request(i, priority=0, new=1) for i in range(40)]
    order = order_of_answers(scheduler_of(max_num_seqs=1, max_overtakes=8), [request("low", priority=5), *flood])
    assert order.index("low") == 8


def test_a_starved_priority_gets_its_turn_and_no_more():
    flood = [request(i, priority=0, new=1) for i in range(40)]
    low = [request(f"low{i}", priority=5, new=1) for i in range(4)]
    order = order_of_answers(scheduler_of(max_num_seqs=1, max_overtakes=8), [*low, *flood])
    assert [order.index(r.id) for r in low] == [8, 17, 26, 35]


def test_several_starved_priorities_all_get_their_turn():
    flood = [request(i, priority=0, new=1) for i in range(60)]
    low = [request(f"low{p}", priority=p, new=1) for p in (9, 5, 7)]
    order = order_of_answers(scheduler_of(max_num_seqs=1, max_overtakes=8), [*low, *flood])
    assert max(order.index(r.id) for r in low) <= 10


@pytest.mark.parametrize("borne", [residents.SETBACKS_BORNE, 10**9])
def test_a_request_that_gave_way_often_enough_takes_the_better_priority(borne, monkeypatch):
    """An endless row of urgent requests, each of which outgrows the memory beside the patient one."""
    monkeypatch.setattr(residents, "SETBACKS_BORNE", borne)
    scheduler = scheduler_of(blocks=14, size=4, max_num_seqs=2, prefix=False)
    patient = request("patient", prompt=8, new=45, priority=7)
    urgent = [request(i, prompt=8, new=33, priority=0, arrival_s=i * 31) for i in range(30)]
    outcomes = serve(scheduler, [patient, *urgent])
    assert list(outcomes["patient"].tokens) == alone(patient)
    if borne == 3:
        assert outcomes["patient"].preemptions == 3
        assert outcomes["patient"].times.end_s < outcomes[3].times.end_s
    else:  # without the rule it would be last
        assert outcomes["patient"].times.end_s > outcomes[29].times.end_s


def test_a_prompt_being_computed_is_not_starved_of_budget_by_better_priorities():
    scheduler = scheduler_of(max_num_seqs=4, max_batch_tokens=8)
    flood = [request(i, prompt=24, new=1, arrival_s=i + 0.5) for i in range(60)]
    outcomes = serve(scheduler, [request("low", prompt=40, new=1, priority=1), *flood])
    # it has the first step and then every eighth: 8 tokens of each
    assert outcomes["low"].times.end_s <= 1 + 4 * 8 < outcomes[20].times.end_s


def test_a_tenant_that_floods_the_server_does_not_keep_another_waiting():
    flood = [request(i, new=4, tenant="loud") for i in range(50)]
    quiet = [request(f"q{i}", new=4, tenant="quiet") for i in range(3)]
    order = order_of_answers(scheduler_of(max_num_seqs=1), [*flood, *quiet])
    assert [order.index(r.id) for r in quiet] == [1, 3, 5]


def test_tenants_share_by_tokens_and_not_by_requests():
    large = [request(f"l{i}", prompt=40, new=4, tenant="large") for i in range(20)]
    small = [request(f"s{i}", prompt=4, new=4, tenant="small") for i in range(40)]
    order = order_of_answers(scheduler_of(max_num_seqs=1), [*large, *small])
    # a large request costs 40 + 2 * 4, a small one 4 + 2 * 4: a quarter
    assert 14 <= sum(name[0] == "s" for name in order[:20]) <= 17


def test_a_tenant_cannot_save_up_while_it_is_away():
    scheduler = scheduler_of(max_num_seqs=1)
    early = [request(f"a{i}", new=4, tenant="a") for i in range(20)]
    late_a = [request(f"la{i}", new=4, tenant="a", arrival_s=500) for i in range(10)]
    late_b = [request(f"lb{i}", new=4, tenant="b", arrival_s=500) for i in range(10)]
    order = order_of_answers(scheduler, [*early, *late_a, *late_b])
    assert 4 <= sum(name.startswith("la") for name in order[20:30]) <= 6


def test_what_a_preemption_makes_the_server_compute_again_is_not_charged():
    def served(blocks):
        scheduler = scheduler_of(blocks=blocks, size=4, prefix=False)
        serve(scheduler, [request(name, prompt=8, new=17, tenant=name) for name in "abc"])
        return [scheduler._line.served[name] for name in "abc"], scheduler.counters.preemptions

    (plenty, none), (tight, some) = served(64), served(9)
    assert plenty == tight == [8 + 2 * 17] * 3 and none == 0 < some


def test_what_the_prefix_cache_gave_is_not_charged():
    scheduler = scheduler_of()
    prompts = [request(i, prompt=range(13), new=2, tenant=i, arrival_s=9.0 * i) for i in range(2)]
    waits = request("waits", prompt=1, new=1, tenant="waits", arrival_s=9.0, priority=1)
    serve(scheduler, [*prompts, waits])
    assert scheduler._line.served[0] == 13 + 2 * 2
    assert scheduler._line.served[1] - scheduler._line.served[0] == 1 + 2 * 2


def test_a_tenant_whose_last_request_ends_is_charged_before_its_counter_may_go():
    scheduler = scheduler_of(prefix=False)
    for tenant in "ab":
        scheduler.submit(request(tenant, prompt=4, new=1, tenant=tenant))
    scheduler._line._sweep_at = 0  # every end looks through the counters
    step = scheduler.schedule(0.0)
    assert [outcome.request.id for outcome in scheduler.complete(step, [1, 1], 1.0)] == ["a", "b"]
    assert scheduler._line.served["b"] == 4 + 2


def test_counters_of_tenants_that_are_gone_do_not_pile_up():
    scheduler = Scheduler(CountingCache(64, 4), max_num_seqs=8, max_batch_tokens=64)
    requests = [Request(i, 4, 1, tenant=f"user {i}", arrival_s=float(i)) for i in range(5000)]
    for _ in replay(scheduler, requests, lambda step: None, TickingClock()):
        pass
    assert len(scheduler._line.served) <= 2 * 1024 + 1


def test_the_counter_of_a_tenant_that_was_served_more_than_others_outlives_its_absence(monkeypatch):
    monkeypatch.setattr(waiting, "_KEPT_COUNTERS", 4)
    line = waiting.WaitingLine(8)
    line.arrive(Job.of(Request("stays", 1, 1, tenant="patient"), 0, None))
    for number in range(1, 20):
        tenant = "heavy" if number == 1 else f"user {number}"
        job = Job.of(Request(number, 1, 1, tenant=tenant, priority=-1), number, None)
        line.arrive(job)
        line.admit(job)
        line.charge(tenant, 100 if tenant == "heavy" else 0)
        line.end(job)
    assert line.served["heavy"] == 100 and len(line.served) < 8


# --- ends before the end ------------------------------------------------------------------------------------------


def test_a_waiting_request_can_be_aborted():
    scheduler = scheduler_of(max_num_seqs=1)
    model = FakeModel(scheduler.cache)
    for name in "abc":
        scheduler.submit(request(name))
    scheduler.complete(step := scheduler.schedule(0), model(step), 1)
    outcome = scheduler.abort("b", 1.5)
    assert outcome.reason == "aborted" and outcome.times.admitted_s is None and outcome.times.end_s == 1.5
    assert list(serve(scheduler, [], model)) == ["a", "c"]


def test_a_running_request_can_be_aborted_and_its_blocks_come_free():
    scheduler = scheduler_of()
    model = FakeModel(scheduler.cache)
    for name in "ab":
        scheduler.submit(request(name))
    scheduler.complete(step := scheduler.schedule(0), model(step), 1)
    outcome = scheduler.abort("a", 2)
    assert list(outcome.tokens) == alone(request("a"))[:1]
    assert scheduler.running == 1 and scheduler.cache.stats().num_sequences == 1
    assert list(serve(scheduler, [], model)["b"].tokens) == alone(request("b"))
    assert_all_free(scheduler.cache)


@pytest.mark.parametrize("end", ["complete", "fail"])
def test_blocks_of_a_request_aborted_during_its_step_are_kept_until_the_step_is_over(end):
    scheduler = scheduler_of()
    model = FakeModel(scheduler.cache)
    for name in "ab":
        scheduler.submit(request(name))
    step = scheduler.schedule(0)
    tokens = model(step)
    scheduler.abort("a", 0.5)
    assert scheduler.cache.stats().num_sequences == 2
    scheduler.complete(step, tokens, 1) if end == "complete" else scheduler.fail(step)
    assert scheduler.cache.stats().num_sequences == 1
    assert list(serve(scheduler, [], model)["b"].tokens) == alone(request("b"))
    assert_all_free(scheduler.cache)


@pytest.mark.parametrize("preempt", ["recompute", "swap"])
def test_a_preempted_request_can_be_aborted(preempt):
    scheduler = scheduler_of(blocks=9, size=4, host=9, preempt=preempt)
    model = FakeModel(scheduler.cache)
    for r in TIGHT:
        scheduler.submit(r)
    while not scheduler.counters.preemptions:
        scheduler.complete(step := scheduler.schedule(0), model(step), 0)
    assert scheduler.waiting == 1
    outcome = scheduler.abort("c", 9)
    assert outcome.preemptions == 1 and list(outcome.tokens) == alone(TIGHT[2])[: outcome.output_tokens]
    serve(scheduler, [], model)
    assert_all_free(scheduler.cache)


def test_a_callback_may_abort_and_submit_and_an_aborted_request_hears_nothing_more():
    scheduler = scheduler_of()
    model = FakeModel(scheduler.cache)
    heard = []

    def swap(name, token):
        if not heard:
            scheduler.abort("b", 1)
            scheduler.submit(request("c", new=2), lambda name, token: heard.append(name))
        heard.append(name)

    for name in "ab":
        scheduler.submit(request(name, new=3), swap)
    serve(scheduler, [], model)
    assert heard == ["a", "a", "c", "a", "c"]
    assert_all_free(scheduler.cache)


def test_an_unknown_request_cannot_be_aborted():
    with pytest.raises(KeyError, match="request_id must name a request being served, got 'a'"):
        scheduler_of().abort("a", 0.0)
    with pytest.raises(TypeError, match="request_id must be hashable"):
        scheduler_of().abort([], 0.0)


def test_a_failed_step_is_tried_again_and_its_blocks_are_found_by_nobody():
    scheduler = scheduler_of(max_batch_tokens=8, max_num_seqs=4)
    model = FakeModel(scheduler.cache)
    scheduler.submit(request("a", prompt=range(20), new=3))
    scheduler.complete(step := scheduler.schedule(0), model(step), 1)
    step = scheduler.schedule(1)
    scheduler.cache.mark_computed("a", 16)  # announced, and then the model fails
    scheduler.fail(step)
    assert scheduler.cache.computed("a") == scheduler.cache.add("probe", range(20)) == 8
    scheduler.cache.free("probe")
    scheduler.submit(request("b", prompt=range(20), new=3))
    outcomes = serve(scheduler, [], model)
    assert scheduler.counters.failed_steps == 1
    assert {n: list(o.tokens) for n, o in outcomes.items()} == dict.fromkeys("ab", alone(request("a", range(20), 3)))


def test_a_failed_decode_step_loses_no_token():
    scheduler = scheduler_of()
    model = FakeModel(scheduler.cache)
    scheduler.submit(request("a", new=6))
    for count in range(5):
        step = scheduler.schedule(count)
        if count in (2, 3):
            for name, context in zip(step.seq_ids, step.context_lens, strict=True):
                scheduler.cache.mark_computed(name, context)
            scheduler.fail(step)
        else:
            scheduler.complete(step, model(step), count + 1)
    assert list(serve(scheduler, [], model)["a"].tokens) == alone(request("a", new=6))


def test_a_step_that_failed_before_it_was_announced_undoes_nothing_of_the_last_one():
    scheduler = scheduler_of()
    model = FakeModel(scheduler.cache)
    scheduler.submit(request("a", new=4))
    scheduler.complete(step := scheduler.schedule(0), model(step), 1)
    scheduler.fail(scheduler.schedule(1))
    assert list(serve(scheduler, [], model)["a"].tokens) == alone(request("a", new=4))
    assert [step.query_lens for step in model.steps] == [(10,), (1,), (1,), (1,)]


def test_a_failed_step_over_counted_blocks_is_the_same_again():
    scheduler = Scheduler(CountingCache(16, 4))
    scheduler.submit(Request("a", 10, 3))
    scheduler.complete(scheduler.schedule(0), None, 1)
    scheduler.fail(step := scheduler.schedule(1))
    again = scheduler.schedule(1)
    assert again.query_lens == step.query_lens == (1,) and again.context_lens == step.context_lens == (11,)


def test_abort_all_leaves_an_empty_cache_whatever_was_going_on():
    scheduler = scheduler_of(blocks=9, size=4, host=9, preempt="swap")
    model = FakeModel(scheduler.cache)
    for r in [*TIGHT, request("d")]:
        scheduler.submit(r)
    while not scheduler.counters.preemptions:
        scheduler.complete(step := scheduler.schedule(0), model(step), 0)
    model(scheduler.schedule(5))
    assert {outcome.request.id for outcome in scheduler.abort_all(6)} == set("abcd")
    assert scheduler.waiting == scheduler.running == 0
    assert_all_free(scheduler.cache)


@pytest.mark.parametrize("preempt", ["recompute", "swap"])
def test_groups_of_blocks_of_several_sizes_and_windows_are_served_as_one(preempt):
    cache = GroupedAllocator(
        [BlockAllocator(13, 4, num_host_blocks=9), BlockAllocator(7, 8, window=8, num_host_blocks=5)]
    )
    scheduler = Scheduler(cache, preempt=preempt)
    with pytest.raises(NeverFits, match="needs 14 blocks"):
        scheduler.submit(request("too long", prompt=53, new=1))
    known = {r.id: list(r.prompt) for r in TIGHT}

    def run(step):
        cache.mark_all_computed(step.seq_ids, step.context_lens)
        cache.check_invariants()
        return [next_token(known[name][:length]) for name, length in zip(step.seq_ids, step.context_lens, strict=True)]

    outcomes = serve(scheduler, TIGHT, run, on_token=lambda name, token: known[name].append(token))
    assert {name: list(o.tokens) for name, o in outcomes.items()} == {r.id: alone(r) for r in TIGHT}
    assert scheduler.counters.preemptions > 0 and scheduler.running == 0
    assert all(stats.used_blocks == 0 for stats in cache.stats())


def test_steps_are_taken_one_by_one_where_the_head_of_the_line_may_change():
    scheduler = Scheduler(CountingCache(9, 4))
    scheduler.submit(Request("runs", 16, 16))
    scheduler.complete(scheduler.schedule(0.0), None, 1.0)
    scheduler.submit(Request("large", 24, 4, tenant="a"))
    step = scheduler.schedule(1.0)
    assert scheduler.steady_steps(step) > 1
    scheduler.complete(step, None, 2.0)
    scheduler.submit(Request("small", 1, 1, tenant="b"))
    step = scheduler.schedule(2.0)
    assert scheduler.steady_steps(step) == 1


def test_counted_blocks_are_kept_back_from_admissions_alone():
    cache = CountingCache(4, 4, watermark=1)
    with pytest.raises(OutOfBlocks) as refused:
        cache.add("a", range(13))
    assert (refused.value.needed, refused.value.free) == (4, 3)
    cache.add("a", range(12))
    cache.append("a", range(4))
    assert cache.free_blocks == 0 and not cache.can_admit(1)


def test_what_is_no_cache_is_refused():
    with pytest.raises(TypeError, match="cache must be a BlockAllocator, .* got dict"):
        Scheduler({})


# --- the rest -----------------------------------------------------------------------------------------------------


def test_requests_out_of_order_are_refused_by_the_replay():
    with pytest.raises(ValueError, match="requests must come in order of arrival_s, got 'b' at 0.0 after 'a' at 1.0"):
        serve(scheduler_of(), [request("a", arrival_s=1.0), request("b")])


def test_a_replay_whose_cache_is_held_by_somebody_else_says_so():
    scheduler = scheduler_of(blocks=4, size=4)
    scheduler.cache.add("foreign", range(12))
    with pytest.raises(RuntimeError, match="1 requests wait for blocks that no request of this scheduler holds"):
        serve(scheduler, [request("a", prompt=8)])


def test_blocks_that_somebody_else_gave_back_are_noticed_where_nothing_runs():
    scheduler = scheduler_of(blocks=4, size=4)
    scheduler.cache.add("foreign", range(12))
    scheduler.submit(request("a", prompt=8))
    assert scheduler.schedule(0) is None
    scheduler.cache.free("foreign")
    assert scheduler.schedule(1).seq_ids == ("a",)


def test_a_model_that_fails_in_a_replay_leaves_a_scheduler_that_can_go_on():
    scheduler = scheduler_of()
    with pytest.raises(ZeroDivisionError):
        serve(scheduler, [request("a")], model=lambda step: 1 // 0)
    assert list(serve(scheduler, [])["a"].tokens) == alone(request("a"))


def test_the_scheduler_loads_no_torch():
    code = """
import importlib.util, pathlib, sys, types
package = types.ModuleType("pagegen")
package.__path__ = [str(pathlib.Path("pagegen").resolve())]
sys.modules["pagegen"] = package  # without the operators that importing the package registers
import pagegen.serving
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
