"""pagegen: generates, tunes and serves specialised paged-attention kernels.

Importing the package registers `torch.ops.pagegen.*` and needs torch only; the rest loads when first used.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "pagegen.spec": (
        "AttentionSpec",
        "CacheLayout",
        "CppVariant",
        "Device",
        "DispatchRule",
        "Measurement",
        "Profile",
        "Selection",
        "Status",
        "Target",
        "TritonVariant",
        "Variant",
        "Workload",
    ),
    "pagegen.ops": (
        "cascade_attention",
        "copy_blocks",
        "merge_states",
        "paged_attention",
        "plan_cascade",
        "prepare",
        "rope_write_kv",
        "update_scales",
        "validate_batch",
        "write_kv",
    ),
    "pagegen.cache": (
        "BatchBuffers",
        "BlockAllocator",
        "GroupedAllocator",
        "GroupedKVCache",
        "OutOfBlocks",
        "PagedKVCache",
    ),
    "pagegen.db": ("open_db",),
    "pagegen.modifiers": ("mask_mod", "score_mod"),
    "pagegen.reference": ("reference_attention",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}
__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'pagegen' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))


import pagegen.ops  # noqa: E402, F401  registers torch.ops.pagegen
