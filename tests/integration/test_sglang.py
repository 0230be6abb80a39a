"""pagegen's backend in SGLang: through SGLang's own pools, layers and batches, where `make engines` installed them."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from engine_environment import PYTHON, ROOT, SGLANG

from pagegen.integrations import sglang


@pytest.mark.parametrize(("engine", "check"), SGLANG.cases())
def test_through_the_classes_of_sglang(engine, check, record_property):
    record_property("host_version", engine.version)
    engine.checked(check)


def test_importing_pagegen_and_its_plugin_does_not_import_sglang():
    code = "import sys, pagegen, pagegen.integrations.sglang; print('sglang' in sys.modules)"
    python = str(PYTHON) if PYTHON.exists() else sys.executable
    done = subprocess.run([python, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_without_sglang_the_plugin_says_in_one_line_what_to_install_and_registers_nothing(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "sglang", None)
    sglang.register()
    (record,) = caplog.records
    assert record.getMessage().endswith("SGLang is not installed: pip install 'sglang>=0.5.23,<0.5.24'")


@pytest.mark.parametrize("found", ["0.5.22", "0.5.24", "0.6.0", "1.0", "dev", None])
def test_an_sglang_of_another_version_is_refused_when_the_backend_is_made(found, monkeypatch):
    host = type(sys)("sglang")
    if found is not None:
        host.__version__ = found
    monkeypatch.setitem(sys.modules, "sglang", host)
    monkeypatch.delitem(sys.modules, "pagegen.integrations.sglang_backend", raising=False)
    named = "of unknown version" if found is None else found
    line = f"SGLang {named} is not supported: install sglang>=0.5.23,<0.5.24"
    with pytest.raises(ImportError, match=re.escape(line)) as caught:
        sglang.create(None)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("found", ["0.5.23", "0.5.23.post1", "0.5.23rc0"])
def test_a_supported_sglang_has_no_fault(found, monkeypatch):
    host = type(sys)("sglang")
    host.__version__ = found
    monkeypatch.setitem(sys.modules, "sglang", host)
    assert sglang.fault() is None
