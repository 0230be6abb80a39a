"""What a report shows, gathered from a database as plain figures."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pagegen import costs
from pagegen.cli import output
from pagegen.spec import AttentionSpec, Device, Measurement, Profile, Status, Target

if TYPE_CHECKING:
    from pagegen.db import Database, Portfolio

# A point a trial: more than this many are neither seen nor quickly drawn.
MAX_POINTS = 2000
CLASSES = ("decode", "mixed", "all")


@dataclass
class Report:
    """Figures by section, JSON-ready. `notes` says what was left out, and why."""

    database: str
    trials: int
    shown_trials: int
    block_sizes: list[dict[str, Any]] = field(default_factory=list)
    roofline: list[dict[str, Any]] = field(default_factory=list)
    regret: list[dict[str, Any]] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)
    devices: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def spec_name(spec: AttentionSpec) -> str:
    """A spec in a few words: "32/8 heads of 128, bfloat16 over float8_e4m3fn"."""
    plain = spec.to_dict()
    dtypes = plain["q_dtype"] if plain["q_dtype"] == plain["kv_dtype"] else f"{plain['q_dtype']}/{plain['kv_dtype']}"
    window = f", window {spec.window}" if spec.window else ""
    return f"{spec.num_q_heads}/{spec.num_kv_heads} heads of {spec.head_dim}, {dtypes}{window}"


def gather(db: Database, *, spec: AttentionSpec | None, target: Target | None, limit: int, max_specs: int) -> Report:
    """The report on what a database holds, narrowed to a spec or target where given, from its newest `limit` trials;
    block sizes are shown for the `max_specs` specs and profiles tuned last."""
    from pagegen.db import statements

    trials, matching = statements.newest(db, limit, spec=spec, target=target)
    report = Report(database=db.name, trials=matching, shown_trials=len(trials))
    if matching > len(trials):
        report.notes.append(f"figures of trials are of the newest {len(trials)} of {matching}")
    portfolios = [p for p in db.portfolios(spec=spec, target=target) if p.rule.evidence.get("kind") == "measured"]
    asked = dict.fromkeys((p.spec, p.target, p.profile) for p in portfolios)  # newest first
    if len(asked) > max_specs:
        report.notes.append(f"block sizes of the {max_specs} specs and profiles tuned last, of {len(asked)}")
    for one in list(asked)[:max_specs]:
        report.block_sizes += _block_sizes(db, *one, report.notes)
    report.regret = _regret(portfolios)
    ok = [t for t in trials if t.status is Status.OK]
    report.roofline = _roofline(ok)
    report.history = _history(trials)
    report.devices = _devices(ok)
    return Report(**{name: _plain(value) for name, value in vars(report).items()})


def _plain(value: Any) -> Any:
    """A figure with its texts as a page can have them: names of others may hold what no page, font or XML takes."""
    if isinstance(value, str):
        return output.plain(value).replace("\n", " ")
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list) else value


def _block_sizes(
    db: Database, spec: AttentionSpec, target: Target, profile: Profile, notes: list[str]
) -> list[dict[str, Any]]:
    from pagegen import selection

    try:
        rows = selection.best_block_size(spec, target, profile, db=db)
    except ValueError as error:  # a device whose rates are not known
        notes.append(f"no block sizes for {spec_name(spec)} on {target}: {error}")
        return []
    shown = [
        {
            "block_size": r.block_size, "order": r.order, "step_us": r.step_us, "waste_share": r.waste_share,
            "tokens_per_s": r.tokens_per_s, "kind": r.kind,
        }
        for r in sorted(rows, key=lambda r: (r.order, r.block_size))
    ]  # fmt: skip
    return [{"spec": spec_name(spec), "device": rows[0].device, "profile": profile.name, "rows": shown}]


def _roofline(ok: Iterable[Measurement]) -> list[dict[str, Any]]:
    """By device: flops a byte and flops a second of every trial, and the device's own rates."""
    by_device: dict[Device, list[Measurement]] = defaultdict(list)
    for trial in ok:
        if trial.device.bandwidth_gb_s > 0:
            by_device[trial.device].append(trial)
    found = []
    for device, trials in by_device.items():
        step = max(1, len(trials) // MAX_POINTS)
        points = []
        for t in trials[::step]:
            read = max(costs.kv_bytes(t.spec, t.layout, t.workload), 1)
            done = costs.flops(t.spec, t.layout, t.workload)
            us = t.median_us or 0.0
            points.append([done / read, done / us / 1e6, "decode" if t.workload.is_decode else "mixed"])
        found.append(
            {
                "device": device.name, "bandwidth_gb_s": device.bandwidth_gb_s,
                "matrix_tflops": device.matrix_tflops, "points": points,
            }
        )  # fmt: skip
    return sorted(found, key=lambda f: -len(f["points"]))


def _regret(portfolios: Iterable[Portfolio]) -> list[dict[str, Any]]:
    """Of the newest portfolio of each kernel and device: what its choice loses against the best variant a batch, and
    gains over the default."""
    seen: set[Any] = set()
    found = []
    for p in portfolios:
        key = (p.spec, p.layout, p.target, p.device.name)
        if key in seen:
            continue
        seen.add(key)
        for batches in CLASSES:
            decision = p.rule.evidence.get(batches)
            if not isinstance(decision, dict):
                continue
            regret, speedup = (_number(decision.get(name)) for name in ("regret", "speedup"))
            if regret is not None and speedup is not None:
                label = f"{p.layout.block_size} {p.layout.order}, {batches}, {p.device.name}: {spec_name(p.spec)}"
                found.append({"what": label, "regret": regret, "speedup": speedup})
    return found


def _number(value: Any) -> float | None:
    """A figure of stored evidence, which may be anything; None where it is no number."""
    return float(value) if isinstance(value, (int, float)) and abs(value) < 1e300 else None


def _history(trials: list[Measurement]) -> list[dict[str, Any]]:
    """By kernel and device: how much quicker the best so far is than the first trial, after each trial, the oldest
    first. The geometric mean over all of the kernel's batches, of which those that are still to come stand at 1: so the
    line never falls."""
    groups: dict[Any, list[Measurement]] = defaultdict(list)
    for t in trials:
        groups[t.spec, t.layout, t.device.name].append(t)
    found = []
    for (spec, layout, device), members in groups.items():
        first: dict[Any, float] = {}
        gained = {t.workload: 1.0 for t in members if t.median_us is not None}
        line = []
        failed = 0
        for number, t in enumerate(members, 1):
            if t.median_us is None:
                failed += 1
            else:
                gain = first.setdefault(t.workload, t.median_us) / t.median_us
                gained[t.workload] = max(gain, gained[t.workload])
            if first:
                line.append([number, statistics.geometric_mean(gained.values())])
        step = max(1, len(line) // 300)
        found.append(
            {
                "what": f"{layout.block_size} {layout.order} on {device}: {spec_name(spec)}", "trials": len(members),
                "failed": failed, "first": members[0].created_at, "last": members[-1].created_at,
                "line": line[::step] + line[-1:],
            }
        )  # fmt: skip
    return sorted(found, key=lambda f: -int(f["trials"]))


def _devices(ok: Iterable[Measurement]) -> list[dict[str, Any]]:
    """By spec and device: the least time of a batch over what its roofline allows, and in microseconds, over the
    batches that were measured on every device shown for the spec."""
    best: dict[AttentionSpec, dict[Device, dict[Any, float]]] = defaultdict(lambda: defaultdict(dict))
    for t in ok:
        if t.median_us is not None and t.device.bandwidth_gb_s > 0:
            times = best[t.spec][t.device]
            times[t.workload] = min(t.median_us, times.get(t.workload, t.median_us))
    found = []
    for spec, by_device in best.items():
        common = set.intersection(*(set(times) for times in by_device.values()))
        if not common:
            continue
        layout = next(t.layout for t in ok if t.spec == spec)
        for device, times in by_device.items():
            floors = {w: costs.roofline_us(spec, layout, device, w) for w in common}
            found.append(
                {
                    "spec": spec_name(spec), "device": device.name, "batches": len(common),
                    "us": statistics.geometric_mean(times[w] for w in common),
                    "roofline_share": statistics.geometric_mean(floors[w] / times[w] for w in common),
                }
            )  # fmt: skip
    return found
