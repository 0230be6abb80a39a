"""Compiles generated C++ into a shared library, once for a source, a compiler and a CPU.

Libraries lie in `settings.cache_dir()/cpp` under a name that is a hash of all that decides their content, and
appear there by one atomic rename: processes may build the same one at once, and none sees half a file. A library
ends in a hash of itself, which is checked before it is loaded: a file cut short or overwritten would take the process
down when its missing pages are touched.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from pagegen import settings
from pagegen.targets import cpp_headers, ready
from pagegen.targets.errors import CompileError

# -ffp-contract=off: `x * scale - max` must not be fused, see templates/attention.hpp
# -fwrapv: integers of score and mask functions wrap around, as in torch and Triton; without it overflow is undefined
# -O2 with small loops unrolled whole: as fast as -O3 (0.93 to 1.01 of its time) in 1.2 s where that takes 1.4 to 2.6
FLAGS = ("-O2", "-fpeel-loops", "-std=c++20", "-fopenmp", "-ffp-contract=off", "-fwrapv", "-shared", "-fPIC")
# The instruction set of this CPU. Elsewhere the compiler's default: g++ 12 refuses -march=native on RISC-V.
NATIVE = {"x86_64": ("-march=native",), "aarch64": ("-mcpu=native",)}.get(platform.machine(), ())
TIMEOUT_S = 120.0
LITTER_S = 3600.0  # after which the folder of a compiler that was killed is removed
INSTALL = (
    "install a C++20 compiler with OpenMP (Debian, Ubuntu: apt-get install g++; clang++ needs libomp-dev too), "
    "or name one in CXX"
)


@dataclass(frozen=True)
class Compiler:
    """A compiler as it is called, and the first line it says about its version."""

    command: tuple[str, ...]
    version: str


def find_compiler() -> Compiler:
    """The compiler that `settings.cxx()` names. Raises CompileError saying what to install."""
    return _probe(settings.cxx())


@functools.lru_cache(maxsize=8)
def _probe(command_line: str) -> Compiler:
    try:
        command = tuple(shlex.split(command_line))
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    except (OSError, IndexError, ValueError, subprocess.SubprocessError) as error:  # ValueError: an open quotation
        raise CompileError("cpu", "any kernel", f"the compiler {command_line!r} does not run: {INSTALL}") from error
    return Compiler(command, done.stdout.partition("\n")[0])


@functools.cache
def cpu_features() -> tuple[str, ...]:
    """The instruction-set names that the kernel reports for the first CPU ("avx2"), sorted; () where unknown."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return ()
    found = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", cpuinfo.read_text(encoding="utf-8"), re.MULTILINE)
    return tuple(sorted(set(found[1].split()))) if found else ()


def build(source: str, name: str, *, machine: tuple[str, ...] = NATIVE) -> Path:
    """The shared library for `source`, compiled unless it is there. `name` is for people, in file names and
    errors; `machine` are the flags that choose the instruction set. Raises CompileError."""
    compiler = find_compiler()
    folder = _own_folder(name)
    library = folder / f"{_key(source, compiler, machine)}.so"
    if not _is_whole(library):
        _compile(source, name, compiler, machine, library)
    return library


def path_of(source: str, name: str, *, machine: tuple[str, ...] = NATIVE) -> Path | None:
    """The library for `source` where it is there and whole, None where it is not. Raises CompileError where nothing
    can be compiled."""
    library = _own_folder(name) / f"{_key(source, find_compiler(), machine)}.so"
    return library if _is_whole(library) else None


def toolchain() -> str:
    """What decides, beside a source, which library it becomes: equal on two machines where one can use what the other
    compiled. Raises CompileError."""
    return _key("", find_compiler(), NATIVE)


