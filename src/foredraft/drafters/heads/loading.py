"""Loading of heads, and of the static trees for heads that draft in one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence, Set
from typing import Any, TypeVar

from torch import nn

from foredraft import zoo
from foredraft.config.drafting import ModelOptions
from foredraft.drafters.context import DrafterContext
from foredraft.errors import CheckpointError, ConfigError
from foredraft.heads.checkpoint import Checkpoint, read_checkpoint
from foredraft.heads.layers import MLP, Attention
from foredraft.methods import methods, recognized_in
from foredraft.methods.heads import HeadOptions
from foredraft.methods.rank_tree import RankTree
from foredraft.model.execution import forwards, packing, rounding
from foredraft.model.lm import CausalLM
from foredraft.model.support import check_width

DEFAULT_NODES = {"float32": 8, "half": 16, "accelerator": 64}
"""Default number of nodes of a tree, root included: as many as are cheap to verify.

On a CPU, a forward pass over 16 tokens takes 1.1 to 1.5 times as long as one over a single token, and a forward pass
over 64 tokens takes two to three times as long (docs/methods/token_recycling.md).
"""


def static_tree(options: HeadOptions, target: CausalLM, accuracies: list[list[float]], num_heads: int) -> RankTree:
    """Return the static tree for drafting.

    Args:
      options: options with the configured tree, if any.
      target: target of the drafter.
      accuracies: typical accuracies of such heads, for the default tree.
      num_heads: largest depth that the heads can draft.

    Raises: ConfigError for a tree that is deeper than the number of heads, or has more siblings than the vocabulary.
    """
    if options.speculative_token_tree is None:
        most_nodes = options.max_draft_nodes or default_nodes(target)
        return RankTree.grown(accuracies[:num_heads], most_nodes, name="default")
    given = RankTree.parse(options.speculative_token_tree)
    if given.depth > num_heads:
        raise ConfigError(
            f"the tree {given.name!r} is {given.depth} levels deep, and there are {num_heads} heads, one per "
            "level; choose a shallower tree, or leave speculative_token_tree out"
        )
    widest = max(path[-1] for path in given.paths) + 1
    if widest > target.vocab_size:
        raise ConfigError(
            f"the tree {given.name!r} has {widest} siblings, and the vocabulary has {target.vocab_size} tokens; choose "
            "a narrower tree"
        )
    return given


def default_nodes(target: CausalLM) -> int:
    """Return the default number of nodes of a tree, root included."""
    if target.device.type != "cpu":
        return DEFAULT_NODES["accelerator"]
    return DEFAULT_NODES["half" if target.dtype.itemsize == 2 else "float32"]


Head = TypeVar("Head", bound=nn.Module)

logger = logging.getLogger("foredraft")


def load_head(
    options: ModelOptions,
    context: DrafterContext,
    kind: type[Head],
    read: Callable[[Checkpoint], tuple[Head, Sequence[str]]],
    published: Sequence[str] = (),
) -> Head:
    """Return the head that a config names, loaded once and kept for later drafters.

    Args:
      options: options of a method whose ``model`` is a head: a folder, a hub id, ``zoo:NAME`` for the head of a zoo
        model, or a loaded head. Without ``model``, the head that is included with a zoo target is used.
      context: target of the drafter, and kept objects.
      kind: class of loaded heads.
      read: function that makes a head from a checkpoint, and returns notes on errors in its config.
      published: hub ids of heads for targets of this size, for messages.

    Raises: ConfigError if no head is named, or a loaded one is on another device or in another dtype than the target;
    CheckpointError for a checkpoint that does not fit; UnsupportedModelError for a target that no head fits.
    """
    target, given, method = context.target, options.model, options.method
    check_width(target.name, target.shadow)
    if given is None:
        given = context.asset(methods()[method].head)
    elif isinstance(given, str) and given.startswith(zoo.PREFIX):
        given = zoo.asset(given, methods()[method].head)
    if given is None:
        known = f"; published for targets of this size: {', '.join(published)}" if published else ""
        raise ConfigError(
            f"method {method!r} needs a head that was trained for this target{context.without_asset}; set model to a "
            f"folder or hub id{known}"
        )
    if options.dtype is not None and str(options.dtype).removeprefix("torch.") != name_of(target):
        raise ConfigError(
            f"dtype is {options.dtype!r}, and a head runs in that of its target, {name_of(target)}; leave dtype out"
        )
    if isinstance(given, kind):
        if options.quantization is not None:
            raise ConfigError(
                f"quantization is {options.quantization!r}, but the head is loaded already, and its weights belong to "
                "you; give its folder, or leave quantization out"
            )
        parameter = next(given.parameters())
        if (parameter.dtype, parameter.device) != (target.dtype, target.device):
            raise ConfigError(
                f"the head is in {parameter.dtype} on {parameter.device}, and its target is in {target.dtype} on "
                f"{target.device}; convert it with head.to(...)"
            )
        return given
    if not isinstance(given, str) and not hasattr(given, "__fspath__"):
        raise ConfigError(
            f"model is a {type(given).__name__}, and method {method!r} needs a head; give a folder, a hub id or a "
            f"{kind.__name__}"
        )
    key = kind.__name__, str(given), options.revision, options.quantization
    return context.keep(key, lambda: _loaded(given, options, target, read))


def _loaded(
    given: Any, options: ModelOptions, target: CausalLM, read: Callable[[Checkpoint], tuple[Head, Sequence[str]]]
) -> Head:
    if options.quantization is not None and target.execution.kind == "eager":
        raise ConfigError(
            f"quantization is {options.quantization!r}, but the heads of a model that runs eagerly run in torch, which "
            "does not multiply by integers; leave it out, or use execution='packed'"
        )
    found = read_checkpoint(given, options.revision)
    check_kind(found, options.method)
    check_sizes(found)
    head, notes = read(found)
    num_parameters = sum(parameter.numel() for parameter in head.parameters())
    head = head.to(device=target.device, dtype=target.dtype).eval()
    for parameter in head.parameters():
        parameter.requires_grad_(False)
    if target.execution.kind != "eager":
        pack(head, options.quantization)
    level = logging.DEBUG if options.model is None else logging.INFO  # an included head is in the load line
    logger.log(
        level, "%s: loaded a head of %.1f M parameters for method %s", found.name, num_parameters / 1e6, options.method
    )
    for note in notes:
        logger.info("%s: %s", found.name, note)
    return head


def check_sizes(found: Checkpoint) -> None:
    """Check that no tensor is empty or a single number, because no layer has such tensors.

    Raises: CheckpointError, naming the tensors.
    """
    odd = [name for name, shape in found.shapes.items() if 0 in shape or not shape]
    if odd:
        shown = ", ".join(odd[:3]) + (f" and {len(odd) - 3} more" if len(odd) > 3 else "")
        raise CheckpointError(
            f"{found.name} is damaged: these tensors are empty or a single number: {shown}; download it again"
        )


def check_kind(found: Checkpoint, method: str) -> None:
    """Check that a head is of the method's kind; a head that no method recognizes is left to the layout's reader.

    Raises: ConfigError, naming the method of the head.
    """
    known = recognized_in(found.config, frozenset(found.tensors))
    if known is not None and known.head != methods()[method].head:
        raise ConfigError(
            f"{found.name} contains {known.head!r} heads, and method {method!r} needs {methods()[method].head!r} "
            f"heads; use method {known.name!r}, or other heads"
        )


OUTPUTS = ("lm_head", "lm_heads")
"""Names of the output layers of heads."""


def pack(head: nn.Module, quantization: str | None = None) -> None:
    """Run the linear layers of a head in the library's native kernels, as the target's are, unless they are shared
    elsewhere.

    Layers with the same input become one product, which reads the input in one call.

    Args:
      quantization: "int8" or "int4" to round the layers, output layers to 8 bits; None for no rounding.

    Raises: ConfigError for a layer that cannot be rounded.
    """
    packable = set(packing.packable(head))
    together: list[Sequence[nn.Module]] = []
    for module in head.modules():
        if isinstance(module, (Attention, MLP)):
            together.append(module.sharing_input)
    shared = {layer for group in together for layer in group}
    groups = [*together, *([layer] for layer in head.modules() if layer not in shared)]
    if quantization is not None:
        _check_roundable(head, packable)
    outputs = {layer for name, child in head.named_children() if name in OUTPUTS for layer in child.modules()}
    for group in groups:
        if packable.issuperset(group):
            bits = "int8" if outputs.issuperset(group) else quantization
            codes = None if quantization is None or bits is None else rounding.rounder(rounding.ROUNDINGS[bits])
            product = packing.PackedProduct(group, codes=codes)
            for index, layer in enumerate(group):
                forwards.replace_forward(layer, packing.PackedLinear(product, index))
            product.release()


def _check_roundable(head: nn.Module, packable: Set[nn.Module]) -> None:
    """Raise ConfigError if a linear layer of a head runs in other code than the library's own kernels."""
    linears = ((path, layer) for path, layer in head.named_modules() if isinstance(layer, nn.Linear))
    path = next((path for path, layer in linears if layer not in packable), None)
    if path is not None:
        raise ConfigError(
            f"quantization cannot round the layer {path} of this head, which does not run in the library's own "
            "kernels; leave quantization out"
        )


def name_of(target: CausalLM) -> str:
    """Return the name of the target's dtype, such as ``bfloat16``."""
    return str(target.dtype).removeprefix("torch.")
