"""Whatever a file from elsewhere or a command line holds: an answer, or one line that says what is wrong. Never a
traceback, and never half of something written. `pytest --nightly` tries a hundred times as many."""

from __future__ import annotations

import copy
import functools
import json
import random
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import database_fakes as fakes
import pytest
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pagegen_autotune.trace import TraceError, read_trace

from pagegen import open_db, targets
from pagegen.cli.main import COMMANDS, main
from pagegen.db import DatabaseError, t4
from pagegen.spec import Profile

TEXTS = st.sampled_from(
    [
        "", " ", "0", "-1", "1e999", "nan", "16", "cpu", "sm_90", "bfloat16", "x" * 300, "\0", "\n", "\x1b[2J",
        "\ud800", "../../x", "/", "=1+1", "{", "[", '"', "'; --", "%s", "\u0663", "1_000", "2026-01-01", "measured",
        "ok", "cold",
    ]
)  # fmt: skip
LEAVES = (
    TEXTS
    | st.sampled_from(
        [None, True, False, 0, 1, -1, 3, 2**31, 2**63, 10**400, 0.5, 1e308, -0.0, float("nan"), float("inf")]
    )
    | st.sampled_from([[], {}, [[]], [0], {"a": 1}, functools.reduce(lambda inner, _: [inner], range(200), [])])
)
JSON = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=5
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of everything in a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, one in inner for place in places(one, (*path, key)))]


def one_place(draw: st.DrawFn, value: Any) -> tuple[Any, ...]:
    there = places(value)
    return there[draw(st.integers(0, 2**20)) % len(there)]


@st.composite
def spoilt(draw: st.DrawFn, whole: Any) -> Any:
    """A JSON value with a few of its parts exchanged, removed, doubled or moved elsewhere."""
    value = copy.deepcopy(whole)
    for _ in range(draw(st.integers(1, 4))):
        path = one_place(draw, value)
        if not path:
            if draw(st.integers(0, 9)) == 0:
                value = copy.deepcopy(draw(JSON))
            continue
        holder = functools.reduce(lambda part, key: part[key], path[:-1], value)
        kind = draw(st.integers(0, 3))
        if kind == 0:
            holder.pop(path[-1])
        elif kind == 1 and isinstance(holder, list):
            holder.append(copy.deepcopy(holder[path[-1]]))
        elif kind == 2:
            other = one_place(draw, value)
            holder[path[-1]] = copy.deepcopy(functools.reduce(lambda part, key: part[key], other, value))
        else:
            holder[path[-1]] = copy.deepcopy(draw(JSON))  # others draw the same object
    return value


BYTES = st.sampled_from(
    [b"\n", b"\xff", b"\0", b"[" * 5000, b'{"a":' * 5000, b"9" * 5000, b'"', b"NaN", b"-", b"\\ud800"]
)


@st.composite
def garbled(draw: st.DrawFn, text: bytes) -> bytes:
    """A file that was cut, or had bytes or values exchanged."""
    content = bytearray(text)
    values = [at + 1 for at, byte in enumerate(text) if byte in b":,["] or [0]
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.sampled_from(values) | st.integers(0, len(content)))
        length = draw(st.integers(0, 40))
        content[at : at + length] = draw(BYTES | st.binary(max_size=12))
    return bytes(content)


def tries(count: int) -> Any:
    """So many examples, and a hundred times as many with --nightly."""

    def decorate(test: Any) -> Any:
        test.tries = count
        quiet = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.filter_too_much]
        return settings(max_examples=count, suppress_health_check=quiet)(test)

    return decorate


@pytest.fixture(autouse=True)
def more_by_night(request: pytest.FixtureRequest, nightly: bool) -> None:
    test = getattr(request.function, "hypothesis", None)
    if nightly and test is not None:
        plain = request.function
        plain._hypothesis_internal_use_settings = settings(
            plain._hypothesis_internal_use_settings, max_examples=100 * getattr(plain, "tries", 100)
        )