def adopt(file_name: str, content: bytes) -> None:
    """Keeps a library that another machine compiled, under the name that it had there. Raises ValueError for a name or
    content that no library has, and CompileError where it cannot be written."""
    if not re.fullmatch(r"[0-9a-f]{32}\.so", file_name):
        raise ValueError(f"file_name must be that of a compiled library, got {file_name!r}")
    if hashlib.sha256(content[:-32]).digest() != content[-32:]:
        raise ValueError(f"content must be a whole library, got {len(content)} bytes that do not end in their hash")
    library = _own_folder(file_name) / file_name
    if _is_whole(library):
        return
    try:
        work = Path(tempfile.mkdtemp(prefix=".build-", dir=library.parent))
        try:
            with (work / "kernel.so").open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            (work / "kernel.so").replace(library)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise _unwritable(file_name, error) from error


def workers() -> int:
    """Compilers that are worth running at once: one for each CPU that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def load(source: str, name: str, *, machine: tuple[str, ...] = NATIVE) -> ctypes.CDLL:
    """Builds and loads. A library that is not whole (cut short by a full disk, say) is built anew."""
    import torch  # noqa: F401  first, so that the library finds torch's OpenMP and shares its threads

    library = build(source, name, machine=machine)
    try:
        loaded = ctypes.CDLL(str(library))
    except OSError as error:
        raise CompileError("cpu", name, f"the compiled library does not load: {error}") from error
    ready.library(name)
    return loaded


def _key(source: str, compiler: Compiler, machine: tuple[str, ...]) -> str:
    parts = (source, *compiler.command, compiler.version, *FLAGS, *machine, platform.machine(), *cpu_features())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _own_folder(name: str) -> Path:
    """The folder of compiled libraries, private to this user: what lies there is executed."""
    folder = settings.cache_dir() / "cpp"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise CompileError("cpu", name, f"the cache folder cannot be made (set PAGEGEN_CACHE_DIR): {error}") from error
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise CompileError("cpu", name, f"{folder} must be writable by you alone, since what lies in it is executed")
    return folder


def _compile(source: str, name: str, compiler: Compiler, machine: tuple[str, ...], library: Path) -> None:
    _sweep(library.parent)
    try:
        work = Path(tempfile.mkdtemp(prefix=".build-", dir=library.parent))
    except OSError as error:
        raise _unwritable(name, error) from error
    try:
        text, made = work / "kernel.cpp", work / "kernel.so"
        text.write_text(source, encoding="utf-8")
        command = [*compiler.command, *FLAGS, *machine]
        files = ["-o", str(made), str(text)]
        key = _key(cpp_headers.TEXT, compiler, machine)
        headers = cpp_headers.flags(command, compiler.version, library.parent, key, TIMEOUT_S)
        done = _run([*command, *headers, *files], name)
        if done.returncode != 0 and headers:  # damaged ones (a full disk) are no fault of the source
            done = _run([*command, *files], name)
            if done.returncode == 0:
                cpp_headers.drop(library.parent, key)
        if done.returncode != 0:
            raise CompileError("cpu", name, explained(done.stderr, compiler))
        digest = hashlib.sha256(made.read_bytes()).digest()
        with made.open("ab") as written:
            written.write(digest)  # a loader ignores what stands behind the last section
            written.flush()
            os.fsync(written.fileno())
        text.replace(library.with_suffix(".cpp"))  # beside it, for debuggers and curious people
        made.replace(library)
    except OSError as error:
        raise _unwritable(name, error) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _run(command: list[str], name: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise CompileError("cpu", name, f"the compiler took more than {TIMEOUT_S:.0f} s") from error


def _sweep(folder: Path) -> None:
    """Removes what compilers left that were killed."""
    for work in folder.glob(".build-*"):
        with contextlib.suppress(OSError):  # another process removes it as well
            if time.time() - work.stat().st_mtime > LITTER_S:
                shutil.rmtree(work, ignore_errors=True)


def _is_whole(library: Path) -> bool:
    """Whether the file is there and ends in the hash of what stands before."""
    try:
        content = library.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-32]).digest() == content[-32:]


def _unwritable(name: str, error: OSError) -> CompileError:
    return CompileError("cpu", name, f"the library cannot be written (set PAGEGEN_CACHE_DIR): {error}")


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
