"""docs/compatibility.md, from what tests recorded: `make compatibility` runs the marked tests and writes both files.

A test says what it shows by `@pytest.mark.compat(host, feature)`. Its outcome is recorded with the version of the host
that it ran with: the installed distribution's of that name, or what the test says by
`record_property("host_version", ...)`.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"
TITLES = {"torch": "PyTorch", "transformers": "Hugging Face transformers", "vllm": "vLLM", "sglang": "SGLang"}
HEAD = """# Compatibility

What was seen to work, with which version of the host library, and the test that shows it. `make compatibility` runs the
tests and writes this page from what they recorded; cases are models, layouts or options of one test. No test here ran
on a GPU: those wait for one in `tests/gpu`.
"""
Row = dict[str, Any]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-compatibility", action="store_true", help="write docs/compatibility.json and .md")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "compat(host, feature): what a test shows to work, for docs/compatibility.md")
    if config.getoption("--record-compatibility"):
        config.pluginmanager.register(Recorder(config.rootpath), "compatibility-recorder")


class Recorder:
    """Collects a row for each marked test that ran or was skipped."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._rows: list[Row] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        report = yield
        for marker in item.iter_markers("compat"):
            if report.when == "call" or (report.when == "setup" and report.skipped):
                self._rows.append(self._row(item, report, *marker.args))
        return report

    def _row(self, item: pytest.Item, report: pytest.TestReport, host: str, feature: str) -> Row:
        said = dict(report.user_properties).get("host_version")
        name, _, case = item.name.partition("[")
        return {
            "host": host,
            "version": said or _version(host),
            "feature": feature,
            "test": f"{item.path.relative_to(self._root)}::{name}",
            "case": case.rstrip("]"),
            "outcome": report.outcome,
            "reason": report.longrepr[2].removeprefix("Skipped: ") if report.skipped else "",
        }

    def pytest_sessionfinish(self) -> None:
        rows = sorted(self._rows, key=lambda row: (list(TITLES).index(row["host"]), row["test"], row["case"]))
        text = "[\n" + ",\n".join(f" {json.dumps(row)}" for row in rows) + "\n]\n"
        (DOCS / "compatibility.json").write_text(text, encoding="utf-8")
        (DOCS / "compatibility.md").write_text(render(rows), encoding="utf-8")


def _version(host: str) -> str:
    try:
        return importlib.metadata.version(host)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def render(rows: list[Row]) -> str:
    """The page."""
    found: dict[tuple[str, str, str, str], list[Row]] = defaultdict(list)
    for row in rows:
        found[row["host"], row["version"], row["feature"], row["test"]].append(row)
    parts = [HEAD]
    for host, title in TITLES.items():
        groups = {key: value for key, value in found.items() if key[0] == host}
        if groups:
            parts.append(f"\n## {title}\n\n| version | feature | result | test |\n| --- | --- | --- | --- |\n")
            parts += [
                f"| {version} | {feature} | {_result(cases)} | `{test}` |\n"
                for (_, version, feature, test), cases in groups.items()
            ]
    return "".join(parts)


def _result(rows: list[Row]) -> str:
    """ "passes (llama, gemma3)", or what failed, or why nothing ran."""
    if all(row["outcome"] == "skipped" for row in rows):
        return f"not run: {rows[0]['reason']}"
    failed = [row["case"] or "the test" for row in rows if row["outcome"] == "failed"]
    if failed:
        return f"**fails** ({', '.join(failed)})"
    cases = [row["case"] for row in rows if row["case"] and row["outcome"] == "passed"]
    shown = ", ".join(cases) if len(cases) < 10 else f"{len(cases)} cases"
    return f"passes ({shown})" if shown else "passes"
