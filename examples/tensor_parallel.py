"""A small transformer over two ranks: each computes half of the heads and keeps half of the KV cache.

    python examples/tensor_parallel.py                        starts two processes on this machine
    torchrun --nproc-per-node 2 examples/tensor_parallel.py   the same, started by torchrun

The model is plain PyTorch. On one rank its projections give plain tensors; after `parallelize_module` they give
DTensors whose heads are sharded, and the same lines run: pagegen.integrations.sharding.register() teaches DTensor the
operators. Both ways must answer with the same tokens.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import pagegen
from pagegen.integrations import sharding
from pagegen.spec import AttentionSpec, CacheLayout

RANKS = 2
LAYERS, WIDTH, VOCABULARY = 2, 128, 256
SPEC = AttentionSpec(num_q_heads=8, num_kv_heads=4, head_dim=16, q_dtype="float32")
LAYOUT = CacheLayout(block_size=16)
PROMPTS = (b"Attention heads do not meet,", b"so each rank", b"keeps its own.")


class Attention(nn.Module):
    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.q = nn.Linear(WIDTH, SPEC.num_q_heads * SPEC.head_dim, bias=False)
        self.k = nn.Linear(WIDTH, SPEC.num_kv_heads * SPEC.head_dim, bias=False)
        self.v = nn.Linear(WIDTH, SPEC.num_kv_heads * SPEC.head_dim, bias=False)
        self.o = nn.Linear(SPEC.num_q_heads * SPEC.head_dim, WIDTH, bias=False)

    def forward(self, x: Tensor, step: dict[str, Any]) -> Tensor:
        """x [total_q, WIDTH]; `step` holds the caches of all layers and where this step's tokens are."""
        q, k, v = (project(x).unflatten(-1, (-1, SPEC.head_dim)) for project in (self.q, self.k, self.v))
        caches = step["k_caches"][self.layer], step["v_caches"][self.layer]
        q = pagegen.rope_write_kv(
            q, k, v, step["positions"], step["cos"], step["sin"], *caches, step["slot_mapping"]
        )  # fmt: skip
        out = pagegen.paged_attention(
            q, *caches, step["block_table"], step["seq_lens"], query_start_loc=step["query_start_loc"]
        )
        return self.o(out.flatten(1))


class Block(nn.Module):
    def __init__(self, layer: int) -> None:
        super().__init__()
        self.attention = Attention(layer)
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, step: dict[str, Any]) -> Tensor:
        x = x + self.attention(self.first(x), step)
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(layer) for layer in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, step: dict[str, Any]) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, step)
        return self.head(x)


def shard(model: Model, mesh: DeviceMesh) -> None:
    """Column-parallel projections into heads, row-parallel ones out of them: one all-reduce a layer for attention."""
    for block in model.blocks:
        heads = {name: ColwiseParallel(use_local_output=False) for name in ("q", "k", "v")}
        parallelize_module(block.attention, mesh, {**heads, "o": RowwiseParallel()})
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def generate(model: Model, spec: AttentionSpec, mesh: DeviceMesh | None, new_tokens: int = 12) -> list[list[int]]:
    """Greedy tokens for PROMPTS. `spec` has the heads that this process keeps; with a mesh, tensors are DTensors."""
    cache = pagegen.PagedKVCache(LAYERS, 16, LAYOUT, spec.num_kv_heads, spec.head_dim, dtype=spec.q_dtype)

    def on_mesh(tensor: Tensor, *placements: Any) -> Tensor:
        return tensor if mesh is None else DTensor.from_local(tensor, mesh, placements, run_check=False)

    angles = torch.arange(256)[:, None] / 10000.0 ** (torch.arange(8) / 8)
    fixed = {
        "k_caches": [on_mesh(cache.k_cache(layer), Shard(2)) for layer in range(LAYERS)],
        "v_caches": [on_mesh(cache.v_cache(layer), Shard(2)) for layer in range(LAYERS)],
        "cos": on_mesh(angles.cos(), Replicate()),
        "sin": on_mesh(angles.sin(), Replicate()),
    }
    for i, prompt in enumerate(PROMPTS):
        cache.add(i, list(prompt))
    answers: list[list[int]] = [[] for _ in PROMPTS]
    for _ in range(new_tokens):
        batch = cache.batch(range(len(PROMPTS)))
        names = ("block_table", "seq_lens", "query_start_loc", "slot_mapping", "positions")
        step = {**fixed, **{name: on_mesh(getattr(batch, name), Replicate()) for name in names}}
        logits = model(batch.input_ids, step)
        chosen = logits[batch.query_start_loc[1:].long() - 1].argmax(dim=-1).tolist()
        for i, token in enumerate(chosen):
            answers[i].append(token)
            cache.append(i, [token])
    return answers


@torch.inference_mode()
def run(rank: int, ranks: int, meeting_point: str) -> None:
    """One rank: answers alone with the whole model, then together with a share of it."""
    dist.init_process_group("gloo", init_method=meeting_point, rank=rank, world_size=ranks)
    torch.manual_seed(0)
    model = Model()
    alone = generate(model, SPEC, None)

    sharding.register()
    mesh = init_device_mesh("cpu", (ranks,))
    shard(model, mesh)
    own = sharding.head_shard(SPEC, rank, ranks)
    together = generate(model, own.spec, mesh)
    if together != alone:
        raise RuntimeError(f"rank {rank} answered {together}, one rank alone {alone}")
    if rank == 0:
        kept = f"{own.spec.num_kv_heads} of {SPEC.num_kv_heads} KV heads, {own.spec.kv_bytes_per_token} bytes a token"
        print(
            f"{ranks} ranks answered as one does: {sum(map(len, alone))} tokens the same; each keeps {kept} and layer"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        run(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "env://")
    else:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(run, args=(RANKS, f"file://{folder}/meet"), nprocs=RANKS)
