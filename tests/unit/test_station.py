"""What a node of a fleet does, without a cluster: it tells its device, times what it has checked, and compiles."""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import pytest
from click.testing import CliRunner
from fleet_fakes import KIT, PROFILE, SPEC, FleetBench, fake_device, share_nothing
from pagegen_autotune.executor import Race
from pagegen_autotune.faults import MachineFault
from pagegen_autotune.fleet import libraries, station, tune_fleet
from pagegen_autotune.fleet.cluster import connect, matches
from pagegen_autotune.fleet.station import Builder, Kit, Station, Unsound
from pagegen_autotune.measure import Verdict
from pagegen_autotune.measured import TuneError

from pagegen import costs, settings, targets
from pagegen.cli.main import main
from pagegen.spec import CacheLayout, CppVariant, Status, Target
from pagegen.spec.result import CONFIRM
from pagegen.targets import cpp_build, cpu

LAYOUT = CacheLayout(block_size=16)
DEFAULT, OTHER, BAD = CppVariant(), CppVariant(streams=8), CppVariant(streams=1)
needs_compiler = pytest.mark.skipif(cpu.compiler() is None, reason="no C++ compiler works here")


def made(kit: Kit = KIT, *, gpu: bool = False, expected=None) -> Station:
    return Station(SPEC, PROFILE, gpu=gpu, seed=0, kit=kit, expected=expected or {})


def race(*variants: CppVariant) -> Race:
    entries = tuple((LAYOUT, v) for v in variants)
    return Race(
        entries=entries, workload=PROFILE.workloads[0], purpose=CONFIRM, rounds=3, until=0.0, seed=0,
        essential=entries[:1],
    )  # fmt: skip


def test_a_station_tells_its_device_and_what_times_on_it_depend_on():
    found = made().describe()
    assert found.unfit == "" and found.device == fake_device("fake CPU")
    assert (found.regime, found.workers, found.environment["compiler"]) == ("cold", 2, "c++ 1.0")


def boom(*arguments, **options):
    raise RuntimeError("no such luck\nand more")


@pytest.mark.parametrize(
    ("kit", "expected", "why"),
    [
        (Kit(look=boom), {}, "RuntimeError: no such luck"),
        (replace(KIT, make=boom), {}, "RuntimeError: no such luck"),
        (KIT, {"cpp": "another"}, "its templates are not the tuner's"),
    ],
)
def test_a_node_that_cannot_be_used_says_why(kit, expected, why):
    assert made(kit, expected=expected).describe().unfit.startswith(why)


def test_a_node_whose_gpu_torch_does_not_see_is_not_taken_for_a_cpu(monkeypatch):
    monkeypatch.setattr(station.torch.cuda, "is_available", lambda: False)
    assert "offers a GPU that torch does not see" in made(Kit(share=share_nothing), gpu=True).describe().unfit


def test_a_station_times_only_what_it_has_itself_checked():
    one = made()
    one.describe()
    rounds = one.race(race(DEFAULT, OTHER, BAD), 100.0, [])
    assert [len(rounds.samples[LAYOUT, v]) for v in (DEFAULT, OTHER)] == [3, 3]
    assert (
        rounds.failures == {(LAYOUT, BAD): (Status.WRONG_RESULT, "off by one")} and (LAYOUT, BAD) not in rounds.samples
    )
    assert len(one.race(race(DEFAULT, OTHER), -1.0, []).samples[LAYOUT, OTHER]) == 1  # the first round is finished


class Broken(FleetBench):
    def check(self, layout, variants):
        return {v: Verdict(status=Status.WRONG_RESULT, detail="bits flip") for v in variants}


def test_a_device_on_which_the_default_fails_that_passed_elsewhere_measures_nothing():
    one = made(replace(KIT, make=Broken))
    one.describe()
    with pytest.raises(Unsound, match="failed here and passed elsewhere: bits flip"):
        one.race(race(DEFAULT, OTHER), 100.0, [])


@needs_compiler
def test_what_one_node_compiled_another_takes_without_a_compiler_at_work(tmp_path, monkeypatch):
    device = fake_device("fake CPU")
    monkeypatch.setenv("PAGEGEN_CACHE_DIR", str(tmp_path / "builder"))
    builder = Builder(SPEC, device, PROFILE)
    assert builder.toolchain() == cpp_build.toolchain() != ""
    built = builder.build(LAYOUT, DEFAULT)
    assert built.verdict is None and built.library is not None

    monkeypatch.setenv("PAGEGEN_CACHE_DIR", str(tmp_path / "station"))

    def never(*arguments, **options):
        raise AssertionError("compiled here")

    monkeypatch.setattr(cpp_build, "_compile", never)
    libraries.adopt([built.library])
    assert libraries.of(SPEC, LAYOUT, [DEFAULT, OTHER]) == {DEFAULT: built.library}
    assert targets.load_attention.__wrapped__(SPEC, LAYOUT, DEFAULT, Target("cpu"))


