"""Kernels built on one machine serve on another that has no compiler, and only where everything matches."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pagegen import AttentionSpec, CacheLayout, Target, open_db, targets
from pagegen.cli import doctor
from pagegen.cli.main import main
from pagegen.codegen import cpp
from pagegen.selection import shipping
from pagegen.spec import Clause, CppVariant, DispatchRule, Profile, Workload
from pagegen.targets import artefacts, cpp_build, cpu_features

ROOT = Path(__file__).parents[2]
SPEC = AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=24, q_dtype="float32")
LAYOUT = CacheLayout(block_size=8)
TUNED = CppVariant(tile_kv=32, streams=2, heads_together=2, split_tokens=64)

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")

# A serving process: prepares from the folder in argv, decodes and writes, and tells what it did.
SERVING = """
import json, sys
import torch, pagegen
from pagegen import targets
from pagegen.ops import plans
from pagegen.spec import AttentionSpec, CacheLayout, Target

spec, layout = AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=24, q_dtype="float32"), CacheLayout(block_size=8)
rule = pagegen.prepare(spec, layout, "cpu", artefacts=sys.argv[1])
torch.manual_seed(0)
k, v = torch.randn(2, 6, 8, 2, 24)
table, lens = torch.tensor([[3, 0], [1, 4]], dtype=torch.int32), torch.tensor([12, 5], dtype=torch.int32)
q = torch.randn(2, 4, 24)
new = torch.randn(1, 2, 24)
pagegen.write_kv(new, new, k, v, torch.tensor([27]))
out = pagegen.paged_attention(q, k, v, table, lens)
exact = pagegen.reference_attention(q.double(), k, v, table, lens)
plan = plans.lookup(spec, layout, Target("cpu"))
print(json.dumps({
    "compiled": targets.compiled(),
    "shipped": targets.shipped(),
    "error": (out.double() - exact).abs().max().item(),
    "written": torch.equal(k[3, 3], new[0]),
    "dense": plan.dense_reason,
    "kernels": [variant.name for variant in plan.kernels],
    "reason": rule and rule.reason,
}))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> shipping.Built:
    """A folder with the kernels of a tuned choice."""
    folder = tmp_path_factory.mktemp("built")
    profile = Profile(name="few", workloads=(Workload(context_lens=(12, 5)),), weights=(1,))
    rule = DispatchRule(clauses=(Clause(variant=TUNED),), reason="tuned on few", evidence={"kind": "measured"})
    with open_db(folder / "tuning.db") as db:
        db.save_portfolio(
            spec=SPEC, layout=LAYOUT, device=targets.current_device(Target("cpu")), profile=profile, rule=rule,
            code_hash=targets.code_hash(Target("cpu")),
        )  # fmt: skip
        return shipping.build([(SPEC, LAYOUT)], folder / "artefacts", db=db)


@pytest.fixture
def folder(built: shipping.Built, tmp_path: Path) -> Path:
    """A copy to do things to."""
    return Path(shutil.copytree(built.path, tmp_path / "artefacts"))


@pytest.fixture(autouse=True)
def nothing_in_use():
    yield
    artefacts.forget()
    artefacts.say_once.cache_clear()


