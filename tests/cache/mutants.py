"""Faults that a cache of blocks may have, each as a change to the source: (name, module, exact text, replacement).

A text must occur just once in `pagegen/cache/<module>`; `test_mutants` fails by name where it does not any more.
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
        "pool.py",
        "        self.refs[places] = refs + 1\n",
        "        pass\n",
    ),
    Mutant(
        "a fork takes no reference",
        "allocator.py",
        "        self.pool.acquire(held)\n",
        "",
        focus="fork",
    ),
    Mutant(
        "free gives nothing back",
        "allocator.py",
        "            self.pool.release(self.table.held(state.row)[::-1])\n",
        "            pass\n",
    ),
    Mutant(
        "a block is freed twice",
        "pool.py",
        "        self._put(spare)\n",
        "        self._put(spare.repeat(2))\n",
    ),
    Mutant(
        "a release frees what others refer to",
        "pool.py",
        "        unused = places[refs == 0]\n",
        "        unused = places\n",
    ),
    # names
    Mutant(
        "a block handed out keeps its old name",
        "pool.py",
        "            self.index.remove(oldest)\n",
        "",
        focus="evict",
    ),
    Mutant(
        "a block written again keeps its old name",
        "pool.py",
        "        if self.index.node_of[block]:\n            self.index.remove([block])\n",
        "        pass\n",
    ),
    Mutant(
        "the context is ignored",
        "prefix.py",
        "    hasher.update(context)\n",
        "    hasher.update(b'')\n",
    ),
    Mutant(
        "the hash forgets what stands before",
        "prefix.py",
        "    hasher.update(parent + tokens)\n",
        "    hasher.update(tokens)\n",
    ),
    Mutant(
        "a partial tail is shared on a hit",
        "admission.py",
        "(len(packed) - 1) // allocator.block_size",
        "-(-len(packed) // allocator.block_size)",
    ),
    Mutant(
        "a full hit leaves nothing to compute",
        "admission.py",
        "(len(packed) - 1) // allocator.block_size",
        "len(packed) // allocator.block_size",
    ),
    Mutant(
        "a block is named before it is full",
        "steps.py",
        "        _name_blocks(allocator, rows, ends // table.block_size)\n",
        "        _name_blocks(allocator, rows, -(-ends // table.block_size))\n",
    ),
    Mutant(
        "a truncated sequence keeps its place in the index",
        "steps.py",
        "    if indexed < table.indexed.item(row):\n",
        "    if False:\n",
    ),
    Mutant(
        "lookups go on behind a miss",
        "prefix.py",
        "            if self.first[child] == NO_BLOCK and not through_gaps:\n                break\n",
        "",
        focus="rewrite",
    ),
    # eviction
    Mutant(
        "the head of a chain is evicted first",
        "allocator.py",
        "            self.pool.release(self.table.held(state.row)[::-1])\n",
        "            self.pool.release(self.table.held(state.row))\n",
        focus="evict",
    ),
    Mutant(
        "the block used last is evicted first",
        "pool.py",
        "            oldest = self.cached.pop(count - len(self.free))\n",
        "            oldest = np.array(list(self.cached)[len(self.free) - count :])\n"
        "            self.cached.withdraw(oldest)\n",
        focus="evict",
    ),
    Mutant(
        "a hit leaves the block among those to evict",
        "pool.py",
        "        self.cached.withdraw(places[refs == 0])\n",
        "",
        focus="evict",
    ),
    Mutant(
        "what was withdrawn from the queue is evicted all the same",
        "eviction.py",
        "        self._place[blocks] = -1\n",
        "",
        focus="evict",
    ),
    # the compiled index
    Mutant(
        "compiled: the hash forgets what stands before",
        "prefix_index.cpp",
        "    std::memcpy(chunk, parent, DIGEST_BYTES);\n",
        "    std::memset(chunk, 0, DIGEST_BYTES);\n",
    ),
    Mutant(
        "compiled: lookups go on behind a miss",
        "prefix_index.cpp",
        "        if (index->first[child] == NO_BLOCK && !through_gaps) break;\n",
        "",
        focus="rewrite",
    ),
    Mutant(
        "compiled: a copy takes the place of the one before",
        "prefix_index.cpp",
        "    while (*last != NO_BLOCK) last = &index->next_copy[*last];\n",
        "",
        focus="fork",
    ),
    Mutant(
        "compiled: a run is named as if all stood behind its start",
        "prefix_index.cpp",
        "            const i32 child = insert(index, run.last, tokens(i), digests[i - begin]);\n",
        "            const i32 child = insert(index, start, tokens(i), digests[i - begin]);\n",
    ),
    Mutant(
        "compiled: a node is expected that was forgotten",
        "prefix_index.cpp",
        "    if (index->latest[parent] == node) index->latest[parent] = 0;\n",
        "    (void)parent;\n",
        focus="rewrite",
    ),
    Mutant(
        "compiled: what is named stays in use by who named it",
        "prefix_index.cpp",
        "        index->users[start] -= 1;\n        index->users[run.last] += 1;\n",
        "",
    ),
    Mutant(
        "compiled: what stands two behind a failed step is still found",
        "prefix_index.cpp",
        "        for (i32 node = known; node != top; node = index->parents[node]) seen[node] = where;\n",
        "",
        focus="fail",
    ),
    # the compiled steps
    Mutant(
        "compiled: a decode step writes a slot too early",
        "steps.cpp",
        "        slots[i] = table->block(row, place) * table->block_size + offset;\n",
        "        slots[i] = table->block(row, place) * table->block_size + (offset ? offset - 1 : 0);\n",
    ),
    Mutant(
        "compiled: a block is named before it is full",
        "steps.cpp",
        "return ends[i] / table->block_size - table->at(INDEXED, rows[i]);",
        "return (ends[i] + table->block_size - 1) / table->block_size - table->at(INDEXED, rows[i]);",
    ),
    Mutant(
        "compiled: what a step computes does not count",
        "steps.cpp",
        "        table->at(COMPUTED, rows[i]) = ends[i];\n",
        "",
    ),
    Mutant(
        "compiled: every block of a prompt gets its first tokens",
        "steps.cpp",
        "tokens + (position - first)",
        "tokens",
    ),
    # block borders
    Mutant(
        "append takes its block a token late",
        "growth.py",
        "    held, needed = table.blocks_for(length), table.blocks_for(end)\n",
        "    held, needed = table.blocks_for(length), table.blocks_for(end - 1)\n",
    ),
    Mutant(
        "a decode step takes its block a token late",
        "growth.py",
        "    growing = (offsets == 0).nonzero()[0]\n",
        "    growing = (offsets == 1).nonzero()[0]\n",
    ),
    Mutant(
        "truncate keeps one block too many",
        "allocator.py",
        "        held, kept = table.blocks_for(before), table.blocks_for(length)\n",
        "        held, kept = table.blocks_for(before), table.blocks_for(length + 1)\n",
    ),
    Mutant(
        "truncate leaves the tokens computed",
        "steps.py",
        "        column[row] = min(column.item(row), length)\n",
        "        column[row] = column.item(row)\n",
    ),
    Mutant(
        "a step owns one block too few",
        "steps.py",
        "(ends - 1) // table.block_size - first + 1, 0)",
        "(ends - 1) // table.block_size - first, 0)",
        focus="fork",
    ),
    # copy-on-write
    Mutant(
        "a shared block is written in place",
        "growth.py",
        "    if pool.refs.item(source) == 1:\n        pool.make_writable(source)\n        return []\n",
        "    if pool.refs.item(source) >= 1:\n        pool.make_writable(source)\n        return []\n",
        focus="fork",
    ),
    Mutant(
        "append writes a shared tail in place",
        "growth.py",
        "    pairs = own_block(allocator, row, held - 1) if len(packed) and length % table.block_size else []\n",
        "    pairs: BlockPairs = []\n",
        focus="fork",
    ),
    Mutant(
        "a decode step writes a shared tail in place",
        "growth.py",
        "    for i in unowned:\n",
        "    for i in unowned[1:]:\n",
        focus="fork",
    ),
    Mutant(
        "a copy is taken but its content is not copied",
        "growth.py",
        "    return [(source, target)]\n",
        "    return []\n",
        focus="fork",
    ),
    Mutant(
        "two forks that compute the same block both keep it",
        "steps.py",
        "    for place, index in zip(places.tolist(), indices.tolist(), strict=True):\n",
        "    for place, index in list(zip(places.tolist(), indices.tolist(), strict=True))[1:]:\n",
        focus="fork",
    ),
    Mutant(
        "a forked parent is thought to own its tail",
        "table.py",
        "        return bool(self.sharing) and not self.sharing.isdisjoint(rows.tolist())\n",
        "        return len(self.sharing) > 1 and not self.sharing.isdisjoint(rows.tolist())\n",
        focus="fork",
    ),
    # out of blocks, admission
    Mutant(
        "the watermark is ignored",
        "admission.py",
        "        free=max(0, pool.available_beside(shared) - allocator.watermark),\n",
        "        free=max(0, pool.available_beside(shared)),\n",
    ),
    Mutant(
        "blocks hit are counted as free besides",
        "admission.py",
        "        free=max(0, pool.available_beside(shared) - allocator.watermark),\n",
        "        free=max(0, pool.available - allocator.watermark),\n",
        focus="evict",
    ),
    Mutant(
        "OutOfBlocks comes after a change",
        "growth.py",
        "    check_append(allocator, row, len(packed))\n    table = allocator.table\n"
        "    length = table.lengths.item(row)\n    end = length + len(packed)\n",
        "    table = allocator.table\n    length = table.lengths.item(row)\n    end = length + len(packed)\n"
        "    table.lengths[row] = end\n    try:\n        table.lengths[row] = length\n"
        "        check_append(allocator, row, len(packed))\n    except Exception:\n"
        "        table.lengths[row] = end\n        raise\n",
    ),
    Mutant(
        "a group keeps what another had no room for",
        "groups.py",
        "        self.check_each(lambda a: growth.check_append(a, a.resident(seq_id).row, len(packed)))\n",
        "",
    ),
    Mutant(
        "groups start at what one of them has",
        "groups.py",
        "        cached = self._cached_everywhere(chains)\n",
        "        cached = max(len(chain) * a.block_size for a, chain in zip(self.allocators, chains, strict=True))\n",
    ),
    # windows
    Mutant(
        "the window releases one block too early",
        "window.py",
        "    firsts = (starts - (allocator.window - 1)).clip(min=0) // size\n",
        "    firsts = (starts - (allocator.window - 1)).clip(min=0) // size + 1\n",
        focus="window",
    ),
    Mutant(
        "the window is a token short",
        "window.py",
        "    firsts = (starts - (allocator.window - 1)).clip(min=0) // size\n",
        "    firsts = (starts - (allocator.window - 2)).clip(min=0) // size\n",
        focus="window",
    ),
    Mutant(
        "a window's hit overlooks a missing block",
        "window.py",
        "        if block == NO_BLOCK:\n            gap = count - 1\n",
        "",
        focus="window",
    ),
    Mutant(
        "truncate goes back behind the window",
        "window.py",
        "    if start and released > first_seen_block(start, allocator.block_size, allocator.window):\n",
        "    if False:\n",
        focus="window",
    ),
    # failed steps
    Mutant(
        "abandon leaves blocks findable",
        "steps.py",
        "    named = [block for block in written if index.node_of[block]]\n",
        "    named: list[int] = []\n",
        focus="fail",
    ),
    Mutant(
        "abandon leaves findable what was computed on top",
        "steps.py",
        "    allocator.pool.forget_behind(tainted)\n",
        "",
        focus="fail",
    ),
    Mutant(
        "abandon forgets who has found the blocks since",
        "steps.py",
        "            pending += [(other, max(length, place * size)) for other in holders]\n",
        "            pass\n",
        focus="fail",
    ),
    Mutant(
        "abandon takes a block for written by whoever came last",
        "steps.py",
        "sequences[seq_id].came <= sequences[other].came",
        "sequences[seq_id].came >= sequences[other].came",
        focus="fail",
    ),
    # swapping
    Mutant(
        "swap_in maps two blocks to one",
        "swap.py",
        "    return [(block, host[i]) for i, block in fresh.items()]\n",
        "    return [(block, host[0]) for i, block in fresh.items()]\n",
        focus="swap",
    ),
    Mutant(
        "swap_in gives no host blocks back",
        "swap.py",
        "    pool.host_free.extend(reversed(host))\n",
        "",
        focus="swap",
    ),
    Mutant(
        "swap_out takes blocks that others need",
        "swap.py",
        "    pool.release(held[::-1])\n",
        "    pool.refs[held] = 1\n    pool.release(held[::-1])\n",
        focus="swap",
    ),
    Mutant(
        "swap_out copies one block too few",
        "swap.py",
        "    return list(zip(held.tolist(), host, strict=True))\n",
        "    return list(zip(held.tolist(), host, strict=True))[:-1]\n",
        focus="swap",
    ),
    # tensors
    Mutant(
        "copy-on-write copies one layer",
        "storage.py",
        "        first_blocks = torch.arange(self.num_layers)[:, None, None] * self.num_blocks\n",
        "        first_blocks = torch.arange(1)[:, None, None] * self.num_blocks\n",
        focus="fork",
        tensors=True,
    ),
    Mutant(
        "values are not swapped",
        "storage.py",
        "            for device, host in zip(self._bytes, self._host, strict=True)\n",
        "            for device, host in zip(self._bytes[:1], self._host[:1], strict=True)\n",
        focus="swap",
        tensors=True,
    ),
    Mutant(
        "kept buffers show an older block table",
        "buffers.py",
        "            outdated = ((shown[0] != rows) | (shown[1] != now)).nonzero()[0]\n",
        "            outdated = (shown[0] != rows).nonzero()[0]\n",
        focus="steps",
        tensors=True,
    ),
    Mutant(
        "kept buffers take any change for growth",
        "buffers.py",
        "        if last is not None and rows is self._rows and last.since == self._as_of:\n",
        "        if last is not None and rows is self._rows:\n",
        focus="steps",
        tensors=True,
    ),
    Mutant(
        "kept buffers keep slots of a larger step",
        "buffers.py",
        "            self._slots.host[total:total_before] = -1\n",
        "",
        focus="steps",
        tensors=True,
    ),
    Mutant(
        "a batch takes the last step's tokens for its own",
        "table.py",
        "        return as_it_is and positions.tobytes() == self.positions.tobytes()\n",
        "        return as_it_is\n",
        focus="steps",
        tensors=True,
    ),
    Mutant(
        "a batch looks for its tokens where they were",
        "table.py",
        "        as_it_is = table.version == self.version and rows is self.rows\n",
        "        as_it_is = rows is self.rows\n",
        focus="steps",
        tensors=True,
    ),
    Mutant(
        "prefix groups outlive a change of blocks",
        "sharing.py",
        "        if table is self._table and rows is self._rows and table.last_reshaped == self._as_of:\n",
        "        if table is self._table and rows is self._rows:\n",
        focus="steps",
        tensors=True,
    ),
]
