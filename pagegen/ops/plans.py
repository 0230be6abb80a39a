"""Which kernel serves a call: prepared once for a spec and a layout, then looked up from host integers."""

from __future__ import annotations

import functools
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
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
        """The kernel that the rule chooses for a batch, or None where the dense path serves it."""
        while self.rule is not None:
            variant = self.rule.choose(num_seqs, max_query_len, max_seq_len)
            try:
                return self.load(variant)
            except CompileError as error:
                self.give_up(variant, error)
        return None

    def compile(self) -> None:
        """Compiles all that the rule may choose."""
        from pagegen import targets
        from pagegen.targets import cpp_build

        failed: dict[Variant, CompileError] = {}

        def attempt(variant: Variant) -> None:
            try:
                targets.warm_up(self.load(variant), self.spec, self.layout, self.target)
            except CompileError as error:
                failed[variant] = error

        while self.rule is not None:
            variants = self.rule.variants
            if self.target.kind == "cpu" and len(variants) > 1:  # each by a compiler of its own
                with ThreadPoolExecutor(cpp_build.workers()) as pool:
                    list(pool.map(attempt, variants))
            else:  # in this thread, whose device is the current one
                for variant in variants:
                    attempt(variant)
            if not failed:
                return
            for variant in variants:
                if variant in failed:
                    self.give_up(variant, failed.pop(variant))

    def give_up(self, variant: Variant, error: CompileError) -> None:
        """A choice does not compile: another compiler than it was tuned with, a compiler that went away, a full disk.
        The default variant serves in its place, and where that is what failed, the dense path serves all; said once."""
        from pagegen import targets

        if self.rule is None:
            return
        clauses = []
        for clause in self.rule.clauses:
            if clause.variant == variant:
                decode = clause.max_query_len == 1
                default = targets.default_variant(self.spec, self.layout, self.target, decode=decode)
                if default == variant:
                    self.rule, self.dense_reason = None, str(error)
                    announce_dense(self.target, self.dense_reason)
                    return
                clause = replace(clause, variant=default)
            clauses.append(clause)
        _announce_default(self.target, str(error))
        reason = f"{self.rule.reason}; the default variant in place of one that does not compile ({error})"
        evidence = {**self.rule.evidence, "kind": "default", "confidence": "none"}
        self.rule = replace(self.rule, clauses=tuple(clauses), reason=reason, evidence=evidence)

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
    """A plan from `db`; for None from the artefacts in use, where they were built for it, else the default database."""
    from pagegen import targets

    reason = targets.unsupported(spec, target)
    if reason is not None:
        announce_dense(target, reason)
        return Plan(spec, layout, target, None, reason)
    from pagegen import selection

    shipped = targets.shipped_rule(spec, layout, target) if db is None else None
    rule = shipped or selection.rule_for(spec, layout, target, db)
    return Plan(spec, layout, target, rule, None)


@functools.cache
def announce_dense(target: Target, reason: str) -> None:
    """Logs once a process that calls fall back to the dense path, and why."""
    log.warning("attention on %s gathers its blocks and computes densely: %s", target, reason)


@functools.cache
def _announce_default(target: Target, error: str) -> None:
    """Logs once a process that the default variant serves in place of a choice, and why."""
    log.warning("the default variant serves on %s in place of one that was chosen: %s; run pagegen tune", target, error)


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
    *,
    artefacts: str | os.PathLike[str] | None = None,
) -> DispatchRule | None:
    """Chooses and compiles the variants that serve `spec` on `layout`, what writes to its caches, and the caches' own
    prefix index, so that serving compiles nothing: `pagegen.targets.compiled()` is the same before and after.
    (`rope_write_kv` and `copy_blocks` compile at their first call on a GPU.)

    `target` defaults to this machine's, `db` (a Database, path or URL) to the default database. `artefacts` is a folder
    that `pagegen build` made (default: `PAGEGEN_ARTEFACTS`): its kernels are loaded in place of being compiled where
    its hashes and this CPU's features match, and its rules hold where no `db` is given; where they do not match, a log
    line says why, and kernels are compiled. Returns the dispatch rule, or None where no generated kernel serves the
    spec and calls compute densely. Raises ValueError for a GPU that is not in this machine: kernels for one can be
    emitted and inspected, but not loaded.
    """
    check.instance("spec", spec, AttentionSpec)
    check.instance("layout", layout, CacheLayout)
    from pagegen import modifiers, targets
    from pagegen.cache import prefix_compiled

    modifiers.find_both(spec.score_mod, spec.mask_mod)  # an unknown one is refused here, not served densely ever after
    where = Target.current() if target is None else Target.parse(target)
    if where.is_gpu:
        targets.current_device(where)
    if artefacts is not None:
        targets.use_artefacts(artefacts, where)
    layout = layout.canonical(spec.num_kv_heads)  # as `order_of` reads it off a cache
    plan = make_plan(spec, layout, where, db)
    plan.compile()
    targets.warm_up_writes(spec, layout, where)
    prefix_compiled.available()
    _PREPARED[spec, layout, where] = plan
    _forget_calls()
    return plan.rule


def _forget_calls() -> None:
    from pagegen.ops import attention

    attention.forget()