def serve(folder: Path, tmp_path: Path, **environment: str) -> tuple[dict[str, Any], str]:
    """What a process without a compiler on its PATH does with a folder, and its standard error."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "autotune"), *filter(None, [os.environ.get("PYTHONPATH")])])
    keep = {name: value for name, value in os.environ.items() if name != "CXX"}
    own = {"PATH": "", "PAGEGEN_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": path, **environment}
    command = [sys.executable, "-c", SERVING, str(folder)]
    done = subprocess.run(command, env={**keep, **own}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_a_machine_without_a_compiler_serves_the_tuned_kernel_and_compiles_nothing(built, tmp_path):
    found, stderr = serve(built.path, tmp_path, PAGEGEN_ARTEFACTS_SHA256=built.sha256)
    assert found["compiled"] == []
    assert found["dense"] is None
    assert found["kernels"] == [TUNED.name]
    assert TUNED.name in found["shipped"]
    assert found["reason"] == f"shipped with the artefacts in {built.path}: tuned on few"
    assert found["error"] < 1e-5
    assert found["written"]
    assert stderr == ""
    assert not (tmp_path / "cache" / "cpp").exists()


def test_the_environment_names_the_folder_for_a_program_that_does_not(built, monkeypatch):
    monkeypatch.setenv("PAGEGEN_ARTEFACTS", str(built.path))
    artefacts.forget()
    rule = targets.shipped_rule(SPEC, LAYOUT, Target("cpu"))
    assert rule is not None
    assert rule.variants == (TUNED,)
    assert rule.distance == 0.0


def test_another_manifest_than_the_pinned_one_is_not_used_and_without_a_compiler_calls_are_dense(built, tmp_path):
    found, stderr = serve(built.path, tmp_path, PAGEGEN_ARTEFACTS_SHA256="0" * 64)
    assert found["shipped"] == []
    assert "no C++ compiler works here" in found["dense"]
    assert found["error"] < 1e-5
    lines = [line for line in stderr.splitlines() if "are not used" in line]
    assert len(lines) == 1
    assert f"its manifest has the sha256 {built.sha256}" in lines[0]


# ---- what is refused, with the reason ----------------------------------------------------------------------


def tampered(folder: Path) -> None:
    for library in folder.glob("*.so"):
        content = bytearray(library.read_bytes())
        content[-1] ^= 1
        library.write_bytes(content)


def truncated(folder: Path) -> None:
    for library in folder.glob("*.so"):
        library.write_bytes(library.read_bytes()[:4096])


def exchanged(folder: Path) -> None:
    """Every library under another's name: each is a good library, of another kernel."""
    libraries = sorted(folder.glob("*.so"))
    contents = [library.read_bytes() for library in libraries]
    for library, content in zip(libraries, contents[1:] + contents[:1], strict=True):
        library.write_bytes(content)


def removed(folder: Path) -> None:
    for library in folder.glob("*.so"):
        library.unlink()


def linked(folder: Path) -> None:
    for library in folder.glob("*.so"):
        elsewhere = folder.parent / library.name
        library.rename(elsewhere)
        library.symlink_to(elsewhere)


def writable_files(folder: Path) -> None:
    for library in folder.glob("*.so"):
        library.chmod(0o666)


def foreign_files(folder: Path) -> None:
    for library in folder.glob("*.so"):
        os.chown(library, 12345, 12345)


def piped(folder: Path) -> None:
    for library in folder.glob("*.so"):
        library.unlink()
        os.mkfifo(library)


@pytest.mark.parametrize(
    ("do", "why"),
    [
        (tampered, "is not the library that the manifest names"),
        (truncated, "is not the library that the manifest names"),
        (exchanged, "is not the library that the manifest names"),
        (removed, "No such file"),
        (linked, "must be a plain file, not a link"),
        (writable_files, "writable by you alone"),
        (foreign_files, "belongs to user 12345"),
        (piped, "must be a plain file"),
    ],
)
def test_a_library_that_is_not_as_it_was_built_is_never_loaded(do, why, folder, caplog):
    if do is foreign_files and os.geteuid() != 0:
        pytest.skip("needs root to give a file away")
    do(folder)
    used = artefacts.use(folder)
    assert used is not None
    for kernel in used.kernels.values():
        with pytest.raises(artefacts.Refused, match=why):
            used.load(kernel)
    before = targets.shipped()
    assert targets.load_attention.__wrapped__(SPEC, LAYOUT, TUNED, Target("cpu")) is not None, "compiled here"
    assert targets.shipped() == before
    (line,) = [r.message for r in caplog.records if r.message.startswith(f"{TUNED.name} is compiled here")]
    assert why in line


def edited(**changes: Any):
    def edit(folder: Path) -> None:
        path = folder / artefacts.MANIFEST
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return edit


def of_text(text: str):
    return lambda folder: (folder / artefacts.MANIFEST).write_text(text)


KERNEL = {"name": "x", "source": "0" * 64, "library": "0" * 64}


