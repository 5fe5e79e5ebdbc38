"""`torch.compile` around a shadow: the small operations between the linears fused, shapes dynamic.

One graph serves every number of nodes, rows and columns; one node, one row and ragged rows have graphs of their own,
which is what inductor would specialise on anyway. Attention and packed linears stay calls into their libraries.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

from foretoken.folders import cache_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from foretoken.model.cache.ragged import KVCache

logger = logging.getLogger("foretoken")

MAX_NODES = 64  # wider forwards are prefill, where linears are everything

Mask = torch.Tensor | dict[str, torch.Tensor] | None


class CompiledForward:
    """Runs forwards of few nodes through compiled graphs, and the others through the model itself.

    A graph is compiled when a forward first needs it: tens of seconds, announced in the log of "foretoken" and to
    ``progress``; from the disk cache, seconds. Forwards with hooks on the model (feature capture) are not compiled.

    Args:
      model: the shadow.
      cache_dir: where compiled kernels are kept between processes; inductor/ in the cache folder by default.
      progress: called with one line before and after each compilation.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache_dir: Path | str | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        self.model = model
        self.cache_dir = Path(cache_dir).expanduser() if cache_dir else cache_folder("inductor")
        self.compile_seconds = 0.0
        self._progress = progress
        self._cache: Cache | None = None
        self._graphs: dict[tuple[Any, ...], Callable[..., torch.Tensor]] = {}

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def __call__(self, **kwargs: Any) -> Any:
        """The model's forward; arguments and logits are `transformers`'."""
        if not self._can_compile(**kwargs):
            return self.model(**kwargs)
        ids, positions, mask = kwargs["input_ids"], kwargs["position_ids"], kwargs.get("attention_mask")
        keep = kwargs.get("logits_to_keep", 0)
        cache = self._view(kwargs["past_key_values"], ids)
        _mark_dynamic(ids, positions, mask, cache)
        layer = cache.layers[0]
        key = (ids.shape[0] > 1, ids.shape[1] > 1, layer.columns.dim(), keep, _layout(mask))
        graph = self._graphs.get(key)
        if graph is None:
            logits = self._compile(key, ids, positions, mask, cache, keep)
        else:
            logits = graph(ids, positions, mask, cache, keep)
        return CausalLMOutputWithPast(logits=logits)

    def _can_compile(
        self,
        *,
        input_ids: torch.Tensor | None = None,
        past_key_values: KVCache | None = None,
        attention_mask: Mask = None,
        logits_to_keep: int | torch.Tensor = 0,
        **_others: Any,
    ) -> bool:
        if input_ids is None or past_key_values is None or input_ids.shape[1] > MAX_NODES:
            return False
        is_written = all(layer.is_initialized for layer in past_key_values.layers)
        has_mask = attention_mask is not None or input_ids.shape[1] == 1
        return is_written and has_mask and isinstance(logits_to_keep, int) and not _has_hooks(self.model)

    def _view(self, cache: KVCache, ids: torch.Tensor) -> Cache:
        """The rows and columns in work as a cache of tensors only, which graphs read as inputs."""
        window, (num_rows, width) = cache.window, ids.shape
        if self._cache is None:
            self._cache = Cache(layers=[_ViewLayer() for _ in cache.layers])
        if window.columns is None:
            columns = torch.arange(window.offset, window.offset + width, device=ids.device)
        else:
            columns = window.columns  # (B, N)
        rows = slice(window.first_row, window.first_row + num_rows)
        for view, layer in zip(self._cache.layers, cache.layers, strict=True):
            view.columns = columns
            view.keys = layer.keys[rows, :, : window.view_length]
            view.values = layer.values[rows, :, : window.view_length]
        return self._cache

    def _compile(self, key: tuple[Any, ...], *args: Any) -> torch.Tensor:
        name = f"{type(self.model).__name__} for {'several rows' if key[0] else 'one row'}, "
        name += "several nodes" if key[1] else "one node"
        self._announce(f"compiling {name}; this takes up to a minute or two, once per machine")
        start = time.perf_counter()
        graph = torch.compile(_own_code(self._forward), fullgraph=True, dynamic=False)
        with _inductor_cache(self.cache_dir):
            logits: torch.Tensor = graph(*args)
        seconds = time.perf_counter() - start
        self.compile_seconds += seconds
        self._graphs[key] = graph
        self._announce(f"compiled {name} in {seconds:.1f} s (kernels kept in {self.cache_dir})")
        return logits

    @property
    def _forward(self) -> Callable[..., torch.Tensor]:
        model = self.model

        def forward(ids: torch.Tensor, positions: torch.Tensor, mask: Mask, cache: Cache, keep: int) -> torch.Tensor:
            output = model(
                input_ids=ids,
                position_ids=positions,
                attention_mask=mask,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=keep,
            )
            logits: torch.Tensor = output.logits
            return logits

        return forward

    def _announce(self, line: str) -> None:
        logger.info("%s", line)
        if self._progress is not None:
            self._progress(line)


