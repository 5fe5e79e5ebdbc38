"""Drafters at the start of their training, over the target's output layer and partly with the target's weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from foredraft.errors import UnsupportedModelError
from foredraft.heads.eagle import EagleHead, EagleShape, default_streams
from foredraft.heads.layers import LayerShape
from foredraft.heads.medusa_hydra import HeadsShape, HydraHeads, MedusaHeads
from foredraft.heads.vocabulary import DraftVocabulary
from foredraft.model.execution.forwards import replacement
from foredraft.model.execution.packing import PackedLinear, embedding_weight
from foredraft.model.lm import CausalLM
from foredraft.train.draft_model import DraftModelRecipe, new_small_model
from foredraft.train.examples import Example
from foredraft.train.head_recipes import Eagle3Recipe, EagleRecipe, HydraRecipe, MedusaRecipe
from foredraft.train.plan import NUM_LAYERS, Plan
from foredraft.train.recipe import Recipe, TargetParts

_LAYER = (
    "input_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "post_attention_layernorm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


def parts_of(target: CausalLM, eos_token_ids: Sequence[int]) -> TargetParts:
    """Return the parts of a target that recipes read, in its dtype.

    Raises: UnsupportedModelError for a target whose logits are not a plain product of its last hidden states.
    """
    shadow, config = target.shadow, target.config
    output: Any = shadow.get_output_embeddings()
    embedding: Any = shadow.get_input_embeddings()
    if not (_is_plain(output) and isinstance(embedding, nn.Embedding)):
        raise UnsupportedModelError(
            f"{target.name} has an output layer that is not linear, or that has a bias; heads cannot be trained over "
            "it, so use another target"
        )
    scales = [key for key in ("final_logit_softcapping", "logit_scale", "logits_scaling") if getattr(config, key, None)]
    if scales:
        raise UnsupportedModelError(
            f"{target.name} rescales its logits ({scales[0]}), which training does not support; use another target"
        )
    norm = getattr(getattr(shadow.base_model, "norm", None), "weight", None)
    return TargetParts(
        name=target.name,
        embedding=embedding_weight(embedding),
        output=_weight(output),
        norm=None if norm is None else norm.detach(),
        num_layers=target.num_layers,
        layer=LayerShape.of(config),
        eos_token_ids=tuple(eos_token_ids),
        layer_tensors=partial(_tensors_of, list(target.layers)) if _has_llama_layers(target) else None,
        context=target.context_length or 2048,
    )


def _is_plain(layer: Any) -> bool:
    return isinstance(layer, nn.Linear) and getattr(layer, "bias", None) is None


def _tensors_of(layers: Sequence[nn.Module], place: int) -> dict[str, Tensor]:
    """Return the tensors of a decoder layer, unpacked."""
    modules: dict[str, Any] = dict(layers[place].named_modules())
    return {name: _weight(modules[name]) for name in _LAYER}


def _has_llama_layers(target: CausalLM) -> bool:
    """Return whether all decoder layers have the modules of Llama's."""
    for layer in target.layers:
        parts = {name: part for name, part in layer.named_modules() if not list(part.children())}
        weights = {name for name, part in parts.items() if getattr(part, "weight", None) is not None}
        if weights != set(_LAYER) or any(getattr(parts[name], "bias", None) is not None for name in _LAYER):
            return False
    return True


def _weight(layer: Any) -> Tensor:
    """Return the weight of a layer; it may be stored in a packed replacement."""
    packed = replacement(layer)
    weight: Tensor = packed.dense() if isinstance(packed, PackedLinear) else layer.weight
    return weight.detach()


def frequent_tokens(examples: Iterable[Example], size: int, target: TargetParts) -> DraftVocabulary:
    """Return the vocabulary of the tokens that are most frequent in answers, together with the tokens that end an
    output.

    Raises: ConfigError for a size with no room for the latter.
    """
    if size >= target.vocab_size:
        return DraftVocabulary.full(target.vocab_size)
    counts = Counter(token for example in examples for token in example.token_ids[example.prompt_length :])
    return DraftVocabulary.most_frequent(counts, size, target.vocab_size, always=target.eos_token_ids)


