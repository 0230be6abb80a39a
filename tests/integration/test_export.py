"""Programs that leave the process: `torch.export`, and AOTInductor packages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.export import Dim, export, load, save

import pagegen

HEADS, KV_HEADS, DIM, BLOCK, BLOCKS = 4, 2, 16, 8, 32


class Step(torch.nn.Module):
    """A layer's decode step: writes this step's keys and values, then attends. Its caches are its state."""

    def __init__(self) -> None:
        super().__init__()
        self.out = torch.nn.Linear(HEADS * DIM, HEADS * DIM, bias=False)
        self.register_buffer("k_cache", torch.zeros(BLOCKS, BLOCK, KV_HEADS, DIM))
        self.register_buffer("v_cache", torch.zeros(BLOCKS, BLOCK, KV_HEADS, DIM))

    def forward(self, q, k, v, slots, table, lens):
        pagegen.write_kv(k, v, self.k_cache, self.v_cache, slots)
        return self.out(pagegen.paged_attention(q, self.k_cache, self.v_cache, table, lens).flatten(1))


def inputs(num_seqs, width, seed=0):
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(num_seqs, heads, DIM, generator=draw) for heads in (HEADS, KV_HEADS, KV_HEADS))
    table = torch.randperm(BLOCKS, generator=draw)[: num_seqs * width].to(torch.int32).reshape(num_seqs, width)
    lens = torch.arange(num_seqs, dtype=torch.int32) % (width * BLOCK) + 1
    slots = table.gather(1, ((lens - 1) // BLOCK).long()[:, None])[:, 0].long() * BLOCK + (lens - 1) % BLOCK
    return q, k, v, slots, table, lens


def exported(model):
    seqs, width = Dim("seqs", min=2, max=16), Dim("width", min=2, max=16)
    per_seq = {0: seqs}
    shapes = (per_seq, per_seq, per_seq, per_seq, {0: seqs, 1: width}, per_seq)
    with torch.no_grad():
        return export(model, inputs(3, 4), dynamic_shapes=shapes)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Step().eval()


@pytest.mark.compat("torch", "torch.export with dynamic batch and table width")
def test_an_exported_step_serves_every_batch_and_writes_its_caches(model, tmp_path):
    program = exported(model)
    file = tmp_path / "step.pt2"
    save(program, file)
    loaded = load(file).module()
    for num_seqs, width in ((2, 2), (5, 3), (16, 2)):
        given = inputs(num_seqs, width, seed=num_seqs)
        with torch.no_grad():
            torch.testing.assert_close(loaded(*given), model(*given))
    for name in ("k_cache", "v_cache"):
        assert torch.equal(loaded.get_buffer(name), model.get_buffer(name)) and loaded.get_buffer(name).any()


@pytest.mark.compat("torch", "torch.export: mutated buffers")
def test_an_exported_program_says_that_it_mutates_just_the_caches(model):
    program = exported(model).run_decompositions({})
    assert set(program.graph_signature.buffers_to_mutate.values()) == {"k_cache", "v_cache"}
    assert "pagegen.paged_attention" in program.graph_module.code


# What the user's own program is: it imports pagegen, which registers the operators, and loads the package.
DEPLOYED = """
import sys, torch
import pagegen
step = torch._inductor.aoti_load_package(sys.argv[1])
given, expected = torch.load(sys.argv[2])
with torch.no_grad():
    for inputs, output in zip(given, expected):
        torch.testing.assert_close(step(*inputs), output)
print("equal")
"""


@pytest.mark.compat("torch", "AOTInductor package in another process")
def test_an_ahead_of_time_package_runs_in_another_process_that_imports_pagegen(tmp_path):
    torch.manual_seed(0)
    model = Step().eval()
    once = {"aot_inductor.compile_wrapper_opt_level": "O0", "aot_inductor.precompile_headers": False}  # and quickly
    with torch._inductor.config.patch(once):
        package = torch._inductor.aoti_compile_and_package(exported(model), package_path=str(tmp_path / "step.pt2"))
    given = [inputs(num_seqs, 3, seed=num_seqs) for num_seqs in (2, 7)]
    with torch.no_grad():
        torch.save((given, [model(*one) for one in given]), tmp_path / "expected.pt")
    code = f"import sys; sys.path.insert(0, {str(Path(pagegen.__file__).parents[1])!r})\n{DEPLOYED}"
    done = subprocess.run(
        [sys.executable, "-c", code, package, tmp_path / "expected.pt"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == "equal", done.stderr[-2000:]
