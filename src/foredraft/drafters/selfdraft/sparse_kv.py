"""Drafting over a part of a cache that does not grow with the text: the target's own, or a smaller model's.

A draft costs as much at the end of a long document as at its beginning; the target verifies over all columns. What it
gains grows with the length of the text and the number of rows, as keys and values come to weigh more than the weights
that drafts read as well.

Source: MagicDec (Sadhukhan et al. 2024, arXiv:2408.11049); see `SparseView` for the selections.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from foredraft.config.drafting import ModelOptions, draft_length
from foredraft.config.method import Method
from foredraft.config.options import flag, option, whole
from foredraft.drafters.lm.draft_model import DraftModelDrafter
from foredraft.drafters.parts.self_draft import SelfDrafter
from foredraft.drafters.parts.sparse_view import SNAPKV, SparseView, ViewOptions
from foredraft.drafters.selfdraft.layer_skip import LayerSetOptions
from foredraft.errors import ConfigError
from foredraft.lazy import Lazy

if TYPE_CHECKING:
    from foredraft.drafters.context import DrafterContext
    from foredraft.model import sublayers, votes
    from foredraft.model.execution import rounding
else:
    rounding = Lazy("foredraft.model.execution.rounding")
    sublayers = Lazy("foredraft.model.sublayers")
    votes = Lazy("foredraft.model.votes")


@dataclass(frozen=True, kw_only=True)
class SparseKVOptions(ViewOptions, LayerSetOptions, ModelOptions):
    """Keys of drafting over a part of the cache."""

    method: ClassVar[str] = "sparse_kv"
    num_speculative_tokens: int = draft_length(3)
    quantize_draft: bool = option(flag(), False, "draft over 4-bit copies of the weights, too, as quantized_self does")
    quantization_group_size: int = option(whole(1), 32, "inputs that share a scale in the 4-bit weights")

    def check(self) -> None:
        super().check()
        if self.model is not None and (self.quantize_draft or self.num_ways):
            raise ConfigError(
                "quantize_draft, layer_set and skipped_attention / skipped_mlp make a drafter of the target, and model "
                "names another one; leave out one or the other"
            )


USUAL_ACCEPTANCE = 0.85
"""With 256 columns of texts of 1,024 to 7,168 tokens: 0.92 at the first token, 0.77 to 0.86 at later ones."""


def build(options: SparseKVOptions, context: DrafterContext) -> SelfDrafter | DraftModelDrafter:
    """Refuses at once what the model cannot do: votes, layers that are left out, 4-bit weights."""
    target, model = context.target, context.draft_model
    if options.model is not None and model is None:
        raise ConfigError(
            "method 'sparse_kv' was given a model that is not loaded; leave model out to draft with the target"
        )
    if options.kv_selector == SNAPKV:
        votes.SnapKVScorer(target if options.model is None or model is None else model)
    if options.model is not None and model is not None:
        view = SparseView.of(options)
        return DraftModelDrafter(model, view=view, name=options.method, **options.growth(target.vocab_size))
    layer_set = options.given_set(target.num_layers)
    if layer_set is not None:
        for layer in target.layers:
            sublayers.Sublayers.of(layer)
        layer_set.check(target.num_layers, target.name)
    if options.quantize_draft:
        rounding.quantizable(target.execution.model, options.quantization_group_size)
    return SelfDrafter(
        options.method,
        layer_set=layer_set,
        group_size=options.quantization_group_size if options.quantize_draft else None,
        view=SparseView.of(options),
        usual_acceptance=USUAL_ACCEPTANCE,
        **options.growth(target.vocab_size),
    )


METHOD = Method(
    SparseKVOptions,
    build,
    summary="with the target itself, or a smaller model, over a small part of its own cache",
    aliases=("magicdec", "streaming_kv"),
    model_is_optional=True,
)
