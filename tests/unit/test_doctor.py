"""`pagegen doctor` reports whatever state the machine is in, in short lines, and never fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from pagegen import settings
from pagegen.cli import doctor
from pagegen.cli.main import main
from pagegen.db.schema import SCHEMA_VERSION


def report(*arguments: str) -> str:
    result = CliRunner().invoke(main, ["doctor", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def document() -> dict:
    return json.loads(report("--json"))


def needs(found: dict) -> list[str]:
    return [row["what"] for row in found["missing"]]


def test_a_machine_in_order_misses_nothing_that_it_has():
    found = document()
    assert found["packages"]["torch"].startswith("2.")
    assert found["target"]["name"] == str(doctor.Target.current())
    assert found["compiler"]["version"]
    assert not {"torch", "a C++20 compiler", "a readable database", "a writable cache folder"} & set(needs(found))


def test_the_report_says_the_same_in_short_lines():
    lines = report().splitlines()
    assert lines[0].split()[0] == "pagegen"
    for line in lines:
        if not line.startswith(("cache", "database")):  # paths are as long as they are
            assert len(line) <= 120, line


def test_a_database_that_is_not_there_yet_is_not_made_by_looking():
    found = document()["database"]
    assert (found["exists"], found["writable"]) == (False, True)
    assert not Path(settings.database_url()).exists()
    assert "not there yet: the first `pagegen tune` makes it" in report()


def test_a_database_is_described(tmp_path):
    from pagegen.db import open_db

    open_db().close()
    found = document()["database"]
    assert (found["exists"], found["readable"], found["trials"], found["schema_version"]) == (
        True,
        True,
        0,
        SCHEMA_VERSION,
    )
    assert f"(0 trials, schema {SCHEMA_VERSION})" in report()


def test_a_broken_database_is_named_with_a_remedy():
    Path(settings.database_url()).write_bytes(b"not a database" * 100)
    found = document()
    assert settings.database_url() in found["database"]["error"]
    assert "a readable database" in needs(found)
    assert settings.database_url() in report()


def test_a_password_is_not_shown(monkeypatch):
    monkeypatch.setenv("PAGEGEN_DB", "postgresql://me:secret@127.0.0.1:1/tuning")
    assert "secret" not in report() + report("--json")


def test_a_cache_folder_that_cannot_be_made_is_named(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("PAGEGEN_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert "a writable cache folder" in needs(document())
    assert "not there yet, not writable" in report()


def test_a_target_that_is_no_target_is_reported(monkeypatch):
    monkeypatch.setenv("PAGEGEN_TARGET", "h100")
    found = document()
    assert "got 'h100'" in found["target"]["error"]
    assert "a device for the target" in needs(found)


def test_a_target_that_is_not_in_this_machine_is_reported(monkeypatch):
    monkeypatch.setattr(doctor.Target, "current", staticmethod(lambda: doctor.Target.parse("sm_70")))
    found = document()
    assert found["target"]["device"]["error"]
    assert "a device for the target" in needs(found)


def test_a_missing_compiler_is_reported_with_what_to_install(monkeypatch):
    from pagegen.targets import cpu

    monkeypatch.setattr(cpu, "compiler", lambda: None)
    found = document()
    row = next(row for row in found["missing"] if row["what"] == "a C++20 compiler")
    assert "g++" in row["how"]
    assert "does not work" in report()


def test_optional_packages_that_are_not_installed_are_listed_with_their_command(monkeypatch):
    monkeypatch.setattr(doctor, "version", lambda *names: None if "triton" in names else "2.13.0")
    found = document()
    assert found["packages"]["triton"] is None
    assert "interpreter" not in found["target"]["runs"]
    row = next(row for row in found["missing"] if row["what"] == "triton")
    assert row["how"] == "pip install 'pagegen-attention[triton]'"
    assert "no GPU, without triton" in report()


@pytest.mark.parametrize(
    ("name", "found", "fine"),
    [
        ("torch", "2.9.1", False),
        ("torch", "2.10.0+cu130", True),
        ("torch", "3.0", True),
        ("triton", "3.5.1", False),
        ("triton", "3.9.0", True),
        ("triton", "3.10.0", False),
        ("python", "3.9.18", False),
        ("python", "3.13.0rc1", True),
        ("python", "3.14.0", False),
    ],
)
def test_versions_outside_the_support_window_are_pointed_out(name, found, fine):
    packages = dict.fromkeys(doctor.PACKAGES, "2.13.0") | {"triton": "3.7.1"}
    state = {
        "packages": packages | ({name: found} if name != "python" else {}),
        "python": found if name == "python" else "3.11.7",
        "compiler": {"version": "c++ 12", "python_headers": True},
        "target": {"device": {}},
        "cache": {"writable": True},
        "database": {"writable": True},
    }
    rows = [row["what"] for row in doctor.missing(state)]
    assert rows == ([] if fine else [f"{name} {found} is untested"])


def test_a_probe_that_breaks_leaves_a_sentence_in_its_place():
    def broken() -> dict:
        raise OSError("disk on fire\nmore")

    assert doctor.attempt(broken) == {"error": "disk on fire"}
