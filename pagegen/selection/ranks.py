"""Ranks that agree: what a choice rests on, as digests that the processes of a job compare before they serve.

Two ranks with other database snapshots, templates or devices would run kernels that round differently, or wait for one
another at other times. What decides is written down by name, so that a difference can be told.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pagegen import __version__, targets
from pagegen.selection.candidates import device_for, opened, sentence
from pagegen.selection.ladder import rule_for
from pagegen.spec import AttentionSpec, CacheLayout, Target
from pagegen.spec.choice import ChoiceDigest

if TYPE_CHECKING:
    from pagegen.db import Database

# Ranks named in an error; of 4096 that differ a person reads the first.
SHOWN_RANKS = 8


class RanksDisagree(RuntimeError):
    """Ranks of one job would choose differently. `differences` maps what differs to {value: ranks}."""

    def __init__(self, differences: Mapping[str, Mapping[str, Sequence[int]]]) -> None:
        self.differences = {
            name: {value: list(ranks) for value, ranks in by.items()} for name, by in differences.items()
        }
        told = "; ".join(f"{name} is {_sides(by)}" for name, by in self.differences.items())
        super().__init__(
            f"the ranks of this job would choose differently: {told}. Give all ranks the same pagegen, devices and "
            "tuning database (one file or URL, or copies of one export)"
        )


def _sides(by_value: Mapping[str, Sequence[int]]) -> str:
    sides = []
    for value, ranks in sorted(by_value.items(), key=lambda item: list(item[1])):
        some = ", ".join(map(str, ranks[:SHOWN_RANKS])) + (", ..." if len(ranks) > SHOWN_RANKS else "")
        sides.append(f"{value} on rank{'s' if len(ranks) > 1 else ''} {some}")
    return " and ".join(sides)


def choice_digest(
    spec: AttentionSpec, layout: CacheLayout, target: Target | str, db: Database | str | None = None
) -> ChoiceDigest:
    """The digest of what `rule_for` and `select` rest on for one kernel: pagegen's version, the templates, the device,
    the portfolios and trials of the spec, and the rule that comes of them. Never raises for a database: one that cannot
    be read is a field that differs from one that can."""
    target = Target.parse(target)
    layout = layout.canonical(spec.num_kv_heads)
    rule = rule_for(spec, layout, target, db)
    from pagegen.db import DatabaseError
    from pagegen.db.keys import spec_digest

    try:
        with opened(db) as source:
            portfolios, trials = _stored(source, spec)
    except DatabaseError as error:
        portfolios = trials = f"unreadable ({sentence(error).split(':')[0].split(' at ')[0]})"
    try:
        device = device_for(target)
        place = _short({"device": {k: v for k, v in device.to_dict().items() if k not in _VARYING}})
        named = f"{device.name} ({place})"
    except ValueError:
        named = "unknown"
    clauses = [clause.to_dict() for clause in rule.clauses]
    return ChoiceDigest(
        {
            "pagegen": __version__,
            "target": str(target),
            "templates": targets.code_hash(target)[:16],
            "spec": spec_digest(spec)[:16],
            "layout": f"{layout.block_size} {layout.order}",
            "device": named,
            "portfolios": portfolios,
            "trials": trials,
            "rule": f"{' / '.join(v.name for v in rule.variants)} ({_short(clauses)})",
        }
    )


# Measured at every start, and no part of what is chosen from a portfolio.
_VARYING = ("bandwidth_gb_s", "matrix_tflops", "memory_gib", "core_clock_mhz", "memory_clock_mhz", "power_limit_w")


def _short(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _stored(db: Database, spec: AttentionSpec) -> tuple[str, str]:
    """The portfolios and the trials of a spec, each as a count and a digest."""
    from pagegen.db.figures import content_digests

    portfolios, trials = content_digests(db, spec)
    return f"{len(portfolios)} ({_short(portfolios)})", f"{len(trials)} ({_short(trials)})"


def check_ranks(digests: Sequence[ChoiceDigest | Mapping[str, str]]) -> None:
    """Raises RanksDisagree where the digests of a job's ranks, in the order of the ranks, are not all alike, naming
    what differs and between which ranks. Needs no torch.distributed: gather them however the job does."""
    fields = [dict(d.fields) if isinstance(d, ChoiceDigest) else dict(d) for d in digests]
    differences: dict[str, dict[str, list[int]]] = {}
    for name in dict.fromkeys(name for one in fields for name in one):
        by_value: dict[str, list[int]] = defaultdict(list)
        for rank, one in enumerate(fields):
            by_value[one.get(name, "absent")].append(rank)
        if len(by_value) > 1:
            differences[name] = by_value
    if differences:
        raise RanksDisagree(differences)


def check_job(
    spec: AttentionSpec,
    layout: CacheLayout,
    target: Target | str,
    db: Database | str | None = None,
    *,
    group: Any = None,
) -> ChoiceDigest:
    """`check_ranks` over the ranks of torch.distributed's process group (None: all of them), by one gather of some
    hundred bytes a rank; returns this rank's digest. Every rank of the group must call it. Where torch.distributed is
    not initialised there is one rank, which agrees with itself. Raises RanksDisagree."""
    import torch.distributed as dist

    own = choice_digest(spec, layout, target, db)
    if dist.is_available() and dist.is_initialized():
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, own.to_dict(), group=group)
        check_ranks(gathered)
    return own
