"""Drafting with a 4-bit copy of the target's own linears."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from foretoken.config.drafting import draft_length
from foretoken.config.method import Method
from foretoken.config.options import flag, option, whole
from foretoken.drafters.parts.layer_set import LayerSet, leave_out
from foretoken.drafters.parts.self_draft import SelfDrafter
from foretoken.drafters.selfdraft.layer_skip import LayerSetOptions
from foretoken.errors import ConfigError
from foretoken.lazy import Lazy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from foretoken.drafters.context import DrafterContext
    from foretoken.model import quantize
    from foretoken.model.lm import CausalLM
else:
    quantize = Lazy("foretoken.model.quantize")

LEAST_BITS = 7.0
"""Of the stored weights of a target, scales included: with fewer a copy of 4 bits would cost as much."""


@dataclass(frozen=True, kw_only=True)
class QuantizedSelfOptions(LayerSetOptions):
    """Keys of drafting over 4-bit weights."""

    method: ClassVar[str] = "quantized_self"
    num_speculative_tokens: int = draft_length(3)
    quantization_group_size: int = option(whole(1), 32, "inputs that share a scale in the 4-bit weights")
    quantize_head: bool = option(
        flag(), False, "quantise the output embedding to 4 bits, too: cheaper, but less agreement"
    )


def quantized_self_drafter(
    *,
    group_size: int = QuantizedSelfOptions.quantization_group_size,
    with_head: bool = QuantizedSelfOptions.quantize_head,
    layer_set: LayerSet | None = None,
    **options: Any,
) -> SelfDrafter:
    """Drafts with the target over 4-bit weights, in the target's cache, whose draft entries verification replaces.

    Source: QSpec (Zhao et al. 2024, arXiv:2410.11305); ML-SpecQD (Georganas et al. 2025, arXiv:2503.13565).

    Args:
      group_size: inputs that share a scale and a zero point.
      with_head: whether the output embedding is quantised, too; see `quantize_linears`.
      layer_set: sublayers that are left out besides.
      options: see `SelfDrafter`.

    Exactness, randomness: as of `SelfDrafter`; the target itself keeps its weights.
    """

    def variant(target: CausalLM) -> CausalLM:
        return quantized(target, group_size, layer_set or LayerSet(), with_head=with_head)

    return SelfDrafter(QuantizedSelfOptions.method, variant, **options)


def quantized(target: CausalLM, group_size: int, layer_set: LayerSet, *, with_head: bool = False) -> CausalLM:
    """A variant of the target over 4-bit weights, without some sublayers.

    Raises: ConfigError when no linear of the target can be quantised in such groups.
    """
    layer_set.check(target.num_layers, target.name)

    def edit(variant: CausalLM, model: PreTrainedModel) -> None:
        quantize.quantize_linears(model, group_size, with_head=with_head)
        if len(layer_set):
            leave_out(variant, layer_set)

    return target.variant("4-bit", edit)


def build(options: QuantizedSelfOptions, context: DrafterContext) -> SelfDrafter:
    """Refuses at once what cannot be quantised; the 4-bit weights are made when the engine binds the drafter."""
    target = context.target
    bits = target.execution.bits_per_weight or LEAST_BITS
    if target.quantization == "int4" or (target.quantization == "stored" and bits < LEAST_BITS):
        raise ConfigError(
            "the target has 4-bit weights already, so its 4-bit copy would cost as much; use ngram or auto"
        )
    quantize.quantizable(target.execution.model, options.quantization_group_size, with_head=options.quantize_head)
    return quantized_self_drafter(
        group_size=options.quantization_group_size,
        with_head=options.quantize_head,
        layer_set=options.given_set(target.num_layers),
        **options.growth(target.vocab_size),
    )


METHOD = Method(QuantizedSelfOptions, build, summary="with the target itself over 4-bit weights", aliases=("qspec",))