def new_recipe(plan: Plan, target: TargetParts, vocabulary: DraftVocabulary) -> Recipe:
    """Return the recipe of a plan, with the drafter's initial weights in float32.

    Args:
      vocabulary: tokens that can be drafted.

    Raises: ConfigError for a method for which the target is too small.
    Randomness: torch's global generator.
    """
    method, size = plan.method, target.hidden_size
    layer = replace(target.layer, intermediate_size=plan.intermediate_size or target.layer.intermediate_size)
    kept = None if vocabulary.is_full else vocabulary
    num_layers = plan.num_layers or NUM_LAYERS.get(method, 1)
    if method == "draft_model":
        model = new_small_model(target, plan.small, num_layers)
        return DraftModelRecipe(model, target, vocabulary, plan.small.total_variation)
    if method in ("medusa", "hydra", "hydra++"):
        prefix = layer if method == "hydra++" else None
        heads = HeadsShape(size, 0, plan.num_heads, num_layers, is_shared=False, prefix=prefix)
        if method == "medusa":
            return MedusaRecipe(MedusaHeads(heads, kept), target)
        hydra = HydraHeads(heads, kept)
        _settle_residuals(hydra, size)
        return HydraRecipe(hydra, target, plan.input_noise)
    generation = 3 if method == "eagle3" else 1
    shape = EagleShape(
        generation=generation,
        layer=layer,
        target_size=size,
        streams=default_streams(target.num_layers) if generation == 3 else (target.num_layers,),
        num_layers_of_target=target.num_layers,
        shares_output=generation == 3,
    )
    head = EagleHead(shape, vocabulary if generation == 3 else None)
    begin_as(head, target)
    if generation == 3:
        return Eagle3Recipe(head, target, plan.num_steps)
    return EagleRecipe(head, target, vocabulary)


@torch.no_grad()
def begin_as(head: EagleHead, target: TargetParts) -> None:
    """Initialise a head with the weights of the target's last layer, if the two have the same modules.

    The part of the fusing layer that reads the last stream is the identity; its other weights are small. A head that
    predicts features (generation 1) gets normed features, and the output of that layer would dominate them. The layer
    therefore adds nothing at first, and the head starts by repeating the last feature.
    """
    size, first = target.hidden_size, head.layers[0]
    head.fc.weight.normal_(0.0, 0.01)
    head.fc.weight[:, -size:] += torch.eye(size)
    own: dict[str, Any] = dict(first.named_modules())
    if head.norm is not None and target.norm is not None:
        head.norm.weight.copy_(target.norm)
    if target.layer_tensors is None:
        return
    last = {name: tensor.float() for name, tensor in target.layer_tensors(-1).items()}
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
        weight = own[name].weight
        weight.normal_(0.0, 0.01)
        weight[:, -size:].copy_(last[name])
    own["self_attn.o_proj"].weight.copy_(last["self_attn.o_proj"])
    own["post_attention_layernorm"].weight.copy_(last["post_attention_layernorm"])
    if "hidden_norm" in own:
        own["hidden_norm"].weight.copy_(last["input_layernorm"])
    width = own["mlp.down_proj"].in_features
    strength = last["mlp.down_proj"].norm(dim=0) * last["mlp.up_proj"].norm(dim=1)
    rows = strength.topk(min(width, len(strength))).indices
    own["mlp.gate_proj"].weight[: len(rows)] = last["mlp.gate_proj"][rows]
    own["mlp.up_proj"].weight[: len(rows)] = last["mlp.up_proj"][rows]
    own["mlp.down_proj"].weight[:, : len(rows)] = last["mlp.down_proj"][:, rows]
    if head.shape.generation == 1:
        own["self_attn.o_proj"].weight.zero_()
        own["mlp.down_proj"].weight.zero_()


@torch.no_grad()
def _settle_residuals(heads: HydraHeads, size: int) -> None:
    """Initialise the linear path of Hydra's heads to return the context vector, which the output layer can read."""
    for first in heads.first:
        weight: Tensor = first.res_connection.weight  # type: ignore[union-attr, assignment]
        weight.normal_(0.0, 0.01)
        weight[:, :size] += torch.eye(size)
