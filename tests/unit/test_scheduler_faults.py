"""What a scheduler does with what it should not be given, and where its cache or a callback raises."""

from __future__ import annotations

import math
from array import array

import numpy as np
import pytest
import torch
from serving_fakes import ContentCache, FakeModel, TickingClock, alone, serve

from pagegen.cache import BlockAllocator, InvariantBroken, OutOfBlocks
from pagegen.serving import CountingCache, Request, Scheduler, replay

PROMPTS = {name: [ord(name) * 100 + i for i in range(8)] for name in "abc"}
CALLS = ["add", "can_admit", "append_each", "swap_out", "swap_in", "free", "computed", "abandon"]


def request(name, new=17, **options):
    return Request(name, PROMPTS[name], new, **options)


class FailingCache(ContentCache):
    """Raises at one call of one operation, before or after it has its effect."""

    def __init__(self, operation, at, after):
        super().__init__(9, 4, num_host_blocks=9)
        self.operation, self.left, self.after = operation, at, after

    def _fail(self, operation, arguments, options):
        call = getattr(super(), operation)
        if operation != self.operation:
            return call(*arguments, **options)
        self.left -= 1
        if self.left:
            return call(*arguments, **options)
        if self.after:
            call(*arguments, **options)
        raise MemoryError(operation)


def failing(operation):
    return lambda self, *arguments, **options: self._fail(operation, arguments, options)


for each in CALLS:
    setattr(FailingCache, each, failing(each))


def state_of(scheduler):
    allocator = scheduler.cache
    return scheduler.waiting, scheduler.running, scheduler.counters, allocator.stats(), scheduler.in_flight


def run_to_error(scheduler, model):
    """Serves what is in line until something raises; returns whether it did, and what ended."""
    ended, now = [], 0.0
    while scheduler.waiting or scheduler.running:
        try:
            step = scheduler.schedule(now)
            if now % 5 == 4:
                scheduler.fail(step)
            else:
                ended += scheduler.complete(step, model(step), now)
        except MemoryError:
            return True, [*ended, *scheduler.drain()], now
        now += 1.0
    return False, ended, now


@pytest.mark.parametrize("preempt", ["recompute", "swap"])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("operation", CALLS)
def test_an_error_of_the_cache_loses_no_request_and_leaks_no_sequence(operation, after, preempt):
    raised = 0
    for at in range(1, 12):
        for then in ("goes on", "aborts"):
            cache = FailingCache(operation, at, after)
            scheduler, model = Scheduler(cache, preempt=preempt), FakeModel(cache)
            for name in "abc":
                scheduler.submit(request(name))
            failed, ended, now = run_to_error(scheduler, model)
            raised += failed
            if scheduler.in_flight is not None:  # it was the model that asked
                scheduler.fail(scheduler.in_flight)
            assert len(ended) + scheduler.waiting + scheduler.running == 3
            if then == "goes on":
                ended += serve(scheduler, [], model).values()
                assert {o.request.id: list(o.tokens) for o in ended} == {n: alone(request(n)) for n in "abc"}
                scheduler.schedule(now + 1000.0)
            else:
                ended += scheduler.abort_all(now)
            assert {outcome.request.id for outcome in ended} == set("abc") and len(ended) == 3
            cache.check_invariants()
            assert cache.stats().num_sequences == cache.stats().used_blocks == 0
    possible = not (preempt == "recompute" and operation.startswith("swap"))
    assert raised if possible else not raised


def test_what_cannot_be_freed_is_freed_before_the_next_step():
    cache = FailingCache("free", 1, False)
    scheduler, model = Scheduler(cache), FakeModel(cache)
    scheduler.submit(request("a", new=1))
    with pytest.raises(MemoryError):
        scheduler.complete(step := scheduler.schedule(0), model(step), 1)
    assert [outcome.request.id for outcome in scheduler.drain()] == ["a"] and cache.stats().num_sequences == 1
    assert scheduler.schedule(2) is None and cache.stats().num_sequences == 0


def test_an_abort_succeeds_where_the_cache_cannot_free_and_the_next_step_does():
    cache = FailingCache("free", 1, False)
    scheduler, model = Scheduler(cache), FakeModel(cache)
    scheduler.submit(request("a"))
    scheduler.complete(step := scheduler.schedule(0), model(step), 1)
    assert scheduler.abort("a", 2).reason == "aborted" and cache.stats().num_sequences == 1
    with pytest.raises(ValueError, match="request.id must be new, got 'a', which is in the cache"):
        scheduler.submit(request("a"))
    scheduler.schedule(3)
    scheduler.submit(request("a"))


