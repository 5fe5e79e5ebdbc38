"""A small Llama from tokens to logits in one call of the library's own kernels, and chains of its likeliest tokens.

A forward of a draft model of one layer, 128 wide, is 0.16 ms of products and 0.6 of calling them: modules, decorators,
masks, a cache. Here nothing is called between a draft's first token and its last. See ``decoder.cpp``, and `decodable`
on which models these are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from foretoken.model.execution.decoder_calls import (
    Address,
    DecoderFields,
    DraftsFields,
    FedFields,
    Integer,
    LayerFields,
)
from foretoken.model.execution.linears import replacement
from foretoken.model.execution.native import KINDS, Library, NativeMatrix
from foretoken.model.execution.node_lists import NodeList, array_of
from foretoken.model.execution.packing import PackedLinear, dense_weight
from foretoken.model.support import check_autocast

if TYPE_CHECKING:
    from foretoken.model.cache.ragged import KVCache
    from foretoken.model.lm import CausalLM


class Decoder:
    """A model as the kernels run it: its own weights, packed, and its own dtype. Use `decoder_of` to get one.

    Args:
      lm: the adapter of the model; see `decodable.why_not`.

    Exactness: equals the modules within the rounding of the dtype. A node has the same bits among any number of nodes
      and rows.
    Randomness: none.
    """

    def __init__(self, lm: CausalLM, kernels: Library) -> None:
        model: Any = lm.shadow
        body, config = model.base_model, lm.config
        self.vocab_size = lm.vocab_size
        self._kernels = kernels
        self._dtype = lm.dtype
        self._rotary = body.rotary_emb
        attention = body.layers[0].self_attn
        table = body.embed_tokens.weight.detach()
        self._kept: list[object] = [table]
        self._head_dim = attention.head_dim
        self._num_kv_heads = config.num_key_value_heads
        layers = (LayerFields * len(body.layers))()
        for place, layer in zip(layers, body.layers, strict=True):
            inner, mlp = layer.self_attn, layer.mlp
            place.input_norm = self._weight_of(layer.input_layernorm)
            place.post_norm = self._weight_of(layer.post_attention_layernorm)
            place.heads_in = self._matrix(inner.q_proj, inner.k_proj, inner.v_proj)
            place.heads_out = self._matrix(inner.o_proj)
            place.gate_up = self._matrix(mlp.gate_proj, mlp.up_proj)
            place.down = self._matrix(mlp.down_proj)
        output = model.get_output_embeddings()
        self.num_logits: int = output.out_features
        self._num_layers = len(layers)
        self._decoder = DecoderFields(
            KINDS[lm.dtype],
            len(layers),
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            attention.head_dim,
            config.intermediate_size,
            lm.vocab_size,
            table.data_ptr(),
            None,
            None,
            ctypes.addressof(layers),
            self._weight_of(body.norm),
            self._matrix(output),
            body.norm.variance_epsilon,
            attention.scaling,
        )
        self._kept.append(layers)  # where the structure points to
        self._turns = 0  # positions that there are angles for
        self._reach(256)
        self._buffers: tuple[object, Any, Any, tuple[int, int]] = (None, None, None, (0, 0))

    def logits(self, fed: NodeList, cache: KVCache, kept: Sequence[int]) -> torch.Tensor:
        """Run nodes, and write their keys and values behind what is committed.

        Args:
          kept: numbers of the nodes whose logits are wanted.

        Returns: (kept, V) in the dtype of the model.
        """
        found = torch.empty(len(kept), self.num_logits, dtype=self._dtype)
        keep = array_of(kept)
        nodes, _kept = self._given(fed, cache, 0)
        self._kernels.decoder_logits(
            ctypes.addressof(self._decoder),
            ctypes.addressof(nodes),
            ctypes.addressof(keep),
            len(kept),
            found.data_ptr(),
            torch.get_num_threads(),
        )
        return found

    def chains(
        self, fed: NodeList, cache: KVCache, depths: Sequence[int], num_columns: int, names: torch.Tensor | None
    ) -> tuple[list[list[int]], int]:
        """Run nodes, one at least of every row, and then the likeliest token, again and again.

        Of those that are found the last one is not run; the others lie in the columns behind the nodes.

        Args:
          depths: how many tokens are wanted of every row.
          num_columns: of logits that count.
          names: int64 (V,), the tokens of the columns; None for their own numbers.

        Returns: the tokens of every row, fewer where logits are no numbers, and how many runs that took.
        """
        most = max(depths)
        tokens, wanted = (Integer * (most * len(depths)))(), array_of(depths)
        drafts = DraftsFields(
            ctypes.addressof(wanted),
            most,
            min(num_columns, self.num_logits),
            None if names is None else names.data_ptr(),
            ctypes.addressof(tokens),
        )
        nodes, _kept = self._given(fed, cache, most - 1)
        runs = self._kernels.decoder_chains(
            ctypes.addressof(self._decoder), ctypes.addressof(nodes), ctypes.addressof(drafts), torch.get_num_threads()
        )
        rows = [tokens[row * most : (row + 1) * most] for row in range(len(depths))]
        return [row[: row.index(-1)] if -1 in row else row for row in rows], runs

    def _given(self, fed: NodeList, cache: KVCache, num_more: int) -> tuple[FedFields, object]:
        """Nodes as the kernels take them, with room for more columns behind them, and what is to be kept alive."""
        check_autocast(torch.device("cpu"))
        views = fed.views()
        cache.reserve(max(views) + num_more, len(fed.counts))
        self._reach(max(fed.positions) + num_more)
        keys, values, strides = self._buffers_of(cache)
        last, most = self.vocab_size - 1, max(map(len, fed.above), default=0)
        # the drafter's last token stands for those of a larger vocabulary that it does not know
        tokens = array_of([min(token, last) for token in fed.tokens])
        above = [column for columns in fed.above for column in (*columns, *[-1] * (most - len(columns)))]
        of_nodes = [tokens, *map(array_of, (fed.positions, fed.columns, fed.prefixes, above))]
        of_rows = [*map(array_of, (fed.counts, fed.firsts(), views)), keys, values]
        nodes = FedFields(
            len(fed.tokens),
            len(fed.counts),
            *map(ctypes.addressof, of_nodes),
            most,
            *map(ctypes.addressof, of_rows),
            *strides,
        )
        return nodes, (of_nodes, of_rows)

    def _buffers_of(self, cache: KVCache) -> tuple[Any, Any, tuple[int, int]]:
        """Addresses of keys and values, layer by layer, and strides of rows and heads."""
        layers: Any = cache.layers
        if not layers[0].is_initialized:
            blank = torch.zeros(1, self._num_kv_heads, 1, self._head_dim, dtype=self._dtype)
            for layer in layers:
                layer.lazy_initialization(blank, blank)
        memory, keys, values, strides = self._buffers
        if memory is not cache.memory:
            array = Address * len(layers)
            keys = array(*(layer.keys.data_ptr() for layer in layers))
            values = array(*(layer.values.data_ptr() for layer in layers))
            strides = layers[0].keys.stride()[:2]
            self._buffers = cache.memory, keys, values, strides
        return keys, values, strides

    @torch.inference_mode()
    def _reach(self, position: int) -> None:
        """Have angles up to a position. Earlier ones stay, for other threads."""
        if position < self._turns:
            return
        count = max(2 * self._turns, position + 1)
        like = torch.empty(1, 1, self._head_dim, dtype=self._dtype)
        found = self._rotary(like, torch.arange(count)[None])
        cosines, sines = (each[0, :, : self._head_dim // 2].float().contiguous() for each in found)
        self._kept.append((cosines, sines))
        self._decoder.cosines, self._decoder.sines = cosines.data_ptr(), sines.data_ptr()
        self._turns = count

    def _weight_of(self, norm: Any) -> int:
        """The address of the weight of a norm, in float32."""
        weight = norm.weight.detach().float().contiguous()
        self._kept.append(weight)
        address: int = weight.data_ptr()
        return address

    def _matrix(self, *layers: nn.Module) -> int:
        """The address of the packed weights of layers, as one; those that the modules run, where these are such."""
        runs = [replacement(layer) for layer in layers]
        first = runs[0]
        matrix: object = None
        if isinstance(first, PackedLinear) and len(first.product.layers) == len(layers):
            parts = [(run.product, run.index) for run in runs if isinstance(run, PackedLinear)]
            if parts == [(first.product, index) for index in range(len(layers))]:
                matrix = first.product.matrix
        if not isinstance(matrix, NativeMatrix):
            weight = torch.cat([_weight(layer).to(self._dtype) for layer in layers])
            biases = [layer.bias for layer in layers if layer.bias is not None]
            matrix = NativeMatrix(weight, torch.cat(biases).detach() if biases else None, self._kernels)  # type: ignore[arg-type]
        self._kept.append(matrix)
        return matrix.address


def _weight(layer: nn.Module) -> torch.Tensor:
    """The weight (out, in) of a linear layer, packed or not."""
    packed = replacement(layer)
    return packed.dense() if isinstance(packed, PackedLinear) else dense_weight(layer)
