"""The system headers of generated C++, compiled once: reading them is half of a kernel's compile time.

g++ reads `<folder>/headers.hpp.gch` (50 MB) in place of `headers.hpp` where it was made by the same compiler with the
same flags, and the text otherwise, so nothing depends on it. A file beside it holds the hash of both, which each
process checks once: what is read there becomes part of kernels. It is made when a process compiles its third kernel: a
tuner goes on to compile dozens, a program that serves one model does not.
"""

from __future__ import annotations

import hashlib
import logging
import subprocess
import threading
from collections import Counter

from pagegen import private

log = logging.getLogger(__name__)

WORTH_IT = 3  # making them takes what one kernel does and saves 0.45 s of each
NAME = "headers.hpp"
WORK = ".build-"  # how the folder of a compiler at work begins; `cpp_build` removes what one left that was killed
# Every system header that a template includes.
TEXT = """#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <omp.h>
#include <type_traits>
#include <utility>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif
"""

DIGEST = "sha256"

_compiled: Counter[str] = Counter()  # by this process, for each folder of headers
_checked: set[tuple[str, float]] = set()  # folders that this process found whole, and when they were changed
_making = threading.Lock()


def flags(command: list[str], version: str, folder: private.Folder, key: str, timeout_s: float) -> list[str]:
    """What to add to a compile `command` (a compiler and its flags) that runs in a folder of `folder`, or [] where
    there are no compiled headers. `key` names the compiler, its flags and the CPU; they lie in a folder of that
    name."""
    if "clang" in version:  # has another mechanism, and reads its headers in 0.4 s
        return []
    name = f"headers-{key}"
    with _making:
        _compiled[str(folder.path / name)] += 1
        there = _are_in(folder, name)
        if not there and _compiled[str(folder.path / name)] >= WORTH_IT:
            there = _make(command, folder, name, timeout_s)
    return ["-include", f"../{name}/{NAME}"] if there else []


def _are_in(folder: private.Folder, name: str) -> bool:
    """Whether the headers are there and whole; others are removed."""
    try:
        stamp = str(folder.path / name), folder.age_s(name, 0.0)
        if stamp in _checked:
            return True
        with folder.inner(name) as made:
            whole = made.read(DIGEST, at_most=100) == _digest(made) and made.read(NAME) == TEXT.encode()
    except FileNotFoundError:
        return False
    except (OSError, ValueError) as error:
        log.warning("compiled headers are made anew: %s", error)
        whole = False
    else:
        if not whole:
            log.warning("compiled headers are made anew: %s is not what was compiled", folder.path / name)
    if whole:
        _checked.add(stamp)
    else:
        folder.remove(name)
    return whole


def _digest(made: private.Folder) -> bytes:
    return hashlib.sha256(made.read(f"{NAME}.gch")).hexdigest().encode()


def _make(command: list[str], folder: private.Folder, name: str, timeout_s: float) -> bool:
    """Compiles the headers into the folder `name`, which appears whole or not at all."""
    try:
        with private.scratch(folder, WORK) as work:
            work.write(NAME, TEXT.encode())
            build = [*(flag for flag in command if flag != "-shared"), "-x", "c++-header", NAME, "-o", f"{NAME}.gch"]
            done = subprocess.run(build, cwd=work.place(""), capture_output=True, timeout=timeout_s, check=False)
            if done.returncode:
                return False
            work.restrict(f"{NAME}.gch")
            work.write(DIGEST, _digest(work))
            folder.rename(work.path.name, name)  # fails where another process was faster: theirs are as good
    except (OSError, subprocess.TimeoutExpired):
        return _are_in(folder, name)
    return True


def drop(folder: private.Folder, key: str) -> None:
    """Forgets headers with which a compilation failed that succeeds without."""
    folder.remove(f"headers-{key}")
