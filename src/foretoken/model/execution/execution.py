"""How the forward of a model is carried out: a private shadow of it, and what runs its layers.

The user's module objects are never changed. A *shadow* has modules, hooks and configs of its own over the same
tensors, and everything this file does is done to the shadow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from foretoken.model.execution.attention import use_grouped_sdpa
from foretoken.model.execution.direct import DirectForward, start_direct
from foretoken.model.execution.kinds import choose_execution, compute_dtype, fits_in_memory
from foretoken.model.execution.linears import linears, replacement
from foretoken.model.execution.native import KINDS, Library, NativeMatrix, library
from foretoken.model.execution.norms import RMSNorm
from foretoken.model.execution.packing import (
    PackedLinear,
    PackedProduct,
    packable,
    worth_packing,
)
from foretoken.model.execution.regions import Regions, worth_compiling
from foretoken.model.execution.rowwise import Rowwise
from foretoken.model.execution.sharing import groups, move_out, shared_storages
from foretoken.model.independence import other_products, quantised_layers
from foretoken.model.nodes import NodeLogits, logits_to_keep
from foretoken.model.support import cache_argument

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.cache_utils import Cache

    from foretoken.model.cache.ragged import KVCache
    from foretoken.model.capture import Recorder
    from foretoken.model.nodes import FlatNodes, Logits, Nodes

Model = TypeVar("Model", bound=nn.Module)


class Execution:
    """Runs the forward of a shadow. Use `apply_execution` to make one.

    Args:
      model: the shadow; its layers are changed in place.
      kind: "eager", "packed" or "compiled".
    """

    def __init__(self, model: PreTrainedModel, kind: str) -> None:
        self.model = model
        self.kind = kind
        self.uses_grouped_attention = False
        self.regions: Regions | None = None
        self.direct: DirectForward | None = None
        self._waiting: tuple[int, Callable[[], None]] | None = None  # forwards left until that is made, and how
        self.kernels: Library | None = None  # of attention
        self._products: list[PackedProduct] = []
        self._num_norms = 0
        self._cache_argument = cache_argument(model)

    def run(self, **kwargs: Any) -> Any:
        """The model's own forward, hooks included; arguments and output are `transformers`'."""
        return self.model(**kwargs)

    def direct_logits(
        self,
        nodes: Nodes,
        cache: KVCache,
        first_row: int,
        kept: range,
        recorder: Recorder,
        listed: bool,
    ) -> Logits | None:
        """`logits` without the modules of the model; None where these have to run."""
        if self.direct is None:
            self._wait()
            return None
        return self.direct.forward(nodes, cache, first_row, kept, recorder, listed)

    def logits(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        mask: Any,
        cache: Cache,
        kept: range,
        flat: FlatNodes | None,
        listed: bool = False,
    ) -> Logits:
        """Run nodes (B, N); logits (B, kept, V).

        Args:
          kept: columns whose logits are wanted.
          flat: run the real nodes as one list; only attention, which is ours, sees rows.
          listed: of a list return what it has, without padding.
        Raises: NotPassedOnError where the model does not let attention know of the list.
        """
        arguments = {"attention_mask": mask, self._cache_argument: cache, "use_cache": True}
        if flat is None:
            columns = logits_to_keep(kept, tokens.shape[1], tokens.device)
            output = self.run(input_ids=tokens, position_ids=positions, **arguments, logits_to_keep=columns)
            return output.logits[:, : len(kept)]  # type: ignore[no-any-return]
        numbers, of_kept = (0, flat) if len(kept) == tokens.shape[1] else flat.kept(kept)
        keep = numbers if len(kept) else 1
        inputs = {"input_ids": flat.listed(tokens)[None], "position_ids": flat.listed(positions)[None]}
        output = self.run(**inputs, **arguments, flat_nodes=flat, logits_to_keep=keep)
        logits = output.logits[0, : None if len(kept) else 0]  # a model gives one at least
        return NodeLogits(logits, of_kept.counts) if listed and len(kept) else of_kept.spread(logits)

    def over(self, model: PreTrainedModel) -> Execution:
        """The same for a shadow of this one's model; what is packed stays with this one."""
        other = Execution(model, self.kind)
        for name in ("uses_grouped_attention", "regions", "kernels"):
            setattr(other, name, getattr(self, name))
        return other

    def compile(
        self,
        name: str,
        layers: Sequence[nn.Module],
        windows: Mapping[str, int | None],
        forward: Callable[[int, int], torch.Tensor],
        num_forwards: int = 0,
    ) -> None:
        """Compile the decoder layers, where this is compiled execution; see `Regions.build`.

        Args:
          windows: positions that a node looks back by kind of attention, its own included; None for all.
          forward: logits of a number of nodes behind a number of committed ones, by this execution.
          num_forwards: after which forwards go without modules.
        """
        if self.regions is None:
            self._run_activations_by_rows()
            return
        has_own = not self.uses_grouped_attention
        chain = self.regions.build(name, layers, lambda num_nodes: forward(num_nodes, 0), has_own_attention=has_own)
        if chain is not None:
            self._waiting = num_forwards, partial(start_direct, self, chain, windows, forward)
        else:
            self._run_activations_by_rows()
        if num_forwards == 0:
            self._wait()

    def _wait(self) -> None:
        """Go without modules once there have been as many forwards with them as there are to be."""
        if self._waiting is not None:
            left, start = self._waiting
            self._waiting = None if left == 0 else (left - 1, start)
            if left == 0:
                start()

    def why_not_native(self) -> str:
        """Why steps do not run by the library's own products; empty where all do.

        Structure decides: what a layer is, and in which dtype. Attention is for `runs_own_attention` to see.
        """
        if self.kind == "eager":
            return "it runs eagerly"
        if self.kernels is None:
            return "the library's own kernels need AVX2, a C++ compiler, and single or half precision"
        if not self.uses_grouped_attention:
            return "its attention is code of its own"
        if name := next((type(layer).__name__ for _, layer in quantised_layers(self.model)), ""):
            return f"its {name} layers are quantised"
        if name := other_products(self.model):
            return f"{name} multiplies by matrices of its own"
        for layer in linears(self.model):
            packed = replacement(layer)
            if not isinstance(packed, PackedLinear) or not isinstance(packed.product.matrix, NativeMatrix):
                return f"a {type(layer).__name__} of it in {compute_dtype(self.model)} runs by other kernels"
        return ""

    @property
    def num_compiled(self) -> int:
        """How many decoder layers run compiled."""
        return 0 if self.regions is None else self.regions.num_compiled

    def refresh_if_stale(self) -> bool:
        """Pack again what was written since it was packed; True when anything was.

        Costs microseconds per layer: call it once per request, not per step. In-place writes are seen through the
        tensors' version counters, replaced storage through its address; writes through ``.data`` are not.
        """
        if self.direct is not None:
            self.direct.look_again()
        return sum(product.refresh() for product in self._products) > 0

    @property
    def num_packed_layers(self) -> int:
        return sum(len(product.layers) for product in self._products)

    @property
    def packed_bytes(self) -> int:
        return sum(product.num_bytes for product in self._products)

    def describe(self) -> str:
        """One line for people."""
        notes = []
        if self._products:
            layers, products = _count(self.num_packed_layers, "layer"), _count(len(self._products), "product")
            notes.append(f"{layers} in {products}, {self.packed_bytes / 1e6:.0f} MB packed")
            own = [each.matrix for each in self._products if isinstance(each.matrix, NativeMatrix)]
            notes += [f"{len(own)} for own {own[0].instruction_set} kernels"] if own else []
        if num_quantised := sum(1 for _ in quantised_layers(self.model)):
            notes.append(f"{num_quantised} quantised layers left as they are")
        if self.kind == "compiled":
            reason = self.regions.reason if self.regions is not None else ""
            notes.append(f"{self.num_compiled} decoder layers compiled" + (f", {reason}" if reason else ""))
        elif not notes and self.kind != "eager":
            notes.append("no layer large enough or of a packable dtype")
        return f"{self.kind} ({'; '.join(notes)})" if notes else self.kind

    def _pack(self, release_originals: bool, earlier: Execution | None) -> None:
        shared = shared_storages(self.model)
        known = {} if earlier is None else {id(product.layers[0].weight): product for product in earlier._products}
        layers = list(packable(self.model))
        found = [group for group in (groups(self.model, layers) if layers else []) if worth_packing(group)]
        if release_originals:
            weights: list[torch.Tensor] = [layer.weight for group in found for layer in group]  # type: ignore[misc]
            move_out(self.model, [weight for weight in weights if weight.data_ptr() not in shared])
            shared = shared_storages(self.model)
        for group in found:
            product = PackedProduct(group, known.get(id(group[0].weight)))
            for index, layer in enumerate(group):
                layer.forward = PackedLinear(product, index)
            self._products.append(product)
            if release_originals:
                product.release(shared)

    def _run_activations_by_rows(self) -> None:
        """Where layers run as modules: let no row have other bits for the rows beside it."""
        if self.kernels is not None:
            for layer in self.model.modules():
                if "forward" not in vars(layer) and Rowwise.fits(layer):
                    layer.forward = Rowwise(layer.forward)

    def _fuse_norms(self) -> None:
        for layer in self.model.modules():
            norm = None if "forward" in vars(layer) else RMSNorm.of(layer)
            if norm is not None:
                layer.forward = norm
                self._num_norms += 1


