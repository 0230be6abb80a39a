"""`BlockStorage`: the memory of the blocks, in all layers, on the device and swapped out to the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pagegen.cache.growth import BlockPairs
from pagegen.spec import CacheLayout
from pagegen.targets.huge_pages import huge_memory

_VIEWS = ("keys", "values", "factors", "_bytes")  # made anew from the memory they look into


class BlockStorage:
    """`num_blocks` blocks in each of `num_layers` layers, keys and values apart, and `num_host_blocks` of host memory.

    `pools` are the two flat tensors of the device; `keys` and `values` view them as [num_layers * num_blocks,
    block_size, num_kv_heads, head_dim], block b of layer l at l * num_blocks + b. `factors` names float32 tensors
    beside them that go wherever their blocks go, K's and V's in turn; as a member it has each by name, as
    [num_layers * num_blocks, block_size, num_kv_heads].
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        num_host_blocks: int,
        layout: CacheLayout,
        num_kv_heads: int,
        head_dims: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        factors: Sequence[str] = (),
    ) -> None:
        self.num_layers = num_layers
        self.num_blocks = num_blocks
        self.dtype = dtype
        elements = [layout.block_size * num_kv_heads * head_dim for head_dim in head_dims]  # of a block
        k_pool, v_pool = (_zeros(num_layers * num_blocks * count, dtype, device) for count in elements)
        self.pools = (k_pool, v_pool)
        slots = num_layers * num_blocks * layout.block_size * num_kv_heads
        self._factor_pools = {name: _zeros(slots, torch.float32, device) for name in factors}
        self._seen_as = layout, num_kv_heads, head_dims
        self._make_views()
        self._host = [
            torch.zeros(
                num_layers,
                num_host_blocks,
                each.shape[-1],
                dtype=torch.uint8,
                pin_memory=device.type == "cuda" and num_host_blocks > 0,
            )
            for each in self._bytes
        ]

    def _make_views(self) -> None:
        layout, num_kv_heads, (k_dim, v_dim) = self._seen_as
        self.keys = layout.view(self.pools[0], num_kv_heads, k_dim)
        self.values = layout.view(self.pools[1], num_kv_heads, v_dim)
        shape = (-1, layout.block_size, num_kv_heads)
        self.factors = {name: pool.view(shape) for name, pool in self._factor_pools.items()}
        # by layer, block and byte: what is swapped is moved as it lies, whatever its dtype and order
        pools = (*self.pools, *self._factor_pools.values())
        self._bytes = [pool.view(torch.uint8).view(self.num_layers, self.num_blocks, -1) for pool in pools]

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name not in _VIEWS}
        return state | {"pools": tuple(pool.view(torch.uint8) for pool in self.pools)}  # torch pickles no float8

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Copied or unpickled blocks: views that are pickled on their own have other memory."""
        self.__dict__.update(state)
        k_pool, v_pool = (pool.view(self.dtype) for pool in self.pools)
        self.pools = (k_pool, v_pool)
        self._make_views()

    def copy(self, pairs: BlockPairs) -> None:
        """Copies (source, target) blocks in all layers: keys and values in one call, and what is beside them alike."""
        if not pairs:
            return
        first_blocks = torch.arange(self.num_layers)[:, None, None] * self.num_blocks
        every_layer = (first_blocks + torch.tensor(pairs)).reshape(-1, 2).to(self.keys.device)
        beside = [factor[:, :, None] for factor in self.factors.values()]  # as of one head
        for k, v in ((self.keys, self.values), *zip(beside[::2], beside[1::2], strict=True)):
            torch.ops.pagegen.copy_blocks(k, v, every_layer)

    def to_host(self, pairs: BlockPairs) -> None:
        """Copies device blocks to host blocks, by (device block, host block); done when it returns."""
        if pairs:
            blocks, places = _apart(pairs)
            on_device = blocks.to(self.keys.device)
            for device, host in self._layers():
                host[places] = device[on_device].to("cpu")

    def from_host(self, pairs: BlockPairs) -> None:
        """Copies host blocks to device blocks, by (device block, host block); done when it returns."""
        if pairs:
            blocks, places = _apart(pairs)
            on_device = blocks.to(self.keys.device)
            for device, host in self._layers():
                device[on_device] = host[places].to(device.device)

    def _layers(self) -> Sequence[tuple[Tensor, Tensor]]:
        """What a layer holds in bytes, on the device and on the host: a layer at a time keeps what the copies need
        besides small."""
        return [
            (device[layer], host[layer])
            for device, host in zip(self._bytes, self._host, strict=True)
            for layer in range(self.num_layers)
        ]


def _apart(pairs: BlockPairs) -> tuple[Tensor, Tensor]:
    """The first block of each pair, and the second."""
    blocks, places = torch.tensor(pairs, dtype=torch.int64).unbind(1)
    return blocks, places


def _zeros(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`size` elements of zero; on a CPU in huge pages, where the system has them."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    return huge_memory(size * dtype.itemsize).view(dtype)
