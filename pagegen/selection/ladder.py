"""The ladder of evidence behind every choice of variant.

A rung that has no answer says why, and the next is asked (grades: see `pagegen.selection.grades`):
  1. the portfolio tuned for exactly this kernel (spec, layout, target, code) on this device; where a batch is asked
     for, it must be one of those tuned on, or one within the radius of one (then "near");
  2. one tuned on this device for the nearest other layout whose variants are feasible here;
  3. one of another product of this arch, feasible here;
  4. one of another arch, feasible here;
  5. the cost model's choice among a handful of legal variants;
  6. the default variant.
Where no generated kernel serves the spec at all (a CPU without a compiler, say) the answer is the reference path.
Nothing here raises for a miss or a broken database: a model must run whatever state a file is in. Every answer carries
its reason, which is logged once. For a given content of the database the answer is a pure function of the question:
neither the order of rows nor the clock has a part in it.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pagegen import targets
from pagegen.selection import feasibility
from pagegen.selection.candidates import Candidate, candidate, device_for, kept_open, opened, sentence
from pagegen.selection.expected import Expected, fit_for
from pagegen.selection.grades import (
    DEFAULT,
    EXACT,
    GRADES,
    NEAR,
    OTHER_ARCH,
    PREDICTED,
    RADIUS,
    REFERENCE,
    confidence,
)
from pagegen.selection.predicted import PREDICTED_DISTANCE, PREDICTED_MARGIN, predicted_rule
from pagegen.spec import AttentionSpec, CacheLayout, Clause, Device, DispatchRule, Target, Variant, Workload

if TYPE_CHECKING:
    from pagegen.db import Database

log = logging.getLogger("pagegen.selection")

DEFAULT_DISTANCE = 32.0
# Misses that a reason spells out; `evidence["missed"]` has them all.
MAX_MISSED = 4


def rule_for(
    spec: AttentionSpec, layout: CacheLayout, target: Target | str, db: Database | str | None = None,
    *, device: Device | str | None = None,
) -> DispatchRule:  # fmt: skip
    """The dispatch rule for a kernel: the best evidence there is, with its reason and distance (0: tuned right here).

    `db` is a Database, a path or URL, or None for the default database, which is opened for reading and never made.
    `device` is the product of the target that is meant, where it is not this machine's (see `device_for`).
    Never raises for a database: what is wrong with it is part of the reason, and `evidence["missed"]` lists it;
    `evidence["grade"]` and `["confidence"]` say how good the answer is.
    """
    where = Target.parse(target)
    named = None if device is None else device_for(where, device)
    with kept_open(db) as source:
        return Ladder(spec, layout.canonical(spec.num_kv_heads), where, source, named=named).rule()


@dataclass
class Ladder:
    """The rungs for one question, about one batch where `workload` is given, and about the device `named` where it is
    not the usual one of the target. `missed` collects why each rung above the
    answer had none, `rungs` the same by grade."""

    spec: AttentionSpec
    layout: CacheLayout
    target: Target
    db: Database | str | None
    workload: Workload | None = None
    named: Device | None = None
    missed: list[str] = field(default_factory=list)
    rungs: dict[str, list[str]] = field(default_factory=lambda: {grade: [] for grade in GRADES})
    judged: list[Candidate] = field(default_factory=list)
    _name: str = ""
    _ran: dict[tuple[Variant, ...], set[Variant]] = field(default_factory=dict)

    def rule(self) -> DispatchRule:
        """The first answer on the ladder. See `rule_for`."""
        unserved = targets.unsupported(self.spec, self.target)
        if unserved is not None:
            return self._explained(self._reference(unserved))
        steps: tuple[tuple[str, Callable[[], DispatchRule | None]], ...] = (
            ("", self._tuned), (PREDICTED, self._predicted)
        )  # fmt: skip
        for grade, rung in steps:
            try:
                rule = rung()
                if rule is not None:
                    return self._explained(rule)
            # a broken file, a damaged row, a missing driver: whatever it is, the next rung answers and says so
            except Exception as error:
                self._miss(grade, sentence(error))
                # a file that is not there yet is no fault
                level = logging.INFO if type(error).__name__ == "MissingDatabase" else logging.WARNING
                _log_once(level, f"selection for {self.target} goes on without: {sentence(error)}")
        return self._explained(self._default())

    def _explained(self, rule: DispatchRule) -> DispatchRule:
        more = len(self.missed) - MAX_MISSED
        rest = [f"and {more} more portfolios that are too far or not legal here"] if more > 0 else []
        reason = "; ".join([rule.reason, *self.missed[:MAX_MISSED], *rest])
        _log_once(logging.INFO, f"{self.target}, block size {self.layout.block_size} {self.layout.order}: {reason}")
        grade = rule.evidence["grade"]
        measured = rule.evidence.get("kind") == "measured"
        evidence = {
            **rule.evidence, "confidence": confidence(grade, measured, rule.distance), "missed": list(self.missed)
        }  # fmt: skip
        # where a row's result must not depend on its neighbours, neither may its kernel
        clauses = rule.clauses[-1:] if self.spec.batch_invariant else rule.clauses
        return DispatchRule(clauses=clauses, reason=reason, distance=rule.distance, evidence=evidence)

    def _miss(self, grade: str, why: str) -> None:
        self.missed.append(why)
        if grade:
            self.rungs[grade].append(why)

    # --- what was tuned ---------------------------------------------------------------------------------------

    def _tuned(self) -> DispatchRule | None:
        """The best portfolio: by grade, then nearest, measured before predicted, newest first."""
        from pagegen.db.queries import UNDECODABLE

        for one in self.candidates():
            try:
                why = self._refusal(one)
                if not why:
                    return self._rule_of(one)
            except UNDECODABLE:
                self.judged.remove(one)
                why = self._nothing_readable(f" at {one.lead.place} (it is damaged: run pagegen db verify)")
            one.refused = why
            self._miss(one.grade, why)
        return None

    def _nothing_readable(self, more: str) -> str:
        return f"{self._name} has no readable portfolio for this spec and code on {self.target}{more}"

    def candidates(self) -> list[Candidate]:
        """The portfolios of this spec and code that can be read, in the order in which they are asked."""
        from pagegen.db.leads import Lead, leads

        code = targets.code_hash(self.target)
        with opened(self.db) as db:
            known = list(leads(db, self.spec))
            self._name = db.name
            if db.note:
                self._miss("", db.note)
        found, older, damaged = [], 0, 0
        distances: dict[str, float] = {}
        for lead in known:
            if not isinstance(lead, Lead):
                damaged += 1
            elif lead.target.family != self.target.family:
                continue
            elif lead.code_hash != code:
                older += lead.target == self.target
            else:
                one = candidate(lead, self.layout, self.device, self._batch, distances)
                damaged += one is None
                found += [] if one is None else [one]
        if damaged:
            _log_once(logging.WARNING, f"{damaged} portfolios of {self._name} cannot be read; run pagegen db verify")
        if not found:
            more = f" ({older} of other code: run pagegen tune again)" if older else ""
            self.missed.append(self._nothing_readable(more))
        # stable: newest first within equals, as the database gives them
        self.judged = sorted(found, key=lambda c: (GRADES.index(c.grade), c.distance, not c.lead.measured))
        return list(self.judged)

    def _refusal(self, one: Candidate) -> str:
        """Why a portfolio does not answer, or ""."""
        if one.batch_distance > RADIUS:
            where = "has no such batches" if math.isinf(one.batch_distance) else f"is {one.batch_distance:.1f} away"
            return f"the traffic that {one.lead.place} was tuned on {where}, further than the radius of {RADIUS:g}"
        rule = one.lead.portfolio.rule
        # what ran right here needs no estimate; that a rule is stored for here shows nothing
        ran = self._ran_here(rule) if one.same_device and one.lead.layout == self.layout else set()
        for variant in rule.variants:
            if variant in ran:
                continue
            reasons = feasibility.infeasible(self.spec, self.layout, variant, self.device)
            if reasons:
                return f"the portfolio of {one.lead.place} is not legal here: {variant.name}: {reasons[0]}"
        return ""

    def _labelled(self, one: Candidate) -> Candidate:
        """With the distance of the batch, where that had no part in the choice."""
        if self.workload is None or self._batch is not None:
            return one
        asked = candidate(one.lead, self.layout, self.device, self.workload)
        apart = PREDICTED_DISTANCE if asked is None else min(asked.batch_distance, PREDICTED_DISTANCE)
        return replace(one, batch_distance=apart, grade=NEAR if apart and one.grade == EXACT else one.grade)

    def _ran_here(self, rule: DispatchRule) -> set[Variant]:
        """The variants of a rule with ok trials of this very kernel on this device."""
        from pagegen.db.figures import proven

        if rule.variants not in self._ran:
            code = targets.code_hash(self.target)
            with opened(self.db) as db:
                self._ran[rule.variants] = proven(db.stores, self.spec, self.layout, self.device, code, rule.variants)
        return self._ran[rule.variants]

    def _rule_of(self, one: Candidate) -> DispatchRule:
        one = self._labelled(one)
        lead, rule = one.lead, one.lead.portfolio.rule
        reason = rule.reason
        if lead.layout != self.layout:
            reason += f" (for {lead.place}, the nearest that is legal here)"
        elif one.grade == OTHER_ARCH:
            reason += f" (on {lead.device_name} of {lead.target}: another architecture, whose variants are legal here)"
        elif not one.same_device:
            reason += f" (on {lead.device_name}, which is not the device here)"
        elif one.renamed:
            reason += f" (on {lead.device_name}: alike in everything but the name or a sliver of memory)"
        return DispatchRule(
            clauses=rule.clauses,
            reason=reason,
            distance=rule.distance + one.distance,
            evidence={
                **rule.evidence,
                "grade": one.grade,
                "profile": lead.profile.name,
                "device": lead.device_name,
                "tuned_at": lead.created_at,
                "tuned_layout": lead.layout.to_dict(),
            },
        )

    @property
    def _batch(self) -> Workload | None:
        """The batch, as far as it may decide: where a row's result must not depend on its neighbours, the kernel may
        not depend on the batch."""
        return None if self.spec.batch_invariant else self.workload

    @functools.cached_property
    def device(self) -> Device:
        return device_for(self.target, self.named)

    # --- what was not -----------------------------------------------------------------------------------------

    def _predicted(self) -> DispatchRule:
        rule = predicted_rule(self.spec, self.layout, self.device, fit_for(self.device, self.db))
        rule = replace(rule, evidence={**rule.evidence, "grade": PREDICTED})
        return rule if self._batch is None else self._against_the_tuned(rule, self._batch)

    def _against_the_tuned(self, rule: DispatchRule, workload: Workload) -> DispatchRule:
        """Beyond the radius the tuned choice stays unless the model expects another to be clearly faster: it proved
        itself here, if on other batches, and it is what a prepared operator takes."""
        here = next((c for c in self.judged if self.serves_here(c)), None)
        if here is None:
            return rule
        asked = (workload.num_seqs, workload.max_query_len, workload.max_context_len)
        kept, other = here.lead.portfolio.rule.choose(*asked), rule.choose(*asked)
        expected = Expected(self.spec, self.layout, self.device, self.db)
        times = {v: expected.us(v, workload) for v in (kept, other)}
        if times[other] <= (1 - PREDICTED_MARGIN) * times[kept]:
            return rule
        reason = f"the cost model expects nothing clearly faster than what {here.lead.profile.name} was tuned to"
        return replace(rule, clauses=(Clause(variant=kept),), reason=reason)

    def serves_here(self, one: Candidate) -> bool:
        """Whether a portfolio is of this very kernel and device and answers, whatever the batch."""
        from pagegen.db.queries import UNDECODABLE

        if not one.same_device or one.lead.layout != self.layout:
            return False
        try:
            return not self._refusal(replace(one, batch_distance=0.0))
        except UNDECODABLE:
            return False

    def _reference(self, why: str) -> DispatchRule:
        """What `pagegen.ops` does without a kernel, as a rule: see `Selection`."""
        evidence = {"kind": "reference", "why": why, "grade": REFERENCE}
        return replace(self._default(), reason=f"the reference path serves: {why}", evidence=evidence)

    def _default(self) -> DispatchRule:
        decode = targets.default_variant(self.spec, self.layout, self.target, decode=True)
        longer = targets.default_variant(self.spec, self.layout, self.target, decode=False)
        one = decode == longer or self.spec.batch_invariant
        return DispatchRule(
            clauses=(*(() if one else (Clause(variant=decode, max_query_len=1),)), Clause(variant=longer)),
            reason="the default variant",
            distance=DEFAULT_DISTANCE,
            evidence={"kind": "default", "grade": DEFAULT},
        )


@functools.lru_cache(maxsize=4096)
def _log_once(level: int, text: str) -> None:
    log.log(level, "%s", text)
