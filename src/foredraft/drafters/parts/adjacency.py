"""Matrix of the tokens that the target ranked highest after each token, for the whole vocabulary."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import torch

from foredraft.drafters.parts.state_file import read_state, save_state
from foredraft.errors import CheckpointError, ConfigError
from foredraft.model.lm import CausalLM
from foredraft.model.nodes import Nodes

_FORMAT = "foredraft token_recycling 1"
_TENSOR = "candidates"


class AdjacencyMatrix:
    """The k likeliest successors of every token, by the target's latest ranking.

    Source: token recycling (Luo et al. 2024, arXiv:2408.08696). Deviation: rows are unknown at first, not token 0.

    Args:
      vocab_size: number of tokens that the target can read.
      num_candidates: k, the number of successors per token, best first.

    Memory: 4 V k bytes at most. Memory pages of tokens that never occur are not allocated.
    """

    def __init__(self, vocab_size: int, num_candidates: int) -> None:
        self._successors = np.zeros((vocab_size, num_candidates), dtype=np.int32)  # ids plus one; 0 is unknown

    @classmethod
    def of_vocabulary(cls, target: CausalLM, num_candidates: int, batch_size: int = 256) -> AdjacencyMatrix:
        """Make the matrix of the target's top tokens after each token of the vocabulary alone, at the beginning of a
        row.

        Tokens are batched in one row, and each attends to itself only. The cost is one prefill as long as the
        vocabulary.

        Exactness: the state of the matrix never changes the output. Randomness: none.
        """
        matrix = cls(target.num_embeddings, num_candidates)
        with torch.inference_mode():
            for start in range(0, target.num_embeddings, batch_size):
                tokens = torch.arange(start, min(start + batch_size, target.num_embeddings))
                alone = torch.eye(len(tokens), dtype=torch.bool)
                nodes = Nodes(tokens[None], torch.zeros_like(tokens)[None], (len(tokens),), alone[None])
                logits = target.forward(nodes, target.new_cache(1))
                matrix.update(tokens.tolist(), logits[0].topk(num_candidates, dim=-1).indices.cpu().numpy())
        return matrix

    @property
    def vocab_size(self) -> int:
        return self._successors.shape[0]

    @property
    def num_candidates(self) -> int:
        return self._successors.shape[1]

    @property
    def candidates(self) -> np.ndarray:
        """Matrix (V, k) of token ids, int32; -1 where the successor is unknown."""
        return self._successors - 1

    def copy(self) -> AdjacencyMatrix:
        """Return a copy."""
        matrix = AdjacencyMatrix(0, self.num_candidates)
        matrix._successors = self._successors.copy()
        return matrix

    def after(self, token: int) -> list[int]:
        """Return the known successors of a token, best first."""
        return [following - 1 for following in self._successors[token].tolist() if following]

    def update(self, tokens: Sequence[int], top_ids: np.ndarray) -> None:
        """Store the target's top ids (M, k) after each token; if a token occurs several times, its last entry is
        stored.
        """
        width = top_ids.shape[1]
        for token, best in dict(zip(tokens, top_ids + 1, strict=True)).items():
            self._successors[token, :width] = best

    def add_text(self, tokens: Sequence[int]) -> None:
        """Put the successors of each token in a text before all others, the most recent first."""
        found: dict[int, list[int]] = {}
        for place in range(len(tokens) - 1, 0, -1):
            row = found.setdefault(tokens[place - 1], [])
            if len(row) < self.num_candidates and tokens[place] not in row:
                row.append(tokens[place])
        for token, row in found.items():
            known = [other - 1 for other in self._successors[token].tolist() if other]
            merged = list(dict.fromkeys([*row, *known]))[: self.num_candidates]
            self._successors[token, : len(merged)] = np.array(merged) + 1

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the matrix to a safetensors file atomically.

        Raises: CheckpointError if the file cannot be written.
        """
        save_state(path, {_TENSOR: self.candidates}, {"format": _FORMAT})

    @classmethod
    def load(cls, path: str | os.PathLike[str], vocab_size: int, num_candidates: int) -> AdjacencyMatrix:
        """Read a file that `save` wrote.

        Raises: CheckpointError for a file that is missing, truncated, of another kind or inconsistent; ConfigError for
        a file of another vocabulary or with fewer candidates. Of more candidates, the best are used.
        """
        candidates = _read(path)[:, :num_candidates]
        if candidates.shape != (vocab_size, num_candidates):
            raise ConfigError(
                f"{path} contains {candidates.shape[1]} candidates for each of {candidates.shape[0]} tokens, but the "
                f"target has {vocab_size} tokens and num_candidates is {num_candidates}; use the file with the model "
                "that it was made for"
            )
        if candidates.min(initial=-1) < -1 or candidates.max(initial=-1) >= vocab_size:
            raise CheckpointError(
                f"{path} contains token ids outside of 0..{vocab_size - 1}; the file is damaged; save it again"
            )
        matrix = cls(vocab_size, num_candidates)
        np.add(candidates, 1, out=matrix._successors)
        if _has_twins(matrix._successors):
            raise CheckpointError(
                f"{path} contains a successor of some token twice; the file is damaged; save it again"
            )
        return matrix


def _read(path: str | os.PathLike[str]) -> np.ndarray:
    candidates = read_state(path, _FORMAT, "adjacency matrix")[1].get(_TENSOR)
    if candidates is None:
        raise CheckpointError(f"{path} contains no tensor {_TENSOR!r}; check the path, or save the file again")
    if candidates.dtype != np.int32 or candidates.ndim != 2:
        raise CheckpointError(
            f"{path} contains {candidates.dtype} {candidates.shape}, not an int32 matrix; save the file again"
        )
    return candidates


def _has_twins(successors: np.ndarray) -> bool:
    """Return whether any row contains an id twice, or an id after an unknown one."""
    known = successors > 0
    in_order = np.sort(successors, axis=1)
    twins = (in_order[:, 1:] == in_order[:, :-1]) & (in_order[:, 1:] > 0)
    return bool(twins.any() or (known[:, 1:] & ~known[:, :-1]).any())