# --- ids ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["id", "tenant"])
@pytest.mark.parametrize("value", [[], {}, ([],), set()])
def test_ids_and_tenants_that_are_no_keys_are_refused_by_name(field, value):
    given = {"id": "a", "tenant": None, field: value}
    with pytest.raises(TypeError, match=f"{field} must be hashable"):
        Request(given["id"], [1], 1, tenant=given["tenant"])


@pytest.mark.parametrize("cache", [BlockAllocator(8, 4), CountingCache(8, 4)])
def test_an_id_that_the_cache_holds_is_refused_at_once(cache):
    cache.add("a", range(3))
    scheduler = Scheduler(cache)
    with pytest.raises(ValueError, match="request.id must be new, got 'a', which is in the cache"):
        scheduler.submit(request("a"))
    assert scheduler.waiting == 0 and scheduler.abort_all(0) == [] and cache.length("a") == 3


def test_an_id_that_another_scheduler_was_faster_with_waits_and_is_not_freed_by_an_abort():
    cache = ContentCache(16, 4)
    first, second = Scheduler(cache), Scheduler(cache)
    for scheduler in (first, second):
        scheduler.submit(request("a"))
    first.schedule(0)
    for _ in range(2):
        with pytest.raises(ValueError, match="request.id must be new, got 'a', which is in the cache and not this"):
            second.schedule(0)
    assert second.waiting == 1
    assert [outcome.request.id for outcome in second.abort_all(1)] == ["a"]
    assert cache.length("a") == 8


def test_an_id_aborted_in_flight_may_be_used_again_at_once():
    scheduler = Scheduler(ContentCache(16, 4))
    model = FakeModel(scheduler.cache)
    scheduler.submit(request("a"))
    tokens = model(step := scheduler.schedule(0))
    scheduler.abort("a", 0)
    scheduler.submit(request("a", new=2))
    assert scheduler.complete(step, tokens, 1) == []
    assert list(serve(scheduler, [], model)["a"].tokens) == alone(request("a", new=2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None,), "request must be a Request, got NoneType"),
        ((request("a"), "x"), "on_token must be callable, got str"),
    ],
)
def test_what_is_no_request_or_callback_is_refused_and_changes_nothing(arguments, message):
    scheduler = Scheduler(ContentCache(16, 4))
    with pytest.raises(TypeError, match=message):
        scheduler.submit(*arguments)
    scheduler.submit(request("a"))
    assert scheduler.waiting == 1


# --- time ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, "1", math.nan, math.inf, -math.inf, True, 10**400, torch.tensor(1.0), 0.5])
@pytest.mark.parametrize("call", ["schedule", "complete", "abort", "abort_all", "start_span", "figures", "repeat"])
def test_a_time_that_is_none_or_goes_back_is_refused_by_name_and_changes_nothing(call, value):
    scheduler = Scheduler(ContentCache(16, 4))
    model = FakeModel(scheduler.cache)
    scheduler.submit(request("a"))
    scheduler.complete(step := scheduler.schedule(0), model(step), 1)
    step = scheduler.schedule(2) if call in ("complete", "repeat") else None
    tokens = model(step) if call == "complete" else None
    before = state_of(scheduler)
    arguments = {"complete": (step, tokens), "abort": ("a",), "repeat": (step, 2)}.get(call, ())
    name = "first_end_s" if call == "repeat" else "now_s"
    with pytest.raises((TypeError, ValueError), match=f"{name} must (be a time|not be before the last time)"):
        getattr(scheduler, call)(*arguments, value)
    assert state_of(scheduler) == before
    getattr(scheduler, call)(*arguments, np.float32(3.0))


def test_a_scheduler_that_serves_nobody_may_be_given_another_clock():
    scheduler = Scheduler(ContentCache(16, 4))
    first = serve(scheduler, [request("a", arrival_s=50.0)])["a"]
    assert first.times == serve(scheduler, [request("a", arrival_s=50.0)])["a"].times


@pytest.mark.parametrize("value", [None, "0", math.nan, math.inf, True])
def test_an_arrival_that_is_no_time_is_refused_by_name(value):
    with pytest.raises((TypeError, ValueError), match="arrival_s must be a time in seconds"):
        request("a", arrival_s=value)


# --- callbacks ----------------------------------------------------------------------------------------------------


def angry(name, token):
    raise ZeroDivisionError(name)


def test_a_replay_gives_out_what_ended_before_it_raises_and_the_next_one_does_not_again():
    scheduler, heard = Scheduler(ContentCache(16, 4)), []
    model = FakeModel(scheduler.cache)
    serving = replay(scheduler, [request("a", new=1), request("b", new=1)], model, TickingClock(), angry)
    with pytest.raises(ZeroDivisionError):
        for outcome in serving:
            heard.append(outcome.request.id)
    assert heard == ["a", "b"]
    assert list(serve(scheduler, [request("c", new=1)], model)) == ["c"]


