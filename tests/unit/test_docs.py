"""The site: what is written from the code names all of it, what a page quotes is there, what was built is checked."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import json
import re
from pathlib import Path
from types import ModuleType

import click
import pytest

import pagegen
from pagegen.cli.main import main
from pagegen.db.schema import metadata

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def load_hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_hooks", DOCS / "hooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HOOKS = load_hooks()
MODULES = [module for _, modules, _ in HOOKS.API.values() for module in modules]
# Constants, whose docstrings stand behind them in the source: no value carries one
CONSTANTS = {"pagegen.spec.DTYPES", "pagegen.selection.RADIUS", "pagegen.serving.Preempt"}


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return HOOKS.generated()


def test_every_module_of_public_names_is_on_one_page_of_the_reference():
    assert {*pagegen._HOMES, "pagegen_autotune", "pagegen.serving"} <= set(MODULES)
    assert len(MODULES) == len(set(MODULES))


def test_every_public_name_is_in_the_reference(pages):
    reference = "\n".join(text for path, text in pages.items() if path.startswith("reference/"))
    public = [f"pagegen.{name}" for name in pagegen.__all__]
    for package in ("pagegen_autotune", "pagegen.serving"):
        public += [f"{package}.{name}" for name in importlib.import_module(package).__all__]
    assert not [name for name in public if f"heading: {name}\n" not in reference]
    assert not [name for name in public if f"[`{name}`]" not in pages["reference/index.md"]]


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_has_a_docstring_and_so_have_the_methods_of_a_class(module):
    missing = []
    for name in HOOKS.names_of(module):
        value = getattr(importlib.import_module(module), name)
        if f"{module}.{name}" in CONSTANTS:
            continue
        # a dataclass without one gets its signature as a docstring
        if not inspect.getdoc(value) or (value.__doc__ or "").startswith(f"{name}("):
            missing.append(name)
        texts = {name: inspect.getdoc(value) or ""}
        for attribute, member in vars(value).items() if isinstance(value, type) else ():
            function = getattr(member, "__func__", getattr(member, "fget", member))
            if not attribute.startswith("_") and inspect.isfunction(function):
                texts[f"{name}.{attribute}"] = inspect.getdoc(function) or ""
        missing += [place for place, text in texts.items() if not text]
        tags = [place for place, text in texts.items() if re.search(r"<\w+>", re.sub(r"`[^`]*`", "", text))]
        assert not tags, "Markdown would take these for HTML: put backticks around them"
    assert not missing


# Functions that refuse nothing of their own.
NEVER_RAISE = {
    "pagegen.modifiers.captured_tensors", "pagegen.modifiers.causal", "pagegen.modifiers.mask_range",
    "pagegen.selection.workload_distance",
    "pagegen.spec.bytes_per_element", "pagegen.integrations.context_parallel.local_specs",
    "pagegen_autotune.shipped_profiles",
}  # fmt: skip


@pytest.mark.parametrize("module", MODULES)
def test_every_public_function_says_what_it_raises(module):
    silent = set()
    for name in HOOKS.names_of(module):
        value = getattr(importlib.import_module(module), name)
        if inspect.isfunction(value) and not re.search(r"\braises?\b", value.__doc__ or "", re.IGNORECASE):
            silent.add(f"{module}.{name}")
    assert silent == {name for name in NEVER_RAISE if name.rpartition(".")[0] == module}


@pytest.mark.parametrize("name", sorted(CONSTANTS))
def test_a_public_constant_has_a_docstring_behind_it(name):
    module, _, constant = name.rpartition(".")
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / module.replace(".", "/")).glob("*.py")]
    pattern = re.compile(rf'^{constant}\b[^\n]*= (?:[^\n]*|{{.*?^}})\n"""', re.MULTILINE | re.DOTALL)
    assert any(pattern.search(text) for text in texts)


