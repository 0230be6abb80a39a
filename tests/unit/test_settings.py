"""Settings: the environment beats the default, an empty variable is no variable, and data folders are found."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagegen import paths, settings


@pytest.mark.parametrize(
    ("read", "variable", "value", "expected"),
    [
        (settings.cache_dir, "PAGEGEN_CACHE_DIR", "/some/cache", Path("/some/cache")),
        (settings.database_url, "PAGEGEN_DB", "postgresql://fleet/db", "postgresql://fleet/db"),
        (settings.artefacts, "PAGEGEN_ARTEFACTS", "/some/kernels", "/some/kernels"),
        (settings.artefacts_sha256, "PAGEGEN_ARTEFACTS_SHA256", "ab" * 32, "ab" * 32),
        (settings.target_name, "PAGEGEN_TARGET", "sm_90", "sm_90"),
        (settings.check_values, "PAGEGEN_CHECK", "1", True),
        (settings.cxx, "CXX", "clang++", "clang++"),
        (settings.interpreting, "TRITON_INTERPRET", "1", True),
    ],
)
def test_the_environment_beats_the_default(read, variable, value, expected, monkeypatch):
    monkeypatch.delenv(variable, raising=False)
    default = read()
    monkeypatch.setenv(variable, value)
    assert read() == expected != default
    monkeypatch.setenv(variable, "")
    assert read() == default


def test_the_default_places_are_the_users_own(monkeypatch, tmp_path):
    for variable in ("PAGEGEN_CACHE_DIR", "PAGEGEN_DB"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert settings.cache_dir() == tmp_path / "cache" / "pagegen"
    assert settings.database_url() == str(tmp_path / "data" / "pagegen" / "tuning.db")


@pytest.mark.parametrize("name", ["templates", "cache_db", "profiles"])
def test_data_folders_are_found_in_a_checkout(name, monkeypatch):
    monkeypatch.undo()  # what ships is hidden from the tests
    assert paths.data(name).is_dir()


def test_a_missing_data_folder_is_named_with_both_places(monkeypatch, tmp_path):
    monkeypatch.setattr(paths, "_PACKAGE", tmp_path / "pagegen")
    monkeypatch.setattr(paths, "_CHECKOUT", tmp_path)
    with pytest.raises(FileNotFoundError, match="neither at .*_data/templates nor at .*: reinstall pagegen-attention"):
        paths.data("templates")


def test_the_packaged_folder_beats_the_checkout(monkeypatch, tmp_path):
    packaged = tmp_path / "pagegen" / "_data" / "templates"
    packaged.mkdir(parents=True)
    (tmp_path / "templates").mkdir()
    monkeypatch.setattr(paths, "_PACKAGE", tmp_path / "pagegen")
    monkeypatch.setattr(paths, "_CHECKOUT", tmp_path)
    assert paths.data("templates") == packaged
