"""`DispatchRule`: which variant serves which batch, decided from host integers alone."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from pagegen.spec import check
from pagegen.spec.variant import Variant

BOUNDS = ("max_num_seqs", "max_query_len", "max_context_len")
_RULE = ("clauses", "reason", "distance", "evidence")


@dataclass(frozen=True, kw_only=True)
class Clause:
    """`variant` serves batches within all the bounds; None is no bound."""

    variant: Variant
    max_num_seqs: int | None = None
    max_query_len: int | None = None
    max_context_len: int | None = None

    def __post_init__(self) -> None:
        check.instance("variant", self.variant, Variant)
        for name in BOUNDS:
            if getattr(self, name) is not None:
                check.integer(name, getattr(self, name), at_least=0)

    def admits(self, num_seqs: int, query_len: int, context_len: int) -> bool:
        """Whether a batch is within the bounds: sequences, queries of the longest, tokens of the longest context."""
        return (
            (self.max_num_seqs is None or num_seqs <= self.max_num_seqs)
            and (self.max_query_len is None or query_len <= self.max_query_len)
            and (self.max_context_len is None or context_len <= self.max_context_len)
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-ready fields."""
        return {**asdict(self), "variant": self.variant.to_dict()}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Clause:
        """The inverse of `to_dict`. An unknown or missing field raises ValueError."""
        check.fields("a clause", data, ("variant", *BOUNDS), ("variant",))
        return cls(**{**data, "variant": Variant.from_dict(data["variant"])})


@dataclass(frozen=True, kw_only=True)
class DispatchRule:
    """An ordered list of clauses: the first that admits a batch decides. The last has no bounds, so that
    every batch finds a variant, and all are of one kernel family. `reason`, `distance` and `evidence` mean what they
    mean in `Selection`."""

    clauses: tuple[Clause, ...]
    reason: str
    distance: float = 0.0
    evidence: dict[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check.instances("clauses", self.clauses, Clause)
        object.__setattr__(self, "clauses", tuple(self.clauses))
        check.text("reason", self.reason)
        check.number("distance", self.distance, at_least=0)
        check.json_object("evidence", self.evidence)
        last = self.clauses[-1] if self.clauses else None
        if last is None or last != Clause(variant=last.variant):
            raise ValueError(f"the last clause of a dispatch rule must have no bounds, got {last}")
        families = sorted({clause.variant.family for clause in self.clauses})
        if len(families) > 1:
            raise ValueError(f"the clauses of a dispatch rule must be of one family, got {' and '.join(families)}")

    @property
    def family(self) -> str:
        """The kernel family of the variants."""
        return self.clauses[-1].variant.family

    def choose(self, num_seqs: int, max_query_len: int, max_context_len: int) -> Variant:
        """The variant for a batch. `max_context_len` may be any upper bound of the longest context."""
        for clause in self.clauses:
            if clause.admits(num_seqs, max_query_len, max_context_len):
                return clause.variant
        raise AssertionError("unreachable: the last clause has no bounds")

    @property
    def variants(self) -> tuple[Variant, ...]:
        """The distinct variants, in order of first use."""
        return tuple(dict.fromkeys(c.variant for c in self.clauses))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-ready fields."""
        return {
            "clauses": [c.to_dict() for c in self.clauses],
            "reason": self.reason,
            "distance": self.distance,
            "evidence": self.evidence,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> DispatchRule:
        """The inverse of `to_dict`. An unknown or missing field raises ValueError."""
        check.fields("a dispatch rule", data, _RULE, _RULE)
        check.instance("clauses", data["clauses"], list)
        return cls(**{**data, "clauses": tuple(map(Clause.from_dict, data["clauses"]))})
