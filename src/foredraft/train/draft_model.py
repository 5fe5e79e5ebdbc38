"""Draft models: small Llamas, their initial weights, and the recipe that trains them on a target's distribution."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel

from foredraft.errors import CheckpointError, ConfigError
from foredraft.heads.checkpoint import read_checkpoint
from foredraft.heads.vocabulary import DraftVocabulary
from foredraft.train.features import Streams
from foredraft.train.losses import Part, distilled
from foredraft.train.plan import NUM_LAYERS, SmallPlan
from foredraft.train.recipe import Recipe, TargetParts, Texts

EMBEDDING = "model.embed_tokens.weight"


class SmallModel(nn.Module):
    """The decoder layers of a small Llama, and its embedding if it has its own.

    Args:
      config: config of the whole model; ``tie_word_embeddings`` is True if the embedding is the output layer as well.
      has_embedding: True if the model has its own embedding. If False, checkpoints and optimiser contain no embedding.
    """

    def __init__(self, config: LlamaConfig, *, has_embedding: bool) -> None:
        super().__init__()
        self.config = config
        self.body: Any = LlamaModel(config)
        self.embedding: nn.Parameter | None = None
        if has_embedding:
            self.embedding = nn.Parameter(self.body.embed_tokens.weight.detach().clone())
        self.body.embed_tokens = nn.Identity()  # never called: the model gets embeddings, not token ids

    def states(self, embedded: Tensor) -> Tensor:
        """Return the states after the final norm, (B, T, H) -> (B, T, H), with causal attention."""
        found: Tensor = self.body(inputs_embeds=embedded, use_cache=False).last_hidden_state
        return found


def new_small_model(target: TargetParts, plan: SmallPlan, num_layers: int = NUM_LAYERS["draft_model"]) -> SmallModel:
    """Return a draft model in float32 with its initial weights.

    Args:
      num_layers: number of layers of the draft model that starts with random weights. If the draft model starts from
        layers of the target, ``plan`` sets the number.

    Raises: ConfigError for sizes that do not fit together, or layers that the target does not have; CheckpointError for
      a folder with a model of another type or vocabulary.
    Randomness: torch's global generator.
    """
    plan.check()
    check_sizes(plan, target)
    if plan.start is not None:
        return _read(plan.start, target)
    shape, width = target.layer, plan.hidden_size or target.hidden_size
    num_heads = shape.num_heads if width == target.hidden_size else width // shape.head_dim
    groups = shape.num_heads // shape.num_kv_heads
    config = LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=width,
        intermediate_size=max(32, shape.intermediate_size * width // target.hidden_size // 32 * 32)
        if width != target.hidden_size
        else shape.intermediate_size,
        num_hidden_layers=len(plan.from_layers) or num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads // groups if num_heads % groups == 0 else num_heads,
        head_dim=shape.head_dim,
        hidden_act=shape.activation,
        rms_norm_eps=shape.eps,
        rope_parameters={"rope_type": "default", **dict(shape.rope)},
        max_position_embeddings=target.context,
        tie_word_embeddings=plan.own_embeddings or target.is_tied,
        eos_token_id=list(target.eos_token_ids),
        bos_token_id=None,
    )
    model = SmallModel(config, has_embedding=plan.own_embeddings)
    _begin(model, target, plan.from_layers)
    return model


def check_sizes(plan: SmallPlan, target: TargetParts) -> None:
    """Raise ConfigError for sizes that do not fit together, or layers that the target does not have."""
    if plan.from_layers and target.layer_tensors is None:
        raise ConfigError(
            f"the layers of {target.name} differ from Llama's, so a draft model cannot start with their weights; "
            "leave from_layers out to start with random weights"
        )
    wrong = [layer for layer in plan.from_layers if not 0 <= layer < target.num_layers]
    if wrong:
        raise ConfigError(
            f"from_layers contains {wrong}, but the layers of {target.name} are 0..{target.num_layers - 1}"
        )
    width = plan.hidden_size or target.hidden_size
    if width != target.hidden_size and not plan.own_embeddings:
        raise ConfigError(
            f"hidden_size is {width}, but the embeddings of {target.name} are {target.hidden_size} wide; add "
            "own_embeddings, or leave hidden_size out"
        )
    head_dim = target.layer.head_dim
    if width % head_dim:
        raise ConfigError(f"hidden_size is {width}; it must be a multiple of {head_dim}, the width of a head")


@torch.no_grad()
def _begin(model: SmallModel, target: TargetParts, layers: tuple[int, ...]) -> None:
    """Copy weights of the target: its embedding if the widths are equal, and the chosen layers with the final norm."""
    if model.embedding is not None and model.embedding.shape == target.embedding.shape:
        model.embedding.copy_(target.embedding)
    if layers and target.norm is not None:
        model.body.norm.weight.copy_(target.norm)
    for own, layer in zip(model.body.layers, layers, strict=False):
        assert target.layer_tensors is not None
        parameters = dict(own.named_parameters())
        for name, tensor in target.layer_tensors(layer).items():
            parameters[f"{name}.weight"].copy_(tensor)


def _read(folder: Path, target: TargetParts) -> SmallModel:
    """Read a draft model from an earlier training, or any Llama over the target's vocabulary."""
    found = read_checkpoint(folder)
    if found.config.get("model_type") != "llama" or found.config.get("vocab_size") != target.vocab_size:
        raise CheckpointError(
            f"{folder} contains a model of type {found.config.get('model_type')!r} over "
            f"{found.config.get('vocab_size')} tokens; training can only continue from a Llama over the "
            f"{target.vocab_size} tokens of {target.name}"
        )
    config = LlamaConfig(**found.config)
    tensors = {name.removeprefix("model."): tensor.float() for name, tensor in found.tensors.items()}
    embedding, output = tensors.pop("embed_tokens.weight"), tensors.pop("lm_head.weight", None)
    is_targets = torch.equal(embedding.bfloat16(), target.embedding.bfloat16().cpu())
    if output is not None and not is_targets:
        raise CheckpointError(f"{folder} has an output layer apart from its own embedding; tie the two")
    model = SmallModel(config, has_embedding=not is_targets)
    try:
        model.body.load_state_dict(tensors)
    except RuntimeError as error:
        raise CheckpointError(f"the tensors in {folder} do not match its config: {error}") from None
    if model.embedding is not None:
        with torch.no_grad():
            model.embedding.copy_(embedding)
    return model


