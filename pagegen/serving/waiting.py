"""The line of waiting requests: priorities first, tenants fairly, nobody forever."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

from pagegen.serving.job import Job

# What a token costs its tenant: Sheng et al. count an output token twice, about what it takes of an accelerator.
PROMPT_TOKEN_COST = 1
OUTPUT_TOKEN_COST = 2
# counters of tenants that are gone are looked through when there are twice as many, but not for fewer than these
_KEPT_COUNTERS = 1024


class WaitingLine:
    """Who is next.

    1. Of the levels (priorities, lower first) with somebody waiting, the best one. Each admission from it overtakes
       the other levels; a level overtaken `max_overtakes` times in a row gives the next, so none starves.
    2. In the level, the tenant that was served least: virtual token counters (Sheng et al., "Fairness in Serving Large
       Language Models", OSDI 2024). A tenant's counter grows by what is computed for it (prompt tokens not found in
       the cache, at its first admission, and outputs as they come; what a preemption makes the server compute again
       costs nothing). One that was away is lifted to the least of those who wait, so that it cannot save up.
    3. Of the tenant, the first come. A preempted request goes back to the front.

    `head` takes time linear in the levels, and in the tenants that wait in one.
    """

    def __init__(self, max_overtakes: int) -> None:
        self.max_overtakes = max_overtakes
        self.served: dict[Hashable, int] = {}
        self._levels: dict[int, dict[Hashable, deque[Job]]] = {}
        self._overtaken: dict[int, int] = {}
        self._waiting: dict[Hashable, int] = {}  # jobs in line, of tenants that have any
        self._present: dict[Hashable, int] = {}  # jobs in line or running, of tenants that have any
        self._last_tenant: Hashable = None  # whose job left an empty line behind
        self._sweep_at = _KEPT_COUNTERS
        self._size = 0

    def __len__(self) -> int:
        return self._size

    @property
    def is_settled(self) -> bool:
        """Whether the head stays the head while nobody comes or goes, whoever is served meanwhile."""
        return not self._levels or len(self._levels[self._next_level()]) == 1

    def arrive(self, job: Job) -> None:
        """A new request, behind its tenant's others."""
        tenant = job.tenant
        if tenant not in self._waiting:
            self.served[tenant] = max(self.served.get(tenant, 0), self._least_served())
        self._present[tenant] = self._present.get(tenant, 0) + 1
        self._jobs(job).append(job)
        self._count(tenant, 1)

    def put_back(self, job: Job) -> None:
        """A preempted request, in front of its tenant's others."""
        self._jobs(job).appendleft(job)
        self._count(job.tenant, 1)

    def head(self) -> Job | None:
        """Who is next, None where nobody waits."""
        if not self._levels:
            return None
        tenants = self._levels[self._next_level()]
        if len(tenants) == 1:
            (jobs,) = tenants.values()
            return jobs[0]
        return min((jobs[0] for jobs in tenants.values()), key=lambda j: (self.served[j.tenant], j.number))

    def admit(self, job: Job) -> None:
        """Takes `job`, the head, out of the line into the server."""
        for level in self._levels:
            if level != job.level:
                self._overtaken[level] += 1
        self._overtaken[job.level] = 0
        self._leave(job)

    def remove(self, job: Job) -> None:
        """Takes a waiting job out of the line without admitting it."""
        self._leave(job)

    def end(self, job: Job) -> None:
        """Forgets a job that has left the line and the server."""
        tenant = job.tenant
        self._present[tenant] -= 1
        if not self._present[tenant]:
            del self._present[tenant]
            if len(self.served) > self._sweep_at:
                self._sweep()

    def charge(self, tenant: Hashable, cost: int) -> None:
        """Counts what was computed for a tenant."""
        self.served[tenant] += cost

    def _jobs(self, job: Job) -> deque[Job]:
        if job.level not in self._levels:
            self._levels[job.level] = {}
            self._overtaken[job.level] = 0
        return self._levels[job.level].setdefault(job.tenant, deque())

    def _count(self, tenant: Hashable, change: int) -> None:
        self._size += change
        left = self._waiting.get(tenant, 0) + change
        if left:
            self._waiting[tenant] = left
        else:
            del self._waiting[tenant]

    def _leave(self, job: Job) -> None:
        tenants = self._levels[job.level]
        jobs = tenants[job.tenant]
        jobs.remove(job)  # in front, but for an abort
        if not jobs:
            del tenants[job.tenant]
        if not tenants:
            del self._levels[job.level], self._overtaken[job.level]
        self._count(job.tenant, -1)
        if not self._size:
            self._last_tenant = job.tenant

    def _next_level(self) -> int:
        if len(self._levels) == 1:
            return next(iter(self._levels))
        starved = max(self._levels, key=lambda level: (self._overtaken[level], -level))
        return starved if self._overtaken[starved] >= self.max_overtakes else min(self._levels)

    def _least_served(self) -> int:
        """What a tenant that joins the line is lifted to."""
        if self._waiting:
            return min(self.served[tenant] for tenant in self._waiting)
        return self.served.get(self._last_tenant, 0)

    def _sweep(self) -> None:
        """Drops the counters of tenants that are gone and would be lifted to the same when they came again."""
        least = self._least_served()
        for tenant, counter in list(self.served.items()):
            if counter <= least and tenant not in self._present and tenant != self._last_tenant:
                del self.served[tenant]
        self._sweep_at = max(_KEPT_COUNTERS, 2 * len(self.served))