@torch.inference_mode()
def apply_execution(
    shadow_model: PreTrainedModel,
    kind: str = "auto",
    *,
    release_originals: bool = False,
    cache_dir: Path | str | None = None,
    progress: Callable[[str], None] | None = None,
    earlier: Execution | None = None,
) -> Execution:
    """Make a shadow run the chosen way.

    Args:
      shadow_model: from `shadow`, or a model that nobody else holds; its layers are changed in place.
      kind: "auto" (compiled on x86 where memory allows and a C++ compiler is found, packed where the model is small or
        there is none, else eager), "eager", "packed" or "compiled".
      release_originals: free each weight once it is packed, in every model that shares it; tied weights stay. Only
        for models that the library loaded itself.
      cache_dir: of "compiled": where kernels are kept between processes; inductor/ in the cache folder by default.
      progress: of "compiled": called with one line before what takes long.
      earlier: of another shadow of the same model; what it has packed is taken over where nothing else was written.

    Raises: ConfigError for an unknown kind, or one that the device cannot run.
    Exactness: equals eager execution within the rounding of the dtype.
    """
    device = shadow_model.get_input_embeddings().weight.device
    chosen = choose_execution(kind, device, compute_dtype(shadow_model))
    is_packed_already = earlier is not None and earlier.num_packed_layers > 0
    if kind == "auto" and chosen == "packed":
        if not is_packed_already and not fits_in_memory(shadow_model, release_originals):
            chosen = "eager"
        elif worth_compiling(packable(shadow_model)):
            chosen = "compiled"
    execution = Execution(shadow_model, chosen)
    if execution.kind == "eager":
        return execution
    execution.kernels = library() if compute_dtype(shadow_model) in KINDS else None
    execution.uses_grouped_attention = use_grouped_sdpa(shadow_model)
    execution._fuse_norms()
    execution._pack(release_originals, earlier)
    if execution.kind == "compiled":
        execution.regions = Regions(cache_dir, progress)
    return execution


def _count(number: int, of: str) -> str:
    return f"{number} {of}{'s' * (number != 1)}"
