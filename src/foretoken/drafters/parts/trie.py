"""Builds a draft node by node; equal siblings become one."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from foretoken.tree import DraftTree


class Trie:
    """A draft that grows below the pending token, never deeper than ``max_depth``."""

    def __init__(self, pending: int, max_depth: int) -> None:
        self._tokens = [pending]
        self._parents = [-1]
        self._depths = [0]
        self._child_of: dict[tuple[int, int], int] = {}
        self._max_depth = max_depth

    def __len__(self) -> int:
        """Number of nodes, root included."""
        return len(self._tokens)

    def add(self, parent: int | None, token: int) -> int | None:
        """The child of ``parent`` that carries ``token``, new or old; None where it would be too deep or in the air."""
        if parent is None or self._depths[parent] >= self._max_depth:
            return None
        node = self._child_of.get((parent, token))
        if node is None:
            node = self._child_of[parent, token] = len(self._tokens)
            self._tokens.append(token)
            self._parents.append(parent)
            self._depths.append(self._depths[parent] + 1)
        return node

    def add_path(self, tokens: Seq[int], max_nodes: int | None = None) -> None:
        """One continuation of the root, as far as ``max_nodes`` in all allow."""
        node: int | None = 0
        for token in tokens:
            if max_nodes is not None and len(self) >= max_nodes and (node, token) not in self._child_of:
                return
            node = self.add(node, token)

    def tree(self, source: str = "") -> DraftTree:
        """Return the tree that has been grown."""
        return DraftTree(tuple(self._tokens), tuple(self._parents), source=source)
