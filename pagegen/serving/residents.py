"""`Residents`: the sequences in the cache: who is let in, who grows, and who has to give way."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Literal, get_args

from pagegen.cache import OutOfBlocks
from pagegen.cache.sequence import integer
from pagegen.serving.caches import ServableCache, groups_of, holds
from pagegen.serving.figures import Counters
from pagegen.serving.job import Job
from pagegen.serving.request import NeverFits, Request
from pagegen.serving.waiting import PROMPT_TOKEN_COST, WaitingLine

Preempt = Literal["recompute", "swap"]
"""How a request gives way: its blocks are dropped and computed again, or moved to host memory."""
Rows = list[tuple[Job, int]]  # of a step: a sequence, and how many of its tokens are computed

# How often a request gives way to better priorities before it takes theirs.
SETBACKS_BORNE = 3


class Residents:
    """The jobs in `cache`, in order of admission. `pagegen.serving.scheduler` states the policy."""

    def __init__(
        self, cache: ServableCache, line: WaitingLine, counters: Counters, *, lookahead: int, preempt: Preempt
    ) -> None:
        if preempt not in get_args(Preempt):
            raise ValueError(f"preempt must be one of {', '.join(map(repr, get_args(Preempt)))}, got {preempt!r}")
        self.cache = cache
        self.groups = groups_of(cache)
        self.jobs: list[Job] = []
        self._line = line
        self._counters = counters
        self._lookahead = integer("lookahead", lookahead, 0)
        self._preempt_by = preempt
        self._blocked: Job | None = None  # the head of the line found not to fit, until that may have changed
        self._admitted = 0
        self._unfreed: dict[Hashable, None] = {}  # sequences that ended, but for the cache's own record

    @property
    def is_blocked(self) -> bool:
        """Whether nobody can be admitted until somebody comes or goes."""
        return self._line.is_settled and self._line.head() is self._blocked

    def check_fits(self, request: Request) -> None:
        """Raises NeverFits for a request that the cache cannot hold even alone."""
        for group in self.groups:
            needed = group.blocks_for(request.most_tokens)
            if needed > group.num_blocks - group.watermark:
                raise NeverFits(request, needed, group.num_blocks, group.watermark)

    def grow(self) -> bool:
        """Makes room for each decoding sequence's last token; returns whether somebody had to give way for it."""
        growing = [job for job in self.jobs if job.unfed]
        preempted = False
        while growing:
            try:
                self.cache.append_each([job.id for job in growing], [job.last_token for job in growing])
            except OutOfBlocks:
                victim = max(self.jobs, key=lambda job: (job.level, job.ticket))
                self._preempt(victim, min(job.level for job in growing))
                growing = [job for job in growing if job is not victim]
                preempted = True
                continue
            except BaseException:  # whether their tokens are there, nobody knows
                for job in reversed(growing):
                    self._send_back(job)
                    self._drop(job)
                raise
            for job in growing:
                job.unfed = 0
            break
        return preempted

    def spend(self, rows: Rows, budget: int, now_s: float, *, max_num_seqs: int, in_turn: bool) -> None:
        """Spends what is left of a step's budget: by priority, and in each on prompts being computed before on waiting
        requests; `in_turn` on the prompts in order of admission. Admits nobody where `max_num_seqs` is 0."""
        prompts = [job for job in self.jobs if job.pending > 1]
        for job in prompts if in_turn else sorted(prompts, key=lambda job: job.level):
            if not in_turn:
                budget = self._admit(rows, budget, now_s, max_num_seqs, better_than=job.level)
            if not budget:
                return
            budget -= _compute(job, budget, rows)
        self._admit(rows, budget, now_s, max_num_seqs)

    def _admit(self, rows: Rows, budget: int, now_s: float, max_num_seqs: int, better_than: int | None = None) -> int:
        """Lets in the head of the line while budget, a place and blocks for it are free; returns the budget left."""
        while budget and len(self.jobs) < max_num_seqs:
            job = self._line.head()
            # alone it fits, once whatever else was in the cache is gone
            if job is None or (job is self._blocked and self.jobs):
                break
            if better_than is not None and job.level >= better_than:
                break
            if not self._fits(job):
                self._blocked = job
                break
            self._enter(job, now_s)
            budget -= _compute(job, budget, rows)
        return budget

    def look_at_head(self) -> None:
        """Finds out whether the head of the line is blocked, without letting it in."""
        head = self._line.head()
        self._blocked = None if head is None or self._fits(head) else head

    def look_again(self) -> None:
        """Somebody came or went, or can be found by prefix: the head of the line may fit now."""
        self._blocked = None

    def leave(self) -> None:
        """Takes out the jobs that are gone."""
        self.jobs = [job for job in self.jobs if not job.gone]
        self._blocked = None

    def _fits(self, job: Job) -> bool:
        """Whether the cache has room for all tokens known and the look-ahead, but no more than it may come to need."""
        ahead = min(self._lookahead, job.request.most_tokens - job.known)
        if job.swapped:  # as if none of its blocks were shared: then the last token has room besides
            return self.cache.can_admit(job.known, lookahead=ahead)
        return self.cache.can_admit(job.known, tokens=job.tokens(), context=job.context, lookahead=ahead)

    def release(self, seq_ids: Iterable[Hashable] = ()) -> Exception | None:
        """Frees sequences, and those that could not be freed before, which it notes first; returns the first error.
        What raised is tried again next time."""
        self._unfreed.update(dict.fromkeys(seq_ids))
        first: Exception | None = None
        for seq_id in list(self._unfreed):
            try:
                if holds(self.cache, seq_id):
                    self.cache.free(seq_id)
            except Exception as error:
                first = first or error
            if not holds(self.cache, seq_id):
                del self._unfreed[seq_id]
        return first

    def take_back(self, rows: Rows) -> Exception | None:
        """Nothing counts of a step with these rows. Where the cache cannot undo it, they are computed again from their
        beginnings, and its error is returned."""
        held = [job for job, _ in rows if holds(self.cache, job.id)]
        try:
            # a step that failed before it was announced must not undo the one before it
            announced = [job.id for job in held if self.cache.computed(job.id) > job.known - job.pending]
            self.cache.abandon(announced)  # nobody can have found anything of it yet
            self.shorten(held)
        except Exception as error:
            running = [job for job, _ in rows if not job.gone]
            for job in sorted(running, key=lambda job: job.ticket, reverse=True):
                self._send_back(job)
                self._drop(job)
            return error
        return None

    def lengthen(self, jobs: list[Job], count: int) -> None:
        """Makes room for `count` tokens 0 more of each job: all or, where the cache raises, none."""
        try:
            for job in jobs:
                self.cache.append(job.id, range(count) if job.outputs is None else [0] * count)
        except BaseException:
            self.shorten(jobs)
            raise

    def shorten(self, jobs: Iterable[Job]) -> None:
        """Takes the tokens out of the cache that a repeated step would have given."""
        for job in jobs:
            if self.cache.length(job.id) > job.known:
                self.cache.truncate(job.id, job.known)

    def _enter(self, job: Job, now_s: float) -> None:
        """Lets in the head of the line. Where the cache raises, it stays in line, with nothing in the cache."""
        if not job.swapped and holds(self.cache, job.id):
            raise ValueError(
                f"request.id must be new, got {job.id!r}, which is in the cache and not this scheduler's: free it "
                "there, or abort the request"
            )
        try:
            hits = 0 if job.swapped else self.cache.add(job.id, job.tokens(), context=job.context)
            swapped_in = self._swap_in(job) if job.swapped else 0
        except BaseException:
            if job.swapped:
                self._drop(job)
            else:
                self.release([job.id])
            raise
        self._line.admit(job)
        if job.swapped:
            job.swapped, job.unfed = False, 0
            self._counters.swapped_in_blocks += swapped_in
        else:
            job.pending = job.known - hits
            if job.admitted_s is None:
                job.hit_tokens = hits
                self._counters.hit_tokens += hits
                self._line.charge(job.tenant, job.pending * PROMPT_TOKEN_COST)
            else:
                self._counters.recomputed_tokens += max(0, job.lost - hits)
        if job.admitted_s is None:
            job.admitted_s = now_s
        job.resident = True
        job.ticket = self._admitted
        self._admitted += 1
        self.jobs.append(job)

    def _preempt(self, victim: Job, level: int) -> None:
        """Sends `victim` back to the line so that sequences of `level` at best can grow."""
        if level < victim.level:
            victim.setbacks += 1
            if victim.setbacks == SETBACKS_BORNE:
                victim.level, victim.setbacks = level, 0
        self._send_back(victim)
        try:
            kept = self._preempt_by == "swap" and self._swap_out(victim)
        except BaseException:
            self._drop(victim)
            raise
        error = None if kept else self._drop(victim)
        if error is not None:
            raise error

    def _send_back(self, job: Job) -> None:
        """Takes a job out of the server, to the front of its tenant's line."""
        self.jobs.remove(job)
        self._blocked = None
        job.resident = False
        job.preemptions += 1
        self._counters.preemptions += 1
        self._line.put_back(job)

    def _drop(self, job: Job) -> Exception | None:
        """Gives up what the cache has of a job in line: all of it will be computed again. Returns the cache's error."""
        job.lost = job.known - job.pending
        job.pending, job.unfed, job.swapped = job.known, 0, False
        return self.release([job.id])

    def _swap_out(self, job: Job) -> bool:
        """Moves a sequence to host memory. False where that has no room."""
        before = self._host_available()
        try:
            self.cache.swap_out(job.id)
        except OutOfBlocks:
            return False
        job.swapped = True
        self._counters.swap_outs += 1
        self._counters.swapped_out_blocks += before - self._host_available()
        return True

    def _swap_in(self, job: Job) -> int:
        """Brings a sequence back, with room for its last token; returns how many blocks were moved."""
        before = self._host_available()
        self.cache.swap_in(job.id)
        moved = self._host_available() - before
        if job.unfed:
            self.cache.append_each([job.id], [job.last_token])
        return moved

    def _host_available(self) -> int:
        return sum(group.host_available for group in self.groups)


def _compute(job: Job, budget: int, rows: Rows) -> int:
    """Adds a row for what `job` has pending, or `budget` tokens of it; returns how many."""
    count = min(job.pending, budget)
    rows.append((job, count))
    return count