@needs_compiler
def test_a_variant_that_does_not_compile_fails_at_the_builder(tmp_path, monkeypatch):
    monkeypatch.setenv("PAGEGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(libraries.cpp, "render_attention", lambda *arguments: "this is no C++;\n")
    built = Builder(SPEC, fake_device("fake CPU"), PROFILE).build(LAYOUT, DEFAULT)
    assert built.library is None and built.verdict.status is Status.COMPILE_ERROR and "error" in built.verdict.detail


@needs_compiler
def test_a_node_that_cannot_write_what_it_compiles_is_at_fault_and_not_the_variant(monkeypatch):
    monkeypatch.setenv("PAGEGEN_CACHE_DIR", "/proc/nowhere")
    with pytest.raises(MachineFault, match="nothing can be compiled here: the cache folder cannot be made") as raised:
        Builder(SPEC, fake_device("fake CPU"), PROFILE).build(LAYOUT, DEFAULT)

    class Full(FleetBench):
        def check(self, layout, variants):
            raise raised.value

    one = made(replace(KIT, make=Full))
    one.describe()
    with pytest.raises(Unsound, match="cache folder cannot be made"):
        one.race(race(DEFAULT, OTHER), 100.0, [])


@pytest.mark.parametrize(("name", "cut"), [("../" + "a" * 32 + ".so", 0), ("a" * 32 + ".so", 1), ("kernel.so", 0)])
def test_a_library_that_is_none_is_not_kept(tmp_path, monkeypatch, name, cut):
    import hashlib

    monkeypatch.setenv("PAGEGEN_CACHE_DIR", str(tmp_path))
    content = b"code" + hashlib.sha256(b"code").digest()
    with pytest.raises(ValueError, match="must be"):
        cpp_build.adopt(name, content[cut:])
    assert not list(tmp_path.rglob("*.so"))


def test_a_builder_for_a_gpu_tells_what_the_compiler_made_of_a_variant():
    pytest.importorskip("triton")
    device = costs.shipped_device("sm_90")
    variant = targets.default_variant(SPEC, LAYOUT, device.target, decode=True)
    builder = Builder(SPEC, device, PROFILE)
    try:
        built = builder.build(LAYOUT, variant)
    finally:
        if builder._process is not None:
            builder._process.close()
    assert built.verdict is None and set(built.facts) == {True, False} and built.facts[True].registers > 0


@pytest.mark.parametrize(
    ("wanted", "taken"),
    [((), True), (("sm_90",), True), (("cuda",), True), (("h100",), True), (("MI300", "H100"), True), (("cpu",), False),
     (("sm_9",), False)],
)  # fmt: skip
def test_devices_are_chosen_by_target_or_by_a_part_of_their_name(wanted, taken):
    assert matches(costs.shipped_device("sm_90"), wanted) is taken


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("ray://host:10001", "run this on a node of the cluster"),
        ("nowhere", "must be auto or HOST:PORT"),
        ("", "must be auto or HOST:PORT"),
        ("127.0.0.1:1", "no Ray cluster answers at 127.0.0.1:1"),
        ("127.0.0.1:99999", "no Ray cluster answers at 127.0.0.1:99999"),
        ("no-such-host.invalid:6379", "no Ray cluster answers at no-such-host.invalid:6379"),
    ],
)
def test_a_cluster_that_is_not_there_is_one_clear_line(address, words):
    pytest.importorskip("ray")
    with pytest.raises(TuneError, match=words):
        connect(address)


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(TuneError, match=r"needs Ray .*pip install 'pagegen-attention\[fleet\]'"):
        connect("auto")


def test_ray_is_told_not_to_report_its_use(monkeypatch):
    monkeypatch.delenv("RAY_USAGE_STATS_ENABLED", raising=False)
    settings.keep_ray_quiet()
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"


def test_score_and_mask_functions_are_refused_by_name():
    with pytest.raises(ValueError, match="spec must be without score and mask functions"):
        tune_fleet(SPEC.replace(score_mod="mine"), PROFILE)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--devices", "sm_90"), 2, "it goes with --ray"),
        (("--ray", "auto", "--target", "cpu"), 2, "--devices names those of the cluster"),
        (("--ray", "auto", "--revalidate"), 2, "run it without --ray"),
        (("--ray", "auto", "--devices", "sm_90,,cpu"), 2, "must be names such as"),
        (("--ray", "127.0.0.1:1"), 1, "no Ray cluster answers"),
    ],
)
def test_the_command_says_what_is_wrong_in_one_line(arguments, code, words):
    result = CliRunner().invoke(main, ["tune", "--model", "llama-3.1-8b", *arguments])
    assert result.exit_code == code and words in result.output.replace("\n", " ")
