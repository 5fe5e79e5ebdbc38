"""Strings of tokens as a suffix tree with counts: what has followed a string, and how often."""

from __future__ import annotations

from typing import NamedTuple

from foredraft.retrieval.growth import ESCAPE, Candidate

WIDTH = 4
"""Bytes per token in labels: big-endian, so that slices are cheap and equality is memcmp."""


class Node:
    """A string of the tree, from the end of its parent's on.

    Args:
      label: what it adds to its parent's string, at least one token.
      count: how many of the inserted windows begin with its string.
      recent: number of the last insertion that passed here.
      owner: key of the output that passed here last.
    """

    __slots__ = ("children", "count", "label", "owner", "recent")

    def __init__(self, label: bytes, count: int, recent: int, owner: int) -> None:
        self.label = label
        self.children: dict[bytes, Node] = {}
        self.count = count
        self.recent = recent
        self.owner = owner


class SuffixMatch(NamedTuple):
    """A place in the tree: ``offset`` bytes into the label of ``node``; its string; the score of the path to it.

    It holds as long as the tree has not changed since ``version``; after that, its string is looked up again.
    """

    node: Node
    offset: int
    string: bytes
    score: float
    version: int


class SuffixTree:
    """Counts strings, each with all its beginnings. Not for several threads at once."""

    def __init__(self) -> None:
        self.root = Node(b"", 0, 0, -1)
        self.version = 0

    def insert(self, window: bytes, key: int) -> None:
        """Count a string and all its beginnings; ``key`` is the number of its output, none below those before."""
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
        """The tokens that have followed, scored by their counts."""
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
        """The longest end of a string that was followed by something; None without one.

        By bisection: what follows a string follows its ends too.
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
        """End of a string in the tree; None where it does not occur, or nothing follows it."""
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
    """Bytes of whole tokens in the common prefix of two strings."""
    place = 0
    while first[place : place + WIDTH] == second[place : place + WIDTH] != b"":
        place += WIDTH
    return place


def _split(parent: Node, first: bytes, child: Node, size: int) -> Node:
    """Cut a label after ``size`` bytes; the upper part becomes a node."""
    upper = Node(child.label[:size], child.count, child.recent, child.owner)
    child.label = child.label[size:]
    upper.children[child.label[:WIDTH]] = child
    parent.children[first] = upper
    return upper


def _merge_only_child(node: Node) -> None:
    """Undo a split that nothing needs any more: one child, and no window that ends here."""
    if len(node.children) == 1:
        (child,) = node.children.values()
        if child.count == node.count:
            node.label += child.label
            node.children = child.children
