"""Traces as people have them: hostile, half broken, or fine."""

import gzip
import json

import numpy as np
import pytest
from pagegen_autotune.reuse import PrefixReuse
from pagegen_autotune.trace import Trace, TraceError, read_trace
from pagegen_autotune.trace_rows import MAX_LINE_BYTES, MAX_TOKENS

HEADER = "arrival_s,prompt_tokens,output_tokens"


@pytest.fixture
def write(tmp_path):
    def write(content, name="trace.csv"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def requests(trace):
    arrivals = [None] * len(trace) if trace.arrival_s is None else trace.arrival_s.tolist()
    return list(zip(arrivals, trace.prompt_tokens.tolist(), trace.output_tokens.tolist(), strict=True))


def test_csv_is_read_in_order(write):
    trace = read_trace(write(f"{HEADER}\n0,374,44\n4.315,396,109\n"))
    assert requests(trace) == [(0.0, 374, 44), (4.315, 396, 109)]
    assert trace.reuse_share is None and trace.bad_rows == 0


def test_jsonl_and_csv_of_the_same_requests_give_the_same_trace(write):
    rows = [(0.5, 10, 3), (1.25, 7, 0)]
    keys = HEADER.split(",")
    lines = "\n".join(json.dumps(dict(zip(keys, row, strict=True))) for row in rows)
    csv = "\n".join(",".join(map(str, row)) for row in rows)
    assert requests(read_trace(write(lines, "t.jsonl"))) == requests(read_trace(write(f"{HEADER}\n{csv}"))) == rows


def test_jsonl_is_told_by_its_first_character_where_the_name_does_not_say(write):
    assert requests(read_trace(write('\n {"arrival_s": null, "prompt_tokens": 5, "output_tokens": 2}\n', "trace"))) == [
        (None, 5, 2)
    ]


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("end", ["", "\n", "\n\n \n"])
def test_byte_order_mark_crlf_and_blank_lines_do_not_matter(write, newline, bom, end):
    text = newline.join([HEADER, "0,5,2", "", " 1 , 6 , 3 "]) + end.replace("\n", newline)
    assert requests(read_trace(write(bom + text.encode()))) == [(0, 5, 2), (1, 6, 3)]


def test_columns_are_found_by_name(write):
    trace = read_trace(write("output_tokens,arrival_s,prompt_tokens\n1,2,3\n"))
    assert requests(trace) == [(2, 3, 1)]


def test_empty_arrivals_mean_a_trace_without_times(write):
    trace = read_trace(write(f"{HEADER}\n,5,2\n,6,3\n"))
    assert trace.arrival_s is None and trace.duration_s == 0 and len(trace) == 2


def test_unsorted_arrivals_are_sorted_and_equal_ones_keep_their_order(write):
    trace = read_trace(write(f"{HEADER}\n3,1,1\n1,2,1\n3,3,1\n1,4,1\n0,5,1\n"))
    assert trace.prompt_tokens.tolist() == [5, 2, 4, 1, 3]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"\xef\xbb\xbf\r\n\n", "is empty"),
        (HEADER, "a header alone"),
        ("timestamp,input_length\n0,1\n", "line 1: the header must be arrival_s.*'timestamp'"),
        ("0,5,2\n1,6,3\n", "line 1: the header must be.*'0'"),
        ("arrival_s,prompt_tokens\n0,1\n", "got no output_tokens"),
        (f"{HEADER},prompt_tokens\n0,1,1,1\n", "prompt_tokens twice"),
        (f"{HEADER},prefix_hash_id\n0,1,1,1\n", "'prefix_hash_id'"),
        (f"{HEADER}\n0,1,1\n".encode("utf-16"), "line 1: expected UTF-8"),
        (HEADER.encode() + b"\n0,1,\xff\n", "line 2: expected UTF-8"),
        (gzip.compress(HEADER.encode(), mtime=0), "got gzip: decompress it first"),
        (b"PK\x03\x04rest", "got zip"),
    ],
)
def test_file_that_is_no_trace_is_refused_even_when_bad_rows_are_skipped(write, content, says):
    path = write(content)
    for skip_bad in (False, True):
        with pytest.raises(TraceError, match=says) as error:
            read_trace(path, skip_bad=skip_bad)
        assert str(path) in str(error.value) and "\n" not in str(error.value)


