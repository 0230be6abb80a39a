"""The system headers of generated C++, compiled once: reading them is half of a kernel's compile time.

g++ reads `<folder>/headers.hpp.gch` (50 MB) in place of `headers.hpp` where it was made by the same compiler with the
same flags, and the text otherwise, so nothing depends on it. It is made when a process compiles its third kernel: a
tuner goes on to compile dozens, a program that serves one model does not.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import threading
from collections import Counter
from pathlib import Path

WORTH_IT = 3  # making them takes what one kernel does and saves 0.45 s of each
NAME = "headers.hpp"
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

_compiled: Counter[Path] = Counter()  # by this process, for each folder of headers
_making = threading.Lock()


def flags(command: list[str], version: str, folder: Path, key: str, timeout_s: float) -> list[str]:
    """What to add to a compile `command` (a compiler and its flags), or [] where there are no compiled headers. `key`
    names the compiler, its flags and the CPU; they lie in a folder of that name in `folder`."""
    if "clang" in version:  # has another mechanism, and reads its headers in 0.4 s
        return []
    made = folder / f"headers-{key}"
    with _making:
        _compiled[made] += 1
        there = _are_in(made) or (_compiled[made] >= WORTH_IT and _make(command, made, timeout_s))
    return ["-include", str(made / NAME)] if there else []


def _are_in(made: Path) -> bool:
    return (made / f"{NAME}.gch").exists()


def _make(command: list[str], made: Path, timeout_s: float) -> bool:
    """Compiles the headers into the folder `made`, which appears whole or not at all."""
    try:
        work = Path(tempfile.mkdtemp(prefix=".build-", dir=made.parent))
    except OSError:
        return False
    try:
        text = work / NAME
        text.write_text(TEXT, encoding="utf-8")
        build = [*(flag for flag in command if flag != "-shared"), "-x", "c++-header", str(text), "-o", f"{text}.gch"]
        if subprocess.run(build, capture_output=True, timeout=timeout_s, check=False).returncode:
            return False
        work.rename(made)  # fails where another process was faster: theirs are as good
    except (OSError, subprocess.TimeoutExpired):
        return _are_in(made)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return True


def drop(folder: Path, key: str) -> None:
    """Forgets headers with which a compilation failed that succeeds without."""
    shutil.rmtree(folder / f"headers-{key}", ignore_errors=True)
