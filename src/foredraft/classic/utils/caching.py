"""Functions that remove the last tokens from a `transformers` cache."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer, EncoderDecoderCache

from foredraft.errors import ShapeError, UnsupportedStateError

__all__ = ["prune_cache", "prune_dynamic_cache", "prune_tuple_cache"]

LayerCache = tuple[Tensor, ...] | None
TupleCache = tuple[LayerCache, ...]
AnyCache = TypeVar("AnyCache", TupleCache, Cache, None)


def prune_cache(cache: AnyCache, num_tokens_to_discard: int) -> AnyCache:
    """Remove the last tokens of a cache. The classic functions do not need it; it is for loops of the user.

    Args:
      cache: None, a tuple of layers (keys and values, each (batch, heads, T, head_dim)), or a `DynamicCache`.
      num_tokens_to_discard: number of tokens to remove, from 0 to all.

    Returns: None for None; a new tuple of views; the same `DynamicCache`, changed in place.
    Raises: ShapeError for a negative number, or more tokens than the cache contains; UnsupportedStateError for a cache
      that cannot be rolled back exactly. After an error the cache is unchanged.
    Exactness: the cache equals one that never contained the tokens. Randomness: none.
    """
    if cache is None:
        return None
    if isinstance(cache, tuple):
        return prune_tuple_cache(cache, num_tokens_to_discard)
    if isinstance(cache, EncoderDecoderCache):
        prune_dynamic_cache(cache.self_attention_cache, num_tokens_to_discard)
        return cache
    return prune_dynamic_cache(cache, num_tokens_to_discard)


def prune_tuple_cache(cache: TupleCache, num_tokens_to_discard: int) -> TupleCache:
    """Remove tokens from a tuple cache. Of four tensors per layer, two of another length are an encoder's and stay."""
    for layer in cache:
        if layer is not None:
            _check(num_tokens_to_discard, layer[0].shape[2])
    return tuple(_pruned_layer(layer, num_tokens_to_discard) for layer in cache)


def _pruned_layer(layer: LayerCache, discard: int) -> LayerCache:
    if layer is None:
        return None
    length = layer[0].shape[2]
    return tuple(tensor[:, :, : length - discard] if tensor.shape[2] == length else tensor for tensor in layer)


def prune_dynamic_cache(cache: Any, num_tokens_to_discard: int) -> Any:
    """Remove tokens from a `DynamicCache`, in place."""
    if not isinstance(cache, DynamicCache):
        raise UnsupportedStateError(
            f"a {type(cache).__name__} cannot be pruned; use a tuple of layers or a DynamicCache"
        )
    layers = [layer for layer in cache.layers if layer.is_initialized]
    for index, layer in enumerate(layers):
        _check_layer(layer, index)
        _check(num_tokens_to_discard, layer.get_seq_length())
    if not layers:
        _check(num_tokens_to_discard, 0)
    if num_tokens_to_discard:
        for layer in layers:
            layer.crop(-num_tokens_to_discard)
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.cumulative_length = layer.keys.shape[-2]
    return cache


def _check_layer(layer: Any, index: int) -> None:
    is_full_window = isinstance(layer, DynamicSlidingWindowLayer) and layer.get_seq_length() >= layer.sliding_window
    if is_full_window or not isinstance(layer, DynamicLayer):
        state = "a sliding window that has dropped tokens" if is_full_window else f"a {type(layer).__name__} state"
        raise UnsupportedStateError(f"layer {index} has {state}, which cannot be rolled back exactly")


def _check(discard: int, length: int) -> None:
    if not 0 <= discard <= length:
        raise ShapeError(f"cannot discard {discard} tokens of a cache with {length}; use 0..{length}")
