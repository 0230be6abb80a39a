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

from pagegen.cache.sequence import integer, pack_tokens
from pagegen.serving.caches import ServableCache
from pagegen.serving.figures import Counters, ServerFigures
from pagegen.serving.job import Job, OnToken
from pagegen.serving.request import NeverFits, Outcome, Reason, Request
from pagegen.serving.residents import Preempt, Residents, Rows
from pagegen.serving.step import Step
from pagegen.serving.waiting import OUTPUT_TOKEN_COST, WaitingLine

_TURN_STEPS = 8


class Scheduler:
    """Serves requests from `cache`, which holds no other sequences; their ids there are the requests'. See the module.

    `max_num_seqs` sequences and `max_batch_tokens` query tokens at most in a step, at least one token a sequence.
    `max_overtakes`: how many requests of better priorities may be admitted in a row before a waiting one.
    """

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
        self.max_batch_tokens = integer("max_batch_tokens", max_batch_tokens, max_num_seqs)
        self._line = WaitingLine(integer("max_overtakes", max_overtakes, 1))
        self._counters = Counters()
        self._residents = Residents(cache, self._line, self._counters, lookahead=lookahead, preempt=preempt)
        self._jobs: dict[Hashable, Job] = {}
        self._step: Step | None = None  # in flight, with its rows and how many steps it stands for
        self._rows: Rows = []
        self._count, self._first_end_s = 1, 0.0
        self._ended: list[Outcome] = []
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

    def progress(self) -> list[tuple[Request, int]]:
        """The running requests in order of admission, and how many output tokens each has."""
        return [(job.request, job.generated) for job in self._residents.jobs]

    def submit(self, request: Request, on_token: OnToken | None = None) -> None:
        """Puts a request in line. `on_token(request.id, token)` is called for each output token, in order, when its
        step completes. Raises NeverFits, or ValueError for an id that is being served; then nothing has changed. A
        cache with a window must hold all tokens too: what is computed again after a preemption comes in whole."""
        if request.id in self._jobs:
            raise ValueError(f"request.id must be new, got {request.id!r}, which is being served")
        for group in self._residents.groups:
            needed = group.blocks_for(request.most_tokens)
            if needed > group.num_blocks - group.watermark:
                raise NeverFits(request, needed, group.num_blocks, group.watermark)
        job = self._jobs[request.id] = Job.of(request, self._submitted, on_token)
        self._submitted += 1
        self._line.arrive(job)

    def schedule(self, now_s: float) -> Step | None:
        """The next step, or None where nothing can be computed now. Room for its tokens is made in the cache. It must
        be handed back by `complete` or `fail` before the next."""
        if self._step is not None:
            raise ValueError(f"step {self._step.number} must be completed or failed before another is scheduled")
        residents = self._residents
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
        self._rows, self._count = rows, 1
        self._step = Step(
            number=self._steps,
            seq_ids=tuple([job.id for job, _ in rows]),
            query_lens=tuple([query for _, query in rows]),
            context_lens=tuple([job.known - job.pending + query for job, query in rows]),
            samples=tuple([job.pending == query for job, query in rows]),
        )
        self._steps += 1
        return self._step

    def steady_steps(self, step: Step) -> int:
        """How many steps in a row, this one included, differ by nothing but one more token a sequence, were no request
        submitted: until one may end or be admitted, or a block may be wanting."""
        self._check_in_flight(step)
        rows = len(self._rows)
        if not step.is_decode:
            return 1
        if self.waiting and rows < self.max_num_seqs and not self._residents.is_blocked:
            return 1
        room = min(group.block_size * (group.available // rows) for group in self._residents.groups)
        return min(1 + room, min(job.limit - job.generated for job, _ in self._rows))

    def repeat(self, step: Step, count: int, first_end_s: float) -> None:
        """Makes the step in flight stand for `count` steps, at most `steady_steps`, the first of which ends at
        `first_end_s`: a simulation's way through long stretches in which nothing happens. Their tokens are 0. When it
        completes, `count - 1` tokens more of each sequence are computed than `step.context_lens` says."""
        integer("count", count, 1, self.steady_steps(step))
        self._count, self._first_end_s = count, first_end_s
        if count > 1:
            for job, _ in self._rows:
                self.cache.append(job.id, range(count - 1) if job.outputs is None else [0] * (count - 1))

    def complete(self, step: Step, tokens: Sequence[int] | None, now_s: float) -> list[Outcome]:
        """Takes in what the step computed: for each row the token that follows its last query (where `step.samples`,
        else it is ignored), or None in a simulation. Streams the tokens, and returns the requests that ended.

        Where a callback raises, everything is taken in and the other callbacks are called; then the first error goes
        on, and the next `complete` returns what ended in both."""
        self._check_in_flight(step)
        packed = None if tokens is None else pack_tokens(tokens)
        if packed is not None and len(packed) != len(self._rows):
            raise ValueError(f"tokens must be one a row of the step ({len(self._rows)}), got {len(packed)}")
        rows, count = self._land(), self._count
        first_end_s = now_s if count == 1 else self._first_end_s
        served, heard, sampled, some_ended = self._line.served, list[tuple[Job, int]](), 0, False
        for row, (job, query) in enumerate(rows):
            if job.gone:  # aborted meanwhile
                self.cache.free(job.id)
                continue
            job.pending -= query
            if job.pending:
                continue
            token = 0 if packed is None else packed[row]
            if job.first_token_s is None:
                self._answered(job)
            job.take(token, first_end_s)
            if count > 1:
                job.take_more(count - 1, now_s)
            sampled += 1
            served[job.tenant] += count * OUTPUT_TOKEN_COST
            if job.on_token is not None:
                heard.append((job, token))
            stopped = token in job.stop_tokens and packed is not None
            if stopped or job.generated == job.limit:
                some_ended = True
                self.cache.free(job.id)
                job.gone = True
                self._ended.append(self._end(job, "stop" if stopped else "length", now_s))
        self._counters.steps += count
        self._counters.computed_tokens += sum(step.query_lens) + (count - 1) * len(rows)
        self._counters.output_tokens += count * sampled
        if some_ended:
            self._residents.leave()
        _tell(heard)
        ended, self._ended = self._ended, []
        return ended

    def fail(self, step: Step) -> None:
        """The step failed before all of it was written: nothing of it counts, nobody finds its blocks, and the next
        step tries again, unless requests are aborted before."""
        self._check_in_flight(step)
        rows = self._land()
        self._counters.failed_steps += 1
        # a step that failed before it was announced must not undo the one before it
        announced = [job.id for job, _ in rows if self.cache.computed(job.id) > job.known - job.pending]
        self.cache.abandon(announced)  # nobody can have found anything of it yet
        for job, _ in rows:
            if job.gone:
                self.cache.free(job.id)

    def abort(self, request_id: Hashable, now_s: float) -> Outcome:
        """Ends a request where it stands. One of the step in flight loses its blocks when the step is handed back.
        Raises KeyError for an id that is not being served."""
        if request_id not in self._jobs:
            raise KeyError(f"request_id must name a request being served, got {request_id!r}: unknown or ended")
        job = self._jobs[request_id]
        job.aborted = True
        in_flight = self._step is not None and any(job is row for row, _ in self._rows)
        if job.resident:
            if not in_flight:
                self.cache.free(request_id)
            job.gone = True
            self._residents.leave()
        else:
            if job.swapped:
                self.cache.free(request_id)
            self._line.remove(job)
            self._residents.look_again()
        return self._end(job, "aborted", now_s)

    def abort_all(self, now_s: float) -> list[Outcome]:
        """Ends every request where it stands; a step in flight has failed."""
        if self._step is not None:
            self.fail(self._step)
        return [self.abort(request_id, now_s) for request_id in list(self._jobs)]

    @property
    def counters(self) -> Counters:
        """What was counted since the span began, as it is now."""
        return replace(self._counters)

    def start_span(self, now_s: float) -> None:
        """Starts counting for `figures` anew from `now_s` on. The first span starts with the first step."""
        self._start_s = now_s
        self._counters.reset()

    def figures(self, now_s: float) -> ServerFigures:
        """The server's figures from the span's start to `now_s`. Raises ValueError where no time has passed."""
        start_s = now_s if self._start_s is None else self._start_s
        return ServerFigures(start_s=start_s, end_s=now_s, **asdict(self._counters))

    def _check_in_flight(self, step: Step) -> None:
        if step is not self._step:
            expected = "none is" if self._step is None else f"{self._step.number} is"
            raise ValueError(f"step must be the one in flight ({expected}), got {step.number}")

    def _land(self) -> Rows:
        rows, self._rows, self._step = self._rows, [], None
        return rows

    def _answered(self, job: Job) -> None:
        """The prompt is computed and the first output token there: the waiting may find the prompt now."""
        self._counters.prompt_tokens += job.prompt_tokens
        self._residents.look_again()

    def _end(self, job: Job, reason: Reason, now_s: float) -> Outcome:
        del self._jobs[job.id]
        self._line.end(job)
        if reason == "aborted":
            self._counters.aborted += 1
        else:
            self._counters.finished += 1
        return job.outcome(reason, now_s)


def _tell(heard: list[tuple[Job, int]]) -> None:
    """Calls the callbacks, all of them, then raises the first error."""
    error: BaseException | None = None
    for job, token in heard:
        try:
            if job.on_token is not None and not job.aborted:  # by a callback before
                job.on_token(job.id, token)
        except BaseException as raised:
            error = error or raised
    if error is not None:
        raise error