BAD_ROWS = {
    "0,-5,2": "prompt_tokens must be an integer from 1 to 16777216, got '-5'",
    "0,0,2": "prompt_tokens must be an integer from 1",
    "0,5,-1": "output_tokens must be an integer from 0",
    "0,5.0,2": "prompt_tokens .* got '5.0'",
    "0,1e3,2": "got '1e3'",
    "0,1_000,2": "got '1_000'",
    "0,٥,2": "prompt_tokens",
    "0,,2": "got ''",
    "0,nan,2": "got 'nan'",
    f"0,{MAX_TOKENS + 1},2": "from 1 to 16777216",
    f"0,{'9' * 5000},2": "prompt_tokens .*99\\.\\.\\.",
    "nan,5,2": "arrival_s must be seconds from 0 to 1e\\+11, or empty in every row, got 'nan'",
    "inf,5,2": "arrival_s",
    "-1,5,2": "arrival_s",
    "1e12,5,2": "arrival_s",
    "1_0,5,2": "arrival_s",
    "2023-11-16 18:17:03,5,2": "arrival_s",
    ",5,2": "arrival_s must hold a time",
    "0,5": "expected 3 fields .* got 2",
    "0,5,2,9": "got 4",
    "0;5;2": "got 1",
    HEADER: "the header once more",
    '"0,5,2': "expected 3 fields",
    "0,5\x00,2": "(prompt_tokens|line contains NUL)",  # Python 3.10 refuses the character itself
    "0,5,2 " + "x" * MAX_LINE_BYTES: "bytes a line",
}


@pytest.mark.parametrize("row", BAD_ROWS, ids=lambda row: row[:24])
def test_malformed_row_is_named_by_line_or_skipped_and_counted(write, row):
    path = write(f"{HEADER}\n0,1,1\n\n{row}\n7,2,2\n")
    with pytest.raises(TraceError, match=f"line 4: .*{BAD_ROWS[row]}") as error:
        read_trace(path)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400
    trace = read_trace(path, skip_bad=True)
    assert requests(trace) == [(0, 1, 1), (7, 2, 2)]
    assert trace.bad_rows == 1 and trace.bad_examples[0].startswith("line 4: ")


BAD_OBJECTS = {
    "[1, 2]": "expected one JSON object",
    "{": "expected one JSON object",
    "5": "expected one JSON object",
    '{"prompt_tokens": 5}': "got no output_tokens",
    '{"prompt_tokens": 5, "output_tokens": 2, "user": 1}': "'user'",
    '{"prompt_tokens": 5, "prompt_tokens": 6, "output_tokens": 2}': "each key once",
    '{"prompt_tokens": true, "output_tokens": 2}': "prompt_tokens .* got True",
    '{"prompt_tokens": 5.0, "output_tokens": 2}': "got 5.0",
    '{"prompt_tokens": NaN, "output_tokens": 2}': "got nan",
    '{"prompt_tokens": null, "output_tokens": 2}': "got None",
    '{"prompt_tokens": [5], "output_tokens": 2}': "got \\[5\\]",
    '{"prompt_tokens": 5, "output_tokens": 2, "arrival_s": NaN}': "arrival_s",
    '{"prompt_tokens": 5, "output_tokens": 2, "arrival_s": true}': "arrival_s",
    '{"prompt_tokens": 5, "output_tokens": 2, "arrival_s": {}}': "arrival_s",
    '{"prompt_tokens": 5, "output_tokens": 2, "arrival_s": 1%s}' % ("0" * 400): "arrival_s",
    '{"prompt_tokens": 1%s, "output_tokens": 2}' % ("0" * 5000): "expected one JSON object|prompt_tokens",
    '{"prompt_tokens": 5, "output_tokens": 2, "arrival_s": 0, "prefix_hash_ids": 7}': "prefix_hash_ids",
    "[" * 200_000: "nested too deep",
}


