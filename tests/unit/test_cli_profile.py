"""`pagegen profile import / list / show` as people call it."""

import gzip
import json
import shlex

import pytest
from click.testing import CliRunner

from pagegen.cli.main import main
from pagegen.spec import Profile

HEADER = "arrival_s,prompt_tokens,output_tokens\n"


def call(*arguments):
    return CliRunner().invoke(main, ["profile", *map(str, arguments)])


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "chat.csv"
    path.write_text(HEADER + "".join(f"{i * 0.5},{50 + i * 13 % 700},{1 + i * 7 % 90}\n" for i in range(120)))
    return path


def failure(result):
    """The one line on standard error of a command that failed with exit code 1."""
    assert result.exit_code == 1 and result.stdout == ""
    line = result.stderr.strip()
    assert line.startswith("Error: ") and "\n" not in line
    return line


def test_import_writes_a_profile_and_shows_it(trace, tmp_path):
    result = call("import", trace, "-o", tmp_path / "p.json", "--source", "here", "--licence", "CC0")
    assert result.exit_code == 0, result.output
    assert "name: chat" in result.stdout and "prompt_tokens" in result.stdout and "left out" not in result.stdout
    profile = Profile.load(tmp_path / "p.json")
    assert (profile.name, profile.source, profile.licence) == ("chat", "here", "CC0")


def test_import_prints_one_json_document_and_takes_every_setting(trace, tmp_path):
    settings = "--name n --max-num-seqs 4 --max-batch-tokens 64 --kv-tokens 4096 --rate-scale 2 --batches 5 --seed 9"
    result = call("import", trace, "-o", tmp_path / "p.json", "--json", *settings.split())
    document = json.loads(result.stdout)
    assert document["name"] == "n" and document["requests"] == 120 and document["batches"] <= 5
    assert document["bad_rows"] == 0 and document["file"] == str(tmp_path / "p.json")
    server, simulation = document["figures"]["server"], document["figures"]["simulation"]
    assert (server["max_num_seqs"], server["max_batch_tokens"], server["kv_tokens"]) == (4, 64, 4096)
    assert (simulation["rate_scale"], simulation["seed"], simulation["utilisation"]) == (2.0, 9, None)


def test_more_sequences_than_the_usual_token_budget_raise_the_budget(trace, tmp_path):
    result = call("import", trace, "-o", tmp_path / "p.json", "--json", "--max-num-seqs", 1024)
    assert json.loads(result.stdout)["figures"]["server"]["max_batch_tokens"] == 1024


def test_malformed_row_fails_with_its_line_and_the_way_out(trace, tmp_path):
    trace.write_text(trace.read_text() + "99,-3,1\n")
    line = failure(call("import", trace, "-o", tmp_path / "p.json"))
    assert "chat.csv line 122: prompt_tokens must be" in line and "--skip-bad" in line
    assert not (tmp_path / "p.json").exists()


def test_skip_bad_reports_how_many_rows_were_left_out_and_the_first_of_them(trace, tmp_path):
    trace.write_text(trace.read_text() + "99,-3,1\n" * 7)
    text = call("import", trace, "-o", tmp_path / "p.json", "--skip-bad").stdout
    assert text.startswith("7 malformed rows left out:\n  line 122: prompt_tokens must be") and "and 2 more" in text
    document = json.loads(call("import", trace, "-o", tmp_path / "p.json", "--skip-bad", "--json").stdout)
    assert document["bad_rows"] == 7 and len(document["bad_examples"]) == 5 and document["figures"]["bad_rows"] == 7


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (HEADER.encode(), "holds no request"),
        (b"a,b\n1,2\n", "the header must be"),
        (gzip.compress(b"x", mtime=0), "got gzip"),
        (HEADER.encode() + b"0,900000,1\n", "kv_tokens must hold"),
    ],
)
def test_unusable_trace_is_one_line(trace, tmp_path, content, says):
    trace.write_bytes(content)
    assert says in failure(call("import", trace, "-o", tmp_path / "p.json", "--skip-bad"))


@pytest.mark.parametrize("target", ["missing/p.json", "."])
def test_output_that_cannot_be_written_is_told_before_the_work(trace, tmp_path, target, monkeypatch):
    monkeypatch.setattr("pagegen.cli.profile.read_trace", lambda *_, **__: pytest.fail("the trace was read"))
    assert "cannot be written" in failure(call("import", trace, "-o", tmp_path / target))


@pytest.mark.parametrize(
    "arguments",
    [
        ["--max-num-seqs", "0"],
        ["--max-num-seqs", "64", "--max-batch-tokens", "32"],
        ["--kv-tokens", "15"],
        ["--utilisation", "0"],
        ["--utilisation", "nan"],
        ["--rate-scale", "-1"],
        ["--rate-scale", "nan"],
        ["--rate-scale", "inf"],
        ["--batches", "1"],
        ["--seed", "-1"],
        ["--seed", "x"],
    ],
)
def test_bad_setting_is_a_usage_error(trace, tmp_path, arguments):
    result = call("import", trace, "-o", tmp_path / "p.json", *arguments)
    assert result.exit_code == 2 and result.stdout == "" and arguments[-2].strip("-") in result.stderr.replace("_", "-")


def test_trace_is_never_overwritten_by_its_profile(trace):
    before = trace.read_bytes()
    assert call("import", trace, "-o", trace.parent / "." / trace.name).exit_code == 2
    assert trace.read_bytes() == before