def run(*arguments: str) -> Result:
    """A command that ended as commands may end."""
    result = CliRunner().invoke(main, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code in (0, 1, 2), arguments
    if result.exit_code:
        last = result.stderr.rstrip("\n").splitlines()[-1]
        # a group that is called without a command prints its help
        assert last.startswith("Error: ") or result.stderr.startswith("Usage: "), (arguments, result.stderr)
        assert "Traceback" not in result.stderr
    assert not [c for c in result.stdout + result.stderr if c not in "\n\t" and (ord(c) < 32 or 127 <= ord(c) < 160)]
    return result


# ---- traces ------------------------------------------------------------------------------------------------

ROWS = [b"arrival_s,prompt_tokens,output_tokens,prefix_hash_ids", b"0.5,100,7,1 2 3", b"1,64,1,1-4", b"2.25,33,0,"]
OBJECTS = [
    {"arrival_s": 0.5, "prompt_tokens": 100, "output_tokens": 7, "prefix_hash_ids": [1, 2, 3]},
    {"arrival_s": 1, "prompt_tokens": 64, "output_tokens": 1, "prefix_hash_ids": "1-4"},
]
FIELDS = st.sampled_from(
    ["", "0", "1", "7", "100", "-1", "1e3", "nan", "inf", "1e308", "9" * 30, "9" * 5000, "1_0", "\u0663", " 5 ", '"5"',
     '"', "\0", "1-3", "3-1", "1-2-3", "18446744073709551615", "18446744073709551616", "prompt_tokens", "x"]
)  # fmt: skip
CSV = st.lists(
    st.sampled_from(ROWS) | st.lists(FIELDS, max_size=6).map(lambda fields: ",".join(fields).encode()), max_size=6
).map(b"\n".join)
LINES = st.lists(spoilt(OBJECTS[0]) | spoilt(OBJECTS[1]) | JSON, min_size=1, max_size=4).map(
    lambda rows: "\n".join(map(json.dumps, rows)).encode()
)
TRACES = CSV | CSV.map(lambda rows: ROWS[0] + b"\n" + rows) | LINES | garbled(b"\n".join(ROWS)) | st.binary(max_size=80)


@tries(200)
@given(content=TRACES, name=st.sampled_from(["t.csv", "t.jsonl", "t"]), skip_bad=st.booleans(), keep=st.booleans())
def test_a_trace_is_read_or_refused_by_its_line(content, name, skip_bad, keep, tmp_path):
    path = tmp_path / name
    path.write_bytes(content)
    try:
        trace = read_trace(path, skip_bad=skip_bad, keep_prefixes=keep)
    except TraceError as error:
        assert str(error).startswith(str(path))
        assert "\n" not in str(error)
    else:
        assert len(trace) >= 1


@tries(25)
@given(content=TRACES, skip_bad=st.booleans())
def test_importing_a_trace_writes_a_whole_profile_or_nothing(content, skip_bad, tmp_path):
    for old in tmp_path.iterdir():
        old.unlink()
    (tmp_path / "t").write_bytes(content)
    out = tmp_path / "p.json"
    # a small server: requests that are as long as a trace can say would take hours to serve
    small = ["--kv-tokens", "2000", "--max-num-seqs", "4", *["--skip-bad"] * skip_bad]
    result = run("profile", "import", str(tmp_path / "t"), "-o", str(out), *small)
    assert out.exists() == (result.exit_code == 0)
    if out.exists():
        Profile.load(out)
    assert {p.name for p in tmp_path.iterdir()} <= {"t", "p.json"}


# ---- profiles ----------------------------------------------------------------------------------------------

PROFILE = json.loads(json.dumps(fakes.PROFILE.to_dict()))
PROFILE_FILES = spoilt(PROFILE).map(lambda value: json.dumps(value).encode()) | garbled(json.dumps(PROFILE).encode())


@tries(100)
@given(content=PROFILE_FILES | st.binary(max_size=60))
def test_a_profile_is_read_or_refused_by_its_name(content, tmp_path):
    path = tmp_path / "p.json"
    path.write_bytes(content)
    try:
        profile = Profile.load(path)
    except ValueError as error:
        assert str(error).startswith(f"{path} is not a profile")
    else:
        profile.save(path)
        assert Profile.load(path) == profile


@tries(40)
@given(content=PROFILE_FILES, json_too=st.booleans())
def test_showing_a_profile_ends_well(content, json_too, tmp_path):
    (tmp_path / "p.json").write_bytes(content)
    run("profile", "show", str(tmp_path / "p.json"), *["--json"] * json_too)


# ---- databases ---------------------------------------------------------------------------------------------


CODE = targets.code_hash(fakes.SM_90)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small database with something of everything."""
    folder = tmp_path_factory.mktemp("sound")
    with open_db(folder / "a.db") as db:
        db.record(fakes.trial(code_hash=CODE))
        db.record(fakes.cpu_trial(workload=fakes.MIXED))
        db.record(fakes.trial(status=fakes.Status.COMPILE_ERROR, samples_us=(), max_error=None, detail="no"))
        db.save_portfolio(
            spec=fakes.SPEC, layout=fakes.LAYOUT, device=fakes.H100, profile=fakes.PROFILE, rule=fakes.rule(),
            code_hash=CODE,
        )  # fmt: skip
        db.export(folder / "a.jsonl")
        t4.export(db.own.trials(), folder / "t4")
    return folder


def same_as_its_export(path: Path) -> None:
    """A database that was imported into is sound, and its export makes an equal one."""
    with open_db(path, read_only=True) as db:
        assert db.verify() == []
        db.export(path.with_suffix(".jsonl"))
    again = path.with_name("again.db")
    with open_db(again) as db:
        report = db.import_(path.with_suffix(".jsonl"))
        assert not report.malformed, report.malformed
        db.export(again.with_suffix(".jsonl"))
    assert again.with_suffix(".jsonl").read_bytes() == path.with_suffix(".jsonl").read_bytes()
    for file in path.parent.glob("again.*"):
        file.unlink()


def imported(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(content)
    for old in tmp_path.glob("a.db*"):
        old.unlink()
    try:
        with open_db(tmp_path / "a.db") as db:
            report = db.import_(tmp_path / "in")
            assert all(isinstance(problem, str) for problem in report.malformed)
    except (ValueError, DatabaseError) as error:
        assert "\n" not in str(error).strip()
    same_as_its_export(tmp_path / "a.db")


@tries(25)
@given(data=st.data())
def test_records_are_added_or_named_and_the_database_stays_sound(data, sound, tmp_path):
    lines = (sound / "a.jsonl").read_bytes().splitlines()
    if data.draw(st.booleans()):
        content = data.draw(garbled(b"\n".join(lines)))
    else:
        at = data.draw(st.integers(0, len(lines) - 1))
        lines[at] = json.dumps(data.draw(spoilt(json.loads(lines[at])))).encode()
        content = b"\n".join(data.draw(st.permutations(lines)) if data.draw(st.booleans()) else lines)
    imported(content, tmp_path)


@tries(20)
@given(data=st.data())
def test_t4_results_are_added_or_named_and_the_database_stays_sound(data, sound, tmp_path):
    text = data.draw(st.sampled_from(sorted((sound / "t4").iterdir()))).read_bytes()
    whole = data.draw(spoilt(json.loads(text)))
    content = data.draw(
        st.sampled_from([json.dumps(whole), json.dumps(whole, indent=1)]).map(str.encode) | garbled(text)
    )
    imported(content, tmp_path)


READING = [
    ("db", "stats"), ("db", "trials"), ("db", "trials", "--pooled"), ("db", "verify"), ("db", "conflicts"),
    ("db", "prune", "--target", "sm_90", "--dry-run", "--keep", "c0"),
    ("query", "--model", "llama-3.1-8b", "--target", "sm_90", "--profile", "azure-conversation"),
    ("explain", "--model", "llama-3.1-8b", "--block-size", "16", "--batch", "2", "--context", "9", "--target", "sm_90"),
]  # fmt: skip


@tries(20)
@given(seed=st.integers(0, 2**32), command=st.sampled_from(READING))
def test_a_database_file_with_wrong_bytes_is_read_or_refused_in_a_line(seed, command, sound, tmp_path):
    path, draw = tmp_path / "a.db", random.Random(seed)
    for old in tmp_path.glob("a.db*"):
        old.unlink()
    content = bytearray((sound / "a.db").read_bytes())
    for _ in range(draw.choice([1, 1, 5, 50])):
        content[draw.randrange(len(content))] = draw.randrange(256)
    path.write_bytes(content[: draw.choice([len(content), len(content), draw.randrange(len(content))])])
    before = path.read_bytes()
    run(*command, "--db", str(path))
    assert path.read_bytes() == before, "reading changes nothing"


DEEP = st.sampled_from(["[" * 5000, '{"a":' * 5000, "9" * 5000, "{", ""])
NUMBERS = st.integers(-(2**63), 2**63 - 1) | st.floats()
NONSENSE = JSON.map(json.dumps) | DEEP | NUMBERS | st.binary(max_size=8) | st.none()


@tries(20)
@given(data=st.data(), command=st.sampled_from(READING))
def test_a_sound_file_that_holds_nonsense_is_read_or_refused_in_a_line(data, command, sound, tmp_path):
    path = tmp_path / "a.db"
    for old in tmp_path.glob("a.db*"):
        old.unlink()
    shutil.copy(sound / "a.db", path)
    with closing(sqlite3.connect(path)) as connection:
        tables = [row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        for _ in range(data.draw(st.integers(1, 3))):
            table = data.draw(st.sampled_from(tables))
            columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
            column = data.draw(st.sampled_from(columns))
            value = data.draw(NONSENSE)
            try:
                connection.execute(f'UPDATE "{table}" SET "{column}" = ?', (value,))
            except sqlite3.Error:  # a rule of the table that SQLite itself keeps
                continue
        connection.commit()
    run(*command, "--db", str(path))


# ---- command lines -----------------------------------------------------------------------------------------

WORDS = st.sampled_from(
    [
        "--model", "smollm2-135m", "llama-3.1-8b", "nobody-7b", "--layer", "sliding", "full", "--q-dtype",
        "--kv-dtype", "float8_e4m3fn", "int4", "float64", "--block-size", "--block-sizes", "16", "16,32", "0", "-1",
        "99999999999999999999", "--order", "HND", "--target", "cpu", "sm_90", "sm_9999999", "gfx", "--profile",
        "azure-conversation", "/dev/null", "--batch", "--context", "1", "1e9", "2147483648", "--memory", "1GiB",
        "-1GiB", "1e999GiB", "--objective", "latency", "--json", "--format", "html", "--limit", "--status", "ok",
        "--variant", "cpp:tile_kv=64", "triton:", "cpp:x=y", "--db", "postgres://u:p@127.0.0.1:1/x", "sqlite://",
        "ftp://x", ":memory:", "", "\ud800", "\x1b[2J", "a\0b", "--to", "--keep", "stats", "trials", "verify",
        "export", "import", "merge", "prune", "migrate", "list", "show", "conflicts", "--pooled", "--sql",
        "--dry-run", "--ragged", "--help", "-o", "--", "--as", "t4",
    ]
)  # fmt: skip
# What works for minutes once its arguments are right: it gets one that is not.
LONG = {"build", "demo", "tune", "simulate", "inspect", "doctor", "report"}


@tries(100)
@given(command=st.sampled_from(sorted(COMMANDS)), words=st.lists(WORDS, max_size=9))
def test_a_command_line_of_any_words_ends_with_an_answer_or_one_line(command, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # what is written by such a name goes there
    run(command, *words, *["--no-such-option"] * (command in LONG))
