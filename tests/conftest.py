"""What all tests share: no test touches the user's database or a hub, and what needs a device is skipped without it."""

from __future__ import annotations

import gc
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# Tests of the compiler, and of what is shipped or measured: they keep the flags of a user. And those whose processes
# compile by Inductor, which takes CXX too: torch's headers under other flags took it a minute.
SHIPPED_FLAGS = {
    "test_demo.py", "test_examples.py", "test_export.py", "test_pages.py",
    "test_artefacts.py", "test_cpp_build.py", "test_cpp_shared_builds.py", "test_cpu_probes.py", "test_doctor.py",
    "test_no_compiler.py", "test_prepared.py", "test_private.py",
}  # fmt: skip

# In tests/kernels, but about how kernels are put together, not about what they compute.
COMPOSING = {"test_cascade.py", "test_step_paths.py"}

pytest_plugins = ["cache_indexes", "compatibility_page", "database_places"]

# A slow example on a busy machine is no finding. By night there are twenty times as many.
for name, examples in (("pagegen", 50), ("pagegen by night", 1000)):
    hypothesis.settings.register_profile(
        name, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow], print_blob=True,
        max_examples=examples,
    )  # fmt: skip
hypothesis.settings.load_profile("pagegen")
os.environ["HF_HUB_OFFLINE"] = "1"
# Inductor would start a process a CPU, each of which imports torch (9 s of CPU time a test), to compile one kernel.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
for chosen in ("PAGEGEN_TARGET", "PAGEGEN_CHECK", "PAGEGEN_DB", "PAGEGEN_ARTEFACTS", "PAGEGEN_ARTEFACTS_SHA256"):
    os.environ.pop(chosen, None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden files anew instead of comparing")
    parser.addoption("--nightly", action="store_true", help="more random cases, and the cache checks with a real model")


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether golden files are to be written anew (`pytest --update-golden`)."""
    return bool(request.config.getoption("--update-golden"))


@pytest.fixture
def nightly(request: pytest.FixtureRequest) -> bool:
    """Whether tests of random cases are to run many more of them (`pytest --nightly`): hours, not seconds."""
    return bool(request.config.getoption("--nightly"))


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--nightly"):
        hypothesis.settings.load_profile("pagegen by night")
    config.addinivalue_line(
        "markers", "nightly: run with --nightly alone, since other cases go the same way by default"
    )
    config.addinivalue_line("markers", "by_pairs: by default half of a product, in which every two values still meet")
    # Compiled kernels are found by their content, so one folder serves every worker and the next run.
    os.environ.setdefault("PAGEGEN_CACHE_DIR", str(config.rootpath / ".pytest_cache" / "kernels"))


@pytest.fixture(scope="module", autouse=True)
def _compiler(request: pytest.FixtureRequest) -> Iterator[None]:
    """Outside tests/kernels what is tested is what operators mean, and no instruction: the compiler then leaves out
    most of its optimiser, and a kernel takes it 0.4 s of CPU time in place of 1.1. For the processes that a test starts
    as well, and only where the user has named no compiler."""
    quick = Path(__file__).with_name("quick_cxx.sh")
    usable = os.access(quick, os.X_OK) and shlex.quote(str(quick)) == str(quick) and "CXX" not in os.environ
    computes = "kernels" in request.path.parts and request.path.name not in COMPOSING
    if not usable or computes or request.path.name in SHIPPED_FLAGS:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", str(quick))
        yield
    if "pagegen.ops.plans" in sys.modules:  # kernels made so are not for those that follow
        from pagegen import targets
        from pagegen.ops import plans
        from pagegen.targets import cpu

        cpu.forget()
        targets.load_attention.cache_clear()
        plans.plan_for.cache_clear()
        plans._PREPARED.clear()
        plans._forget_calls()


@pytest.fixture(autouse=True)
def _own_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEGEN_DB", str(tmp_path / "tuning.db"))
    # What ships is measured anew from release to release: no answer of a test rests on it. By the module's own name,
    # which a test of what ships sets to its own folder.
    from pagegen import paths

    real = paths.data
    monkeypatch.setattr(paths, "data", lambda name: tmp_path / "nothing ships" if name == "cache_db" else real(name))
    sqlite = sys.modules.get("pagegen.db.sqlite")
    if sqlite is not None:  # no test cuts the power, and waiting for the disk took most of the database tests' time
        monkeypatch.setattr(sqlite, "SYNCHRONOUS", "OFF")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    by_night = pytest.mark.skip(reason="other cases go the same way: --nightly")
    no_gpu = pytest.mark.skip(reason="needs a GPU")
    no_interpreter = pytest.mark.skip(reason="needs TRITON_INTERPRET=1, and a process of its own")
    interpreting = os.environ.get("TRITON_INTERPRET") == "1"
    values: dict[str, list[Any]] = {}
    for item in items:
        if item.get_closest_marker("gpu") and not _has_gpu():
            item.add_marker(no_gpu)
        if _is_nightly(item, values):
            item.add_marker(pytest.mark.nightly)
            if not config.getoption("--nightly"):
                item.add_marker(by_night)
        if "interpreter" in item.path.parent.parts and not interpreting:
            item.add_marker(no_interpreter)


def pytest_collection_finish() -> None:
    # A million objects of torch, transformers and the tests stay to the end: the collector need not look at them again.
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


def _is_of_the_other_half(item: pytest.Item, parameters: dict[str, Any], values: dict[str, list[Any]]) -> bool:
    """Whether the places of a case's parameters among the `values` of its test, which are added to, have an odd sum."""
    places = 0
    for name, value in parameters.items():
        known = values.setdefault(f"{item.nodeid.partition('[')[0]} {name}", [])
        if value not in known:
            known.append(value)
        places += known.index(value)
    return places % 2 == 1


def _is_nightly(item: pytest.Item, values: dict[str, list[Any]]) -> bool:
    """Whether a test is marked so, one of its parameters has a true `nightly`, or it is of the other half of pairs."""
    parameters = getattr(item, "callspec", None)
    if parameters is not None:
        if any(getattr(value, "nightly", False) for value in parameters.params.values()):
            return True
        if item.get_closest_marker("by_pairs") is not None and _is_of_the_other_half(item, parameters.params, values):
            return True
    return item.get_closest_marker("nightly") is not None


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
