"""What a tuning run found, for people and for machines."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tabulate import tabulate

from pagegen.spec import CacheLayout, Device, DispatchRule
from pagegen_autotune import tree
from pagegen_autotune.portfolio import Decision
from pagegen_autotune.regret import CONFIDENCE


@dataclass(frozen=True, kw_only=True)
class Row:
    """One layout: its rule, and the decisions behind it. Step times are microseconds of one layer's attention, the
    mean over the profile's steps, with the rule and with the default variants."""

    layout: CacheLayout
    rule: DispatchRule
    decisions: tuple[Decision, ...]

    @property
    def step_us(self) -> float:
        return sum(d.weight * d.chosen_us for d in self.decisions)

    @property
    def default_step_us(self) -> float:
        return sum(d.weight * d.default_us for d in self.decisions)

    @property
    def speedup(self) -> float:
        """The default variants' step time over the rule's."""
        return self.default_step_us / self.step_us

    @property
    def variants(self) -> int:
        """How many variants the rule chooses among."""
        return len(self.rule.variants)

    @property
    def regret(self) -> float:
        """The excess of the rule's step time over choosing the best variant for every batch, of those that were
        compared: see `Decision`."""
        return self.step_us / sum(d.weight * d.chosen_us / (1 + d.regret) for d in self.decisions) - 1

    @property
    def regret_at_most(self) -> float | None:
        """The same at the confidence of `pagegen_autotune.regret`; None where nothing was measured."""
        bounds = [d.regret_bound for d in self.decisions]
        if not all(bounds):
            return None
        least = sum(d.weight * d.chosen_us / (1 + b.at_most) for d, b in zip(self.decisions, bounds, strict=True) if b)
        return self.step_us / least - 1

    @property
    def compared(self) -> bool:
        """Whether the default was held against others: measured, or compiled and predicted."""
        if self.rule.evidence.get("kind") == "measured":
            return self.regret_at_most is not None
        return bool(self.rule.evidence.get("compiled"))

    @property
    def confidence(self) -> str:
        """How sure the choice is, class by class."""
        return "; ".join(f"{d.batches}: {d.confidence}" for d in self.decisions)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-ready fields."""
        return {
            "block_size": self.layout.block_size,
            "order": self.layout.order,
            "step_us": self.step_us,
            "default_step_us": self.default_step_us,
            "speedup": self.speedup,
            "confidence": self.confidence,
            "variants": self.variants,
            "regret": self.regret if self.compared else None,
            "regret_at_most": self.regret_at_most,
            "rule": self.rule.to_dict(),
        }


@dataclass(frozen=True, kw_only=True)
class Report:
    """The result of `tune`. `kind` is "measured" or "predicted". `trials` counts this run's trials by status;
    `resumed` those found in the database. `rejected` counts the candidates refused before timing, by reason.
    `left_out` says what was not done for want of time or because it failed. `drift` is, by search, the default's time
    at the end over that at the beginning. `interrupted`: stopped by a signal."""

    kind: str
    profile: str
    device: Device
    rows: tuple[Row, ...]
    trials: Mapping[str, int] = field(default_factory=dict)
    resumed: int = 0
    rejected: Mapping[str, int] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    drift: Mapping[str, float] = field(default_factory=dict)
    interrupted: bool = False
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-ready fields."""
        return {
            "kind": self.kind,
            "profile": self.profile,
            "target": str(self.device.target),
            "device": self.device.to_dict(),
            "block_sizes": [row.to_dict() for row in self.rows],
            "trials": dict(self.trials),
            "resumed": self.resumed,
            "rejected": dict(self.rejected),
            "left_out": list(self.left_out),
            "drift": dict(self.drift),
            "interrupted": self.interrupted,
            "seconds": self.seconds,
        }

    def __str__(self) -> str:
        lines = [f"{self.kind} on {self.device.name} ({self.device.target}), profile {self.profile}", ""]
        lines += [self._table(), ""]
        lines += [line for row in self.rows for line in _choices(row, several=self._several_orders)]
        done = ", ".join(f"{count} {status.replace('_', ' ')}" for status, count in self.trials.items() if count)
        found = f"; {self.resumed} were in the database already" if self.resumed else ""
        if self.kind == "measured":
            lines += ["", f"trials: {done or 'none'}{found}"]
        lines += [f"rejected: {count} variant{'s' * (count != 1)}, {reason}" for reason, count in self.rejected.items()]
        lines += [f"left out: {what}" for what in self.left_out]
        if self.drift:
            least, most = min(self.drift.values()), max(self.drift.values())
            lines.append(
                f"drift: the defaults took {least:.2f} to {most:.2f} of their first times at the end; "
                "choices rest on samples taken side by side"
            )
        stopped = ", stopped before the end" if self.interrupted else ""
        return "\n".join([*lines, f"{self.seconds:.0f} s{stopped}"])

    @property
    def _several_orders(self) -> bool:
        return len({row.layout.order for row in self.rows}) > 1

    def _table(self) -> str:
        cells = [
            (r.layout.block_size, r.layout.order, f"{r.step_us:.1f}", f"{r.default_step_us:.1f}", f"{r.speedup:.3f}",
             r.variants, _regret(r))
            for r in self.rows
        ]  # fmt: skip
        headers = ["block size", "order", "us a layer", "default", "speed-up", "variants", "regret"]
        return str(tabulate(cells, headers=headers))


def _choices(row: Row, *, several: bool) -> list[str]:
    order = f" {row.layout.order}" if several else ""
    where = f"block size {row.layout.block_size}{order}"
    lines = [f"{where}, {d.batches}: {d.chosen.name} ({d.confidence})" for d in row.decisions]
    return lines + (
        [f"  {line}" for line in tree.text(row.rule)] if any(len(d.variants) > 1 for d in row.decisions) else []
    )


def _regret(row: Row) -> str:
    most = row.regret_at_most
    if most is not None:
        return f"{row.regret:.1%}, at most {most:.1%} ({CONFIDENCE:.0%} sure)"
    return f"{row.regret:.1%}, predicted" if row.compared else "not known"


def count_reasons(rejected: Sequence[Mapping[str, tuple[str, ...]]]) -> dict[str, int]:
    """Candidates by the reason they were refused for (the first, where there are more), most frequent first. Reasons
    that differ in their figures alone count as one, told by the first of them."""
    counts: Counter[str] = Counter()
    told: dict[str, list[str]] = {}
    for found in rejected:
        for reasons in found.values():
            plain = re.sub(r"\d+", "#", reasons[0])
            counts[plain] += 1
            texts = told.setdefault(plain, [])
            if reasons[0] not in texts[:1]:
                texts.append(reasons[0])
    words = {plain: texts[0] + (" (for one)" if len(texts) > 1 else "") for plain, texts in told.items()}
    return {words[plain]: count for plain, count in sorted(counts.items(), key=lambda i: (-i[1], words[i[0]]))}
