"""The recipes of EAGLE: features are predicted (EAGLE, EAGLE-2), or drafts are unrolled in training (EAGLE-3)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from foretoken.heads.eagle import EagleHead
from foretoken.heads.eagle_layouts import write_eagle
from foretoken.heads.layers import Placed
from foretoken.heads.vocabulary import DraftVocabulary
from foretoken.model.execution.attention import seen_by
from foretoken.train.features import Streams
from foretoken.train.losses import Part, distilled, feature_regression
from foretoken.train.recipe import Place, Recipe, TargetParts


class _EagleRecipe(Recipe):
    def __init__(
        self, head: EagleHead, target: TargetParts, vocabulary: DraftVocabulary, weights: tuple[float, ...]
    ) -> None:
        super().__init__(head, target, vocabulary, weights, head.shape.streams)
        self.head = head

    @property
    def _output(self) -> Tensor:
        """(V_d, H), the head's own or the kept rows of the target's."""
        return self._laws.kept if self.head.lm_head is None else self.head.lm_head.weight

    def _streams(self, streams: Streams) -> Tensor:
        parts = [streams[layer] for layer in self.head.shape.streams]
        return torch.cat(parts, dim=-1).to(self.head.dtype)

    def _checkpoint(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return write_eagle(self.head, self._target.name)


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

    def __init__(self, head: EagleHead, target: TargetParts, num_steps: int = 4, decay: float = 0.8) -> None:
        vocabulary = head.vocabulary or DraftVocabulary.full(target.vocab_size)
        super().__init__(head, target, vocabulary, tuple(decay**step for step in range(num_steps)))
        self._num_steps = num_steps

    def _parts(self, place: Place, streams: Streams) -> list[Part]:
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

    def __init__(
        self, head: EagleHead, target: TargetParts, vocabulary: DraftVocabulary, noise: float = 0.1, weight: float = 0.1
    ) -> None:
        super().__init__(head, target, vocabulary, (1.0, weight))
        self._noise = noise

    def _parts(self, place: Place, streams: Streams) -> list[Part]:
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


# -- drafts along a text, with gradients -------------------------------------------------------------------------------


class UnrolledStates:
    """Keys and values of the steps so far, one block of columns after the other, with their gradients."""

    def __init__(self) -> None:
        self._states: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, keys: Tensor, values: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        if layer_idx in self._states:
            above = self._states[layer_idx]
            keys, values = torch.cat([above[0], keys], dim=2), torch.cat([above[1], values], dim=2)
        self._states[layer_idx] = keys, values
        return keys, values


def seen_by_step(num_entries: int, rows: range, counts: list[int], device: torch.device | None = None) -> Tensor:
    """What the rows of the last step look at: bool (1, 1, len(rows), columns).

    Args:
      num_entries: of the first step, made of features of the target; row t sees those up to t.
      rows: of the first step whose drafts this step goes on with.
      counts: rows of every later step, this one last; a row sees its own entry of each.

    Example: 3 entries, rows 1..2 in a second step: 110 10 / 111 01.
    """
    places = torch.arange(rows.start, rows.stop, device=device)
    blocks = [torch.arange(num_entries, device=device)[None] <= places[:, None]]
    columns = torch.arange(len(rows), device=device)[:, None]
    blocks += [torch.arange(count, device=device)[None] == columns for count in counts]
    return torch.cat(blocks, dim=1)[None, None]


def plain_attention(
    _module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> Tensor:
    """Attention as products and a softmax, (B, N, heads, D).

    The gradient of the fused kernel is slow on a CPU, in bfloat16 and with a mask: a seventh of a step of training.
    """
    assert mask is not None
    rows, heads, num_nodes, size = query.shape
    groups = heads // key.shape[1]
    folded = query.reshape(rows, key.shape[1], groups * num_nodes, size)
    scores = (folded @ key.transpose(-1, -2)).view(rows, key.shape[1], groups, num_nodes, -1) * size**-0.5
    scores = scores.masked_fill(~mask[:, :, None], -torch.inf)
    mixed: Tensor = scores.softmax(-1).flatten(2, 3).to(value.dtype) @ value
    return mixed.reshape(rows, heads, num_nodes, -1).transpose(1, 2)


def unrolled(
    head: EagleHead, features: Tensor, embedded: Tensor, first: int, num_steps: int
) -> Iterator[tuple[range, Tensor]]:
    """Run a head along a text as it would draft there, several tokens deep.

    Row t of the first step is made of the target's feature after token t and of token t + 1. Step j feeds it token
    t + 1 + j with what step j - 1 has put out, at position t + j; it sees the entries of the first step up to t and its
    own of the later steps, which is what a draft sees that begins after token t + 1.

    Source: EAGLE-3 (Li et al. 2025, arXiv:2503.01840), training-time test. Deviation: rows outside of the answer make
    entries, and no drafts.

    Args:
      features: (S, H), of `EagleHead.features`.
      embedded: (S, H), of the tokens 0 to S - 1.
      first: row from which on outputs are wanted.
      num_steps: 1 or more.

    Yields: by step j the rows, ``first`` to S - 3 - j, of which each has a token that its output should say (token
      t + 2 + j); and the outputs (rows, H). Ends early where no row is left.
    Exactness: equals what `foretoken.drafters.parts.eagle_rows` computes for a draft along the text, up to rounding.
    """
    size = len(embedded)
    states = UnrolledStates()
    counts: list[int] = []
    outputs = features[None, : size - 2]
    for step in range(num_steps):
        rows = range(first, size - 2 - step)
        if not rows:
            return
        entries = range(size - 2) if step == 0 else rows
        if step > 0:
            counts.append(len(rows))
        mask = seen_by_step(size - 2, entries, counts, features.device)
        positions = torch.arange(entries.start + step, entries.stop + step, device=features.device)[None]
        placed = Placed(*head.place(positions), mask, states)
        fed = embedded[None, entries.start + 1 + step : entries.stop + 1 + step]
        with seen_by(plain_attention):
            outputs = head(fed, outputs, placed)
        if step == 0:
            outputs = outputs[:, first:]
        yield rows, outputs[0]
        outputs = outputs[:, : len(rows) - 1]
