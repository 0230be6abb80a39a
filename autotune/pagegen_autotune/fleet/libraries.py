"""Compiled C++ kernels on their way from the node that compiled them to the nodes that time them.

A library is named by all that decides its content (source, compiler, flags, CPU), and ends in a hash of itself: what
does not fit a node is not found there, and compiled.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pagegen.codegen import cpp
from pagegen.spec import AttentionSpec, CacheLayout, CppVariant, Variant
from pagegen.targets import cpp_build
from pagegen.targets.errors import CompileError


@dataclass(frozen=True)
class Library:
    """A shared library: its file's name, and its bytes."""

    name: str
    content: bytes = field(repr=False)


def built(spec: AttentionSpec, layout: CacheLayout, variant: CppVariant) -> Library:
    """The library of a variant, compiled unless it is there. Raises CompileError and OSError."""
    path = cpp_build.build(cpp.render_attention(spec, layout, variant), variant.name)
    return Library(path.name, path.read_bytes())


def of(spec: AttentionSpec, layout: CacheLayout, variants: Sequence[Variant]) -> dict[Variant, Library]:
    """The libraries of variants that were compiled here; those that are not there any more are left out."""
    found: dict[Variant, Library] = {}
    for variant in variants:
        if isinstance(variant, CppVariant):
            path = cpp_build.path_of(cpp.render_attention(spec, layout, variant), variant.name)
            if path is not None:
                found[variant] = Library(path.name, path.read_bytes())
    return found


def adopt(given: Iterable[Library]) -> None:
    """Puts libraries where `cpp_build.build` looks for them. One that cannot be put there is compiled when needed."""
    for library in given:
        try:
            cpp_build.adopt(library.name, library.content)
        except CompileError:
            continue
