"""The operators: `torch.ops.pagegen.*` and the functions that wrap them."""

from pagegen.ops import attention, cache_ops, fakes, merging, schemas, vmap  # noqa: F401  importing registers
from pagegen.ops.api import copy_blocks, merge_states, paged_attention, rope_write_kv, update_scales, write_kv
from pagegen.ops.cascade import cascade_attention
from pagegen.ops.cascade_plan import plan_cascade
from pagegen.ops.checks import validate_batch
from pagegen.ops.plans import prepare

__all__ = [
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
]
