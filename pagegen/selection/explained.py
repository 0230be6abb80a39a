"""The whole ladder for one question: which rung answered, why the others did not, and what nearly would have."""

from __future__ import annotations

import logging
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pagegen import targets
from pagegen.selection.asking import ladder_for, selected
from pagegen.selection.candidates import candidate, kept_open, opened
from pagegen.selection.grades import GRADES, RADIUS, axes, workload_distance
from pagegen.selection.ladder import Ladder
from pagegen.spec import AttentionSpec, CacheLayout, Device, Selection, Target, Workload

if TYPE_CHECKING:
    from pagegen.db import Database
    from pagegen.db.leads import Lead

log = logging.getLogger(__name__)
# Portfolios looked at for near misses, the newest first, and how many are shown.
LOOKED_AT, SHOWN = 500, 5
# A portfolio that differs in more fields than this is no near miss.
MAX_FIELDS = 6
NOTHING_STORED = {
    "exact": "no portfolio of this kernel on this device holds this very batch",
    "near": "no portfolio of this device is near enough",
    "arch": "no portfolio of another product of this architecture",
    "other_arch": "no portfolio of another architecture",
    "predicted": "",
    "default": "",
}


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One rung: whether it answered ("answered"), had nothing to say ("missed") or was not asked ("below")."""

    grade: str
    state: str
    why: str


@dataclass(frozen=True, kw_only=True)
class NearMiss:
    """A stored portfolio that does not answer: `fields` maps what differs to (what is stored, what was asked for)."""

    place: str
    target: str
    tuned_at: str
    fields: dict[str, tuple[Any, Any]]
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """A selection, the rungs of its ladder from the top, and the near misses, the nearest first."""

    selection: Selection
    rungs: tuple[Rung, ...]
    near_misses: tuple[NearMiss, ...]

    def ladder_dict(self) -> dict[str, Any]:
        """The rungs and near misses, JSON-ready."""
        return {"ladder": [asdict(r) for r in self.rungs], "near_misses": [asdict(m) for m in self.near_misses]}


def explain_selection(
    spec: AttentionSpec, layout: CacheLayout, target: Target | str, workload: Workload,
    db: Database | str | None = None, *, device: Device | str | None = None,
) -> Explanation:  # fmt: skip
    """`select`, with everything that was considered on the way. Never raises for a database."""
    with kept_open(db) as source:
        ladder = ladder_for(spec, layout, target, workload, source, device)
        chosen = selected(ladder)
        try:
            misses = near_misses(ladder, chosen)
        except Exception as error:  # what cannot be read cannot nearly answer, and costs not the answer that there is
            log.warning("the near misses are left out: %s", error)
            misses = ()
    return Explanation(selection=chosen, rungs=_rungs(ladder, chosen), near_misses=misses)


def _rungs(ladder: Ladder, chosen: Selection) -> tuple[Rung, ...]:
    if chosen.grade not in GRADES:  # the reference path: the ladder was not climbed
        return tuple(Rung(grade=grade, state="below", why="no generated kernel serves the spec") for grade in GRADES)
    at = GRADES.index(chosen.grade)
    found = []
    for i, grade in enumerate(GRADES):
        missed = "; ".join(ladder.rungs[grade]) or NOTHING_STORED[grade]
        if i < at:
            found.append(Rung(grade=grade, state="missed", why=missed))
        elif i == at:
            found.append(Rung(grade=grade, state="answered", why=chosen.reason.split("; ")[0]))
        else:
            found.append(Rung(grade=grade, state="below", why=""))
    return tuple(found)


def near_misses(ladder: Ladder, chosen: Selection) -> tuple[NearMiss, ...]:
    """The stored portfolios that differ least from the question, field by field, each way of differing once; what
    answered is left out."""
    from pagegen.db.leads import similar

    with opened(ladder.db) as db:
        leads = similar(db, LOOKED_AT)
    refused = {c.lead.digest: c.refused for c in ladder.judged}
    answered = next((c.lead for c in ladder.judged if not c.refused), None) if chosen.grade in GRADES[:4] else None
    found: dict[str, tuple[Lead, dict[str, tuple[Any, Any]]]] = {}
    for lead in leads:
        if answered is not None and lead.digest == answered.digest:
            continue
        fields = differing(ladder, lead)
        why = refused.get(lead.digest, "")
        # what differs in nothing was superseded by the answer; what differs alike, by the newest of its like
        if fields is not None and len(fields) <= MAX_FIELDS and (fields or why):
            found.setdefault(repr((lead.place, lead.target, fields, why)), (lead, fields))
    nearest = sorted(found.values(), key=lambda f: len(f[1]))  # stable: the newest first
    return tuple(
        NearMiss(
            place=lead.place, target=str(lead.target), tuned_at=lead.created_at, fields=fields,
            why=refused.get(lead.digest, ""),
        )
        for lead, fields in nearest[:SHOWN]
    )  # fmt: skip


def differing(ladder: Ladder, lead: Lead) -> dict[str, tuple[Any, Any]] | None:
    """What of a portfolio differs from the question, as (stored, asked); None where it is damaged or of another kernel
    family."""
    from pagegen.db.queries import UNDECODABLE

    if lead.target.family != ladder.target.family:
        return None
    try:
        return {**_key_fields(ladder, lead), **_batch_fields(ladder, lead)}
    except UNDECODABLE:
        return None


def _key_fields(ladder: Ladder, lead: Lead) -> dict[str, tuple[Any, Any]]:
    """What of a portfolio's spec, layout, device and code differs."""
    from pagegen.db.keys import RATES

    device = ladder.device
    stored: dict[str, Any] = {f"spec.{k}": v for k, v in lead.spec.to_dict().items()}
    asked: dict[str, Any] = {f"spec.{k}": v for k, v in ladder.spec.to_dict().items()}
    for name, there, here in (
        ("layout", lead.layout.to_dict(), ladder.layout.to_dict()),
        ("device", lead.device.to_dict(), device.to_dict()),
    ):
        stored |= {f"{name}.{k}": v for k, v in there.items() if k not in RATES}
        asked |= {f"{name}.{k}": v for k, v in here.items() if k not in RATES}
    stored["code_hash"], asked["code_hash"] = lead.code_hash[:12], targets.code_hash(ladder.target)[:12]
    fields = {name: (stored.get(name), asked[name]) for name in asked if stored.get(name) != asked[name]}
    if any(name.startswith("device.") for name in fields):  # one product differs from another in most of its figures
        fields = {k: v for k, v in fields.items() if not k.startswith("device.")}
        fields["device"] = (lead.device.name, device.name)
    return fields


def _batch_fields(ladder: Ladder, lead: Lead) -> dict[str, tuple[Any, Any]]:
    """How the nearest batch that the portfolio was tuned on differs from the asked one."""
    workload = ladder.workload
    if workload is None:
        return {}
    judged = candidate(lead, ladder.layout, ladder.device, workload)
    if judged is None or judged.batch_distance == 0:
        return {}
    if math.isinf(judged.batch_distance):
        return {"batch.kind": ("no such batch", "decode" if workload.is_decode else "longer queries")}
    nearest = min(lead.profile.workloads, key=lambda load: workload_distance(load, workload))
    shown: dict[str, tuple[str, int, int]] = {
        "batch": ("batch.num_seqs", nearest.num_seqs, workload.num_seqs),
        "context": (
            "batch.mean_context",
            round(nearest.total_context / nearest.num_seqs),
            round(workload.total_context / workload.num_seqs),
        ),
        "query": ("batch.max_query_len", nearest.max_query_len, workload.max_query_len),
    }
    fields = {}
    for axis, apart in axes(nearest, workload).items():
        if apart > 0.005:
            name, there, here = shown[axis]
            fields[name] = (f"{there} ({apart:.2g} of {RADIUS:g} away)", here)
    return fields
