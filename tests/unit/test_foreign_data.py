"""A database, a profile or a trace from elsewhere is data: it is never executed, names no file, and cannot act on the
terminal, the spreadsheet or the browser that shows it."""

from __future__ import annotations

import ast
import html.parser
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import database_fakes as fakes
import pytest
from click.testing import CliRunner

from pagegen import open_db, targets
from pagegen.cli import output
from pagegen.cli.main import main
from pagegen.db import t4
from pagegen.spec import Target

ROOT = Path(__file__).parents[2]

# ---- the source never does what would execute what it read -------------------------------------------------

# Calls that run code, or load what can, by the last two parts of their name; "*" stands for any object.
CALLS = {
    "eval", "exec", "compile", "__import__", "execfile", "input", "os.system", "os.popen", "runpy.*", "code.*",
    "*.sympify", "sympify", "*.parse_expr", "parse_expr", "*.lambdify", "lambdify", "sympy.S", "ast.literal_eval",
    "torch.load", "torch.jit.load", "torch.package.*", "numpy.load", "np.load", "joblib.*", "pandas.eval",
    "tempfile.mktemp", "*.extractall", "*.exec_module", "*.load_module", "importlib.import_module", "*.CDLL",
    "*.load_library", "*.executescript", "*.load_extension", "*.enable_load_extension", "*.unpack_archive",
}  # fmt: skip
MODULES = {
    "pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "copyreg", "yaml", "ruamel", "code",
    "codeop", "runpy", "xmlrpc", "telnetlib", "multiprocessing", "jinja2", "imp", "pty", "http", "urllib.request",
    "socketserver", "requests",
}  # fmt: skip
# Where one of them stands, and why what it meets is this process's own.
ALLOWED = {
    ("pagegen/targets/triton_module.py", "*.exec_module"): "runs the text that this process rendered, from memory",
    ("pagegen/targets/cpp_build.py", "*.CDLL"): "a library whose bytes have the hash that was written beside them",
    ("pagegen/targets/artefacts.py", "*.CDLL"): "a library whose bytes have the hash of a manifest for this source",
    ("pagegen/targets/gpu_driver.py", "*.CDLL"): "the driver's own library, by a constant name",
    ("pagegen/cli/main.py", "importlib.import_module"): "a table of the commands, in the same file",
    ("pagegen/__init__.py", "importlib.import_module"): "a table of the public names, in the same file",
    ("pagegen/cache/__init__.py", "importlib.import_module"): "a table of the public names, in the same file",
    ("pagegen/modifiers/__init__.py", "importlib.import_module"): "a table of the public names, in the same file",
    ("autotune/pagegen_autotune/__init__.py", "importlib.import_module"): "a table of the public names, as above",
    ("pagegen/costs/symbols.py", "*.lambdify"): "formulas of pagegen.costs; what is stored are their symbols' values",
    ("autotune/pagegen_autotune/worker.py", "multiprocessing"): "a socket pair to the process that started this one",
    ("autotune/pagegen_autotune/isolated.py", "multiprocessing"): "a socket pair to a process that this one started",
    ("autotune/pagegen_autotune/worker.py", "*.CDLL"): "the C library, which is loaded already",
}
SQL = {"execute", "exec_driver_sql", "executemany", "text"}
# Statements that are put together, and of what.
ALLOWED_SQL = {
    ("pagegen/db/bulk.py", "exec_driver_sql"): "names of our own tables and columns; values are parameters",
    ("pagegen/db/engine.py", "exec_driver_sql"): "constants that are integers",
    ("pagegen/db/transfer.py", "exec_driver_sql"): "a constant that is an integer",
    ("pagegen/db/server.py", "exec_driver_sql"): "constants that are integers",
    ("pagegen/db/sqlite.py", "execute"): "constants",
}


