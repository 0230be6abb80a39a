"""Failures that users of other tuners reported, where a model that serves was hurt. docs/failures.md lists them all."""

from __future__ import annotations

import ast
import logging
import random
import sqlite3
import time

import database_fakes as fakes
import pytest
import torch

from pagegen import paths, selection, targets
from pagegen.db import open_db, sqlite
from pagegen.ops import plans
from pagegen.spec import AttentionSpec, CacheLayout, Clause, CppVariant, DispatchRule, Target, TritonVariant
from pagegen.targets.errors import CompileError

CPU = Target("cpu")
SPEC = AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=32)
LAYOUT = CacheLayout(block_size=16)
DECODE, LONGER, DEFAULT = CppVariant(streams=2), CppVariant(streams=4), CppVariant(streams=8)
RULE = DispatchRule(
    clauses=(Clause(variant=DECODE, max_query_len=1), Clause(variant=LONGER)),
    reason="tuned",
    evidence={"kind": "measured", "grade": "exact", "confidence": "high"},
)


@pytest.fixture
def kernels(monkeypatch):
    """Kernels that are names: those of `broken` do not compile, `loaded` are those that did."""

    class Kernels:
        broken: set = set()
        loaded: list = []

    found = Kernels()
    found.broken, found.loaded = set(), []

    def load(spec, layout, variant, target):
        if variant in found.broken:
            raise CompileError(str(target), variant.name, "internal compiler error")
        found.loaded.append(variant)
        return variant.name

    monkeypatch.setattr(targets, "load_attention", load)
    monkeypatch.setattr(targets, "default_variant", lambda spec, layout, target, *, decode: DEFAULT)
    plans._announce_default.cache_clear()
    plans.announce_dense.cache_clear()
    return found


def plan(rule=RULE):
    return plans.Plan(SPEC, LAYOUT, CPU, rule, None)


def test_a_stored_choice_that_no_longer_compiles_gives_way_to_the_default(kernels, caplog):
    """A cached choice that another compiler refused ended the server."""
    kernels.broken = {DECODE}
    made = plan()
    made.compile()
    assert made.rule.variants == (DEFAULT, LONGER)
    assert made.kernel(8, 1, 100) == DEFAULT.name and made.kernel(8, 2, 100) == LONGER.name
    assert "internal compiler error" in made.rule.reason and "run pagegen tune" in caplog.text
    assert (made.rule.evidence["kind"], made.rule.evidence["confidence"]) == ("default", "none")


def test_where_the_default_does_not_compile_either_the_dense_path_serves(kernels):
    kernels.broken = {DECODE, DEFAULT}
    made = plan()
    made.compile()
    assert made.kernel(8, 1, 100) is None and "internal compiler error" in made.dense_reason


def test_a_choice_that_breaks_when_first_called_gives_way_as_well(kernels):
    made = plan()
    kernels.broken = {DECODE, LONGER}
    assert made.kernel(8, 1, 100) == DEFAULT.name
    assert made.kernel(8, 5, 100) == DEFAULT.name and made.rule.variants == (DEFAULT,)


@pytest.mark.parametrize(
    ("text", "is_compiler"), [("PassManager::run failed", True), ("an illegal memory access was encountered", False)]
)
def test_a_pass_that_fails_is_a_compilers_error_and_one_of_the_driver_is_not(monkeypatch, text, is_compiler):
    """Tuning and serving ended by a plain RuntimeError that nobody had listed."""
    pytest.importorskip("triton")
    from pagegen.targets import triton_launch

    def launch(self, call, wide):
        raise RuntimeError(f"{text}\nmore")

    monkeypatch.setattr(triton_launch.TritonAttention, "_launch", launch)
    kernel = triton_launch.TritonAttention(SPEC, LAYOUT, TritonVariant(), Target.parse("sm_90"))
    with pytest.raises(CompileError if is_compiler else RuntimeError, match=text) as raised:
        kernel.warm(None)
    assert isinstance(raised.value, CompileError) is is_compiler


