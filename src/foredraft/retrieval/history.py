"""Past outputs in a suffix tree, in bounded memory, shared by all requests of a process."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from foredraft import forking
from foredraft.errors import DatastoreError, TokenizerMismatchError, error_text
from foredraft.folders import not_ours, replacing
from foredraft.retrieval.growth import Candidate
from foredraft.retrieval.suffix_tree import WIDTH, SuffixMatch, SuffixTree

_FORMAT = "foredraft-history-1"

MAX_TOKENS = 1 << 19
"""Largest number of tokens of all stored outputs together."""


class OutputHistory:
    """Earlier outputs, with counts of their continuations.

    Source: the global tree of SuffixDecoding (Oliaro et al. 2024, arXiv:2411.04975). Deviations: the least recently
      *used* output is removed first, not the oldest. Both the number of outputs and the number of tokens are limited. A
    continuation that reaches the depth of the tree continues from its own suffix.

    Args:
      max_depth: length in tokens of the longest stored string. Every window of this length of an output is stored.
      max_outputs: largest number of outputs; beyond it the least recently used ones are removed. `MAX_TOKENS` is a
        second limit.
      fingerprint: fingerprint of the tokenizer, so that a saved history is not loaded with another.

    Thread safety: every method may be called from any thread.
    Cost: at most ``max_depth`` node visits per added or removed token; about 0.4 kB of memory per token.
    """

    def __init__(self, max_depth: int = 24, *, max_outputs: int = 10_000, fingerprint: str = "") -> None:
        self.max_depth, self.max_outputs = max_depth, max_outputs
        self.fingerprint = fingerprint
        self.tree = SuffixTree()
        self._outputs: OrderedDict[int, bytes] = OrderedDict()
        self._num_bytes = 0
        self._next_key = 0
        self._lock = forking.lock()

    def __len__(self) -> int:
        """Return the number of stored outputs."""
        return len(self._outputs)

    @property
    def num_tokens(self) -> int:
        return self._num_bytes // WIDTH

    @property
    def num_added(self) -> int:
        """Number of added outputs, including removed ones."""
        return self._next_key

    # -- taking in and forgetting ----------------------------------------------------------------------------------

    def add(self, tokens: Sequence[int]) -> None:
        """Store an output. Of an output longer than `MAX_TOKENS` only the end is stored."""
        data = _packed(tokens[max(0, len(tokens) - MAX_TOKENS) :])
        if not data or not self.max_outputs:
            return
        with self._lock:
            key = self._next_key
            self._next_key += 1
            self._outputs[key] = data
            self._num_bytes += len(data)
            for window in self._windows(data):
                self.tree.insert(window, key)
            while len(self._outputs) > self.max_outputs or self.num_tokens > MAX_TOKENS:
                self._forget_one()

    def touch(self, spot: SuffixMatch) -> None:
        """Mark the output of a correct match as used, so that it is removed later."""
        with self._lock:
            if spot.node.owner in self._outputs:
                self._outputs.move_to_end(spot.node.owner)

    def _forget_one(self) -> None:
        _, data = self._outputs.popitem(last=False)
        self._num_bytes -= len(data)
        for window in self._windows(data):
            self.tree.remove(window)

    def _windows(self, data: bytes) -> list[bytes]:
        size = self.max_depth * WIDTH
        return [data[start : start + size] for start in range(0, len(data), WIDTH)]

    # -- looking up ------------------------------------------------------------------------------------------------

    def match(self, context: Sequence[int], shortest: int = 1) -> SuffixMatch | None:
        """Return the longest suffix of ``context``, up to half the depth, that has a continuation; None if there is
        none."""
        data = _packed(context[-(self.max_depth // 2) :])
        with self._lock:
            return self.tree.longest(data, shortest)

    def candidates(self, spot: SuffixMatch, floor: float = 0.0) -> list[Candidate]:
        """Return the tokens that followed a match, scored by their counts."""
        with self._lock:
            return [one for one in self.tree.candidates(spot) if one.score >= floor]

    # -- files -------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the outputs to a file, least recently used first. A crash leaves the old file or the new one.

        Raises: DatastoreError if the file cannot be written.
        """
        path = Path(path).expanduser()
        with self._lock:
            outputs = list(self._outputs.values())
        ends = np.cumsum([len(data) // WIDTH for data in outputs], dtype=np.int64)
        beside = path.with_name(path.name + ".partial")
        try:
            with replacing(path, beside), beside.open("wb") as file:
                np.savez(
                    file,
                    format=np.array(_FORMAT),
                    fingerprint=np.array(self.fingerprint),
                    tokens=np.frombuffer(b"".join(outputs), dtype=">u4").astype("<u4"),
                    ends=ends,
                )
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise DatastoreError(
                f"the history cannot be saved to {path}: {error.strerror or error}; choose a directory that you may "
                "write to"
            ) from None

    def load(self, path: str | Path, vocab_size: int | None = None) -> None:
        """Add the outputs of a file after the stored ones.

        Args:
          vocab_size: vocabulary size of the target, or None if unknown. Larger ids are refused.

        Raises: DatastoreError for a file that is missing, damaged or not a history; TokenizerMismatchError.
        """
        try:
            with Path(path).expanduser().open("rb") as opened, np.load(opened, allow_pickle=False) as file:
                kind, fingerprint = str(file["format"]), str(file["fingerprint"])
                tokens, ends = file["tokens"].tolist(), file["ends"].tolist()
        except FileNotFoundError:
            raise DatastoreError(f"the history {path} does not exist; check the path") from None
        except Exception as error:  # zipfile, numpy and the operating system raise different types
            raise DatastoreError(
                f"the history {path} is damaged or not a history ({error_text(error)}); delete it"
            ) from None
        if kind != _FORMAT:
            raise DatastoreError(not_ours(path, "history", "a state_file of another name"))
        if ends and ends[-1] != len(tokens):
            raise DatastoreError(f"the history {path} is damaged (its lengths do not add up); delete it")
        if tokens and vocab_size is not None and max(tokens) >= vocab_size:
            raise TokenizerMismatchError(
                f"the history {path} contains token {max(tokens)}, but the vocabulary of the target has {vocab_size} "
                "tokens; use another file"
            )
        if fingerprint != self.fingerprint:
            raise TokenizerMismatchError(
                f"the history {path} was made with another tokenizer (fingerprint {fingerprint[:12]!r}, not "
                f"{self.fingerprint[:12]!r}); use another file"
            )
        for start, end in zip([0, *ends], ends, strict=False):
            self.add(tokens[start:end])


def _packed(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, dtype=">u4").tobytes()
