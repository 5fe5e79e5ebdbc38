"""Past outputs as a suffix tree with counts, in bounded memory, for all requests of a process."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence as Seq
from pathlib import Path
from threading import RLock
from typing import NamedTuple

import numpy as np

from foretoken.errors import ConfigError, DatastoreError, TokenizerMismatchError
from foretoken.retrieval.growth import Candidate

_WIDTH = 4  # bytes per token in labels: big-endian, so that slices are cheap and equality is memcmp
_FORMAT = "foretoken-history-1"


class _Node:
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
        self.children: dict[bytes, _Node] = {}
        self.count = count
        self.recent = recent
        self.owner = owner


class Spot(NamedTuple):
    """A place in the tree: ``offset`` bytes into the label of ``node``; its string; the score of the path to it.

    It holds as long as the tree has not changed since ``version``; after that, its string is looked up again.
    """

    node: _Node
    offset: int
    string: bytes
    score: float
    version: int


class OutputHistory:
    """Earlier outputs, with how often each continuation occurred.

    Source: the global tree of SuffixDecoding (Oliaro et al. 2024, arXiv:2411.04975). Deviations: the least recently
    *used* output goes first, not the oldest; the number of tokens is bounded as well as that of outputs; a continuation
    that reaches the depth of the tree goes on from its own end.

    Args:
      max_depth: tokens of the longest string that is kept; every window of that many tokens of an output is one.
      max_outputs, max_tokens: limits; beyond them the least recently used outputs are forgotten.
      fingerprint: of the tokenizer, so that a saved history is not read by another.
      escape: how much an observation weighs against the unknown.

    Thread safety: every method may be called from any thread.
    Cost: at most ``max_depth`` node visits per token that comes or goes; about 0.4 kB of memory per token.
    """

    def __init__(
        self,
        max_depth: int = 24,
        *,
        max_outputs: int = 10_000,
        max_tokens: int = 1 << 19,
        fingerprint: str = "",
        escape: float = 1.0,
    ) -> None:
        for name, value, least in (
            ("max_depth", max_depth, 2),
            ("max_outputs", max_outputs, 0),
            ("max_tokens", max_tokens, 0),
        ):
            if value < least:
                raise ConfigError(f"{name} of the history is {value}; want {least} or more")
        self.max_depth, self.max_outputs, self.max_tokens = max_depth, max_outputs, max_tokens
        self.fingerprint = fingerprint
        self._escape = escape
        self._clear()
        self._lock = RLock()

    def _clear(self) -> None:
        self._root = _Node(b"", 0, 0, -1)
        self._outputs: OrderedDict[int, bytes] = OrderedDict()
        self._num_bytes = 0
        self._next_key = 0
        self._version = 0

    def __len__(self) -> int:
        """Outputs that are remembered."""
        return len(self._outputs)

    @property
    def num_tokens(self) -> int:
        return self._num_bytes // _WIDTH

    @property
    def num_added(self) -> int:
        """Outputs taken in so far, forgotten ones included."""
        return self._next_key

    # -- taking in and forgetting ----------------------------------------------------------------------------------

    def add(self, tokens: Seq[int]) -> None:
        """Remember an output; of one longer than ``max_tokens``, only the end."""
        data = _packed(tokens[max(0, len(tokens) - self.max_tokens) :])
        if not data or not self.max_outputs:
            return
        with self._lock:
            key = self._next_key
            self._next_key += 1
            self._version += 1
            self._outputs[key] = data
            self._num_bytes += len(data)
            for window in self._windows(data):
                self._insert(window, key)
            while len(self._outputs) > self.max_outputs or self.num_tokens > self.max_tokens:
                self._forget_one()

    def touch(self, spot: Spot) -> None:
        """Note that something a lookup found was right: its output is forgotten later."""
        with self._lock:
            if spot.node.owner in self._outputs:
                self._outputs.move_to_end(spot.node.owner)

    def _forget_one(self) -> None:
        _, data = self._outputs.popitem(last=False)
        self._num_bytes -= len(data)
        for window in self._windows(data):
            self._remove(window)

    def _windows(self, data: bytes) -> list[bytes]:
        size = self.max_depth * _WIDTH
        return [data[start : start + size] for start in range(0, len(data), _WIDTH)]

    def _insert(self, window: bytes, key: int) -> None:
        node, place = self._root, 0
        node.count += 1
        while place < len(window):
            first = window[place : place + _WIDTH]
            child = node.children.get(first)
            if child is None:
                node.children[first] = _Node(window[place:], 1, self._next_key, key)
                return
            if not window.startswith(child.label, place):
                child = _split(node, first, child, _common(child.label, window[place:]))
            child.count += 1
            child.recent, child.owner = self._next_key, key
            node = child
            place += len(child.label)

    def _remove(self, window: bytes) -> None:
        node, place, parent = self._root, 0, None
        node.count -= 1
        while place < len(window):
            first = window[place : place + _WIDTH]
            child = node.children[first]
            child.count -= 1
            if child.count == 0:
                del node.children[first]
                break
            parent, node = node, child
            place += len(child.label)
        if parent is not None:
            _merge_only_child(node)

    # -- looking up ------------------------------------------------------------------------------------------------

    def match(self, context: Seq[int], shortest: int = 1) -> Spot | None:
        """The longest end of ``context``, up to half the depth, that was followed by something; None without one."""
        data = _packed(context[-(self.max_depth // 2) :])
        with self._lock:
            return self._longest(data, shortest, 1.0)

    def candidates(self, spot: Spot, floor: float = 0.0) -> list[Candidate]:
        """The tokens that have followed, scored by their counts."""
        with self._lock:
            found = spot if spot.version == self._version else self._walk(spot.string, spot.score)
            return [] if found is None else [one for one in self._candidates(found) if one.score >= floor]

    def _candidates(self, spot: Spot) -> list[Candidate]:
        node, offset, string, score, version = spot
        length = len(string) // _WIDTH
        if offset < len(node.label):
            token = node.label[offset : offset + _WIDTH]
            share = score * node.count * length / (node.count * length + self._escape)
            after = Spot(node, offset + _WIDTH, string + token, share, version)
            return [Candidate(share, node.recent, int.from_bytes(token, "big"), after)]
        if not node.children:
            again = self._longest(string[-(len(string) // 2 // _WIDTH * _WIDTH) :], 1, score) if length > 1 else None
            return [] if again is None else self._candidates(again)
        total = sum(child.count for child in node.children.values())
        weight = score * length / (total * length + self._escape)
        return [
            Candidate(
                weight * child.count,
                child.recent,
                int.from_bytes(first, "big"),
                Spot(child, _WIDTH, string + first, weight * child.count, version),
            )
            for first, child in node.children.items()
        ]

    def _longest(self, data: bytes, shortest: int, score: float) -> Spot | None:
        """By bisection: what follows a string follows its ends too."""
        best: Spot | None = None
        low, high = shortest, len(data) // _WIDTH
        while low <= high:
            middle = (low + high) // 2
            spot = self._walk(data[len(data) - middle * _WIDTH :], score)
            if spot is None:
                high = middle - 1
            else:
                best, low = spot, middle + 1
        return best

    def _walk(self, string: bytes, score: float) -> Spot | None:
        """Where a string ends in the tree; None where it does not occur, or ends everything it occurs in."""
        node, place = self._root, 0
        while True:
            child = node.children.get(string[place : place + _WIDTH])
            if child is None:
                return None
            rest = len(string) - place
            if rest < len(child.label):
                return (
                    Spot(child, rest, string, score, self._version) if child.label.startswith(string[place:]) else None
                )
            if not string.startswith(child.label, place):
                return None
            place += len(child.label)
            node = child
            if place == len(string):
                return Spot(node, len(node.label), string, score, self._version) if node.children else None

    # -- files -------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the outputs, least recently used first, in one step: a crash leaves the file as it was or complete.

        Raises: DatastoreError when the file cannot be written.
        """
        path = Path(path).expanduser()
        with self._lock:
            outputs = list(self._outputs.values())
        ends = np.cumsum([len(data) // _WIDTH for data in outputs], dtype=np.int64)
        beside = path.with_name(path.name + ".partial")
        try:
            with beside.open("wb") as file:
                np.savez(
                    file,
                    format=np.array(_FORMAT),
                    fingerprint=np.array(self.fingerprint),
                    tokens=np.frombuffer(b"".join(outputs), dtype=">u4").astype("<u4"),
                    ends=ends,
                )
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
        except OSError as error:
            raise DatastoreError(
                f"the history cannot be saved to {path}: {error.strerror or error}; choose a directory that you may "
                "write to"
            ) from None

    def load(self, path: str | Path, vocab_size: int | None = None) -> None:
        """Take in the outputs of a file after those that are known.

        Args:
          vocab_size: of the target that will be drafted for, where it is known: larger ids are refused.

        Raises: DatastoreError for a file that is missing, damaged or not a history; TokenizerMismatchError.
        """
        try:
            with Path(path).expanduser().open("rb") as opened, np.load(opened, allow_pickle=False) as file:
                kind, fingerprint = str(file["format"]), str(file["fingerprint"])
                tokens, ends = file["tokens"].tolist(), file["ends"].tolist()
        except FileNotFoundError:
            raise DatastoreError(f"the history {path} does not exist; check the path") from None
        except Exception as error:  # zipfile, numpy and the operating system each have their own
            raise DatastoreError(
                f"the history {path} is damaged or not a history ({type(error).__name__}: {error}); delete it"
            ) from None
        if kind != _FORMAT or (ends and ends[-1] != len(tokens)):
            raise DatastoreError(f"the history {path} has another layout ({kind!r}); delete it")
        if tokens and vocab_size is not None and max(tokens) >= vocab_size:
            raise TokenizerMismatchError(
                f"the history {path} holds the token {max(tokens)}, and the target has {vocab_size}; use another file"
            )
        if fingerprint != self.fingerprint:
            raise TokenizerMismatchError(
                f"the history {path} was made with another tokenizer (fingerprint {fingerprint[:12]!r}, not "
                f"{self.fingerprint[:12]!r}); use another file"
            )
        for start, end in zip([0, *ends], ends, strict=False):
            self.add(tokens[start:end])


def _packed(tokens: Seq[int]) -> bytes:
    return np.asarray(tokens, dtype=">u4").tobytes()


def _common(first: bytes, second: bytes) -> int:
    """Bytes of whole tokens in the common prefix of two strings."""
    place = 0
    while first[place : place + _WIDTH] == second[place : place + _WIDTH] != b"":
        place += _WIDTH
    return place


def _split(parent: _Node, first: bytes, child: _Node, size: int) -> _Node:
    """Cut a label after ``size`` bytes; the upper part becomes a node."""
    upper = _Node(child.label[:size], child.count, child.recent, child.owner)
    child.label = child.label[size:]
    upper.children[child.label[:_WIDTH]] = child
    parent.children[first] = upper
    return upper


def _merge_only_child(node: _Node) -> None:
    """Undo a split that nothing needs any more: one child, and no window that ends here."""
    if len(node.children) == 1:
        (child,) = node.children.values()
        if child.count == node.count:
            node.label += child.label
            node.children = child.children
