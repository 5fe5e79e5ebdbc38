"""The recipes of EAGLE: features are predicted (EAGLE, EAGLE-2), or drafts are unrolled in training (EAGLE-3)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foretoken.heads.checkpoint import write_checkpoint
from foretoken.heads.eagle import EagleHead
from foretoken.heads.eagle_layouts import write_eagle
from foretoken.heads.vocabulary import DraftVocabulary
from foretoken.train.examples import Example
from foretoken.train.features import Streams
from foretoken.train.losses import Part, distilled, feature_regression
from foretoken.train.recipe import Laws, Place, TargetParts, halved
from foretoken.train.unrolled import unrolled


class _EagleRecipe:
    def __init__(self, head: EagleHead, target: TargetParts, vocabulary: DraftVocabulary) -> None:
        self.head, self._target = head, target
        self.module: nn.Module = head
        self.layers: tuple[int, ...] = tuple(sorted({*head.shape.streams, target.num_layers}))
        self._laws = Laws(target.output, vocabulary)

    @property
    def _output(self) -> Tensor:
        """(V_d, H), the head's own or the kept rows of the target's."""
        return self._laws.kept if self.head.lm_head is None else self.head.lm_head.weight

    def _streams(self, streams: Streams) -> Tensor:
        parts = [streams[layer] for layer in self.head.shape.streams]
        return torch.cat(parts, dim=-1).to(self.head.dtype)

    def save(self, folder: Path, facts: dict[str, Any]) -> None:
        config, tensors = write_eagle(self.head, self._target.name)
        write_checkpoint(folder, {**config, **facts}, halved(tensors))


class Eagle3Recipe(_EagleRecipe):
    """Soft cross entropy against the target's law over the draft vocabulary, at several steps of a draft.

    Source: EAGLE-3 (Li et al. 2025, arXiv:2503.01840). Deviation: a place counts where the token of the text can be
    drafted, not the target's likeliest, which saves its logits over the whole vocabulary.

    Args:
      head: with an output layer of its own, or over rows of the target's.
      target: whose features and laws are learned.
      num_steps: that are unrolled; the paper has 7.
      decay: factor of the loss from step to step; the paper has 0.8.
    """

    method: str = "eagle3"

    def __init__(self, head: EagleHead, target: TargetParts, num_steps: int = 4, decay: float = 0.8) -> None:
        super().__init__(head, target, head.vocabulary or DraftVocabulary.full(target.vocab_size))
        self._num_steps = num_steps
        self.weights: tuple[float, ...] = tuple(decay**step for step in range(num_steps))

    def parts(self, example: Example, streams: Streams) -> list[Part]:
        place = Place.of(example, self._target.output.device)
        if place is None:
            return []
        fused = self.head.features(self._streams(streams))
        embedded = self._target.embedded(place.token_ids, self.head.dtype)
        steps = list(unrolled(self.head, fused, embedded, place.first, self._num_steps))
        counts = [len(rows) for rows, _ in steps]
        rows = place.rows(counts)
        states = self.head.before_output(torch.cat([outputs for _, outputs in steps]))
        law = self._laws.along(place, streams[self._target.num_layers])
        return distilled(states, self._output, law, rows, self._laws.weights(place, rows), counts)


class EagleRecipe(_EagleRecipe):
    """Regression of the target's next feature, and a tenth of the cross entropy of what its output layer makes of it.

    Features are fed with uniform noise. Source: EAGLE (Li et al. 2024, arXiv:2401.15077).

    Args:
      head: of generation 1.
      target: whose features are learned.
      vocabulary: over which the cross entropy is taken.
      noise: half the width of the noise at 512 tokens; it falls with the length of a text.
      weight: of the cross entropy; the paper has 0.1.
    """

    method: str = "eagle"

    def __init__(
        self, head: EagleHead, target: TargetParts, vocabulary: DraftVocabulary, noise: float = 0.1, weight: float = 0.1
    ) -> None:
        super().__init__(head, target, vocabulary)
        self._noise = noise
        self.weights: tuple[float, ...] = (1.0, weight)

    def parts(self, example: Example, streams: Streams) -> list[Part]:
        place = Place.of(example, self._target.output.device)
        if place is None:
            return []
        given = self._streams(streams)
        noise = (2 * torch.rand_like(given) - 1) * self._noise * 512 / len(given)
        embedded = self._target.embedded(place.token_ids, self.head.dtype)
        ((rows, outputs),) = unrolled(self.head, given + noise, embedded, place.first, 1)
        wanted = given[rows.start + 1 : rows.stop + 1]
        where = place.rows([len(rows)])
        states = self.head.before_output(outputs)
        law = self._laws.along(place, streams[self._target.num_layers])
        weights = self._laws.weights(place, where)
        (said,) = distilled(states, self._output, law, where, weights, [len(rows)])
        return [Part(feature_regression(outputs, wanted), len(rows), said.num_right), said]
