"""Compiles generated C++ into a shared library, once for a source, a compiler and a CPU.

Libraries lie in `settings.cache_dir()/cpp`, a folder of this user alone (`pagegen.private`), under a name that is a
hash of all that decides their content, and appear there by one atomic rename: processes may build the same one at once,
and none sees half a file. A library ends in a hash of its name and itself, which is checked before it is loaded: a file
cut short or overwritten would take the process down when its missing pages are touched, and one of another name would
compute something else. Where a folder of artefacts holds the library of a source, that is loaded instead
(`pagegen.targets.artefacts`), and no compiler is needed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import hashlib
import logging
import os
import platform
import re
import shlex
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from pagegen import private, settings
from pagegen.targets import artefacts, cpp_headers, cpu_features, ready
from pagegen.targets.errors import CannotBuild, CompileError

log = logging.getLogger(__name__)

# -ffp-contract=off: `x * scale - max` must not be fused, see templates/attention.hpp
# -fwrapv: integers of score and mask functions wrap around, as in torch and Triton; without it overflow is undefined
# -O2 with small loops unrolled whole: as fast as -O3 (0.93 to 1.01 of its time) in 1.2 s where that takes 1.4 to 2.6
FLAGS = ("-O2", "-fpeel-loops", "-std=c++20", "-fopenmp", "-ffp-contract=off", "-fwrapv", "-shared", "-fPIC")
# Passes of g++ that are left out: kernels compile in 0.85 of the time (12.2, Zen 4). Without jump threading, which
# gathers what should be spread over a loop, bf16 and float32 in NHD order are 1.02 to 1.09 times as fast; the others
# change nothing. (Not so -fno-gcse, which costs int8 5 %, and -fno-tree-pta, float32 40 %.)
GNU_FLAGS = (
    "-fno-thread-jumps", "-fno-tree-vrp", "-fno-tree-vectorize", "-fno-tree-dominator-opts", "-fno-tree-pre",
    "-fno-rerun-cse-after-loop", "-fno-schedule-insns2",
)  # fmt: skip
# The instruction set of this CPU. Elsewhere the compiler's default: g++ 12 refuses -march=native on RISC-V.
NATIVE = {"x86_64": ("-march=native",), "aarch64": ("-mcpu=native",)}.get(platform.machine(), ())
TIMEOUT_S = 120.0
KEY_VERSION = "2"  # of what a library's file holds
DIGEST_BYTES = 32
LITTER_S = 3600.0  # after which the folder of a compiler that was killed is removed
# What a compiler says where the disk and not the source is at fault.
FULL = tuple(map(os.strerror, (errno.ENOSPC, errno.EDQUOT, errno.EROFS)))
INSTALL = (
    "install a C++20 compiler with OpenMP (Debian, Ubuntu: apt-get install g++; clang++ needs libomp-dev too), "
    "or name one in CXX"
)


@dataclass(frozen=True)
class Compiler:
    """A compiler as it is called, the first line it says about its version, and whether it is g++."""

    command: tuple[str, ...]
    version: str
    gnu: bool

    @property
    def flags(self) -> tuple[str, ...]:
        """What every kernel is compiled with, whatever the instruction set."""
        return FLAGS + GNU_FLAGS if self.gnu else FLAGS


def find_compiler() -> Compiler:
    """The compiler that `settings.cxx()` names. Raises CompileError saying what to install."""
    return _probe(settings.cxx())


@functools.lru_cache(maxsize=8)
def _probe(command_line: str) -> Compiler:
    try:
        first, *rest = shlex.split(command_line)
        # it is run in other folders than this one
        command = (str(Path(first).absolute()) if "/" in first else first, *rest)
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    except (OSError, IndexError, ValueError, subprocess.SubprocessError) as error:  # ValueError: an open quotation
        raise CannotBuild("cpu", "any kernel", f"the compiler {command_line!r} does not run: {INSTALL}") from error
    return Compiler(command, done.stdout.partition("\n")[0], "Free Software Foundation" in done.stdout)


def build(source: str, name: str, *, machine: tuple[str, ...] = NATIVE) -> Path:
    """The shared library for `source`, compiled unless it is there and whole. `name` is for people, in file names and
    errors; `machine` are the flags that choose the instruction set. Raises CompileError."""
    with _own_folder(name) as folder:
        return folder.path / _built(folder, source, name, machine)[0]


def library_bytes(source: str, name: str) -> bytes:
    """The shared library for `source` as the compiler made it for this CPU, to be shipped. Raises CompileError."""
    with _own_folder(name) as folder:
        return _built(folder, source, name, NATIVE)[1]


def path_of(source: str, name: str, *, machine: tuple[str, ...] = NATIVE) -> Path | None:
    """The library for `source` where it is there and whole, None where it is not. Raises CompileError where nothing
    can be compiled."""
    key = _key(source, find_compiler(), machine)
    with _own_folder(name) as folder:
        try:
            return folder.path / f"{key}.so" if _is_whole(key, folder.read(f"{key}.so")) else None
        except OSError:  # not there, or not this user's alone
            return None


def toolchain() -> str:
    """What decides, beside a source, which library it becomes: equal on two machines where one can use what the other
    compiled. Raises CompileError."""
    return _key("", find_compiler(), NATIVE)


def adopt(file_name: str, content: bytes) -> None:
    """Keeps a library that another machine compiled, under the name that it had there. Raises ValueError for a name or
    content that no library has, and CompileError where it cannot be written."""
    if not re.fullmatch(r"[0-9a-f]{32}\.so", file_name):
        raise ValueError(f"file_name must be that of a compiled library, got {file_name!r}")
    if not _is_whole(file_name.removesuffix(".so"), content):
        raise ValueError(f"content must be a whole library, got {len(content)} bytes that do not end in their hash")
    try:
        with _own_folder(file_name) as folder:
            folder.publish(file_name, content)
    except OSError as error:
        raise CannotBuild(
            "cpu", file_name, f"the library cannot be written (set PAGEGEN_CACHE_DIR): {error}"
        ) from error


def workers() -> int:
    """Compilers that are worth running at once: one for each CPU that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def load(source: str, name: str, *, machine: tuple[str, ...] = NATIVE) -> ctypes.CDLL:
    """The library for `source`: from artefacts that this process uses, else built and loaded. A library that is not
    whole (cut short by a full disk, say) is built anew. Raises CompileError."""
    import torch  # noqa: F401  first, so that the library finds torch's OpenMP and shares its threads

    if machine == NATIVE:
        shipped = artefacts.load(source, name)
        if shipped is not None:
            return shipped
    with _own_folder(name) as folder:
        file, _ = _built(folder, source, name, machine)
        try:
            loaded = ctypes.CDLL(folder.place(file))
        except OSError as error:
            raise CompileError("cpu", name, f"the compiled library does not load: {error}") from error
    ready.library(name)
    return loaded


