"""Drafting with a 4-bit copy of the target's own linears."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from foretoken.drafters.layer_skip import LayerSet, run_once
from foretoken.drafters.self_draft import SelfDrafter
from foretoken.engine.model import CausalLM
from foretoken.engine.quantize import quantize_linears
from foretoken.engine.sublayers import SkippableLayers


class QuantizedSelfDrafter(SelfDrafter):
    """Drafts with the target over 4-bit weights, in the target's cache, whose draft entries verification replaces.

    Source: QSpec (Zhao et al. 2024, arXiv:2410.11305); ML-SpecQD (Georganas et al. 2025, arXiv:2503.13565).

    Args:
      group_size: inputs that share a scale and a zero point.
      with_head: whether the output embedding is quantised, too; see `quantize_linears`.
      layer_set: sublayers that are left out besides.
      options: see `SelfDrafter`.

    Exactness, randomness: as of `SelfDrafter`; the target itself keeps its weights.
    """

    name = "quantized_self"

    def __init__(
        self, *, group_size: int = 32, with_head: bool = False, layer_set: LayerSet | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        self.group_size = group_size
        self.with_head = with_head
        self.layer_set = layer_set or LayerSet()

    def _variant(self, target: CausalLM) -> CausalLM:
        return quantized(target, self.group_size, self.layer_set, with_head=self.with_head)


def quantized(target: CausalLM, group_size: int, layer_set: LayerSet, *, with_head: bool = False) -> CausalLM:
    """A variant of the target over 4-bit weights, without some sublayers.

    Raises: ConfigError when no linear of the target can be quantised in such groups.
    """
    layer_set.check(target.num_layers, target.name)

    def edit(variant: CausalLM, model: PreTrainedModel) -> None:
        quantize_linears(model, group_size, with_head=with_head)
        if len(layer_set):
            SkippableLayers(variant.layers, lambda: run_once(variant)).leave_out(layer_set.attention, layer_set.mlp)

    return target.variant("4-bit", edit)
