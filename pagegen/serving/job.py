"""`Job`: a request on its way through the server."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from pagegen.cache.sequence import TOKEN_CODE
from pagegen.serving.figures import RequestTimes
from pagegen.serving.request import Outcome, Reason, Request

OnToken = Callable[[Hashable, int], object]


@dataclass(slots=True, eq=False)
class Job:
    """One request's state. `level` is its priority, or the better one it has risen to; `number` counts submissions and
    `ticket` admissions. Of the tokens `known` (prompt and outputs), `pending` are not computed, 1 while it decodes, and
    `unfed` (the last one, or none) are not in the cache. `lost` were computed when its blocks were last dropped."""

    request: Request
    number: int
    on_token: OnToken | None
    id: Hashable
    tenant: Hashable
    level: int
    prompt_tokens: int
    known: int
    pending: int
    limit: int
    context: bytes
    stop_tokens: frozenset[int]
    outputs: array[int] | None
    ticket: int = -1
    generated: int = 0
    unfed: int = 0
    last_token: int = 0
    resident: bool = False
    swapped: bool = False
    gone: bool = False
    aborted: bool = False
    lost: int = 0
    hit_tokens: int = 0
    preemptions: int = 0
    setbacks: int = 0
    admitted_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float = 0.0
    gaps_s: array[float] = field(default_factory=lambda: array("d"))
    runs: dict[int, int] = field(default_factory=dict)  # gaps that stand for several

    @classmethod
    def of(cls, request: Request, number: int, on_token: OnToken | None) -> Job:
        sizes_only = isinstance(request.prompt, int)
        # tokens that nobody knows are equal to nobody else's
        context = b"tokens of " + repr(request.id).encode() if sizes_only else request.context
        size = request.prompt_tokens
        return cls(
            request=request, number=number, on_token=on_token, id=request.id,
            tenant=request.tenant, level=request.priority,
            prompt_tokens=size, known=size, pending=size, limit=request.max_new_tokens, context=context,
            stop_tokens=request.stop_tokens, outputs=None if sizes_only else array(TOKEN_CODE),
        )  # fmt: skip

    def tokens(self) -> array[int] | range:
        """The tokens known, or as many integers."""
        if self.outputs is None:
            return range(self.known)
        assert isinstance(self.request.prompt, array)
        return self.request.prompt + self.outputs

    def take(self, token: int, now_s: float) -> None:
        """One more output token."""
        if self.first_token_s is None:
            self.first_token_s = now_s
        else:
            self.gaps_s.append(now_s - self.last_token_s)
        self.last_token_s = now_s
        self.generated += 1
        self.known += 1
        self.pending = self.unfed = 1
        self.last_token = token
        if self.outputs is not None:
            self.outputs.append(token)

    def take_more(self, count: int, now_s: float) -> None:
        """`count` more output tokens 0, evenly spread up to `now_s`."""
        self.runs[len(self.gaps_s)] = count
        self.gaps_s.append((now_s - self.last_token_s) / count)
        self.last_token_s = now_s
        self.generated += count
        self.known += count
        self.last_token = 0
        if self.outputs is not None:
            self.outputs.extend([0] * count)

    def outcome(self, reason: Reason, now_s: float) -> Outcome:
        times = RequestTimes(
            arrival_s=self.request.arrival_s,
            admitted_s=self.admitted_s,
            first_token_s=self.first_token_s,
            end_s=now_s,
            gaps_s=tuple(self.gaps_s),
            gap_counts=tuple(self.runs.get(i, 1) for i in range(len(self.gaps_s))),
        )
        return Outcome(
            request=self.request,
            reason=reason,
            tokens=array(TOKEN_CODE) if self.outputs is None else self.outputs,
            output_tokens=self.generated,
            hit_tokens=self.hit_tokens,
            preemptions=self.preemptions,
            times=times,
        )
