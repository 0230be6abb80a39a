"""Faults that a cache of blocks may have, each as a change to the source: (name, module, exact text, replacement).

A text must occur just once in `pagegen/cache/<module>.py`; `test_mutants` fails by name where it does not any more.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    name: str
    module: str
    text: str
    replacement: str
    focus: str = "all"  # the operations that matter to it: see `machine_faults.FOCUS`
    tensors: bool = False  # seen only where tensors are written and read


MUTANTS = [
    # references
    Mutant(
        "a hit takes no reference",
        "pool",
        "        self.refs[blocks] += 1\n",
        "        pass\n",
    ),
    Mutant(
        "a fork takes no reference",
        "allocator",
        "        self.pool.acquire(held)\n",
        "",
        focus="fork",
    ),
    Mutant(
        "free gives nothing back",
        "allocator",
        "            self.pool.release(self.table.held(state.row)[::-1])\n",
        "            pass\n",
    ),
    Mutant(
        "a block is freed twice",
        "pool",
        "                self.index.remove(block)\n            self.free.append(block)\n",
        "                self.index.remove(block)\n            self.free.extend([block, block])\n",
    ),
    Mutant(
        "a release frees what others refer to",
        "pool",
        "        for block in blocks[self.refs[blocks] == 0].tolist():\n            node = ",
        "        for block in blocks.tolist():\n            node = ",
    ),
    # names
    Mutant(
        "a block handed out keeps its old name",
        "pool",
        "            self.index.remove(oldest)\n",
        "",
        focus="evict",
    ),
    Mutant(
        "a block written again keeps its old name",
        "pool",
        "        if self.index.node_of[block] is not None:\n            self.index.remove(block)\n",
        "        pass\n",
    ),
    Mutant(
        "the context is ignored",
        "prefix",
        "    hasher.update(context)\n",
        "    hasher.update(b'')\n",
    ),
    Mutant(
        "the hash forgets what stands before",
        "prefix",
        "    hasher.update(parent + tokens)\n",
        "    hasher.update(tokens)\n",
    ),
    Mutant(
        "a partial tail is shared on a hit",
        "admission",
        "(len(packed) - 1) // allocator.block_size",
        "-(-len(packed) // allocator.block_size)",
    ),
    Mutant(
        "a full hit leaves nothing to compute",
        "admission",
        "(len(packed) - 1) // allocator.block_size",
        "len(packed) // allocator.block_size",
    ),
    Mutant(
        "a block is named before it is full",
        "steps",
        "        _name_blocks(allocator, rows, ends // table.block_size)\n",
        "        _name_blocks(allocator, rows, -(-ends // table.block_size))\n",
    ),
    Mutant(
        "a truncated sequence keeps its place in the index",
        "steps",
        "    if indexed < table.indexed.item(row):\n",
        "    if False:\n",
    ),
    Mutant(
        "lookups go on behind a miss",
        "prefix",
        "            if not (child.blocks or through_gaps):\n                break\n",
        "",
        focus="rewrite",
    ),
    # eviction
    Mutant(
        "the head of a chain is evicted first",
        "allocator",
        "            self.pool.release(self.table.held(state.row)[::-1])\n",
        "            self.pool.release(self.table.held(state.row))\n",
        focus="evict",
    ),
    Mutant(
        "the block used last is evicted first",
        "pool",
        "self.cached.popitem(last=False)",
        "self.cached.popitem(last=True)",
        focus="evict",
    ),
    Mutant(
        "a hit leaves the block among those to evict",
        "pool",
        "            del self.cached[block]\n        self.refs[blocks] += 1\n",
        "            pass\n        self.refs[blocks] += 1\n",
        focus="evict",
    ),
    # block borders
    Mutant(
        "append takes its block a token late",
        "growth",
        "    held, needed = table.blocks_for(length), table.blocks_for(end)\n",
        "    held, needed = table.blocks_for(length), table.blocks_for(end - 1)\n",
    ),
    Mutant(
        "a decode step takes its block a token late",
        "growth",
        "    growing = (offsets == 0).nonzero()[0]\n",
        "    growing = (offsets == 1).nonzero()[0]\n",
    ),
    Mutant(
        "truncate keeps one block too many",
        "allocator",
        "        held, kept = table.blocks_for(before), table.blocks_for(length)\n",
        "        held, kept = table.blocks_for(before), table.blocks_for(length + 1)\n",
    ),
    Mutant(
        "truncate leaves the tokens computed",
        "steps",
        "        column[row] = min(column.item(row), length)\n",
        "        column[row] = column.item(row)\n",
    ),
    Mutant(
        "a step owns one block too few",
        "steps",
        "(ends - 1) // table.block_size - first + 1, 0)",
        "(ends - 1) // table.block_size - first, 0)",
        focus="fork",
    ),
    # copy-on-write
    Mutant(
        "a shared block is written in place",
        "growth",
        "    if pool.refs.item(source) == 1:\n        pool.make_writable(source)\n        return []\n",
        "    if pool.refs.item(source) >= 1:\n        pool.make_writable(source)\n        return []\n",
        focus="fork",
    ),
    Mutant(
        "append writes a shared tail in place",
        "growth",
        "    pairs = own_block(allocator, row, held - 1) if len(packed) and length % table.block_size else []\n",
        "    pairs: BlockPairs = []\n",
        focus="fork",
    ),
    Mutant(
        "a decode step writes a shared tail in place",
        "growth",
        "    for i in unowned:\n",
        "    for i in unowned[1:]:\n",
        focus="fork",
    ),
    Mutant(
        "a copy is taken but its content is not copied",
        "growth",
        "    return [(source, target)]\n",
        "    return []\n",
        focus="fork",
    ),
    Mutant(
        "two forks that compute the same block both keep it",
        "steps",
        "    for place, index in zip(places.tolist(), indices.tolist(), strict=True):\n",
        "    for place, index in list(zip(places.tolist(), indices.tolist(), strict=True))[1:]:\n",
        focus="fork",
    ),
    Mutant(
        "a forked parent is thought to own its tail",
        "table",
        "        return bool(self.sharing) and not self.sharing.isdisjoint(rows.tolist())\n",
        "        return len(self.sharing) > 1 and not self.sharing.isdisjoint(rows.tolist())\n",
        focus="fork",
    ),
    # out of blocks, admission
    Mutant(
        "the watermark is ignored",
        "admission",
        "        free=max(0, pool.available_beside(shared) - allocator.watermark),\n",
        "        free=max(0, pool.available_beside(shared)),\n",
    ),
    Mutant(
        "blocks hit are counted as free besides",
        "admission",
        "        free=max(0, pool.available_beside(shared) - allocator.watermark),\n",
        "        free=max(0, pool.available - allocator.watermark),\n",
        focus="evict",
    ),
    Mutant(
        "OutOfBlocks comes after a change",
        "growth",
        "    check_append(allocator, row, len(packed))\n    table = allocator.table\n"
        "    length = table.lengths.item(row)\n    end = length + len(packed)\n",
        "    table = allocator.table\n    length = table.lengths.item(row)\n    end = length + len(packed)\n"
        "    table.lengths[row] = end\n    try:\n        table.lengths[row] = length\n"
        "        check_append(allocator, row, len(packed))\n    except Exception:\n"
        "        table.lengths[row] = end\n        raise\n",
    ),
    Mutant(
        "a group keeps what another had no room for",
        "groups",
        "        self.check_each(lambda a: growth.check_append(a, a.resident(seq_id).row, len(packed)))\n",
        "",
    ),
    Mutant(
        "groups start at what one of them has",
        "groups",
        "        cached = self._cached_everywhere(chains)\n",
        "        cached = max(len(chain) * a.block_size for a, chain in zip(self.allocators, chains, strict=True))\n",
    ),
    # windows
    Mutant(
        "the window releases one block too early",
        "window",
        "    firsts = (starts - (allocator.window - 1)).clip(min=0) // size\n",
        "    firsts = (starts - (allocator.window - 1)).clip(min=0) // size + 1\n",
        focus="window",
    ),
    Mutant(
        "the window is a token short",
        "window",
        "    firsts = (starts - (allocator.window - 1)).clip(min=0) // size\n",
        "    firsts = (starts - (allocator.window - 2)).clip(min=0) // size\n",
        focus="window",
    ),
    Mutant(
        "a window's hit overlooks a missing block",
        "window",
        "        if not node.blocks:\n            gap = count - 1\n",
        "",
        focus="window",
    ),
    Mutant(
        "truncate goes back behind the window",
        "window",
        "    if start and released > first_seen_block(start, allocator.block_size, allocator.window):\n",
        "    if False:\n",
        focus="window",
    ),
    # failed steps
    Mutant(
        "abandon leaves blocks findable",
        "steps",
        "    tainted = [index.remove(block) for block in written if index.named.item(block)]\n",
        "    tainted: list[Node] = []\n",
        focus="fail",
    ),
    Mutant(
        "abandon leaves findable what was computed on top",
        "steps",
        "    allocator.pool.forget_behind(tainted)\n",
        "",
        focus="fail",
    ),
    Mutant(
        "abandon forgets who has found the blocks since",
        "steps",
        "            if allocator.pool.refs.item(block) > 1:\n",
        "            if False:\n",
        focus="fail",
    ),
    # swapping
    Mutant(
        "swap_in maps two blocks to one",
        "swap",
        "    return [(block, host[i]) for i, block in fresh.items()]\n",
        "    return [(block, host[0]) for i, block in fresh.items()]\n",
        focus="swap",
    ),
    Mutant(
        "swap_in gives no host blocks back",
        "swap",
        "    pool.host_free.extend(reversed(host))\n",
        "",
        focus="swap",
    ),
    Mutant(
        "swap_out takes blocks that others need",
        "swap",
        "    pool.release(held[::-1])\n",
        "    pool.refs[held] = 1\n    pool.release(held[::-1])\n",
        focus="swap",
    ),
    Mutant(
        "swap_out copies one block too few",
        "swap",
        "    return list(zip(held.tolist(), host, strict=True))\n",
        "    return list(zip(held.tolist(), host, strict=True))[:-1]\n",
        focus="swap",
    ),
    # tensors
    Mutant(
        "copy-on-write copies one layer",
        "storage",
        "        first_blocks = torch.arange(self.num_layers)[:, None, None] * self.num_blocks\n",
        "        first_blocks = torch.arange(1)[:, None, None] * self.num_blocks\n",
        focus="fork",
        tensors=True,
    ),
    Mutant(
        "values are not swapped",
        "storage",
        "            for device, host in zip(self._bytes, self._host, strict=True)\n",
        "            for device, host in zip(self._bytes[:1], self._host[:1], strict=True)\n",
        focus="swap",
        tensors=True,
    ),
    Mutant(
        "kept buffers show an older block table",
        "buffers",
        "            outdated = ((shown[0] != rows) | (shown[1] != now)).nonzero()[0]\n",
        "            outdated = (shown[0] != rows).nonzero()[0]\n",
        focus="steps",
        tensors=True,
    ),
    Mutant(
        "kept buffers take any change for growth",
        "buffers",
        "        if last is not None and rows is self._rows and last.since == self._as_of:\n",
        "        if last is not None and rows is self._rows:\n",
        focus="steps",
        tensors=True,
    ),
    Mutant(
        "kept buffers keep slots of a larger step",
        "buffers",
        "            self._slots.host[total:total_before] = -1\n",
        "",
        focus="steps",
        tensors=True,
    ),
    Mutant(
        "a batch takes the last step's tokens for its own",
        "table",
        "        return as_it_is and positions.tobytes() == self.positions.tobytes()\n",
        "        return as_it_is\n",
        focus="steps",
        tensors=True,
    ),
    Mutant(
        "a batch looks for its tokens where they were",
        "table",
        "        as_it_is = table.version == self.version and rows is self.rows\n",
        "        as_it_is = rows is self.rows\n",
        focus="steps",
        tensors=True,
    ),
    Mutant(
        "prefix groups outlive a change of blocks",
        "sharing",
        "        if table is self._table and rows is self._rows and table.last_reshaped == self._as_of:\n",
        "        if table is self._table and rows is self._rows:\n",
        focus="steps",
        tensors=True,
    ),
]