@pytest.mark.parametrize("line", BAD_OBJECTS, ids=lambda line: line[:60])
def test_malformed_json_line_is_named_or_skipped(write, line):
    good = '{"arrival_s": 1, "prompt_tokens": 5, "output_tokens": 2}'
    path = write(f"{good}\n{line}\n{good}\n", "t.jsonl")
    with pytest.raises(TraceError, match=f"line 2: .*{BAD_OBJECTS[line]}"):
        read_trace(path)
    trace = read_trace(path, skip_bad=True)
    assert len(trace) == 2 and trace.bad_rows == 1


def test_time_after_rows_without_times_is_malformed(write):
    with pytest.raises(TraceError, match="line 3: arrival_s must hold no time, as in the rows before, got 4"):
        read_trace(write(f"{HEADER}\n,1,1\n4,1,1\n"))


def test_skipped_row_leaves_no_trace_in_the_reuse_figures(write):
    rows = "0,10,1,0-3\nx,10,1,7\n1,10,1,7\n"
    trace = read_trace(write(f"{HEADER},prefix_hash_ids\n{rows}"), skip_bad=True)
    assert trace.reuse_share == 0.0 and len(trace) == 2


def test_only_malformed_rows_are_refused_with_the_first_of_them(write):
    with pytest.raises(TraceError, match="2 malformed ones, the first at line 2: prompt_tokens"):
        read_trace(write(f"{HEADER}\n0,x,1\n0,y,1\n"), skip_bad=True)


def test_only_a_few_examples_of_many_malformed_rows_are_kept(write):
    trace = read_trace(write(f"{HEADER}\n0,1,1\n" + "0,x,1\n" * 1000), skip_bad=True)
    assert trace.bad_rows == 1000 and len(trace.bad_examples) == 5


def test_reuse_share_is_that_of_an_unlimited_prefix_cache(write):
    # 40 tokens in blocks 0-3, 20 of which the second request finds again, then all 10 of the third
    rows = "0,40,1,0-3\n1,40,1,0 1 8-9\n2,10,1,8\n"
    trace = read_trace(write(f"{HEADER},prefix_hash_ids\n{rows}"))
    assert trace.reuse_share == pytest.approx(30 / 90)


def test_hash_ids_in_json_may_be_a_list(write):
    rows = [
        {"arrival_s": 0, "prompt_tokens": 40, "output_tokens": 1, "prefix_hash_ids": [0, 1, 2, 3]},
        {"arrival_s": 1, "prompt_tokens": 40, "output_tokens": 1, "prefix_hash_ids": "0-1 8 9"},
    ]
    assert read_trace(write("\n".join(map(json.dumps, rows)), "t.ndjson")).reuse_share == pytest.approx(20 / 80)


@pytest.mark.parametrize("ids", ["3-1", "1-2-3", "-4", "a", "1.5", "1-", "0-10", "0 1 2 3 4 5 6 7 8 9 10", "9" * 25])
def test_malformed_hash_ids_are_named(write, ids):
    with pytest.raises(TraceError, match="line 2: prefix_hash_ids must"):
        read_trace(write(f"{HEADER},prefix_hash_ids\n0,10,1,{ids}\n"))


def test_reuse_beyond_what_is_remembered_is_estimated_in_bounded_memory():
    generator = np.random.default_rng(0)
    exact, bounded = PrefixReuse(), PrefixReuse(remembered=2000)
    for _ in range(4000):
        # conversations that come back: 10 blocks, a random number of them known
        first = int(generator.integers(0, 6000)) * 10
        run = (first, first + int(generator.integers(1, 10)))
        for reuse in (exact, bounded):
            reuse.see([run], 16 * (run[1] - run[0] + 1))
    assert len(bounded._seen) <= 2000 < len(exact._seen)
    assert bounded.share == pytest.approx(exact.share, abs=0.03)


def test_bytes_read_are_reported(write):
    path, seen = write(f"{HEADER}\r\n0,1,1\n\n1,1,1"), []
    read_trace(path, on_bytes=seen.append)
    assert sum(seen) == path.stat().st_size


