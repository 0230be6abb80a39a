"""The commands that ask and look after the database: what they print, and how they fail."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import click
import pytest
from click.testing import CliRunner
from database_fakes import H100, PROFILE, SM_90, TUNED, cpu_trial, rule, trial

from pagegen import targets
from pagegen.cli.main import main
from pagegen.cli.option_types import BytesType
from pagegen.db import open_db
from pagegen.db.rows import Writer
from pagegen.spec import AttentionSpec, CacheLayout, Status, Workload

CODE = targets.code_hash(SM_90)
LLAMA = AttentionSpec.from_model("llama-3.1-8b")
ANYWHERE = replace(TUNED, page_walk="any")


@pytest.fixture(autouse=True)
def _no_device_of_this_machine(monkeypatch):
    def absent(target):
        raise ValueError(f"no {target} here")

    monkeypatch.setattr(targets, "current_device", absent)


@pytest.fixture
def url(tmp_path):
    """A database that holds one tuned block size of llama-3.1-8b."""
    layout = CacheLayout(block_size=64)
    with open_db(tmp_path / "cli.db") as db:
        db.save_portfolio(spec=LLAMA, layout=layout, device=H100, profile=PROFILE, rule=rule(ANYWHERE), code_hash=CODE)
        for i, workload in enumerate(PROFILE.workloads):
            db.record(
                trial(
                    spec=LLAMA,
                    layout=layout,
                    variant=ANYWHERE,
                    workload=workload,
                    samples_us=(40.0 + i,),
                    code_hash=CODE,
                )
            )
    return str(tmp_path / "cli.db")


@pytest.fixture
def profile(tmp_path):
    PROFILE.save(tmp_path / "fake.json")
    return str(tmp_path / "fake.json")


def run(*words, code=0):
    """The command's result; standard output alone in `.stdout`."""
    result = CliRunner().invoke(main, [str(word) for word in words])
    assert result.exit_code == code, result.output
    return result


def document(*words, code=0):
    return json.loads(run(*words, "--json", code=code).stdout)


QUERY = ("query", "--model", "llama-3.1-8b", "--target", "sm_90")


def test_query_prints_the_measured_table(url, profile):
    text = run(*QUERY, "--profile", profile, "--db", url).stdout
    assert "NVIDIA H100 80GB HBM3, profile fake traffic, best throughput first" in text
    row = next(line for line in text.splitlines() if line.lstrip().startswith("64"))
    assert "measured" in row
    assert "40.2" in row  # 0.75 x 40 + 0.25 x 41
    assert "tuned on fake traffic" in text
    assert "run pagegen tune" not in text


def test_a_product_is_asked_for_by_name_and_the_hint_says_so_too(url, profile):
    told = document(
        "query", "--model", "llama-3.1-8b", "--target", "sm_90", "--device", "h200", "--profile", profile, "--db", url
    )
    assert {row["device"] for row in told["rows"]} == {"NVIDIA H200"}
    assert "--target sm_90 --device h200" in told["hint"]


@pytest.mark.parametrize(
    "command",
    [QUERY, ("tune", *QUERY[1:]), ("simulate", *QUERY[1:], "--memory", "1GiB"),
     ("explain", *QUERY[1:], "--block-size", "16", "--batch", "2", "--context", "64")],
    ids=lambda command: command[0],
)  # fmt: skip
def test_a_product_or_a_target_that_is_not_known_is_bad_usage_in_every_command(command, tmp_path):
    said = run(*command, "--device", "a100", "--db", tmp_path / "x.db", code=2).output
    assert "--device: device must name one product of sm_90" in said and "which names one of sm_80" in said
    said = run(*command, "--target", "sm_61", "--db", tmp_path / "x.db", code=2).output
    assert "--target: target must be an arch of the device table" in said and "devices.csv" in said
    assert "url must be a path" in run(*command, "--db", "mysql://x/y", code=2).output


def test_inspect_refuses_a_target_of_which_nothing_is_known_before_it_compiles():
    said = run("inspect", "--model", "smollm2-135m", "--block-size", "16", "--target", "sm_9", code=2).output
    assert "--target: target must be an arch of the device table" in said  # LLVM would end the process


def test_query_says_which_dtype_it_asked_for_and_which_one_was_measured(url, profile):
    text = run(*QUERY, "--profile", profile, "--db", url).stdout
    assert text.startswith("llama-3.1-8b in bfloat16, cache bfloat16, on NVIDIA H100")
    other = run(*QUERY, "--profile", profile, "--db", url, "--q-dtype", "float16").stdout
    assert other.startswith("llama-3.1-8b in float16") and "measured was bfloat16 only (--q-dtype)" in other


