"""Candidate successors of nodes, ranked by a drafter's logits over its whole or its reduced vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from foredraft.heads.vocabulary import DraftVocabulary
from foredraft.model import lm
from foredraft.sampling import choice, distribution, precision
from foredraft.sampling.processors import Sampler

Scored = list[tuple[int, float]]
"""Tokens with their scores, the best one first."""


Path = tuple[int, ...]
"""Draft tokens up to a node, the node's own token included."""


class Candidates:
    """Ranking of the successors of M nodes, each with the sampler of its row, its path and the next position.

    A drafter with a reduced vocabulary has logits for its own tokens only. The logits are used without conversion,
    unless a row has processors, which refer to token ids of the target. In that case the logits are spread over the
    whole vocabulary.

    Args:
      target_vocab_size: V; logits of other widths are cut or padded to it.
      vocabulary: reduced vocabulary of the drafter, if any.
      is_greedy: True to rank by the drafter's distribution alone, even in sampled rows.
    """

    def __init__(self, target_vocab_size: int, vocabulary: DraftVocabulary | None, *, is_greedy: bool) -> None:
        self._vocab_size = target_vocab_size
        self._vocabulary = None if vocabulary is None or vocabulary.is_full else vocabulary
        self._ids = None if self._vocabulary is None else self._vocabulary.target_ids
        self._is_greedy = is_greedy

    @property
    def columns(self) -> tuple[int, torch.Tensor | None]:
        """Number of logit columns to use for rows without processors, and their tokens; None for token ids equal to
        columns.
        """
        if self._vocabulary is None:
            return self._vocab_size, None
        return len(self._vocabulary), self._vocabulary.target_ids

    def log_probs(self, logits: torch.Tensor, samplers: Sequence[Sampler], paths: Sequence[Path]) -> torch.Tensor:
        """Return the processed log-probabilities after each node, (M, V); a reduced vocabulary stays reduced."""
        logits, _ = self._processable(logits, samplers)
        return distribution.log_probs(logits, samplers, paths)

    def whole(self, logits: torch.Tensor, samplers: Sequence[Sampler], paths: Sequence[Path]) -> torch.Tensor:
        """Return the processed log-probabilities after each node over all tokens of the target, (M, V)."""
        return precision.for_double(distribution.log_probs(self._spread(logits), samplers, paths))

    def best(
        self,
        logits: torch.Tensor,
        samplers: Sequence[Sampler],
        paths: Sequence[Path],
        positions: Sequence[int],
        k: int,
        power: float | None = None,
    ) -> list[Scored]:
        """Return up to k children of every node; ties are ordered by token id, and nodes without a distribution get
        none.

        Args:
          logits: logits after the nodes (M, V).
          samplers: sampler of each node's row.
          paths: draft tokens up to each node.
          positions: positions of the children.
          k: largest number of children.
          power: exponent of the distribution from which a greedy row is assumed to take tokens. With an exponent,
            scores are log-probabilities that children are right, comparable among nodes of all depths. Without one, a
            score is the distance to the best child.
        """
        logits, columns = self._processable(logits, samplers)
        found: list[Scored] = [[] for _ in samplers]
        # the order of children in greedy rows needs no distribution
        by_likelihood = [self._is_greedy or (sampler.is_greedy and power is not None) for sampler in samplers]
        for is_certain in (True, False):
            rows = [i for i, is_one in enumerate(by_likelihood) if is_one == is_certain]
            if not rows:
                continue
            some = logits if len(rows) == len(found) else logits[rows]
            chosen = [samplers[i] for i in rows], [paths[i] for i in rows]
            if is_certain:
                ranked = self._by_likelihood(some, *chosen, k, columns, power)
            else:
                ranked = _by_noise(some, *chosen, [positions[i] for i in rows], k, columns, power is not None)
            for i, scored in zip(rows, ranked, strict=True):
                found[i] = scored
        return found

    def only(
        self, logits: torch.Tensor, samplers: Sequence[Sampler], paths: Sequence[Path], positions: Sequence[int]
    ) -> list[int]:
        """Return the best child of every node; -1 for a node without a distribution."""
        logits, columns = self._processable(logits, samplers)
        if self._is_greedy:
            return _named(distribution.argmax(distribution.log_probs(logits, samplers, paths)), columns).tolist()
        if columns is None:
            return distribution.choose(logits, samplers, paths, positions).tolist()
        best, _ = distribution.choose_siblings(logits, samplers, paths, positions, 1, columns)
        return best[:, 0].tolist()

    def _by_likelihood(
        self,
        logits: torch.Tensor,
        samplers: Sequence[Sampler],
        paths: Sequence[Path],
        k: int,
        columns: torch.Tensor | None,
        power: float | None,
    ) -> list[Scored]:
        k = min(k, logits.shape[-1])
        if all(sampler.is_argmax for sampler in samplers):  # softmax keeps the order of logits
            found, scores = choice.largest(logits, k) if power is None else choice.likeliest(logits, k, power)
        else:
            log_probs = precision.for_double(distribution.log_probs(logits, samplers, paths))
            found, scores = choice.largest(log_probs, k)
            if power is not None:
                powers = [power if sampler.is_greedy else 1.0 for sampler in samplers]
                chances = torch.log_softmax(log_probs * torch.tensor(powers, device=log_probs.device)[:, None], dim=-1)
                scores = chances.gather(1, found.clamp(min=0)).double()
        return _paired(_named(found, columns), scores.where(found >= 0, -torch.inf))

    def _processable(
        self, logits: torch.Tensor, samplers: Sequence[Sampler]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return logits that the samplers can process, and the tokens of their columns; None for token ids equal to
        columns.
        """
        if self._ids is None or any(sampler.is_processed for sampler in samplers):
            return self._spread(logits), None
        self._ids = self._ids.to(logits.device)  # once, not with every call
        return logits, self._ids

    def _spread(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits (M, V of the target) from (M, V of the drafter); tokens outside of the drafter's vocabulary
        get -inf.
        """
        if self._vocabulary is not None:
            return self._vocabulary.spread(logits)
        return lm.fit_vocabulary(logits, self._vocab_size)


def _by_noise(
    logits: torch.Tensor,
    samplers: Sequence[Sampler],
    paths: Sequence[Path],
    positions: Sequence[int],
    k: int,
    columns: torch.Tensor | None,
    as_chances: bool,
) -> list[Scored]:
    """Rank children by the noise that the target draws with.

    The token that wins here is the target's draw unless another token comes close. The probability of each token is
    its share by the distance to the winner.
    """
    found, gaps = distribution.choose_siblings(logits, samplers, paths, positions, k, columns)
    return _paired(found, gaps - gaps.logsumexp(-1, keepdim=True) if as_chances else gaps)


def _named(found: torch.Tensor, columns: torch.Tensor | None) -> torch.Tensor:
    """Return the tokens of columns; -1 stays -1."""
    return found if columns is None else torch.where(found >= 0, columns.to(found.device)[found.clamp(min=0)], -1)


def _paired(tokens: torch.Tensor, scores: torch.Tensor) -> list[Scored]:
    """Return tokens (M, k) with float64 scores as lists, without impossible tokens and NaN."""
    if tokens.device.type != "cpu":  # one transfer instead of two; float64 represents all ids
        scores, names = torch.stack([scores, tokens.double()]).cpu()
        tokens = names.long()
    return [
        [(token, score) for token, score in zip(*columns, strict=True) if token >= 0 and score > float("-inf")]
        for columns in zip(tokens.tolist(), scores.tolist(), strict=True)
    ]
