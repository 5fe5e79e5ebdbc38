"""Attention over grouped keys and values without copying them.

If a forward pass has a mask and more than one token, `transformers`' function for "sdpa" repeats keys and values for
every query head of a group. That copies the whole cache for every layer and step. Here the query heads of a group
become extra queries of one head, which gives the same sum over the same columns.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import ContextVar
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from foredraft.model.nodes import FlatNodes, RowGroup, folded

GROUPED_SDPA = "foredraft_sdpa"

Seen: TypeAlias = Callable[..., torch.Tensor | None]
SEEN_BY: ContextVar[Seen | None] = ContextVar("seen_by", default=None)
"""Function that receives the arguments of attention, set by `seen_by`."""


def seen_by(function: Seen) -> ExitStack:
    """Return a context in which a function is called before `grouped_sdpa`; if it returns a tensor, that is the result.

    Args:
      function: function of module, query, key, value and mask, and of the other arguments by name.
    """
    stack = ExitStack()  # a generator suspended by Ctrl-C would end a later block when it is collected
    stack.callback(SEEN_BY.reset, SEEN_BY.set(function))
    return stack


class NotPassedOnError(Exception):
    """Raised if a model does not pass keyword arguments of its forward on to its attention."""


def grouped_sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    flat_nodes: FlatNodes | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention function for `transformers`' `AttentionInterface`.

    Anything but plain masked attention (dropout, causal shorthand, position bias, soft cap, sinks, separate masks per
    head) goes to `transformers`' own function.

    Args:
      query: (B, H_q, N, D).
      key: (B, H_kv, T, D), may be a view of a larger buffer; H_kv divides H_q.
      value: (B, H_kv, T, D_v).
      attention_mask: bool or additive, (B or 1, 1, N, T), or None when every query sees every column.
      scaling: factor of the scores; 1/sqrt(D) by default.
      flat_nodes: layout of a flat list; query and result are then (1, H_q, S, D), the real nodes of all rows. The mask
        is a placeholder, and each group of rows has its real mask. None if the nodes are a rectangle.

    Returns: (B, N, H_q, D_v), contiguous, and None.
    Raises: NotPassedOnError if ``flat_nodes`` does not match the mask, or the mask was changed.
    Exactness: equals `sdpa_attention_forward` within the rounding of the dtype.
    """
    options = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **kwargs}
    see = SEEN_BY.get()
    if see is not None and (seen := see(module, query, key, value, attention_mask, **options)) is not None:
        return seen, None
    flat, kind = getattr(attention_mask, "stands_for", (None, ""))
    if flat_nodes is not None and flat is not flat_nodes:
        raise NotPassedOnError
    if flat is not None:
        parts = []
        for group in flat.groups:
            is_all = len(group.nodes) == query.shape[2]
            nodes = query if is_all else query[:, :, group.nodes.start : group.nodes.stop]
            part = _attend_by_own(nodes, key, value, group, kind, options)
            if part is None:
                flat.runs_stock_attention = True
                part = _attend_group(module, nodes, key, value, group, kind, options)
            parts.append(part)
        return (parts[0] if len(parts) == 1 else torch.cat(parts))[None], None
    if len(query) != len(key) or (attention_mask is not None and attention_mask.shape[-1] != key.shape[2]):
        raise NotPassedOnError
    return _attend(module, query, key, value, attention_mask, options)


def _attend_by_own(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    group: RowGroup,
    kind: str,
    options: dict[str, Any],
) -> torch.Tensor | None:
    """Run attention of some rows in the library's own kernels: (nodes, H_q, D_v), or None if they do not support it.

    Args:
      query: list (1, H_q, S, D) of the nodes of these rows; keys and values are those of all rows.
    """
    if group.decode is None or not is_plain(options) or query.shape[1] % key.shape[1]:
        return None
    first = group.rows.start
    keys, values = (key[first:], value[first:]) if first else (key, value)
    if group.prefill is not None:
        return group.prefill(query, keys, values, kind, options["scaling"])
    return group.decode(query, keys, values, group.masks[kind], options["scaling"])


def _attend_group(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    group: RowGroup,
    kind: str,
    options: dict[str, Any],
) -> torch.Tensor:
    """Run attention of some rows in stock kernels: from the list (1, H_q, S, D) of their nodes to (nodes, H_q, D_v)."""
    if len(group.rows) > 1 or not group.flat.is_full:
        query = group.flat.spread(query[0].transpose(0, 1)).transpose(1, 2)  # (R, H_q, N, D)
    if len(group.rows) < len(key) or group.columns < key.shape[2]:
        rows = slice(group.rows.start, group.rows.stop)
        key, value = key[rows, :, : group.columns], value[rows, :, : group.columns]
    num_heads, group_size = query.shape[1], query.shape[1] // key.shape[1]
    if not is_plain(options) or num_heads % key.shape[1]:
        output, _ = _attend(module, query, key, value, group.masks[kind], options)
        return group.flat.listed(output)
    parts = []
    for block in group.blocks:
        first, last, columns = block
        part, keys, values = query, key, value
        if last - first < query.shape[2]:
            part, keys, values = query[:, :, first:last], key[:, :, :columns], value[:, :, :columns]
        parts.append(_grouped(part, keys, values, group.folded(kind, group_size, block), options["scaling"]))
    output = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    return group.flat.listed(output)