def test_query_says_which_scales_to_tune_and_blames_no_query_dtype_for_the_cache(url, profile):
    cache = ("--kv-dtype", "int8", "--kv-scales", "token_head", "--kv-zero-points")
    said = run(*QUERY, "--profile", profile, "--db", url, *cache).stdout
    assert "cache int8" in said and "nothing was measured" in said and "measured was" not in said
    assert "--kv-dtype int8 --kv-scales token_head --kv-zero-points" in said


def test_query_says_where_no_sequence_fits(url, profile):
    said = run(*QUERY, "--profile", profile, "--db", url, "--memory", "1KiB").stdout
    assert "no sequence fits this memory" in said and "a tie" not in said


def test_query_calls_block_sizes_of_equal_times_a_tie(tmp_path, profile, url):
    shown = document(*QUERY, "--profile", profile, "--db", tmp_path / "none.db")
    assert shown["ties"] == [16, 32, 64, 128] and len({round(row["step_us"], 1) for row in shown["rows"]}) == 1
    assert (
        "a tie: the step times of block sizes 16, 32, 64, 128 are alike"
        in run(*QUERY, "--profile", profile, "--db", tmp_path / "none.db").stdout
    )
    assert "a tie" not in run(*QUERY, "--profile", profile, "--db", url).stdout  # one block size


def test_query_as_json_is_one_document_with_every_figure(url, profile):
    found = document(*QUERY, "--profile", profile, "--db", url, "--memory", "40GiB", "--objective", "latency")
    assert (found["best_block_size"], found["memory_bytes"], found["num_layers"]) == (64, 40 * 2**30, 32)
    (row,) = found["rows"]
    assert (row["kind"], row["step_us"], row["measured_share"]) == ("measured", 40.25, 1)
    assert row["admitted_sequences"] > 0
    assert found["hint"] is None


def test_query_marks_predictions_and_says_how_to_measure(tmp_path, profile):
    missing = tmp_path / "none.db"
    result = run(*QUERY, "--profile", profile, "--db", missing)
    assert "predicted" in result.stdout
    assert "nothing was measured: all times are predictions; run pagegen tune --model llama-3.1-8b" in result.stdout
    assert "there is no tuning database at" in result.stdout
    assert not missing.exists()


def test_query_says_when_only_a_part_was_measured(url, profile):
    with open_db(url) as db:
        layout = CacheLayout(block_size=32)
        db.record(trial(spec=LLAMA, layout=layout, code_hash=CODE))
        db.save_portfolio(spec=LLAMA, layout=layout, device=H100, profile=PROFILE, rule=rule(), code_hash=CODE)
    result = run(*QUERY, "--profile", profile, "--db", url)
    assert "75% measured" in result.stdout
    assert "some rows rest on the cost model" in result.stdout


def test_query_does_not_call_cut_batches_unmeasured(url, profile):
    memory = 64 * 4096 * 32 * 40  # forty blocks over all layers: two sequences
    result = run(*QUERY, "--profile", profile, "--db", url, "--memory", f"{memory}B")
    assert "scaled" in result.stdout
    assert "memory cuts some batches" in result.stdout
    assert "nothing was measured" not in result.stdout


@pytest.mark.parametrize(
    ("text", "size"), [("40GiB", 40 * 2**30), ("512MiB", 2**29), ("1.5KiB", 1536), ("7B", 7), ("2TiB", 2**41)]
)
def test_sizes_with_binary_units_are_read(text, size):
    assert BytesType().convert(text, None, None) == size


@pytest.mark.parametrize(
    "text", ["40", "40GB", "40G", "40 GiB", "-1GiB", "0GiB", "0.1B", "GiB", "1e3MiB", "nanGiB", "40gib", "٤GiB", "1_0B"]
)
def test_sizes_that_could_mean_something_else_are_refused(text):
    with pytest.raises(click.BadParameter, match="such as 40GiB"):
        BytesType().convert(text, None, None)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--memory", "40GB"), "such as 40GiB"),
        (("--profile", "no-such-profile"), "no-such-profile"),
        (("--objective", "speed"), "'speed'"),
        (("--target", "sm_x"), "target must be like"),
        (("--model", "llama-9000"), "is not in the geometry table"),
    ],
)
def test_bad_usage_of_query_exits_with_2_and_says_what(url, profile, words, said):
    result = run(*QUERY, "--profile", profile, "--db", url, *words, code=2)
    assert said in result.output


