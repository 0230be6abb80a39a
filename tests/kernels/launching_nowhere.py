"""Triton's whole way to a launch, with no GPU: a driver that says it is an sm_90 and launches nothing.

Binding, specialising on the very arguments and compiling are Triton's own, tensors are the CPU's, results are garbage.
To be used in a process of its own: `become_sm_90()` replaces the active driver.
"""

from __future__ import annotations

import types
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.driver import driver

LAUNCHED: list[str] = []  # the kernels that would have run, in order


class _Launcher:
    launch_cooperative_grid = False

    def __init__(self, source: Any, metadata: Any) -> None:
        self._name = metadata.name

    def __call__(self, *arguments: Any) -> None:
        LAUNCHED.append(self._name)


class _Driver(DriverBase):
    launcher_cls = _Launcher
    # of an H200: what one program may use of shared memory, in bytes; a loaded binary has a module, a function,
    # registers, spills and the most threads of a program
    utils = types.SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32},
        load_binary=lambda *binary: (1, 1, 64, 0, 1024),
    )

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError("nothing runs here: there is nothing to time")

    def get_device_interface(self) -> Any:
        raise NotImplementedError("there is no device")


def become_sm_90() -> None:
    """From now on this process compiles for sm_90 what it would launch."""
    driver.set_active(_Driver())
