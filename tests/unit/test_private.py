"""What is executed lies where this user alone can write, and is what was made: modes, owners, links, exchanged folders,
tampered and truncated files, many processes at once."""

from __future__ import annotations

import inspect
import logging
import multiprocessing
import os
import py_compile
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagegen import private
from pagegen.targets import cpp_build, cpp_headers, triton_module
from pagegen.targets.errors import CompileError

ANSWER = 'extern "C" int answer() { return 42; }\n'
PLANTED = 'extern "C" int answer() { return 666; }\n'
GENERATED = "def answer():\n    return 42\n"

needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a file away")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PAGEGEN_CACHE_DIR", str(tmp_path / "some" / "cache"))
    triton_module.import_source.cache_clear()
    triton_module._say_once.cache_clear()
    return tmp_path / "some" / "cache"


@pytest.fixture
def careless() -> Iterator[None]:
    """A umask that takes nothing from anybody."""
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


# ---- folders -----------------------------------------------------------------------------------------------


def test_a_folder_and_its_parents_are_made_for_the_user_alone_and_so_are_files(tmp_path, careless):
    path = tmp_path / "a" / "b"
    with private.own_folder(path) as folder:
        folder.publish("file", b"content")
        assert folder.read("file") == b"content"
    assert [mode(p) for p in (tmp_path / "a", path, path / "file")] == [0o700, 0o700, 0o600]
    assert [p.name for p in path.iterdir()] == ["file"]


@pytest.mark.parametrize("bits", [0o777, 0o775, 0o702, 0o720])
def test_a_folder_that_others_can_write_is_refused_with_the_reason(tmp_path, bits):
    tmp_path.chmod(bits)
    with pytest.raises(private.NotPrivate, match=rf"{tmp_path} must be writable by you alone.*chmod go-w"):
        private.own_folder(tmp_path)


@needs_root
def test_a_folder_of_another_user_is_refused_with_the_reason(tmp_path):
    path = tmp_path / "theirs"
    path.mkdir(mode=0o700)
    os.chown(path, 12345, -1)
    with pytest.raises(private.NotPrivate, match="belongs to user 12345, and what lies there is executed as 0"):
        private.own_folder(path)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[private.Folder]:
    with private.own_folder(tmp_path / "own") as opened:
        yield opened


def test_a_link_a_pipe_and_a_folder_are_no_files(folder, tmp_path):
    (tmp_path / "elsewhere").write_bytes(b"x")
    (folder.path / "link").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(folder.path / "pipe")
    (folder.path / "inner").mkdir()
    for name in ("link", "pipe", "inner"):
        with pytest.raises(private.NotPrivate, match="must be a plain file"):
            folder.read(name)
    with pytest.raises(FileNotFoundError):
        folder.read("absent")


def test_a_file_that_others_can_write_is_not_read(folder):
    folder.publish("file", b"x")
    (folder.path / "file").chmod(0o620)
    with pytest.raises(private.NotPrivate, match="writable by you alone"):
        folder.read("file")


def test_a_file_that_is_too_long_is_not_read(folder):
    folder.publish("file", bytes(100))
    assert len(folder.read("file", at_most=100)) == 100
    with pytest.raises(ValueError, match="at most 99 bytes, got 100"):
        folder.read("file", at_most=99)


def test_a_folder_that_is_exchanged_for_another_is_still_the_one_that_was_judged(folder):
    folder.publish("file", b"judged")
    folder.path.rename(folder.path.with_name("away"))
    folder.path.mkdir()
    (folder.path / "file").write_bytes(b"planted")
    assert folder.read("file") == b"judged"
    assert Path(folder.place("file")).read_bytes() == b"judged"
    folder.publish("file", b"published")
    assert (folder.path / "file").read_bytes() == b"planted"
    assert (folder.path.with_name("away") / "file").read_bytes() == b"published"