@pytest.mark.parametrize(
    ("arrivals", "prompts", "outputs", "says"),
    [
        (None, [], [], "at least one request"),
        (None, [1, 2], [1], "one entry a request"),
        ([0.0], [1, 2], [1, 1], "one entry a request"),
        ([1.0, 0.0], [1, 2], [1, 1], "decreasing"),
        ([0.0, float("nan")], [1, 2], [1, 1], "NaN"),
        ([-1.0, 0.0], [1, 2], [1, 1], "negative"),
        (None, [0], [1], "at least 1"),
    ],
)
def test_trace_checks_its_arrays(arrivals, prompts, outputs, says):
    with pytest.raises(ValueError, match=says):
        Trace(
            arrival_s=None if arrivals is None else np.array(arrivals),
            prompt_tokens=np.array(prompts, dtype=np.int64),
            output_tokens=np.array(outputs, dtype=np.int64),
        )


@pytest.mark.parametrize(
    "row",
    [
        "0.5,7,3,1-2 9", "0.5, 7,3,1-2 9", '"0.5",7,3,"1-2 9"', "5e-1,7,3,1-2 9", "0.50,007,3,1-2 9", "0.5,7,3,1-2  9",
        "0.5,7,3,1 2 9-9",
    ],
)  # fmt: skip
def test_rows_written_plainly_and_otherwise_are_read_alike(tmp_path, row):
    """The one takes a third of the time of the other."""
    csv = tmp_path / "t.csv"
    csv.write_text(f"arrival_s,prompt_tokens,output_tokens,prefix_hash_ids\n{row}\n")
    found = read_trace(csv, keep_prefixes=True)
    assert (found.arrival_s.tolist(), found.prompt_tokens.tolist(), found.output_tokens.tolist()) == ([0.5], [7], [3])
    assert [b - a + 1 for a, b in found.prefix_runs[0]] in ([2, 1], [1, 1, 1])


@pytest.mark.parametrize(
    "line",
    [
        '{"arrival_s": 0.5, "prompt_tokens": 7, "output_tokens": 3, "prefix_hash_ids": "1-2 9"}',
        '{"arrival_s":0.5,"prompt_tokens":7,"output_tokens":3,"prefix_hash_ids":"1-2 9"}',
        '{"prompt_tokens": 7, "arrival_s": 0.5, "output_tokens": 3, "prefix_hash_ids": "1-2 9"}',
        '{ "arrival_s": 5e-1, "prompt_tokens": 7, "output_tokens": 3, "prefix_hash_ids": ["1-2", 9] }',
    ],
)
def test_objects_written_plainly_and_otherwise_are_read_alike(tmp_path, line):
    path = tmp_path / "t.jsonl"
    path.write_text(line + "\n")
    found = read_trace(path, keep_prefixes=True)
    assert (found.arrival_s.tolist(), found.prompt_tokens.tolist(), found.output_tokens.tolist()) == ([0.5], [7], [3])
    assert found.prefix_runs == [((1, 2), (9, 9))]


@pytest.mark.parametrize(
    ("row", "wrong"),
    [
        ("1,5,2,3-1", "ids from 0"), ("1,5,2,5-", "ids from 0"), ("1,5,2,-5", "ids from 0"), ("1,5,2,1--2", "ids from"),
        ("1,5,2,0-9", "at most one block a prompt token"), ("1,0,2,", "prompt_tokens must be"), ("1,5,,", "output_to"),
        ("999999999999,5,2,", "arrival_s must be seconds"), ("1,99999999,2,", "prompt_tokens must be"),
        ("1,5,2", "expected 4 fields"), ("1,5,2,3,4", "expected 4 fields"), ("1.2.3,5,2,", "arrival_s must be"),
    ],
)  # fmt: skip
def test_what_looks_plain_and_is_malformed_is_named_by_its_line(tmp_path, row, wrong):
    path = tmp_path / "t.csv"
    path.write_text(f"arrival_s,prompt_tokens,output_tokens,prefix_hash_ids\n0,1,1,\n{row}\n")
    with pytest.raises(TraceError, match=f"line 3: .*{wrong}"):
        read_trace(path)
