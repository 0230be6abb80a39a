"""What the cost model expects on a device: with what compilers told of the kernel, and with coefficients fitted to the
device's trials, where the database has either."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from pagegen import costs, targets
from pagegen.selection.candidates import opened
from pagegen.spec import AttentionSpec, CacheLayout, CompileFacts, Device, Variant, Workload

if TYPE_CHECKING:
    from pagegen.db import Database


class Expected:
    """Predicted times of one spec and layout on a device. The database is read when the first is asked for; what cannot
    be read of it counts as not known."""

    def __init__(self, spec: AttentionSpec, layout: CacheLayout, device: Device, db: Database | str | None) -> None:
        self._spec = spec
        self._layout = layout
        self._device = device
        self._db = db

    def us(self, variant: Variant, workload: Workload) -> float:
        """The predicted time of one call. Raises ValueError where the device's bandwidth is not known."""
        facts = self._facts.get((variant, "decode" if workload.is_decode else "ragged"))
        return costs.predict_us(self._spec, self._layout, variant, self._device, workload, facts=facts, fit=self.fit)

    def is_compiled(self, variant: Variant) -> bool:
        """Whether a compiler told what it made of the variant."""
        return any(known == variant for known, _ in self._facts)

    @functools.cached_property
    def fit(self) -> costs.Fit | None:
        """The coefficients in use; see `fit_for`."""
        return fit_for(self._device, self._db)

    @functools.cached_property
    def _facts(self) -> dict[tuple[Variant, str], CompileFacts]:
        """What compilers made of the GPU kernels of this very spec and layout, by variant and form."""
        from pagegen.db import DatabaseError

        target = self._device.target
        if not target.is_gpu:
            return {}
        code = targets.code_hash(target)
        try:
            with opened(self._db) as source:
                found = source.compile_facts(spec=self._spec, layout=self._layout, target=target, code_hash=code)
        except DatabaseError:
            return {}
        return {(facts.variant, facts.form): facts for facts in found}


def fit_for(device: Device, db: Database | str | None) -> costs.Fit | None:
    """The stored coefficients for a device that are worth using."""
    from pagegen.db import DatabaseError
    from pagegen.db.fits import newest_fit

    try:
        with opened(db) as source:
            return newest_fit(source, device, targets.code_hash(device.target))
    except DatabaseError:
        return None
