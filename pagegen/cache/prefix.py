"""The prefix index: which blocks hold the keys and values of which tokens.

A full block is named by a chained hash: blake2b over its parent's name and its own tokens, where the first parent is
the hash of the context. So equal names mean equal tokens at equal positions after equal tokens in an equal context.
The hash is strong and the same in every process, and a hit is still compared token by token (a context by its hash).

`PrefixIndex` is what an index means, and serves where there is no C++ compiler. `prefix_compiled.CompiledIndex` keeps
the same columns and does the same, several times as fast (measured: bench/cache.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from itertools import chain
from sys import getsizeof
from typing import Any, NamedTuple

import numpy as np

from pagegen.cache.arrays import Flags, Ids, Ints

Column = Any  # of integers, by node: a list here, an array in the compiled index

DIGEST_BYTES = 32
NO_NODE = 0  # a row that holds no node, so that an array of zeros names none
NO_BLOCK = -1
FREE, KNOWN, FORGOTTEN = range(3)  # states of a row

# Copied for every name: parsing the keyword arguments anew takes as long as the hash (0.45 us and 0.28 us a name).
_CONTEXT = blake2b(digest_size=DIGEST_BYTES, person=b"pagegen-context")
_BLOCK = blake2b(digest_size=DIGEST_BYTES, person=b"pagegen-block")


def root_digest(context: bytes) -> bytes:
    """The name that stands in for the parent of a sequence's first block."""
    hasher = _CONTEXT.copy()
    hasher.update(context)
    return hasher.digest()


def block_digest(parent: bytes, tokens: bytes) -> bytes:
    """The name of a full block: `parent` is the name of the block before it, `tokens` its packed token ids."""
    hasher = _BLOCK.copy()
    hasher.update(parent + tokens)
    return hasher.digest()


class Named(NamedTuple):
    """Of each run of blocks that was to be named, the node of the last that was, and how many were; and the blocks that
    had a node to themselves until one of these joined them."""

    last: Ids
    done: Ids
    joined: list[int]