def test_missing_trace_and_missing_output_are_usage_errors(trace, tmp_path):
    assert call("import", tmp_path / "none.csv", "-o", tmp_path / "p.json").exit_code == 2
    assert call("import", trace).exit_code == 2


def test_list_names_the_shipped_profiles_with_their_licences():
    rows = json.loads(call("list", "--json").stdout)["profiles"]
    assert [row["name"] for row in rows] == [
        "azure-code",
        "azure-conversation",
        "mooncake-conversation",
        "mooncake-shared",
        "reasoning",
    ]
    assert all(row["licence"] and row["source"] and row["requests"] > 8000 for row in rows)
    assert "azure-conversation" in call("list").stdout


def test_show_gives_figures_and_batches_of_a_shipped_profile_and_of_a_file(trace, tmp_path):
    text = call("show", "azure-conversation").stdout
    assert "Splitwise" in text and "CC-BY-4.0" in text and "decode step share" in text and "mean context error" in text
    call("import", trace, "-o", tmp_path / "p.json")
    shown = json.loads(call("show", tmp_path / "p.json", "--json").stdout)
    assert Profile.from_dict(shown).workloads == Profile.load(tmp_path / "p.json").workloads


def test_show_of_a_hand_made_profile_without_figures_works(tmp_path):
    batch = {"context_lens": [5, 9], "query_lens": [1, 9], "weight": 1}
    (tmp_path / "p.json").write_text(json.dumps({"version": 1, "name": "mine", "batches": [batch]}))
    result = call("show", tmp_path / "p.json")
    assert result.exit_code == 0 and "mine" in result.stdout and "mixed" in result.stdout


@pytest.mark.parametrize("content", [None, "{", "[]", '{"version": 99}', '{"version": 1, "name": "x"}'])
def test_show_of_what_is_no_profile_is_one_line(tmp_path, content):
    path = tmp_path / "p.json"
    if content is not None:
        path.write_text(content)
    result = call("show", path)
    assert result.exit_code == 2 and "pagegen profile list" in result.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--rate-scale 2 --utilisation 0.5", "name one of them"),
        ("--no-prefix-reuse --prefix-block-tokens 4", "does not go with --no-prefix-reuse"),
        ("--prefix-block-tokens 4", "has none"),
        ("--name ''", "must be a name"),
    ],
)
def test_import_refuses_an_option_that_it_would_drop(trace, tmp_path, words, said):
    result = call("import", trace, "-o", tmp_path / "p.json", *shlex.split(words))
    assert result.exit_code == 2 and said in result.stderr.splitlines()[-1]
    assert not (tmp_path / "p.json").exists()


def test_leaving_rows_out_is_offered_for_a_malformed_row_and_not_for_a_header(trace, tmp_path):
    trace.write_text("time,prompt,output\n1,2,3\n")
    assert "--skip-bad" not in failure(call("import", trace, "-o", tmp_path / "p.json"))


SHARED = "arrival_s,prompt_tokens,output_tokens,prefix_hash_ids\n" + "".join(
    f"{i * 0.5},{50 + i % 3 * 40},{1 + i * 7 % 90},{i % 3}0-{i % 3}{-(-(50 + i % 3 * 40) // 16) - 1}\n"
    for i in range(120)
)


def test_prompts_share_what_their_ids_say_unless_that_is_refused(tmp_path):
    path = tmp_path / "shared.csv"
    path.write_text(SHARED)
    shown = call("import", path, "-o", tmp_path / "p.json")
    assert shown.exit_code == 0 and "sharing: prefix block tokens 16" in shown.stdout, shown.output
    document = json.loads(call("import", path, "-o", tmp_path / "p.json", "--json").stdout)
    assert document["figures"]["sharing"]["hit_share"] > 0.5 and "hint" not in document
    document = json.loads(call("import", path, "-o", tmp_path / "p.json", "--json", "--no-prefix-reuse").stdout)
    assert document["figures"]["sharing"] is None and document["figures"]["prefix_reuse_share"] > 0.5


def test_where_lengths_do_not_tell_what_an_id_stands_for_that_is_said_and_can_be_named(tmp_path):
    path = tmp_path / "odd.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens,prefix_hash_ids\n0,100,5,0-2\n1,100,5,0-1\n2,90,5,0-2\n")
    document = json.loads(call("import", path, "-o", tmp_path / "p.json", "--json").stdout)
    assert document["figures"]["sharing"] is None and "--prefix-block-tokens" in document["hint"]
    assert "nothing was shared" in call("import", path, "-o", tmp_path / "p.json").stdout
    document = json.loads(call("import", path, "-o", tmp_path / "p.json", "--json", "--prefix-block-tokens", 32).stdout)
    assert document["figures"]["sharing"]["prefix_block_tokens"] == 32 and "hint" not in document


def test_blocks_of_the_simulated_cache_may_have_another_size(trace, tmp_path):
    result = call("import", trace, "-o", tmp_path / "p.json", "--json", "--block-tokens", 128)
    assert json.loads(result.stdout)["figures"]["server"]["block_tokens"] == 128
    result = call("import", trace, "-o", tmp_path / "p.json", "--kv-tokens", 64, "--block-tokens", 128)
    assert result.exit_code == 2 and "kv_tokens must be at least 128" in result.stderr
