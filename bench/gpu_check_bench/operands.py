"""A decode step's operands over a pool that a cache does not hold, for pagegen and for peers alike."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pagegen.spec import AttentionSpec, CacheLayout, Workload, dtype_name

# One million random numbers repeat: values change no time.
PIECE = 1 << 20
MAX_SETS = 48
# What the calls of one sample read, at least: half a millisecond at 4 TB/s, beside which a launch is short.
SAMPLE_BYTES = 2 << 30
# Scores with a spread of 3 leave a few keys most of the weight, so that an error shows in the result.
QUERY_SPREAD = 3.0
# Of the largest value of a row: bfloat16 rounds to 2^-9, and peers round the weights of values too.
TOLERANCE = 2.0**-6
CHECKED_SEQUENCES = 3


@dataclass(frozen=True, kw_only=True)
class Cell:
    """`batch` sequences of `context` tokens, one query each."""

    spec: AttentionSpec
    batch: int
    context: int

    @property
    def workload(self) -> Workload:
        return Workload(context_lens=(self.context,) * self.batch)

    @property
    def bytes(self) -> int:
        """Of K and V that one call reads."""
        return self.batch * self.context * self.spec.kv_bytes_per_token

    @property
    def name(self) -> str:
        spec = self.spec
        window = f", window {spec.window}" if spec.window else ""
        heads = f"{spec.num_q_heads}/{spec.num_kv_heads} heads of {spec.head_dim}"
        return f"{self.batch} x {self.context}, {heads}, {dtype_name(spec.kv_dtype)}{window}"


@dataclass
class Operands:
    """`sets` calls' worth of blocks: the same block table over `sets` parts of one pool, so that every call reads
    other memory. `caches[i]` is (k, v), each [num_blocks, block_size, Hkv, D]; q and out [batch, Hq, D]; block_table
    int32 [batch, blocks]; seq_lens int32 [batch]."""

    cell: Cell
    block_size: int
    q: Tensor
    caches: list[tuple[Tensor, Tensor]]
    block_table: Tensor
    seq_lens: Tensor
    out: Tensor
    expected: Tensor = field(init=False)

    def __post_init__(self) -> None:
        from pagegen.reference import reference_attention

        few = min(CHECKED_SEQUENCES, self.cell.batch)
        k, v = self.caches[0]
        result = reference_attention(
            self.q[:few].float(), k, v, self.block_table[:few], self.seq_lens[:few], scale=self.cell.spec.scale,
            window=self.cell.spec.window,
        )  # fmt: skip
        assert isinstance(result, Tensor)
        self.expected = result

    @property
    def turns(self) -> list[int]:
        """The sets that the calls of one sample read, in order."""
        wanted = 1 if self.q.device.type == "cpu" else -(-SAMPLE_BYTES // self.cell.bytes)
        return [i % len(self.caches) for i in range(max(len(self.caches), min(MAX_SETS, wanted)))]

    @property
    def layout(self) -> CacheLayout:
        return CacheLayout(block_size=self.block_size)

    def error(self, out: Tensor) -> float:
        """The largest error of a result [batch, Hq, D] of the first set, over the first sequences, as a share of the
        row's largest value; infinite for a NaN."""
        got = out[: len(self.expected)].float()
        largest = self.expected.abs().amax(dim=-1, keepdim=True).clamp_min(1e-3)
        share = (got - self.expected).abs() / largest
        return float(share.nan_to_num(nan=math.inf, posinf=math.inf).max())


def make(cell: Cell, block_size: int, *, on: str, cold_bytes: int, seed: int = 0) -> Operands:
    """Operands whose sets together are `cold_bytes` or more, but at most MAX_SETS."""
    spec = cell.spec
    generator = torch.Generator(device=on).manual_seed(seed)
    blocks = -(-cell.context // block_size)
    needed = cell.batch * blocks
    sets = max(1, min(MAX_SETS, -(-cold_bytes // cell.bytes)))
    k_pool = _pool(sets * needed, block_size, spec, spec.head_dim, on, generator)
    v_pool = _pool(sets * needed, block_size, spec, spec.v_head_dim, on, generator)
    places = torch.randperm(needed, generator=generator, device=on)
    q = torch.randn(cell.batch, spec.num_q_heads, spec.head_dim, generator=generator, device=on)
    q = (q * QUERY_SPREAD / (spec.scale * math.sqrt(spec.head_dim))).to(spec.q_dtype)
    return Operands(
        cell=cell,
        block_size=block_size,
        q=q,
        caches=[(k_pool[i * needed : (i + 1) * needed], v_pool[i * needed : (i + 1) * needed]) for i in range(sets)],
        block_table=places.to(torch.int32).view(cell.batch, blocks),
        seq_lens=torch.full((cell.batch,), cell.context, dtype=torch.int32, device=on),
        out=torch.empty(cell.batch, spec.num_q_heads, spec.v_head_dim, dtype=spec.q_dtype, device=on),
    )


def _pool(
    num_blocks: int, block_size: int, spec: AttentionSpec, width: int, on: str, generator: torch.Generator
) -> Tensor:
    """[num_blocks, block_size, Hkv, width] of the cache's dtype."""
    shape = (num_blocks, block_size, spec.num_kv_heads, width)
    size = math.prod(shape)
    piece = torch.randn(min(PIECE, size), generator=generator, device=on).to(spec.kv_dtype)
    flat = piece.view(torch.uint8)  # few operations know one-byte floats
    return flat.repeat(-(-size // piece.numel()))[: size * spec.kv_dtype.itemsize].view(spec.kv_dtype).view(shape)