def test_what_ended_in_a_step_whose_callback_raised_is_given_out_once():
    for get in (lambda scheduler: scheduler.drain(), lambda scheduler: scheduler.abort_all(1)):
        scheduler = Scheduler(ContentCache(16, 4))
        scheduler.submit(request("a", new=1), angry)
        with pytest.raises(ZeroDivisionError):
            scheduler.complete(step := scheduler.schedule(0), FakeModel(scheduler.cache)(step), 1)
        assert [outcome.request.id for outcome in get(scheduler)] == ["a"]
        assert get(scheduler) == []


def test_a_step_that_gives_nonsense_in_a_replay_has_failed():
    scheduler = Scheduler(ContentCache(16, 4))
    with pytest.raises(ValueError, match="tokens must be one a row"):
        serve(scheduler, [request("a")], model=lambda step: [])
    assert scheduler.in_flight is None and scheduler.counters.failed_steps == 1
    assert list(serve(scheduler, [])["a"].tokens) == alone(request("a"))


def test_a_callback_can_neither_schedule_nor_complete():
    scheduler = Scheduler(ContentCache(16, 4))
    model, refused = FakeModel(scheduler.cache), []

    def meddle(name, token):
        with pytest.raises(RuntimeError, match="schedule must not be called by a callback"):
            scheduler.schedule(1)
        for call in (lambda: scheduler.complete(step, [1], 1), lambda: scheduler.fail(step)):
            with pytest.raises(ValueError, match=r"step must be the one in flight \(none is\)"):
                call()
        refused.append(name)

    scheduler.submit(request("a", new=1), meddle)
    step = scheduler.schedule(0)
    ended = scheduler.complete(step, model(step), 1)
    assert len(ended) == len(refused) == 1


# --- tokens -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given", [5, [5], {5}, (6, 5), np.int64(5), np.array([5, 6]), torch.tensor(5), torch.tensor([5]), array("I", [5])]
)
def test_stop_tokens_may_be_one_or_several_integers_of_any_kind(given):
    stop_tokens = request("a", stop_tokens=given).stop_tokens
    assert 5 in stop_tokens and all(type(token) is int for token in stop_tokens)


@pytest.mark.parametrize(
    "given",
    [None, "5", ["5"], 5.0, [5.0], True, [True], b"5", torch.tensor(5.0), torch.tensor([True]), [None], [[5, 6]]],
)
def test_stop_tokens_that_could_never_match_are_refused_by_name(given):
    with pytest.raises(TypeError, match="stop_tokens must be a token id or several"):
        request("a", stop_tokens=given)


def test_tokens_of_rows_that_are_not_sampled_are_ignored_whatever_they_are():
    for ignored in (None, -1, "x", 2**40):
        scheduler = Scheduler(ContentCache(16, 4), max_num_seqs=2, max_batch_tokens=9)
        model = FakeModel(scheduler.cache)
        for name in "ab":
            scheduler.submit(request(name, new=1))
        tokens = model(step := scheduler.schedule(0))
        assert step.samples == (True, False)
        assert [o.request.id for o in scheduler.complete(step, [tokens[0], ignored], 1)] == ["a"]


@pytest.mark.parametrize("tokens", [[None], [-1], [1.5], "x", 3, b"x", [2**40]])
def test_tokens_that_are_none_are_refused_and_the_step_stays_in_flight(tokens):
    scheduler = Scheduler(ContentCache(16, 4))
    scheduler.submit(request("a", new=1))
    step = scheduler.schedule(0)
    with pytest.raises((TypeError, ValueError), match="tokens must be"):
        scheduler.complete(step, tokens, 1)
    assert scheduler.in_flight is step and scheduler.complete(step, np.array([7]), 1)[0].tokens[0] == 7


@pytest.mark.parametrize("call", ["complete", "fail", "steady_steps"])
def test_what_is_no_step_is_refused_by_name(call):
    arguments = ([1], 0.0) if call == "complete" else ()
    with pytest.raises(TypeError, match="step must be a Step, got NoneType"):
        getattr(Scheduler(ContentCache(16, 4)), call)(None, *arguments)


@pytest.mark.parametrize("prompt", ["abc", None, [-1], [1.5], b"ab", [2**32]])
def test_a_prompt_of_no_tokens_is_refused_by_name(prompt):
    with pytest.raises((TypeError, ValueError), match="prompt must be"):
        Request("a", prompt, 1)


