"""Published layouts of Medusa heads (the authors', alone or inside a model, and vLLM's) and of Hydra heads."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from foredraft.errors import CheckpointError
from foredraft.folders import not_ours
from foredraft.heads.checkpoint import Checkpoint, fill
from foredraft.heads.layers import LayerShape, Rotary
from foredraft.heads.medusa_hydra import HeadsShape, HydraHeads, MedusaHeads
from foredraft.heads.recognition import (
    HYDRA_COPIES,
    HYDRA_MLP,
    HYDRA_OUTPUT,
    HYDRA_PREFIX,
    MEDUSA_BLOCK,
    MEDUSA_OUTPUT,
    MEDUSA_PREFIX,
    MEDUSA_SERVED,
    SHARED_OUTPUT,
    TOKEN_MAP,
)
from foredraft.heads.vocabulary import DraftVocabulary

Heads = TypeVar("Heads", bound=nn.Module)


def read_medusa(checkpoint: Checkpoint, hidden_size: int, vocab_size: int) -> tuple[MedusaHeads, tuple[str, ...]]:
    """Return Medusa heads from a published layout, with the structure read from the tensors.

    Layouts: the authors' (``0.0.linear.weight``, with or without output layers), the same inside a model that was
    fine-tuned with its heads (``medusa_head.0...``), and vLLM's (``blocks.0.layers.0.weight``).

    Args:
      checkpoint: see `read_checkpoint`.
      hidden_size, vocab_size: H and V of the target.

    Returns: the heads, and sentences about values in the config that contradict the tensors.
    Raises: CheckpointError for tensors that are missing, extra, transposed or wrongly shaped, and for heads for
    another target.
    """
    tensors, token_map = _named(checkpoint)
    heads, layers, has_outputs, own_size = _structure(tensors, checkpoint.name)
    _check_size(own_size, hidden_size, checkpoint)
    vocabulary, num_rows = _vocabulary(token_map, vocab_size)
    tensors = {_own_medusa_name(name): tensor for name, tensor in tensors.items()}
    has_bias = any(name.endswith("linear.bias") for name in tensors)
    is_shared = _are_copies(tensors, "blocks", heads, layers)
    shape = HeadsShape(hidden_size, num_rows if has_outputs else 0, heads, layers, is_shared, has_bias)
    module = _filled(lambda: MedusaHeads(shape, vocabulary), tensors, "blocks" if is_shared else "", checkpoint.name)
    return module, _notes(checkpoint, {"medusa_num_heads": heads, "num_heads": heads, "medusa_num_layers": layers})


def write_medusa(heads: MedusaHeads, base_model: str | None = None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config and tensors of heads in the authors' layout, with the actual number of heads.

    Args:
      heads: heads to write.
      base_model: name of the target.
    """
    shape = heads.shape
    tensors: dict[str, Tensor] = {}
    for head, blocks in enumerate(heads.blocks):
        for layer, block in enumerate(_modules(blocks)):
            for kind, tensor in block.named_parameters():
                tensors[f"{head}.{layer}.{kind}"] = tensor
    for head, output in enumerate(heads.lm_heads):
        tensors[f"{head}.{shape.num_layers}.weight"] = output.weight  # type: ignore[assignment]
    if heads.vocabulary is not None:
        tensors[TOKEN_MAP] = heads.vocabulary.target_ids
    config = {
        "medusa_num_heads": shape.num_heads,
        "medusa_num_layers": shape.num_layers,
        "base_model_name_or_path": base_model,
        "hidden_size": shape.hidden_size,
        **({} if shape.vocab_size else {"version": "2"}),
    }
    return config, tensors


