"""Drafting with 4-bit copies of the target's own linear layers.

Source: QSpec (Zhao et al. 2024, arXiv:2410.11305); ML-SpecQD (Georganas et al. 2025, arXiv:2503.13565). Verification
overwrites the columns of drafts in the target's cache."""

from __future__ import annotations

from foredraft.drafters.context import DrafterContext
from foredraft.drafters.parts.layer_set import LayerSet
from foredraft.drafters.parts.self_draft import SelfDrafter
from foredraft.errors import ConfigError
from foredraft.methods.selfdraft import QuantizedSelfOptions
from foredraft.model.execution.rounding import quantizable

LEAST_BITS = 7.0
"""Fewest bits per stored weight of a target, scales included, at which a 4-bit copy is still cheaper to read."""


def build(options: QuantizedSelfOptions, context: DrafterContext) -> SelfDrafter:
    """Make the drafter after checking that the target can be quantised; the 4-bit weights are made when the engine
    binds it.
    """
    target = context.target
    bits = target.execution.bits_per_weight or LEAST_BITS
    if target.quantization == "int4" or (target.quantization == "stored" and bits < LEAST_BITS):
        raise ConfigError(
            "method 'quantized_self' gains nothing: the target has 4-bit weights already, so a 4-bit copy would cost "
            "as much to read; use ngram or auto"
        )
    quantizable(target.execution.model, options.quantization_group_size, with_head=options.quantize_head)
    return SelfDrafter(
        options.method,
        group_size=options.quantization_group_size,
        with_head=options.quantize_head,
        layer_set=LayerSet.given(options, target.num_layers),
        **options.growth(target.vocab_size),
    )
