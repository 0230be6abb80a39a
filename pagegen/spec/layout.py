"""`CacheLayout`: how the key/value cache is stored."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from pagegen.spec import check

ORDERS = ("NHD", "HND")


@dataclass(frozen=True, kw_only=True)
class CacheLayout:
    """`block_size` tokens a block; `order` names the memory order inside a block: "NHD" is
    [token, head, dim] and "HND" is [head, token, dim]. Either way the tensor's logical shape is
    [num_blocks, block_size, num_kv_heads, head_dim]."""

    block_size: int
    order: str = "NHD"

    def __post_init__(self) -> None:
        check.integer("block_size", self.block_size)
        check.one_of("order", self.order, ORDERS)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` tokens take."""
        return -(-tokens // self.block_size)

    def wasted_slots(self, tokens: int) -> int:
        """Slots allocated but unused in the last block: b*ceil(n/b) - n."""
        return self.blocks_for(tokens) * self.block_size - tokens

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-ready fields."""
        return asdict(self)
