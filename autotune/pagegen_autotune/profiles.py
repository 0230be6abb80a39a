"""Workload profiles: from traces, from files, and the ones that ship with pagegen."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

from pagegen import paths
from pagegen.spec import Profile, check
from pagegen_autotune.figures import figures
from pagegen_autotune.load import offered
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
    if not path.exists():
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
) -> Profile:
    """The profile of a trace file, named after it unless `name` is given; see `read_trace` and `distil`."""
    return distil(
        read_trace(path, skip_bad=skip_bad),
        name=name or Path(path).stem,
        server=server or Server(),
        source=source,
        licence=licence,
        utilisation=utilisation,
        rate_scale=rate_scale,
        batches=batches,
        seed=seed,
    )


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
    on_finished: Callable[[int, int], object] | None = None,
) -> Profile:
    """Simulates `server` under the trace and keeps `batches` steps that stand for all of them.

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
    load = offered(trace, server, utilisation=utilisation, rate_scale=rate_scale, seed=seed)
    simulation = Simulation(load.trace, server)

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
        figures=figures(trace, server, load, simulation, snapshots, chosen, scaled_to),
        source=source,
        licence=licence,
    )