def is_plain(options: dict[str, Any]) -> bool:
    """Return whether these arguments select masked attention and nothing else."""
    special = (options.get(name) for name in SPECIAL_ARGUMENTS)
    return options["dropout"] == 0.0 and all(value is None or value is False for value in special)


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    options: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run `grouped_sdpa` over a rectangle of rows."""
    num_heads, num_queries, num_kv_heads = query.shape[1], query.shape[2], key.shape[1]
    sees_all = attention_mask is None and (num_queries == 1 or options["is_causal"] is False)
    has_shared_mask = attention_mask is not None and attention_mask.shape[1] == 1
    if not is_plain(options) or not (sees_all or has_shared_mask) or num_heads % num_kv_heads:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)  # type: ignore[no-any-return]
    if attention_mask is None and key.device.type != "cpu":
        # without a mask, an accelerator's kernels group heads themselves and return the required layout
        is_grouped = num_heads > num_kv_heads
        output = F.scaled_dot_product_attention(query, key, value, scale=options["scaling"], enable_gqa=is_grouped)
        return output.transpose(1, 2).contiguous(), None
    mask = None if attention_mask is None else _folded_once(attention_mask, num_heads // num_kv_heads)
    return _grouped(query, key, value, mask, options["scaling"]), None


def _folded_once(mask: torch.Tensor, group_size: int) -> torch.Tensor:
    """Return the mask as `folded`, cached on the mask for the other layers of the forward pass.

    Off the CPU it is contiguous: CUDA kernels read masks in vectors, and a part of a wider band may be unaligned.
    """
    kept: dict[int, torch.Tensor] | None = getattr(mask, "folded_by", None)
    if kept is None:
        kept = mask.folded_by = {}  # type: ignore[attr-defined]
    if group_size not in kept:
        found = folded(mask, group_size)
        kept[group_size] = found if found.device.type == "cpu" else found.contiguous()
    return kept[group_size]


def _grouped(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scaling: float | None
) -> torch.Tensor:
    """Return attention (B, N, H_q, D_v) under a `folded` mask, without copying keys and values."""
    num_rows, num_heads, num_queries, size = query.shape
    if num_heads > key.shape[1]:
        # heads 0..g-1 share key head 0: (B, H_kv * g, N, D) -> (B, H_kv, g * N, D)
        query = query.reshape(num_rows, key.shape[1], -1, size)
    output = F.scaled_dot_product_attention(query, key, value, mask, scale=scaling)
    # one copy for any layout: CUDA kernels return their result with nodes and heads swapped in memory
    apart = output.view(num_rows, key.shape[1], -1, num_queries, output.shape[3])  # (B, H_kv, g, N, D_v)
    return apart.permute(0, 3, 1, 2, 4).reshape(num_rows, num_queries, num_heads, output.shape[3]).contiguous()


PLAIN_ARGUMENTS = ("dropout", "scaling", "is_causal")
SPECIAL_ARGUMENTS = ("position_bias", "softcap", "s_aux", "sinks", "cache", "output_attentions")


def use_grouped_sdpa(model: PreTrainedModel) -> bool:
    """Select `grouped_sdpa` in the private config of a shadow; return whether the model supports it.

    Only models that run "sdpa" through `transformers`' interface and do not branch on that name support it.
    """
    if model.config._attn_implementation != "sdpa" or not _dispatches_by_interface(model):
        return False
    AttentionInterface.register(GROUPED_SDPA, grouped_sdpa)
    AttentionMaskInterface.register(GROUPED_SDPA, sdpa_mask)
    model.config._attn_implementation = GROUPED_SDPA
    return True


def _dispatches_by_interface(model: PreTrainedModel) -> bool:
    """Return whether the modelling files get attention from the interface and never compare with "sdpa"."""
    names = {type(module).__module__ for module in model.modules()}
    files = [sys.modules[name] for name in sorted(names) if not name.startswith("torch.")]
    try:
        sources = [inspect.getsource(file) for file in files]
    except (OSError, TypeError):
        return False
    asks = any("ALL_ATTENTION_FUNCTIONS" in source for source in sources)
    return asks and not any('"sdpa"' in source or "'sdpa'" in source for source in sources)