class PrefixIndex:
    """Finds blocks by content, and knows nothing of references.

    A node is one full block's worth of tokens behind its parent, or a root: a context, which has no parent and no
    blocks. It is a row of the columns: `states`, FREE for a row without a node; `parents`; `users`, the nodes behind
    this one and the sequences whose last named block it is; `latest`, the child that was last named or found by its
    name: the likely next one, so that most hits are compared without being hashed. Its blocks are those that hold its
    tokens: several where sequences computed them side by side, none once all were taken for something else. A node goes
    when it has neither blocks nor users. It is found while it is KNOWN: a FORGOTTEN one stays for those who stand on
    it. `node_of` has the node of every block, NO_NODE for one without a name.
    """

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.node_of: Ids = np.zeros(num_blocks, dtype=np.int32)
        self._set_columns()

    def _set_columns(self) -> None:
        """The columns, empty but for the row that is no node."""
        self.states: Column = [FREE]
        self.parents: Column = [NO_NODE]
        self.users: Column = [0]
        self.latest: Column = [NO_NODE]
        self.first: Column = [NO_BLOCK]
        self._more: dict[int, list[int]] = {}
        self._digests, self._tokens = [b""], [b""]
        self._table: dict[bytes, int] = {}
        self._free: list[int] = []

    # what it holds

    def nodes(self) -> list[int]:
        """All nodes, known or forgotten."""
        return [node for node, state in enumerate(self.states) if state != FREE]

    def find(self, digest: bytes) -> int:
        """The known node of that name."""
        return self._table.get(digest, NO_NODE)

    def digest(self, node: int) -> bytes:
        """The name of a node."""
        return self._digests[node]

    def tokens(self, node: int) -> bytes:
        """The tokens of a node that is no root."""
        return self._tokens[node]

    def parent(self, node: int) -> int:
        """The node before."""
        return int(self.parents[node])

    def is_known(self, node: int) -> bool:
        """Whether it can be found."""
        return bool(self.states[node] == KNOWN)

    def copies(self, node: int) -> tuple[int, ...]:
        """The blocks of a node, in the order in which they came."""
        first = self.first[node]
        return () if first == NO_BLOCK else (first, *self._more.get(node, ()))

    def first_blocks(self, nodes: Ids) -> Ids:
        """The first block of each node, NO_BLOCK where it has none."""
        return np.array([self.first[node] for node in nodes.tolist()], dtype=np.int32)

    def only_copies(self, blocks: Ids) -> Flags:
        """Of each block, whether it has a name that no other has."""
        nodes = self.node_of[blocks].tolist()
        return np.array([node != NO_NODE and node not in self._more for node in nodes], dtype=np.bool_)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes now."""
        numbers = (self.states, self.parents, self.users, self.latest, self.first, self._free, self._table, self._more)
        lists = (self._digests, self._tokens, list(self._more.values()))
        return self.node_of.nbytes + sum(map(getsizeof, (*numbers, *lists, *chain.from_iterable(lists))))

    # looking up

    def root(self, context: bytes) -> int:
        """The root of a context, NO_NODE where the index knows nothing of it."""
        node = self.find(root_digest(context))
        return NO_NODE if self.parents[node] else node

    def walk(self, root: int, tokens: bytes, limit: int, *, through_gaps: bool) -> Ids:
        """The longest chain of known nodes behind `root` that begins as `tokens` do (packed), at most `limit` long. It
        ends at the first node without a block, unless `through_gaps`."""
        found: list[int] = []
        node, size = root, self.block_bytes
        for start in range(0, limit * size, size):
            piece = tokens[start : start + size]
            child = self.latest[node]
            if self._tokens[child] != piece:
                child = self._child(node, piece, block_digest(self._digests[node], piece))
                if not child:
                    break
                self.latest[node] = child
            if self.first[child] == NO_BLOCK and not through_gaps:
                break
            found.append(child)
            node = child
        return np.array(found, dtype=np.int32)

    def _child(self, parent: int, tokens: bytes, digest: bytes) -> int:
        """The known node of that name, if it stands behind `parent` and holds `tokens`."""
        node = self._table.get(digest, NO_NODE)
        return node if self.parents[node] == parent and self._tokens[node] == tokens else NO_NODE

    # naming

    def enter(self, node: int) -> None:
        """One user of `node` more."""
        self.users[node] += 1

    def enter_root(self, context: bytes) -> int:
        """The root of a context, made if need be, with one more user; NO_NODE where a collision took its name."""
        digest = root_digest(context)
        node = self.find(digest) or self._make(NO_NODE, digest, b"")
        if self.parents[node]:
            return NO_NODE
        self.enter(node)
        return node

    def name(self, nodes: Ints, counts: Ints, blocks: Ids, tokens: bytes) -> Named:
        """Names runs of blocks: counts[i] of `blocks`, which hold `tokens` (packed), as standing behind nodes[i], whose
        user goes over to the last of them. A run ends early where other tokens took the name (a collision), and nothing
        is named behind a node that is not known, NO_NODE too."""
        ids, size = blocks.tolist(), self.block_bytes
        last, done, joined, begin = list[int](), list[int](), list[int](), 0
        for start, count in zip(nodes.tolist(), counts.tolist(), strict=True):
            node, at = start, begin
            while at < begin + count:
                child = self._insert(node, tokens[at * size : (at + 1) * size])
                if not child:
                    break
                if self.fill(child, ids[at]):
                    joined.append(self.first[child])
                node, at = child, at + 1
            if at > begin:  # the nodes behind it need it from here on
                self.users[start] -= 1
                self.users[node] += 1
            last.append(node)
            done.append(at - begin)
            begin += count
        return Named(np.array(last, dtype=np.int32), np.array(done, dtype=np.int32), joined)

    def fill(self, node: int, block: int) -> bool:
        """One more block that holds the tokens of `node`, if it is not known for that already. Whether it joined
        others."""
        if self.node_of[block] == node:  # after a failed step, two sequences that share a block both offer it again
            return False
        self.node_of[block] = node
        if self.first[node] == NO_BLOCK:
            self.first[node] = block
            return False
        self._more.setdefault(node, []).append(block)
        return True

    def _insert(self, parent: int, tokens: bytes) -> int:
        """The node of `tokens` behind `parent`, made if need be."""
        if self.states[parent] != KNOWN:
            return NO_NODE
        digest = block_digest(self._digests[parent], tokens)
        if digest in self._table:
            return self._child(parent, tokens, digest)
        node = self.latest[parent] = self._make(parent, digest, tokens)
        return node

    def _make(self, parent: int, digest: bytes, tokens: bytes) -> int:
        """A new known node."""
        if not self._free:
            self._add_rows()
        node = self._free.pop()
        self.states[node], self.parents[node] = KNOWN, parent
        self._digests[node], self._tokens[node] = digest, tokens
        self._table[digest] = node
        if parent:
            self.users[parent] += 1
        return node

    def _add_rows(self) -> None:
        old = len(self.states)
        more = max(64, old)
        for column in (self.states, self.parents, self.users, self.latest):
            column.extend([0] * more)
        self.first.extend([NO_BLOCK] * more)
        self._digests.extend([b""] * more)
        self._tokens.extend([b""] * more)
        self._free.extend(range(old + more - 1, old - 1, -1))

    # forgetting

    def remove(self, blocks: Ints | Ids | Sequence[int]) -> None:
        """Forgets the names of blocks. Raises KeyError for one without, and has changed nothing then."""
        for block in self._named(blocks).tolist():
            node = self.node_of.item(block)
            self.node_of[block] = NO_NODE
            left = [other for other in self.copies(node) if other != block]
            self._set_copies(node, left)
            self._prune(node)

    def _set_copies(self, node: int, blocks: list[int]) -> None:
        self.first[node] = blocks[0] if blocks else NO_BLOCK
        self._more.pop(node, None)
        if len(blocks) > 1:
            self._more[node] = blocks[1:]

    def _named(self, blocks: Ints | Ids | Sequence[int]) -> Ids:
        """`blocks` as an array. Raises KeyError where one has no name."""
        found: Ids = np.asarray(blocks, dtype=np.int32)
        nodes = self.node_of.take(found)
        if not nodes.all():
            raise KeyError(f"block {found[nodes == NO_NODE][0]} is not in the prefix index")
        return found

    def leave(self, node: int) -> None:
        """One user of `node` less."""
        self.users[node] -= 1
        self._prune(node)

    def forget_behind(self, nodes: Sequence[int]) -> list[int]:
        """Forgets everything that stands behind one of `nodes`: returns the blocks, which have no name any more. Takes
        time in the size of the index."""
        start, behind = set(nodes), {NO_NODE: False}
        for known in self._table.values() if start else ():
            path, node = [], known
            while node not in behind:
                path.append(node)
                node = self.parents[node]
            for child in reversed(path):
                behind[child] = node in start or behind[node]
                node = child
        gone = [node for node, is_behind in behind.items() if is_behind]
        blocks = [block for node in gone for block in self.copies(node)]
        self.node_of[blocks] = NO_NODE
        for node in gone:
            self._set_copies(node, [])
            self._unlink(node)
        for node in gone:
            self._prune(node)
        return blocks

    def _prune(self, node: int) -> None:
        """Lets `node` go if nothing needs it any more, and then what only it needed."""
        while self.states[node] != FREE and not self.users[node] and self.first[node] == NO_BLOCK:
            if self.states[node] == KNOWN:
                self._unlink(node)
            self.states[node] = FREE
            self._digests[node] = self._tokens[node] = b""
            self._free.append(node)
            node = self.parents[node]
            self.users[node] -= bool(node)

    def _unlink(self, node: int) -> None:
        """Makes a known node a forgotten one."""
        del self._table[self._digests[node]]
        self.states[node] = FORGOTTEN
        parent = self.parents[node]
        if self.latest[parent] == node:
            self.latest[parent] = NO_NODE
