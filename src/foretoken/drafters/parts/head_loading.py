"""From what a config names to a head in memory, in the dtype and on the device of its target."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any, TypeVar

from foretoken.config.method import Contents, methods, recognized_in
from foretoken.errors import CheckpointError, ConfigError
from foretoken.lazy import Lazy

if TYPE_CHECKING:
    from torch import nn

    import foretoken.heads.checkpoint as checkpoint
    import foretoken.heads.layers as layers
    import foretoken.model.capture as capture
    import foretoken.model.execution.forwards as forwards
    import foretoken.model.execution.packing as packing
    from foretoken.config.drafting import ModelOptions
    from foretoken.drafters.context import DrafterContext
    from foretoken.heads.checkpoint import Checkpoint
    from foretoken.model.lm import CausalLM
else:
    checkpoint = Lazy("foretoken.heads.checkpoint")
    layers = Lazy("foretoken.heads.layers")
    capture = Lazy("foretoken.model.capture")
    forwards = Lazy("foretoken.model.execution.forwards")
    packing = Lazy("foretoken.model.execution.packing")

Head = TypeVar("Head", bound="nn.Module")

logger = logging.getLogger("foretoken")


def load_head(
    options: ModelOptions,
    context: DrafterContext,
    kind: type[Head],
    read: Callable[[Checkpoint], tuple[Head, Seq[str]]],
    published: Seq[str] = (),
) -> Head:
    """The head that a config names; loaded once, and kept for the drafters to come.

    Args:
      options: of a method whose ``model`` is a head: a folder, a hub id or a loaded one; without one, the head that a
        target of the zoo brings along is taken.
      kind: the class of loaded ones.
      read: makes the head of a checkpoint, and says where its config was wrong.
      published: hub ids of heads for targets of this size.

    Raises: ConfigError where none is named, or a loaded one does not fit the target's device or dtype; CheckpointError
      for a checkpoint that does not fit; UnsupportedModelError for a target that no head fits.
    """
    target, given, method = context.target, options.model, options.method
    capture.check_width(target.name, target.shadow)
    if given is None:
        given = context.asset(methods()[method].head)
    if given is None:
        known = f"; published for targets of this size: {', '.join(published)}" if published else ""
        raise ConfigError(
            f"method {method!r} needs a head that was trained for this target{context.brings_none}; give model, a "
            f"folder or hub id{known}"
        )
    if options.dtype is not None and str(options.dtype).removeprefix("torch.") != name_of(target):
        raise ConfigError(f"dtype is {options.dtype!r}, and a head runs in that of its target, {name_of(target)}")
    if isinstance(given, kind):
        parameter = next(given.parameters())
        if (parameter.dtype, parameter.device) != (target.dtype, target.device):
            raise ConfigError(
                f"the head is {parameter.dtype} on {parameter.device}, and its target {target.dtype} on "
                f"{target.device}; move it with head.to(...)"
            )
        return given
    if not isinstance(given, str) and not hasattr(given, "__fspath__"):
        raise ConfigError(
            f"model is {type(given).__name__}, and method {method!r} drafts with a head; give a folder, a hub id or a "
            f"{kind.__name__}"
        )
    return context.keep((kind.__name__, str(given), options.revision), lambda: _loaded(given, options, target, read))


def _loaded(
    given: Any, options: ModelOptions, target: CausalLM, read: Callable[[Checkpoint], tuple[Head, Seq[str]]]
) -> Head:
    found = checkpoint.read_checkpoint(given, options.revision)
    check_kind(found, options.method)
    check_sizes(found)
    head, notes = read(found)
    num_parameters = sum(parameter.numel() for parameter in head.parameters())
    head = head.to(device=target.device, dtype=target.dtype).eval()
    for parameter in head.parameters():
        parameter.requires_grad_(False)
    if target.execution.kind != "eager":
        pack(head)
    level = logging.DEBUG if options.model is None else logging.INFO  # one on board is in the load line
    logger.log(level, "%s: a head of %.1f M parameters for method %s", found.name, num_parameters / 1e6, options.method)
    for note in notes:
        logger.info("%s: %s", found.name, note)
    return head


def check_sizes(found: Checkpoint) -> None:
    """Refuse tensors that no layer has: those of no number, and of one without a dimension.

    Raises: CheckpointError, naming them.
    """
    odd = [name for name, shape in found.shapes.items() if 0 in shape or not shape]
    if odd:
        shown = ", ".join(odd[:3]) + (f" and {len(odd) - 3} more" if len(odd) > 3 else "")
        raise CheckpointError(f"tensors of {found.name} are empty or a single number: {shown}; download it again")


def check_kind(found: Checkpoint, method: str) -> None:
    """Refuse a head of another kind than the method drafts with; what no method knows is left to the layout's reader.

    Raises: ConfigError, naming the method of that head.
    """
    known = recognized_in(Contents(found.config, frozenset(found.tensors)))
    if known is not None and known.head != methods()[method].head:
        raise ConfigError(
            f"{found.name} holds heads of {known.head!r}, and method {method!r} drafts with those of "
            f"{methods()[method].head!r}; use method {known.name!r}, or name other heads"
        )


def pack(head: nn.Module) -> None:
    """Run the linear layers of a head that nobody else holds through oneDNN, as those of the target are.

    Layers that are given the same tensor become one product, which reads them in one call.
    """
    packable = set(packing.packable(head))
    together: list[Seq[nn.Module]] = []
    for module in head.modules():
        if isinstance(module, (layers.Attention, layers.MLP)):
            together.append(module.sharing_input)
    shared = {layer for group in together for layer in group}
    groups = [*together, *([layer] for layer in head.modules() if layer not in shared)]
    for group in groups:
        if packable.issuperset(group) and packing.worth_packing(group):
            product = packing.PackedProduct(group)
            for index, layer in enumerate(group):
                forwards.replace_forward(layer, packing.PackedLinear(product, index))
            product.release()


def name_of(target: CausalLM) -> str:
    """``torch.bfloat16`` -> ``bfloat16``."""
    return str(target.dtype).removeprefix("torch.")