def _key(source: str, compiler: Compiler, machine: tuple[str, ...]) -> str:
    made_by = (*compiler.command, compiler.version, *compiler.flags, *machine)
    parts = (KEY_VERSION, source, *made_by, platform.machine(), *cpu_features.names())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _own_folder(name: str) -> private.Folder:
    """The folder of compiled libraries, private to this user: what lies there is executed."""
    try:
        return private.own_folder(settings.cache_dir() / "cpp")
    except private.NotPrivate as error:
        raise CannotBuild("cpu", name, f"{error}, or set PAGEGEN_CACHE_DIR") from error
    except OSError as error:
        raise CannotBuild("cpu", name, f"the cache folder cannot be made (set PAGEGEN_CACHE_DIR): {error}") from error


def _built(folder: private.Folder, source: str, name: str, machine: tuple[str, ...]) -> tuple[str, bytes]:
    """The name of the library's file, which is whole, and its content without the hash at its end."""
    compiler = find_compiler()
    key = _key(source, compiler, machine)
    file = f"{key}.so"
    try:
        content = folder.read(file)
    except FileNotFoundError:
        return file, _compile(folder, source, name, compiler, machine, key)
    except OSError as error:  # NotPrivate too
        why = str(error)
    else:
        if _is_whole(key, content):
            return file, content[:-DIGEST_BYTES]
        why = f"{folder.path / file} is not what was compiled: cut short, overwritten or of another name"
    log.warning("%s; it is compiled anew", why)
    return file, _compile(folder, source, name, compiler, machine, key)


