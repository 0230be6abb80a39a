"""The prefix index: which blocks hold the keys and values of which tokens.

A full block is named by a chained hash: blake2b over its parent's name and its own tokens, where the first parent is
the hash of the context. So equal names mean equal tokens at equal positions after equal tokens in an equal context.
The hash is strong and the same in every process, and a hit is still compared token by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

_DIGEST_BYTES = 32
# Copied for every name: parsing the keyword arguments anew takes as long as the hash (0.45 us and 0.28 us a name).
_CONTEXT = blake2b(digest_size=_DIGEST_BYTES, person=b"pagegen-context")
_BLOCK = blake2b(digest_size=_DIGEST_BYTES, person=b"pagegen-block")


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


@dataclass(slots=True, eq=False)
class Node:
    """One full block's worth of tokens behind `parent`, or a root: a context, without a parent or blocks. `blocks` are
    those that hold the tokens: several where sequences computed them side by side, none once all were taken for
    something else. `users` are the nodes behind this one and the sequences whose last named block it is; a node goes
    when it has neither blocks nor users, and is not `known` any more. `latest` is the child that was last named or
    found by its name: the likely next one, so that most hits are compared without being hashed."""

    digest: bytes
    parent: Node | None
    tokens: bytes
    blocks: tuple[int, ...] = ()
    users: int = 0
    known: bool = True
    latest: Node | None = None


class PrefixIndex:
    """Finds blocks by content, and knows nothing of references. `node_of[block]` is None, and `named[block]` false, for
    a block without a name."""

    def __init__(self, num_blocks: int) -> None:
        self.nodes: dict[bytes, Node] = {}
        self.node_of: list[Node | None] = [None] * num_blocks
        self.named = np.zeros(num_blocks, dtype=np.bool_)

    def root(self, context: bytes) -> Node | None:
        """The root of a context, or None where the index knows nothing of it."""
        root = self.nodes.get(root_digest(context))
        return root if root is not None and root.parent is None and root.tokens == context else None

    def enter_root(self, context: bytes) -> Node | None:
        """The root of a context, made if need be, with one more user; None where a collision took its name."""
        node = self.nodes.setdefault(digest := root_digest(context), Node(digest, None, context))
        if node.parent is not None or node.tokens != context:
            return None
        node.users += 1
        return node

    def walk(self, root: Node, tokens: bytes, block_bytes: int, limit: int, *, through_gaps: bool) -> list[Node]:
        """The longest chain of known blocks behind `root` that begins as `tokens` do (packed, `block_bytes` a block),
        at most `limit` long. It ends at the first node without a block, unless `through_gaps`."""
        chain: list[Node] = []
        node = root
        for start in range(0, limit * block_bytes, block_bytes):
            piece = tokens[start : start + block_bytes]
            child = node.latest
            if child is None or child.tokens != piece:
                child = self._child(node, piece)
                if child is None:
                    break
                node.latest = child
            if not (child.blocks or through_gaps):
                break
            chain.append(child)
            node = child
        return chain

    def insert(self, parent: Node, tokens: bytes, block: int) -> Node | None:
        """Names `block` as holding `tokens` behind `parent`. None, and nothing changes, where the parent was forgotten
        or the name is taken by other tokens (a collision)."""
        if not parent.known:
            return None
        digest = block_digest(parent.digest, tokens)
        node = self.nodes.get(digest)
        if node is None:
            node = self.nodes[digest] = Node(digest, parent, tokens)
            parent.users += 1
            parent.latest = node
        elif node.parent is not parent or node.tokens != tokens:
            return None
        self.fill(node, block)
        return node

    def fill(self, node: Node, block: int) -> None:
        """One more block that holds the tokens of `node`."""
        node.blocks = (*node.blocks, block)
        self.node_of[block] = node
        self.named[block] = True

    def remove(self, block: int) -> Node:
        """Forgets the name of `block`, and returns the node that it had. Raises KeyError for a block without one."""
        node = self.node_of[block]
        if node is None:
            raise KeyError(f"block {block} is not in the prefix index")
        self.node_of[block] = None
        self.named[block] = False
        node.blocks = tuple(other for other in node.blocks if other != block)
        self.prune(node)
        return node

    def leave(self, node: Node) -> None:
        """One user of `node` less."""
        node.users -= 1
        self.prune(node)

    def forget_behind(self, nodes: Sequence[Node]) -> list[int]:
        """Forgets everything that stands behind one of `nodes`: returns the blocks, which have no name any more. Takes
        time in the size of the index."""
        start = set(nodes)
        behind: dict[Node, bool] = {}
        for known in self.nodes.values() if start else ():
            path, node = [], known
            while node not in behind and node.parent is not None:
                path.append(node)
                node = node.parent
            behind.setdefault(node, False)  # a root
            for child in reversed(path):
                behind[child] = node in start or behind[node]
                node = child
        gone = [node for node, is_behind in behind.items() if is_behind]
        blocks = [block for node in gone for block in node.blocks]
        for node in gone:
            self._drop(node)
            node.blocks = ()
        for block in blocks:
            self.node_of[block] = None
            self.named[block] = False
        return blocks

    def _child(self, parent: Node, tokens: bytes) -> Node | None:
        node = self.nodes.get(block_digest(parent.digest, tokens))
        return node if node is not None and node.parent is parent and node.tokens == tokens else None

    def prune(self, node: Node) -> None:
        """Lets `node` go if nothing needs it any more, and then what only it needed."""
        while not node.users and not node.blocks and node.known:
            self._drop(node)
            if node.parent is None:
                return
            node = node.parent

    def _drop(self, node: Node) -> None:
        del self.nodes[node.digest]
        node.known = False
        if node.parent is not None:
            node.parent.users -= 1
            if node.parent.latest is node:
                node.parent.latest = None
