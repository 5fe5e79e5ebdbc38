"""The recipe of small models: the target's law along its own answers, learned by a Llama with a few layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from foretoken.heads.vocabulary import DraftVocabulary
from foretoken.train.features import Streams
from foretoken.train.losses import Part, distilled
from foretoken.train.recipe import Recipe, TargetParts
from foretoken.train.small import EMBEDDING, SmallModel
from foretoken.train.texts import Texts


class DraftModelRecipe(Recipe):
    """Forward KL and total variation between the target's law and the drafter's, after every token of answers.

    Forward KL is counted as cross entropy against the law, which differs by the entropy of the law. Source: forward KL
    on the target's own texts and total variation, DistillSpec (Zhou et al. 2023, arXiv:2310.08461); the chance that a
    drafted token is accepted under rejection is 1 - total variation (Leviathan et al. 2022, arXiv:2211.17192).

    Args:
      model: what is trained.
      target: whose law is learned.
      vocabulary: over which laws are compared; tokens outside of it are not drafted.
      total_variation: its share of the loss.
    """

    def __init__(
        self, model: SmallModel, target: TargetParts, vocabulary: DraftVocabulary, total_variation: float = 0.0
    ) -> None:
        super().__init__(model, target, vocabulary, (1.0,))
        self._model, self._vocabulary, self._variation = model, vocabulary, total_variation

    def _parts(self, texts: Texts, streams: Streams) -> list[Part]:
        states = texts.after(self._model.states(self._embedded(texts.token_ids)), 1)[texts.places[0]]
        law = self._laws.along(texts, streams[self._target.num_layers])
        rows, weights = texts.laws[0], self._laws.weights(texts)
        return distilled(states, self._output, law, rows, weights, texts.counts, self._variation)

    def _embedded(self, token_ids: Tensor) -> Tensor:
        """(B, T) -> (B, T, H), of the drafter."""
        if self._model.embedding is not None:
            return nn.functional.embedding(token_ids, self._model.embedding)
        return self._target.embedded(token_ids, self._model.body.norm.weight.dtype)

    @property
    def _output(self) -> Tensor:
        """(V_d, H), rows of the drafter's own embedding or of the target's output layer."""
        own = self._model.embedding
        return self._laws.kept if own is None else self._vocabulary.rows_of_layer(own)

    def _checkpoint(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """A whole model in transformers' layout, with the embeddings of the target where it uses these."""
        model = self._model
        tensors = {f"model.{name}": tensor for name, tensor in model.body.state_dict().items()}
        tensors[EMBEDDING] = self._target.embedding if model.embedding is None else model.embedding.detach()
        if not model.config.tie_word_embeddings:
            tensors["lm_head.weight"] = self._target.output
        config = {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
        if not self._vocabulary.is_full:
            config["draft_vocabulary"] = self._vocabulary.target_ids.tolist()
        return config, {name: torch.as_tensor(tensor) for name, tensor in tensors.items()}