def _is_whole(key: str, content: bytes) -> bool:
    """Whether a file's content ends in the hash of its name and of what stands before."""
    return content[-DIGEST_BYTES:] == _digest(key, content[:-DIGEST_BYTES])


def _digest(key: str, library: bytes) -> bytes:
    return hashlib.sha256(key.encode() + library).digest()


def _compile(
    folder: private.Folder, source: str, name: str, compiler: Compiler, machine: tuple[str, ...], key: str
) -> bytes:
    """Compiles and publishes a library; returns it without its hash."""
    try:
        _sweep(folder)
        with private.scratch(folder, cpp_headers.WORK) as work:
            work.write("kernel.cpp", source.encode())
            command = [*compiler.command, *compiler.flags, *machine]
            # names within the working folder: nothing of where it lies is in the library, or can lead elsewhere
            files = ["-o", "kernel.so", "kernel.cpp"]
            place = work.place("")
            headers_key = _key(cpp_headers.TEXT, compiler, machine)
            headers = cpp_headers.flags(command, compiler.version, folder, headers_key, TIMEOUT_S)
            done = _run([*command, *headers, *files], name, place)
            if done.returncode != 0 and headers:  # damaged ones (a full disk) are no fault of the source
                done = _run([*command, *files], name, place)
                if done.returncode == 0:
                    cpp_headers.drop(folder, headers_key)
            if done.returncode != 0:
                full = any(reason in done.stderr for reason in FULL)
                raise (CannotBuild if full else CompileError)("cpu", name, explained(done.stderr, compiler))
            work.restrict("kernel.so")
            library = work.read("kernel.so")
        folder.publish(f"{key}.cpp", source.encode())  # beside it, for debuggers and curious people
        folder.publish(f"{key}.so", library + _digest(key, library))  # a loader ignores what follows the last section
        return library
    except OSError as error:
        raise CannotBuild("cpu", name, f"the library cannot be written (set PAGEGEN_CACHE_DIR): {error}") from error


def _run(command: list[str], name: str, folder: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise CompileError("cpu", name, f"the compiler took more than {TIMEOUT_S:.0f} s") from error


def _sweep(folder: private.Folder) -> None:
    """Removes what compilers left that were killed."""
    for work in folder.names():
        if work.startswith(cpp_headers.WORK):
            with contextlib.suppress(OSError):  # another process removes it as well
                if folder.age_s(work, time.time()) > LITTER_S:
                    folder.remove(work)


def explained(output: str, compiler: Compiler) -> str:
    """The first error of a compiler's output, and what to install where the compiler and not the source is at fault."""
    error = first_error(output)
    if re.search(r"\bomp\.h\b|-l[gi]?omp5?\b|-fopenmp", output):
        return f"{error}: {compiler.version} comes without OpenMP: {INSTALL}"
    if "-std=c++20" in output:
        return f"{error}: {compiler.version} knows no C++20: {INSTALL}"
    return error


def first_error(output: str) -> str:
    """The first line of a compiler's output that reports an error, less the temporary path before it."""
    lines = output.splitlines()
    for line in lines:
        found = re.search(r"(?:\d+:\d+: )?(?:fatal )?error: .*", line)
        if found:
            return found[0]
    return lines[0] if lines else "the compiler failed and said nothing"
