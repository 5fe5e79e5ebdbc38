"""The tokens that may follow a node by a drafter's logits, of its whole vocabulary or of the part that it knows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from foredraft.heads.vocabulary import DraftVocabulary
from foredraft.model import lm
from foredraft.sampling import choice, distribution, precision
from foredraft.sampling.processors import Sampler

Scored = list[tuple[int, float]]
"""Tokens and their scores, the best one first."""


Path = tuple[int, ...]
"""Draft tokens up to a node, its own included."""


class Candidates:
    """Ranks the tokens that may follow M nodes, each with the sampler of its row, its path and the next position.

    A drafter with a reduced vocabulary has logits of its own tokens alone. They are used as they are, unless a row has
    processors, which name tokens of the target: logits are spread over the whole vocabulary then.

    Args:
      target_vocab_size: V; other widths are cut or padded to it.
      vocabulary: of the drafter, where it knows some of the target's tokens only.
      is_greedy: rank by the drafter's distribution alone, in sampled rows too.
    """

    def __init__(self, target_vocab_size: int, vocabulary: DraftVocabulary | None, *, is_greedy: bool) -> None:
        self._vocab_size = target_vocab_size
        self._vocabulary = None if vocabulary is None or vocabulary.is_full else vocabulary
        self._ids = None if self._vocabulary is None else self._vocabulary.target_ids
        self._is_greedy = is_greedy

    @property
    def columns(self) -> tuple[int, torch.Tensor | None]:
        """How many columns of logits count, where no row has processors, and their tokens; None for their numbers."""
        if self._vocabulary is None:
            return self._vocab_size, None
        return len(self._vocabulary), self._vocabulary.target_ids

    def log_probs(self, logits: torch.Tensor, samplers: Sequence[Sampler], paths: Sequence[Path]) -> torch.Tensor:
        """The processed distribution after each node (M, V), for users of its shape: a reduced one stays reduced."""
        logits, _ = self._processable(logits, samplers)
        return distribution.log_probs(logits, samplers, paths)

    def whole(self, logits: torch.Tensor, samplers: Sequence[Sampler], paths: Sequence[Path]) -> torch.Tensor:
        """The processed distribution after each node over all of the target's tokens (M, V)."""
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
        """Up to k children of every node; equal ones in the order of their ids, none where there is no distribution.

        Args:
          power: with one, scores are logarithms of how likely children are to be right, comparable among nodes of all
            depths, where a greedy row takes tokens by the distribution raised to this power. Without one, scores say
            how far each is behind the best.
        """
        logits, columns = self._processable(logits, samplers)
        found: list[Scored] = [[] for _ in samplers]
        # scores that only rank greedy rows need no distribution
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
        """The best child of every node, -1 where there is no distribution."""
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
        """Logits that the samplers of nodes can process, and the tokens of their columns; None for their numbers."""
        if self._ids is None or any(sampler.is_processed for sampler in samplers):
            return self._spread(logits), None
        self._ids = self._ids.to(logits.device)  # once, not with every call
        return logits, self._ids

    def _spread(self, logits: torch.Tensor) -> torch.Tensor:
        """(M, V of the drafter) -> (M, V of the target): what it does not know is impossible."""
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
    """Children by the noise that the target draws with.

    The token that wins here wins there unless another comes near: the chance of each is its share by its distance to
    the winner.
    """
    found, gaps = distribution.choose_siblings(logits, samplers, paths, positions, k, columns)
    return _paired(found, gaps - gaps.logsumexp(-1, keepdim=True) if as_chances else gaps)


def _named(found: torch.Tensor, columns: torch.Tensor | None) -> torch.Tensor:
    """Tokens of columns; -1 stays."""
    return found if columns is None else torch.where(found >= 0, columns.to(found.device)[found.clamp(min=0)], -1)


def _paired(tokens: torch.Tensor, scores: torch.Tensor) -> list[Scored]:
    """Tokens (M, k) and scores float64, without what is impossible or not a number."""
    if tokens.device.type != "cpu":  # one round trip instead of two; float64 holds all tokens
        scores, names = torch.stack([scores, tokens.double()]).cpu()
        tokens = names.long()
    return [
        [(token, score) for token, score in zip(*columns, strict=True) if token >= 0 and score > float("-inf")]
        for columns in zip(tokens.tolist(), scores.tolist(), strict=True)
    ]
