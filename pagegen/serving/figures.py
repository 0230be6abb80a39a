"""What a server did, in numbers: its speed as a whole, and apart from it what single requests waited for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class RequestTimes:
    """One request's moments, in seconds on the scheduler's clock; None for what it did not live to see.

    `gaps_s` are the times between one output token and the next, in order; `gap_counts[i]` gaps in a row were
    `gaps_s[i]` long (more than 1 only where a simulation took equal steps at once: then their mean).
    """

    arrival_s: float
    admitted_s: float | None
    first_token_s: float | None
    end_s: float
    gaps_s: tuple[float, ...] = ()
    gap_counts: tuple[int, ...] = ()

    @property
    def time_to_first_token_s(self) -> float | None:
        """From arrival to the first output token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def queued_s(self) -> float | None:
        """From arrival to the first admission."""
        return None if self.admitted_s is None else self.admitted_s - self.arrival_s

    @property
    def end_to_end_s(self) -> float:
        """From arrival to the end."""
        return self.end_s - self.arrival_s


@dataclass(frozen=True, kw_only=True)
class Percentiles:
    """Each the smallest of the values that the share of them reaches, so always one that occurs."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    largest: float

    @classmethod
    def of(cls, values: Sequence[float], counts: Sequence[int] | None = None) -> Percentiles:
        """Of `values`, the i-th of which stands for `counts[i]` equal ones. Raises ValueError where there are none."""
        known_counts = [1] * len(values) if counts is None else list(counts)
        if len(known_counts) != len(values) or not values:
            raise ValueError(
                f"values must be at least one, with a count each, got {len(values)} and {len(known_counts)}"
            )
        ordered = sorted(zip(values, known_counts, strict=True))
        total = sum(known_counts)
        wanted = [-(-total * share // 100) for share in (50, 90, 99)]  # how many values reach the share, rounded up
        found: list[float] = []
        reached = 0
        for value, count in ordered:
            reached += count
            while len(found) < len(wanted) and reached >= wanted[len(found)]:
                found.append(value)
        mean = sum(value * count for value, count in ordered) / total
        p50, p90, p99 = found
        return cls(count=total, mean=mean, p50=p50, p90=p90, p99=p99, largest=ordered[-1][0])


@dataclass(frozen=True, kw_only=True)
class Latencies:
    """What requests waited: to the first token, between tokens (every gap of every request is one value), from arrival
    to the end. None where no request has such a time. Says nothing of the server's speed: see `ServerFigures`."""

    time_to_first_token_s: Percentiles | None
    inter_token_s: Percentiles | None
    end_to_end_s: Percentiles | None

    @classmethod
    def of(cls, times: Iterable[RequestTimes]) -> Latencies:
        """Over the requests of these times."""
        requests = list(times)
        firsts = [t for r in requests if (t := r.time_to_first_token_s) is not None]
        gaps = [gap for request in requests for gap in request.gaps_s]
        counts = [count for request in requests for count in request.gap_counts]
        ends = [request.end_to_end_s for request in requests]
        return cls(
            time_to_first_token_s=Percentiles.of(firsts) if firsts else None,
            inter_token_s=Percentiles.of(gaps, counts) if gaps else None,
            end_to_end_s=Percentiles.of(ends) if ends else None,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-ready fields."""
        return asdict(self)


@dataclass
class Counters:
    """What was counted since a span began."""

    steps: int = 0
    finished: int = 0
    aborted: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    computed_tokens: int = 0
    hit_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    swap_outs: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    failed_steps: int = 0

    def end(self, reason: str) -> None:
        """One request has ended."""
        if reason == "aborted":
            self.aborted += 1
        else:
            self.finished += 1

    def reset(self) -> None:
        """Back to nothing."""
        vars(self).update(vars(Counters()))


@dataclass(frozen=True, kw_only=True)
class ServerFigures:
    """The whole server from `start_s` to `end_s`. Says nothing of what one request waited: see `Latencies`.

    `prompt_tokens` are those of the prompts that were answered with a first token in the span, `output_tokens` those
    generated; `computed_tokens` went through the model, `recomputed_tokens` of them for the second time, after a
    preemption; `hit_tokens` of admitted prompts were in the prefix cache. Of the `preemptions`, `swap_outs` moved the
    victim's blocks to host memory, and the others dropped them.
    """

    start_s: float
    end_s: float
    steps: int
    finished: int
    aborted: int
    prompt_tokens: int
    output_tokens: int
    computed_tokens: int
    hit_tokens: int
    recomputed_tokens: int
    preemptions: int
    swap_outs: int
    swapped_out_blocks: int
    swapped_in_blocks: int
    failed_steps: int

    def __post_init__(self) -> None:
        if not self.end_s > self.start_s:
            raise ValueError(f"end_s must be after start_s = {self.start_s}, got {self.end_s}: no time has passed")

    @property
    def span_s(self) -> float:
        """Length of the span in seconds."""
        return self.end_s - self.start_s

    @property
    def output_tokens_per_s(self) -> float:
        """Output tokens of all requests over the span."""
        return self.output_tokens / self.span_s

    @property
    def total_tokens_per_s(self) -> float:
        """Prompt tokens, found in the cache or computed, and output tokens of all requests over the span."""
        return (self.prompt_tokens + self.output_tokens) / self.span_s

    @property
    def computed_tokens_per_s(self) -> float:
        """Tokens that went through the model over the span."""
        return self.computed_tokens / self.span_s

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-ready fields, speeds included."""
        return {
            **asdict(self),
            "span_s": self.span_s,
            "output_tokens_per_s": self.output_tokens_per_s,
            "total_tokens_per_s": self.total_tokens_per_s,
            "computed_tokens_per_s": self.computed_tokens_per_s,
        }