def sources() -> Iterator[tuple[str, ast.Module]]:
    for folder in ("pagegen", "autotune"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield str(path.relative_to(ROOT)), ast.parse(path.read_text(encoding="utf-8"))


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def forbidden(call: ast.Call) -> str | None:
    """The entry of CALLS that a call meets."""
    parts = dotted(call.func).split(".")
    names = {".".join(parts)} if len(parts) == 1 else {f"*.{parts[-1]}", f"{parts[-2]}.{parts[-1]}", f"{parts[-2]}.*"}
    names.add(".".join(parts))
    return next(iter(sorted(names & CALLS)), None)


def found_in(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            met = forbidden(node)
            if met:
                yield met, node.lineno
            for keyword in node.keywords:
                true = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
                if keyword.arg in ("shell", "trust_remote_code", "allow_pickle") and true:
                    yield f"{keyword.arg}=True", node.lineno
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
            brought = [(f"{node.module}.{alias.name}", f"*.{alias.name}") for alias in node.names]
            yield from ((spelt[0], node.lineno) for spelt in brought if CALLS & {*spelt})
        yield from ((name.split(".")[0], node.lineno) for name in names if {name, name.split(".")[0]} & MODULES)


def test_nothing_in_the_source_executes_text_or_loads_what_can():
    met = {(path, what): line for path, tree in sources() for what, line in found_in(tree)}
    new = [f"{path}:{line} {what}" for (path, what), line in met.items() if (path, what) not in ALLOWED]
    assert not new, "\n".join(new)
    assert not set(ALLOWED) - set(met), "exceptions that nothing needs any more"


@pytest.mark.parametrize(
    "line",
    [
        "eval(row.data)", "exec(text)", "sympy.sympify(stored)", "from sympy import sympify", "import pickle",
        "from yaml import load", "torch.load(path)", "np.load(path, allow_pickle=True)", "__import__(name)",
        "importlib.import_module(record['module'])", "subprocess.run(command, shell=True)", "import cloudpickle as p",
        "AutoModel.from_pretrained(name, trust_remote_code=True)", "archive.extractall(folder)", "ctypes.CDLL(path)",
        "ast.literal_eval(text)", "from multiprocessing.connection import Connection", "sympy.S(text)",
    ],
)  # fmt: skip
def test_the_scan_finds_what_it_is_for(line):
    assert list(found_in(ast.parse(line)))


def built_sql(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Statements handed to a driver that are put together from parts."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in SQL and node.args:
            statement = node.args[0]
            parts = isinstance(statement, (ast.JoinedStr, ast.BinOp)) or (
                isinstance(statement, ast.Call) and dotted(statement.func).endswith(".format")
            )
            if parts or (isinstance(statement, ast.Name) and node.func.attr == "exec_driver_sql"):
                yield node.func.attr, node.lineno


def test_no_statement_is_put_together_from_what_was_stored():
    met = {(path, what): line for path, tree in sources() for what, line in built_sql(tree)}
    new = [f"{path}:{line} {what}" for (path, what), line in met.items() if (path, what) not in ALLOWED_SQL]
    assert not new, "\n".join(new)
    assert not set(ALLOWED_SQL) - set(met), "exceptions that nothing needs any more"


# ---- stored names stay names -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["score_mod", "mask_mod"])
@pytest.mark.parametrize(
    "name",
    [
        "planted.function", "planted:function", "__import__('planted')", "os.system('touch planted')", "chunked(2)#2",
        "chunked(__import__('planted'))", "soft_cap(" + "-" * 100_000 + "1)", "soft_cap(" + "9" * 100_000 + ")",
        "soft_cap(1e999)", "chunked(1.5)", "chunked(+3)", "soft_cap(1.)", "../planted",
    ],
)  # fmt: skip
def test_a_score_or_mask_function_is_never_loaded_from_a_database(kind, name, tmp_path, monkeypatch):
    (tmp_path / "planted.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = fakes.SPEC.replace(**{kind: name})
    with open_db(tmp_path / "a.db") as db:
        db.record(fakes.trial(spec=spec))
        db.export(tmp_path / "a.jsonl")
    with open_db(tmp_path / "b.db") as db:
        db.import_(tmp_path / "a.jsonl")
        (trial,) = db.trials()
        assert trial.spec == spec
        for target in (Target("cpu"), fakes.SM_90):
            assert targets.unsupported(trial.spec, target) is not None
            db.select(trial.spec, trial.layout, target, trial.workload)  # answers, whatever is stored
    assert "planted" not in sys.modules
    assert not (tmp_path / "planted").exists()


HOSTILE = (
    "../../planted", "/tmp/planted", "a\0b", "con\nfig", "<script>alert(1)</script>", "\x1b]0;title\x07\x1b[2J",
    "=cmd|' /C calc'!A0", "'; DROP TABLE trials; --", "{0.__class__}", "%s%n", "--><img src=x onerror=alert(1)>",
    "$\\input{/etc/passwd}$", "\u202egnp.exe", "]]>", "\ud800",
)  # fmt: skip


def hostile_trials():
    """Few devices of long names: the report draws a figure for each."""
    for number, name in enumerate(" ".join(HOSTILE[first::4]) for first in range(4)):
        yield fakes.trial(
            device=replace(fakes.H100, name=name, partition=name, features=(name,)),
            code_hash=name, detail=name, environment={name: name, "torch": name, "driver": name},
            samples_us=(100.0 + number,),
        )  # fmt: skip


@pytest.fixture(scope="module")
def hostile(tmp_path_factory) -> Path:
    """A database of names that others made up."""
    path = tmp_path_factory.mktemp("hostile") / "hostile.db"
    with open_db(path) as db:
        for trial in hostile_trials():
            db.record(trial)
        for name in ("<script>alert(1)</script>", "../../planted", "=1+1", "$\\frac{1}{2}$"):
            profile = replace(fakes.PROFILE, name=name, source=name, licence=name)
            rule = replace(fakes.rule(reason=name), evidence={
                "kind": "measured", "all": {"regret": 0.1, "speedup": 1.5}, name: name,
            })  # fmt: skip
            device = replace(fakes.H100, name=f"{name} device")
            db.save_portfolio(
                spec=fakes.SPEC, layout=fakes.LAYOUT, device=device, profile=profile, rule=rule, code_hash=name
            )
    return path


def test_names_of_a_t4_export_are_no_paths(hostile, tmp_path):
    with open_db(hostile, read_only=True) as db:
        files = t4.export(db.own.trials(), tmp_path / "in" / "t4")
    assert len(files) == 4
    assert {file.parent for file in files} == {tmp_path / "in" / "t4"}
    assert sorted(p for p in tmp_path.rglob("*") if p.is_file()) == sorted(files)
    assert all(file.name.replace("-", "").replace("_", "").removesuffix(".json").isalnum() for file in files)


def test_a_t4_file_cannot_name_another_one(tmp_path):
    hostile_id = {"kernel": "../../etc/passwd", "device": "/etc/passwd", "workload": "x", "v": 1}
    (tmp_path / "evil.json").write_text(
        json.dumps({"schema_version": "1.0.0", "metadata": {"pagegen": hostile_id}, "results": []}, indent=1)
    )
    with open_db(tmp_path / "a.db") as db, pytest.raises(ValueError, match="evil.json must be T4 results"):
        db.import_(tmp_path / "evil.json")


# ---- terminals and spreadsheets ----------------------------------------------------------------------------

LISTINGS = [("db", "trials"), ("db", "stats"), ("db", "trials", "--pooled"), ("db", "conflicts"), ("db", "verify")]


@pytest.mark.parametrize("command", LISTINGS, ids=" ".join)
@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_no_listing_hands_controls_to_the_terminal(command, as_json, hostile):
    result = CliRunner().invoke(main, [*command, "--db", str(hostile), *["--json"] * as_json])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    told = result.stdout + result.stderr
    assert told
    assert not [c for c in told if c not in "\n\t" and (ord(c) < 32 or 127 <= ord(c) < 160 or c in "\u202e\ud800")]


def test_an_import_report_hands_no_controls_to_the_terminal(tmp_path):
    lines = [{"record": "\x1b[2Jx\r", "v": 1}, {"record": "device", "v": 1, "id": "\x1b]0;x\x07", "device": "\x9b2J"}]
    (tmp_path / "evil.jsonl").write_text("\n".join(json.dumps(line) for line in lines) + "\n\x1b[31mred\n")
    result = CliRunner().invoke(main, ["db", "import", str(tmp_path / "evil.jsonl"), "--db", str(tmp_path / "a.db")])
    assert result.exit_code == 1
    assert not [c for c in result.stdout + result.stderr if c != "\n" and (ord(c) < 32 or 127 <= ord(c) < 160)]


def test_a_table_for_a_spreadsheet_holds_no_formula_and_one_line_a_row():
    names = ["=1+1", "+x", "-x", "@SUM(A1)", "\tx", "-1.5", "a\r\nb"]
    lines = output.table([{"name": name, "us": -1.5} for name in names], {"name": "name", "us": "us"}, "tsv").split(
        "\n"
    )
    cells = [line.split("\t")[0].strip() for line in lines[1:]]
    assert cells[:4] == ["'=1+1", "'+x", "'-x", "'@SUM(A1)"]
    assert cells[-2:] == ["-1.5", "a\\r\\nb"]
    assert len(lines) <= len(names) + 2


def test_the_format_for_web_pages_escapes_names_and_those_that_escape_nothing_are_not_offered():
    row = [{"name": "<script>"}]
    assert "<script>" not in output.table(row, {"name": "name"}, "html")
    assert not {"unsafehtml", "latex_raw"} & set(output.FORMATS)
    assert CliRunner().invoke(main, ["db", "stats", "--format", "unsafehtml"]).exit_code == 2


# ---- the report in a browser -------------------------------------------------------------------------------


class _Page(html.parser.HTMLParser):
    """Every tag, attribute and link of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.links: set[str] = set()
        self.comments = ""

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.links |= {value or "" for name, value in attrs if name in ("href", "src", "xlink:href", "style")}

    def handle_comment(self, data):
        self.comments += data


def test_a_report_of_a_hostile_database_holds_no_markup_but_its_own(hostile, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "report.html"
    result = CliRunner().invoke(main, ["report", "-o", str(path), "--db", str(hostile)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    text = path.read_text(encoding="utf-8")
    page = _Page()
    page.feed(text)
    assert "&lt;script&gt;" in text, "the names are there"
    assert not page.tags & {"script", "img", "iframe", "object", "embed", "link", "a", "foreignobject", "form", "image"}
    assert not [name for name in page.attributes if name.startswith("on")]
    assert not [link for link in page.links if "javascript:" in link or "url(http" in link or link.startswith("http")]
    assert "<script" not in text.lower()
    assert "onerror" not in page.attributes
