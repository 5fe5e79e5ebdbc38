"""Strings of tokens as a suffix tree with counts of their continuations."""

from __future__ import annotations

from typing import NamedTuple

from foredraft.retrieval.growth import ESCAPE, Candidate

WIDTH = 4
"""Bytes per token in labels. Big-endian bytes make slices cheap, and comparison is memcmp."""


class Node:
    """A node of the tree. The string of a node is that of its parent followed by its label.

    Args:
      label: bytes of at least one token.
      count: number of inserted windows that begin with its string.
      recent: number of the last insertion through this node.
      owner: key of the last output inserted through this node.
    """

    __slots__ = ("children", "count", "label", "owner", "recent")

    def __init__(self, label: bytes, count: int, recent: int, owner: int) -> None:
        self.label = label
        self.children: dict[bytes, Node] = {}
        self.count = count
        self.recent = recent
        self.owner = owner


class SuffixMatch(NamedTuple):
    """A position in the tree: ``offset`` bytes into the label of ``node``, with its string and the score of its path.

    A match is valid as long as the tree has the same ``version``; after that its string is looked up again.
    """

    node: Node
    offset: int
    string: bytes
    score: float
    version: int


class SuffixTree:
    """Counts of strings and all their prefixes. Not thread-safe."""

    def __init__(self) -> None:
        self.root = Node(b"", 0, 0, -1)
        self.version = 0

    def insert(self, window: bytes, key: int) -> None:
        """Count a string and all its prefixes. ``key`` is the number of its output, never below earlier ones."""
        node, place, self.version = self.root, 0, key + 1
        node.count += 1
        while place < len(window):
            first = window[place : place + WIDTH]
            child = node.children.get(first)
            if child is None:
                node.children[first] = Node(window[place:], 1, self.version, key)
                return
            if not window.startswith(child.label, place):
                child = _split(node, first, child, _common(child.label, window[place:]))
            child.count += 1
            child.recent, child.owner = self.version, key
            node = child
            place += len(child.label)

    def remove(self, window: bytes) -> None:
        """Undo one `insert` of this string."""
        node, place, parent = self.root, 0, None
        node.count -= 1
        while place < len(window):
            first = window[place : place + WIDTH]
            child = node.children[first]
            child.count -= 1
            if child.count == 0:
                del node.children[first]
                break
            parent, node = node, child
            place += len(child.label)
        if parent is not None:
            _merge_only_child(node)

    def candidates(self, spot: SuffixMatch) -> list[Candidate]:
        """Return the tokens that followed a match, scored by their counts."""
        found = spot if spot.version == self.version else self._walk(spot.string, spot.score)
        return [] if found is None else self._candidates(found)

    def _candidates(self, spot: SuffixMatch) -> list[Candidate]:
        node, offset, string, score, version = spot
        length = len(string) // WIDTH
        if offset < len(node.label):
            token = node.label[offset : offset + WIDTH]
            share = score * node.count * length / (node.count * length + ESCAPE)
            after = SuffixMatch(node, offset + WIDTH, string + token, share, version)
            return [Candidate(share, node.recent, int.from_bytes(token, "big"), after)]
        if not node.children:
            again = self.longest(string[-(len(string) // 2 // WIDTH * WIDTH) :], 1, score) if length > 1 else None
            return [] if again is None else self._candidates(again)
        total = sum(child.count for child in node.children.values())
        weight = score * length / (total * length + ESCAPE)
        return [
            Candidate(
                weight * child.count,
                child.recent,
                int.from_bytes(first, "big"),
                SuffixMatch(child, WIDTH, string + first, weight * child.count, version),
            )
            for first, child in node.children.items()
        ]

    def longest(self, data: bytes, shortest: int, score: float = 1.0) -> SuffixMatch | None:
        """Return the longest suffix of a string that has a continuation; None if there is none.

        If a string has a continuation, its suffixes have it as well, so the length is found by bisection.
        """
        best: SuffixMatch | None = None
        low, high = shortest, len(data) // WIDTH
        while low <= high:
            middle = (low + high) // 2
            spot = self._walk(data[len(data) - middle * WIDTH :], score)
            if spot is None:
                high = middle - 1
            else:
                best, low = spot, middle + 1
        return best

    def _walk(self, string: bytes, score: float) -> SuffixMatch | None:
        """Return the end of a string in the tree; None if it does not occur, or has no continuation."""
        node, place = self.root, 0
        while True:
            child = node.children.get(string[place : place + WIDTH])
            if child is None:
                return None
            rest = len(string) - place
            if rest < len(child.label):
                return (
                    SuffixMatch(child, rest, string, score, self.version)
                    if child.label.startswith(string[place:])
                    else None
                )
            if not string.startswith(child.label, place):
                return None
            place += len(child.label)
            node = child
            if place == len(string):
                return SuffixMatch(node, len(node.label), string, score, self.version) if node.children else None


def _common(first: bytes, second: bytes) -> int:
    """Return the length in bytes of the common prefix of two strings, in whole tokens."""
    place = 0
    while first[place : place + WIDTH] == second[place : place + WIDTH] != b"":
        place += WIDTH
    return place


def _split(parent: Node, first: bytes, child: Node, size: int) -> Node:
    """Cut a label after ``size`` bytes. The first part becomes a new node above, which is returned."""
    upper = Node(child.label[:size], child.count, child.recent, child.owner)
    child.label = child.label[size:]
    upper.children[child.label[:WIDTH]] = child
    parent.children[first] = upper
    return upper


def _merge_only_child(node: Node) -> None:
    """Undo a split that is no longer needed: the node has one child, and no window ends at the node."""
    if len(node.children) == 1:
        (child,) = node.children.values()
        if child.count == node.count:
            node.label += child.label
            node.children = child.children
