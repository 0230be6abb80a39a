"""`Workload` (one batch) and `Profile` (weighted batches of real traffic)."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pagegen.spec import check

PROFILE_VERSION = 1
_LENGTHS = ("context_lens", "query_lens")
_BATCH = ("weight", *_LENGTHS)
_PROFILE = ("version", "name", "source", "licence", "figures", "batches")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One step's batch: for each sequence the tokens in its cache (this step's own included) and the
    queries of this step. `query_lens` defaults to one query a sequence: decode."""

    context_lens: tuple[int, ...]
    query_lens: tuple[int, ...] = None  # type: ignore[assignment]  # None only while constructing

    def __post_init__(self) -> None:
        contexts = check.integers("context_lens", self.context_lens, at_least=0)
        given = (1,) * len(contexts) if self.query_lens is None else self.query_lens
        queries = check.integers("query_lens", given, at_least=0)
        if not contexts:
            raise ValueError("context_lens must hold at least one sequence, got none")
        if len(queries) != len(contexts):
            raise ValueError(f"query_lens must have one entry a sequence ({len(contexts)}), got {len(queries)}")
        if sum(queries) > check.MAX_COUNT:
            raise ValueError(f"query_lens must sum to at most {check.MAX_COUNT}, got {sum(queries)}")
        object.__setattr__(self, "context_lens", contexts)
        object.__setattr__(self, "query_lens", queries)

    @property
    def num_seqs(self) -> int:
        """Sequences in the batch."""
        return len(self.context_lens)

    @property
    def total_q(self) -> int:
        """Queries of all sequences."""
        return sum(self.query_lens)

    @property
    def max_query_len(self) -> int:
        """Queries of the sequence that has most."""
        return max(self.query_lens)

    @property
    def max_context_len(self) -> int:
        """Tokens in the cache of the longest sequence."""
        return max(self.context_lens)

    @property
    def total_context(self) -> int:
        """Tokens in the cache of all sequences."""
        return sum(self.context_lens)

    @property
    def is_decode(self) -> bool:
        """Whether every sequence has at most one query: what the decode kernel serves."""
        return self.max_query_len <= 1

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-ready fields."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Workload:
        """The inverse of `to_dict`. An unknown or missing field raises ValueError."""
        return cls(**check.fields("a workload", data, _LENGTHS, _LENGTHS))


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A named set of workloads with the share of steps each stands for, and the trace figures behind them.

    `weights` sum to 1. `figures` holds the trace's distributions (percentiles of prompt, output and context
    tokens, arrival statistics); `source` and `licence` say whence.
    """

    name: str
    workloads: tuple[Workload, ...]
    weights: tuple[float, ...]
    figures: dict[str, Any] = field(default_factory=dict, hash=False, compare=False)
    source: str = ""
    licence: str = ""

    def __post_init__(self) -> None:
        check.text("name", self.name, empty=False)
        for name in ("source", "licence"):
            check.text(name, getattr(self, name))
        check.json_object("figures", self.figures)
        check.instances("workloads", self.workloads, Workload)
        if not self.workloads or len(self.workloads) != len(self.weights):
            raise ValueError(
                f"weights must have one entry a workload, got {len(self.weights)} for {len(self.workloads)} workloads"
            )
        total = sum(check.number("weights", weight) for weight in self.weights)
        if not all(0 < w < math.inf for w in (*self.weights, total)):
            raise ValueError(f"weights must be positive and finite, got {self.weights}")
        object.__setattr__(self, "workloads", tuple(self.workloads))
        # weights that already sum to 1 keep their bits, so that a profile survives saving and loading unchanged
        divisor = 1.0 if math.isclose(total, 1.0, rel_tol=1e-12) else total
        object.__setattr__(self, "weights", tuple(w / divisor for w in self.weights))

    def __iter__(self) -> Any:
        return iter(zip(self.workloads, self.weights, strict=True))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-ready fields with a version."""
        return {
            "version": PROFILE_VERSION,
            "name": self.name,
            "source": self.source,
            "licence": self.licence,
            "figures": self.figures,
            "batches": [{"weight": w, **load.to_dict()} for load, w in self],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Profile:
        """The inverse of `to_dict`. Raises ValueError naming what is missing or of an unknown version."""
        if not isinstance(data, dict) or data.get("version") != PROFILE_VERSION:
            found = data.get("version") if isinstance(data, dict) else type(data).__name__
            raise ValueError(f"a profile file must have version {PROFILE_VERSION}, got {found!r}")
        try:
            check.fields("a profile", data, _PROFILE, ("name", "batches"))
            batches = [check.fields("a batch", batch, _BATCH, _BATCH) for batch in data["batches"]]
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"a profile file must have name and batches with context_lens, query_lens and weight: {error}"
            ) from error
        try:
            return cls(
                name=data["name"],
                workloads=tuple(Workload.from_dict({k: batch[k] for k in _LENGTHS}) for batch in batches),
                weights=tuple(batch["weight"] for batch in batches),
                figures=data.get("figures", {}),
                source=data.get("source", ""),
                licence=data.get("licence", ""),
            )
        except TypeError as error:
            raise ValueError(f"a profile file must hold other values: {error}") from error

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Reads a profile file. Raises FileNotFoundError or ValueError naming the file."""
        try:
            return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except RecursionError as error:
            raise ValueError(f"{path} is not a profile: it is nested too deep") from error
        except ValueError as error:  # no JSON and no UTF-8, too
            raise ValueError(f"{path} is not a profile: {error}") from error

    def save(self, path: str | Path) -> None:
        """Writes the profile as JSON, one batch a line, so that it diffs well."""
        head = {k: v for k, v in self.to_dict().items() if k != "batches"}
        lines = ",\n".join("  " + json.dumps(b) for b in self.to_dict()["batches"])
        text = json.dumps(head, indent=1)[:-2] + ',\n "batches": [\n' + lines + "\n ]\n}\n"
        Path(path).write_text(text, encoding="utf-8")
