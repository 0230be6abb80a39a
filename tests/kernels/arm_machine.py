"""An AArch64 machine for tests on another one: kernels by Debian's cross compiler, run by QEMU's user-mode emulator."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import shutil
import struct
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from pagegen import paths
from pagegen.targets import cpu, cpu_cache
from pagegen.targets.cache_call import WriteCall
from pagegen.targets.call import AttentionCall

CXX = "aarch64-linux-gnu-g++"
OBJDUMP = "aarch64-linux-gnu-objdump"
EMULATOR = "qemu-aarch64"
PACKAGES = "g++-aarch64-linux-gnu qemu-user"
TIMEOUT_S = 120


def absent() -> str | None:
    """What is missing here to compile for AArch64 and run it, or None."""
    missing = [tool for tool in (CXX, EMULATOR) if shutil.which(tool) is None]
    return f"needs {' and '.join(missing)} (Debian, Ubuntu: apt-get install {PACKAGES})" if missing else None


@functools.cache
def driver(folder: Path) -> Path:
    """The program that loads a library and calls it, compiled into `folder`."""
    program = folder / "arm-driver"
    command = [CXX, "-std=c++20", "-O1", f"-I{paths.data('templates')}", "-o", program]
    subprocess.run([*command, Path(__file__).with_name("arm_driver.cpp"), "-ldl"], check=True, timeout=TIMEOUT_S)
    return program


@functools.cache
def system_root() -> Path:
    """The folder in which the emulated loader finds lib/libc.so.6."""
    command = [CXX, "-print-file-name=libc.so.6"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=TIMEOUT_S)
    return Path(done.stdout.strip()).parents[1]


class ArmLibrary:
    """Stands in for the `ctypes.CDLL` of a library for AArch64. `cpu` is a model that QEMU knows.

    `memory` are the tensors that a call's pointers may point at, `written` those of them that it writes.
    """

    def __init__(self, library: Path, cpu: str, folder: Path) -> None:
        self._command = [EMULATOR, "-L", system_root(), "-cpu", cpu, driver(folder), library]
        self.memory: list[Tensor] = []
        self.written: list[Tensor] = []
        self.called: set[str] = set()

    def __getattr__(self, name: str) -> ArmFunction:
        if not name.startswith("pagegen_"):
            raise AttributeError(name)
        function = ArmFunction(self, name)
        setattr(self, name, function)
        return function

    def run(self, function: str, args: bytes) -> None:
        """Calls `function` on copies of the memory and stores what it wrote."""
        self.called.add(function)
        regions = _regions(self.memory)
        written = [any(begin <= t.data_ptr() < end for t in self.written) for begin, end in regions]
        request = struct.pack("q", len(args)) + args + struct.pack("q", len(regions))
        for (begin, end), output in zip(regions, written, strict=True):
            request += struct.pack("3q", begin, end - begin, output)
        request += b"".join(ctypes.string_at(begin, end - begin) for begin, end in regions)
        command = [*self._command, function]
        done = subprocess.run(command, input=request, capture_output=True, timeout=TIMEOUT_S, check=False)
        if done.returncode:
            raise RuntimeError(f"{function} ended with {done.returncode}: {done.stderr.decode()}")
        answer = done.stdout
        for (begin, end), output in zip(regions, written, strict=True):
            if output:
                ctypes.memmove(begin, answer[: end - begin], end - begin)
                answer = answer[end - begin :]
        assert not answer


class ArmFunction:
    """Stands in for a function of a `ctypes.CDLL` that takes the address of a struct of 64-bit words."""

    argtypes: Any = None
    restype: Any = None

    def __init__(self, library: ArmLibrary, name: str) -> None:
        self._library = library
        self._name = name

    def __call__(self, args: bytes) -> int:
        self._library.run(self._name, args)
        return 0


class ArmAttention:
    """An attention kernel on the emulated machine, called as `CpuAttention` is."""

    def __init__(self, library: ArmLibrary, *kernel: Any) -> None:
        self._library = library
        self._kernel = cpu.CpuAttention(library, *kernel)  # type: ignore[arg-type]

    def __call__(self, call: AttentionCall) -> None:
        self._library.memory = list(tensors_of(call))
        self._library.written = [tensor for tensor in (call.out, call.lse) if tensor is not None]
        self._kernel(call)


def tensors_of(call: Any) -> Iterator[Tensor]:
    """Every tensor of a call, those of calls within it included."""
    for field in dataclasses.fields(call):
        value = getattr(call, field.name)
        if isinstance(value, Tensor):
            yield value
        elif dataclasses.is_dataclass(value):
            yield from tensors_of(value)


def _regions(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    """(first byte, past the last byte) of what the tensors lie on; tensors that overlap are one region."""
    spans = []
    for tensor in tensors:
        elements = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if tensor.numel():
            spans.append((tensor.data_ptr(), tensor.data_ptr() + elements * tensor.element_size()))
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if merged and begin < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def divert(library: ArmLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `pagegen.write_kv`, `rope_write_kv` and `copy_blocks` call the emulated machine's library."""
    write, copy = cpu_cache.write, cpu_cache.copy_blocks

    def writing(call: WriteCall) -> None:
        library.memory = list(tensors_of(call))
        rotated = call.rotation.rotated if call.rotation else None
        library.written = [tensor for tensor in (call.k_cache, call.v_cache, rotated) if tensor is not None]
        write(call)

    def copying(k_cache: Tensor, v_cache: Tensor | None, pairs: Tensor) -> None:
        library.written = [cache for cache in (k_cache, v_cache) if cache is not None]
        library.memory = [*library.written, pairs]
        copy(k_cache, v_cache, pairs)

    monkeypatch.setattr(cpu, "library", lambda: library)
    monkeypatch.setattr(cpu_cache, "write", writing)
    monkeypatch.setattr(cpu_cache, "copy_blocks", copying)
