"""The published layout of heads of Hydra and Hydra++."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from foretoken.errors import CheckpointError
from foretoken.heads.checkpoint import Checkpoint, fill, write_checkpoint
from foretoken.heads.layers import LayerShape, Rotary
from foretoken.heads.medusa_hydra import HydraHeads, HydraShape
from foretoken.heads.medusa_layout import blank
from foretoken.heads.recognition import HYDRA_COPIES, HYDRA_MLP, HYDRA_OUTPUT, HYDRA_PREFIX, SHARED_OUTPUT, TOKEN_MAP
from foretoken.heads.vocabulary import DraftVocabulary


def read_hydra(
    checkpoint: Checkpoint, hidden_size: int, vocab_size: int, layer: LayerShape | None = None
) -> tuple[HydraHeads, tuple[str, ...]]:
    """Heads from the published layout, its structure taken from the tensors.

    Args:
      checkpoint: see `read_checkpoint`.
      hidden_size, vocab_size: H and V of the target.
      layer: of the target's decoder layers, whose sizes the prefix layer of the published heads has; keys of the config
        (``num_attention_heads``, ``rope_theta``, ...) go before them.

    Returns: the heads, and where the config says otherwise than the tensors, in sentences.
    Raises: CheckpointError for tensors that are missing, extra, transposed or wrongly shaped, for heads of another
      target, and for the architectures that the published weights do not have (cross-attn, eagle-attn, not grounded).
    """
    config, name = checkpoint.config, checkpoint.name
    tensors = {key: tensor for key, tensor in checkpoint.tensors.items() if not HYDRA_COPIES.fullmatch(key)}
    has_prefix = any(key.startswith(HYDRA_PREFIX) for key in tensors)
    _check_architecture(config, has_prefix, name)
    if not any(HYDRA_MLP.fullmatch(key) for key in tensors):
        found = ", ".join(sorted(tensors)[:4]) or "none"
        raise CheckpointError(f"{name} has no Hydra heads; its tensors are {found}, want hydra_mlp.0.0.linear.weight")
    heads = 1 + max(int(match[1]) for match in map(HYDRA_MLP.fullmatch, tensors) if match)
    steps = sorted({int(match[2]) for match in map(HYDRA_MLP.fullmatch, tensors) if match})
    place = {step: i for i, step in enumerate(steps)}  # dropout has numbers of its own
    token_map = tensors.pop(TOKEN_MAP, None)
    tensors = {_own_name(key, place): tensor for key, tensor in tensors.items()}
    _check_size(tensors, hidden_size, name, config)
    wanted = config.get("hydra_num_layers", len(steps))
    if wanted != len(steps):
        raise CheckpointError(
            f"hydra_num_layers is {wanted!r} in the config of {name}, and its heads store {len(steps)} layers each; "
            "which of them are applied how often cannot be told: correct the config"
        )
    is_shared = _are_equal(tensors, heads, len(steps) - 1)
    prefix = _prefix_shape(tensors, config, layer, name) if has_prefix else None
    offset = config.get("hidden_state_offset", 0)
    if isinstance(offset, bool) or not isinstance(offset, int) or offset < 0:
        raise CheckpointError(f"hidden_state_offset is {offset!r} in the config of {name}; want 0 or more layers")
    vocabulary = None if token_map is None else DraftVocabulary(token_map.to(torch.int64), vocab_size)
    num_rows = vocab_size if vocabulary is None else len(vocabulary)
    if config.get(SHARED_OUTPUT, False) is True:
        num_rows = 0
    shape = HydraShape(hidden_size, num_rows, heads, len(steps), is_shared, prefix, offset)
    module = blank(lambda: HydraHeads(shape, vocabulary), tensors)
    if module.prefix is not None and prefix is not None:
        module.prefix.rotary = Rotary(prefix)  # its angles are no parameters
    if is_shared:
        tensors = {key: tensor for key, tensor in tensors.items() if not re.match(r"later\.\d+\.[1-9]", key)}
    fill(module, tensors, name)
    told = config.get("hydra_num_heads", heads)
    notes = () if told == heads else (f"its config says hydra_num_heads: {told}, and {heads} are stored",)
    return module.eval(), notes


def write_hydra(heads: HydraHeads, folder: str | os.PathLike[str], base_model: str | None = None) -> None:
    """Write heads in their authors' layout, with the copies of shared layers and without that of the embedding.

    Args:
      base_model: name of the target.
    """
    shape, prefix = heads.shape, heads.shape.prefix
    first, step = (0, 1) if prefix is None else (1, 2)  # a dropout stands before every layer of prefix-mlp
    tensors: dict[str, Tensor] = {}
    for head in range(shape.num_heads):
        layers = [heads.first[head], *(heads.later[head] if heads.later else ())]  # type: ignore[misc]
        for i, one in enumerate(layers):
            for key, tensor in one.named_parameters():
                tensors[f"hydra_mlp.{head}.{first + i * step}.{key}"] = tensor
        for key, tensor in heads.lm_heads[head].named_parameters() if heads.lm_heads else ():
            tensors[f"hydra_lm_head.{head}.{'' if prefix is None else '1.'}{key}"] = tensor
    config: dict[str, Any] = {
        "base_model_name_or_path": base_model,
        "grounded_heads": True,
        "hidden_state_offset": shape.offset,
        "hydra_head_arch": "mlp" if prefix is None else "prefix-mlp",
        "hydra_num_heads": shape.num_heads,
        "hydra_num_layers": shape.num_layers,
    }
    if heads.needs_output_layer:
        config[SHARED_OUTPUT] = True
    if heads.vocabulary is not None:
        tensors[TOKEN_MAP] = heads.vocabulary.target_ids
    if heads.prefix is not None and prefix is not None:
        for key, tensor in heads.prefix.named_parameters():
            tensors[HYDRA_PREFIX + re.sub(r"^layer\.", "layers.0.", key)] = tensor
        config |= {
            "num_attention_heads": prefix.num_heads,
            "num_key_value_heads": prefix.num_kv_heads,
            "head_dim": prefix.head_dim,
            "rms_norm_eps": prefix.eps,
            "rope_parameters": dict(prefix.rope),
        }
    write_checkpoint(folder, config, tensors)


def _check_architecture(config: Mapping[str, Any], has_prefix: bool, name: str) -> None:
    """The layout decides; a config that asks for what the tensors cannot be is refused."""
    arch = config.get("hydra_head_arch")
    if config.get("grounded_heads", True) is False:
        raise CheckpointError(f"{name} says grounded_heads: false, heads that do not see drafted tokens; not supported")
    if arch not in (None, "mlp", "prefix-mlp"):
        raise CheckpointError(f"hydra_head_arch of {name} is {arch!r}; known are mlp and prefix-mlp")
    if arch is not None and has_prefix != (arch == "prefix-mlp"):
        has = "has" if has_prefix else "lacks"
        raise CheckpointError(f"hydra_head_arch of {name} is {arch!r}, but the checkpoint {has} {HYDRA_PREFIX[:-1]}")


def _own_name(key: str, place: Mapping[int, int]) -> str:
    """The name of a tensor in `HydraHeads`; unknown ones stay as they are."""
    match = HYDRA_MLP.fullmatch(key)
    if match:
        number = place[int(match[2])]
        rest = f"{match[3]}.{match[4]}"
        return f"first.{match[1]}.{rest}" if number == 0 else f"later.{match[1]}.{number - 1}.{rest}"
    match = HYDRA_OUTPUT.fullmatch(key)
    if match:
        return f"lm_heads.{match[1]}.{match[2]}"
    return re.sub(r"^prefix_embeding_layer\.(layers\.0\.)?", lambda m: "prefix.layer." if m[1] else "prefix.", key)


def _check_size(tensors: Mapping[str, Tensor], hidden_size: int, name: str, config: Mapping[str, Any]) -> None:
    bias = tensors.get("first.0.linear.bias")
    if bias is not None and len(bias) != hidden_size:
        raise CheckpointError(
            f"the heads in {name} read hidden states of {len(bias)} numbers, and the target's have {hidden_size}; they "
            f"were trained for {config.get('base_model_name_or_path') or 'another target'}"
        )


def _are_equal(tensors: Mapping[str, Tensor], heads: int, later: int) -> bool:
    """Whether the later layers of every head hold the same numbers, or are written once."""
    copies = [
        (tensors.get(f"later.{head}.0.linear.{kind}"), tensors.get(f"later.{head}.{layer}.linear.{kind}"))
        for head in range(heads)
        for layer in range(1, later)
        for kind in ("weight", "bias")
    ]
    return all(one is not None and other is not None and torch.equal(one, other) for one, other in copies)


def _prefix_shape(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], layer: LayerShape | None, name: str
) -> LayerShape:
    """Sizes of the prefix layer: from the tensors, and numbers of heads and positions from the config or the target."""
    queries, keys, gate = (
        tensors.get(f"prefix.layer.{key}.weight") for key in ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj")
    )
    if queries is None or keys is None or gate is None:
        raise CheckpointError(f"the prefix layer of {name} lacks q_proj, k_proj or gate_proj; download it again")
    num_heads = config.get("num_attention_heads") or (None if layer is None else layer.num_heads)
    num_kv_heads = config.get("num_key_value_heads") or (None if layer is None else layer.num_kv_heads)
    if num_heads is None or num_kv_heads is None:
        raise CheckpointError(f"the config of {name} lacks num_attention_heads, and the target does not say; add it")
    head_dim = config.get("head_dim") or queries.shape[0] // num_heads
    rope = config.get("rope_parameters")
    if rope is None and "rope_theta" in config:
        rope = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    if rope is None and layer is not None:
        rope = layer.rope
    shape = LayerShape(
        hidden_size=queries.shape[1],
        intermediate_size=gate.shape[0],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        eps=config.get("rms_norm_eps") or (1e-6 if layer is None else layer.eps),
        **({} if rope is None else {"rope": rope}),
    )
    if (num_heads * head_dim, num_kv_heads * head_dim) != (queries.shape[0], keys.shape[0]):
        raise CheckpointError(
            f"the prefix layer of {name} has {queries.shape[0]} rows for queries and {keys.shape[0]} for keys, which "
            f"is not {num_heads} and {num_kv_heads} heads of {head_dim}; correct its config"
        )
    return shape
