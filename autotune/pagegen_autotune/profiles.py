"""Workload profiles: from traces, from files, and the ones that ship with pagegen."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

from pagegen import paths
from pagegen.spec import Profile, check
from pagegen_autotune.figures import figures
from pagegen_autotune.load import offered
from pagegen_autotune.prefix_runs import PrefixRuns, block_tokens
from pagegen_autotune.representatives import represent
from pagegen_autotune.simulation import Server, Simulation, Step
from pagegen_autotune.snapshots import draw
from pagegen_autotune.trace import Trace, read_trace

BATCHES = 12
# busy four fifths of what it can do: where servers are run, with queues now and then
UTILISATION = 0.8
# of each kind of step; k-medoids holds a matrix of the distances between them: 8 MB
SNAPSHOTS = 1024


def shipped_profiles() -> list[str]:
    """The names of the profiles that ship with pagegen."""
    return sorted(file.stem for file in paths.data("profiles").glob("*.json"))


def load_profile(name_or_path: str | Path) -> Profile:
    """A shipped profile by name, else a profile file. Raises ValueError or OSError saying what was found."""
    shipped = shipped_profiles()
    if isinstance(name_or_path, str) and name_or_path in shipped:
        return Profile.load(paths.data("profiles") / f"{name_or_path}.json")
    path = Path(name_or_path)
    if not path.exists() or path.is_dir():  # a path of "" is the folder here
        raise FileNotFoundError(
            f"profile must be one of {', '.join(shipped)} or a file, got {str(name_or_path)!r}, which is neither"
        )
    return Profile.load(path)


def import_trace(
    path: str | Path,
    *,
    name: str | None = None,
    skip_bad: bool = False,
    server: Server | None = None,
    source: str = "",
    licence: str = "",
    utilisation: float = UTILISATION,
    rate_scale: float | None = None,
    batches: int = BATCHES,
    seed: int = 0,
    prefix_reuse: bool = True,
    prefix_block_tokens: int | None = None,
) -> Profile:
    """The profile of a trace file, named after it unless `name` is given; see `read_trace` and `distil`.

    With `prefix_reuse`, prompts share what the trace's `prefix_hash_ids` say, where it has any; how many tokens an id
    stands for is `prefix_block_tokens`, or what the lengths of the prompts tell (`prefix_size`). Raises TraceError (a
    ValueError) naming the line of a malformed row unless `skip_bad`, OSError for a file that cannot be read, and
    ValueError for other arguments.
    """
    trace = read_trace(path, skip_bad=skip_bad, keep_prefixes=prefix_reuse)
    return distil(
        trace,
        name=name or Path(path).stem,
        server=server or Server(),
        source=source,
        licence=licence,
        utilisation=utilisation,
        rate_scale=rate_scale,
        batches=batches,
        seed=seed,
        prefix_block_tokens=prefix_size(trace) if prefix_block_tokens is None else prefix_block_tokens,
    )


def prefix_size(trace: Trace) -> int | None:
    """How many tokens each of a trace's prefix ids stands for, as far as the lengths of its prompts tell: see
    `block_tokens`. None, too, for a trace that kept no ids; then nothing is shared."""
    runs = trace.prefix_runs
    if runs is None:
        return None
    return block_tokens(runs if isinstance(runs, PrefixRuns) else PrefixRuns.of(runs), trace.prompt_tokens)


def distil(
    trace: Trace,
    *,
    name: str,
    server: Server,
    source: str = "",
    licence: str = "",
    utilisation: float = UTILISATION,
    rate_scale: float | None = None,
    batches: int = BATCHES,
    seed: int = 0,
    prefix_block_tokens: int | None = None,
    on_finished: Callable[[int, int], object] | None = None,
) -> Profile:
    """Simulates `server` under the trace and keeps `batches` steps that stand for all of them.

    With `prefix_block_tokens`, prompts share what the trace's `prefix_runs` say, an id standing for so many tokens.

    The arrival rate is scaled so that the server is busy to the share `utilisation`, or by `rate_scale` if given;
    a weight is the share of steps. `on_finished` is told how many requests are finished, of how many. Deterministic
    for a seed. Raises ValueError where an argument is out of range or no request fits into the server's memory.
    """
    if not 0 < utilisation <= 2:
        raise ValueError(f"utilisation must be above 0 and at most 2 (above 1 queues only grow), got {utilisation}")
    if rate_scale is not None and not (math.isfinite(rate_scale) and rate_scale > 0):
        raise ValueError(f"rate_scale must be a positive number, got {rate_scale}")
    if not name.strip():
        raise ValueError(f"name must not be empty, got {name!r}")
    check.integer("batches", batches, at_least=2)
    check.integer("seed", seed, at_least=0)
    if prefix_block_tokens is not None:
        check.integer("prefix_block_tokens", prefix_block_tokens)
    load = offered(
        trace, server, utilisation=utilisation, rate_scale=rate_scale, seed=seed,
        prefix_block_tokens=prefix_block_tokens,
    )  # fmt: skip
    simulation = Simulation(load.trace, server, prefix_block_tokens=prefix_block_tokens)

    def watched() -> Iterator[Step]:
        for step in simulation.steps():
            yield step
            if on_finished:
                on_finished(simulation.finished, len(load.trace))

    snapshots = draw(watched(), capacity=SNAPSHOTS, seed=seed)
    chosen = represent(snapshots, batches)
    scaled_to = {"utilisation": utilisation if load.capacity_per_s is not None else None, "seed": seed}
    return Profile(
        name=name,
        workloads=chosen.workloads,
        weights=chosen.weights,
        figures=figures(trace, server, load, simulation, snapshots, chosen, scaled_to, prefix_block_tokens),
        source=source,
        licence=licence,
    )
