"""Compiles the kernels of every feature for every GPU of the table, and writes docs/coverage.json and docs/coverage.md:

    make coverage
    python tests/kernels/coverage_table.py --only window --targets sm_90

With --only or --targets it prints what it finds and writes nothing. Exits 1 where a kernel does not compile, or spills
without an excuse in features.py.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import coverage_page
from features import FEATURES, TARGETS, Feature, WriterFeature

from pagegen.codegen import triton as codegen

ROOT = Path(__file__).resolve().parents[2]
JSON = ROOT / "docs" / "coverage.json"
MARKDOWN = ROOT / "docs" / "coverage.md"


def compile_row(index: int, kind: str, targets: Sequence[str]) -> list[dict[str, Any]]:
    """One kind of kernel of a feature for several targets. In a process of its own: see `main`."""
    feature = FEATURES[index]
    rows = []
    for target in TARGETS:
        if str(target) in targets and str(target) not in feature.absent:
            start = time.perf_counter()
            facts = _facts(feature, kind, target)
            seconds = round(time.perf_counter() - start, 1)
            rows.append({"feature": feature.name, "kernel": kind, "target": str(target), **facts, "seconds": seconds})
    return rows


def _share_sources() -> None:
    """One source serves many targets, and making it takes about as long as compiling it."""
    codegen.render_attention = functools.lru_cache(maxsize=8)(codegen.render_attention)


def _facts(feature: Feature | WriterFeature, kind: str, target: Any) -> dict[str, Any]:
    from pagegen.targets import offline, offline_cache
    from pagegen.targets.errors import CompileError

    try:
        if isinstance(feature, WriterFeature):
            import torch

            writer = offline_cache.compile_writer(feature.form(target), target, source_dtype=torch.bfloat16)
            return {"registers": writer.registers, "spills": writer.spills}
        variant = feature.variant(kind, target)
        facts = offline.compile_facts(
            feature.spec, feature.layout, variant, target, decode=kind == "decode", **feature.options
        )
    except CompileError as error:
        return {"error": str(error)}
    found = facts.to_dict()
    names = ("registers", "spills", "shared_bytes", "programs_per_unit")
    return {**{name: found[name] for name in names}, "variant": variant.name}


def compile_all(indices: Sequence[int], targets: Sequence[str], jobs: int) -> Iterator[list[dict[str, Any]]]:
    """The rows of each kind of kernel of each feature, in any order."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_share_sources) as pool:
        work = [(index, kind) for index in indices for kind in FEATURES[index].kinds]
        pending = [pool.submit(compile_row, index, kind, targets) for index, kind in work]
        for done in as_completed(pending):
            yield done.result()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="features whose name contains this")
    parser.add_argument("--targets", help="by commas, of " + ",".join(map(str, TARGETS)))
    parser.add_argument("--jobs", type=int, default=2, help="processes (default 2)")
    options = parser.parse_args(arguments)
    indices = [i for i, feature in enumerate(FEATURES) if (options.only or "") in feature.name]
    targets = options.targets.split(",") if options.targets else [str(target) for target in TARGETS]
    partial = bool(options.only or options.targets)
    templates = codegen.template_hash()  # of what is compiled, whatever is written to the files meanwhile
    start = time.perf_counter()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as fresh:  # nothing that was compiled before is found again
        os.environ["TRITON_CACHE_DIR"] = fresh
        for found in compile_all(indices, targets, options.jobs):
            rows += found
            for row in found if partial else ():
                print(json.dumps(row), flush=True)
            for problem in coverage_page.problems(found):
                print(problem, file=sys.stderr)
            print(f"{len(rows)} kernels, {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    seconds = time.perf_counter() - start
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu_seconds = sum(u.ru_utime + u.ru_stime for u in usage)
    print(f"{len(rows)} kernels in {seconds:.0f} s, {cpu_seconds:.0f} s of CPU time", file=sys.stderr)
    if not partial:
        document = coverage_page.document(
            rows, template_hash=templates, jobs=options.jobs, seconds=seconds, cpu_seconds=cpu_seconds
        )
        JSON.write_text(coverage_page.to_text(document), encoding="utf-8")
        MARKDOWN.write_text(coverage_page.render(document), encoding="utf-8")
    return 1 if coverage_page.problems(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
