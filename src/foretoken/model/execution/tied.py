"""An input embedding that is tied to the output embedding: once that is packed, its rows are read from there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from foretoken.model.execution.forwards import replace_forward, replacement
from foretoken.model.execution.packing import PackedLinear, PackedRows
from foretoken.model.execution.sharing import move_out, shared_storages
from foretoken.native import memory

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def tied_embedding(model: PreTrainedModel) -> Any:
    """The input embedding, where its weight is the output embedding's and no other's, and it gives rows alone."""
    output, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if type(output) is not nn.Linear or not gives_rows(embedding) or output.weight is not embedding.weight:
        return None
    owners = sum(embedding.weight is each for module in model.modules() for each in module.parameters(recurse=False))
    return embedding if owners == 2 else None


def gives_rows(embedding: Any) -> bool:
    """Whether an input embedding looks rows up in its weight, and does nothing else."""
    return type(embedding) is nn.Embedding and embedding.max_norm is None and replacement(embedding) is None


def make_ready(model: PreTrainedModel, layers: Iterable[nn.Module], tied: Any) -> memory.Leaving:
    """Move what stays when the weights of layers go out of the file that it is mapped from.

    Args:
      tied: the embedding that goes with the output embedding; None for one that stays.

    Returns: the weights of these layers that go: those that no other module reads.
    """
    given = set() if tied is None else {tied.weight.data_ptr()}
    shared = shared_storages(model) - given
    weights: list[torch.Tensor] = [layer.weight for layer in layers]  # type: ignore[misc]
    move_out(model, [weight for weight in weights if weight.data_ptr() not in shared])
    shared = shared_storages(model) - given
    return memory.Leaving(weight for weight in weights if weight.data_ptr() not in shared)


def read_rows(model: PreTrainedModel, embedding: nn.Module) -> None:
    """Let an input embedding read the rows of the output embedding, where this has been packed."""
    output = packed_output(model)
    if output is not None:
        replace_forward(embedding, PackedRows(output))


def packed_output(model: PreTrainedModel) -> PackedLinear | None:
    """The packed output embedding, if it has a product of its own."""
    forward = replacement(model.get_output_embeddings())
    return forward if isinstance(forward, PackedLinear) and len(forward.product.layers) == 1 else None
