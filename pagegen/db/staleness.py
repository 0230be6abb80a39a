"""Whether what was tuned still holds: valid, to be measured again after a change of toolchain, or invalid.

A change of compiler or driver moves times by some percent and seldom the order of the best, so the best stored few are
measured again, and no search is repeated. A change of the templates makes other kernels: nothing carries over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pagegen.db import keys
from pagegen.db.queries import Portfolio
from pagegen.spec import Device, Status, Target

if TYPE_CHECKING:
    from pagegen.db.database import Database

VALID, REVALIDATE, INVALID = "valid", "revalidate", "invalid"
# The parts of an environment whose change calls for measuring again; pagegen itself too, since of what makes a kernel
# the templates alone have a hash, and not the generator, the compiler's flags and the launch.
TOOLCHAIN = ("pagegen", "compiler", "triton", "driver", "runtime", "threads")


@dataclass(frozen=True, kw_only=True)
class Staleness:
    """The state of the portfolio in use for one kernel on one device. `changed` maps what changed to (then, now)."""

    portfolio: Portfolio
    state: str
    changed: Mapping[str, tuple[str, str]]
    why: str

    @property
    def place(self) -> str:
        """For people."""
        p = self.portfolio
        return (
            f"block size {p.layout.block_size} {p.layout.order}, {p.spec.num_q_heads}/{p.spec.num_kv_heads} heads of "
            f"{p.spec.head_dim} on {p.device.name}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-ready fields."""
        p = self.portfolio
        return {
            "state": self.state,
            "why": self.why,
            "changed": {name: list(values) for name, values in self.changed.items()},
            "spec": p.spec.to_dict(),
            "layout": p.layout.to_dict(),
            "target": str(p.target),
            "device": p.device.name,
            "profile": p.profile.name,
            "tuned_at": p.created_at,
        }


def staleness(
    db: Database,
    *,
    code_hash: Callable[[Target], str],
    environment: Callable[[Target], Mapping[str, str] | None],
    **wanted: Any,
) -> list[Staleness]:
    """The state of the newest measured portfolio of every kernel and device, predicted ones left out (there is nothing
    to measure again). `code_hash` and `environment` say what is so now; None for an environment that is not known here,
    of which only the templates are judged. `wanted` narrows as `Database.portfolios` does."""
    newest: dict[tuple[Any, ...], Portfolio] = {}
    for portfolio in db.portfolios(**wanted):  # newest first
        if portfolio.rule.evidence.get("kind") == "measured":
            p = portfolio
            newest.setdefault((p.spec, p.layout, p.target, keys.device_identity(p.device)), p)
    return [_judged(db, p, code_hash(p.target), environment(p.target)) for p in newest.values()]


def _judged(db: Database, portfolio: Portfolio, code: str, now: Mapping[str, str] | None) -> Staleness:
    def state(name: str, why: str, changed: Mapping[str, tuple[str, str]] | None = None) -> Staleness:
        return Staleness(portfolio=portfolio, state=name, changed=changed or {}, why=why)

    if portfolio.code_hash != code:
        changed = {"templates": (portfolio.code_hash[:12], code[:12])}
        return state(INVALID, "the templates changed: run pagegen tune again", changed)
    then = measured_environment(db, portfolio, portfolio.device)
    if now is None:
        return state(VALID, f"the toolchain for {portfolio.target} is not here to compare with")
    if then is None:
        return state(VALID, "no trial says what it was measured with")
    differing = {name: (then.get(name, ""), now.get(name, "")) for name in TOOLCHAIN}
    # what one side does not know is no change
    differing = {name: values for name, values in differing.items() if all(values) and values[0] != values[1]}
    if not differing:
        return state(VALID, "")
    told = ", ".join(f"{name} was {was}, is {now_}" for name, (was, now_) in differing.items())
    return state(REVALIDATE, f"{told}: run pagegen tune --revalidate", differing)


def measured_environment(db: Database, portfolio: Portfolio, device: Device) -> dict[str, str] | None:
    """What the newest trial of a variant that the portfolio chooses was taken with; None where there is none."""
    found = [
        trial
        for variant in portfolio.rule.variants
        for trial in db.trials(
            spec=portfolio.spec, layout=portfolio.layout, target=portfolio.target, device=device,
            variant=variant, status=Status.OK, code_hash=portfolio.code_hash,
        )
    ]  # fmt: skip
    return max(found, key=lambda trial: trial.created_at).environment if found else None