def test_more_shared_memory_than_there_is_found_at_a_launch_is_a_compilers_error(monkeypatch):
    errors = pytest.importorskip("triton.runtime.errors")
    from pagegen.targets import triton_launch

    def launch(self, call, wide):
        raise errors.OutOfResources(106496, 101376, "shared memory")

    monkeypatch.setattr(triton_launch.TritonAttention, "_launch", launch)
    kernel = triton_launch.TritonAttention(SPEC, LAYOUT, TritonVariant(), Target.parse("sm_89"))
    with pytest.raises(CompileError, match="106496"):
        kernel.warm(None)


def test_no_composition_of_a_batch_looks_anything_up_or_compiles_anything(kernels, monkeypatch):
    """A length in the key made every new composition of a batch tune again."""
    made = plan()
    made.compile()
    kernels.loaded.clear()

    def never(*args, **options):
        raise AssertionError("a call must not ask the database")

    monkeypatch.setattr(selection, "rule_for", never)
    rng = random.Random(0)
    for _ in range(500):
        contexts = [rng.randrange(1, 131072) for _ in range(rng.randrange(1, 300))]
        assert made.kernel(len(contexts), rng.choice([1, 1, 7, 512]), max(contexts)) in (DECODE.name, LONGER.name)
    assert kernels.loaded == []


def test_while_a_cuda_graph_is_captured_nothing_is_planned_and_what_is_prepared_serves(kernels, monkeypatch):
    """The tuner synchronised inside a capture, which broke it."""
    made = plan()
    made.compile()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert made.kernel(8, 1, 100) == DECODE.name
    with pytest.raises(RuntimeError, match=r"not prepared: call pagegen.prepare\(spec, layout\) before capturing"):
        plan().kernel(8, 1, 100)
    with pytest.raises(RuntimeError, match="not prepared"):
        plans.plan_for(SPEC, CacheLayout(block_size=48), CPU)


@pytest.mark.parametrize("journal", ["delete", "wal"])
def test_a_locked_database_is_a_miss_and_no_error(tmp_path, monkeypatch, caplog, journal):
    """`database is locked` took a server down at 64 requests at once."""
    path = tmp_path / "tuned.db"
    with open_db(path, shipped=False) as db:
        db.save_portfolio(
            spec=fakes.SPEC, layout=fakes.LAYOUT, device=fakes.H100, profile=fakes.PROFILE, rule=fakes.rule(),
            code_hash=targets.code_hash(fakes.SM_90),
        )  # fmt: skip
    monkeypatch.setattr(sqlite, "BUSY_TIMEOUT_S", 0.2)
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute(f"PRAGMA journal_mode={journal}")
    holder.execute("BEGIN EXCLUSIVE")
    holder.execute("CREATE TABLE held (a)")
    begin = time.monotonic()
    with caplog.at_level(logging.WARNING):
        found = selection.rule_for(fakes.SPEC, fakes.LAYOUT, fakes.SM_90, str(path))
    assert time.monotonic() - begin < 5
    holder.execute("ROLLBACK")
    holder.close()
    if journal == "wal":  # readers and a writer do not meet
        assert found.variants == (fakes.TUNED,)
    else:
        assert found.evidence["kind"] == "predicted" and "locked" in found.reason


def test_a_batch_that_grows_compiles_no_kernel_again():
    """Triton makes another kernel for an integer of 1, for multiples of 16 and for others: seconds each, as a batch
    went from 1 to 3 to 16. The kernels say of everything that changes from step to step that it must not."""
    of_a_step = {"num_seqs", "num_tiles", "num_splits", "stride_table_seq", "stride_tree_token", "tree_width"}
    seen = set()
    for name in ("attention.py", "balanced.py", "cache_ops.py"):
        tree = ast.parse((paths.data("templates") / name).read_text(encoding="utf-8"))
        for kernel in (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name[-7:] == "_kernel"):
            (jit,) = kernel.decorator_list
            options = {} if not isinstance(jit, ast.Call) else {k.arg: ast.literal_eval(k.value) for k in jit.keywords}
            run_time = {argument.arg for argument in kernel.args.args if argument.annotation is None}
            if kernel.name == "balanced_attention_kernel":
                run_time.discard("num_splits")  # None: it divides by programs
            assert run_time & of_a_step == set(options.get("do_not_specialize", ())), kernel.name
            seen |= run_time & of_a_step
    assert seen == of_a_step
