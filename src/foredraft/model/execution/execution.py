"""Execution of a model's forward pass: a private shadow of the model, and the code that runs its layers.

The user's module objects are never changed. A *shadow* has its own modules, hooks and configs over the same tensors,
and everything in this file changes only the shadow.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from foredraft.config.keywords import did_you_mean
from foredraft.errors import ConfigError, error_with_type
from foredraft.machine import available_memory_bytes
from foredraft.model.execution.attention import use_grouped_sdpa
from foredraft.model.execution.calls import NUM_NODES, Recording
from foredraft.model.execution.compiled_layers import CompiledLayers, worth_compiling
from foredraft.model.execution.ends import Ends, store_traced, trace_ends
from foredraft.model.execution.experts import (
    PackedRouter,
    is_mixture,
    packable_experts,
    packed_experts,
    routers,
    stacks_of,
    why_not_packed,
)
from foredraft.model.execution.forwards import Rowwise, linears, replace_forward, replacement
from foredraft.model.execution.lowering import NotTraceableError
from foredraft.model.execution.native_program import NativeProgram
from foredraft.model.execution.packing import (
    PackedLinear,
    PackedProduct,
    layers_in_floats,
    packable,
    packed_products,
    packing_bytes,
    packs,
)
from foredraft.model.execution.sharing import groups, make_ready, read_rows, tied_embedding
from foredraft.model.execution.tracing import layer_program
from foredraft.model.independence import other_products, quantised_layers
from foredraft.model.nodes import FlatNodes, Logits, NodeLogits, logits_to_keep
from foredraft.model.support import cache_argument, model_name
from foredraft.native.library import KINDS, Library, library
from foredraft.native.packed_matmul import PackedMatrix

WAYS = ("eager", "packed", "compiled")


def compute_dtype(model: PreTrainedModel) -> torch.dtype:
    """Return the dtype in which a model computes, even if its embedding is stored in blocks of bytes."""
    dtype: torch.dtype = model.get_input_embeddings().weight.dtype
    return dtype if dtype.is_floating_point else model.dtype


def choose_execution(kind: str, device: torch.device | str, dtype: torch.dtype) -> str:
    """Resolve "auto" and check that the device can run the execution.

    Returns: "packed" for "auto" on CPUs that can pack ``dtype``, else "eager". `chosen_for` also looks at the model.
    Raises: ConfigError for an unknown kind, or one that the device cannot run.
    """
    check_kind(kind)
    is_cpu = torch.device(device).type == "cpu"
    if kind == "auto":
        return "packed" if is_cpu and packs(dtype) else "eager"
    if kind != "eager" and not is_cpu:
        raise ConfigError(f"execution={kind!r} runs on CPUs, and the model is on {device}; use execution='eager'")
    if kind == "packed" and library() is None:
        raise ConfigError(
            "execution='packed' needs the library's own kernels, which are not available: they need an x86 CPU with "
            "AVX2, and a C++ compiler or the wheel that contains them; use execution='eager' or 'auto'"
        )
    return kind


def check_kind(kind: str) -> None:
    """Check the name of an execution.

    Raises: ConfigError for an unknown name.
    """
    if kind != "auto" and kind not in WAYS:
        raise ConfigError(f"execution={kind!r} is unknown; {did_you_mean(kind, ('auto', *WAYS))}")


def fits_in_memory(model: PreTrainedModel, release_originals: bool) -> bool:
    """Return whether packed weights leave a tenth of the available memory free; log a warning if they do not."""
    stacks = (chain(*stacks_of(experts).values()) for experts in packable_experts(model))
    needed = packing_bytes(chain(packable(model), *stacks), release_originals)
    available = available_memory_bytes()
    if available is None or needed <= 0.9 * available:
        return True
    logger.warning(
        "packed weights of %s need %.1f GB and %.1f GB are available, so it runs eagerly, where drafts are several "
        "times slower; pass execution='packed' to pack them anyway.",
        model_name(model),
        needed / 1e9,
        available / 1e9,
    )
    return False


def chosen_for(
    shadow_model: PreTrainedModel, kind: str, *, release_originals: bool = False, earlier: Execution | None = None
) -> str:
    """Return the execution of a model: its kind, or for "auto" the best one that fits; see `apply_execution`.

    Raises: ConfigError for an unknown kind, or one that the device cannot run.
    """
    device = shadow_model.get_input_embeddings().weight.device
    chosen = choose_execution(kind, device, compute_dtype(shadow_model))
    is_packed_already = earlier is not None and earlier.num_packed_layers > 0
    if kind != "auto" or chosen != "packed":
        return chosen
    if not is_packed_already and not fits_in_memory(shadow_model, release_originals):
        return "eager"
    has_experts = any(map(is_mixture, shadow_model.modules()))  # layers with experts are not compiled
    linear_layers = chain(packable(shadow_model), layers_in_floats(shadow_model))
    return "compiled" if not has_experts and worth_compiling(linear_layers) else "packed"


Model = TypeVar("Model", bound=nn.Module)

logger = logging.getLogger("foredraft")


class Execution:
    """Runs the forward pass of a shadow. Use `apply_execution` to make one.

    Args:
      model: the shadow; its layers are changed in place.
      kind: "eager", "packed" or "compiled".
    """

    def __init__(self, model: PreTrainedModel, kind: str) -> None:
        self.model = model
        self.kind = kind
        self.uses_grouped_attention = False
        self.compiled: CompiledLayers | None = None
        self.program: NativeProgram | None = None
        self.why_no_program = ""
        self._lacks_kernels = False  # True if it runs eagerly because kernels are missing
        self._recorded: tuple[Recording, Ends] | None = None
        self._pending: Callable[[], None] | None = None  # preparation still to be done before modules run
        self.kernels: Library | None = None
        self._products: list[PackedProduct] = []
        self._cache_argument = cache_argument(model)

    def run(self, **kwargs: Any) -> Any:
        """Run the model's own forward, hooks included; arguments and output are those of `transformers`."""
        return self.model(**kwargs)

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
        """Run nodes (B, N) and return logits (B, kept, V).

        Args:
          kept: node columns whose logits are returned.
          flat: layout of the real nodes as one list; None to run the padded rectangle. In a list only attention sees
            rows.
          listed: return the logits of a list as `NodeLogits`, without padding.
        Raises: NotPassedOnError if the model does not pass the list on to its attention.
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
        logits = output.logits[0, : None if len(kept) else 0]  # a model returns at least one column
        return NodeLogits(logits, of_kept.counts) if listed and len(kept) else of_kept.spread(logits)

    def takes(self, counts: Sequence[int]) -> bool:
        """Return whether rows with these numbers of nodes run in the recorded program, without modules."""
        return self.program is not None and self.program.takes(counts)

    def over(self, model: PreTrainedModel) -> Execution:
        """Return the same execution for another shadow of this model; packed weights stay with this one."""
        other = Execution(model, self.kind)
        for name in ("uses_grouped_attention", "compiled", "kernels", "_recorded"):
            setattr(other, name, getattr(self, name))
        return other

    def record(
        self,
        layers: Sequence[nn.Module],
        windows: Mapping[str, int | None],
        forward: Callable[[int], torch.Tensor],
        context_length: int | None,
        *,
        is_checked: bool = False,
    ) -> None:
        """Record the program that runs forward passes over few nodes without modules, if the model allows it.

        Args:
          layers: decoder layers of the model.
          windows: number of positions that a node sees, by attention type, including its own; None for all.
          forward: function that runs a number of nodes through the modules.
          context_length: number of positions of the model; None for no limit.
          is_checked: True if the same program of the same model was compared with the modules before, so that nothing
            needs to be computed.
        """
        if self.kernels is None or not self.uses_grouped_attention:
            self.why_no_program = "it does not run in the library's own kernels"
            return
        self.why_no_program = self._why_experts_run_elsewhere()
        if self.why_no_program:
            return
        try:
            recording = Recording(layers, forward, of_values=not is_checked)
            programs = [layer_program(recording, layer, index) for index, layer in enumerate(layers)]
            ends = trace_ends(self.model, programs, lambda: forward(NUM_NODES[0]))
            dtype = compute_dtype(self.model)
            program = NativeProgram(self.model, programs, ends, windows, self.kernels, dtype, context_length)
            if not is_checked:
                program.check(recording)
        except Exception as error:  # raised by the model's code or by torch
            self._say_why(error)
            return
        store_traced(programs, ends)
        recording.keep_forms()
        self._recorded = recording, ends
        self.program = program

    def record_variant(
        self, layers: Sequence[nn.Module], of: NativeProgram | None, forward: Callable[[int], torch.Tensor]
    ) -> None:
        """Record the program of a copy of the model in which some modules were changed.

        Args:
          of: program of the unchanged model; None without one.
          forward: function that runs a number of nodes through the modules of the copy.
        """
        self.program = None
        if self._recorded is None or of is None:
            return
        recording, ends = self._recorded
        try:
            programs = [layer_program(recording, layer, index) for index, layer in enumerate(layers)]
            if not of.has_around(self.model, layers):
                ends = trace_ends(self.model, programs, lambda: forward(NUM_NODES[0]))
            self.program = of.over(self.model, programs, ends)
        except Exception as error:
            self._say_why(error)

    def _say_why(self, error: Exception) -> None:
        self.why_no_program = error_with_type(error).strip().splitlines()[0]
        logger.debug("%s runs as modules: %s", type(self.model).__name__, self.why_no_program)

    def compile(self, name: str, layers: Sequence[nn.Module], forward: Callable[[int], torch.Tensor]) -> None:
        """Prepare compilation of the decoder layers; it happens when modules first run. Without effect unless
        "compiled".

        Args:
          name: name of the model, for messages.
          forward: function that runs a number of nodes through the modules.
        """

        def make() -> None:
            if self.compiled is None:
                self._run_activations_by_rows()
                return
            try:
                if not self.uses_grouped_attention:
                    raise NotTraceableError("it has its own attention code")
                recording = Recording(layers, forward)
            except Exception as error:
                self.compiled.fall_back(name, error)
            else:
                self.compiled.build(name, layers, recording)
            if self.compiled.num_compiled < len(layers):
                self._run_activations_by_rows()

        self._pending = make

    def compile_as(self, of: Execution, layers: Sequence[nn.Module]) -> None:
        """Let the unchanged layers of a changed copy use the compiled layers of the original model."""

        def make() -> None:
            of.make_ready()
            if self.compiled is not None:
                self.compiled.attach(layers)

        self._pending = make

    @torch.inference_mode()
    def make_ready(self) -> None:
        """Do the preparation that modules still need before they run, such as compilation."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending()

    def why_not_native(self) -> str:
        """Return the reason why some products do not run in the library's own kernels; empty if all do.

        The structure decides: layer class and dtype. `runs_own_attention` checks attention.
        """
        needs = "the library's own kernels need AVX2, a C++ compiler or a wheel with kernels, and 16 or 32 bit floats"
        if self.kind == "eager":
            return f"it runs eagerly, since {needs}" if self._lacks_kernels else "it runs eagerly"
        if self.kernels is None:
            return needs
        if not self.uses_grouped_attention:
            return "it has its own attention code"
        if path := next((path for path, _ in quantised_layers(self.model)), ""):
            return f"its layers are quantised ({path}, for example)"
        if reason := self._why_experts_run_elsewhere():
            return reason
        if path := other_products(self.model):
            return f"{path} multiplies by its own matrices"
        for layer in linears(self.model):
            packed = replacement(layer)
            if not isinstance(packed, PackedLinear) or not isinstance(packed.product.matrix, PackedMatrix):
                return f"a linear layer in {compute_dtype(self.model)} runs in other kernels"
        return ""

    def _why_experts_run_elsewhere(self) -> str:
        for path, experts in self.model.named_modules():
            if is_mixture(experts) and (reason := why_not_packed(experts)):
                return f"its experts ({path}) run in other kernels, since {reason}"
        return ""

    @property
    def num_compiled(self) -> int:
        """Number of decoder layers that run compiled."""
        return 0 if self.compiled is None else self.compiled.num_compiled

    def refresh_if_stale(self) -> bool:
        """Pack weights again that were written since they were packed; return True if there were any.

        Costs microseconds per layer: call it once per request, not per step. In-place writes are detected by the
        tensors' version counters, replaced storage by its address; writes through ``.data`` are not detected.
        """
        if self.program is not None:
            self.program.look_again()
        has_changed = False
        for product in self._products:
            if not product.is_released and product.refresh():
                has_changed = True
        return has_changed

    @property
    def products(self) -> Sequence[PackedProduct]:
        """Packed matrices."""
        return self._products

    @property
    def num_packed_layers(self) -> int:
        return sum(len(product.layers) for product in self._products)

    @property
    def packed_bytes(self) -> int:
        return sum(product.num_bytes for product in self._products)

    @property
    def bits_per_weight(self) -> float | None:
        """Mean size of a packed weight in bits, scales included; None without packed weights."""
        weights = sum(product.num_weights for product in self._products)
        return 8 * self.packed_bytes / weights if weights else None

    def describe(self) -> str:
        """Return one line that describes the execution."""
        notes = []
        if self._products:
            layers, products = _count(self.num_packed_layers, "layer"), _count(len(self._products), "product")
            notes.append(f"{layers} in {products}, {self.packed_bytes / 1e6:.0f} MB packed")
            own = [each.matrix for each in self._products if isinstance(each.matrix, PackedMatrix)]
            notes += [f"{len(own)} in own {own[0].instruction_set} kernels"] if own else []
        if num_quantised := sum(1 for _ in quantised_layers(self.model)):
            notes.append(f"{num_quantised} quantised layers left as they are")
        notes += ["steps in one call"] if self.program is not None else []
        if self.compiled is not None and (self._pending is None or self.compiled.reason):
            reason = self.compiled.reason
            notes.append(f"{self.num_compiled} decoder layers compiled" + (f", {reason}" if reason else ""))
        elif self.compiled is not None:
            notes.append("layers are compiled for the first long prompt")
        elif not notes and self.kind != "eager":
            notes.append("no layer large enough or of a packable dtype")
        return f"{self.kind} ({'; '.join(notes)})" if notes else self.kind

    def _pack(self, release_originals: bool, earlier: Execution | None) -> None:
        known = {} if earlier is None else {id(product.layers[0].weight): product for product in earlier._products}
        layers = list(packable(self.model))
        found = groups(self.model, layers) if layers else []
        tied = tied_embedding(self.model) if release_originals and self.kernels is not None else None
        if tied is not None and [self.model.get_output_embeddings()] not in found:  # the table stays unpacked
            tied = None
        experts = packable_experts(self.model) if self.kernels is not None else ()
        stacks = {each: stacks_of(each) for each in experts}
        every = [stack for named in stacks.values() for parts in named.values() for stack in parts]
        leaving = make_ready(self.model, chain(*found, every), tied) if release_originals else None

        def packed(layers: Sequence[nn.Module], **options: Any) -> PackedProduct:
            product = PackedProduct(layers, known.get(id(layers[0].weight)), **options)
            self._products.append(product)
            return product

        for group in found:
            packed(group, leaving=leaving).put_in()
        for each, named in stacks.items():
            replace_forward(each, packed_experts(each, named, lambda stack: packed([stack], leaving=leaving)))
        for router in list(routers(self.model)) if self.kernels is not None else ():
            replace_forward(router, PackedRouter(router, packed([router], dtype=torch.float32)))
        if tied is not None:
            read_rows(self.model, tied)

    def _run_activations_by_rows(self) -> None:
        """Make activations in modules row-wise, so that the bits of a row do not depend on the rows beside it."""
        if self.kernels is not None:
            for layer in self.model.modules():
                if replacement(layer) is None and Rowwise.fits(layer):
                    replace_forward(layer, Rowwise(layer.forward))


