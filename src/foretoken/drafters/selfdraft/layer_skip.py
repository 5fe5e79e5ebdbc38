"""Drafting with some of the target's own layers left out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from foretoken.config.drafting import draft_length
from foretoken.config.method import Method
from foretoken.config.options import one_of, option, text, whole, whole_numbers
from foretoken.drafters.lengths.options import length_policy
from foretoken.drafters.parts.growth_options import GrowthOptions
from foretoken.drafters.parts.layer_set import LayerSet, skipping
from foretoken.drafters.parts.self_draft import SelfDrafter
from foretoken.errors import ConfigError

if TYPE_CHECKING:
    from foretoken.drafters.materials import Materials
    from foretoken.engine.model import CausalLM


@dataclass(frozen=True, kw_only=True)
class LayerSetOptions(GrowthOptions):
    """Which layers are left out, in one of several ways to say it."""

    layer_set: str | None = option(text(), help="file that foretoken tune layer-skip wrote")
    skipped_attention: tuple[int, ...] | None = option(whole_numbers(), help="layers whose attention is left out")
    skipped_mlp: tuple[int, ...] | None = option(whole_numbers(), help="layers whose MLP is left out")

    @property
    def num_ways(self) -> int:
        """In how many ways the options say what is left out."""
        by_index = self.skipped_attention is not None or self.skipped_mlp is not None
        return (self.layer_set is not None) + by_index

    def check(self) -> None:
        super().check()
        if self.num_ways > 1:
            raise ConfigError("layer_set, exit_layer and skipped_attention / skipped_mlp exclude each other; give one")

    def given_set(self, num_layers: int) -> LayerSet | None:
        """The layer set that is given, for a model of so many layers."""
        if self.layer_set is not None:
            return LayerSet.load(self.layer_set)
        if self.num_ways:
            return LayerSet(self.skipped_attention or (), self.skipped_mlp or ())
        return None


@dataclass(frozen=True, kw_only=True)
class LayerSkipOptions(LayerSetOptions):
    """Keys of drafting with fewer layers."""

    method: ClassVar[str] = "layer_skip"
    num_speculative_tokens: int = draft_length(8)
    length_policy: str = length_policy("acceptance")
    exit_layer: int | None = option(whole(1), help="everything from this layer on is left out")
    layer_search: str | None = option(
        one_of(("swift",)), help="swift looks for a better set while decoding, from the given one or its own"
    )

    @property
    def num_ways(self) -> int:
        return super().num_ways + (self.exit_layer is not None)

    def given_set(self, num_layers: int) -> LayerSet | None:
        return (
            LayerSet.exit_at(self.exit_layer, num_layers)
            if self.exit_layer is not None
            else super().given_set(num_layers)
        )


class LayerSkipDrafter(SelfDrafter):
    """Drafts with the target, some attention and MLP sublayers left out.

    Source: Draft & Verify (Zhang et al. 2023, arXiv:2309.08168); early exit as in LayerSkip (Elhoushi et al. 2024,
    arXiv:2404.16710), without its training.

    Args:
      layer_set: what is left out.
      options: see `SelfDrafter`.

    Exactness, randomness: as of `SelfDrafter`.
    """

    name = "layer_skip"

    def __init__(self, layer_set: LayerSet, **options: Any) -> None:
        super().__init__(**options)
        self.layer_set = layer_set

    def _variant(self, target: CausalLM) -> CausalLM:
        return skipping(target, self.layer_set)


def build(options: LayerSkipOptions, materials: Materials) -> LayerSkipDrafter:
    """Leaves out what is given, what a target of the zoo brings along, or what a search finds."""
    from foretoken.drafters.parts.swift import SwiftDrafter, SwiftSearch
    from foretoken.engine.sublayers import Sublayers

    target = materials.target
    for layer in target.layers:
        Sublayers.of(layer)  # refuses layers of another build now
    layer_set, brought = options.given_set(target.num_layers), materials.asset("layer_set")
    if layer_set is None and brought is not None and options.layer_search is None:
        layer_set = LayerSet.load(brought)
    if layer_set is not None:
        layer_set.check(target.num_layers, target.name)
    if options.layer_search is not None:
        SwiftSearch(target.num_layers, layer_set)  # refuses now what it cannot begin with
        return SwiftDrafter(layer_set, **options.growth(target.vocab_size))
    if layer_set is None:
        raise ConfigError(
            f"method 'layer_skip' needs to know what to leave out{materials.brings_none}; give layer_set=FILE (from "
            "foretoken tune layer-skip), skipped_attention and skipped_mlp, exit_layer, or layer_search='swift'"
        )
    return LayerSkipDrafter(layer_set, **options.growth(target.vocab_size))


METHOD = Method(
    LayerSkipOptions,
    build,
    summary="with the target itself, some of its layers left out",
    aliases=("draft_and_verify", "self_speculative", "early_exit"),
)
