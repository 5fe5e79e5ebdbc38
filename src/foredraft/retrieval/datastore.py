"""A datastore on disk: continuations, with counts, of the longest known suffix of a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from foredraft.retrieval.growth import ESCAPE
from foredraft.retrieval.manifest import DatastoreManifest
from foredraft.retrieval.shard import PADDING, Shard, encode
from foredraft.retrieval.trie import ContinuationTrie

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_DEPTH = PADDING
"""Length of the longest continuation, in tokens."""

SHORTER_WEIGHT = 0.25
"""Weight of an occurrence of the next shorter context, relative to the longest one."""

_SHARD_STRIDE = 1 << 32  # makes positions of a later shard more recent than all of an earlier one


@dataclass(frozen=True)
class Lookup:
    """Limits of a lookup in a datastore.

    Args:
      match_min, match_max: lengths in tokens of the shortest and longest context that counts as a match.
      depth: number of tokens read after an occurrence; at most 64.
      max_hits: largest number of occurrences to read. If there are more, this many are sampled at equal distances in
        sorted order, so that the proportions of their counts stay the same.
      few_hits: number of occurrences below which the occurrences of the next shorter context are added.
    """

    match_min: int = 1
    match_max: int = 16
    depth: int = 10
    max_hits: int = 512
    few_hits: int = 8


class Match(NamedTuple):
    """The result of looking up a context in a datastore.

    Args:
      length: length in tokens of the longest suffix of the context that occurs with something after it.
      num_hits: number of its occurrences.
      trie: continuations.
    """

    length: int
    num_hits: int
    trie: ContinuationTrie


class Datastore:
    """Shards of tokens, searched through memory maps.

    Source: REST (He et al. 2023, arXiv:2311.08252). Deviations: documents are separated, and no match crosses the end
      of a document. Ids have the smallest width that fits the vocabulary. The length of the match is found by
      bisection, not by trying 16, 15, ... one after the other. If there are more than ``max_hits`` hits, they are
      sampled evenly instead of
    cut off. If there are few, hits of the next shorter context are added.

    Cost: a lookup makes about a hundred probes and reads ``max_hits`` continuations; see dev/measurements/lookup.md.
    """

    def __init__(self, folder: Path, manifest: DatastoreManifest) -> None:
        self.folder, self.manifest = folder, manifest
        self._shards = [
            Shard(folder / shard.tokens.name, folder / shard.index.name, shard.num_tokens, manifest.width)
            for shard in manifest.shards
        ]

    @classmethod
    def open(
        cls,
        folder: str | Path,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        vocab_size: int | None = None,
        checksums: bool = True,
    ) -> Datastore:
        """Check and map a datastore.

        Args:
          tokenizer, vocab_size: tokenizer and vocabulary size of the model that will use the datastore; None if
            unknown.
          checksums: True to read all files once and compare checksums; otherwise only names and sizes are checked.

        Raises: DatastoreError for a directory that is damaged or not a datastore; TokenizerMismatchError.
        """
        path = Path(folder).expanduser()
        manifest = DatastoreManifest.read(path)
        manifest.check_tokenizer(tokenizer, vocab_size)
        manifest.check_files(path, checksums=checksums)
        return cls(path, manifest)

    def query(self, context: Sequence[int], how: Lookup | None = None) -> Match | None:
        """Return the continuations of the longest known suffix of ``context``; None if no suffix is known.

        Ids outside the datastore's vocabulary (such as those of a padded vocabulary) match nothing.
        """
        how = how or Lookup()
        data = encode(known_end(context[-how.match_max :], self.manifest.vocab_size), self.manifest.width)
        found = [shard.longest(data, how.match_min, how.match_max) for shard in self._shards]
        length = max(length for length, _ in found)
        if length == 0:
            return None
        hits = [of_shard if size == length else range(0) for size, of_shard in found]
        num_hits, shorter = sum(map(len, hits)), None
        if num_hits < how.few_hits and length > how.match_min:
            end = data[len(data) - (length - 1) * self.manifest.width :]
            shorter = [shard.find(end) for shard in self._shards]
            shorter = shorter if sum(map(len, shorter)) > num_hits else None
        return Match(length, num_hits, self._trie(length, hits, shorter, how))

    def _trie(self, length: int, hits: list[range], shorter: list[range] | None, how: Lookup) -> ContinuationTrie:
        """Return one trie of all hits. A hit of both contexts gets the weights of both.

        Args:
          length: length of the context in tokens.
          hits: occurrences of the context, by shard.
          shorter: occurrences of the context that is one token shorter; None if they do not count.
        """
        num_hits = sum(map(len, hits))
        if len(self._shards) == 1 and shorter is not None and num_hits <= _FEW and len(shorter[0]) <= how.max_hits:
            return self._nested(length, hits[0], shorter[0], how)
        groups = [(hits, length, 1.0 if shorter is None else 1.0 - SHORTER_WEIGHT)]
        if shorter is not None:
            groups.append((shorter, length - 1, SHORTER_WEIGHT))
        rows, places, weights = [], [], []
        for of_shards, size, weight in groups:
            limit = -(-how.max_hits // sum(len(found) > 0 for found in of_shards))
            for number, (shard, found) in enumerate(zip(self._shards, of_shards, strict=True)):
                if found:
                    after = shard.positions(found, limit) + size
                    rows.append(shard.continuations(after, how.depth))
                    places.append(after + number * _SHARD_STRIDE)
                    weights.append(np.full(len(after), weight * len(found) / len(after)))
        width = self.manifest.width
        if len(rows) == 1:
            return ContinuationTrie(rows[0], places[0], width=width, escape=ESCAPE)
        return ContinuationTrie(
            np.concatenate(rows),
            np.concatenate(places),
            np.concatenate(weights),
            width=width,
            is_sorted=False,
            escape=ESCAPE,
        )

    def _nested(self, length: int, hits: range, shorter: range, how: Lookup) -> ContinuationTrie:
        """Return the same trie for one shard if all hits of the shorter context are read: they include the longer
        one's."""
        (shard,) = self._shards
        after = shard.positions(shorter, how.max_hits) + length - 1
        among = shard.positions(hits, how.max_hits) + length
        weights = SHORTER_WEIGHT + (1.0 - SHORTER_WEIGHT) * (after == among[:, None]).any(axis=0)
        rows = shard.continuations(after, how.depth)
        return ContinuationTrie(rows, after, weights, width=self.manifest.width, escape=ESCAPE)

    def close(self) -> None:
        """Close the files. The datastore cannot be used afterwards."""
        for shard in self._shards:
            shard.close()


_FEW = 64  # largest number of hits for the quadratic comparison in _nested


def known_end(tokens: Sequence[int], vocab_size: int) -> Sequence[int]:
    """Return the tokens after the last one outside the vocabulary."""
    for place in range(len(tokens) - 1, -1, -1):
        if not 0 <= tokens[place] < vocab_size:
            return tokens[place + 1 :]
    return tokens
