"""Recipes of heads: one head per depth (Medusa, Hydra, Hydra++), or one that continues from its own features
(EAGLE)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from foredraft.heads.eagle import EagleHead
from foredraft.heads.eagle_layouts import write_eagle
from foredraft.heads.layers import AttentionContext
from foredraft.heads.medusa_hydra import HydraHeads, MedusaHeads
from foredraft.heads.medusa_hydra_layouts import write_hydra, write_medusa
from foredraft.heads.vocabulary import DraftVocabulary
from foredraft.model.execution.attention import seen_by
from foredraft.train.features import Streams
from foredraft.train.losses import Part, distilled, feature_regression, hard
from foredraft.train.recipe import Recipe, TargetParts, Texts


class MedusaRecipe(Recipe):
    """Training of Medusa heads by cross entropy against the tokens of the text, with smaller weights for later heads.

    Source: Medusa (Cai et al. 2024, arXiv:2401.10774), Medusa-1: head k has the weight 0.8^k.

    Args:
      heads: heads with their own output layers, or over the target's.
      target: parts of the target whose last hidden states are read.
      decay: ratio of the weights of consecutive heads.
    """

    def __init__(self, heads: MedusaHeads, target: TargetParts, decay: float = 0.8) -> None:
        vocabulary = heads.vocabulary or DraftVocabulary.full(target.vocab_size)
        super().__init__(heads, target, vocabulary, tuple(decay**head for head in range(heads.num_heads)))
        self._heads = heads

    def _parts(self, texts: Texts, streams: Streams) -> list[Part]:
        hidden = texts.after(streams[self._target.num_layers].to(self._heads.dtype))
        found = []
        for head, (places, tokens) in enumerate(zip(texts.places, texts.tokens, strict=True)):
            output = self._heads.lm_heads[head] if self._heads.lm_heads else self._said
            labels = self.vocabulary.rows_of(tokens)
            found.append(hard(output(self._heads.state(head, hidden[places])), labels))
        return found

    def _said(self, states: Tensor) -> Tensor:
        """Apply the target's output layer, restricted to the tokens that can be drafted."""
        return nn.functional.linear(states, self._kept.to(states.dtype))

    def _checkpoint(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return write_medusa(self._heads, self._target.name)


class HydraRecipe(Recipe):
    """Training of Hydra heads by cross entropy against the target's distribution, given the preceding tokens of the
    text.

    Source: Hydra (Ankner et al. 2024, arXiv:2402.05109), and Hydra++ if the heads have a prefix layer. Noise is added
      as in the published code, after NEFTune (Jain et al. 2023, arXiv:2310.05914). The same noise is added to
      embeddings and hidden states. With a prefix layer, it is added to embeddings alone. Deviation: heads may share the
      target's output
    layer.

    Args:
      heads: heads over the target's output layer.
      target: parts of the target whose last hidden states are read.
      noise: strength of the noise; the published heads have 0.
    """

    def __init__(self, heads: HydraHeads, target: TargetParts, noise: float = 0.0) -> None:
        vocabulary = heads.vocabulary or DraftVocabulary.full(target.vocab_size)
        super().__init__(heads, target, vocabulary, (1.0,) * heads.num_heads)
        self._heads, self.noise = heads, noise

    def _parts(self, texts: Texts, streams: Streams) -> list[Part]:
        last = streams[self._target.num_layers]
        contexts = self._heads.contexts(last.to(self._heads.dtype))
        embedded = self._target.embedded(texts.token_ids, self._heads.dtype)
        if self.noise:
            noise = texts.noise(embedded, self.noise / (texts.lengths * embedded.shape[-1]).sqrt())
            embedded = embedded + noise
            contexts = contexts if self._heads.shape.prefix is not None else contexts + noise
        read, states = [texts.after(contexts)], []
        for head, places in enumerate(texts.places):
            read.append(texts.after(embedded, 1 + head))
            states.append(self._heads.state(head, torch.cat([one[places] for one in read], dim=-1)))
        target_logits = self._target_logits(texts, streams)
        rows, weights = torch.cat(texts.target_rows), self._weights(texts)
        return distilled(torch.cat(states), self._kept, target_logits, rows, weights, texts.counts)

    def _checkpoint(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return write_hydra(self._heads, self._target.name)


class _EagleRecipe(Recipe):
    def __init__(
        self,
        head: EagleHead,
        target: TargetParts,
        vocabulary: DraftVocabulary,
        weights: tuple[float, ...],
        depths: int = 0,
    ) -> None:
        super().__init__(head, target, vocabulary, weights, head.shape.streams, depths)
        self.head = head

    @property
    def _output(self) -> Tensor:
        """Output layer (V_d, H): the head's own, or the kept rows of the target's."""
        return self._kept if self.head.lm_head is None else self.head.lm_head.weight

    def _streams(self, streams: Streams) -> Tensor:
        parts = [streams[layer] for layer in self.head.shape.streams]
        return torch.cat(parts, dim=-1).to(self.head.dtype)

    def _checkpoint(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return write_eagle(self.head, self._target.name)


class Eagle3Recipe(_EagleRecipe):
    """Training of an EAGLE-3 head by cross entropy against the target's distribution, over several steps of a draft.

    Source: EAGLE-3 (Li et al. 2025, arXiv:2503.01840). Deviation: a position counts if the token of the text is in the
      draft vocabulary, not if the target's most likely token is. The target's logits over the whole vocabulary are then
      not needed.

    Args:
      head: head with its own output layer, or over rows of the target's.
      target: parts of the target whose features and distributions are learned.
      num_steps: number of unrolled steps; 7 in the paper.
      decay: factor of the loss from step to step; 0.8 in the paper.
    """

    def __init__(self, head: EagleHead, target: TargetParts, num_steps: int = 4, decay: float = 0.8) -> None:
        vocabulary = head.vocabulary or DraftVocabulary.full(target.vocab_size)
        super().__init__(head, target, vocabulary, tuple(decay**step for step in range(num_steps)))

    def _parts(self, texts: Texts, streams: Streams) -> list[Part]:
        fused = self.head.features(self._streams(streams))
        embedded = self._target.embedded(texts.token_ids, self.head.dtype)
        steps = unrolled(self.head, fused, embedded, texts.entries, len(self.weights))
        outputs = torch.cat([found[places] for found, places in zip(steps, texts.places, strict=True)])
        target_logits = self._target_logits(texts, streams)
        rows, weights = torch.cat(texts.target_rows), self._weights(texts)
        return distilled(self.head.before_output(outputs), self._output, target_logits, rows, weights, texts.counts)


class EagleRecipe(_EagleRecipe):
    """Training of an EAGLE head by regression of the target's next feature, plus cross entropy of the predicted token.

    Uniform noise is added to the input features. Source: EAGLE (Li et al. 2024, arXiv:2401.15077).

    Args:
      head: head of generation 1.
      target: parts of the target whose features are learned.
      vocabulary: tokens over which the cross entropy is computed.
      noise: half the width of the noise at 512 tokens; it is inversely proportional to the length of a text.
      weight: weight of the cross entropy; 0.1 in the paper.
    """

    def __init__(
        self, head: EagleHead, target: TargetParts, vocabulary: DraftVocabulary, noise: float = 0.1, weight: float = 0.1
    ) -> None:
        super().__init__(head, target, vocabulary, (1.0, weight), 1)
        self.noise = noise

    def _parts(self, texts: Texts, streams: Streams) -> list[Part]:
        given = self._streams(streams)
        noise = texts.noise(given, self.noise * 512 / texts.lengths)
        embedded = self._target.embedded(texts.token_ids, self.head.dtype)
        (outputs,) = unrolled(self.head, given + noise, embedded, texts.entries, 1)
        outputs, wanted = outputs[texts.places[0]], texts.after(given, 1)[texts.places[0]]
        target_logits = self._target_logits(texts, streams)
        states = self.head.before_output(outputs)
        rows, weights = texts.target_rows[0], self._weights(texts)
        (said,) = distilled(states, self._output, target_logits, rows, weights, [len(rows)])
        return [Part(feature_regression(outputs, wanted), len(rows), said.num_right), said]


# -- drafts along texts, with gradients -------------------------------------------------------------------------------


class UnrolledAttention:
    """Attention of texts and of drafts that continue them, with keys and values of all steps and their gradients.

    Entries of a text attend as the mask of the first step allows. A draft attends to the same entries and to its own
    tokens, one per later step. Attention is computed as products and a softmax. On a CPU, in bfloat16 and with a mask,
    the gradient of the fused kernel is slow and takes a seventh of a training step.
    """

    def __init__(self) -> None:
        self._steps: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def update(self, keys: Tensor, values: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        self._steps.setdefault(layer_idx, []).append((keys, values))
        return keys, values

    def __call__(
        self, module: Any, query: Tensor, _key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> Tensor:
        """Attend, (B, heads, N, D) -> (B, N, heads, D), with a mask (B, 1, N, entries)."""
        assert mask is not None
        (keys, values), *drafted = self._steps[module.index]
        rows, heads, num_nodes, size = query.shape
        grouped = query.view(rows, keys.shape[1], -1, num_nodes, size)
        scores = (grouped.flatten(2, 3) @ keys.transpose(-1, -2)).view(*grouped.shape[:4], -1)
        scores = scores.masked_fill(~mask[:, :, None], -torch.inf)
        own = [(grouped * of_step[:, :, None]).sum(-1, keepdim=True) for of_step, _ in drafted]
        shares = (torch.cat([scores, *own], dim=-1) * size**-0.5).softmax(-1).to(value.dtype)
        on_text, *on_own = shares.split([scores.shape[-1], *([1] * len(drafted))], dim=-1)
        mixed = (on_text.flatten(2, 3) @ values).view(grouped.shape)
        for share, (_, of_step) in zip(on_own, drafted, strict=True):
            mixed = mixed + share * of_step[:, :, None]
        seen: Tensor = mixed.reshape(rows, heads, num_nodes, size).transpose(1, 2)
        return seen


def unrolled(head: EagleHead, features: Tensor, embedded: Tensor, entries: Tensor, num_steps: int) -> Iterator[Tensor]:
    """Run a head along texts as it would draft from every entry, several tokens deep.

    The input of entry t in the first step is the target's feature after token t, with token t + 1. In step j the input
    is token t + 1 + j with the output of step j - 1, at position t + j. Each position attends to the entries of the
    first step up to t and to its own entries of the later steps. A draft that begins after token t + 1 attends to the
    same entries.

    Source: EAGLE-3 (Li et al. 2025, arXiv:2503.01840), training-time test. Deviation: entries outside the answer are
    computed, but no drafts begin there.

    Args:
      features: (B, S, H), result of `EagleHead.features`.
      embedded: (B, S, H), embeddings of the tokens 0 to S - 1.
      entries: int64 (B, A), entries from which drafts begin, at most S - 3.
      num_steps: number of steps, 1 or more.

    Yields: outputs of every step, (B x A, H), which predict token t + 2 + j of the text. Drafts beyond the end of their
      text have arbitrary values.
    Exactness: equals the drafts of `foredraft.drafters.heads.eagle` along the text, up to rounding.
    """
    rows, size = embedded.shape[0], embedded.shape[1] - 2
    every = torch.arange(rows, device=features.device)[:, None]
    columns = torch.arange(size, device=features.device)
    attention = UnrolledAttention()

    def after(fed: Tensor, given: Tensor, at: Tensor, step: int) -> Tensor:
        placed = AttentionContext(*head.place(at + step), (columns <= at[..., None])[:, None], attention)
        with seen_by(attention):
            found: Tensor = head(fed, given, placed)
        return found

    outputs = after(embedded[:, 1 : size + 1], features[:, :size], columns.expand(rows, -1), 0)[every, entries]
    yield outputs.flatten(0, 1)
    for step in range(1, num_steps):
        fed = embedded[every, (entries + 1 + step).clamp(max=size + 1)]
        outputs = after(fed, outputs, entries, step)
        yield outputs.flatten(0, 1)