class DraftModelRecipe(Recipe):
    """Training of a draft model by forward KL and total variation from the target's distribution, at every answer
    token.

    Forward KL is computed as cross entropy against the target's distribution. The two differ by the entropy of that
    distribution. Source: forward KL on the target's own outputs and total variation, DistillSpec (Zhou et al. 2023,
    arXiv:2310.08461). The chance that a drafted token is accepted by rejection sampling is 1 - total variation
    (Leviathan et al. 2022, arXiv:2211.17192).

    Args:
      model: the model to train.
      target: parts of the target whose distribution is learned.
      vocabulary: tokens over which distributions are compared; other tokens are never drafted.
      total_variation: share of total variation in the loss.
    """

    def __init__(
        self, model: SmallModel, target: TargetParts, vocabulary: DraftVocabulary, total_variation: float = 0.0
    ) -> None:
        super().__init__(model, target, vocabulary, (1.0,))
        self._model, self._variation = model, total_variation

    def _parts(self, texts: Texts, streams: Streams) -> list[Part]:
        states = texts.after(self._model.states(self._embedded(texts.token_ids)), 1)[texts.places[0]]
        target_logits = self._target_logits(texts, streams)
        rows, weights = texts.target_rows[0], self._weights(texts)
        return distilled(states, self._output, target_logits, rows, weights, texts.counts, self._variation)

    def _embedded(self, token_ids: Tensor) -> Tensor:
        """Embed tokens with the drafter's embedding, (B, T) -> (B, T, H)."""
        if self._model.embedding is not None:
            return nn.functional.embedding(token_ids, self._model.embedding)
        return self._target.embedded(token_ids, self._model.body.norm.weight.dtype)

    @property
    def _output(self) -> Tensor:
        """Output layer (V_d, H): rows of the drafter's own embedding, or of the target's output layer."""
        own = self._model.embedding
        return self._kept if own is None else self.vocabulary.rows_of_layer(own)

    def _checkpoint(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return a whole model in transformers' layout, with the target's embeddings if it has none of its own."""
        model = self._model
        tensors = {f"model.{name}": tensor for name, tensor in model.body.state_dict().items()}
        tensors[EMBEDDING] = self._target.embedding if model.embedding is None else model.embedding.detach()
        if not model.config.tie_word_embeddings:
            tensors["lm_head.weight"] = self._target.output
        config = {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
        if not self.vocabulary.is_full:
            config["draft_vocabulary"] = self.vocabulary.target_ids.tolist()
        return config, {name: torch.as_tensor(tensor) for name, tensor in tensors.items()}
