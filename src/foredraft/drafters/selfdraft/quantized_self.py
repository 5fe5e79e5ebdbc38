"""Drafting with a 4-bit copy of the target's own linears.

Source: QSpec (Zhao et al. 2024, arXiv:2410.11305); ML-SpecQD (Georganas et al. 2025, arXiv:2503.13565). Verification
replaces what drafts have left in the target's cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from foredraft.config.drafting import draft_length
from foredraft.config.method import Method
from foredraft.config.options import flag, option, whole
from foredraft.drafters.parts.self_draft import SelfDrafter
from foredraft.drafters.selfdraft.layer_skip import LayerSetOptions
from foredraft.errors import ConfigError
from foredraft.lazy import Lazy

if TYPE_CHECKING:
    from foredraft.drafters.context import DrafterContext
    from foredraft.model.execution import rounding
else:
    rounding = Lazy("foredraft.model.execution.rounding")

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


def build(options: QuantizedSelfOptions, context: DrafterContext) -> SelfDrafter:
    """Refuses at once what cannot be quantised; the 4-bit weights are made when the engine binds the drafter."""
    target = context.target
    bits = target.execution.bits_per_weight or LEAST_BITS
    if target.quantization == "int4" or (target.quantization == "stored" and bits < LEAST_BITS):
        raise ConfigError(
            "the target has 4-bit weights already, so its 4-bit copy would cost as much; use ngram or auto"
        )
    rounding.quantizable(target.execution.model, options.quantization_group_size, with_head=options.quantize_head)
    return SelfDrafter(
        options.method,
        group_size=options.quantization_group_size,
        with_head=options.quantize_head,
        layer_set=options.given_set(target.num_layers),
        **options.growth(target.vocab_size),
    )


METHOD = Method(QuantizedSelfOptions, build, summary="with the target itself over 4-bit weights", aliases=("qspec",))
