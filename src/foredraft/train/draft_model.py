"""Draft models: small Llamas, how they begin, and the recipe by which they learn a target's distribution."""

from __future__ import annotations

from dataclasses import dataclass
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
from foredraft.train.recipe import NUM_LAYERS, Recipe, TargetParts, Texts

EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True, kw_only=True)
class SmallPlan:
    """Layers and embeddings of a drafter that is a model.

    Args:
      from_layers: layers of the target that its own begin as, in this order; without any they begin at random.
      hidden_size: of these; 0 for the target's.
      own_embeddings: an embedding of its own is trained, which is its output layer, too; otherwise those of the target
        are used as they are, and written beside its layers.
      start: folder of a drafter that is trained further; the other arguments but the last are its own.
      total_variation: share of total variation in the loss, the rest is forward KL.
    """

    from_layers: tuple[int, ...] = ()
    hidden_size: int = 0
    own_embeddings: bool = False
    start: Path | None = None
    total_variation: float = 0.0

    def check(self) -> None:
        """Raises: ConfigError."""
        if not 0.0 <= self.total_variation <= 1.0:
            raise ConfigError(f"total_variation is {self.total_variation}; it is a share of the loss, 0 to 1")
        if self.hidden_size < 0:
            raise ConfigError(f"hidden_size is {self.hidden_size}; want 1 or more, or 0 for the target's")
        if self.start is not None and (self.from_layers or self.hidden_size or self.own_embeddings):
            raise ConfigError(f"{self.start} has layers and embeddings already; leave out what else was given of them")
        if self.from_layers and self.hidden_size:
            raise ConfigError("layers of the target are as wide as the target; leave hidden_size out")


class SmallModel(nn.Module):
    """The decoder layers of a small Llama, and its embedding where that is its own.

    Args:
      config: of the whole model; ``tie_word_embeddings`` says whether the embedding is the output layer, too.
      has_embedding: whether it has one of its own. Otherwise neither checkpoints nor the optimiser hold any.
    """

    def __init__(self, config: LlamaConfig, *, has_embedding: bool) -> None:
        super().__init__()
        self.config = config
        self.body: Any = LlamaModel(config)
        self.embedding: nn.Parameter | None = None
        if has_embedding:
            self.embedding = nn.Parameter(self.body.embed_tokens.weight.detach().clone())
        self.body.embed_tokens = nn.Identity()  # never called: texts enter as embeddings

    def states(self, embedded: Tensor) -> Tensor:
        """After the final norm, (B, T, H) -> (B, T, H); tokens see those before them."""
        found: Tensor = self.body(inputs_embeds=embedded, use_cache=False).last_hidden_state
        return found


def new_small_model(target: TargetParts, plan: SmallPlan, num_layers: int = NUM_LAYERS["draft_model"]) -> SmallModel:
    """A drafter in float32.

    Args:
      num_layers: where they begin at random.

    Raises: ConfigError for sizes that do not go together, or layers that the target does not have; CheckpointError for
      a folder whose model is of another kind, or of another vocabulary.
    Randomness: torch's.
    """
    plan.check()
    if plan.start is not None:
        return _read(plan.start, target)
    shape = target.layer
    if plan.from_layers and target.layer_tensors is None:
        raise ConfigError(
            f"the layers of {target.name} are not built as Llama's are, so no drafter can begin as some of them; leave "
            "from_layers out, and its layers begin at random"
        )
    wrong = [layer for layer in plan.from_layers if not 0 <= layer < target.num_layers]
    if wrong:
        raise ConfigError(f"from_layers names {wrong}, and {target.name} has layers 0..{target.num_layers - 1}")
    width = plan.hidden_size or target.hidden_size
    if width != target.hidden_size and not plan.own_embeddings:
        raise ConfigError(
            f"hidden_size is {width}, and embeddings of {target.name} are {target.hidden_size} wide; add "
            "own_embeddings, or leave hidden_size out"
        )
    if width % shape.head_dim:
        raise ConfigError(f"hidden_size {width} is not a multiple of {shape.head_dim}, the width of a head; change it")
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


@torch.no_grad()
def _begin(model: SmallModel, target: TargetParts, layers: tuple[int, ...]) -> None:
    """Copy what the target knows: its embedding where widths are equal, and the chosen layers with the final norm."""
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
    """A drafter of an earlier training, or of anybody's that is a Llama over the target's vocabulary."""
    found = read_checkpoint(folder)
    if found.config.get("model_type") != "llama" or found.config.get("vocab_size") != target.vocab_size:
        raise CheckpointError(
            f"{folder} holds a model of type {found.config.get('model_type')!r} over {found.config.get('vocab_size')} "
            f"tokens; training goes on from Llamas over the {target.vocab_size} of {target.name}"
        )
    config = LlamaConfig(**found.config)
    tensors = {name.removeprefix("model."): tensor.float() for name, tensor in found.tensors.items()}
    embedding, output = tensors.pop("embed_tokens.weight"), tensors.pop("lm_head.weight", None)
    is_targets = torch.equal(embedding.bfloat16(), target.embedding.bfloat16().cpu())
    if output is not None and not is_targets:
        raise CheckpointError(f"{folder} has an output layer beside an embedding of its own; tie them, as Llamas can")
    model = SmallModel(config, has_embedding=not is_targets)
    try:
        model.body.load_state_dict(tensors)
    except RuntimeError as error:
        raise CheckpointError(f"{folder} does not hold what its config says: {error}") from None
    if model.embedding is not None:
        with torch.no_grad():
            model.embedding.copy_(embedding)
    return model


class DraftModelRecipe(Recipe):
    """Forward KL and total variation between the target's distribution and the drafter's, after every token of answers.

    Forward KL is counted as cross entropy against that distribution, which differs by its entropy. Source: forward KL
    on the target's own texts and total variation, DistillSpec (Zhou et al. 2023, arXiv:2310.08461); the chance that a
    drafted token is accepted under rejection is 1 - total variation (Leviathan et al. 2022, arXiv:2211.17192).

    Args:
      model: what is trained.
      target: whose distribution is learned.
      vocabulary: over which distributions are compared; tokens outside of it are not drafted.
      total_variation: its share of the loss.
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
        """(B, T) -> (B, T, H), of the drafter."""
        if self._model.embedding is not None:
            return nn.functional.embedding(token_ids, self._model.embedding)
        return self._target.embedded(token_ids, self._model.body.norm.weight.dtype)

    @property
    def _output(self) -> Tensor:
        """(V_d, H), rows of the drafter's own embedding or of the target's output layer."""
        own = self._model.embedding
        return self._kept if own is None else self._vocabulary.rows_of_layer(own)

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
