"""`CacheLayout`: how the key/value cache is stored."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from pagegen.spec import check

ORDERS = ("NHD", "HND")
# The sizes that serving engines offer: what is tuned and asked where nobody named any.
USUAL_BLOCK_SIZES = (16, 32, 64, 128)


@dataclass(frozen=True, kw_only=True)
class CacheLayout:
    """`block_size` tokens a block; `order` names the memory order inside a block: "NHD" is
    [token, head, dim] and "HND" is [head, token, dim]. Either way the tensor's logical shape is
    [num_blocks, block_size, num_kv_heads, head_dim]."""

    block_size: int
    order: str = "NHD"

    def __post_init__(self) -> None:
        check.count("block_size", self.block_size)
        check.one_of("order", self.order, ORDERS)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` tokens take."""
        return -(-tokens // self.block_size)

    def wasted_slots(self, tokens: int) -> int:
        """Slots allocated but unused in the last block: b*ceil(n/b) - n."""
        return self.blocks_for(tokens) * self.block_size - tokens

    def view(self, storage: Tensor, num_kv_heads: int, head_dim: int) -> Tensor:
        """[num_blocks, block_size, num_kv_heads, head_dim] over flat `storage`, in this memory order; what is left of
        it past the last whole block is unused."""
        block = self.block_size * num_kv_heads * head_dim
        flat = storage[: storage.numel() // block * block]
        if self.order == "HND":
            return flat.view(-1, num_kv_heads, self.block_size, head_dim).transpose(1, 2)
        return flat.view(-1, self.block_size, num_kv_heads, head_dim)

    def canonical(self, num_kv_heads: int) -> CacheLayout:
        """This layout, or NHD where both orders are the same bytes (one head, or one token a block)."""
        if self.block_size > 1 and num_kv_heads > 1:
            return self
        return CacheLayout(block_size=self.block_size, order="NHD")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-ready fields."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> CacheLayout:
        """The inverse of `to_dict`. An unknown or missing field raises ValueError."""
        return cls(**check.fields("a layout", data, ("block_size", "order"), ("block_size",)))