# --- explain --------------------------------------------------------------------------------------------------

EXPLAIN = (
    "explain",
    "--model",
    "llama-3.1-8b",
    "--block-size",
    64,
    "--target",
    "sm_90",
    "--batch",
    3,
    "--context",
    1000,
)


def test_explain_tells_variant_reason_time_and_share_of_the_roofline(url):
    found = document(*EXPLAIN, "--db", url)
    assert found["variant_name"] == ANYWHERE.name
    assert found["reason"] == "tuned on fake traffic"
    assert found["roofline_share"] == pytest.approx(found["roofline_us"] / found["predicted_us"])
    assert found["evidence"]["time"] == "scaled"
    values = {q["name"]: q["value"] for q in found["quantities"]}
    assert values["kv_bytes"] == 3 * 1000 * 4096
    assert values["flops"] == 3 * 1000 * 32 * 512
    assert values["wasted_slots"] == 3 * 24
    text = run(*EXPLAIN, "--db", url).stdout
    assert ANYWHERE.name in text
    assert "why       tuned on fake traffic\n" in text
    assert "grade     near, confidence medium, distance " in text
    assert "kv_token_bytes" in text


def test_explain_without_a_database_tells_the_ladder(tmp_path):
    text = run(*EXPLAIN, "--db", tmp_path / "none.db").stdout
    assert "the cost model's choice for NVIDIA H100 80GB HBM3, not measured; there is no tuning database" in text
    assert "(predicted)" in text


def test_explain_lists_what_the_rules_reject(url):
    found = document(*EXPLAIN, "--db", url, "--rejected")
    reasons = [r["reason"] for r in found["rejected"]]
    assert any("tile_in_page" in reason for reason in reasons)
    assert all(r["variants"] > 0 and r["example"] for r in found["rejected"])
    counts = [r["variants"] for r in found["rejected"]]
    assert counts == sorted(counts, reverse=True)
    assert "rejected because" in run(*EXPLAIN, "--db", url, "--rejected").stdout


def test_explain_prints_the_plan_and_what_else_there_is(url):
    lines = run(*EXPLAIN, "--db", url).stdout.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("step, cheapest path first"))
    rows = [re.split(r"  +", line.strip()) for line in lines[first + 2 : lines.index("", first)]]
    assert rows[0][-1].startswith("plan") and all("plan" not in row[-1] for row in rows[1:])
    assert [float(row[1]) for row in rows] == sorted(float(row[1]) for row in rows)
    named = {row[0] for row in rows}
    assert {"rotate and write + attend", "rotate and write + gather + dense"} <= named
    assert any(name.startswith("rotate + write + ") for name in named)
    assert not any("prefix" in name for name in named)


def test_explain_measures_a_path_where_trials_did_and_says_of_the_rest_that_it_is_predicted(url):
    batch = Workload(context_lens=(1000,) * 3)
    with open_db(url) as db:
        for us in (54.0, 56.0):
            db.record(
                trial(spec=LLAMA, layout=CacheLayout(block_size=64), variant=ANYWHERE, workload=batch,
                      samples_us=(us,), code_hash=CODE)
            )  # fmt: skip
    found = document(*EXPLAIN, "--db", url)
    taken = [path for path in found["paths"] if path["dispatch"]]
    assert taken and all(path["cost"] == "mixed" and path["measured_us"] == 55.0 for path in taken)
    assert {step["cost"] for path in taken for step in path["steps"]} == {"measured", "predicted"}
    assert all(path["cost"] == "predicted" for path in found["paths"] if not path["dispatch"])
    for path in found["paths"]:
        assert path["us"] == pytest.approx(sum(step["us"] for step in path["steps"]))
    assert any("mixed" in line and "dispatch" in line for line in run(*EXPLAIN, "--db", url).stdout.splitlines())


def test_explain_of_a_shared_prefix_shows_the_cascade(url):
    found = document(*EXPLAIN, "--shared-prefix", 900, "--db", url)
    assert found["prefix_groups"] == [[14, [0, 1, 2]]]  # whole blocks of 64
    cascade = [path for path in found["paths"] if path["path"].endswith("attend prefix + attend own + merge")]
    assert len(cascade) == 2
    assert {step["does"] for step in cascade[0]["steps"][-3:]} == {"pagegen.cascade_attention"}
    assert "attend prefix + attend own + merge" in run(*EXPLAIN, "--shared-prefix", 900, "--db", url).stdout
    assert document(*EXPLAIN, "--shared-prefix", 63, "--db", url)["prefix_groups"] == []


