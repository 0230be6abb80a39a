"""What this process compiled, or loaded compiled: so that serving can be shown to compile nothing."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

_LIBRARIES: list[str] = []
_SHIPPED: list[str] = []
_MODULES: list[ModuleType] = []


def library(name: str) -> None:
    """Notes a C++ library that was loaded."""
    _LIBRARIES.append(name)


def shipped_library(name: str) -> None:
    """Notes a C++ library that was loaded from artefacts."""
    _SHIPPED.append(name)


def shipped() -> tuple[str, ...]:
    """A name for each C++ library that this process loaded from artefacts: compiled elsewhere, so not in `compiled`."""
    return tuple(_SHIPPED)


def module(generated: ModuleType) -> None:
    """Notes a module of Triton kernels; what Triton compiles of them is read off the kernels."""
    _MODULES.append(generated)


def compiled() -> tuple[str, ...]:
    """A name for each C++ library that this process compiled or loaded, each Triton kernel that it generated, and each
    specialisation that Triton compiled of one. It only grows: what it holds after `pagegen.prepare` and after serving
    is the same where serving compiled nothing."""
    return (*_LIBRARIES, *_triton())


def _triton() -> Iterator[str]:
    for generated in tuple(_MODULES):
        yield generated.__name__
        for name, kernel in vars(generated).items():
            for device, (kernels, *_) in getattr(kernel, "device_caches", {}).items():
                yield from (f"{generated.__name__}.{name} on {device}: {key}" for key in kernels)
