"""The prefix index: which blocks hold the keys and values of which tokens.

A full block is named by a chained hash: blake2b over its parent's name and its own tokens, where the first parent is
the hash of the context. So equal names mean equal tokens at equal positions after equal tokens in an equal context.
The hash is strong and the same in every process, and a hit is still compared token by token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b

DIGEST_BYTES = 32


def root_digest(context: bytes) -> bytes:
    """The name that stands in for the parent of a sequence's first block."""
    return blake2b(context, digest_size=DIGEST_BYTES, person=b"pagegen-context").digest()


def block_digest(parent: bytes, tokens: bytes) -> bytes:
    """The name of a full block: `parent` is the name of the block before it, `tokens` its packed token ids."""
    return blake2b(parent + tokens, digest_size=DIGEST_BYTES, person=b"pagegen-block").digest()


@dataclass(slots=True, eq=False)
class Node:
    """One full block's worth of tokens behind `parent` (None: at the start of a sequence). `blocks` are those that
    hold them: several where sequences computed the same tokens side by side."""

    digest: bytes
    parent: Node | None
    tokens: bytes
    context: bytes
    blocks: list[int]
    children: set[Node] = field(default_factory=set)

    def describes(self, parent: Node | None, tokens: bytes, context: bytes) -> bool:
        """Whether this is the node of `tokens` behind `parent`, whatever the hash says."""
        return self.parent is parent and self.tokens == tokens and self.context == context


class PrefixIndex:
    """Finds blocks by content, and knows nothing of references. `node_of[block]` is None for a block without a name."""

    def __init__(self, num_blocks: int) -> None:
        self.nodes: dict[bytes, Node] = {}
        self.node_of: list[Node | None] = [None] * num_blocks

    def match(self, tokens: bytes, context: bytes, block_bytes: int, limit: int) -> list[Node]:
        """The longest known chain of full blocks at the start of `tokens` (packed, `block_bytes` a block), at most
        `limit` blocks long; it ends at the first miss."""
        chain: list[Node] = []
        parent: Node | None = None
        digest = root_digest(context)
        for start in range(0, limit * block_bytes, block_bytes):
            piece = tokens[start : start + block_bytes]
            digest = block_digest(digest, piece)
            node = self.nodes.get(digest)
            if node is None or not node.describes(parent, piece, context):
                break
            chain.append(node)
            parent = node
        return chain

    def insert(self, parent: Node | None, tokens: bytes, context: bytes, block: int) -> bool:
        """Names `block` as holding `tokens` behind `parent`. False, and nothing changes, where the name is taken by
        other tokens (a collision)."""
        digest = block_digest(root_digest(context) if parent is None else parent.digest, tokens)
        node = self.nodes.get(digest)
        if node is None:
            node = self.nodes[digest] = Node(digest, parent, tokens, context, [])
            if parent is not None:
                parent.children.add(node)
        elif not node.describes(parent, tokens, context):
            return False
        node.blocks.append(block)
        self.node_of[block] = node
        return True

    def copies(self, block: int) -> list[int]:
        """All blocks named as holding the same as `block`, itself included; none where it has no name."""
        node = self.node_of[block]
        return [] if node is None else node.blocks

    def remove(self, block: int) -> list[int]:
        """Forgets `block`. Where it was the last of its node, all that stands behind the node can no longer be
        reached and is forgotten too: returns those blocks. Raises KeyError for a block without a name."""
        node = self.node_of[block]
        if node is None:
            raise KeyError(f"block {block} is not in the prefix index")
        self.node_of[block] = None
        node.blocks.remove(block)
        return [] if node.blocks else list(self._drop(node))

    def _drop(self, node: Node) -> Iterator[int]:
        if node.parent is not None:
            node.parent.children.remove(node)
        pending = [node]
        while pending:
            dropped = pending.pop()
            del self.nodes[dropped.digest]
            pending.extend(dropped.children)
            dropped.children.clear()  # no reference cycle for the garbage collector
            for block in dropped.blocks:
                self.node_of[block] = None
                yield block
