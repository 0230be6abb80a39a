"""bench/cost_model.py: what others measured against the model's floor, where the data are; the figures kept of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))
from cost_model_bench import data, theirs  # noqa: E402

from pagegen import costs  # noqa: E402
from pagegen.spec import Workload  # noqa: E402

HEADER = "system,backend,kernel_source,batch_size,ctx,num_heads,num_key_value_heads,head_dim,window_size,"
HEADER += "kv_cache_dtype,lat_us,kv_gb_s\n"
needs_data = pytest.mark.skipif(not data.USUAL_PLACE.exists(), reason="needs the measured latencies")


def row(**changes) -> data.Row:
    """8 sequences of 16,384 tokens of Llama-3.1-8B on an A100: 537 MB, in 345 us."""
    plain = {
        "system": "a100_sxm", "backend": "some engine", "batch": 8, "context": 16384, "num_q_heads": 32,
        "num_kv_heads": 8, "head_dim": 128, "window": 0, "kv_dtype": "bfloat16", "us": 345.0,
    }  # fmt: skip
    return data.Row(**{**plain, **changes})


@needs_data
def test_no_floor_is_above_the_fastest_time_that_anybody_measured():
    shapes, dropped = data.sound(data.read(data.USUAL_PLACE))
    assert len(shapes) > 3500 and {shape.fastest.system for shape in shapes} == set(data.DEVICES)
    above = [(shape.fastest, shape.floor_us) for shape in shapes if shape.floor_us > shape.fastest.us]
    assert above == []
    # the one source that cannot be what it says, and nothing else, is set aside
    assert [(source["system"], source["engine"]) for source in dropped] == [("a100_sxm", "trtllm-1.0.0")]


@needs_data
def test_a_sample_of_predictions_is_near_what_the_fastest_kernels_take():
    """Every fortieth shape without a window: the median of measured over predicted, and of the error."""
    shapes, _ = data.sound(data.read(data.USUAL_PLACE))
    plain = [shape for shape in shapes if shape.fastest.system == "h200_sxm" and not shape.fastest.window]
    (found,) = theirs.cases(plain[::40]).values()
    ratios = sorted(case.measured_us / case.parts.total_us for _, case in found)
    assert 0.8 < ratios[len(ratios) // 2] < 1.5


def test_a_source_that_is_faster_than_the_memory_is_set_aside_whole():
    """537 MB in 200 us are 2,684 GB/s, and the A100 has 2,039; the same source's other rows go with it."""
    impossible, beside = row(us=200.0, backend="b"), row(us=400.0, backend="b", context=8192)
    shapes, dropped = data.sound([row(), impossible, beside])
    assert [shape.fastest for shape in shapes] == [row()]
    assert dropped[0]["rows"] == 2 and dropped[0]["rows_faster_than_memory"] == 1
    assert dropped[0]["highest_gb_s"] == 2684 and dropped[0]["memory_gb_s"] == 2039


def test_what_a_cache_may_have_given_sets_nothing_aside():
    """2 sequences of 1,024 tokens are 8 MB: the last-level cache of 40 MB holds them."""
    quick = row(batch=2, context=1024, us=2.0)
    assert quick.rate_gb_s > quick.device.bandwidth_gb_s
    shapes, dropped = data.sound([quick])
    assert len(shapes) == 1 and dropped == []


def test_the_fastest_of_a_shape_is_kept():
    fast, slow = row(backend="a", us=345.0), row(backend="b", us=400.0)
    assert [shape.fastest for shape in data.sound([slow, fast, row(context=8192)])[0]][0] == fast


def test_a_file_is_read_as_it_is_written_and_a_missing_one_named(tmp_path):
    file = tmp_path / "measured.csv"
    file.write_text(HEADER + "h200_sxm,engine,k,4,2048,64,8,64,128,fp8,12.5,100\n", encoding="utf-8")
    (one,) = data.read(file)
    assert one.kv_dtype == "float8_e4m3fn" and one.spec.window == 128 and one.workload.num_seqs == 4
    assert one.workload == Workload(context_lens=(2048,) * 4)
    assert one.device.name == "NVIDIA H200"
    with pytest.raises(FileNotFoundError, match="--data"):
        data.read(tmp_path / "none.csv")


def test_the_results_that_are_kept_say_what_they_rest_on():
    document = json.loads((BENCH / "results" / "cost-model.json").read_text(encoding="utf-8"))
    assert document["data"]["licence"] == "Apache-2.0" and "aiconfigurator-core 0.12.0" in document["data"]["source"]
    floors = [r for r in document["rows"] if "roofline" in r["what"]]
    assert {r["system"] for r in floors} == set(data.DEVICES)
    assert all(r["below_the_floor"] == 0 and r["lowest"] >= 1 for r in floors)
    left = [r for r in document["rows"] if r["what"] == "leave one GPU out"]
    assert {r["system"] for r in left} == set(data.DEVICES)
    assert all(r["median_error_fitted"] > 0 and r["median_error_unfitted"] > 0 for r in left)


def test_the_devices_are_those_of_the_table():
    for device in data.DEVICES.values():
        assert costs.shipped_device(device.target, name=device.name) == device
