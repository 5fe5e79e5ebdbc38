"""Published layouts of Medusa's heads: their authors' own, alone or inside of a model, and vLLM's."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

from foretoken.errors import CheckpointError
from foretoken.heads.checkpoint import Checkpoint, fill, write_checkpoint
from foretoken.heads.medusa_hydra import MedusaHeads, MedusaShape
from foretoken.heads.recognition import MEDUSA_BLOCK, MEDUSA_OUTPUT, MEDUSA_PREFIX, MEDUSA_SERVED, TOKEN_MAP
from foretoken.heads.vocabulary import DraftVocabulary

Heads = TypeVar("Heads", bound=nn.Module)


def read_medusa(checkpoint: Checkpoint, hidden_size: int, vocab_size: int) -> tuple[MedusaHeads, tuple[str, ...]]:
    """Heads from a published layout, its structure taken from the tensors.

    Layouts: the authors' (``0.0.linear.weight``, with or without output layers), the same inside of a model that was
    fine-tuned with its heads (``medusa_head.0...``), and vLLM's (``blocks.0.layers.0.weight``).

    Args:
      checkpoint: see `read_checkpoint`.
      hidden_size, vocab_size: H and V of the target.

    Returns: the heads, and where the config says otherwise than the tensors, in sentences.
    Raises: CheckpointError for tensors that are missing, extra, transposed or wrongly shaped, and for heads of another
      target.
    """
    tensors, token_map = _named(checkpoint)
    heads, layers, has_outputs, own_size = _structure(tensors, checkpoint.name)
    if own_size != hidden_size:
        raise CheckpointError(
            f"the heads in {checkpoint.name} read hidden states of {own_size} numbers, and the target's have "
            f"{hidden_size}; they are of {checkpoint.config.get('base_model_name_or_path') or 'another target'}"
        )
    vocabulary = None if token_map is None else DraftVocabulary(token_map.to(torch.int64), vocab_size)
    rows = vocab_size if vocabulary is None else len(vocabulary)
    shape = MedusaShape(
        hidden_size,
        rows if has_outputs else 0,
        heads,
        layers,
        has_bias=any(name.endswith("linear.bias") for name in tensors),
        is_shared=_are_equal(tensors, heads, range(layers)),
    )
    module = blank(lambda: MedusaHeads(shape, vocabulary), tensors)
    kept = {name: tensor for name, tensor in tensors.items() if not (shape.is_shared and _block_number(name) > 0)}
    fill(module, {_own_name(name): tensor for name, tensor in kept.items()}, checkpoint.name)
    return module.eval(), _notes(checkpoint, heads, layers)


def write_medusa(heads: MedusaHeads, folder: str | os.PathLike[str], base_model: str | None = None) -> None:
    """Write heads in their authors' layout, with the number of heads that there are.

    Args:
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
    write_checkpoint(folder, config, tensors)


def blank(make: Callable[[], Heads], tensors: Mapping[str, Tensor]) -> Heads:
    """A module in the dtype of these tensors that is still to be filled: large layers need no random numbers."""
    dtype = next((tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()), torch.float32)
    with torch.device("meta"):
        module = make().to(dtype)
    return module.to_empty(device="cpu")


def _notes(checkpoint: Checkpoint, heads: int, layers: int) -> tuple[str, ...]:
    """What the config says wrongly: that of the published Vicuna heads counts 2 heads, and 5 are stored."""
    stored = {"medusa_num_heads": heads, "num_heads": heads, "medusa_num_layers": layers}
    return tuple(
        f"its config says {key}: {checkpoint.config[key]}, and {count} are stored, which are used"
        for key, count in stored.items()
        if key in checkpoint.config and checkpoint.config[key] != count
    )


def _named(checkpoint: Checkpoint) -> tuple[dict[str, Tensor], Tensor | None]:
    """The tensors of the heads under their authors' names, and vLLM's token map if there is one."""
    tensors = dict(checkpoint.tensors)
    inside = {
        name.removeprefix(MEDUSA_PREFIX): tensor for name, tensor in tensors.items() if name.startswith(MEDUSA_PREFIX)
    }
    if inside:  # the rest is the model that was trained with them
        tensors = inside
    token_map = tensors.pop(TOKEN_MAP, None)
    if any(MEDUSA_SERVED.fullmatch(name) for name in tensors):
        layers = 1 + max(int(match[2]) for match in map(MEDUSA_SERVED.fullmatch, tensors) if match and match[2])
        tensors = {_from_served(name, layers): tensor for name, tensor in tensors.items()}
    if not any(MEDUSA_BLOCK.fullmatch(name) for name in tensors):
        found = ", ".join(sorted(tensors)[:4]) or "none"
        raise CheckpointError(f"{checkpoint.name} has no Medusa heads; its tensors are {found}, want 0.0.linear.weight")
    return tensors, token_map


def _from_served(name: str, layers: int) -> str:
    """vLLM's name of a tensor as the authors', any other as it is."""
    match = MEDUSA_SERVED.fullmatch(name)
    if match is None:
        return name
    return f"{match[4]}.{layers}.weight" if match[4] else f"{match[1]}.{match[2]}.linear.{match[3]}"


def _structure(tensors: Mapping[str, Tensor], name: str) -> tuple[int, int, bool, int]:
    """Heads, layers per head, whether they have output layers, and H."""
    blocks = [match for match in map(MEDUSA_BLOCK.fullmatch, tensors) if match]
    layers = 1 + max(int(match[2]) for match in blocks)
    outputs = [match for match in map(MEDUSA_OUTPUT.fullmatch, tensors) if match]
    heads = 1 + max(int(match[1]) for match in (*blocks, *outputs))
    first = next(tensors[match[0]] for match in blocks if match[3] == "weight")
    if first.ndim != 2:
        raise CheckpointError(f"a block of {name} has shape {tuple(first.shape)}; want (H, H)")
    return heads, layers, bool(outputs), first.shape[1]


def _are_equal(tensors: Mapping[str, Tensor], heads: int, layers: range) -> bool:
    """Whether the blocks of every head hold the same numbers."""
    return all(
        f"{head}.{layer}.linear.{kind}" in tensors
        and f"{head}.0.linear.{kind}" in tensors
        and torch.equal(tensors[f"{head}.{layer}.linear.{kind}"], tensors[f"{head}.0.linear.{kind}"])
        for head in range(heads)
        for layer in layers[1:]
        for kind in ("weight", "bias")
        if f"{head}.{layer}.linear.{kind}" in tensors or kind == "weight"
    )


def _block_number(name: str) -> int:
    """Which block of its head a tensor belongs to; 0 for output layers."""
    match = MEDUSA_BLOCK.fullmatch(name)
    return int(match[2]) if match else 0


def _own_name(name: str) -> str:
    """The name of a tensor in `MedusaHeads`."""
    block = MEDUSA_BLOCK.fullmatch(name)
    if block:
        return f"blocks.{name}"
    output = MEDUSA_OUTPUT.fullmatch(name)
    return f"lm_heads.{output[1]}.weight" if output else name


def _modules(blocks: nn.Module) -> list[nn.Module]:
    assert isinstance(blocks, nn.ModuleList)
    return list(blocks)
