"""`Flight`: the step in flight, with the jobs it is of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pagegen.serving.caches import Group
from pagegen.serving.job import Job
from pagegen.serving.residents import Residents, Rows
from pagegen.serving.step import Step


@dataclass(slots=True)
class Flight:
    """A step in flight: `rows[i]` is the job of its row i and how many tokens it computes. It stands for `count` steps,
    the first of which ends at `first_end_s`; None where it is a single one, which ends when it completes."""

    step: Step
    rows: Rows
    count: int = 1
    first_end_s: float | None = None

    @classmethod
    def of(cls, number: int, rows: Rows) -> Flight:
        """The step of these rows."""
        # one pass over the rows takes half as long as one a field
        of_rows = [(job.id, query, job.known - job.pending + query, job.pending == query) for job, query in rows]
        seq_ids, query_lens, context_lens, samples = zip(*of_rows, strict=True)
        step = Step(number=number, seq_ids=seq_ids, query_lens=query_lens, context_lens=context_lens, samples=samples)
        return cls(step, rows)

    def is_of(self, job: Job) -> bool:
        """Whether a row is of `job`."""
        return any(job is row for row, _ in self.rows)

    def steady_steps(self, groups: Iterable[Group]) -> int:
        """`Scheduler.steady_steps`, as far as it hangs on the rows."""
        if not self.step.is_decode:
            return 1
        room = min(group.block_size * (group.available // len(self.rows)) for group in groups)
        return min(1 + room, min(job.limit - job.generated for job, _ in self.rows))

    def repeat(self, residents: Residents, count: int, first_end_s: float) -> None:
        """`Scheduler.repeat`. Raises ValueError for a step that was repeated before."""
        if self.count > 1:
            raise ValueError(f"step must not be repeated yet, got {self.step.number}, of {self.count} steps")
        if count > 1:
            residents.lengthen([job for job, _ in self.rows], count - 1)
            self.count, self.first_end_s = count, first_end_s