def test_the_page_on_scale_quotes_what_is_stored():
    stored = {}
    for name in ("database", "scale"):
        rows = json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text(encoding="utf-8"))["rows"]
        stored |= {row["what"]: row for row in reversed(rows)}
    page = (DOCS / "scale.md").read_text(encoding="utf-8")
    select = stored["first select of a process, a batch that was measured"]
    best = stored["best_block_size, first of a process"]
    size = stored["size"]["bytes_a_trial"]
    tuning = stored["tuning N models x M devices x B block sizes"]
    for cell, value in {
        "first `select` of a process from a file": f"{select['first_ms']:.0f} ms",
        "`best_block_size` from a file": f"{best['first_ms']:.0f} ms",
        "a trial in SQLite, indexes and what it shares with others included": f"{size} bytes",
        "a trial in PostgreSQL, the same": f"{stored['size on the server']['bytes_a_trial']} bytes",
        "samples a batch": f"{tuning['samples_a_batch']:.0f}",
        "variants compiled a kernel": f"{tuning['compiled']:.0f}",
    }.items():
        assert f"| {cell} | {value} |" in page, f"docs/scale.md is to say {value} for: {cell}"


def test_the_page_of_the_command_line_names_every_command_and_option(pages):
    def walk(command: click.Command, context: click.Context) -> None:
        assert f"## {context.command_path}\n" in pages["cli.md"]
        if isinstance(command, click.Group):
            for name in command.list_commands(context):
                child = command.get_command(context, name)
                assert child is not None
                walk(child, click.Context(child, parent=context, info_name=name))
        else:
            for parameter in command.params:
                shown = (
                    max(parameter.opts, key=len)
                    if isinstance(parameter, click.Option)
                    else parameter.human_readable_name
                )
                assert shown in pages["cli.md"]

    walk(main, click.Context(main, info_name="pagegen"))


def test_the_page_of_the_schema_names_every_table_and_column_and_says_what_its_comments_say(pages):
    for table in metadata.sorted_tables:
        section = pages["schema.md"].split(f"## {table.name}\n")[1].split("\n## ")[0]
        assert not [column.name for column in table.columns if f"| `{column.name}` |" not in section]
    assert "JSON list, every run in order" in pages["schema.md"]
    assert "digest of what makes it the same device" in pages["schema.md"].split("## devices\n")[1].split("\n## ")[0]


def strings() -> str:
    """Every text in the source, one a line; what is filled in is "..."."""
    found = []
    for folder in (ROOT / "pagegen", ROOT / "autotune"):
        for path in folder.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
                elif isinstance(node, ast.JoinedStr):
                    parts = [part.value if isinstance(part, ast.Constant) else "..." for part in node.values]
                    found.append("".join(map(str, parts)))
    return "\n".join(found).replace("%s", "...")


def test_every_message_that_troubleshooting_quotes_is_in_the_source():
    quoted = re.findall(r"^### `(.+)`$", (DOCS / "troubleshooting.md").read_text(encoding="utf-8"), re.MULTILINE)
    source = strings()
    assert len(quoted) >= 12
    assert not [message for message in quoted if message not in source and not hasattr(pagegen, message)]


def test_the_navigation_names_every_page_once():
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1]
    named = re.findall(r"^ +- (?:.+: )?(\S+\.md)$", text, re.MULTILINE)
    there = [*(path.name for path in DOCS.glob("*.md")), *HOOKS.generated()]
    assert sorted(named) == sorted(there)


def write(site: Path, place: str, html: str) -> None:
    (site / place).parent.mkdir(parents=True, exist_ok=True)
    (site / place).write_text(html)


def test_a_built_site_that_loads_something_from_elsewhere_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(HOOKS, "API", {})
    write(tmp_path, "a.html", '<a href="https://x.org">x</a><img src="figures/a.svg"><svg xmlns="http://w3.org/svg">')
    assert HOOKS.problems(tmp_path) == []
    write(tmp_path, "b.html", "<link rel=stylesheet href=https://fonts.org/css><script src='//cdn.org/x.js'></script>")
    assert HOOKS.problems(tmp_path) == ["b.html loads https://fonts.org/css", "b.html loads //cdn.org/x.js"]


def test_a_built_reference_that_lacks_a_name_or_lost_an_asterisk_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(HOOKS, "API", {"db": ("Database", ["pagegen.reference"], "")})
    write(tmp_path, "reference/db.html", '<h2 id="pagegen.reference_attention">')
    assert HOOKS.problems(tmp_path) == []
    write(tmp_path, "reference/db.html", "<p>c<em>tanh(score)</em>")
    lost, lacking = HOOKS.problems(tmp_path)
    assert "backticks" in lost and lacking == "reference/db.html lacks pagegen.reference_attention"