def test_a_full_disk_leaves_the_old_file_and_nothing_beside_it(folder, monkeypatch):
    folder.publish("file", b"old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(private.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        folder.publish("file", b"new")
    assert folder.names() == ["file"]
    assert folder.read("file") == b"old"


# ---- compiled libraries ------------------------------------------------------------------------------------


def tree(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): mode(path) for path in folder.rglob("*")}


@needs_compiler
def test_nothing_in_the_cache_can_be_read_or_written_by_others_whatever_the_umask(cache, careless, monkeypatch):
    monkeypatch.setattr(cpp_headers, "TEXT", "#include <cstdint>\n")
    for number in range(3):  # the third brings compiled headers
        cpp_build.build(f"#include <cstdint>\n{ANSWER}// {number}\n", "answer")
    triton_module.import_source(GENERATED)
    modes = tree(cache)
    assert any("headers-" in name for name in modes) or "clang" in cpp_build.find_compiler().version
    assert {m for name, m in modes.items() if (cache / name).is_dir()} == {0o700}
    assert {m for name, m in modes.items() if (cache / name).is_file()} == {0o600}


def truncated(library: Path) -> None:
    library.write_bytes(library.read_bytes()[:2000])


def tampered(library: Path) -> None:
    content = bytearray(library.read_bytes())
    content[len(content) // 2] ^= 1
    library.write_bytes(content)


def of_another_name(library: Path) -> None:
    """A whole library, of another source."""
    shutil.copy(cpp_build.build(PLANTED, "planted"), library)


def linked(library: Path) -> None:
    library.unlink()
    library.symlink_to(cpp_build.build(PLANTED, "planted"))


def open_to_others(library: Path) -> None:
    library.chmod(0o666)


@needs_compiler
@pytest.mark.parametrize("do", [truncated, tampered, of_another_name, linked, open_to_others])
def test_a_library_that_is_not_what_was_compiled_is_compiled_anew_and_the_log_says_so(do, cache, caplog):
    library = cpp_build.build(ANSWER, "answer")
    do(library)
    caplog.clear()
    assert cpp_build.load(ANSWER, "answer").answer() == 42
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert str(library) in record.message
    assert record.message.endswith("it is compiled anew")
    assert mode(library) == 0o600
    caplog.clear()
    cpp_build.build(ANSWER, "answer")
    assert not caplog.records, "once"


@needs_compiler
def test_a_folder_that_is_exchanged_while_the_compiler_runs_gets_and_gives_nothing(cache, tmp_path, monkeypatch):
    """Somebody who can write higher up moves the folder away and puts one there with a library of the same name."""
    script = tmp_path / "exchanging-c++"
    script.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && exec c++ --version\nmv {cache}/cpp {cache}/away\nmkdir {cache}/cpp\n'
        'exec c++ "$@"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    assert cpp_build.load(ANSWER, "answer").answer() == 42
    assert list((cache / "cpp").iterdir()) == []
    assert sorted(p.suffix for p in (cache / "away").iterdir()) == [".cpp", ".so"]


@needs_compiler
def test_compiled_headers_that_were_tampered_with_are_not_compiled_into_kernels(cache, monkeypatch, caplog):
    if "clang" in cpp_build.find_compiler().version:
        pytest.skip("clang has other compiled headers")
    monkeypatch.setattr(cpp_headers, "TEXT", "#include <cstdint>\n")
    sources = [f"#include <cstdint>\n{ANSWER.replace('42', str(number))}" for number in range(5)]
    for source in sources[:3]:
        cpp_build.build(source, "answer")
    (text,) = cache.rglob("headers.hpp")
    text.write_text("#define answer() answer() { return 666; } int other()\n")
    cpp_headers._checked.clear()  # as in another process
    caplog.clear()
    assert cpp_build.load(sources[3], "answer").answer() == 3
    assert "compiled headers are made anew" in caplog.text
    assert cpp_build.load(sources[4], "answer").answer() == 4
    assert text.read_text() == "#include <cstdint>\n"


@needs_compiler
def test_a_compiler_named_by_a_relative_path_is_found(cache, tmp_path, monkeypatch):
    (tmp_path / "mine").symlink_to(str(shutil.which("c++")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CXX", "./mine")
    assert cpp_build.load(ANSWER, "answer").answer() == 42


def _load_again_and_again(end: float) -> None:
    while time.time() < end:
        if cpp_build.load(ANSWER, "answer").answer() != 42:
            raise AssertionError


@needs_compiler
def test_processes_that_share_a_cache_where_files_are_damaged_all_compute_the_right_thing(cache):
    library = cpp_build.build(ANSWER, "answer")
    whole = library.read_bytes()
    context = multiprocessing.get_context("fork")
    end = time.time() + 1.5
    workers = [context.Process(target=_load_again_and_again, args=(end,)) for _ in range(4)]
    for worker in workers:
        worker.start()
    number = 0
    while time.time() < end:
        number += 1
        damaged = library.with_suffix(".damaged")
        damaged.write_bytes(whole[: 100 + number % (len(whole) - 100)])
        damaged.chmod(0o600)
        damaged.replace(library)
        time.sleep(0.1)
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 4


# ---- generated Python --------------------------------------------------------------------------------------


def copy_of(source: str) -> Path:
    return Path(str(triton_module.import_source(source).__file__))


def test_a_generated_module_runs_and_shows_its_text(cache):
    module = triton_module.import_source(GENERATED)
    assert module.answer() == 42
    assert inspect.getsource(module.answer) == GENERATED
    assert copy_of(GENERATED).read_text() == GENERATED
    assert copy_of(GENERATED).parent == cache / "triton"


def test_a_tampered_copy_is_written_anew_and_said_and_never_run_nor_read(cache, caplog):
    path = copy_of(GENERATED)
    path.write_text(GENERATED.replace("42", "666"))
    triton_module.import_source.cache_clear()
    module = triton_module.import_source(GENERATED)
    assert module.answer() == 42
    assert f"{path} is not what was generated; it is written anew" in caplog.text
    assert path.read_text() == GENERATED
    path.write_text(GENERATED.replace("42", "666"))  # after the check: what a kernel's text is read from is in memory
    assert inspect.getsource(module.answer) == GENERATED


def test_compiled_python_that_lies_beside_the_copy_is_not_run(cache, tmp_path):
    path = copy_of(GENERATED)
    planted = tmp_path / "planted.py"
    planted.write_text(GENERATED.replace("42", "66"))
    os.utime(planted, (path.stat().st_atime, path.stat().st_mtime))
    target = path.parent / "__pycache__" / f"{path.stem}.{py_compile.sys.implementation.cache_tag}.pyc"
    target.parent.mkdir()
    py_compile.compile(str(planted), cfile=str(target), dfile=str(path))
    triton_module.import_source.cache_clear()
    assert triton_module.import_source(GENERATED).answer() == 42


@pytest.mark.parametrize("spoil", [lambda p: p.chmod(0o777), lambda p: (p.rmdir(), p.touch())])
def test_without_a_folder_of_its_own_a_generated_module_runs_from_memory_and_one_line_says_why(spoil, cache, caplog):
    (cache / "triton").mkdir(parents=True)
    spoil(cache / "triton")
    for number in (1, 2):
        module = triton_module.import_source(f"{GENERATED}# {number}\n")
        assert module.answer() == 42
        assert inspect.getsource(module.answer) == GENERATED
    (line,) = [r.message for r in caplog.records]
    assert line.startswith("generated kernels run without a copy on the disk, which profilers read (")
    assert str(cache / "triton") in line
    assert not list(cache.rglob("*.py"))


@needs_root
@needs_compiler
def test_a_cache_of_another_user_is_refused_and_the_setting_is_named(cache):
    (cache / "cpp").mkdir(parents=True)
    os.chown(cache / "cpp", 12345, -1)
    with pytest.raises(CompileError, match="belongs to user 12345.*or set PAGEGEN_CACHE_DIR"):
        cpp_build.build(ANSWER, "answer")