def test_numpys_integers_are_taken_for_pythons():
    options = {"max_num_seqs": np.int64(2), "max_batch_tokens": np.int32(8), "lookahead": np.uint8(1)}
    scheduler = Scheduler(CountingCache(np.int64(8), np.int64(4)), max_overtakes=np.int64(3), **options)
    scheduler.submit(asked := Request("a", np.int64(6), np.int64(3), priority=np.int8(-1)))
    assert [type(value) for value in (asked.prompt, asked.max_new_tokens, asked.priority)] == [int] * 3
    assert serve(scheduler, [], model=lambda step: None)["a"].output_tokens == 3


def test_priorities_are_32_bit_integers():
    for priority in (-(2**31), 2**31 - 1):
        assert request("a", priority=priority).priority == priority
    for priority in (-(2**31) - 1, 2**31):
        with pytest.raises(ValueError, match="priority must be in"):
            request("a", priority=priority)


# --- steps taken at once ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("announced", [False, True])
@pytest.mark.parametrize("make", [lambda: ContentCache(16, 4), lambda: CountingCache(16, 4)])
def test_nothing_counts_of_a_repeated_step_that_failed(make, announced):
    scheduler = Scheduler(cache := make())
    scheduler.submit(Request("a", 6, 9))
    for now in range(2):
        step = scheduler.schedule(now)
        cache.mark_computed("a", step.context_lens[0])
        scheduler.complete(step, None, now)
    step = scheduler.schedule(2)
    before = cache.length("a"), cache.computed("a")
    scheduler.repeat(step, 4, 3)
    with pytest.raises(ValueError, match="step must not be repeated yet, got 2, of 4 steps"):
        scheduler.repeat(step, 2, 3)
    assert cache.length("a") == before[0] + 3
    if announced:
        cache.mark_computed("a", step.context_lens[0] + 3)
    scheduler.fail(step)
    assert (cache.length("a"), cache.computed("a")) == before
    cache.check_invariants()
    again = scheduler.schedule(2)
    assert (again.query_lens, again.context_lens) == (step.query_lens, step.context_lens)


# --- counted blocks -----------------------------------------------------------------------------------------------

REFUSED = {
    "an id that is there": lambda c: c.add("a", [1]),
    "text": lambda c: c.add("n", "abc"),
    "a negative token": lambda c: c.add("n", [-1]),
    "a negative range": lambda c: c.add("n", range(-1, 3)),
    "a token too large": lambda c: c.append("a", [2**32]),
    "a float": lambda c: c.append("a", [1.0]),
    "no tokens": lambda c: c.add("n", 5),
    "a context of text": lambda c: c.add("n", [1], context="x"),
    "twice the same": lambda c: c.append_each(["a", "a"], [1, 1]),
    "too few tokens": lambda c: c.append_each(["a", "b"], [1]),
    "too many tokens": lambda c: c.append_each(["a"], [1, 2]),
    "an unknown id": lambda c: c.append_each(["a", "z"], [1, 1]),
    "a swapped one": lambda c: c.append_each(["a", "s"], [1, 1]),
    "ids that are none": lambda c: c.append_each(5, [1]),
    "a negative size": lambda c: c.can_admit(-1),
    "a negative look-ahead": lambda c: c.can_admit(1, lookahead=-1),
    "another number of tokens": lambda c: c.can_admit(2, tokens=[1]),
    "too long a sequence": lambda c: c.add("n", range(99)),
    "a length beyond the end": lambda c: c.mark_computed("a", 7),
    "a length below 0": lambda c: c.truncate("a", -1),
    "swapping in what is here": lambda c: c.swap_in("a"),
    "freeing what is not here": lambda c: c.free("z"),
    "swapping out twice": lambda c: c.swap_out("s"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_counted_blocks_refuse_what_real_bookkeeping_refuses_with_the_same_words(case):
    errors = []
    for kind in (BlockAllocator, CountingCache):
        cache = kind(9, 4, num_host_blocks=2, watermark=1)
        for name, size in (("a", 6), ("b", 3), ("s", 5)):
            cache.add(name, range(size))
        cache.swap_out("s")
        with pytest.raises((TypeError, ValueError, KeyError, OutOfBlocks)) as refused:
            REFUSED[case](cache)
        cache.check_invariants()
        assert [cache.length(name) for name in "abs"] == [6, 3, 5]
        errors.append((refused.type, str(refused.value)))
    assert errors[0] == errors[1]


def test_counted_blocks_are_given_back_when_a_sequence_is_shortened():
    cache = CountingCache(9, 4)
    cache.add("a", range(17))
    cache.mark_computed("a", 15)
    cache.truncate("a", 8)
    assert (cache.length("a"), cache.computed("a"), cache.free_blocks) == (8, 8, 7)
    cache.check_invariants()
    cache.sequences["a"].length = 9
    with pytest.raises(InvariantBroken):
        cache.check_invariants()
