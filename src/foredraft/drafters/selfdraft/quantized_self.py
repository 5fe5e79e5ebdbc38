"""Drafting with a 4-bit copy of the target's own linears.

Source: QSpec (Zhao et al. 2024, arXiv:2410.11305); ML-SpecQD (Georganas et al. 2025, arXiv:2503.13565). Verification
replaces what drafts have left in the target's cache.
"""

from __future__ import annotations

from foredraft.drafters.context import DrafterContext
from foredraft.drafters.parts.layer_set import LayerSet
from foredraft.drafters.parts.self_draft import SelfDrafter
from foredraft.errors import ConfigError
from foredraft.methods.selfdraft import QuantizedSelfOptions
from foredraft.model.execution.rounding import quantizable

LEAST_BITS = 7.0
"""Of the stored weights of a target, scales included: with fewer a copy of 4 bits would cost as much."""


def build(options: QuantizedSelfOptions, context: DrafterContext) -> SelfDrafter:
    """Refuses at once what cannot be quantised; the 4-bit weights are made when the engine binds the drafter."""
    target = context.target
    bits = target.execution.bits_per_weight or LEAST_BITS
    if target.quantization == "int4" or (target.quantization == "stored" and bits < LEAST_BITS):
        raise ConfigError(
            "the target has 4-bit weights already, so its 4-bit copy would cost as much; use ngram or auto"
        )
    quantizable(target.execution.model, options.quantization_group_size, with_head=options.quantize_head)
    return SelfDrafter(
        options.method,
        group_size=options.quantization_group_size,
        with_head=options.quantize_head,
        layer_set=LayerSet.given(options, target.num_layers),
        **options.growth(target.vocab_size),
    )
