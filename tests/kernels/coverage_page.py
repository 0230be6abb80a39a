"""What docs/coverage.json holds, and docs/coverage.md from it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from features import FEATURES, TARGETS

_INTRODUCTION = """# Coverage

What the kernel family computes, which tests verify it against the float64 reference, and what Triton {triton} makes of
the generated kernels. Written by `make coverage`; `tests/unit/test_coverage.py` fails when it is no longer current.

A cell says registers a thread, and behind a plus sign what spills (bytes a thread on NVIDIA, registers on AMD; nothing
where there is no plus sign), of the decode kernel and of the one for batches with longer queries; for the writers, of
their one kernel. The variants are the defaults, with what a row's name says changed. Shared memory, resident programs a
multiprocessor, times and variants are in [coverage.json](coverage.json).

{kernels} kernels were compiled in {seconds} s by {processes} processes ({cpu_seconds} s of CPU time).
Templates: sha256 {template_hash}.
"""


def document(
    rows: Sequence[dict[str, Any]], *, template_hash: str, jobs: int, seconds: float, cpu_seconds: float
) -> dict[str, Any]:
    """What docs/coverage.json holds."""
    import triton

    order = {feature.name: i for i, feature in enumerate(FEATURES)}
    targets = [str(target) for target in TARGETS]
    return {
        "triton": triton.__version__,
        "template_hash": template_hash,
        "processes": jobs,
        "seconds": round(seconds),
        "cpu_seconds": round(cpu_seconds),
        "targets": targets,
        "features": definitions(),
        "kernels": sorted(rows, key=lambda r: (order[r["feature"]], targets.index(r["target"]), r["kernel"])),
    }


def to_text(found: dict[str, Any]) -> str:
    """JSON with a line a feature and a line a kernel, so that a change is a short diff."""
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in found.items() if not isinstance(value, list)]
    for key in ("targets", "features", "kernels"):
        items = ",\n  ".join(json.dumps(item) for item in found[key])
        lines.append(f"{json.dumps(key)}: [\n  {items}\n ]")
    return "{\n " + ",\n ".join(lines) + "\n}\n"


def definitions() -> list[dict[str, Any]]:
    """The features as the table names and defines them."""
    return [
        {
            "group": feature.group,
            "name": feature.name,
            "cpu": list(feature.cpu),
            "interpreter": list(feature.interpreter),
            **feature.definition(),
        }
        for feature in FEATURES
    ]


def problems(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each kernel that does not compile, or spills and is not excused."""
    by_name = {feature.name: feature for feature in FEATURES}
    lines = []
    for row in rows:
        where = f"{row['feature']}, {row['kernel']}, {row['target']}"
        if "error" in row:
            lines.append(f"{where}: {row['error']}")
        elif row["spills"] and row["target"] not in by_name[row["feature"]].excused:
            lines.append(f"{where}: spills {row['spills']} ({row.get('variant', 'writer')})")
    return lines


def render(document: dict[str, Any]) -> str:
    """The page's text."""
    kernels = {(k["feature"], k["target"], k["kernel"]): k for k in document["kernels"]}
    legend = _legend(document["features"])
    facts = {**document, "kernels": len(document["kernels"]), "template_hash": document["template_hash"][:12]}
    parts = [_INTRODUCTION.format(**facts)]
    for group in dict.fromkeys(feature["group"] for feature in document["features"]):
        parts.append(f"\n## {group}\n\n{_row(['feature', 'CPU', 'interpreter', *document['targets']])}")
        parts.append(_row(["---"] * (3 + len(document["targets"]))))
        for feature in document["features"]:
            if feature["group"] == group:
                tests = [_tests(feature[side], legend) for side in ("cpu", "interpreter")]
                cells = [_cell(feature["name"], target, kernels) for target in document["targets"]]
                parts.append(_row([feature["name"], *tests, *cells]))
    parts.append(_exceptions())
    parts.append("\n## Tests\n\n" + "".join(f"- {code}: `{test}`\n" for test, code in legend.items()))
    return "".join(parts)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |\n"


def _legend(features: Sequence[dict[str, Any]]) -> dict[str, str]:
    """A short code for each test, without its cases: C1, C2, ... on the CPU target, I1, ... in the interpreter."""
    legend: dict[str, str] = {}
    for side, letter in (("cpu", "C"), ("interpreter", "I")):
        names = dict.fromkeys(test.partition("[")[0] for feature in features for test in feature[side])
        legend |= {name: f"{letter}{number}" for number, name in enumerate(names, 1)}
    return legend


def _tests(tests: Sequence[str], legend: dict[str, str]) -> str:
    cells = []
    for test in tests:
        name, _, case = test.partition("[")
        cells.append(f"{legend[name]} {case.removesuffix(']')}".strip())
    return ", ".join(cells)


def _cell(feature: str, target: str, kernels: dict[tuple[str, str, str], dict[str, Any]]) -> str:
    found = [kernels[key] for kind in ("decode", "ragged", "write") if (key := (feature, target, kind)) in kernels]
    if not found:
        return "-"
    shown = []
    for kernel in found:
        spills = f"+{kernel['spills']}" if kernel.get("spills") else ""
        shown.append("does not compile" if "error" in kernel else f"{kernel['registers']}{spills}")
    return " / ".join(shown)


def _exceptions() -> str:
    lines = []
    for feature in FEATURES:
        for what, reasons in (("not compiled for", feature.absent), ("may spill on", feature.excused)):
            for reason in dict.fromkeys(reasons.values()):
                where = ", ".join(target for target in reasons if reasons[target] == reason)
                lines.append(f"- {feature.name}, {what} {where}: {reason}\n")
    return "\n## Exceptions\n\n" + ("".join(lines) or "None.\n")
