"""The ladder of evidence behind every choice of variant.

A rung that has no answer says why, and the next is asked:
  1. the portfolio tuned for exactly this kernel (spec, layout, target, code), on this device before any other;
  2. the portfolio of the same spec, target and code at the nearest other layout whose variants are legal here;
  3. the cost model's choice among a handful of legal variants;
  4. the default variant.
Where no generated kernel serves the spec at all (a CPU without a compiler, say) the answer is the reference path.
Nothing here raises for a miss or a broken database: a model must run whatever state a file is in. Every answer carries
its reason, which is logged once.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pagegen import costs, targets
from pagegen.selection.predicted import predicted_rule
from pagegen.spec import AttentionSpec, CacheLayout, Clause, Device, DispatchRule, Target

if TYPE_CHECKING:
    from pagegen.db import Database, Portfolio

log = logging.getLogger("pagegen.selection")

DEFAULT_DISTANCE = 32.0
OTHER_DEVICE_DISTANCE = 0.5
OTHER_ORDER_DISTANCE = 1.0


def rule_for(
    spec: AttentionSpec, layout: CacheLayout, target: Target | str, db: Database | str | None = None
) -> DispatchRule:
    """The dispatch rule for a kernel: the best evidence there is, with its reason and distance (0: tuned right here).

    `db` is a Database, a path or URL, or None for the default database, which is opened for reading and never made.
    Never raises for a database: what is wrong with it is part of the reason, and `evidence["missed"]` lists it.
    """
    return Ladder(spec, layout.canonical(spec.num_kv_heads), Target.parse(target), db).rule()


@dataclass
class Ladder:
    """The rungs for one question. `missed` collects why each rung above the answer had none."""

    spec: AttentionSpec
    layout: CacheLayout
    target: Target
    db: Database | str | None
    missed: list[str] = field(default_factory=list)

    def rule(self) -> DispatchRule:
        """The first answer on the ladder. See `rule_for`."""
        unserved = targets.unsupported(self.spec, self.target)
        if unserved is not None:
            return self._explained(self._reference(unserved))
        for rung in (self._tuned, self._predicted):
            try:
                rule = rung()
            # a broken file, a damaged row, a missing driver: whatever it is, the next rung answers and says so
            except Exception as error:
                self.missed.append(sentence(error))
                # a file that is not there yet is no fault
                level = logging.INFO if type(error).__name__ == "MissingDatabase" else logging.WARNING
                _log_once(level, f"selection for {self.target} goes on without: {sentence(error)}")
                continue
            if rule is not None:
                return self._explained(rule)
        return self._explained(self._default())

    def _explained(self, rule: DispatchRule) -> DispatchRule:
        reason = "; ".join([rule.reason, *self.missed])
        _log_once(logging.INFO, f"{self.target}, block size {self.layout.block_size} {self.layout.order}: {reason}")
        evidence = {**rule.evidence, "missed": list(self.missed)}
        # where a row's result must not depend on its neighbours, neither may its kernel
        clauses = rule.clauses[-1:] if self.spec.batch_invariant else rule.clauses
        return DispatchRule(clauses=clauses, reason=reason, distance=rule.distance, evidence=evidence)

    def _tuned(self) -> DispatchRule | None:
        with opened(self.db) as db:
            known = db.portfolios(spec=self.spec, target=self.target)
            name = db.name
        code = targets.code_hash(self.target)
        found = [p for p in known if p.code_hash == code]
        # nearest first, measured before predicted, newest first as the database gives them
        order = {id(p): (self._distance(p), p.rule.evidence.get("kind") != "measured") for p in found}
        for portfolio in sorted(found, key=lambda p: order[id(p)]):
            distance = order[id(portfolio)][0]
            illegal = self._illegal(portfolio) if distance else ""  # what was tuned right here needs no estimate
            if not illegal:
                return _rule_of(portfolio, distance, self.layout)
            self.missed.append(f"the portfolio of {_place(portfolio)} is not legal here: {illegal}")
        if not found:
            older = f" ({len(known)} of other code: run pagegen tune again)" if known else ""
            self.missed.append(f"{name} has no readable portfolio for this spec and code on {self.target}{older}")
        return None

    def _distance(self, portfolio: Portfolio) -> float:
        """0 for this kernel on this device; grows by doublings of the block size, another order, another device."""
        from pagegen.db.codec import device_identity

        apart = abs(math.log2(portfolio.layout.block_size / self.layout.block_size))
        other_device = device_identity(portfolio.device) != device_identity(self._device)
        other_order = portfolio.layout.order != self.layout.order
        return apart + OTHER_ORDER_DISTANCE * other_order + OTHER_DEVICE_DISTANCE * other_device

    def _illegal(self, portfolio: Portfolio) -> str:
        """Why a variant of the portfolio may not run here, or ""."""
        for variant in portfolio.rule.variants:
            reasons = costs.legal(self.spec, self.layout, variant, self._device)
            if reasons:
                return f"{variant.name}: {reasons[0]}"
        return ""

    @functools.cached_property
    def _device(self) -> Device:
        return device_for(self.target)

    def _predicted(self) -> DispatchRule:
        return predicted_rule(self.spec, self.layout, self._device)

    def _reference(self, why: str) -> DispatchRule:
        """What `pagegen.ops` does without a kernel, as a rule: see `Selection`."""
        evidence = {"kind": "reference", "why": why}
        return replace(self._default(), reason=f"the reference path serves: {why}", evidence=evidence)

    def _default(self) -> DispatchRule:
        decode = targets.default_variant(self.spec, self.layout, self.target, decode=True)
        longer = targets.default_variant(self.spec, self.layout, self.target, decode=False)
        one = decode == longer or self.spec.batch_invariant
        return DispatchRule(
            clauses=(*(() if one else (Clause(variant=decode, max_query_len=1),)), Clause(variant=longer)),
            reason="the default variant",
            distance=DEFAULT_DISTANCE,
            evidence={"kind": "default"},
        )


def device_for(target: Target) -> Device:
    """This machine's device for the target, or the shipped one that stands for an absent GPU. Raises ValueError for a
    GPU arch that is neither here nor in the table."""
    try:
        return targets.current_device(target)
    except ValueError:  # the GPU is not in this machine
        return costs.shipped_device(target)


@contextmanager
def opened(db: Database | str | None) -> Iterator[Database]:
    """The database to ask: `db` itself, or the one at that place (None: the default), opened for reading."""
    from pagegen.db import Database, open_db

    if isinstance(db, Database):
        yield db
    else:
        with open_db(db, read_only=True) as found:
            yield found


def sentence(error: Exception) -> str:
    """The error's first line, with its kind where it is not the database's own, which may be terse."""
    text = (str(error).splitlines() or [""])[0]
    ours = type(error).__module__ == "pagegen.db.errors"
    return text if ours else f"{type(error).__name__}: {text}"


def _rule_of(portfolio: Portfolio, distance: float, layout: CacheLayout) -> DispatchRule:
    reason = portfolio.rule.reason
    if portfolio.layout != layout:
        reason += f" (for {_place(portfolio)}, the nearest that is legal here)"
    elif distance:
        reason += f" (on {portfolio.device.name}, which is not the device here)"
    return DispatchRule(
        clauses=portfolio.rule.clauses,
        reason=reason,
        distance=portfolio.rule.distance + distance,
        evidence={
            **portfolio.rule.evidence,
            "profile": portfolio.profile.name,
            "device": portfolio.device.name,
            "tuned_at": portfolio.created_at,
            "tuned_layout": portfolio.layout.to_dict(),
        },
    )


def _place(portfolio: Portfolio) -> str:
    return f"block size {portfolio.layout.block_size} {portfolio.layout.order} on {portfolio.device.name}"


@functools.lru_cache(maxsize=4096)
def _log_once(level: int, text: str) -> None:
    log.log(level, "%s", text)
