"""`Scheduler`: continuous batching over a cache of blocks. It computes nothing, knows no clock and loads no torch.

    scheduler.submit(request)                      # at any time between steps
    step = scheduler.schedule(now)                 # None: nothing to do
    tokens = model(cache.batch(step.seq_ids, query_lens=step.query_lens))
    ended = scheduler.complete(step, tokens, now)  # or scheduler.fail(step)

The policy, of one step:

1. Every sequence past its prompt decodes one token. Where the cache has no block for it, a victim is preempted: of the
   running sequences the one of the worst priority, of those the last admitted. Its blocks go to host memory
   (`preempt="swap"`, where that has room) or are dropped, and then its prompt and outputs so far are computed again,
   less what the prefix cache still has. Its outputs are kept either way. A step that preempts admits nobody.
2. What is left of `max_batch_tokens` goes to prompts, in chunks: by priority, and in each to those being computed, in
   order of admission, before waiting ones are admitted. Every eighth step it goes by admission alone.
3. Waiting requests are admitted in the order of `WaitingLine`, while one of `max_num_seqs` places, budget and blocks
   for all tokens known and `lookahead` more are free. The head of the line is never skipped for a smaller request.

So decodes never wait for prompts (Agrawal et al., "Sarathi-Serve", OSDI 2024), and every request ends: the running
sequence of the best priority admitted first is nobody's victim; a preempted one goes back in front of its tenant's
line and is not charged again; a victim of a better priority takes that priority the third time; a prompt admitted
first has every eighth step; and the line starves no priority and no tenant. A waiting request, however urgent, preempts
nobody.

Not thread-safe: one thread submits, schedules, completes and aborts.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import asdict, replace

from pagegen.cache.sequence import integer
from pagegen.serving.caches import ServableCache, holds
from pagegen.serving.checks import hashable, moment
from pagegen.serving.figures import Counters, ServerFigures
from pagegen.serving.flight import Flight
from pagegen.serving.job import Job, OnToken, tell
from pagegen.serving.request import Outcome, Reason, Request
from pagegen.serving.residents import Preempt, Residents
from pagegen.serving.step import Step
from pagegen.serving.waiting import OUTPUT_TOKEN_COST, WaitingLine

_TURN_STEPS = 8  # one in so many steps gives its budget to prompts in order of admission


class Scheduler:
    """Serves requests from `cache`, which holds no other sequences; their ids there are the requests'. See the module.

    `max_num_seqs` sequences and `max_batch_tokens` query tokens at most in a step, at least one token a sequence.
    `max_overtakes`: how many requests of better priorities may be admitted in a row before a waiting one. `now_s` is
    always in seconds of a clock that does not go back; another clock may be used once nobody is served."""

    def __init__(
        self,
        cache: ServableCache,
        *,
        max_num_seqs: int = 256,
        max_batch_tokens: int = 2048,
        lookahead: int = 0,
        preempt: Preempt = "recompute",
        max_overtakes: int = 64,
    ) -> None:
        self.cache = cache
        self.max_num_seqs = integer("max_num_seqs", max_num_seqs, 1)
        # so that every running sequence can decode in every step
        self.max_batch_tokens = integer("max_batch_tokens", max_batch_tokens, self.max_num_seqs)
        self._line = WaitingLine(integer("max_overtakes", max_overtakes, 1))
        self._counters = Counters()
        self._residents = Residents(cache, self._line, self._counters, lookahead=lookahead, preempt=preempt)
        self._jobs: dict[Hashable, Job] = {}
        self._flight: Flight | None = None
        self._undelivered: list[Outcome] = []
        self._telling = False  # callbacks are being called
        self._now_s: float | None = None  # the last time given
        self._steps = self._submitted = 0
        self._start_s: float | None = None

    @property
    def waiting(self) -> int:
        """Requests in line, preempted ones included."""
        return len(self._line)

    @property
    def running(self) -> int:
        """Requests admitted and not ended."""
        return len(self._residents.jobs)

    @property
    def in_flight(self) -> Step | None:
        """The step to be handed back by `complete` or `fail`."""
        return None if self._flight is None else self._flight.step

    def progress(self) -> list[tuple[Request, int]]:
        """The running requests in order of admission, and how many output tokens each has."""
        return [(job.request, job.generated) for job in self._residents.jobs]

    def submit(self, request: Request, on_token: OnToken | None = None) -> None:
        """Puts a request in line. `on_token(request.id, token)` is called for each output token, in order, when its
        step completes. Raises NeverFits, TypeError, or ValueError for an id that is being served or in the cache; then
        nothing has changed. A cache with a window must hold all tokens too: what is computed again after a preemption
        comes in whole."""
        job = Job.of(request, self._submitted, on_token)
        if request.id in self._jobs:
            raise ValueError(f"request.id must be new, got {request.id!r}, which is being served")
        # one aborted in the step in flight is freed before another step is scheduled
        leaving = self._flight is not None and request.id in self._flight.step.seq_ids
        if holds(self.cache, request.id) and not leaving:
            raise ValueError(f"request.id must be new, got {request.id!r}, which is in the cache")
        self._residents.check_fits(request)
        if not self._jobs and self._flight is None:
            self._now_s = None  # nobody's times began before: a new clock may be used
        self._line.arrive(job)
        self._jobs[request.id] = job
        self._submitted += 1

    def schedule(self, now_s: float) -> Step | None:
        """The next step, or None where nothing can be computed now. Room for its tokens is made in the cache. It must
        be handed back by `complete` or `fail` before the next. Where the cache raises, so does this: then every request
        is in line or running as before, and the next call tries again."""
        if self._telling:
            raise RuntimeError("schedule must not be called by a callback: the step is not over before all were called")
        if (flying := self.in_flight) is not None:
            raise ValueError(f"step {flying.number} must be completed or failed before another is scheduled")
        now_s = self._moment(now_s)
        residents = self._residents
        error = residents.release()
        if error is not None:
            raise error
        preempted = residents.grow()
        rows = [(job, 1) for job in residents.jobs if job.pending == 1]
        closed = preempted and residents.jobs
        budget = self.max_batch_tokens - len(rows)
        in_turn = self._steps % _TURN_STEPS == _TURN_STEPS - 1
        residents.spend(rows, budget, now_s, max_num_seqs=0 if closed else self.max_num_seqs, in_turn=in_turn)
        if closed:
            residents.look_at_head()
        if not rows:
            return None
        if self._start_s is None:
            self._start_s = now_s
        self._flight = Flight.of(self._steps, rows)
        self._steps += 1
        return self._flight.step

    def steady_steps(self, step: Step) -> int:
        """How many steps in a row, this one included, differ by nothing but one more token a sequence, were no request
        submitted: until one may end or be admitted, or a block may be wanting."""
        flight = self._flying(step)
        if self.waiting and len(flight.rows) < self.max_num_seqs and not self._residents.is_blocked:
            return 1
        return flight.steady_steps(self._residents.groups)

    def repeat(self, step: Step, count: int, first_end_s: float) -> None:
        """Makes the step in flight stand for `count` steps, at most `steady_steps`, the first of which ends at
        `first_end_s`: a simulation's way through long stretches in which nothing happens. Their tokens are 0. When it
        completes, `count - 1` tokens more of each sequence are computed than `step.context_lens` says."""
        count = integer("count", count, 1, self.steady_steps(step))
        first_end_s = moment("first_end_s", first_end_s, self._now_s)
        self._flying(step).repeat(self._residents, count, first_end_s)

    def complete(self, step: Step, tokens: Sequence[int] | None, now_s: float) -> list[Outcome]:
        """Takes in what the step computed: for each row the token that follows its last query (where `step.samples`,
        else it is ignored), or None in a simulation. Streams the tokens, and returns the requests that ended.

        Where a callback raises, or the cache when a sequence is freed, everything is taken in and the other callbacks
        are called; then the first error goes on, and `drain` returns what ended."""
        flight = self._flying(step)
        packed = None if tokens is None else step.answers(tokens)
        now_s = self._moment(now_s, flight.first_end_s)
        first_end_s = now_s if flight.first_end_s is None else flight.first_end_s
        self._flight, rows, count = None, flight.rows, flight.count
        heard: list[tuple[Job, int]] = []
        leaving: list[Hashable] = []
        over: list[tuple[Job, Reason]] = []
        sampled: dict[Hashable, int] = {}  # how many of a tenant
        for row, (job, query) in enumerate(rows):
            if job.gone:  # aborted meanwhile
                leaving.append(job.id)
                continue
            job.pending -= query
            if job.pending:
                continue
            token = 0 if packed is None else packed[row]
            if job.first_token_s is None:  # the prompt is computed: those who wait may find it now
                self._counters.prompt_tokens += job.prompt_tokens
                self._residents.look_again()
            job.take(token, first_end_s)
            if count > 1:
                job.take_more(count - 1, now_s)
            sampled[job.tenant] = sampled.get(job.tenant, 0) + 1
            if job.on_token is not None:
                heard.append((job, token))
            stopped = token in job.stop_tokens and packed is not None
            if stopped or job.generated == job.limit:
                leaving.append(job.id)
                job.gone = True
                over.append((job, "stop" if stopped else "length"))
        for tenant, of_tenant in sampled.items():
            self._line.charge(tenant, of_tenant * count * OUTPUT_TOKEN_COST)
        ended = [self._end(job, reason, now_s) for job, reason in over]
        self._counters.steps += count
        self._counters.computed_tokens += sum(step.query_lens) + (count - 1) * len(rows)
        self._counters.output_tokens += count * sum(sampled.values())
        if ended:
            self._residents.leave()
        unfreed = self._residents.release(leaving) if leaving else None
        self._telling = True
        try:
            error = tell(heard)
        finally:
            self._telling = False
        error = error or unfreed
        if error is not None:
            self._undelivered += ended
            raise error
        return ended

    def drain(self) -> list[Outcome]:
        """The requests that ended in steps whose `complete` raised, each once."""
        ended, self._undelivered = self._undelivered, []
        return ended

    def fail(self, step: Step) -> None:
        """The step failed before all of it was written: nothing of it counts, nobody finds its blocks, and the next
        step tries again, unless requests are aborted before."""
        error = self._fail(self._flying(step))
        if error is not None:
            raise error

    def abort(self, request_id: Hashable, now_s: float) -> Outcome:
        """Ends a request where it stands. One of the step in flight loses its blocks when the step is handed back, one
        that the cache fails to free before the next is scheduled. Raises KeyError for an id that is not served."""
        hashable("request_id", request_id)
        if request_id not in self._jobs:
            raise KeyError(f"request_id must name a request being served, got {request_id!r}: unknown or ended")
        now_s = self._moment(now_s)
        job = self._jobs[request_id]
        job.aborted = True
        in_flight = self._flight is not None and self._flight.is_of(job)
        if job.resident:
            job.gone = True
            self._residents.leave()
        else:
            self._line.remove(job)
            self._residents.look_again()
        outcome = self._end(job, "aborted", now_s)
        if job.swapped or (job.resident and not in_flight):
            self._residents.release([request_id])
        return outcome

    def abort_all(self, now_s: float) -> list[Outcome]:
        """Ends every request where it stands; a step in flight has failed. Returns what `drain` would as well."""
        now_s = self._moment(now_s)
        if self._flight is not None:
            self._fail(self._flight)
        ended = [*self.drain(), *(self.abort(request_id, now_s) for request_id in list(self._jobs))]
        self._residents.release()
        return ended

    @property
    def counters(self) -> Counters:
        """What was counted since the span began, as it is now."""
        return replace(self._counters)

    def start_span(self, now_s: float) -> None:
        """Starts counting for `figures` anew from `now_s` on. The first span starts with the first step."""
        self._start_s = self._moment(now_s)
        self._counters.reset()

    def figures(self, now_s: float) -> ServerFigures:
        """The server's figures from the span's start to `now_s`. Raises ValueError where no time has passed."""
        now_s = self._moment(now_s)
        start_s = now_s if self._start_s is None else self._start_s
        return ServerFigures(start_s=start_s, end_s=now_s, **asdict(self._counters))

    def _flying(self, step: Step) -> Flight:
        if not isinstance(step, Step):
            raise TypeError(f"step must be a Step, got {type(step).__name__}")
        if self._flight is None or step is not self._flight.step:
            expected = "none is" if self._flight is None else f"{self._flight.step.number} is"
            raise ValueError(f"step must be the one in flight ({expected}), got {step.number}")
        return self._flight

    def _moment(self, now_s: float, at_least: float | None = None) -> float:
        """The time given. It must not go back, but where nobody is served: a new clock may be used then."""
        last = self._now_s if self._jobs or self._flight is not None else None
        self._now_s = moment("now_s", now_s, last if at_least is None else at_least)
        return self._now_s

    def _fail(self, flight: Flight) -> Exception | None:
        self._flight = None
        self._counters.failed_steps += 1
        error = self._residents.take_back(flight.rows)
        unfreed = self._residents.release([job.id for job, _ in flight.rows if job.gone])
        return error or unfreed

    def _end(self, job: Job, reason: Reason, now_s: float) -> Outcome:
        del self._jobs[job.id]
        self._line.end(job)
        self._counters.end(reason)
        return job.outcome(reason, now_s)