@pytest.mark.parametrize(
    ("do", "why"),
    [
        (edited(code_hash="f" * 64), "it holds kernels of the templates ffff"),
        (edited(pagegen="9.9"), "it holds kernels of pagegen 9.9, not"),
        (edited(version=2), "it holds a manifest of version 2, not 1"),
        (edited(target="sm_90"), "it holds kernels for sm_90, not cpu"),
        (edited(machine="riscv64"), "it holds kernels for machines of riscv64"),
        (edited(cpu_features=["avx2", "avx1024"]), "this CPU lacks .*avx1024"),
        (edited(cpu_features=["\x1b[2J"]), r"this CPU lacks '\\x1b\[2J'"),
        (edited(cpu_features="avx2"), "cpu_features must be a tuple"),
        (edited(kernels=[{**KERNEL, "source": "../../../../tmp/evil"}]), "source must be a sha256"),
        (edited(kernels=[{**KERNEL, "library": "0" * 63 + "\n"}]), "library must be a sha256"),
        (edited(kernels={}), "kernels must be a list"),
        (edited(kernels=[{**KERNEL, "path": "/tmp/evil.so"}]), "a kernel has no field path"),
        (edited(rules=[{"spec": {}, "layout": {}, "rule": {}}]), "cannot be read"),
        (edited(more=1), "a manifest has no field more"),
        (of_text("["), "cannot be read"),
        (of_text("[" * 100000), "cannot be read"),
        (of_text('{"version": NaN}'), "cannot be read"),
        (lambda folder: (folder / artefacts.MANIFEST).write_bytes(b"\xff\xfe"), "cannot be read"),
        (lambda folder: (folder / artefacts.MANIFEST).unlink(), "No such file"),
        (lambda folder: folder.chmod(0o777), "writable by you alone"),
        (lambda folder: folder.chmod(0o775), "writable by you alone"),
        (lambda folder: (folder / artefacts.MANIFEST).chmod(0o664), "writable by you alone"),
        (lambda folder: shutil.rmtree(folder), "No such file"),
        (lambda folder: (shutil.rmtree(folder), folder.write_text("")), "Not a directory"),
    ],
)
def test_a_folder_that_does_not_fit_or_that_others_can_write_is_not_used_and_one_line_says_why(do, why, folder, caplog):
    do(folder)
    assert artefacts.use(folder) is None
    assert artefacts.use(folder) is None
    (line,) = [r.message for r in caplog.records if "are not used" in r.message]
    assert line.startswith(f"the artefacts in {folder} are not used: ")
    assert line.endswith("; kernels are compiled here")
    assert "\n" not in line
    with pytest.raises(artefacts.Refused, match=why):
        artefacts.read(folder)


def test_a_folder_of_another_user_is_not_used(folder):
    if os.geteuid() != 0:
        pytest.skip("needs root to give a folder away")
    os.chown(folder, 12345, 12345)
    with pytest.raises(artefacts.Refused, match="belongs to user 12345"):
        artefacts.read(folder)


@pytest.mark.parametrize("value", [3, b"folder", ["folder"]])
def test_what_is_no_path_is_a_mistake_of_the_program(value):
    with pytest.raises(TypeError, match="artefacts must be a folder's path, got"):
        artefacts.use(value)


def test_artefacts_are_of_no_use_to_a_gpu_and_that_is_said(folder, caplog):
    targets.use_artefacts(folder, Target("cuda", "sm_90"))
    assert "hold C++ kernels alone: those of sm_90 are compiled here" in caplog.text
    assert targets.shipped_rule(SPEC, LAYOUT, Target("cuda", "sm_90")) is None


def test_a_cpu_that_lacks_an_instruction_of_the_building_one_does_not_load(folder, monkeypatch):
    names = cpu_features.names()
    lost = cpu_features.instructions()[0]
    monkeypatch.setattr(cpu_features, "names", lambda: tuple(name for name in names if name != lost))
    with pytest.raises(artefacts.Refused, match=f"this CPU lacks {lost}$"):
        artefacts.read(folder)


def test_a_newer_kernel_or_another_hypervisor_makes_no_other_cpu(folder, monkeypatch):
    names = {*cpu_features.names(), "brand_new_mitigation"} - {"hypervisor", "tsc_known_freq", "rep_good"}
    monkeypatch.setattr(cpu_features, "names", lambda: tuple(sorted(names)))
    assert artefacts.read(folder).kernels


# ---- building ----------------------------------------------------------------------------------------------


