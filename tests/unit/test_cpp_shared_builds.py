"""Many processes and one folder of compiled libraries; headers compiled once; what killed compilers leave."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import re
import shutil
import time
from pathlib import Path

import pytest

from pagegen import paths
from pagegen.codegen import cpp
from pagegen.targets import cpp_build, cpp_headers, cpu_features
from pagegen.targets.errors import CompileError

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
ANSWER = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PAGEGEN_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "cpp"


def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> Path:
    """Makes CXX a script that runs `body` for every compilation, and returns a file that it may write to."""
    script, log = tmp_path / "scripted-c++", tmp_path / "log"
    log.touch()
    script.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exec c++ --version\nLOG={log}\n{body}\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    return log


def _build_all(start: float, sources: list[str]) -> None:
    time.sleep(max(0.0, start - time.time()))  # all at the same moment
    for source in sources:
        wanted = int(re.findall(r"return (\d+)", source)[0])
        if ctypes.CDLL(str(cpp_build.build(source, "answer"))).answer() != wanted:
            raise AssertionError(source)


def test_processes_that_build_the_same_and_different_kernels_make_one_file_of_each(cache: Path) -> None:
    context = multiprocessing.get_context("fork")
    sources = [ANSWER, ANSWER.replace("42", "43"), ANSWER.replace("42", "44")]
    start = time.time() + 0.3
    workers = [context.Process(target=_build_all, args=(start, sources[i:] + sources[:i])) for i in (0, 0, 1, 2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert sorted(p.suffix for p in cache.iterdir() if p.is_file()) == [".cpp"] * 3 + [".so"] * 3
    assert not list(cache.glob(".build-*"))


def test_a_killed_compiler_leaves_no_library(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(tmp_path, monkeypatch, 'for last; do :; done; echo half > "$(dirname $last)/kernel.so"; kill -9 $$')
    with pytest.raises(CompileError):
        cpp_build.build(ANSWER, "answer")
    assert list(cache.iterdir()) == []


def test_what_a_killed_process_left_is_removed_when_nobody_can_be_at_it(cache: Path) -> None:
    cpp_build.build(ANSWER, "answer")
    left, busy = cache / ".build-left", cache / ".build-busy"
    for folder in (left, busy):
        folder.mkdir()
        (folder / "kernel.cpp").write_text(ANSWER)
    long_ago = time.time() - cpp_build.LITTER_S - 60
    os.utime(left, (long_ago, long_ago))
    cpp_build.build(ANSWER.replace("42", "43"), "answer")
    assert not left.exists()
    assert busy.exists()


def test_another_cpu_or_compiler_that_shares_the_folder_builds_its_own(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = cpp_build.build(ANSWER, "answer")
    with monkeypatch.context() as there:
        there.setattr(cpu_features, "names", lambda: ("avx2",))
        other_cpu = cpp_build.build(ANSWER, "answer")
    with monkeypatch.context() as there:
        there.setattr(cpp_build, "find_compiler", lambda: cpp_build.Compiler(("c++",), "c++ 1.0", gnu=True))
        other_compiler = cpp_build.build(ANSWER, "answer")
    assert len({own, other_cpu, other_compiler}) == 3
    assert cpp_build.build(ANSWER, "answer") == own


# ---- headers --------------------------------------------------------------------------------------------


def test_every_system_header_of_a_template_is_among_those_compiled_once() -> None:
    wanted = {
        line
        for name in cpp.TEMPLATES
        for line in re.findall(r"#include <.*>", (paths.data("templates") / name).read_text())
    }
    assert wanted <= set(cpp_headers.TEXT.splitlines())


def numbered(first: int, count: int) -> list[str]:
    return ["#include <cstdint>\n" + ANSWER.replace("42", str(first + i)) for i in range(count)]


@pytest.fixture
def gcc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few headers: all of them take most of a second and 50 MB."""
    monkeypatch.setattr(cpp_headers, "TEXT", "#include <cstdint>\n")
    if "clang" in cpp_build.find_compiler().version:
        pytest.skip("clang has other compiled headers")


def test_headers_are_compiled_for_the_third_kernel_and_read_from_then_on(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gcc: None
) -> None:
    log = scripted(tmp_path, monkeypatch, 'echo "$@" >> $LOG; exec c++ "$@"')
    for source in numbered(1, 4):
        cpp_build.build(source, "answer")
    (headers,) = cache.glob("headers-*")
    lines = log.read_text().splitlines()
    assert len(lines) == 5
    assert ["c++-header" in line for line in lines] == [False, False, True, False, False]
    assert [headers.name in line for line in lines if "c++-header" not in line] == [False, False, True, True]


def test_damaged_headers_cost_time_but_no_kernel(cache: Path, gcc: None) -> None:
    for source in numbered(1, 3):
        cpp_build.build(source, "answer")
    (compiled,) = cache.glob("headers-*/*.gch")
    for content in (compiled.read_bytes()[:9000], b"", b"nonsense"):
        compiled.parent.mkdir(exist_ok=True)
        compiled.write_bytes(content)
        source = numbered(10 + len(content), 1)[0]
        assert cpp_build.load(source, "answer").answer() == 10 + len(content)


def test_an_error_of_the_source_is_told_with_headers_too(cache: Path, gcc: None) -> None:
    for source in numbered(1, 3):
        cpp_build.build(source, "answer")
    with pytest.raises(CompileError, match=r"1:18: error: .*nothing"):
        cpp_build.build("int f() { return nothing; }\n", "broken")
    assert len(list(cache.glob("headers-*/*.gch"))) == 1, "they are not at fault"


def test_nobody_needs_the_headers(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gcc: None) -> None:
    scripted(tmp_path, monkeypatch, 'case "$*" in *c++-header*) exit 1;; esac; exec c++ "$@"')
    for number, source in enumerate(numbered(1, 4), 1):
        assert cpp_build.load(source, "answer").answer() == number
    assert not list(cache.glob("headers-*"))
    assert not list(cache.glob(".build-*"))