def read_hydra(
    checkpoint: Checkpoint, hidden_size: int, vocab_size: int, layer: LayerShape | None = None
) -> tuple[HydraHeads, tuple[str, ...]]:
    """Return Hydra heads from the published layout, with the structure read from the tensors.

    Args:
      checkpoint: see `read_checkpoint`.
      hidden_size, vocab_size: H and V of the target.
      layer: shape of the target's decoder layers, which the published prefix layers have, too. Keys of the config
        (``num_attention_heads``, ``rope_theta``, ...) take precedence.

    Returns: the heads, and sentences about values in the config that contradict the tensors.
    Raises: CheckpointError for tensors that are missing, extra, transposed or wrongly shaped, for heads for another
    target, and for architectures without published weights (cross-attn, eagle-attn, not grounded).
    """
    config, name = checkpoint.config, checkpoint.name
    tensors = {key: tensor for key, tensor in checkpoint.tensors.items() if not HYDRA_COPIES.fullmatch(key)}
    has_prefix = any(key.startswith(HYDRA_PREFIX) for key in tensors)
    _check_architecture(config, has_prefix, name)
    if not any(HYDRA_MLP.fullmatch(key) for key in tensors):
        found = ", ".join(sorted(tensors)[:4]) or "none"
        raise CheckpointError(
            f"{name} has no Hydra heads; its tensors are {found}, and hydra_mlp.0.0.linear.weight is expected"
        )
    heads = 1 + max(int(match[1]) for match in map(HYDRA_MLP.fullmatch, tensors) if match)
    steps = sorted({int(match[2]) for match in map(HYDRA_MLP.fullmatch, tensors) if match})
    place = {step: i for i, step in enumerate(steps)}  # dropout layers are numbered, too
    token_map = tensors.pop(TOKEN_MAP, None)
    tensors = {_own_hydra_name(key, place): tensor for key, tensor in tensors.items()}
    bias = tensors.get("first.0.linear.bias")
    _check_size(hidden_size if bias is None else len(bias), hidden_size, checkpoint)
    wanted = config.get("hydra_num_layers", len(steps))
    if wanted != len(steps):
        raise CheckpointError(
            f"hydra_num_layers is {wanted!r} in the config of {name}, and each head has {len(steps)} layers, so it is "
            "unclear how often each layer is applied; correct the config"
        )
    is_shared = _are_copies(tensors, "later", heads, len(steps) - 1)
    prefix = _prefix_shape(tensors, config, layer, name) if has_prefix else None
    offset = config.get("hidden_state_offset", 0)
    if isinstance(offset, bool) or not isinstance(offset, int) or offset < 0:
        raise CheckpointError(
            f"hidden_state_offset is {offset!r} in the config of {name}; it must be a whole number of layers, 0 or more"
        )
    vocabulary, num_rows = _vocabulary(token_map, vocab_size)
    if config.get(SHARED_OUTPUT, False) is True:
        num_rows = 0
    elif not any(map(HYDRA_OUTPUT.fullmatch, checkpoint.tensors)):
        raise CheckpointError(f"{name} has no output layers. {not_ours('It', 'head', 'foredraft train')}")
    shape = HeadsShape(hidden_size, num_rows, heads, len(steps), is_shared, prefix=prefix, offset=offset)
    module = _filled(lambda: HydraHeads(shape, vocabulary), tensors, "later" if is_shared else "", name)
    if module.prefix is not None and prefix is not None:
        module.prefix.rotary = Rotary(prefix)  # the angles are not parameters, so they are not filled
    return module, _notes(checkpoint, {"hydra_num_heads": heads})


