"""Published layouts of EAGLE's heads: the authors' own, that of speculators, and what others have made of them.

The structure is read off the tensors. A config says what tensors cannot (heads, angles, norms' flags); where it says
otherwise, the tensors are right, and `EagleLayout.notes` tell of it, or the checkpoint is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from foretoken.errors import CheckpointError
from foretoken.heads.checkpoint import Checkpoint, fill
from foretoken.heads.eagle import EagleHead
from foretoken.heads.eagle_structure import FIRST, StructureReader, TargetFacts

_RENAMED = (
    (re.compile(r"^model\."), ""),
    (re.compile(r"^midlayer\."), "layers.0."),
    (re.compile(r"^transformer\."), "layers.0."),
    (re.compile(r"^fusion_fc\."), "fc."),
    (re.compile(r"^(embedding_layernorm|embed_layernorm)\."), "embed_norm."),
    (re.compile(r"^(pre_lm_head_layernorm|lm_head_layernorm)\."), "norm."),
    (re.compile(r"^(post_embedding_layernorm|hidden_layernorm)\."), "layers.0.input_layernorm."),
)
"""Names of other layouts -> ours, applied one after the other."""

_WITHOUT_USE = re.compile(r"^(verifier_norm|verifier_lm_head|verifier_lm_head_embed)\.|rotary_emb\.")
"""Copies of the target's tensors, and tables of positions."""


@dataclass(frozen=True)
class EagleLayout:
    """A head as it was read.

    Args:
      head: filled.
      notes: where the config says otherwise than the tensors, in sentences.
    """

    head: EagleHead
    notes: tuple[str, ...] = field(default=())


def is_eagle(config: Mapping[str, Any], names: frozenset[str]) -> int | None:
    """The generation of the head with these tensors: 1 or 3, None where it is none of EAGLE's.

    Args:
      names: of its tensors; without any, the config alone decides.
    """
    if names:
        short = {_short(name) for name in names}
        if "fc.weight" not in short or not any(name.startswith(FIRST) for name in short):
            return None
        return 3 if f"{FIRST}hidden_norm.weight" in short else 1
    kind = str(config.get("speculators_model_type", "")).lower()
    titles = " ".join(map(str, config.get("architectures") or ())).lower()
    if kind == "eagle3" or "eagle3" in titles:
        return 3
    return 1 if kind == "eagle" or "eagle" in titles else None


def read_eagle(
    checkpoint: Checkpoint, target: TargetFacts, *, generation: int | None = None, rope_theta: float | None = None
) -> EagleLayout:
    """The head in a checkpoint.

    Args:
      generation: that is wanted, 1 or 3.
      rope_theta: instead of the config's, which some heads were not trained with.

    Raises: CheckpointError, naming what is missing, extra, transposed or wrongly shaped, and what does not fit the
      target.
    """
    name = checkpoint.name
    found = is_eagle(checkpoint.config, frozenset(checkpoint.tensors))
    if found is None:
        raise CheckpointError(f"{name} holds no head of EAGLE: it has no fc.weight and no decoder layer beside it")
    if generation is not None and found != generation:
        use = "'eagle3'" if found == 3 else "'eagle' or 'eagle2'"
        raise CheckpointError(f"{name} holds a head of EAGLE{'-3' if found == 3 else ' (1 or 2)'}; use method {use}")
    tensors = _renamed(checkpoint)
    reader = StructureReader(name, _merged(checkpoint.config), tensors, target)
    vocabulary = reader.vocabulary(found)
    shape = reader.shape(found, rope_theta)
    head = EagleHead(shape, vocabulary)
    fill(head, tensors, name)
    return EagleLayout(head.eval(), tuple(reader.notes))


def write_eagle(head: EagleHead, target_name: str = "") -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors of a head in the layout of the package speculators (read and written: 0.6).

    The input embedding is left out where it is the target's.
    """
    shape, layer = head.shape, head.shape.layer
    is_fused = shape.generation == 3
    size = head.vocabulary.target_size if head.vocabulary is not None else 0
    llama: dict[str, Any] = {
        "model_type": "qwen3" if layer.has_head_norms else "llama",
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.num_kv_heads,
        "head_dim": layer.head_dim,
        "hidden_act": layer.activation,
        "rms_norm_eps": layer.eps,
        "rope_parameters": dict(layer.rope),
        "attention_bias": layer.has_bias,
    }
    if size:
        llama["vocab_size"] = size
    algorithm = "eagle3" if is_fused else "eagle"
    config: dict[str, Any] = {
        "architectures": ["Eagle3Speculator"] if is_fused else ["EagleSpeculator"],
        "speculators_model_type": algorithm,
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "verifier": {"name_or_path": target_name or None, "architectures": []},
        },
        "transformer_layer_config": llama,
    }
    tensors = {name: tensor.detach() for name, tensor in head.named_parameters()}
    if not is_fused:
        config |= {
            "transformer_layer_architecture": "LlamaDecoderLayer",
            "layernorms": shape.embed_norm or shape.input_norm or shape.output_norm,
            "fusion_bias": shape.has_fc_bias,
        }
        return config, {_speculators_name(name): tensor for name, tensor in tensors.items()}
    config |= {
        "draft_vocab_size": len(head.vocabulary) if head.vocabulary is not None else None,
        "norm_before_residual": shape.norm_before_residual,
        "norm_before_fc": shape.norm_before_fc,
        "fc_norm": shape.fc_norm,
        "norm_output": shape.norm_output,
        "target_hidden_size": shape.target_size if shape.target_size != layer.hidden_size else None,
        "eagle_aux_hidden_state_layer_ids": list(shape.streams),
        "embed_requires_grad": False,
    }
    if head.vocabulary is not None and not head.vocabulary.is_full:
        tensors |= {"d2t": head.vocabulary.d2t, "t2d": head.vocabulary.t2d}
    return config, tensors


def _speculators_name(name: str) -> str:
    """Names of EAGLE-1's tensors as speculators has them."""
    for ours, theirs in (
        ("layers.0.", "transformer."),
        ("fc.", "fusion_fc."),
        ("embed_norm.", "embedding_layernorm."),
        ("norm.", "pre_lm_head_layernorm."),
    ):
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name


# -- names -----------------------------------------------------------------------------------------------------------


def _short(name: str) -> str:
    for pattern, replacement in _RENAMED:
        name = pattern.sub(replacement, name)
    return name


def _renamed(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Tensors under our names, without those that are of no use."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in checkpoint.tensors.items():
        short = _short(name)
        if _WITHOUT_USE.search(short):
            continue
        if short in tensors:
            raise CheckpointError(f"{checkpoint.name} has two tensors for {short}; one of them is {name}")
        tensors[short] = tensor
    return tensors


def _merged(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config with that of the decoder layer, which speculators nests, on one level."""
    nested = config.get("transformer_layer_config")
    return {**(nested if isinstance(nested, Mapping) else {}), **config}