class _ViewLayer(CacheLayerMixin):  # type: ignore[misc]
    """Views (B, heads, T, head_dim) of one layer's buffers, and the columns that the nodes are written to."""

    is_sliding = False
    is_croppable = False

    def __init__(self) -> None:
        super().__init__()
        self.is_initialized = True
        self.columns: torch.Tensor | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to allocate: the buffers belong to the `KVCache`."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write (B, heads, N, head_dim) at columns (N,), or (B, N) when the rows differ."""
        return self._write(self.keys, key_states), self._write(self.values, value_states)

    def _write(self, view: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        columns = self.columns
        assert columns is not None
        if columns.dim() == 1:
            return view.index_copy_(2, columns, states)
        rows = torch.arange(view.shape[0], device=view.device)[:, None, None]
        heads = torch.arange(view.shape[1], device=view.device)[None, :, None]
        return view.index_put_((rows, heads, columns[:, None, :]), states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.keys.shape[2], 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


def _mark_dynamic(ids: torch.Tensor, positions: torch.Tensor, mask: Mask, cache: Cache) -> None:
    """Tell the compiler which sizes vary: rows and nodes above one, and columns always."""
    rows = [0] if ids.shape[0] > 1 else []
    nodes = ids.shape[1] > 1
    masks = list(mask.values()) if isinstance(mask, dict) else [] if mask is None else [mask]
    columns = cache.layers[0].columns
    mark = torch._dynamo.mark_dynamic
    for tensor in (ids, positions):
        mark(tensor, rows + [1] * nodes)
    mark(columns, [0] * nodes if columns.dim() == 1 else rows + [1] * nodes)
    for tensor in masks:
        mark(tensor, [0] * (tensor.shape[0] > 1) + [2] * nodes + [3])
    for layer in cache.layers:
        mark(layer.keys, [*rows, 2])
        mark(layer.values, [*rows, 2])


def _layout(mask: Mask) -> Any:
    """The properties of a mask that a graph depends on, besides its sizes."""
    if isinstance(mask, dict):
        return tuple((kind, _layout(tensor)) for kind, tensor in mask.items())
    return None if mask is None else (mask.dtype, mask.shape[0] > 1)


def _has_hooks(model: nn.Module) -> bool:
    return any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def _own_code(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The function over a copy of its code: dynamo counts recompilations per code object, over all models."""
    assert isinstance(function, FunctionType)
    function.__code__ = function.__code__.replace()
    return function


@contextmanager
def _inductor_cache(directory: Path) -> Iterator[None]:
    """Let inductor keep its kernels in ``directory``. It reads the place from the environment only."""
    name = "TORCHINDUCTOR_CACHE_DIR"
    before = os.environ.get(name)
    directory.mkdir(parents=True, exist_ok=True)
    os.environ[name] = str(directory)
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