def test_a_prefix_that_reaches_into_the_queries_is_bad_usage(url):
    words = (*EXPLAIN, "--queries", 10, "--shared-prefix", 991, "--db", url)
    assert "--shared-prefix must be at most the 990 tokens" in run(*words, code=2).output


def test_explain_of_the_interpreter_has_no_roofline(tmp_path, monkeypatch):
    monkeypatch.undo()
    words = [w if w != "sm_90" else "interpreter" for w in EXPLAIN]
    found = document(*words, "--db", tmp_path / "none.db")
    assert (found["roofline_us"], found["roofline_share"]) == (None, None)
    assert found["predicted_us"] > 0


def test_more_queries_than_context_is_bad_usage(url):
    assert "--queries must be at most --context" in run(*EXPLAIN, "--queries", 1001, "--db", url, code=2).output


# --- db ---------------------------------------------------------------------------------------------------------


def test_db_stats_and_trials_show_what_is_there(url):
    assert document("db", "stats", "--db", url)["trials_by_target"] == {"sm_90": 2}
    assert "trials by status: ok" in run("db", "stats", "--db", url).stdout
    found = document("db", "trials", "--db", url)
    assert found["matching"] == 2
    assert {t["median_us"] for t in found["trials"]} == {40.0, 41.0}
    assert "2 of 2 trials" in run("db", "trials", "--db", url).stdout


def test_db_trials_filters_and_limits_to_the_newest(url):
    with open_db(url) as db:
        db.record(cpu_trial(status=Status.TIMEOUT, samples_us=(), created_at="2027"))
    assert document("db", "trials", "--db", url, "--limit", 1)["trials"][0]["target"] == "cpu"
    assert document("db", "trials", "--db", url, "--status", "timeout")["matching"] == 1
    assert document("db", "trials", "--db", url, "--target", "sm_90", "--block-size", 64)["matching"] == 2
    assert document("db", "trials", "--db", url, "--model", "qwen2.5-7b")["matching"] == 0


def test_db_export_import_and_merge_move_records(url, tmp_path):
    lines = document("db", "export", tmp_path / "out.jsonl", "--db", url)["records"]
    assert lines == len((tmp_path / "out.jsonl").read_text().splitlines())
    other = tmp_path / "other.db"
    assert document("db", "import", tmp_path / "out.jsonl", "--db", other)["added"] == 4
    assert "0 records added, 4 there already" in run("db", "merge", url, "--db", other).stdout


def test_db_import_names_bad_lines_and_exits_with_1_after_taking_the_good_ones(url, tmp_path):
    run("db", "export", tmp_path / "out.jsonl", "--db", url)
    with (tmp_path / "out.jsonl").open("a") as file:
        file.write("oops\n")
    other = tmp_path / "other.db"
    result = run("db", "import", tmp_path / "out.jsonl", "--db", other, "--json", code=1)
    assert json.loads(result.stdout)["added"] == 4
    assert "left out: line " in result.stderr
    assert "1 records of" in result.stderr.splitlines()[-1]


def test_db_verify_is_silent_success_or_a_list_and_exit_1(url):
    assert "is sound" in run("db", "verify", "--db", url).stdout
    with open_db(url) as db, db.atomic() as connection:  # not by `record`, which refuses it
        Writer(connection).add_trial(trial(samples_us=(5e9,)))
    result = run("db", "verify", "--db", url, code=1)
    assert "over an hour" in result.stdout
    assert "has 1 problems" in result.stderr


def test_db_prune_keeps_the_present_code_and_can_rehearse(url):
    with open_db(url) as db:
        db.record(trial(code_hash="old"))
    rehearsed = document("db", "prune", "--target", "sm_90", "--dry-run", "--db", url)
    assert rehearsed["removed"]["trials"] == 1
    assert document("db", "trials", "--db", url)["matching"] == 3
    assert document("db", "prune", "--target", "sm_90", "--db", url)["kept_code_hashes"] == [CODE]
    assert document("db", "trials", "--db", url)["matching"] == 2


LOOKING = (("stats",), ("trials",), ("verify",), ("export", "OUT"), ("prune", "--dry-run", "--target", "sm_90"))


