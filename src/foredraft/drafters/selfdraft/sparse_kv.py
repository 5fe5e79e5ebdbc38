"""Drafting over a part of a cache that does not grow with the context: the target's cache, or a smaller model's.

A draft costs as much at the end of a long document as at its beginning. The target verifies over all columns. The gain
grows with the context length and the number of rows, as keys and values outweigh the weights, which drafts read, too.

Source: MagicDec (Sadhukhan et al. 2024, arXiv:2408.11049); see `SparseView` for the selections."""

from __future__ import annotations

from foredraft.drafters.context import DrafterContext
from foredraft.drafters.lm.draft_model import DraftModelDrafter
from foredraft.drafters.parts.layer_set import LayerSet
from foredraft.drafters.parts.self_draft import SelfDrafter
from foredraft.drafters.parts.sparse_view import SparseView
from foredraft.errors import ConfigError
from foredraft.methods.selfdraft import SNAPKV, SparseKVOptions
from foredraft.model.execution.rounding import quantizable
from foredraft.model.sublayers import sublayers
from foredraft.model.votes import SnapKVScorer

USUAL_ACCEPTANCE = 0.85
"""Typical acceptance rate. Measured with 256 columns of rows of 1,024 to 7,168 tokens: 0.92 at the first draft token,
0.77 to 0.86 at later ones."""


def build(options: SparseKVOptions, context: DrafterContext) -> SelfDrafter | DraftModelDrafter:
    """Make the drafter after checking that the model supports the options: scoring columns, skipping layers, 4-bit
    weights.
    """
    target, model = context.target, context.draft_model
    if options.model is not None and model is None:
        raise ConfigError(
            "method 'sparse_kv' names a draft model that is not loaded; leave model out to draft with the target"
        )
    if options.kv_selector == SNAPKV:
        SnapKVScorer(target if options.model is None or model is None else model)
    if options.model is not None and model is not None:
        view = SparseView.of(options)
        return DraftModelDrafter(model, view=view, name=options.method, **options.growth(target.vocab_size))
    layer_set = LayerSet.given(options, target.num_layers)
    if layer_set is not None:
        for layer in target.layers:
            sublayers(layer)
        layer_set.check(target.num_layers, target.name)
    if options.quantize_draft:
        quantizable(target.execution.model, options.quantization_group_size)
    return SelfDrafter(
        options.method,
        layer_set=layer_set,
        group_size=options.quantization_group_size if options.quantize_draft else None,
        view=SparseView.of(options),
        usual_acceptance=USUAL_ACCEPTANCE,
        **options.growth(target.vocab_size),
    )
