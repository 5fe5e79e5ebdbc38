"""The tokens that may follow a node by a drafter's logits, of its whole vocabulary or of the part that it knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from foredraft.heads.vocabulary import DraftVocabulary
from foredraft.model import lm
from foredraft.sampling import choice, distribution, precision
from foredraft.tree import DraftTree

SHARPNESS = 1.5
"""Power to which a drafter's distribution is raised, and normalised, where it is to say how likely tokens are to be
taken by a greedy target, until outcomes show which is right. Such a target takes its likeliest token however flat its
distribution is, so the first choice of a good drafter is right more often than its distribution says; that of a poor
one is not."""
RATE = 0.05  # of the sharpness, by the difference of an outcome from what was said of it
FLATTEST, SHARPEST = 0.5, 4.0

Scored = list[tuple[int, float]]
"""Tokens and their scores, the best one first."""


@dataclass(frozen=True)
class Parents:
    """M nodes that get children.

    Args:
      samplers: those of their rows.
      paths: draft tokens up to each node, its own included.
      positions: of the tokens that follow.
    """

    samplers: Sequence[distribution.Sampler]
    paths: Sequence[tuple[int, ...]]
    positions: Sequence[int]

    def of(self, rows: Sequence[int]) -> Parents:
        """Some of them."""
        return Parents(
            [self.samplers[row] for row in rows],
            [self.paths[row] for row in rows],
            [self.positions[row] for row in rows],
        )


class Candidates:
    """Ranks what may follow nodes.

    A drafter with a reduced vocabulary has logits of its own tokens alone. They are used as they are, unless a row has
    processors, which name tokens of the target: logits are spread over the whole vocabulary then.

    Args:
      target_vocab_size: V; other widths are cut or padded to it.
      vocabulary: of the drafter, where it knows some of the target's tokens only.
      is_greedy: rank by the drafter's distribution alone, in sampled rows too.
      sharpness: see `SHARPNESS`; `follow` changes it.
    """

    def __init__(
        self,
        target_vocab_size: int,
        vocabulary: DraftVocabulary | None,
        *,
        is_greedy: bool,
        sharpness: float = SHARPNESS,
    ) -> None:
        self._vocab_size = target_vocab_size
        self._vocabulary = None if vocabulary is None or vocabulary.is_full else vocabulary
        self._ids = None if self._vocabulary is None else self._vocabulary.target_ids
        self._is_greedy = is_greedy
        self.sharpness = sharpness

    @property
    def columns(self) -> tuple[int, torch.Tensor | None]:
        """How many columns of logits count, where no row has processors, and their tokens; None for their numbers."""
        if self._vocabulary is None:
            return self._vocab_size, None
        return len(self._vocabulary), self._vocabulary.target_ids

    def log_probs(self, logits: torch.Tensor, parents: Parents) -> torch.Tensor:
        """The processed distribution after each node (M, V), for users of its shape: a reduced one stays reduced."""
        logits, _ = self._processable(logits, parents)
        return distribution.log_probs(logits, parents.samplers, parents.paths)

    def whole(self, logits: torch.Tensor, parents: Parents) -> torch.Tensor:
        """The processed distribution after each node over all of the target's tokens (M, V)."""
        return precision.for_double(distribution.log_probs(self._spread(logits), parents.samplers, parents.paths))

    def best(self, logits: torch.Tensor, parents: Parents, k: int, *, as_chances: bool) -> list[Scored]:
        """Up to k children of every node; equal ones in the order of their ids, none where there is no distribution.

        Args:
          as_chances: scores are logarithms of how likely children are to be right, comparable among nodes of all
            depths; else how far each is behind the best.
        """
        logits, columns = self._processable(logits, parents)
        found: list[Scored] = [[] for _ in parents.samplers]
        for is_certain in (True, False):
            # scores that only rank greedy rows need no distribution
            by_likelihood = [self._is_greedy or (sampler.is_greedy and as_chances) for sampler in parents.samplers]
            rows = [i for i, is_one in enumerate(by_likelihood) if is_one == is_certain]
            if rows:
                some = logits if len(rows) == len(found) else logits[rows]
                rank = self._by_likelihood if is_certain else self._by_noise
                for i, scored in zip(rows, rank(some, parents.of(rows), k, columns, as_chances), strict=True):
                    found[i] = scored
        return found

    def only(self, logits: torch.Tensor, parents: Parents) -> list[int]:
        """The best child of every node, -1 where there is no distribution."""
        logits, columns = self._processable(logits, parents)
        samplers, paths, positions = parents.samplers, parents.paths, parents.positions
        if self._is_greedy:
            return _named(distribution.argmax(distribution.log_probs(logits, samplers, paths)), columns).tolist()
        if columns is None:
            return distribution.choose(logits, samplers, paths, positions).tolist()
        best, _ = distribution.choose_siblings(logits, samplers, paths, positions, 1, columns)
        return best[:, 0].tolist()

    def follow(self, tree: DraftTree, emitted: int) -> None:
        """Sharpen the distribution if first choices are right more often than their scores say, else flatten it."""
        if tree.scores is not None:
            first = max(tree.children[0], key=tree.scores.__getitem__)
            error = (emitted == tree.tokens[first]) - tree.scores[first]
            self.sharpness = min(max(self.sharpness + RATE * error, FLATTEST), SHARPEST)

    # -- one kind of rows ------------------------------------------------------------------------------------------

    def _by_likelihood(
        self, logits: torch.Tensor, parents: Parents, k: int, columns: torch.Tensor | None, as_chances: bool
    ) -> list[Scored]:
        k = min(k, logits.shape[-1])
        if all(sampler.is_argmax for sampler in parents.samplers):  # softmax keeps the order of logits
            found, scores = choice.likeliest(logits, k, self.sharpness) if as_chances else choice.largest(logits, k)
        else:
            log_probs = precision.for_double(distribution.log_probs(logits, parents.samplers, parents.paths))
            found, scores = choice.largest(log_probs, k)
            if as_chances:
                powers = [self.sharpness if sampler.is_greedy else 1.0 for sampler in parents.samplers]
                chances = torch.log_softmax(log_probs * torch.tensor(powers, device=log_probs.device)[:, None], dim=-1)
                scores = chances.gather(1, found.clamp(min=0)).double()
        return _paired(_named(found, columns), scores.where(found >= 0, -torch.inf))

    def _by_noise(
        self, logits: torch.Tensor, parents: Parents, k: int, columns: torch.Tensor | None, as_chances: bool
    ) -> list[Scored]:
        """By the noise that the target draws with.

        The token that wins here wins there unless another comes near: the chance of each is its share by its distance
        to the winner.
        """
        samplers, paths, positions = parents.samplers, parents.paths, parents.positions
        found, gaps = distribution.choose_siblings(logits, samplers, paths, positions, k, columns)
        return _paired(found, gaps - gaps.logsumexp(-1, keepdim=True) if as_chances else gaps)

    def _processable(self, logits: torch.Tensor, parents: Parents) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits that the samplers of nodes can process, and the tokens of their columns; None for their numbers."""
        if self._ids is None or any(sampler.is_processed for sampler in parents.samplers):
            return self._spread(logits), None
        self._ids = self._ids.to(logits.device)  # once, not with every call
        return logits, self._ids

    def _spread(self, logits: torch.Tensor) -> torch.Tensor:
        """(M, V of the drafter) -> (M, V of the target): what it does not know is impossible."""
        if self._vocabulary is not None:
            return self._vocabulary.spread(logits)
        return lm.fit_vocabulary(logits, self._vocab_size)


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
