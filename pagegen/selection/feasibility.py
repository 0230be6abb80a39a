"""Whether a variant can run here at all, judged before anything is compiled or launched."""

from __future__ import annotations

from pagegen import costs, targets
from pagegen.spec import AttentionSpec, CacheLayout, Device, Variant


def infeasible(spec: AttentionSpec, layout: CacheLayout, variant: Variant, device: Device) -> list[str]:
    """Why the variant must not be launched for this spec and layout on this device: an unserved spec, or what
    `costs.legal` names (a dtype that the device lacks, registers, shared memory, threads, the shape of tiles and
    blocks). Empty where nothing speaks against it; a limit that is not known of the device refuses nothing."""
    unserved = targets.unsupported(spec, device.target)
    return [*([] if unserved is None else [unserved]), *costs.legal(spec, layout, variant, device)]
