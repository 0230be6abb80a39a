"""The load a simulated server is put under: which requests of a trace, arriving when."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagegen_autotune.simulation import Server, Simulation, cache_tokens
from pagegen_autotune.trace import Trace

# bounds the work on any trace: 2000 to 18500 requests of the traces shipped here make 39 to 168 thousand steps
MAX_REQUESTS = 20_000
# thinning leaves at least so many; the rest of the slowing down is done on the clock
MIN_REQUESTS = 2_000
WINDOWS = 10
# arrivals closer together than a microsecond are one moment
ONE_MOMENT_S = 1e-6
_CAPACITY_REQUESTS = 1_000


@dataclass(frozen=True, kw_only=True)
class Load:
    """The requests to simulate. `rate_scale` is the factor on the trace's arrival rate (None without times), of which
    `kept_share` by leaving requests out; `capacity_per_s` is what the server finishes a second when never idle (None
    where it was not asked for); `rejected` counts requests of the trace larger than the server's memory."""

    trace: Trace
    rejected: int
    rate_scale: float | None = None
    kept_share: float = 1.0
    capacity_per_s: float | None = None


def offered(
    trace: Trace,
    server: Server,
    *,
    utilisation: float,
    rate_scale: float | None,
    seed: int,
    prefix_block_tokens: int | None = None,
    most: int = MAX_REQUESTS,
) -> Load:
    """The load that keeps `server` busy to the share `utilisation` of its capacity, or at `rate_scale` if given.

    Slower than the trace: requests are drawn at random, as one of several servers behind a random balancer sees them,
    down to MIN_REQUESTS; the rest, and a load faster than the trace, is done on the clock. Of more than `most`,
    WINDOWS stretches of neighbouring requests are taken, evenly spread and set end to end. Where prefixes are shared
    (`prefix_block_tokens`), no request is left out of a stretch, since the next turn of a conversation shares with the
    one before; all slowing down is done on the clock. A trace without arrival
    times, or with all at one moment, is a closed loop: requests are admitted as the server has room.
    Raises ValueError where no request fits into the server's memory.
    """
    fitting = _fitting(trace, server)
    requests = trace.take(fitting, None if trace.arrival_s is None else trace.arrival_s[fitting])
    rejected = len(trace) - len(requests)
    n, times = len(requests), requests.arrival_s
    if times is None or requests.duration_s < ONE_MOMENT_S:
        return Load(trace=requests.take(_windows(np.arange(n), most), None), rejected=rejected)
    rng = np.random.default_rng(seed)
    capacity = None
    if rate_scale is None:
        capacity = capacity_per_s(requests, server, rng, prefix_block_tokens)
        rate_scale = utilisation * capacity * requests.duration_s / (n - 1)
    kept_share = 1.0 if prefix_block_tokens is not None else min(1.0, max(rate_scale, MIN_REQUESTS / n))
    kept = np.flatnonzero(rng.random(n) < kept_share) if kept_share < 1 else np.arange(n)
    chosen = _windows(kept, most)
    stretch = most // WINDOWS if len(chosen) < len(kept) else None
    arrivals = _end_to_end(times[chosen], stretch) * (kept_share / rate_scale)
    return Load(
        trace=requests.take(chosen, arrivals),
        rejected=rejected,
        rate_scale=rate_scale,
        kept_share=kept_share,
        capacity_per_s=capacity,
    )


def capacity_per_s(
    trace: Trace, server: Server, rng: np.random.Generator, prefix_block_tokens: int | None = None
) -> float:
    """Requests a second that the server finishes with the queue never empty, requests drawn at random from the trace;
    where prefixes are shared, neighbours in stretches from all of it.

    Measured until the queue runs empty; a request then in flight counts by the share of its outputs it has.
    """
    count = _CAPACITY_REQUESTS + 8 * server.max_num_seqs
    if prefix_block_tokens is None:
        draws = rng.integers(0, len(trace), size=count)
    else:
        draws = _windows(np.arange(len(trace)), count // WINDOWS * WINDOWS)
    simulation = Simulation(trace.take(draws, None), server, prefix_block_tokens=prefix_block_tokens)
    for _ in simulation.steps():
        if not simulation.scheduler.waiting:
            break
    running = simulation.scheduler.progress()
    done = simulation.finished + sum(outputs / request.max_new_tokens for request, outputs in running)
    return done / simulation.now_s


def _fitting(trace: Trace, server: Server) -> npt.NDArray[np.intp]:
    needed = cache_tokens(trace.prompt_tokens, trace.output_tokens)
    fitting = np.flatnonzero(needed <= server.num_blocks * server.block_tokens)
    if len(fitting) == 0:
        raise ValueError(
            f"kv_tokens must hold at least the trace's smallest request ({needed.min()} tokens in blocks of "
            f"{server.block_tokens}), got {server.kv_tokens}"
        )
    return fitting


def _windows(requests: npt.NDArray[np.intp], most: int) -> npt.NDArray[np.intp]:
    """At most `most` of these, in WINDOWS stretches of neighbours."""
    if len(requests) <= most:
        return requests
    length = most // WINDOWS
    starts = np.linspace(0, len(requests) - length, WINDOWS).astype(np.intp)
    stretches: npt.NDArray[np.intp] = requests[(starts[:, None] + np.arange(length)).ravel()]
    return stretches


def _end_to_end(times: npt.NDArray[np.float64], stretch: int | None) -> npt.NDArray[np.float64]:
    """Times from 0 on; between stretches of so many that were not neighbours the mean gap within stretches."""
    gaps = np.diff(times)
    if stretch is not None:
        seams = np.arange(stretch - 1, len(gaps), stretch)
        gaps[seams] = np.delete(gaps, seams).mean()
    return np.concatenate([[0.0], np.cumsum(gaps)])
