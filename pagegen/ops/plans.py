"""Which kernel serves a call: prepared once for a spec and a layout, then looked up from host integers."""

from __future__ import annotations

import functools
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pagegen import settings
from pagegen.spec import AttentionSpec, CacheLayout, DispatchRule, Target, Variant, check
from pagegen.targets.call import AttentionKernel
from pagegen.targets.capture import refuse_in_capture
from pagegen.targets.errors import CompileError

if TYPE_CHECKING:
    from pagegen.db import Database

log = logging.getLogger(__name__)
PREPARE = "call pagegen.prepare(spec, layout)"


@dataclass
class Plan:
    """The prepared kernels of one (spec, layout, target). `dense_reason` says why no generated kernel serves
    the spec there; such calls gather their blocks and compute densely."""

    spec: AttentionSpec
    layout: CacheLayout
    target: Target
    rule: DispatchRule | None
    dense_reason: str | None
    kernels: dict[Variant, AttentionKernel] = field(default_factory=dict)

    def kernel(self, num_seqs: int, max_query_len: int, max_seq_len: int) -> AttentionKernel | None:
        """The kernel that the rule chooses for a batch, or None where the dense path serves it. A choice that does
        not compile (a full disk, a compiler that went away) leaves the plan to the dense path, said once."""
        if self.rule is None:
            return None
        try:
            return self.load(self.rule.choose(num_seqs, max_query_len, max_seq_len))
        except CompileError as error:
            self.rule, self.dense_reason = None, str(error)
            announce_dense(self.target, self.dense_reason)
            return None

    def load(self, variant: Variant) -> AttentionKernel:
        """The kernel of `variant`, compiled when first asked for."""
        kernel = self.kernels.get(variant)
        if kernel is None:
            refuse_in_capture(f"variant {variant.name} is not prepared", PREPARE)
            from pagegen import targets

            kernel = targets.load_attention(self.spec, self.layout, variant, self.target)
            self.kernels[variant] = kernel
        return kernel


@functools.cache
def plan_for(spec: AttentionSpec, layout: CacheLayout, target: Target) -> Plan:
    """The plan of a spec, layout and target, made once a process from the default database."""
    refuse_in_capture("this attention is not prepared", PREPARE)
    return make_plan(spec, layout, target, None)


def make_plan(spec: AttentionSpec, layout: CacheLayout, target: Target, db: Database | str | None) -> Plan:
    """A plan from `db` (None: the default database)."""
    from pagegen import targets

    reason = targets.unsupported(spec, target)
    if reason is not None:
        announce_dense(target, reason)
        return Plan(spec, layout, target, None, reason)
    from pagegen import selection

    rule = selection.rule_for(spec, layout, target, db)
    return Plan(spec, layout, target, rule, None)


@functools.cache
def announce_dense(target: Target, reason: str) -> None:
    """Logs once a process that calls fall back to the dense path, and why."""
    log.warning("attention on %s gathers its blocks and computes densely: %s", target, reason)


def target_of(device: torch.device) -> Target:
    """The target that serves tensors on `device`. Raises ValueError for a device that nothing serves."""
    named = settings.target_name()
    if device.type == "cpu":
        return _cpu_target(named)
    if device.type == "cuda":
        return Target.current()
    raise ValueError(f"q must be on a cpu or cuda device, got {device}")


@functools.lru_cache(maxsize=16)
def _cpu_target(named: str) -> Target:
    target = Target.parse(named) if named else Target("cpu")
    if target.is_gpu:
        raise ValueError(f"PAGEGEN_TARGET must be cpu or interpreter for tensors on the CPU, got {target}")
    return target


def order_of(k_cache: Tensor) -> str:
    """The memory order inside a block, read off the strides; "NHD" where both orders are the same bytes."""
    _, block_size, num_kv_heads, _ = k_cache.shape
    apart = block_size > 1 and num_kv_heads > 1
    return "HND" if apart and k_cache.stride(2) > k_cache.stride(1) else "NHD"


_PREPARED: dict[tuple[AttentionSpec, CacheLayout, Target], Plan] = {}


def lookup(spec: AttentionSpec, layout: CacheLayout, target: Target) -> Plan:
    """The plan that `prepare` made, or one from the default database."""
    return _PREPARED.get((spec, layout, target)) or plan_for(spec, layout, target)


def prepare(
    spec: AttentionSpec,
    layout: CacheLayout,
    target: str | Target | None = None,
    db: Database | str | None = None,
) -> DispatchRule | None:
    """Chooses and compiles the variants that serve `spec` on `layout`, and what writes to its caches, so that serving
    compiles nothing: `pagegen.targets.compiled()` is the same before and after. (`rope_write_kv` and `copy_blocks`
    compile at their first call on a GPU.)

    `target` defaults to this machine's, `db` (a Database, path or URL) to the default database. Returns the
    dispatch rule, or None where no generated kernel serves the spec and calls compute densely. Raises ValueError for
    a GPU that is not in this machine: kernels for one can be emitted and inspected, but not loaded.
    """
    check.instance("spec", spec, AttentionSpec)
    check.instance("layout", layout, CacheLayout)
    from pagegen import modifiers, targets

    modifiers.find_both(spec.score_mod, spec.mask_mod)  # an unknown one is refused here, not served densely ever after
    where = Target.current() if target is None else Target.parse(target)
    if where.is_gpu:
        targets.current_device(where)
    layout = layout.canonical(spec.num_kv_heads)  # as `order_of` reads it off a cache
    plan = make_plan(spec, layout, where, db)
    variants = plan.rule.variants if plan.rule else ()
    if where.kind == "cpu" and len(variants) > 1:  # each by a compiler of its own
        from pagegen.targets import cpp_build

        with ThreadPoolExecutor(cpp_build.workers()) as pool:
            list(pool.map(plan.load, variants))
    for variant in variants:
        targets.warm_up(plan.load(variant), spec, layout, where)
    targets.warm_up_writes(spec, layout, where)
    _PREPARED[spec, layout, where] = plan
    _forget_calls()
    return plan.rule


def _forget_calls() -> None:
    from pagegen.ops import attention

    attention.PLANS.clear()