def write_hydra(heads: HydraHeads, base_model: str | None = None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config and tensors of heads in the authors' layout: shared layers as copies, without the embedding.

    Args:
      heads: heads to write.
      base_model: name of the target.
    """
    shape, prefix = heads.shape, heads.shape.prefix
    first, step = (0, 1) if prefix is None else (1, 2)  # prefix-mlp has a dropout before every layer
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
    return config, tensors


# -- Medusa and Hydra ------------------------------------------------------------------------------------------------


def _check_size(own: int, hidden_size: int, checkpoint: Checkpoint) -> None:
    if own != hidden_size:
        raise CheckpointError(
            f"the heads in {checkpoint.name} read hidden states of size {own}, and the target's have size "
            f"{hidden_size}; the heads are for {checkpoint.config.get('base_model_name_or_path') or 'another target'}"
        )


def _vocabulary(token_map: Tensor | None, vocab_size: int) -> tuple[DraftVocabulary | None, int]:
    """Return the tokens of the output layers' rows, and the number of rows."""
    if token_map is None:
        return None, vocab_size
    return DraftVocabulary(token_map.to(torch.int64), vocab_size), len(token_map)


def _are_copies(tensors: Mapping[str, Tensor], kind: str, heads: int, layers: int) -> bool:
    """Return whether the layers of every head have equal values."""
    pairs = [
        (f"{kind}.{head}.0.linear.{what}", f"{kind}.{head}.{layer}.linear.{what}")
        for head in range(heads)
        for layer in range(1, layers)
        for what in ("weight", "bias")
    ]
    return all(
        one in tensors and other in tensors and torch.equal(tensors[one], tensors[other])
        for one, other in pairs
        if other in tensors or other.endswith("weight")
    )


def _filled(make: Callable[[], Heads], tensors: Mapping[str, Tensor], copies: str, name: str) -> Heads:
    """Return a module with these tensors, in their dtype.

    Args:
      make: function that makes the module.
      tensors: tensors by parameter name.
      copies: name of the group of layers in which every layer is a copy of the first; "" if there is none.
      name: name of the checkpoint, for messages.
    """
    dtype = next((tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()), torch.float32)
    with torch.device("meta"):  # skip slow random initialisation
        module = make().to(dtype)
    module = module.to_empty(device="cpu")
    kept = {key: tensor for key, tensor in tensors.items() if not copies or not re.match(rf"{copies}\.\d+\.[1-9]", key)}
    fill(module, kept, name)
    return module.eval()


def _notes(checkpoint: Checkpoint, stored: Mapping[str, int]) -> tuple[str, ...]:
    """Return sentences about wrong values in the config, such as the 2 heads in the published Vicuna config that
    stores 5.
    """
    return tuple(
        f"the config says {key}={checkpoint.config[key]}, but the checkpoint has {count}, which are used"
        for key, count in stored.items()
        if key in checkpoint.config and checkpoint.config[key] != count
    )


# -- Medusa ----------------------------------------------------------------------------------------------------------


def _named(checkpoint: Checkpoint) -> tuple[dict[str, Tensor], Tensor | None]:
    """Return the tensors of the heads under the authors' names, and vLLM's token map if there is one."""
    tensors = dict(checkpoint.tensors)
    inside = {
        name.removeprefix(MEDUSA_PREFIX): tensor for name, tensor in tensors.items() if name.startswith(MEDUSA_PREFIX)
    }
    if inside:  # all other tensors belong to the model that was trained with the heads
        tensors = inside
    token_map = tensors.pop(TOKEN_MAP, None)
    if any(MEDUSA_SERVED.fullmatch(name) for name in tensors):
        served = [match for match in map(MEDUSA_SERVED.fullmatch, tensors) if match]
        layers = 1 + max((int(match[2]) for match in served if match[2]), default=0)
        tensors = {_from_served(name, layers): tensor for name, tensor in tensors.items()}
    if not any(MEDUSA_BLOCK.fullmatch(name) for name in tensors):
        found = ", ".join(sorted(tensors)[:4]) or "none"
        raise CheckpointError(
            f"{checkpoint.name} has no Medusa heads; its tensors are {found}, and 0.0.linear.weight is expected"
        )
    return tensors, token_map


def _from_served(name: str, layers: int) -> str:
    """Return the authors' name for a tensor in vLLM's layout; other names do not change."""
    match = MEDUSA_SERVED.fullmatch(name)
    if match is None:
        return name
    return f"{match[4]}.{layers}.weight" if match[4] else f"{match[1]}.{match[2]}.linear.{match[3]}"


def _structure(tensors: Mapping[str, Tensor], name: str) -> tuple[int, int, bool, int]:
    """Return the number of heads, the number of layers per head, whether they have output layers, and H."""
    blocks = [match for match in map(MEDUSA_BLOCK.fullmatch, tensors) if match]
    layers = 1 + max(int(match[2]) for match in blocks)
    outputs = [match for match in map(MEDUSA_OUTPUT.fullmatch, tensors) if match]
    heads = 1 + max(int(match[1]) for match in (*blocks, *outputs))
    first = next(tensors[match[0]] for match in blocks if match[3] == "weight")
    if first.ndim != 2:
        raise CheckpointError(f"a block of {name} has shape {tuple(first.shape)}; it must be (H, H)")
    return heads, layers, bool(outputs), first.shape[1]


def _own_medusa_name(name: str) -> str:
    """Return the name of a tensor in `MedusaHeads`."""
    block = MEDUSA_BLOCK.fullmatch(name)
    if block:
        return f"blocks.{name}"
    output = MEDUSA_OUTPUT.fullmatch(name)
    return f"lm_heads.{output[1]}.weight" if output else name


def _modules(blocks: nn.Module) -> list[nn.Module]:
    assert isinstance(blocks, nn.ModuleList)
    return list(blocks)


# -- Hydra -----------------------------------------------------------------------------------------------------------


def _check_architecture(config: Mapping[str, Any], has_prefix: bool, name: str) -> None:
    """Check that the config agrees with the architecture that the tensors show.

    Raises: CheckpointError if it does not, or names an unsupported architecture.
    """
    arch = config.get("hydra_head_arch")
    if config.get("grounded_heads", True) is False:
        raise CheckpointError(
            f"{name} has grounded_heads: false, and heads that do not read drafted tokens are not supported"
        )
    if arch not in (None, "mlp", "prefix-mlp"):
        raise CheckpointError(f"hydra_head_arch of {name} is {arch!r}; mlp and prefix-mlp are supported")
    if arch is not None and has_prefix != (arch == "prefix-mlp"):
        has = "has" if has_prefix else "lacks"
        raise CheckpointError(f"hydra_head_arch of {name} is {arch!r}, but the checkpoint {has} {HYDRA_PREFIX[:-1]}")


def _own_hydra_name(key: str, place: Mapping[int, int]) -> str:
    """Return the name of a tensor in `HydraHeads`; unknown names do not change."""
    match = HYDRA_MLP.fullmatch(key)
    if match:
        number = place[int(match[2])]
        rest = f"{match[3]}.{match[4]}"
        return f"first.{match[1]}.{rest}" if number == 0 else f"later.{match[1]}.{number - 1}.{rest}"
    match = HYDRA_OUTPUT.fullmatch(key)
    if match:
        return f"lm_heads.{match[1]}.{match[2]}"
    return re.sub(r"^prefix_embeding_layer\.(layers\.0\.)?", lambda m: "prefix.layer." if m[1] else "prefix.", key)


def _prefix_shape(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], layer: LayerShape | None, name: str
) -> LayerShape:
    """Return the prefix layer's shape: sizes from the tensors, head counts and positions from the config or the
    target.
    """
    queries, keys, gate = (
        tensors.get(f"prefix.layer.{key}.weight") for key in ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj")
    )
    if queries is None or keys is None or gate is None:
        raise CheckpointError(f"the prefix layer of {name} lacks q_proj, k_proj or gate_proj; download it again")
    if any(matrix.dim() != 2 for matrix in (queries, keys, gate)):
        raise CheckpointError(
            f"q_proj, k_proj or gate_proj of the prefix layer of {name} is not a matrix; download it again"
        )
    num_heads = config.get("num_attention_heads") or (None if layer is None else layer.num_heads)
    num_kv_heads = config.get("num_key_value_heads") or (None if layer is None else layer.num_kv_heads)
    if num_heads is None or num_kv_heads is None:
        raise CheckpointError(
            f"num_attention_heads is missing from the configs of {name} and of the target; add it to the head's config"
        )
    head_dim = config.get("head_dim") or queries.shape[0] // num_heads
    rope: Any = config.get("rope_parameters")
    if rope is None and "rope_theta" in config:
        rope = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    if rope is None and layer is not None:
        rope = layer.rope
    if rope is not None and not isinstance(rope, Mapping):
        raise CheckpointError(
            f"rope_parameters is {rope!r} in the config of {name}; it must be an object with rope_theta"
        )
    told: dict[str, Any] = {} if rope is None else {"rope": rope}
    shape = LayerShape(
        hidden_size=queries.shape[1],
        intermediate_size=gate.shape[0],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        eps=config.get("rms_norm_eps") or (1e-6 if layer is None else layer.eps),
        **told,
    )
    if (num_heads * head_dim, num_kv_heads * head_dim) != (queries.shape[0], keys.shape[0]):
        raise CheckpointError(
            f"the prefix layer of {name} has {queries.shape[0]} rows for queries and {keys.shape[0]} for keys, which "
            f"does not match {num_heads} and {num_kv_heads} heads of size {head_dim}; correct its config"
        )
    return shape
