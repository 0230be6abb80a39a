"""`pagegen tune` from the command line: arguments, output, exit codes."""

from __future__ import annotations

import contextlib
import json

import pytest
from click.testing import CliRunner
from pagegen_autotune import tuner
from tuning_fakes import DEFAULT, DEVICE, PROFILE, FakeBench, table

from pagegen import targets
from pagegen.cli.main import main
from pagegen.cli.option_types import DurationType
from pagegen.db import open_db
from pagegen.spec import AttentionSpec, CacheLayout, Target


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """Commands run against this bench, in place of real kernels."""
    found = FakeBench(table(s8=0.8))
    monkeypatch.setattr(targets, "current_device", lambda target: DEVICE)
    monkeypatch.setattr(targets, "code_hash", lambda target: "hash-1")
    monkeypatch.setattr(targets, "unsupported", lambda spec, target: None)
    monkeypatch.setattr(targets, "default_variant", lambda spec, layout, target, *, decode: DEFAULT)
    monkeypatch.setattr(tuner, "IsolatedBench", lambda *args, **options: contextlib.nullcontext(found))
    monkeypatch.setenv("PAGEGEN_DB", str(tmp_path / "default.db"))
    PROFILE.save(tmp_path / "traffic.json")
    monkeypatch.chdir(tmp_path)
    return found


def run(*arguments):
    command = ["tune", "--model", "llama-3.1-8b", "--profile", "traffic.json", "--target", "cpu", *arguments]
    return CliRunner().invoke(main, command)


def test_json_is_one_document_on_standard_output_and_progress_goes_to_standard_error(bench):
    result = run("--block-sizes", "16,32", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["model"] == "llama-3.1-8b" and document["profile"] == "fake traffic"
    assert [row["block_size"] for row in document["block_sizes"]] == [16, 32]
    assert "trial" in result.stderr


def test_text_names_the_block_size_with_its_choice_and_confidence(bench):
    result = run("--block-sizes", "16")
    assert result.exit_code == 0
    assert "block size 16, decode: cpp:" in result.stdout and "streams=8" in result.stdout
    assert "won 9 of 9 fresh rounds" in result.stdout


def test_a_cache_is_tuned_with_its_scales(bench, tmp_path):
    assert run("--block-sizes", "16", "--db", "mine.db", "--kv-dtype", "int8", "--kv-scales", "head").exit_code == 0
    spec = AttentionSpec.from_model("llama-3.1-8b", kv_dtype="int8").replace(kv_scale_granularity="head")
    with open_db(str(tmp_path / "mine.db")) as db:
        assert db.portfolio(spec, CacheLayout(block_size=16), Target("cpu"), "hash-1") is not None


def test_the_named_database_holds_the_rule_for_the_models_spec(bench, tmp_path):
    assert run("--block-sizes", "16", "--db", "mine.db", "--kv-dtype", "float16").exit_code == 0
    spec = AttentionSpec.from_model("llama-3.1-8b", kv_dtype="float16")
    with open_db(str(tmp_path / "mine.db")) as db:
        assert db.portfolio(spec, CacheLayout(block_size=16), Target("cpu"), "hash-1") is not None
    assert not (tmp_path / "default.db").exists()


def test_an_interrupted_run_shows_what_it_has_and_ends_with_one_line_that_says_what_to_do(bench):
    bench._stop_at = 100
    result = run("--block-sizes", "16", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["interrupted"] is True
    assert "run the same command again" in result.stderr.splitlines()[-1]
    bench._stop_at = None
    assert run("--block-sizes", "16").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "interpreter"], "the interpreter's times mean nothing"),
        (["--target", "tpu"], "target must be like sm_90"),
        (["--block-sizes", "16,0"], "positive whole numbers by commas"),
        (["--block-sizes", "16;32"], "positive whole numbers by commas"),
        (["--budget", "5"], "such as 90s, 5m or 1h30m"),
        (["--budget", "0s"], "such as 90s, 5m or 1h30m"),
        (["--strategy", "magic"], "coordinate"),
        (["--kv-dtype", "float7"], "kv_dtype must be one of"),
        (["--profile", "nowhere.json"], "nowhere.json"),
        (["--model", "llama-9"], "llama-9"),
        (["--profile", ""], "got '', which is neither"),
        (["--top", "2"], "it goes with --revalidate"),
        (["--revalidate", "--trials", "5"], "--trials is for a search"),
        (["--revalidate", "--block-sizes", "16", "--order", "HND"], "--block-sizes, --order is for a search"),
    ],
)
def test_bad_usage_exits_with_2_and_says_what_was_expected(bench, arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2 and message in result.stderr
    assert bench.checked == []


def test_a_product_is_no_choice_among_a_clusters_devices(bench):
    command = ["tune", "--model", "llama-3.1-8b", "--profile", "traffic.json", "--ray", "localhost:1"]
    result = CliRunner().invoke(main, [*command, "--device", "h200"])
    assert result.exit_code == 2 and "--device is for this machine: with --ray, --devices names" in result.stderr


def test_a_database_that_cannot_be_written_fails_before_anything_is_measured(bench, tmp_path):
    (tmp_path / "garbage.db").write_text("this is no database, and it is long enough to be read as one" * 20)
    result = run("--db", "garbage.db")
    assert result.exit_code == 1 and bench.checked == []
    assert result.stderr.startswith("Error: ") and len(result.stderr.splitlines()) == 1


def test_a_spec_without_a_kernel_fails_with_the_reason(bench, monkeypatch):
    monkeypatch.setattr(targets, "unsupported", lambda spec, target: "no C++ compiler works here: install g++")
    result = run()
    assert result.exit_code == 1 and "install g++" in result.stderr


def test_a_default_that_fails_everywhere_is_one_line(bench):
    from pagegen_autotune.measure import Verdict

    from pagegen.spec import Status

    bench._bad = {DEFAULT: Verdict(status=Status.COMPILE_ERROR, detail="CompileError: no space left on device")}
    result = run("--block-sizes", "16")
    assert result.exit_code == 1 and result.stderr.splitlines()[-1].startswith("Error: no default variant ran on cpu")


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("5m", 300), ("1h", 3600), ("1h30m", 5400), ("1.5m", 90), ("1m5s", 65)]
)
def test_durations_are_read_with_their_units(text, seconds):
    assert DurationType().convert(text, None, None) == seconds


def test_the_budget_reaches_the_tuner(bench, monkeypatch):
    seen = {}
    real = tuner.tune
    monkeypatch.setattr(tuner, "tune", lambda *args, **options: seen.update(options) or real(*args, **options))
    assert run("--budget", "5m", "--order", "HND", "--block-sizes", "16,16").exit_code == 0
    assert (seen["budget_s"], seen["orders"], seen["block_sizes"]) == (300.0, ("HND",), (16,))
