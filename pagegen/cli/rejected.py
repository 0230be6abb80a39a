"""What `pagegen explain --rejected` lists: how many variants each rule, compiler and failed trial ruled out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pagegen.spec import AttentionSpec, CacheLayout, Device, Status

if TYPE_CHECKING:
    from pagegen.db import Database


def rejections(
    spec: AttentionSpec, layout: CacheLayout, device: Device, url: str | None, *, decode: bool
) -> dict[str, Any]:
    """What the search space around the default variant loses to which rule: by the symbols, before anything is
    compiled; by what compilers made of the candidates of the last offline tuning run; by trials that failed. The first
    with the number of points of the space, and of those that are legal."""
    from pagegen_autotune.rejections import pruned

    from pagegen import targets

    start = targets.default_variant(spec, layout, device.target, decode=decode)
    space = pruned(start, spec, layout, device)
    rows = [one.to_dict() for one in space.rejections]
    return {
        "points": space.points,
        "legal": space.legal,
        "rejected": [*rows, *_stored(spec, layout.canonical(spec.num_kv_heads), device, url)],
    }


def _stored(spec: AttentionSpec, layout: CacheLayout, device: Device, url: str | None) -> list[dict[str, Any]]:
    """What a database knows; nothing where it cannot be read, which stands in the selection's reason."""
    from pagegen.db import DatabaseError
    from pagegen.selection.candidates import opened

    try:
        with opened(url) as db:
            return [*_compiled(db, spec, layout, device), *_tried(db, spec, layout, device)]
    except DatabaseError:
        return []


def _compiled(db: Database, spec: AttentionSpec, layout: CacheLayout, device: Device) -> Iterator[dict[str, Any]]:
    """What compilers and their code ruled out, as the kernel's newest predicted portfolio tells."""
    from pagegen import targets

    target = device.target
    for portfolio in db.portfolios(
        spec=spec, layout=layout, target=target, code_hash=targets.code_hash(target), device=device
    ):
        evidence = portfolio.rule.evidence
        if evidence.get("kind") == "predicted":
            for rule, row in evidence.get("rejected", {}).items():
                yield {"rule": rule, "stage": "compiled", **row}
            return


def _tried(db: Database, spec: AttentionSpec, layout: CacheLayout, device: Device) -> Iterator[dict[str, Any]]:
    """The failure classes of a kernel's trials on a device, each with its number of variants and one of them."""
    from pagegen import targets

    code = targets.code_hash(device.target)
    for status in (one for one in Status if one is not Status.OK):
        trials = db.trials(spec=spec, layout=layout, device=device, status=status, code_hash=code)
        if trials:
            yield {
                "rule": status.value, "stage": "tried", "variants": len({trial.variant for trial in trials}),
                "reason": trials[0].detail, "example": trials[0].variant.name,
            }  # fmt: skip
