"""The server's speed and the requests' waiting, by numbers worked out by hand."""

from __future__ import annotations

import json

import pytest
from serving_fakes import FakeModel, serve
from test_scheduler import request, scheduler_of

from pagegen.serving import CountingCache, Latencies, Percentiles, Request, RequestTimes, Scheduler, WallClock


def test_times_of_a_request_are_those_of_its_steps():
    # prompt of 10 in chunks of 4: admitted at 2, first token after the third step at 5, then one a second
    outcome = serve(scheduler_of(max_num_seqs=1, max_batch_tokens=4), [request("a", arrival_s=1.5, new=4)], None)["a"]
    times = outcome.times
    assert (times.arrival_s, times.admitted_s, times.first_token_s, times.end_s) == (1.5, 1.5, 4.5, 7.5)
    assert (times.queued_s, times.time_to_first_token_s, times.end_to_end_s) == (0.0, 3.0, 6.0)
    assert times.gaps_s == (1.0, 1.0, 1.0) and times.gap_counts == (1, 1, 1)


def test_a_preemption_shows_as_one_long_gap_and_not_as_a_second_first_token():
    requests = [request(name, prompt=8, new=17) for name in "abc"]
    outcomes = serve(scheduler_of(blocks=9, size=4, prefix=False), requests)
    preempted = next(o for o in outcomes.values() if o.preemptions)
    assert max(preempted.times.gaps_s) > 2 and len(preempted.times.gaps_s) == 16
    assert preempted.times.time_to_first_token_s == 1.0


def test_figures_are_of_the_whole_server_over_the_span():
    scheduler = scheduler_of(max_num_seqs=2, max_batch_tokens=64)
    serve(scheduler, [request("a", prompt=10, new=5), request("b", prompt=6, new=3)])
    figures = scheduler.figures(10.0)
    assert (figures.start_s, figures.end_s, figures.steps, figures.finished) == (0.0, 10.0, 5, 2)
    assert (figures.prompt_tokens, figures.output_tokens, figures.computed_tokens) == (16, 8, 16 + 4 + 2)
    assert figures.output_tokens_per_s == 0.8 and figures.total_tokens_per_s == 2.4
    assert figures.computed_tokens_per_s == 2.2
    assert json.loads(json.dumps(figures.to_dict()))["output_tokens_per_s"] == 0.8


def test_a_new_span_counts_from_its_own_start():
    scheduler = scheduler_of()
    serve(scheduler, [request("warm up")])
    scheduler.start_span(100.0)
    serve(scheduler, [request("a", new=4)])
    figures = scheduler.figures(102.0)
    assert figures.start_s == 100.0 and figures.output_tokens == 4 and figures.output_tokens_per_s == 2.0


def test_a_span_in_which_no_time_passed_has_no_speed():
    with pytest.raises(ValueError, match="end_s must be after start_s = 3.0, got 3.0"):
        scheduler_of().figures(3.0)


def test_tokens_found_in_the_cache_count_as_served_but_not_as_computed():
    scheduler = scheduler_of()
    model = FakeModel(scheduler.cache)
    serve(scheduler, [request("a", prompt=range(12), new=1), request("b", prompt=range(13), new=1, arrival_s=5)], model)
    figures = scheduler.figures(10.0)
    assert figures.hit_tokens == 12 and figures.prompt_tokens == 25 and figures.computed_tokens == 13


def test_percentiles_are_values_that_occur_and_counts_weigh_them():
    assert Percentiles.of([4.0, 1.0, 3.0, 2.0]) == Percentiles(
        count=4, mean=2.5, p50=2.0, p90=4.0, p99=4.0, largest=4.0
    )
    weighted = Percentiles.of([1.0, 9.0], [98, 2])
    assert (weighted.count, weighted.p50, weighted.p90, weighted.p99) == (100, 1.0, 1.0, 9.0)
    assert weighted.mean == pytest.approx(1.16)
    assert Percentiles.of([5.0]).p50 == Percentiles.of([5.0]).largest == 5.0
    with pytest.raises(ValueError, match="values must be at least one"):
        Percentiles.of([])


def test_latencies_take_every_gap_of_every_request_and_leave_out_what_never_came():
    done = RequestTimes(arrival_s=0, admitted_s=1, first_token_s=2, end_s=6, gaps_s=(1.0, 1.5), gap_counts=(1, 2))
    aborted = RequestTimes(arrival_s=0, admitted_s=None, first_token_s=None, end_s=50)
    latencies = Latencies.of([done, aborted])
    assert latencies.time_to_first_token_s.count == 1 and latencies.time_to_first_token_s.p50 == 2
    assert latencies.inter_token_s.count == 3 and latencies.inter_token_s.p50 == 1.5
    assert latencies.end_to_end_s.largest == 50
    assert Latencies.of([aborted]).inter_token_s is None
    assert json.loads(json.dumps(latencies.to_dict()))["inter_token_s"]["count"] == 3


def test_steps_taken_at_once_leave_the_same_figures_as_steps_taken_one_by_one():
    def run(at_once):
        scheduler = Scheduler(CountingCache(64, 4), max_num_seqs=4, max_batch_tokens=64)
        outcomes, now = [], 0.0
        for i in range(3):
            scheduler.submit(Request(i, 1 + 5 * i, 10 + 7 * i))
        while (step := scheduler.schedule(now)) is not None:
            count = scheduler.steady_steps(step) if at_once else 1
            if count > 1:
                scheduler.repeat(step, count, now + 1.0)
            now += count
            outcomes += scheduler.complete(step, None, now)
        times = [(o.times.first_token_s, o.times.end_s, o.output_tokens) for o in outcomes]
        return times, scheduler.figures(now), Latencies.of(o.times for o in outcomes)

    assert run(True) == run(False)


def test_more_steps_at_once_than_are_alike_are_refused():
    scheduler = Scheduler(CountingCache(64, 4))
    scheduler.submit(Request("a", 1, 5))
    step = scheduler.schedule(0.0)
    with pytest.raises(ValueError, match="count must be in 1..5, got 6"):
        scheduler.repeat(step, 6, 1.0)


def test_the_wall_clock_waits():
    clock = WallClock()
    clock.wait_until(0.02)
    assert clock.now_s() >= 0.02
    clock.wait_until(0.0)