def test_a_kernel_has_the_same_bytes_wherever_and_whenever_it_is_compiled(built, tmp_path, monkeypatch):
    monkeypatch.setenv("PAGEGEN_CACHE_DIR", str(tmp_path / "another" / "cache"))
    (kernel,) = [one for one in built.kernels if one.name == TUNED.name]
    source = (built.path / f"{kernel.source}.cpp").read_text()
    assert source == cpp.render_attention(SPEC, LAYOUT, TUNED)
    assert hashlib.sha256(cpp_build.library_bytes(source, TUNED.name)).hexdigest() == kernel.library


def test_the_manifest_is_the_same_whatever_the_order_of_what_is_in_it(built):
    text = (built.path / artefacts.MANIFEST).read_bytes()
    assert shipping.manifest(built.head, reversed(built.kernels), built.rules) == text
    head, kernels, rules = artefacts.parse(text)
    assert (head, tuple(kernels.values()), rules) == (
        built.head,
        tuple(sorted(built.kernels, key=by_name)),
        built.rules,
    )


def by_name(kernel: artefacts.Kernel) -> tuple[str, str]:
    return kernel.name, kernel.source


def test_a_folder_of_other_things_is_not_written_to(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").touch()
    with pytest.raises(artefacts.Refused, match="holds other files and no manifest"):
        shipping.build([(SPEC, LAYOUT)], tmp_path / "home", db=str(tmp_path / "none.db"))
    assert [p.name for p in (tmp_path / "home").iterdir()] == ["thesis.tex"]


def test_kernels_of_another_compiler_are_not_mixed_in(folder, tmp_path):
    edited(compiler="clang 99")(folder)
    with pytest.raises(artefacts.Refused, match="kernels of another pagegen, compiler or CPU"):
        shipping.build([(SPEC, LAYOUT)], folder, db=str(tmp_path / "none.db"))


def test_the_command_adds_a_model_to_the_folder_and_says_how_to_use_it(folder, built):
    asked = ["build", "--model", "smollm2-135m", "--q-dtype", "float32", "--block-sizes", "16", "-o", str(folder)]
    shown = CliRunner().invoke(main, [*asked, "--json"], catch_exceptions=False)
    document = json.loads(shown.stdout)
    used = artefacts.read(folder)
    assert (
        document["manifest_sha256"]
        == used.digest
        == hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest()
    )
    asked_for = AttentionSpec.from_model("smollm2-135m", q_dtype="float32"), CacheLayout(block_size=16)
    chosen = dict.fromkeys((*shipping._rule(*asked_for, None).variants, *shipping._defaults(*asked_for)))
    others = ["write_kv, copy_blocks and merge_states", "probes of memory and arithmetic", "the prefix index"]
    assert document["compiled"] == [*others, *(variant.name for variant in chosen)]
    assert len(used.kernels) == len(built.kernels) + len(chosen), "the first model's stay"
    assert used.rules == built.rules, "nothing was tuned for the second"
    told = CliRunner().invoke(main, asked, catch_exceptions=False).stdout
    assert f"PAGEGEN_ARTEFACTS={folder}\n" in told
    assert f"PAGEGEN_ARTEFACTS_SHA256={used.digest}\n" in told


def test_a_gpu_is_refused_with_what_to_do_instead(tmp_path):
    asked = ["build", "--model", "smollm2-135m", "--block-sizes", "16", "--target", "sm_90", "-o", str(tmp_path / "a")]
    result = CliRunner().invoke(main, asked)
    assert result.exit_code == 2
    assert "TRITON_CACHE_DIR" in result.stderr
    assert not (tmp_path / "a").exists()


def test_the_doctor_says_what_is_used_and_why_not(folder, built, monkeypatch):
    assert doctor._artefacts_lines(doctor.artefacts()) == []
    monkeypatch.setenv("PAGEGEN_ARTEFACTS", str(folder))
    found = doctor.artefacts()
    assert (found["used"], found["manifest_sha256"], found["rules"]) == (True, built.sha256, 1)
    (line,) = doctor._artefacts_lines(found)
    assert line[1].startswith(f"{folder} ({len(built.kernels)} kernels by ")
    folder.chmod(0o777)
    (line,) = doctor._artefacts_lines(doctor.artefacts())
    assert line[1].startswith(f"{folder} is not used: {folder} must be writable by you alone")