@torch.inference_mode()
def apply_execution(
    shadow_model: PreTrainedModel,
    kind: str = "auto",
    *,
    release_originals: bool = False,
    cache_dir: Path | str | None = None,
    progress: Callable[[str], None] | None = None,
    earlier: Execution | None = None,
    chosen: str | None = None,
) -> Execution:
    """Make a shadow run in the chosen execution.

    Args:
      shadow_model: a result of `shadow`, or a model that no other code uses; its layers are changed in place.
      kind: "eager", "packed", "compiled" or "auto". With the library's own kernels and enough memory, "auto" compiles
        a large model without experts if a C++ compiler is found, and packs the model otherwise. Without them it runs
        eagerly.
      release_originals: free each weight once it is packed, in every model that shares it. Tied weights stay, except
        for an input embedding, whose rows are then read from the packed output embedding. Only for models that the
        library loaded itself.
      cache_dir: folder for compiled kernels of "compiled"; inductor/ in the cache folder by default.
      progress: function that receives one line before long work of "compiled".
      earlier: execution of another shadow of the same model; its packed weights are reused where they are unchanged.
      chosen: result of `chosen_for` with the same arguments, if it is known.

    Raises: ConfigError for an unknown kind, or one that the device cannot run.
    Exactness: equals eager execution within the rounding of the dtype.
    """
    device = shadow_model.get_input_embeddings().weight.device
    if chosen is None:
        chosen = chosen_for(shadow_model, kind, release_originals=release_originals, earlier=earlier)
    execution = Execution(shadow_model, chosen)
    execution._products += packed_products(shadow_model)
    if execution.kind == "eager":
        execution._lacks_kernels = kind == "auto" and device.type == "cpu" and not packs(compute_dtype(shadow_model))
        # on a CPU eager attention stays that of transformers, the reference for the other executions
        execution.uses_grouped_attention = device.type != "cpu" and use_grouped_sdpa(shadow_model)
        return execution
    execution.kernels = library() if compute_dtype(shadow_model) in KINDS else None
    execution.uses_grouped_attention = use_grouped_sdpa(shadow_model)
    execution._pack(release_originals, earlier)
    if execution.kind == "compiled":
        execution.compiled = CompiledLayers(cache_dir, progress)
    return execution


def _count(number: int, of: str) -> str:
    return f"{number} {of}{'s' * (number != 1)}"
