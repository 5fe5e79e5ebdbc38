"""EAGLE heads in weights of 8 or 4 bits. One call of the native kernels runs a level of a draft, or a whole draft."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from math import inf
from typing import cast

import torch
from torch import nn

from foredraft.heads.eagle import EagleHead, FusedLayer
from foredraft.heads.layers import DecoderLayer
from foredraft.model.execution import forwards, packing
from foredraft.model.nodes import Nodes
from foredraft.native import abi
from foredraft.native.codes import Codes, StoredCodes, Unrounded
from foredraft.native.library import Library
from foredraft.native.packed_matmul import CodesMatrix
from foredraft.sampling import noise
from foredraft.sampling.processors import Sampler

MOST_NODES = 64
"""Largest number of nodes of a call. For more nodes, bfloat16 products of torch are faster, because computation then
limits the speed, not reading weights."""

DTYPES = (torch.bfloat16, torch.float32)


class Int8Head:
    """EAGLE head for the native kernels, with keys and values in bfloat16 and everything else in float32.

    Weights have 8 bits, or 4 if they were rounded to 4 bits when the head was loaded.

    Args:
      head: head with one decoder layer, in bfloat16 or float32 on the CPU; see `why_not`.
      table: input embedding (V, H).
      output: output layer (V_d, H), see `is_plain`.
      kernels: native kernels that multiply 8-bit integers.

    Attributes:
      num_bytes: size of the weights.

    Exactness: equal to the module up to this rounding; drafts are verified by the target.
    Randomness: none.
    """

    def __init__(self, head: EagleHead, table: torch.Tensor, output: nn.Module, kernels: Library) -> None:
        shape, layer = head.shape, cast("DecoderLayer | FusedLayer", head.layers[0])
        attention, mlp = layer.self_attn, layer.mlp
        sizes = shape.layer
        self.size, self.num_logits = sizes.hidden_size, len(packing.unpacked_weight(output))
        self._kernels = kernels
        self._last_token = len(table) - 1  # replaces tokens outside of the head's embedding
        self._kept: list[object] = [table]
        hidden_norm = layer.hidden_norm if isinstance(layer, FusedLayer) else None
        norms = (head.embed_norm, head.input_norm, layer.input_layernorm, hidden_norm)
        products: tuple[Sequence[nn.Module], ...] = (
            [head.fc],
            attention.sharing_input,
            [attention.o_proj],
            mlp.sharing_input,
            [mlp.down_proj],
            [output],
        )
        matrices = [_matrix(layers, kernels) for layers in products]
        self.num_bytes = sum(matrix.num_bytes for matrix in matrices)
        frequencies = head.rotary.frequencies.float().contiguous()
        self._kept += [matrices, frequencies]
        self._head = abi.Head(
            shape.generation,
            sizes.hidden_size,
            len(shape.streams) * shape.target_size,
            sizes.num_heads,
            sizes.num_kv_heads,
            sizes.head_dim,
            sizes.intermediate_size,
            shape.norm_before_residual,
            shape.norm_output and head.norm is not None,
            table.dtype == torch.float32,
            table.data_ptr(),
            frequencies.data_ptr(),
            *(self._weight_of(norm) for norm in (*norms, layer.post_attention_layernorm, head.norm)),
            *(matrix.fields for matrix in matrices),
            sizes.eps,
            head.rotary.factor,
        )

    def feed(
        self,
        nodes: Nodes,
        lengths: Sequence[int],
        keys: torch.Tensor,
        values: torch.Tensor,
        given: torch.Tensor,
        *,
        is_true: bool,
    ) -> torch.Tensor:
        """Run nodes, and write their keys and values.

        Args:
          nodes, lengths: see `Nodes.fields`.
          keys, values: (R, heads, T, head_dim) in bfloat16, starting with the first of these rows.
          given: features of all nodes, row after row. If ``is_true``, (n, streams * H of the target) in the dtype of
            the head, else the outputs of this method for their parents.
          is_true: True for features of the target.

        Returns: (n, H) in float32, the features for the children, which are also the input of `logits`.
        """
        nodes.tokens.clamp_(max=self._last_token)
        outputs, fields = torch.empty(nodes.num_real, self.size), nodes.fields(lengths)
        given = given.contiguous() if is_true else given.float().contiguous()
        level = abi.Level(
            ctypes.addressof(fields),
            keys.data_ptr(),
            values.data_ptr(),
            *keys.stride()[:2],
            None if is_true else given.data_ptr(),
            given.data_ptr() if is_true else None,
            outputs.data_ptr(),
        )
        self._run("head_level", ctypes.addressof(level))
        return outputs

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return logits (..., V_d) in float32 of outputs (..., H)."""
        outputs = outputs.float().contiguous()
        found = outputs.new_empty(*outputs.shape[:-1], self.num_logits)
        self._run("head_logits", outputs.data_ptr(), outputs.numel() // self.size, found.data_ptr())
        return found

    def grow(
        self,
        trunk: int,
        pending: int,
        last: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        names: torch.Tensor | None,
        *,
        owed: tuple[Sequence[int], torch.Tensor] | None = None,
        depth: int,
        branches: int,
        beam: int,
        most: int,
        power: float,
        least_mass: float = 0.0,
        least: float = -inf,
        sampler: Sampler | None = None,
        position: int = 0,
    ) -> tuple[list[int], list[int], list[float]]:
        """Grow the draft of one row as `Growth` does with reranking.

        Args:
          trunk: number of cache entries of committed tokens; there must be room for ``(depth - 1) * beam`` more.
          pending: last token.
          last: (H,) in float32, the output of the last entry; written if that entry is deferred.
          keys, values: (1, heads, T, head_dim) of this row.
          names: int64 (V_d,), tokens of the output layer's rows; None if rows are token ids.
          owed: tokens (n,) and streams (n, streams * H of the target) of the last entries of the trunk, if these are
            deferred.
          depth: number of levels.
          branches: number of children per node.
          beam: number of nodes per level that get children.
          most: largest number of nodes of the draft, root included.
          power: exponent of the probabilities. The results are normalised.
          least_mass: least total probability of the nodes to expand next; see `Growth`.
          least: lowest score of a node that is expanded.
          sampler: sampler of the target's tokens; None if the target is greedy.
          position: index in the row of the first drafted token.

        Returns: token, parent and log-probability of the path, for every node.
        """
        most = min(most, 1 + depth * beam * branches)
        tokens, parents = (abi.Integer * most)(), (abi.Integer * most)()
        scores = (ctypes.c_double * most)()
        chain, streams = ((), None) if owed is None else (owed[0], owed[1].contiguous())
        tokens_of = abi.array_of([min(token, self._last_token) for token in chain])
        drawn, keys_of_noise = None, (ctypes.c_uint64 * depth)()
        if sampler is not None and not sampler.is_greedy:
            keys_of_noise[:] = [noise.row_key(sampler.seed, position + level) for level in range(depth)]
            chosen = sampler.warper
            sampling = (chosen.top_k, chosen.temperature, chosen.top_p, chosen.min_p)
            drawn = abi.Drawing(ctypes.addressof(keys_of_noise), *sampling)
        growing = abi.Growing(
            min(pending, self._last_token),
            trunk,
            depth,
            branches,
            beam,
            most,
            keys.data_ptr(),
            values.data_ptr(),
            *keys.stride()[:2],
            len(chain),
            ctypes.addressof(tokens_of),
            None if streams is None else streams.data_ptr(),
            last.data_ptr(),
            None if names is None else names.data_ptr(),
            None if drawn is None else ctypes.addressof(drawn),
            *(ctypes.addressof(each) for each in (tokens, parents, scores)),
            least_mass,
            least,
            power,
        )
        count = self._run("head_grow", ctypes.addressof(growing))
        return tokens[:count], parents[:count], scores[:count]

    def _run(self, name: str, *arguments: int) -> int:
        function: Callable[..., int] = getattr(self._kernels, name)
        return function(ctypes.addressof(self._head), *arguments, torch.get_num_threads())

    def _weight_of(self, norm: nn.Module | None) -> int | None:
        """Return the address of a norm's weight in float32."""
        if norm is None:
            return None
        weight = norm.weight.detach().float().contiguous()  # type: ignore[operator]
        self._kept.append(weight)
        address: int = weight.data_ptr()
        return address


def why_not(head: EagleHead, table: torch.Tensor, kernels: Library | None) -> str | None:
    """Return the reason why a head must run as a PyTorch module, or None if `Int8Head` supports it."""
    shape = head.shape
    sizes = shape.layer
    inputs = (sizes.hidden_size, len(shape.streams) * shape.target_size, sizes.num_heads * sizes.head_dim)
    plain = type(head.layers[0]) in (DecoderLayer, FusedLayer)
    reasons = {
        "no kernels are found": kernels is None,
        "it is not in bfloat16 or float32 on a CPU": head.dtype not in DTYPES or head.fc.weight.device.type != "cpu",
        "it has several layers": shape.num_layers != 1 or not plain,
        "it has another activation than silu": sizes.activation != "silu",
        "it has norms by head or by stream": sizes.has_head_norms or shape.fc_norm,
        "its sizes are no multiples of 64": any(size % 64 for size in (*inputs, sizes.intermediate_size)),
        "its attention heads are of an odd size": sizes.head_dim % 32 != 0 or sizes.head_dim > 2 * abi.MOST_HALF,
        "its embeddings are in another dtype": table.dtype != head.dtype or not table.is_contiguous(),
        "other norms than its own": any(type(module) is not nn.RMSNorm for module in _norms(head)),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def is_frozen(head: EagleHead) -> bool:
    """Return whether the head's weights were packed when it was loaded, so that they cannot be trained."""
    return all(isinstance(forwards.replacement(layer), packing.PackedLinear) for layer in forwards.linears(head))


def is_plain(output: nn.Module) -> bool:
    """Return whether an output layer is a linear layer without bias."""
    return type(output) is nn.Linear and output.bias is None


def _norms(head: EagleHead) -> list[nn.Module]:
    return [module for module in head.modules() if "norm" in type(module).__name__.lower()]


def _codes_of(layer: nn.Module) -> Codes | None:
    forward = forwards.replacement(layer)
    return forward.codes() if isinstance(forward, packing.PackedLinear) else None


def _matrix(layers: Sequence[nn.Module], kernels: Library) -> CodesMatrix:
    """Join layers with the same input into one matrix.

    Weights that were rounded to 4 bits when the head was loaded are taken as they are, and others are rounded to 8.
    """
    weights = [packing.unpacked_weight(layer) for layer in layers]
    biases = [cast("torch.Tensor | None", layer.bias) for layer in layers]
    bias = None
    if any(each is not None for each in biases):
        pairs = zip(weights, biases, strict=True)
        bias = torch.cat([torch.zeros(len(weight)) if each is None else each.float() for weight, each in pairs])
    codes = [_codes_of(layer) for layer in layers]
    parts = [
        StoredCodes.of(found) if found is not None and found.bits == 4 else Unrounded.of(weight, 8)
        for found, weight in zip(codes, weights, strict=True)
    ]
    return CodesMatrix(parts, bias, kernels, activation_bytes=1, ignores_infinite=True)
