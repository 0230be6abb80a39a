"""Compiling what serves attention here, to be shipped to machines that have no compiler: `pagegen build`."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagegen import __version__, private
from pagegen.codegen import cpp
from pagegen.selection.ladder import rule_for
from pagegen.spec import AttentionSpec, CacheLayout, CppVariant, DispatchRule, Target, check
from pagegen.targets import artefacts, cpp_build, cpu_features

if TYPE_CHECKING:
    from pagegen.db import Database

# What `pagegen.cache`, a layer above, compiles as one text: `prefix_compiled.SOURCES`.
CACHE_SOURCES = tuple(Path(__file__).parents[1] / "cache" / name for name in ("prefix_index.cpp", "steps.cpp"))
# Those who serve are other users than those who build: everybody may read it.
FILE_MODE, FOLDER_MODE = 0o644, 0o755
_OWN = re.compile(r"[0-9a-f]{64}\.(?:so|cpp)|\..*\.tmp")  # what a build leaves that was stopped
OTHER_HEAD = "it holds kernels of another pagegen, compiler or CPU: name a new folder, or remove that one"


@dataclass(frozen=True, kw_only=True)
class Built:
    """What a folder of artefacts holds after a build; `sha256` is the manifest's, `compiled` are the kernels of this
    build."""

    path: Path
    sha256: str
    head: artefacts.Head
    kernels: tuple[artefacts.Kernel, ...]
    compiled: tuple[str, ...]
    rules: dict[tuple[AttentionSpec, CacheLayout], DispatchRule]


def build(
    wanted: Iterable[tuple[AttentionSpec, CacheLayout]], folder: str | os.PathLike[str],
    *, db: Database | str | None = None,
) -> Built:  # fmt: skip
    """Compiles for this CPU the variants that `db` chooses for each (spec, layout), the default ones, what writes to
    and reads of caches, and the prefix index. Writes sources, libraries, rules and a manifest to `folder`; what lies
    there from earlier builds stays, where the same pagegen and compiler made it.

    Raises CompileError, `artefacts.Refused` for a folder that holds something else, ValueError for a spec that no
    generated kernel serves, and OSError where the folder cannot be written.
    """
    head = head_here()
    rules: dict[tuple[AttentionSpec, CacheLayout], DispatchRule] = {}
    sources = {
        cpp.render_cache_ops(): "write_kv, copy_blocks and merge_states",
        cpp.render_probes(): "probes of memory and arithmetic",
        "".join(path.read_text(encoding="utf-8") for path in CACHE_SOURCES): "the prefix index",
    }
    asked = list(wanted)
    if not asked:
        raise ValueError("wanted must hold at least one spec and layout, got none")
    for spec, layout in asked:
        layout = layout.canonical(spec.num_kv_heads)
        rule = _rule(spec, layout, db)
        if rule.evidence.get("kind") == "measured":  # what is predicted, or no choice at all, the other machine can do
            rules[spec, layout] = rule
        for variant in dict.fromkeys((*rule.variants, *_defaults(spec, layout))):
            assert isinstance(variant, CppVariant)  # the family of the CPU
            sources.setdefault(cpp.render_attention(spec, layout, variant), variant.name)
    place = Path(folder).absolute()
    place.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    with private.open_folder(place, owners=(os.geteuid(),)) as opened:
        before = _present(opened, head)  # refuses a folder before minutes of compiling
        with ThreadPoolExecutor(cpp_build.workers()) as pool:
            made = list(pool.map(lambda item: _compiled(opened, *item), sources.items()))
        kernels = {**before[0], **{kernel.source: kernel for kernel in made}}
        rules = {**before[1], **rules}
        text = manifest(head, kernels.values(), rules)
        opened.publish(artefacts.MANIFEST, text, mode=FILE_MODE)
    return Built(
        path=place, sha256=hashlib.sha256(text).hexdigest(), head=head, kernels=tuple(kernels.values()),
        compiled=tuple(sources.values()), rules=rules,
    )  # fmt: skip


def head_here() -> artefacts.Head:
    """What kernels that are compiled here are made by, and for. Raises CompileError where no compiler works."""
    compiler = cpp_build.find_compiler()
    return artefacts.Head(
        pagegen=__version__,
        machine=platform.machine(),
        code_hash=cpp.template_hash(),
        compiler=compiler.version,
        flags=(*compiler.flags, *cpp_build.NATIVE),
        cpu_features=cpu_features.instructions(),
    )


def manifest(
    head: artefacts.Head,
    kernels: Iterable[artefacts.Kernel],
    rules: dict[tuple[AttentionSpec, CacheLayout], DispatchRule],
) -> bytes:
    """The manifest's text: a kernel and a rule a line, in an order that depends on the content alone."""
    fields: dict[str, Any] = asdict(head)
    fields["kernels"] = sorted((asdict(kernel) for kernel in kernels), key=lambda one: (one["name"], one["source"]))
    fields["rules"] = sorted(
        (
            {"spec": spec.to_dict(), "layout": layout.to_dict(), "rule": rule.to_dict()}
            for (spec, layout), rule in rules.items()
        ),
        key=lambda one: json.dumps(one, sort_keys=True),
    )
    lines = []
    for name, value in fields.items():
        if name in ("kernels", "rules"):
            rows = ",\n".join("  " + json.dumps(row, allow_nan=False) for row in value)
            lines.append(f' "{name}": [\n{rows}\n ]')
        else:
            lines.append(f' "{name}": {json.dumps(value)}')
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def _rule(spec: AttentionSpec, layout: CacheLayout, db: Database | str | None) -> DispatchRule:
    from pagegen import targets

    check.instance("each spec of wanted", spec, AttentionSpec)
    target = Target("cpu")
    reason = targets.unsupported(spec, target)
    if reason is not None:
        raise ValueError(f"no kernel is compiled for {spec}: {reason}")
    return rule_for(spec, layout, target, db)


def _defaults(spec: AttentionSpec, layout: CacheLayout) -> Iterable[CppVariant]:
    """What serves where a choice does not load."""
    from pagegen.targets import cpu

    return (cpu.default_variant(spec, layout, decode=decode) for decode in (True, False))


def _present(
    folder: private.Folder, head: artefacts.Head
) -> tuple[dict[str, artefacts.Kernel], dict[tuple[AttentionSpec, CacheLayout], DispatchRule]]:
    try:
        text = folder.read(artefacts.MANIFEST, at_most=artefacts.MAX_MANIFEST_BYTES)
    except FileNotFoundError:
        if not all(_OWN.fullmatch(name) for name in folder.names()):
            raise artefacts.Refused(f"{folder.path} holds other files and no manifest: name a new folder") from None
        return {}, {}
    found, kernels, rules = artefacts.parse(text)
    if found != head:
        raise artefacts.Refused(f"{folder.path} cannot be added to: {OTHER_HEAD}")
    return kernels, rules


def _compiled(folder: private.Folder, source: str, name: str) -> artefacts.Kernel:
    library = cpp_build.library_bytes(source, name)
    digest = hashlib.sha256(source.encode()).hexdigest()
    folder.publish(f"{digest}.cpp", source.encode(), mode=FILE_MODE)
    folder.publish(f"{digest}.so", library, mode=FILE_MODE)
    return artefacts.Kernel(name=name, source=digest, library=hashlib.sha256(library).hexdigest())
