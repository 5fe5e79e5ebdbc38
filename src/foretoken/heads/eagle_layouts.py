"""Published layouts of EAGLE's heads: the authors' own, that of speculators, and what others have made of them.

The structure is read off the tensors. A config says what tensors cannot (heads, angles, norms' flags); where it says
otherwise, the tensors are right, and notes tell of it, or the checkpoint is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from foretoken.errors import CheckpointError
from foretoken.heads.checkpoint import Checkpoint, fill
from foretoken.heads.eagle import EagleHead
from foretoken.heads.eagle_structure import StructureReader, TargetFacts
from foretoken.heads.expectation import KEY as EXPECTED
from foretoken.heads.expectation import Expectation
from foretoken.heads.recognition import SHARED_OUTPUT, eagle_generation, eagle_name

_WITHOUT_USE = re.compile(r"^(verifier_norm|verifier_lm_head|verifier_lm_head_embed)\.|rotary_emb\.")
"""Copies of the target's tensors, and tables of positions."""


def read_eagle(
    checkpoint: Checkpoint, target: TargetFacts, *, generation: int | None = None, rope_theta: float | None = None
) -> tuple[EagleHead, tuple[str, ...]]:
    """The head in a checkpoint.

    Args:
      generation: that is wanted, 1 or 3.
      rope_theta: instead of the config's, which some heads were not trained with.

    Returns: the head, and where the config says otherwise than the tensors, in sentences.
    Raises: CheckpointError, naming what is missing, extra, transposed or wrongly shaped, and what does not fit the
      target.
    """
    name = checkpoint.name
    found = eagle_generation(checkpoint.config, frozenset(checkpoint.tensors))
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
    head.expectation = Expectation.of(checkpoint.config, name)
    return head.eval(), tuple(reader.notes)


def write_eagle(head: EagleHead, target_name: str = "") -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors of a head in the layout of the package speculators (0.9, which reads it).

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
    if head.expectation is not None:
        config[EXPECTED] = head.expectation.stored
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
    if shape.shares_output:
        config[SHARED_OUTPUT] = True
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


def _renamed(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Tensors under our names, without those that are of no use."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in checkpoint.tensors.items():
        short = eagle_name(name)
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


def check_fits(head: EagleHead, target: TargetFacts, generation: int) -> None:
    """Refuse a head in memory that is of another target or generation.

    Raises: CheckpointError.
    """
    shape = head.shape
    if shape.generation != generation:
        raise CheckpointError(f"the head is of generation {shape.generation}, and this method takes {generation}")
    wanted = (target.hidden_size, target.num_layers)
    if (shape.target_size, shape.num_layers_of_target) != wanted:
        raise CheckpointError(
            f"the head is for a target of {shape.num_layers_of_target} layers and hidden size {shape.target_size}, and "
            f"{target.name} has {wanted[1]} and {wanted[0]}"
        )
    if head.vocabulary is not None and head.vocabulary.target_size != target.vocab_size:
        raise CheckpointError(
            f"the head drafts for {head.vocabulary.target_size} tokens, and {target.name} has {target.vocab_size}"
        )
