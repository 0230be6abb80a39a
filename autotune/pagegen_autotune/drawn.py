"""Requests drawn from a profile's figures, where the trace itself is not at hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pagegen.spec import Profile, check
from pagegen_autotune.figures import PERCENTILES
from pagegen_autotune.prefix_runs import PrefixRuns, Runs
from pagegen_autotune.trace import Trace

# what an id stands for where the profile does not say
ID_TOKENS = 64
# who continues a conversation continues one of so many requests before
NEIGHBOURS = 64


def drawn_trace(profile: Profile, requests: int, seed: int = 0) -> Trace:
    """`requests` requests like those of the trace that `profile` was made of: prompts and outputs independently from
    its percentiles (geometric between them, nothing beyond p99), gaps between arrivals from a gamma distribution of
    its mean and coefficient of variation, and where the trace had prefix ids, leading blocks of an earlier request in
    that share of the prompt tokens. A stand-in: how lengths and times hang together is not in the figures.

    Raises ValueError for a profile without these figures.
    """
    check.instance("profile", profile, Profile)
    check.integer("requests", requests)
    check.integer("seed", seed, at_least=0)
    rng = np.random.default_rng(seed)
    prompts = np.maximum(1, _lengths(profile, "prompt_tokens", requests, rng))
    outputs = _lengths(profile, "output_tokens", requests, rng)
    arrivals = profile.figures.get("arrivals")
    times = None if not arrivals else _times(arrivals, requests, rng)
    share = profile.figures.get("prefix_reuse_share")
    runs = None if not share else _prefixes(prompts.tolist(), float(share), id_tokens(profile), rng)
    return Trace(arrival_s=times, prompt_tokens=prompts, output_tokens=outputs, prefix_runs=runs)


def id_tokens(profile: Profile) -> int:
    """What one of the ids that `drawn_trace` gives stands for."""
    sharing = profile.figures.get("sharing") or {}
    return int(sharing.get("prefix_block_tokens", ID_TOKENS))


def _lengths(profile: Profile, name: str, count: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    known = profile.figures.get(name)
    if not isinstance(known, dict) or any(f"p{p}" not in known for p in PERCENTILES):
        wanted = ", ".join(f"p{p}" for p in PERCENTILES)
        raise ValueError(
            f"profile {profile.name} must hold {name} with {wanted} among its figures: import it from a trace"
        )
    logs = np.log1p([float(known[f"p{p}"]) for p in PERCENTILES])
    # below p5 down to half of it
    shares, ends = np.array([0.0, *(p / 100 for p in PERCENTILES), 1.0]), [logs[0] - np.log(2.0), *logs, logs[-1]]
    found = np.expm1(np.interp(rng.random(count), shares, np.maximum(ends, 0.0)))
    return np.round(found).astype(np.int64)


def _times(arrivals: dict[str, Any], count: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    mean = 1.0 / float(arrivals["rate_per_s"])
    variance = max(float(arrivals["gap_cv"]), 1e-3) ** 2
    gaps = rng.gamma(1.0 / variance, mean * variance, count)
    times: npt.NDArray[np.float64] = np.cumsum(gaps) - gaps[0]
    return times


def _prefixes(prompts: list[int], share: float, size: int, rng: np.random.Generator) -> PrefixRuns:
    """Ids of full blocks, of which in all about `share` of the prompt tokens are an earlier request's."""
    made: list[Runs] = []
    fresh = total = reused = 0
    for i, prompt in enumerate(prompts):
        blocks = prompt // size
        runs: Runs = ()
        total += prompt
        if made and reused < share * total:  # this one continues another, as far as both are long
            before = made[max(0, i - 1 - int(rng.integers(0, NEIGHBOURS)))]
            runs, taken = _first_blocks(before, min(blocks, int((share * total - reused) // size) + 1))
            reused += taken * size
            blocks -= taken
        if blocks:
            runs = (*runs, (fresh, fresh + blocks - 1))
            fresh += blocks
        made.append(runs)
    return PrefixRuns.of(made)


def _first_blocks(runs: Runs, most: int) -> tuple[Runs, int]:
    """The first ids of these runs, at most so many, and how many there are."""
    found: list[tuple[int, int]] = []
    left = most
    for first, last in runs:
        if left <= 0:
            break
        end = min(last, first + left - 1)
        found.append((first, end))
        left -= end - first + 1
    return tuple(found), most - max(left, 0)
