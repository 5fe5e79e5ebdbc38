"""The recipes of Medusa, Hydra and Hydra++: a head per depth."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from foretoken.heads.medusa_hydra import HydraHeads, MedusaHeads
from foretoken.heads.medusa_hydra_layouts import write_hydra, write_medusa
from foretoken.heads.vocabulary import DraftVocabulary
from foretoken.train.features import Streams
from foretoken.train.losses import Part, distilled, hard
from foretoken.train.recipe import Recipe, TargetParts
from foretoken.train.texts import Texts


class MedusaRecipe(Recipe):
    """Cross entropy of every head against the tokens of the text, less for later ones.

    Source: Medusa (Cai et al. 2024, arXiv:2401.10774), Medusa-1: head k counts 0.8^k.

    Args:
      heads: with output layers of their own, or over the target's.
      target: whose last hidden states are read.
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
            labels = self._laws.vocabulary.rows_of(tokens)
            found.append(hard(output(self._heads.state(head, hidden[places])), labels))
        return found

    def _said(self, states: Tensor) -> Tensor:
        """The target's output layer, for the tokens that can be drafted."""
        return nn.functional.linear(states, self._laws.kept.to(states.dtype))

    def _checkpoint(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return write_medusa(self._heads, self._target.name)


class HydraRecipe(Recipe):
    """Soft cross entropy of every head against the target's law, given the tokens of the text before it.

    Source: Hydra (Ankner et al. 2024, arXiv:2402.05109); Hydra++ where the heads have a prefix layer; noise as in the
    published code, after NEFTune (Jain et al. 2023, arXiv:2310.05914): the same on embeddings and hidden states, and on
    embeddings alone where there is a prefix layer. Deviation: heads may share the target's output layer.

    Args:
      heads: over the target's output layer.
      target: whose last hidden states are read.
      noise: its strength; the published heads have 0.
    """

    def __init__(self, heads: HydraHeads, target: TargetParts, noise: float = 0.0) -> None:
        vocabulary = heads.vocabulary or DraftVocabulary.full(target.vocab_size)
        super().__init__(heads, target, vocabulary, (1.0,) * heads.num_heads)
        self._heads, self._noise = heads, noise

    def _parts(self, texts: Texts, streams: Streams) -> list[Part]:
        last = streams[self._target.num_layers]
        contexts = self._heads.contexts(last.to(self._heads.dtype))
        embedded = self._target.embedded(texts.token_ids, self._heads.dtype)
        if self._noise:
            noise = texts.noise(embedded, self._noise / (texts.lengths * embedded.shape[-1]).sqrt())
            embedded = embedded + noise
            contexts = contexts if self._heads.shape.prefix is not None else contexts + noise
        read, states = [texts.after(contexts)], []
        for head, places in enumerate(texts.places):
            read.append(texts.after(embedded, 1 + head))
            states.append(self._heads.state(head, torch.cat([one[places] for one in read], dim=-1)))
        law = self._laws.along(texts, last)
        rows, weights = torch.cat(texts.laws), self._laws.weights(texts)
        return distilled(torch.cat(states), self._laws.kept, law, rows, weights, texts.counts)

    def _checkpoint(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return write_hydra(self._heads, self._target.name)