@pytest.mark.parametrize("words", LOOKING, ids=lambda w: w[0])
def test_looking_at_a_database_that_is_not_there_fails_in_one_line_and_makes_nothing(tmp_path, words):
    words = [str(tmp_path / "out.jsonl") if w == "OUT" else w for w in words]
    result = run("db", *words, "--db", tmp_path / "none.db", code=1)
    assert result.stdout == ""
    assert result.stderr.startswith("Error: there is no tuning database at")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [("stats",), ("merge", "GARBAGE"), ("import", "GARBAGE")], ids=lambda w: w[0])
def test_garbage_fails_with_the_file_and_no_traceback(tmp_path, words):
    garbage = tmp_path / "garbage.db"
    garbage.write_bytes(b"\x00\xff garbage\n" * 99)
    words = [str(garbage) if w == "GARBAGE" else w for w in words]
    at = garbage if words == ["stats"] else tmp_path / "own.db"
    result = run("db", *words, "--db", at, code=1)
    assert "garbage.db" in result.stderr
    assert "Traceback" not in result.output


def test_exporting_into_a_folder_that_is_not_there_fails_in_one_line(url, tmp_path):
    result = run("db", "export", tmp_path / "no" / "out.jsonl", "--db", url, code=1)
    assert "No such file or directory): name another file or folder" in result.stderr


def test_sql_prints_a_statement_that_runs_as_it_stands_and_asks_nothing(url, profile):
    import sqlite3

    listing = run("db", "trials", "--db", url, "--model", "llama-3.1-8b", "--block-size", "64", "--sql").stdout
    assert listing.startswith("SELECT")
    assert document(*QUERY, "--profile", profile, "--db", url, "--sql")["sql"].startswith("-- the block sizes")
    with sqlite3.connect(url) as connection:
        assert len(connection.execute(listing).fetchall()) == 2
        asked = run(*QUERY, "--profile", profile, "--db", url, "--sql").stdout
        statements = [part for part in asked.split(";") if part.strip()]
        rows = [connection.execute(statement).fetchall() for statement in statements]
    assert rows[0] == [(64, "NHD")]
    assert [row[0] for row in rows[1]] == ["[40.0]", "[41.0]"]
    assert "-- samples at block size 64 NHD on NVIDIA H100" in asked


def test_tables_come_in_every_format_of_tabulate(url, profile):
    assert "| block" in run(*QUERY, "--profile", profile, "--db", url, "--format", "github").stdout.replace(
        "|   block", "| block"
    )
    assert "<table>" in run("db", "trials", "--db", url, "--format", "html").stdout
    assert "\t" in run("db", "stats", "--db", url, "--format", "tsv").stdout
    assert "Invalid value for '--format'" in run("db", "stats", "--db", url, "--format", "xyz", code=2).output


def test_trials_are_limited_in_the_database_and_counted_there(url):
    found = document("db", "trials", "--db", url, "--limit", "1")
    assert (len(found["trials"]), found["matching"]) == (1, 2)


def test_pooled_trials_tell_their_sources_and_conflicts(url):
    with open_db(url) as db:
        db.record(trial(spec=LLAMA, layout=CacheLayout(block_size=64), variant=ANYWHERE, code_hash=CODE,
                        workload=PROFILE.workloads[0], samples_us=(900.0,), created_at="2027"))  # fmt: skip
    pools = document("db", "trials", "--db", url, "--pooled")["pools"]
    pool = next(p for p in pools if len(p["sources"]) == 2)
    assert pool["samples_us"] == [40.0, 900.0]
    assert pool["conflict"] == "medians from 40 to 900 us"
    (told,) = document("db", "conflicts", "--db", url)["conflicts"]
    assert ANYWHERE.name in told["what"]
    assert len(told["answers"]) == 2


def test_explain_tells_the_ladder_and_the_near_misses_field_by_field(url):
    words = ("explain", "--model", "llama-3.1-8b", "--block-size", "64", "--target", "sm_90", "--db", url)
    far = document(*words, "--batch", "64", "--context", "100000")
    assert (far["grade"], far["confidence"]) == ("predicted", "low")
    assert [rung["state"] for rung in far["ladder"]] == ["missed"] * 4 + ["answered", "below"]
    (miss,) = far["near_misses"]
    assert "batch.num_seqs" in miss["fields"]
    text = run(*words, "--batch", "64", "--context", "100000").stdout
    for part in ("predicted", "further than the radius of 3", "near miss", "batch.num_seqs", "asked for"):
        assert part in text
